"""A job with deltas that is killed at any call to its store misleads no follower."""

from __future__ import annotations

import itertools
import os
import signal
from collections.abc import Iterable
from pathlib import Path
from typing import Any

import pytest
import torch

import ckpt
from ckpt import CheckpointManager
from ckpt.errors import NoCheckpoint
from ckpt.exchange.weights.follow import Version
from tests.crash.sequences.run import die_at
from tests.exchange.weights.trainer import digest, update, weights_of
from tests.processes import fork


def content(step: int, branch: int) -> dict[str, torch.Tensor]:
    """Return the weights after a step: those of the first branch up to step 2."""
    weights = weights_of(1)
    for number in range(1, step + 1):
        update(weights, number, 1 if number < 3 else branch)
    return weights


def job(root: Path, branch: int) -> int:
    """Restore, and save steps up to 4. Return the step that was restored, or 0."""
    state: dict[str, Any] = {"model": content(0, branch), "step": 0}
    with CheckpointManager(root, deltas="model") as manager:
        manager.restore(state)
        first = int(state["step"])
        for step in range(first + 1, 5):
            manager.save({"model": content(step, branch), "step": step})
    return first


def following(root: Path, step: int, branch: int) -> Version | None:
    """Check that a new follower has the weights of its step, up to ``step`` of the first branch."""
    with ckpt.follow(root, timeout_seconds=0.01, poll_seconds=0.01) as versions:
        try:
            version = next(versions)
        except NoCheckpoint:
            return None
        assert digest(version.weights) == digest(content(version.step, branch))
        assert version.step <= step
        return version


@pytest.mark.parametrize(
    "numbers",
    [[29], pytest.param(itertools.count(1), marks=pytest.mark.torture)],
    ids=["29", "all"],
)
def test_a_kill_at_any_call_misleads_no_follower(tmp_path: Path, numbers: Iterable[int]) -> None:
    """Kill the job at each of its calls to the store, until it ends before."""
    for number in numbers:
        root = tmp_path / str(number)

        def dying(number: int = number, root: Path = root) -> None:
            die_at(number)
            job(root, 1)

        status = os.waitstatus_to_exitcode(os.waitpid(fork(dying), 0)[1])
        assert status in (0, -signal.SIGKILL)
        version = following(root, 4, 1)
        with ckpt.follow(root, timeout_seconds=5, poll_seconds=0.01) as versions:
            if version is not None:
                assert next(versions).step == version.step
            first = job(root, 2)  # A save that only lacked its manifest may be finished now
            assert first >= (version.step if version else 0)
            if first < 4:
                last = next(versions)
                assert (last.step, digest(last.weights)) == (4, digest(content(4, 2)))
        if status == 0:
            break
