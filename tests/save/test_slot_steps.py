"""Which slots hold the only copy of a step."""

from __future__ import annotations

import os
import shutil
import threading
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

import pytest
import torch

from ckpt import CheckpointManager, Tier
from ckpt.coordination.commit_state_machine import Vote
from ckpt.coordination.committer import Committer
from ckpt.errors import CommitError
from ckpt.model.keys import StepRef
from ckpt.model.rollback import roll_back
from ckpt.save.job_steps import JobSteps
from ckpt.save.slot_steps import SlotSteps
from ckpt.storage.api import StorageBackend
from ckpt.storage.registry import open_backend
from ckpt.storage.tiers import OpenTier
from tests.kit.stores import Wrapped, wrap_stores

ONE, TWO = (StepRef(step, "a" * 12) for step in (1, 2))


def test_the_newest_step_in_memory_is_needed_until_a_newer_one_or_a_durable_tier_has_it(
    tmp_path: Path,
) -> None:
    job = JobSteps([])
    tier, slots = OpenTier(0, Tier(str(tmp_path)), open_backend(str(tmp_path))), SlotSteps(0, job)
    slots.keep("/one", tier, ONE)
    assert not slots.is_needed("/one")  # it is not committed yet
    slots.set_committed(ONE)
    slots.keep("/two", tier, TWO)
    assert (slots.is_needed("/one"), slots.is_needed("/two")) == (True, False)
    slots.set_voted(TWO)  # other ranks may know that it is committed
    slots.set_voted(StepRef(3, "a" * 12))
    assert (slots.is_needed("/one"), slots.is_needed("/two")) == (True, True)
    slots.set_decided(TWO)  # it was aborted
    assert (slots.is_needed("/one"), slots.is_needed("/two")) == (True, False)
    slots.set_committed(TWO)
    assert (slots.is_needed("/one"), slots.is_needed("/two")) == (False, True)
    job.set_committed(tier, TWO)
    assert not slots.is_needed("/two")


def test_an_abandoned_step_in_memory_is_not_the_newest(tmp_path: Path) -> None:
    job = JobSteps([])
    tier, slots = OpenTier(0, Tier(str(tmp_path)), open_backend(str(tmp_path))), SlotSteps(0, job)
    for ref, path in ((ONE, "/one"), (TWO, "/two")):
        slots.keep(path, tier, ref)
    assert slots.newest() == 2
    job.rollback = roll_back([], ONE, [TWO])
    assert slots.newest() == 1


def test_a_job_that_goes_back_needs_the_step_that_it_goes_on_from(tmp_path: Path) -> None:
    job = JobSteps([])
    tier, slots = OpenTier(0, Tier(str(tmp_path)), open_backend(str(tmp_path))), SlotSteps(0, job)
    for ref, path in ((ONE, "/one"), (TWO, "/two")):
        slots.keep(path, tier, ref)
        slots.set_voted(ref)
        slots.set_committed(ref)
    slots.set_voted(StepRef(3, "a" * 12))
    job.set_restored(ONE)
    slots.set_restored(ONE)
    assert (slots.is_needed("/one"), slots.is_needed("/two")) == (True, False)
    job.set_committed(tier, ONE)
    assert not slots.is_needed("/one")


class Watched(Wrapped):
    """A tier in memory that holds the manifest of one step back until ``go`` is set.

    It also goes on when the files of the previous step are deleted.
    """

    def __init__(self, inner: StorageBackend, held: int = 2) -> None:
        super().__init__(inner)
        self.held = held
        self.calls: list[str] = []
        self.go = threading.Event()

    def put(self, key: str, data: Any, **how: Any) -> Any:
        if key.startswith(f"step-{self.held:09}") and key.endswith("manifest.json"):
            assert self.go.wait(60)
            self.calls.append(f"put {self.held}")
        return self.inner.put(key, data, **how)

    def delete(self, key: str) -> None:
        if key.startswith(f"step-{self.held - 1:09}") and key.endswith("manifest.json"):
            self.calls.append(f"delete {self.held - 1}")
            self.go.set()
        self.inner.delete(key)


def watch(patch: pytest.MonkeyPatch, held: int = 2) -> list[Watched]:
    """Return the tiers in memory that are opened from now on."""
    opened: list[Watched] = []

    def watched(url: str, store: StorageBackend) -> StorageBackend | Watched:
        if not url.startswith("shm:"):
            return store
        opened.append(Watched(store, held))
        return opened[-1]

    wrap_stores(patch, watched)
    return opened


def go_when_needed(patch: pytest.MonkeyPatch, opened: Sequence[Watched]) -> None:
    """Let the first of ``opened`` go on when a save waits for a slot that is needed."""
    is_needed = SlotSteps.is_needed

    def asked(steps: SlotSteps, path: str) -> bool:
        if found := is_needed(steps, path):
            opened[0].go.set()
        return found

    patch.setattr(SlotSteps, "is_needed", asked)


@pytest.fixture
def name() -> Iterator[str]:
    """Return the name of a tier in memory."""
    name = f"test-slot-steps-{os.getpid()}"
    yield name
    shutil.rmtree(f"/dev/shm/ckpt-memory-{os.getuid()}-{name}", ignore_errors=True)


def test_the_only_step_in_memory_stays_until_the_next_one_is_committed(
    name: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    opened = watch(monkeypatch)
    go_when_needed(monkeypatch, opened)
    state = {"x": torch.zeros(1000)}
    with CheckpointManager(f"shm://{name}") as manager:
        manager.save(state, 1)
        second = manager.save_async(state, 2)
        manager.save_async(state, 3).result()
        second.result()
        assert manager.latest_step() == 3
    assert opened[0].calls == ["put 2", "delete 1"]


def test_the_only_step_in_memory_stays_until_a_larger_one_is_committed(
    name: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    opened = watch(monkeypatch)
    with CheckpointManager(f"shm://{name}") as manager:
        manager.save({"x": torch.zeros(1000)}, 1)
        second = manager.save_async({"x": torch.zeros(3_000_000)}, 2)
        assert (manager.latest_step(), opened[0].calls) == (1, [])
        opened[0].go.set()
        second.result()
        manager.save({"x": torch.zeros(3_000_000)}, 3)
        assert manager.latest_step() == 3
    assert opened[0].calls == ["put 2", "delete 1"]


def test_a_step_without_a_verdict_stays_in_memory_until_a_newer_one_is_committed(
    name: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Other ranks may have seen that it was committed, and have reported it."""
    commit = Committer.commit

    def without_a_verdict(self: Committer, ref: StepRef, vote: Vote, **how: Any) -> Any:
        if ref.step == 2:
            raise CommitError("the job's store is gone")
        return commit(self, ref, vote, **how)

    opened = watch(monkeypatch, held=3)
    go_when_needed(monkeypatch, opened)
    monkeypatch.setattr(Committer, "commit", without_a_verdict)
    state = {"x": torch.zeros(1000)}
    with CheckpointManager([f"shm://{name}", str(tmp_path)]) as manager:
        manager.save(state, 1)
        with pytest.raises(CommitError):
            manager.save(state, 2)
        third = manager.save_async(state, 3)
        manager.save(state, 4)
        third.result()
    assert opened[0].calls == ["put 3", "delete 2"]
