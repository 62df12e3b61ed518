"""The queue before a farther tier, on several ranks."""

from __future__ import annotations

import random
import threading
import time
from collections.abc import Callable
from functools import partial

import pytest
import torch

from ckpt import CheckpointManager, Tier
from ckpt.errors import CkptError, CommitError, ConfigError, OutOfSpace, PeerFailed, TierBehind
from ckpt.model.keys import StepRef
from ckpt.pipeline.workers import Workers
from ckpt.save.saver import Saver
from ckpt.save.tier_queue import QueuedStep, TierQueue, Turn
from ckpt.save.tier_writer import TierWriter
from tests.coordination.world import World, WorldCoordinator
from tests.kit.stores import whole
from tests.kit.waiting import until


class Served:
    """A queue with a thread that takes turns, as a saver has one."""

    def __init__(self, queue: TierQueue[Callable[[], None]]) -> None:
        self.queue, self.workers = queue, Workers("drain", 1)
        self.lost: dict[int, CkptError] = {}

    def push(self, step: int, work: Callable[[], None], *, held: bool = False) -> None:
        if self.queue.push(QueuedStep(StepRef(step, "aa"), work, held)):
            self.workers.submit(self.run)

    def run(self) -> None:
        while (turn := self.queue.take()) is not None:
            self.lost.update({step.ref.step: error for step, error in turn.losses})
            if turn.next is not None:
                turn.next.task()

    def close(self) -> None:
        self.queue.close()
        self.workers.close()
        assert self.queue.take() is None


def drained(
    world: World, rank: int, arrivals: list[tuple[float, int]], backlog: int, seconds: float
):
    """Return what one rank took, in order, and what it gave up."""
    served = Served(TierQueue(1, world.coordinator(rank), backlog=backlog, timeout=20))
    took: list[int] = []

    def work(step: int) -> None:
        time.sleep(seconds)
        took.append(step)

    for pause, step in arrivals:
        time.sleep(pause)
        served.push(step, partial(work, step))
    served.close()
    return took, sorted(served.lost), set(map(type, served.lost.values()))


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


def test_a_leader_that_is_gone_does_not_hold_a_rank_that_leaves_its_steps_to_the_agent() -> None:
    """The agent cannot read a step that only has its image, so the rank waits for its end."""
    world = World(2, patience=0.05)
    served = Served(TierQueue(1, world.coordinator(1), backlog=4, timeout=0.05))
    served.push(1, lambda: None, held=True)
    assert served.queue.give_up_stored() == []
    assert until(lambda: served.lost, 20)
    served.close()
    assert set(map(type, served.lost.values())) == {CommitError}


class LostAnswer(WorldCoordinator):
    """A connection that breaks after the first order was set and before the answer came."""

    broken: Callable[[], object] | None = None

    def set_once(self, subject: str, verdict: bytes) -> bytes:
        stands = super().set_once(subject, verdict)
        if (broken := self.broken) is not None:
            self.broken = None
            broken()
            raise CommitError("the answer was lost")
        return stands


def test_the_leader_takes_the_order_that_the_others_have_read() -> None:
    world = World(2, patience=5)
    leader = LostAnswer(world, 0)
    queues = [
        TierQueue[str](1, each, backlog=4, timeout=0.05) for each in (leader, world.coordinator(1))
    ]
    for queue in queues:
        queue.push(QueuedStep(StepRef(1, "aa"), "one"))
    # A newer step comes to both ranks before the leader asks again.
    leader.broken = lambda: [queue.push(QueuedStep(StepRef(2, "aa"), "two")) for queue in queues]
    turns = [queue.take() for queue in queues]
    assert [turn.next.task for turn in turns if turn and turn.next] == ["one", "one"]


def test_a_queue_that_was_empty_asks_for_a_thread_again():
    queue = TierQueue[str](1, World(1).coordinator(0), backlog=4, timeout=5)
    for step in (1, 2):
        assert queue.push(QueuedStep(StepRef(step, "aa"), "work"))
        assert not queue.push(QueuedStep(StepRef(step + 10, "aa"), "work"))
        taken = [queue.take(), queue.take()]
        assert [turn.next.ref.step for turn in taken if turn and turn.next] == [step + 10, step]
        assert queue.take() is None


class GivenUp(TierQueue[str]):
    """A queue whose steps are left to the agent right before or after one is chosen."""

    before = True

    def _choose(self):
        if self.before:
            self.given_up = self.give_up_stored()
        order = super()._choose()
        if not self.before:
            self.given_up = self.give_up_stored()
        return order


@pytest.mark.parametrize("before", [True, False])
@pytest.mark.parametrize("ranks", [1, 2])
def test_steps_may_be_left_to_the_agent_while_one_is_chosen(before: bool, ranks: int) -> None:
    queue = GivenUp(1, World(ranks).coordinator(0), backlog=4, timeout=5)
    queue.before = before
    queue.push(QueuedStep(StepRef(1, "aa"), "one"))
    queue.expect(StepRef(2, "aa"))
    assert queue.take() == Turn(None)
    assert [step.task for step in queue.given_up] == ["one"]
    for step, task in ((3, "three"), (2, "two")):
        queue.push(QueuedStep(StepRef(step, "aa"), task, holds_image=True))
    turn = queue.take()
    assert turn is not None
    assert turn.next is not None
    assert turn.next.task == "two"  # its place was kept


def test_a_far_tier_that_fails_by_a_mistake_says_so_and_takes_the_next_step(tmp_path, monkeypatch):
    commit = TierWriter.commit

    def broken(writer, job, **how):
        if writer.tier.index == 1 and job.ref.step == 1:
            raise ZeroDivisionError("a mistake")
        return commit(writer, job, **how)

    monkeypatch.setattr(TierWriter, "commit", broken)
    near, far = str(tmp_path / "a"), str(tmp_path / "b")
    with CheckpointManager([near, far]) as manager:
        first, second = (manager.save_async({"x": torch.ones(1000)}, step) for step in (1, 2))
        error = first.exception(30)
        assert isinstance(error, CkptError)
        assert isinstance(error.__cause__, ZeroDivisionError)
        assert second.exception(30, tier=far) is None
    assert (whole(tmp_path / "a"), whole(tmp_path / "b")) == ([1, 2], [2])


def test_a_store_of_the_job_that_is_gone_is_not_asked_without_a_pause():
    coordinator = World(2).coordinator(1)
    asked: list[str] = []

    def gone(subject: str, *, timeout: float) -> bytes | None:
        asked.append(subject)
        raise CommitError("the job's store is gone")

    coordinator.verdict = gone  # type: ignore[method-assign]
    served = Served(TierQueue(1, coordinator, backlog=4, timeout=20))
    served.push(1, lambda: None)
    assert until(lambda: asked)
    time.sleep(0.3)
    before, began = len(asked), time.monotonic()
    served.close()
    assert 1 <= before <= 2
    assert time.monotonic() - began < 5
    assert [str(error) for error in served.lost.values()] == ["the job's store is gone"]


def test_what_holds_its_image_goes_first_in_the_order_it_came_and_is_never_given_up():
    served = Served(TierQueue(1, World(1).coordinator(0), backlog=1, timeout=5))
    began, go, took = threading.Event(), threading.Event(), list[int]()

    def work(step: int) -> None:
        began.set()
        assert go.wait(10)
        took.append(step)

    served.push(1, partial(work, 1))
    assert began.wait(10)
    for step in range(2, 9):
        served.push(step, partial(work, step), held=step % 2 == 1)
    go.set()
    served.close()
    assert (took, list(served.lost)) == ([1, 3, 5, 7, 8, 6], [2, 4])


class Staged(WorldCoordinator):
    """Rank 1's queue: it learns which step is next when it has begun step 3 at the latest."""

    third: threading.Event

    def verdict(self, subject: str, *, timeout: float) -> bytes | None:
        if subject.startswith("order/1/") and self.rank == 1:
            assert self.third.wait(20)
        return super().verdict(subject, timeout=timeout)


@pytest.mark.parametrize("leader_first", [True, False])
def test_a_step_that_no_nearer_tier_takes_is_served_in_the_order_of_all_ranks(
    tmp_path, monkeypatch, leader_first
):
    """One rank reaches step 3 while it has step 2 on its way to the far tier, and the other before
    that.
    """
    begun = {rank: {step: threading.Event() for step in (2, 3)} for rank in (0, 1)}
    commit, stream = TierWriter.commit, Saver._stream

    def noted(writer, job, **how):
        if writer.tier.index == 1:
            begun[writer._coordinator.rank][job.ref.step].set()
        return commit(writer, job, **how)

    def streamed(saver, writers, save):
        stream(saver, writers, save)
        step = save.request.ref.step
        begun[saver._writers[0]._coordinator.rank][step].set() if step == 3 else None

    monkeypatch.setattr(TierWriter, "commit", noted)
    monkeypatch.setattr(Saver, "_stream", streamed)

    def save(coordinator):
        mine = Staged(world, coordinator.rank)
        mine.third = begun[1][3]
        tiers = [Tier(str(tmp_path / "a"), every=2), Tier(str(tmp_path / "b"))]
        with CheckpointManager(tiers, coordinator=mine, commit_timeout_seconds=15) as manager:
            state = {f"x{mine.rank}": torch.ones(1000)}
            saves = [manager.save_async(state, 2)]
            saves[0].result(30, tier=tiers[0].url)
            if mine.rank == 0 and leader_first:
                assert begun[0][2].wait(10)
            saves.append(manager.save_async(state, 3))
            return [save.exception(30) for save in saves]

    world = World(2, patience=30)
    assert world.run(save) == {0: [None, None], 1: [None, None]}
    assert (whole(tmp_path / "a"), whole(tmp_path / "b")) == ([2], [2, 3])


def test_a_middle_tier_that_fails_keeps_no_rank_with_fewer_slots_from_the_next_step(
    tmp_path, monkeypatch
):
    """Step 2 fails on the middle tier. Meanwhile the leader, which has one more slot, has step 3 in
    the last queue.
    """
    pushed = {(rank, step): threading.Event() for rank in (0, 1) for step in (2, 3)}
    commit, push = TierWriter.commit, TierQueue.push

    def failing(writer, job, **how):
        if writer.tier.index == 1:
            assert pushed[0, 3].wait(20)
            assert writer._coordinator.rank == 1 or pushed[1, 2].wait(20)
            raise OutOfSpace("somewhere")
        return commit(writer, job, **how)

    def noted(queue, item):
        start = push(queue, item)
        if queue._index == 2:
            pushed[queue._coordinator.rank, item.ref.step].set()
        return start

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
            tiers, coordinator=coordinator, slots=slots, commit_timeout_seconds=15
        ) as manager:
            saves = [manager.save_async({f"x{rank}": torch.ones(1000)}, step) for step in (2, 3)]
            return [save.exception(30) for save in saves]

    assert World(2, patience=30).run(save) == {0: [None, None], 1: [None, None]}
    assert whole(tmp_path / "c") == [2, 3]


@pytest.mark.parametrize("lazy", [0, 1])
def test_a_rank_without_a_part_in_a_step_that_only_a_far_tier_takes_holds_up_nobody(tmp_path, lazy):
    def save(coordinator):
        tiers = [Tier(str(tmp_path / "a"), every=2), Tier(str(tmp_path / "b"))]
        with CheckpointManager(
            tiers, coordinator=coordinator, commit_timeout_seconds=20
        ) as manager:
            state = {f"x{coordinator.rank}": torch.ones(1000)}
            saves = [manager.save_async(state, 2)]
            if coordinator.rank == lazy:
                with pytest.raises(ConfigError):
                    manager.save_async(state, 3, metrics={"loss": "low"})  # type: ignore[dict-item]
            else:
                saves.append(manager.save_async(state, 3))
            saves.append(manager.save_async(state, 4))
            return [type(save.exception(30)) for save in saves]

    ended = World(2, patience=30).run(save)
    assert ended[lazy] == [type(None), type(None)]
    assert ended[1 - lazy] == [type(None), PeerFailed, type(None)]
    assert (whole(tmp_path / "a"), whole(tmp_path / "b")) == ([2, 4], [2, 4])
