"""The clock jumps by hours and days, back and forth.

Steps are ordered by their numbers, and nothing is removed that is young or wanted.
"""

from __future__ import annotations

import itertools
import random
import time
from pathlib import Path

import pytest
import torch

from ckpt import CheckpointManager, Tier
from ckpt.retention.policy import Retention
from ckpt.retention.pruner import prune
from ckpt.storage.registry import open_backend
from tests.faults.conftest import Count
from tests.kit.stores import whole

HOUR, DAY, YEAR = 3600.0, 86400.0, 365 * 86400.0
JUMPS = (-YEAR, -DAY, -HOUR, -1.0, 0.0, 1.0, HOUR, 2 * DAY, YEAR)


def state(step: int) -> dict[str, object]:
    return {"x": torch.full((500,), step), "step": step}


def job(root: Path, steps: range) -> int:
    """Go on where the last job has stopped, and return that step."""
    with CheckpointManager(
        [Tier(str(root / "near"), keep_last=2), Tier(str(root / "far"))]
    ) as manager:
        target = state(-1)
        report = manager.restore(target)
        if report is not None:
            assert target["x"].unique().tolist() == [report.step]  # type: ignore[attr-defined]
        for step in steps:
            manager.save(state(step), step, timeout=30)
    return -1 if report is None else report.step


@pytest.mark.parametrize(
    "seed", [5, *(pytest.param(seed, marks=pytest.mark.torture) for seed in range(10, 20))]
)
@pytest.mark.parametrize("within", [False, True], ids=["between jobs", "at every look"])
def test_jobs_under_a_clock_that_jumps(
    tmp_path: Path, tally: Count, monkeypatch: pytest.MonkeyPatch, within: bool, seed: int
) -> None:
    now, offset, chance = time.time, [0.0], random.Random(seed)
    looks = itertools.count()

    def jumping() -> float:
        if within:
            next(looks)
            offset[0] = chance.choice(JUMPS)
        return now() + offset[0]

    monkeypatch.setattr(time, "time", jumping)
    jumps = JUMPS if seed == 5 else chance.sample(JUMPS, len(JUMPS))
    for number, jump in enumerate(jumps):
        offset[0] = jump
        assert job(tmp_path, range(2 * number, 2 * number + 2)) == 2 * number - 1
    last = 2 * len(JUMPS) - 1
    assert whole(tmp_path / "far") == list(range(last + 1))
    assert whole(tmp_path / "near") == [last - 1, last]
    tally("clock", next(looks) if within else len(JUMPS))


def test_a_jump_back_makes_no_young_save_look_old(
    tmp_path: Path, tally: Count, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A save that was not committed is left alone as long as it is young. By a clock that went
    back, its age is negative.
    """
    from ckpt.errors import StorageError
    from ckpt.storage.testing import Raise, Rule
    from tests.kit.stores import faulty

    with monkeypatch.context() as broken:
        faulty(
            broken,
            tmp_path,
            [
                Rule(verb="put", key="manifest", fault=Raise(StorageError("k", "down"))),
                Rule(verb="delete", fault=Raise(StorageError("k", "down"))),
            ],
        )
        with CheckpointManager(tmp_path) as manager:
            assert manager.save_async(state(1), 1).exception(30) is not None
    now = time.time
    removed = {}
    for jump in (*JUMPS[:7], 2 * DAY):
        monkeypatch.setattr(time, "time", lambda jump=jump: now() + jump)
        removed[jump] = bool(prune(open_backend(str(tmp_path)), Retention(keep_last=1)))
    assert removed == dict.fromkeys(JUMPS[:7], False) | {2 * DAY: True}
    tally("clock", len(removed))
