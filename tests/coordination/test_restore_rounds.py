"""The rounds of a restore, which all ranks go through together.

If one rank fails, all ranks soon get an error with the cause.
"""

from __future__ import annotations

import time
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import pytest
from torch.distributed import TCPStore

from ckpt.coordination import restore_rounds
from ckpt.coordination.coordinator import Coordinator
from ckpt.coordination.restore_rounds import ConnectionLost, DamageError, RestoreRounds, common
from ckpt.coordination.torch_store import TorchStoreCoordinator
from ckpt.errors import ChecksumMismatch, RestoreError
from tests.coordination.world import World


def outcome(
    works: dict[int, Any], *, seconds: dict[int, float] | None = None, patience: float = 60
) -> Any:
    """Return what each rank gets if the ranks of ``works`` do that, after that many seconds.

    The other ranks are dead.
    """

    def run(coordinator: Coordinator) -> object:
        time.sleep((seconds or {}).get(coordinator.rank, 0))
        work = works[coordinator.rank]

        def do() -> object:
            if isinstance(work, Exception):
                raise work
            return work

        rounds = RestoreRounds(coordinator, subject="x", patience=60)
        return rounds.do("read", 7, do, lambda _: ())[0]

    return World(3, patience=patience).run(run, works)


def test_damage_on_one_is_damage_for_all() -> None:
    found = outcome({0: "a", 1: ChecksumMismatch("key", 0, 1), 2: "c"})
    assert all(isinstance(error, DamageError) for error in found.values())


def test_an_error_with_a_name_that_is_not_utf_8_is_told_to_all() -> None:
    found = outcome({0: "a", 1: ValueError("no such file: step\udce9"), 2: "c"})
    assert r"no such file: step\udce9" in str(found[0]), found
    assert r"no such file: step\udce9" in str(found[2]), found


def test_who_was_left_waits_for_the_one_who_knows_why() -> None:
    lost = ConnectionLost("connection closed")
    found = outcome({0: lost, 1: RestoreError("no memory"), 2: lost}, seconds={1: 0.4})
    assert all("no memory" in str(error) for error in found.values()), found


@pytest.mark.parametrize("first", [RestoreError("no memory"), ConnectionLost("connection closed")])
def test_nobody_waits_long_for_a_dead_rank_once_one_has_failed(
    first: Exception, monkeypatch: Any
) -> None:
    monkeypatch.setattr(restore_rounds, "_PARTED_SECONDS", 0.5)
    began = time.monotonic()
    found = outcome({0: "a", 1: first})
    assert time.monotonic() - began < 10
    assert all(
        isinstance(error, RestoreError) and str(first) in str(error) for error in found.values()
    ), found
    if isinstance(first, ConnectionLost):
        assert all("rank(s) 2 are gone" in str(error) for error in found.values())


def test_a_work_without_a_result_succeeds() -> None:
    assert outcome(dict.fromkeys(range(3))) == dict.fromkeys(range(3))


def test_more_names_than_one_request_can_hold_are_told() -> None:
    """torch's store closes the connection of a client that sends more than 8 MiB at once."""
    store = TCPStore("127.0.0.1", 0, is_master=True, wait_for_workers=False)
    shared = [f"{number:060}" for number in range(200_000)]

    def run(rank: int) -> tuple[None, tuple[str, ...]]:
        coordinator = TorchStoreCoordinator((rank, 2), "names", store=store)
        rounds = RestoreRounds(coordinator, subject="x", patience=60)
        return rounds.do("fit", 7, lambda: None, lambda _: (*shared, f"only on {rank}"))

    with ThreadPoolExecutor(2) as threads:
        assert list(threads.map(run, range(2))) == [(None, tuple(shared))] * 2


def test_a_choice_may_be_zero() -> None:
    def run(coordinator: Coordinator) -> list[int | None]:
        rounds = RestoreRounds(coordinator, subject="x", patience=60)
        choices = iter([0, 1])
        return [rounds.next(choices, int) for _ in range(3)]

    assert list(World(2).run(run).values()) == [[0, 1, None]] * 2


@pytest.mark.parametrize(
    ("one", "two", "both"),
    [
        ("a b/c", "b/c d", "b/c"),
        # one rank has no place for any of it, the other for a part
        ("o", "o/m/x o/m/y p", "o/m/x o/m/y"),
        ("o/m/x", "o", "o/m/x"),
        ("o", "", ""),
        ("o", "o2/x", ""),
    ],
)
def test_what_no_rank_has_a_place_for_is_told_though_some_tell_only_what_it_is_in(
    one: str, two: str, both: str
) -> None:
    for first, second in ((one, two), (two, one)):
        assert common(set(first.split()), set(second.split())) == set(both.split())
