"""Gather and decide, on the ranks of a world."""

from __future__ import annotations

import pytest

from ckpt.coordination.coordinator import Coordinator
from ckpt.coordination.exchanges import Wait, arrivals, gather, leader_decides
from ckpt.coordination.single import SingleCoordinator
from ckpt.errors import CommitTimeout
from tests.coordination.world import World


def test_every_rank_gathers_the_messages_of_all_in_the_order_of_the_ranks() -> None:
    def work(coordinator: Coordinator) -> dict[int, bytes]:
        coordinator.post("size", str(coordinator.rank * 10).encode())
        return gather(coordinator, "size", Wait(30.0, "the size"))

    expected = {0: b"0", 1: b"10", 2: b"20"}
    found = World(3, patience=30.0).run(work)
    assert found == {0: expected, 1: expected, 2: expected}
    assert all(list(messages) == [0, 1, 2] for messages in found.values())


def test_only_the_ranks_that_are_asked_for_are_waited_for() -> None:
    world = World(3)
    world.coordinator(2).post("size", b"x")
    assert gather(world.coordinator(0), "size", Wait(5.0, "the size"), ranks={2}) == {2: b"x"}


def test_ranks_that_post_nothing_are_named() -> None:
    world = World(4)
    world.coordinator(1).post("size", b"x")
    with pytest.raises(CommitTimeout) as caught:
        gather(world.coordinator(0), "size", Wait(0.1, "the size", 7))
    assert (caught.value.step, caught.value.missing) == (7, (0, 2, 3))
    assert "the size" in str(caught.value)


def test_an_arrival_is_given_before_the_others_have_come() -> None:
    world = World(2)
    world.coordinator(1).post("size", b"x")
    first = next(arrivals(world.coordinator(0), "size", [0, 1], Wait(30.0, "the size")))
    assert first == (1, b"x")


def test_what_the_leader_decides_is_the_same_on_all_ranks_and_is_decided_once() -> None:
    calls: list[int] = []

    def work(coordinator: Coordinator) -> str:
        def decide() -> str:
            calls.append(coordinator.rank)
            return "left"

        return leader_decides(coordinator, "way", decide, Wait(30.0, "the way"), str)

    assert set(World(3, patience=3.0).run(work).values()) == {"left"}
    assert calls == [0]


def test_a_leader_that_does_not_decide_is_named() -> None:
    world = World(2, patience=0.01)
    with pytest.raises(CommitTimeout) as caught:
        leader_decides(world.coordinator(1), "way", lambda: "", Wait(0.1, "the way"), str)
    assert caught.value.missing == (0,)


def test_a_rank_alone_decides_for_itself() -> None:
    alone = SingleCoordinator()
    alone.post("size", b"1")
    assert gather(alone, "size", Wait(0.0, "the size")) == {0: b"1"}
    assert leader_decides(alone, "way", lambda: "right", Wait(0.0, "the way"), str) == "right"
