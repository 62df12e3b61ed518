"""Two jobs use one root at once, as from two machines.

Neither can see that the other lives, so each takes the root from the other again and again.
"""

from __future__ import annotations

from pathlib import Path

import pytest
import torch

from ckpt import CheckpointManager
from ckpt.errors import RootInUse
from tests.faults.conftest import Count
from tests.kit.stores import whole
from tests.kit.worlds import paused, run_code, run_forks

JOB = r"""
import os, sys, torch
from ckpt import CheckpointManager, Tier
from ckpt.root.owner import Owner
from ckpt.errors import CkptError
torch.set_num_threads(1)
Owner.alive = property(lambda self: False)  # of another machine, as far as anybody can tell
root, saves, job = sys.argv[1], int(sys.argv[2]), int(os.environ["JOB"])
lost = 0
while saves > 0:
    with CheckpointManager(Tier(root, keep_last=2)) as manager:
        state = {"x": torch.zeros(2000), "step": 0, "job": 0}
        try:
            report = manager.restore(state)
        except CkptError as gone:  # the other job has pruned all that was there when it was listed
            print("again", type(gone).__name__, flush=True)
            continue
        assert report is None or bool((state["x"] == 2 * state["step"] + state["job"]).all()), state
        step = (report.step if report else 0) + 1
        try:
            while saves > 0:
                saves -= 1
                pending = manager.save_async({"x": torch.full((2000,), 2.0 * step + job), "step": step, "job": job}, step)
                error = pending.exception(60)
                if error is not None:
                    raise error
                os.write(1, f"saved {step}\n".encode())  # in one piece, beside lines of the log
                step += 1
        except CkptError as error:
            lost += 1
            print("lost", type(error).__name__, flush=True)
print("end", lost, flush=True)
"""  # noqa: E501
_FIRST = """
import sys, torch
from ckpt import CheckpointManager
with CheckpointManager(sys.argv[1]) as first:
    first.save({"x": torch.ones(3)}, 1)
    pause(*sys.argv[-2:])
    first.save({"x": torch.ones(3)}, 3)
"""


@pytest.fixture(scope="module", autouse=True)
def server_of_forks() -> None:
    """Start the server that the jobs are forked from. It stays, and each test looks for leaks."""
    run_code("")


def fight(root: Path, saves: int) -> int:
    """Let both jobs save this often, and return how many saves were committed."""
    script = root.with_suffix(".py")
    script.write_text(JOB)
    jobs = run_forks([script, root, saves], [{"JOB": "0"}, {"JOB": "1"}], timeout=1000)
    assert jobs.statuses == (0, 0), jobs.said
    steps = [
        int(line.split()[1])
        for said in jobs.said
        for line in said.splitlines()
        if line.startswith("saved")
    ]
    listed = whole(root)
    assert max(steps) in listed, (max(steps), listed)
    target = {"x": torch.zeros(2000), "step": 0, "job": 0}
    with CheckpointManager(root) as manager:
        report = manager.restore(target)
    assert report is not None
    assert report.step == max(steps)
    assert report.skipped == ()
    assert bool((target["x"] == 2 * target["step"] + target["job"]).all())  # type: ignore[operator, attr-defined]
    return len(steps)


def test_two_jobs_that_do_not_see_each_other(tmp_path: Path, tally: Count) -> None:
    tally("two-jobs", fight(tmp_path / "run", 8))


@pytest.mark.torture
@pytest.mark.timeout(1800)
def test_two_jobs_that_do_not_see_each_other_for_long(tmp_path: Path, tally: Count) -> None:
    tally("two-jobs", fight(tmp_path / "run", 100))


def test_two_jobs_that_see_each_other(tmp_path: Path, tally: Count) -> None:
    """On one machine the second job gets an error at its first save, and the first one goes on."""
    root = tmp_path / "run"
    with (
        paused(_FIRST, root, folder=tmp_path),
        CheckpointManager(root) as second,
        pytest.raises(RootInUse),
    ):
        second.save({"x": torch.ones(3)}, 2)
    assert whole(root) == [1, 3]
    tally("two-jobs", 3)
