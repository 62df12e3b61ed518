"""Ranks and agents of two nodes may die at any moment, and a node may be lost with all it holds.

No torn step is listed, what was committed becomes durable if both agents live, and the next job
goes on.
"""

from __future__ import annotations

from pathlib import Path

import pytest

from tests.faults.conftest import Count, tally
from tests.kit.worlds import run_script

__all__ = ["tally"]


def deaths(root: Path, times: int, seed: int, timeout: float) -> str:
    script = Path(__file__).with_name("node_deaths.py")
    said = run_script(script, root, times, 20_000, seed, timeout=timeout)
    assert "ALL WELL" in said, said
    return said


@pytest.fixture(autouse=True)
def _no_memory_for_the_next_job(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("CKPT_AGENT_MEMORY_SECONDS", "0")


@pytest.mark.torture
@pytest.mark.slow
def test_nodes_may_die_at_a_random_moment(tmp_path: Path, tally: Count) -> None:
    deaths(tmp_path / "run", 3, 1, timeout=280)
    tally("node-deaths", 3)


@pytest.mark.torture
@pytest.mark.timeout(3600)
def test_nodes_may_die_at_any_moment(tmp_path: Path, tally: Count) -> None:
    print(deaths(tmp_path / "run", 200, 2, timeout=3500))
    tally("node-deaths", 200)
