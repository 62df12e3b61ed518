"""The queue before a farther tier, on several ranks."""

from __future__ import annotations

import random
import threading
import time

from ckpt.drain import Drain, Waiting
from ckpt.errors import CkptError, CommitError, TierBehind
from ckpt.model.layout import StepRef
from tests.coordination.world import World


def drained(world: World, rank: int, arrivals: list[tuple[float, int]], backlog: int, seconds: float):
    """What one rank took, in order, and what it gave up."""
    drain = Drain(1, world.coordinator(rank), backlog=backlog, timeout=20)
    took: list[int] = []
    lost: dict[int, CkptError] = {}

    def waiting(step: int) -> Waiting:
        def work() -> None:
            time.sleep(seconds)
            took.append(step)

        return Waiting(StepRef(step, "aa"), work, lambda error: lost.setdefault(step, error))

    for pause, step in arrivals:
        time.sleep(pause)
        drain.push(waiting(step))
    drain.close()
    assert drain.waiting == []
    return took, sorted(lost), set(map(type, lost.values()))


def test_all_ranks_take_the_same_steps_in_the_same_order_however_late_each_is():
    for seed in range(4):
        world = World(3, patience=100)

        def work(coordinator, seed=seed, world=world):
            chance = random.Random((seed, coordinator.rank).__hash__())
            arrivals = [(chance.random() * 0.03, step) for step in range(12)]
            return drained(world, coordinator.rank, arrivals, backlog=2, seconds=0.03)

        found = list(world.run(work).values())
        assert not isinstance(found[0], Exception), found
        assert found[0] == found[1] == found[2]
        took, lost, kinds = found[0]
        assert sorted(took + lost) == list(range(12))
        assert took[0] == 0 or 0 in lost
        assert 11 in took
        assert kinds <= {TierBehind}


def test_a_leader_that_is_gone_does_not_hold_the_others_for_ever():
    world = World(2, patience=0.05)
    took, lost, kinds = drained(world, 1, [(0, 1), (0, 2)], backlog=4, seconds=0)
    assert (took, lost, kinds) == ([], [1, 2], {CommitError})


def test_work_that_breaks_is_told_and_the_next_is_taken():
    world = World(1)
    drain = Drain(1, world.coordinator(0), backlog=4, timeout=5)
    told: list[object] = []
    done = threading.Event()

    def broken() -> None:
        raise ZeroDivisionError("a mistake")

    drain.push(Waiting(StepRef(1, "aa"), broken, told.append))
    drain.push(Waiting(StepRef(2, "aa"), done.set, told.append))
    drain.close()
    assert done.is_set()
    (error,) = told
    assert isinstance(error, CkptError)
    assert isinstance(error.__cause__, ZeroDivisionError)


def test_a_store_of_the_job_that_is_gone_is_not_asked_without_a_pause():
    coordinator = World(2).coordinator(1)
    asked: list[str] = []

    def gone(subject: str, *, timeout: float) -> bytes | None:
        asked.append(subject)
        raise CommitError("the job's store is gone")

    coordinator.verdict = gone  # type: ignore[method-assign]
    drain = Drain(1, coordinator, backlog=4, timeout=20)
    lost: list[CkptError] = []
    drain.push(Waiting(StepRef(1, "aa"), lambda: None, lost.append))
    time.sleep(0.3)
    before, began = len(asked), time.monotonic()
    drain.close()
    assert 1 <= before <= 2
    assert time.monotonic() - began < 5
    assert [str(error) for error in lost] == ["the job's store is gone"]
