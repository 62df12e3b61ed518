"""The ranks of a job count the tries of a step alike, whatever a rank refuses."""

from __future__ import annotations

import time
from contextlib import suppress
from pathlib import Path
from typing import Any

import pytest
import torch

from ckpt import CheckpointManager
from ckpt.errors import CkptError, UnsupportedValue
from tests.coordination.world import World
from tests.kit.stores import whole


def state(rank: int, *, refused: bool = False) -> dict[str, Any]:
    return {f"x{rank}": torch.full((8,), rank)} | ({"f": lambda: 0} if refused else {})


@pytest.mark.parametrize("refusing", [0, 1])
def test_a_step_that_one_rank_refuses_twice_is_saved_by_the_third_try(
    tmp_path: Path, refusing: int
) -> None:
    """The try counts before the state is looked at. So the other rank does not wait either."""

    def train(coordinator: Any) -> list[str]:
        rank, errors = coordinator.rank, list[str]()
        with CheckpointManager(tmp_path, coordinator=coordinator) as manager:
            manager.save(state(rank), 1)
            for _ in range(2):
                try:
                    manager.save(state(rank, refused=rank == refusing), 2)
                except CkptError as error:
                    errors.append(type(error).__name__)
            manager.save(state(rank), 2)
            manager.restore(state(rank), step=1)
            manager.save(state(rank), 2)
            manager.save(state(rank), 3)
        return errors

    errors = World(2, patience=30).run(train)
    assert errors == {refusing: ["UnsupportedValue"] * 2, 1 - refusing: ["PeerFailed"] * 2}
    assert whole(tmp_path) == [1, 2, 3]
    assert len([*tmp_path.glob("step-*/manifest.json")]) == 4  # Two of step 2


@pytest.mark.parametrize("refusing", [0, 1])
def test_the_last_step_that_one_rank_has_refused_is_saved_again_by_all(
    tmp_path: Path, refusing: int
) -> None:
    """The loop saves its last step in its rhythm, and again since the stop asks for it. The rank
    that has refused the first save tried the step again, while the other one took the first save,
    which was still under way, for that of the last step.
    """

    def train(coordinator: Any) -> int:
        rank = coordinator.rank
        with CheckpointManager(tmp_path, coordinator=coordinator) as manager:
            stop = manager.on_stop_request()
            for step in range(100_000):
                if step == 3:
                    manager.request_stop()
                if stop.requested(step):
                    with suppress(UnsupportedValue):
                        manager.save_async(state(rank, refused=rank == refusing), step)
                    manager.save_async(state(rank), step)
                    return step
                time.sleep(0.001)
        raise AssertionError("it did not stop")

    stopped = World(2, patience=30).run(train)
    assert whole(tmp_path) == [stopped[0]]


def test_the_last_step_that_is_saved_twice_has_one_try(tmp_path: Path) -> None:
    def train(coordinator: Any) -> bool:
        with CheckpointManager(tmp_path, coordinator=coordinator) as manager:
            stop = manager.on_stop_request()
            manager.request_stop()
            step = next(s for s in range(100_000) if stop.requested(s) or time.sleep(0.001))
            first = manager.save_async(state(coordinator.rank), step)
            return manager.save_async(state(coordinator.rank), step) is first

    assert World(2, patience=30).run(train) == {0: True, 1: True}
    assert len([*tmp_path.glob("step-*")]) == 1
