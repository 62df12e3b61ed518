"""A request to stop reaches one rank at any place: all ranks stop after the same step.

No rank has passed it.
"""

from __future__ import annotations

import random
import threading
import time

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from ckpt.coordination.coordinator import Coordinator
from ckpt.coordination.single import SingleCoordinator
from ckpt.elastic.last_step_agreement import LastStep
from ckpt.errors import CommitTimeout
from tests.coordination.world import World
from tests.kit.examples import examples


def train(
    coordinator: Coordinator, seed: int, stride: int, callers: set[int], end: int = 400
) -> int:
    """Run a rank that trains at its own pace until it must stop, and return its last step.

    Callers are asked to stop at a random moment.
    """
    chance = random.Random(seed * 100 + coordinator.rank)
    last = LastStep(coordinator, patience=5)

    def collect() -> None:
        if coordinator.rank in callers:
            time.sleep(chance.uniform(0, 0.02))
            last.agree(b"15")
        elif last.listen() is not None:
            last.agree(b"15")

    thread = threading.Thread(target=collect, daemon=True)
    thread.start()
    for step in range(0, end, stride):
        if chance.random() < 0.2:
            time.sleep(chance.uniform(0, 0.003))
        if last.is_last(step):
            assert last.is_last(step)
            break
    else:
        step = end
    last.leave()
    thread.join(10)
    assert not thread.is_alive()
    return step


@settings(max_examples=examples(25))
@given(
    size=st.integers(1, 5),
    seed=st.integers(0, 10**6),
    stride=st.integers(1, 3),
    callers=st.sets(st.integers(0, 4)),
)
def test_all_ranks_stop_after_the_same_step(
    size: int, seed: int, stride: int, callers: set[int]
) -> None:
    steps = World(size).run(lambda coordinator: train(coordinator, seed, stride, callers))
    assert len(set(steps.values())) == 1, steps
    assert all(isinstance(step, int) for step in steps.values()), steps


def test_a_rank_that_is_ahead_is_not_overtaken_by_the_decision() -> None:
    world = World(2)
    behind, ahead = (LastStep(world.coordinator(rank), patience=5) for rank in range(2))
    assert not behind.is_last(3)
    for step in range(10):
        assert not ahead.is_last(step)
    threads = [threading.Thread(target=last.agree, args=(b"15",)) for last in (behind, ahead)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(10)
    assert next(step for step in range(4, 20) if behind.is_last(step)) == 10
    assert not ahead.is_last(9)
    assert ahead.is_last(10)


def test_nobody_goes_past_its_promise_before_all_have_agreed() -> None:
    world = World(2)
    early, late = (LastStep(world.coordinator(rank), patience=5) for rank in range(2))
    assert not early.is_last(5)
    agreeing = threading.Thread(target=early.agree, args=(b"15",))
    agreeing.start()
    while not world.messages:
        time.sleep(0.001)
    answers: list[bool] = []
    training = threading.Thread(target=lambda: answers.append(early.is_last(6)))
    training.start()
    training.join(0.1)
    assert answers == []  # it waits
    assert not late.is_last(7)
    assert late.listen() == b"15"
    assert late.agree(b"15") == 8
    training.join(5)
    assert answers == [False]
    agreeing.join(5)
    assert early.is_last(8)


def test_a_rank_that_does_not_answer_is_named() -> None:
    last = LastStep(World(3, patience=0.1).coordinator(1), patience=0.2)
    assert not last.is_last(4)
    with pytest.raises(CommitTimeout, match=r"step 4.*rank\(s\) 0, 2"):
        last.agree(b"15")


def test_who_parts_leaves_its_promise_and_hears_no_call() -> None:
    world = World(2)
    done, other = (LastStep(world.coordinator(rank), patience=5) for rank in range(2))
    assert not done.is_last(9)
    listening = threading.Thread(target=done.listen, daemon=True)
    listening.start()
    done.leave()
    listening.join(5)
    assert not listening.is_alive()
    assert other.agree(b"15") == 10


def test_a_world_of_one_stops_after_the_step_under_way() -> None:
    last = LastStep(SingleCoordinator(), patience=5)
    assert not last.is_last(41)
    assert last.agree(b"15") == 42
    assert not last.is_last(41)
    assert last.is_last(42)
    last.leave()
