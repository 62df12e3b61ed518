"""A trainer that saves into memory, a disk and a far folder may die at any moment.

What was reported as committed is there, whole, and the next trainer goes on from it.
"""

from __future__ import annotations

import re
from functools import partial
from pathlib import Path

import pytest

from tests.crash.runs import LARGE, TINY, nursery
from tests.faults.conftest import Count, tally

__all__ = ["tally"]

three_tiers = partial(nursery, script="three_tiers.py")


def deaths(reported: str) -> int:
    found = re.search(r"died before (\d+) calls and after (\d+)", reported)
    assert found, reported
    return int(found[1]) + int(found[2])


def test_a_trainer_with_three_tiers_may_die_at_a_random_moment(
    tmp_path: Path, tally: Count
) -> None:
    assert "4 deaths" in three_tiers("random", tmp_path / "run", 4, TINY, 1)
    tally("killed-random", 4)


def test_a_trainer_with_three_tiers_may_die_around_some_calls(tmp_path: Path, tally: Count) -> None:
    tally("killed-steps", deaths(three_tiers("steps", tmp_path / "runs", TINY, 97)))


@pytest.mark.torture
@pytest.mark.timeout(1800)
@pytest.mark.parametrize(("numbers", "times"), [(TINY, 150), (LARGE, 50)], ids=["tiny", "64 MiB"])
def test_a_trainer_with_three_tiers_may_die_at_any_moment(
    tmp_path: Path, tally: Count, numbers: int, times: int
) -> None:
    assert f"{times} deaths" in three_tiers(
        "random", tmp_path / "run", times, numbers, 3, timeout=1700
    )
    tally("killed-random", times)


@pytest.mark.torture
@pytest.mark.timeout(1800)
def test_a_trainer_with_three_tiers_may_die_around_every_call(tmp_path: Path, tally: Count) -> None:
    tally("killed-steps", deaths(three_tiers("steps", tmp_path / "runs", TINY, 1, timeout=1700)))
