"""No late put of a manifest lists a step that another job has removed."""

from __future__ import annotations

import os
import threading
import time
from pathlib import Path

import pytest

from ckpt import CheckpointManager, Tier
from ckpt.catalog.inventory import Inventory
from ckpt.catalog.step_listing import committed, find, is_committed, read_packed
from ckpt.catalog.transfer import fetch_step
from ckpt.catalog.verify import StepFolder
from ckpt.coordination.step_files import put_manifest
from ckpt.coordination.tombstone import TOMBSTONE, delete_tombstone, replace_by_tombstone
from ckpt.errors import AccessDenied, CkptError, CommitError, NoCheckpoint, ObjectNotFound
from ckpt.model.keys import StepRef
from ckpt.pipeline.workers import Workers
from ckpt.retention.policy import PruneContext, Retention
from ckpt.retention.pruner import prune
from ckpt.retention.removal import remove
from ckpt.root.attempts import step_refs
from ckpt.root.claim import Claim
from ckpt.root.owner import Owner
from ckpt.storage.api import StorageBackend
from ckpt.storage.registry import open_backend
from ckpt.storage.testing import FaultyBackend, Raise, Rule
from tests.kit.states import state
from tests.kit.stores import Wrapped, whole, wrap_stores


class Stopping(Wrapped):
    """A store on which a process stops right before it puts the manifest of step 4."""

    def __init__(self, inner: StorageBackend) -> None:
        super().__init__(inner)
        self.reached, self.go = threading.Event(), threading.Event()

    def put(self, key, parts, *, if_absent=False):
        if key.startswith("step-000000004.") and key.endswith("manifest.json") and if_absent:
            self.reached.set()
            assert self.go.wait(60)
        return self.inner.put(key, parts, if_absent=if_absent)


def on_machine(monkeypatch: pytest.MonkeyPatch, name: str) -> None:
    monkeypatch.setattr("ckpt.root.owner.boot_identity", lambda: f"{name}/1")


def test_a_job_that_stops_before_its_put_lists_no_step_that_another_job_removed(
    near: Path, far: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The other job copies the step to the far tier itself, and prunes it there."""
    tiers = [Tier(str(near), keep_last=2), Tier(str(far), keep_last=2)]
    on_machine(monkeypatch, "first")
    with monkeypatch.context() as first:
        stopping: list[Stopping] = []

        def wrap(url: str, store: StorageBackend) -> StorageBackend:
            if url != str(far):
                return store
            stopping.append(Stopping(store))
            return stopping[-1]

        wrap_stores(first, wrap)
        one = CheckpointManager(tiers, on_error="warn", commit_timeout_seconds=20)
    for step in (1, 2, 3):
        one.save(state(step), step)
    pending = one.save_async(state(4), 4)
    [store] = stopping
    assert store.reached.wait(30)
    on_machine(monkeypatch, "second")
    with CheckpointManager(tiers) as other:
        other.restore(state(0))
        for step in (11, 12, 13):
            other.save(state(step), step)
    assert whole(far) == [12, 13]
    store.go.set()
    assert isinstance(pending.exception(30), CkptError)
    one.close()
    assert whole(far) == [12, 13]
    shown = Inventory(open_backend(str(far)), for_display=True).look()
    assert [held.ref.step for held in shown] == [13, 12]


@pytest.fixture
def taken(far: Path, monkeypatch: pytest.MonkeyPatch) -> tuple[StorageBackend, Claim]:
    """Return a tier with two steps, and the claim of a job that took it from one that may live."""
    on_machine(monkeypatch, "first")
    manager = CheckpointManager(far)
    for step in (1, 2):
        manager.save(state(step), step)
    on_machine(monkeypatch, "second")
    backend = open_backend(str(far))
    claim = Claim(backend, Owner.of_this_process("ownownownown"))
    claim.take()
    manager.close()
    return backend, claim


def test_a_removed_step_of_a_job_that_may_live_leaves_a_tombstone_for_a_day(taken, far) -> None:
    backend, claim = taken
    context = PruneContext(own=claim.own_job, claim=claim)
    [gone] = prune(backend, Retention(keep_last=1), context)
    [folder] = far.glob("step-000000001.*")
    assert [path.name for path in folder.iterdir()] == ["manifest.json"]
    with pytest.raises(CommitError, match="was removed by another job"):
        put_manifest(backend, gone.ref.manifest, b"a late manifest")
    with pytest.raises(ObjectNotFound):
        read_packed(backend, gone.ref)
    with pytest.raises(NoCheckpoint, match="step 1 was removed"):
        find(backend, 1)
    assert prune(backend, Retention(keep_last=1), context) == []
    assert folder.exists()
    day = time.time() - 25 * 3600
    os.utime(folder / "manifest.json", (day, day))
    prune(backend, Retention(keep_last=1), context)
    assert not folder.exists()


def test_a_removal_that_was_cut_off_leaves_the_tombstone_too(taken, far) -> None:
    backend, claim = taken
    context = PruneContext(own=claim.own_job, claim=claim)
    cut = FaultyBackend(backend, [Rule(verb="delete", nth=1, fault=Raise(AccessDenied))])
    with pytest.raises(AccessDenied):
        remove(cut, Inventory(backend).look()[-1], claim)
    held = Inventory(backend).look()[-1]
    assert held.has_removal_begun
    prune(backend, Retention(keep_last=1), context)
    [folder] = far.glob("step-000000001.*")
    assert [path.name for path in folder.iterdir()] == ["manifest.json"]


def test_a_copy_replaces_a_tombstone_when_all_files_are_there(taken, far, near) -> None:
    backend, claim = taken
    with Workers("test", 2) as workers:
        ref = step_refs(backend)[-1]
        source = open_backend(str(near))
        fetch_step([backend], StepFolder(source, ref, workers))
        remove(backend, Inventory(backend).look()[-1], claim)
        assert not is_committed(backend, ref)
        missing: list[set[str]] = []

        class Checked(Wrapped):
            def delete(self, key: str) -> None:
                missing.append({*os.listdir(near / ref.folder)} - {*os.listdir(far / ref.folder)})
                self.inner.delete(key)

        fetch_step([source], StepFolder(Checked(backend), ref, workers))
    assert missing[0] == set(), "the tombstone goes after the last file has come"
    assert whole(far) == [1, 2]


def test_only_a_tombstone_is_deleted_as_one(taken) -> None:
    backend, _ = taken
    newest, oldest = committed(backend)
    replace_by_tombstone(backend, oldest)
    for ref in (newest, oldest):
        delete_tombstone(backend, ref)
        delete_tombstone(backend, ref)
    assert committed(backend) == [newest]
    assert not (Path(backend.url) / oldest.manifest).exists()
    assert len(TOMBSTONE) < (Path(backend.url) / newest.manifest).stat().st_size


def test_the_next_job_knows_which_jobs_may_still_live(far, monkeypatch) -> None:
    backend = open_backend(str(far))
    for number, name in enumerate(("first", "second", "third")):
        on_machine(monkeypatch, name)
        claim = Claim(backend, Owner.of_this_process(f"attempt{'abc'[number]}xyz"))
        claim.take()
        for each in range(3):
            ref = StepRef(1, f"attempt{'abc'[each]}xyz")
            assert claim.may_be_committed(ref) == (each < number), (number, each)
