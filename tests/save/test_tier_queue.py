"""The queue before a farther tier, on several ranks."""

from __future__ import annotations

import random
import threading
import time

import pytest
import torch

from ckpt import CheckpointManager, Tier
from ckpt.errors import CkptError, CommitError, ConfigError, OutOfSpace, PeerFailed, TierBehind
from ckpt.model.keys import StepRef
from ckpt.save.saver import Saver
from ckpt.save.tier_queue import QueuedStep, TierQueue
from ckpt.save.tier_writer import TierWriter
from tests.coordination.world import World, WorldCoordinator
from tests.test_review import whole


def drained(world: World, rank: int, arrivals: list[tuple[float, int]], backlog: int, seconds: float):
    """What one rank took, in order, and what it gave up."""
    queue = TierQueue(1, world.coordinator(rank), backlog=backlog, timeout=20)
    took: list[int] = []
    lost: dict[int, CkptError] = {}

    def waiting(step: int) -> QueuedStep:
        def work() -> None:
            time.sleep(seconds)
            took.append(step)

        return QueuedStep(StepRef(step, "aa"), work, lambda error: lost.setdefault(step, error))

    for pause, step in arrivals:
        time.sleep(pause)
        queue.push(waiting(step))
    queue.close()
    assert queue.waiting == []
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
    queue = TierQueue(1, world.coordinator(0), backlog=4, timeout=5)
    told: list[object] = []
    done = threading.Event()

    def broken() -> None:
        raise ZeroDivisionError("a mistake")

    queue.push(QueuedStep(StepRef(1, "aa"), broken, told.append))
    queue.push(QueuedStep(StepRef(2, "aa"), done.set, told.append))
    queue.close()
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
    queue = TierQueue(1, coordinator, backlog=4, timeout=20)
    lost: list[CkptError] = []
    queue.push(QueuedStep(StepRef(1, "aa"), lambda: None, lost.append))
    time.sleep(0.3)
    before, began = len(asked), time.monotonic()
    queue.close()
    assert 1 <= before <= 2
    assert time.monotonic() - began < 5
    assert [str(error) for error in lost] == ["the job's store is gone"]


def test_what_holds_its_image_goes_first_in_the_order_it_came_and_is_never_given_up():
    queue = TierQueue(1, World(1).coordinator(0), backlog=1, timeout=5)
    began, go, took, lost = threading.Event(), threading.Event(), list[int](), list[int]()

    def waiting(step: int, *, held: bool) -> QueuedStep:
        def work() -> None:
            began.set()
            assert go.wait(10)
            took.append(step)

        return QueuedStep(StepRef(step, "aa"), work, lambda _: lost.append(step), held=held)

    queue.push(waiting(1, held=False))
    assert began.wait(10)
    for step in range(2, 9):
        queue.push(waiting(step, held=step % 2 == 1))
    go.set()
    queue.close()
    assert (took, lost) == ([1, 3, 5, 7, 8, 6], [2, 4])


class Staged(WorldCoordinator):
    """Of rank 1: it hears which step a queue takes next when it has begun step 3 at the latest."""

    third: threading.Event

    def verdict(self, subject: str, *, timeout: float) -> bytes | None:
        if subject.startswith("order/1/") and self.rank == 1:
            assert self.third.wait(20)
        return super().verdict(subject, timeout=timeout)


@pytest.mark.parametrize("leader_first", [True, False])
def test_a_step_that_no_nearer_tier_takes_is_served_in_the_order_of_all_ranks(
    tmp_path, monkeypatch, leader_first
):
    """One rank comes to step 3 while it has step 2 on its way to the far tier, the other before it has."""
    begun = {rank: {step: threading.Event() for step in (2, 3)} for rank in (0, 1)}
    commit, run = TierWriter.commit, Saver.run

    def noted(writer, job, **how):
        if writer.tier.index == 1:
            begun[writer._coordinator.rank][job.ref.step].set()
        return commit(writer, job, **how)

    def ran(saver, job, *args, **how):
        run(saver, job, *args, **how)
        begun[saver._writers[0]._coordinator.rank][job.ref.step].set() if job.ref.step == 3 else None

    monkeypatch.setattr(TierWriter, "commit", noted)
    monkeypatch.setattr(Saver, "run", ran)

    def save(coordinator):
        mine = Staged(world, coordinator.rank)
        mine.third = begun[1][3]
        tiers = [Tier(str(tmp_path / "a"), every=2), Tier(str(tmp_path / "b"))]
        with CheckpointManager(tiers, coordinator=mine, commit_timeout_seconds=3) as manager:
            state = {f"x{mine.rank}": torch.ones(1000)}
            saves = [manager.save_async(state, 2)]
            saves[0].result(10, tier=tiers[0].url)
            if mine.rank == 0 and leader_first:
                assert begun[0][2].wait(10)
            saves.append(manager.save_async(state, 3))
            return [save.exception(30) for save in saves]

    world = World(2, patience=30)
    assert world.run(save) == {0: [None, None], 1: [None, None]}
    assert (whole(tmp_path / "a"), whole(tmp_path / "b")) == ([2], [2, 3])


def test_a_middle_tier_that_fails_keeps_no_rank_with_fewer_slots_from_the_next_step(tmp_path, monkeypatch):
    """Step 2 fails on the middle tier while the leader, which has a slot more, has step 3 in the last queue."""
    pushed = {(rank, step): threading.Event() for rank in (0, 1) for step in (2, 3)}
    commit, push = TierWriter.commit, TierQueue.push

    def failing(writer, job, **how):
        if writer.tier.index == 1:
            assert pushed[0, 3].wait(20)
            assert writer._coordinator.rank == 1 or pushed[1, 2].wait(20)
            raise OutOfSpace("somewhere")
        return commit(writer, job, **how)

    def noted(queue, item):
        push(queue, item)
        if queue._index == 2:
            pushed[queue._coordinator.rank, item.ref.step].set()

    monkeypatch.setattr(TierWriter, "commit", failing)
    monkeypatch.setattr(TierQueue, "push", noted)

    def save(coordinator):
        rank = coordinator.rank
        tiers = [
            Tier(str(tmp_path / "a"), every=4),
            Tier(str(tmp_path / "b"), every=2, required=False),
            Tier(str(tmp_path / "c")),
        ]
        slots = 2 - rank
        with CheckpointManager(
            tiers, coordinator=coordinator, slots=slots, commit_timeout_seconds=3
        ) as manager:
            saves = [manager.save_async({f"x{rank}": torch.ones(1000)}, step) for step in (2, 3)]
            return [save.exception(30) for save in saves]

    assert World(2, patience=30).run(save) == {0: [None, None], 1: [None, None]}
    assert whole(tmp_path / "c") == [2, 3]


@pytest.mark.parametrize("lazy", [0, 1])
def test_a_rank_without_a_part_in_a_step_that_only_a_far_tier_takes_holds_up_nobody(tmp_path, lazy):
    def save(coordinator):
        tiers = [Tier(str(tmp_path / "a"), every=2), Tier(str(tmp_path / "b"))]
        with CheckpointManager(tiers, coordinator=coordinator, commit_timeout_seconds=20) as manager:
            state = {f"x{coordinator.rank}": torch.ones(1000)}
            saves = [manager.save_async(state, 2)]
            if coordinator.rank == lazy:
                with pytest.raises(ConfigError):
                    manager.save_async(state, 3, metrics={"loss": "low"})
            else:
                saves.append(manager.save_async(state, 3))
            saves.append(manager.save_async(state, 4))
            return [type(save.exception(30)) for save in saves]

    ended = World(2, patience=30).run(save)
    assert ended[lazy] == [type(None), type(None)]
    assert ended[1 - lazy] == [type(None), PeerFailed, type(None)]
    assert (whole(tmp_path / "a"), whole(tmp_path / "b")) == ([2, 4], [2, 4])
