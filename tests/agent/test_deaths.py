"""Trainer and agent may die at any moment.

No torn step is listed, what was committed in memory becomes durable if the agent lives, and the
next trainer goes on.
"""

from __future__ import annotations

from pathlib import Path

import pytest

from ckpt.agent.folder import AgentFolder
from tests.crash.runs import LARGE, TINY
from tests.faults.conftest import Count, tally
from tests.kit.worlds import run_script

__all__ = ["tally"]


def deaths(root: Path, times: int, numbers: int, seed: int, timeout: float) -> None:
    script = Path(__file__).with_name("deaths.py")
    assert "ALL WELL" in run_script(script, root, times, numbers, seed, timeout=timeout)


@pytest.mark.slow
def test_each_may_die_at_a_random_moment(place: AgentFolder, tmp_path: Path, tally: Count) -> None:
    deaths(tmp_path / "run", 4, TINY, 1, timeout=200)
    tally("agent-deaths", 4)


@pytest.mark.torture
@pytest.mark.timeout(3600)
@pytest.mark.parametrize(("numbers", "times"), [(TINY, 160), (LARGE, 40)], ids=["tiny", "64 MiB"])
def test_each_may_die_at_any_moment(
    place: AgentFolder, tmp_path: Path, tally: Count, numbers: int, times: int
) -> None:
    deaths(tmp_path / "run", times, numbers, 2, timeout=3500)
    tally("agent-deaths", times)
