"""A process is killed at any moment.

Every listed checkpoint is whole, none is lost, and the next process goes on.
"""

from __future__ import annotations

from pathlib import Path

import pytest

from tests.crash.runs import LARGE, TINY, nursery
from tests.kit.marks import torture


@pytest.mark.parametrize(
    ("numbers", "times"), [(TINY, 5), *torture((LARGE, 3))], ids=["tiny", "64 MiB"]
)
def test_a_saver_killed_at_a_random_moment_leaves_only_whole_checkpoints(
    tmp_path: Path, numbers: int, times: int
) -> None:
    assert f"{times} deaths" in nursery("random", tmp_path / "run", times, numbers, 1)


@pytest.mark.slow
@pytest.mark.parametrize(
    ("numbers", "times"),
    [
        pytest.param(TINY, 10, id="tiny"),
        pytest.param(LARGE, 25, id="64 MiB", marks=pytest.mark.torture),
    ],
)
def test_a_saver_killed_again_and_again_leaves_only_whole_checkpoints(
    tmp_path: Path, numbers: int, times: int
) -> None:
    assert f"{times} deaths" in nursery("random", tmp_path / "run", times, numbers, 2)


@pytest.mark.parametrize("stride", [9, *torture(1)])
def test_a_saver_may_die_before_and_after_calls_to_the_store(tmp_path: Path, stride: int) -> None:
    assert "died before calls up to" in nursery("steps", tmp_path / "runs", 1 << 14, stride)
