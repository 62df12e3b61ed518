"""The job's store as coordinator, over a real TCPStore."""

from __future__ import annotations

import time
from collections.abc import Iterator
from datetime import timedelta
from typing import Any

import pytest
import torch.distributed as dist

from ckpt.coordination.torch_store import TorchStoreCoordinator
from tests.kit.stores import Wrapped


@pytest.fixture
def coordinator() -> Iterator[TorchStoreCoordinator]:
    """Rank 0 of one. The tests put the messages of other ranks."""
    store = dist.TCPStore(
        "127.0.0.1", 0, is_master=True, wait_for_workers=False, timeout=timedelta(seconds=20)
    )
    dist.init_process_group("gloo", store=store, rank=0, world_size=1)
    try:
        yield TorchStoreCoordinator()
    finally:
        dist.destroy_process_group()


@pytest.fixture
def shared() -> Iterator[dist.HashStore]:
    """The store of the default process group, in this process."""
    store = dist.HashStore()
    dist.init_process_group("gloo", store=store, rank=0, world_size=1)
    try:
        yield store
    finally:
        dist.destroy_process_group()


class Forgetful(Wrapped):
    """A store that deletes a value right after it was seen, as a faster rank does."""

    def __init__(self, store: Any, key: str) -> None:
        super().__init__(store)
        self._key = key

    def check(self, keys: list[str]) -> bool:
        seen = self.inner.check(keys)
        if self._key in keys:
            self.inner.delete_key(self._key)
        return bool(seen)


def test_words_that_have_come_are_heard_and_others_are_not_waited_for(
    coordinator: TorchStoreCoordinator,
) -> None:
    coordinator.post("x", b"mine")
    began = time.monotonic()
    assert coordinator.collect("x", {0, 1}, timeout=60) == {0: b"mine"}
    assert time.monotonic() - began < 50
    coordinator.forget("x")
    assert coordinator.collect("x", {0, 1}, timeout=0.1) == {}


def test_a_wait_in_vain_prints_nothing(
    coordinator: TorchStoreCoordinator, capfd: pytest.CaptureFixture[str]
) -> None:
    assert coordinator.verdict("y", timeout=0.2) is None
    assert coordinator.collect("y", {0, 1}, timeout=0.2) == {}
    assert capfd.readouterr() == ("", "")


@pytest.mark.parametrize("gone", [1, 2])
def test_a_word_forgotten_between_two_requests_holds_nobody_up(
    coordinator: TorchStoreCoordinator, gone: int
) -> None:
    store: Any = coordinator._store
    store.set("x/1", "one")
    store.set("x/2", "two")
    coordinator._store = Forgetful(store, f"x/{gone}")  # type: ignore[assignment]
    began = time.monotonic()
    assert coordinator.collect("x", {1, 2}, timeout=60) == {
        3 - gone: b"one" if gone == 2 else b"two"
    }
    assert time.monotonic() - began < 15  # a get of what is not there waits for 20 s


def test_the_first_verdict_stands_and_looking_does_not_make_one(
    coordinator: TorchStoreCoordinator,
) -> None:
    assert coordinator.verdict("x", timeout=0) is None
    assert coordinator.verdict("x", timeout=0.05) is None
    assert coordinator.set_once("x", b"yes") == b"yes"
    assert coordinator.clone().set_once("x", b"no") == b"yes"
    assert coordinator.verdict("x", timeout=0) == coordinator.verdict("x", timeout=1) == b"yes"


@pytest.mark.parametrize("is_given", [True, False])
def test_ranks_whose_agents_have_restarted_them_unequally_often_agree(
    shared: dist.HashStore, monkeypatch: pytest.MonkeyPatch, is_given: bool
) -> None:
    """An agent whose workers were healthy restarts them without counting it."""
    # A store that was given is the job's own, whatever torchrun has.
    monkeypatch.setenv("TORCHELASTIC_USE_AGENT_STORE", str(is_given))

    def attempt(rank: int, restarts: int) -> str:
        monkeypatch.setenv("TORCHELASTIC_RESTART_COUNT", str(restarts))
        store = shared if is_given else None
        return TorchStoreCoordinator((rank, 2), "x", store=store).attempt

    assert attempt(0, 0) == attempt(1, 1)


@pytest.mark.usefixtures("shared")
def test_a_restart_over_the_store_of_the_agent_is_another_attempt(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setenv("TORCHELASTIC_USE_AGENT_STORE", "True")

    def attempt(restarts: int) -> str:
        monkeypatch.setenv("TORCHELASTIC_RESTART_COUNT", str(restarts))
        return TorchStoreCoordinator((0, 1), "x").attempt

    assert attempt(0) != attempt(1)
