"""The states of the steps on a tier."""

from __future__ import annotations

import uuid
from collections import Counter
from typing import Any

import numpy as np
import pytest

from ckpt.catalog.inventory import Inventory
from ckpt.catalog.late_metrics import put_late
from ckpt.errors import StorageError
from ckpt.model.keys import StepRef
from ckpt.model.record_encoding import pack
from ckpt.root.attempts import step_refs
from ckpt.storage.api import StorageBackend
from ckpt.storage.registry import open_backend
from ckpt.storage.testing import FaultyBackend, Raise, Rule
from tests.checkpoints import Arrays, write_checkpoint
from tests.kit.stores import Wrapped

ARRAYS: Arrays = {"w": np.arange(12, dtype=np.float32).reshape(4, 3), "b": np.arange(5)}


@pytest.fixture
def backend() -> StorageBackend:
    return open_backend(f"memory://{uuid.uuid4().hex}")


@pytest.mark.parametrize("shown", [False, True])
def test_committed_incomplete_and_damaged_steps_are_told_apart(
    backend: StorageBackend, shown: bool
) -> None:
    written = write_checkpoint(backend, 1, ARRAYS, world_size=2)
    write_checkpoint(backend, 2, ARRAYS, world_size=2, commit=False)
    backend.put(write_checkpoint(backend, 3, ARRAYS).ref.manifest, [b"no manifest"])
    damaged, incomplete, whole = Inventory(backend, for_display=shown).look()
    assert [damaged.state, incomplete.state, whole.state] == ["damaged", "incomplete", "committed"]
    assert damaged.reason
    assert (incomplete.reason, incomplete.finished_ranks) == ("", 2)
    assert incomplete.nbytes > 8192
    assert (whole.ranks, whole.tensors) == (2, 2)
    assert whole.staged_bytes == whole.stored_bytes == written.manifest.nbytes


def test_there_is_nothing_on_an_empty_tier(backend: StorageBackend) -> None:
    assert Inventory(backend).look() == []


def test_a_step_that_was_copied_to_the_folder_of_another_is_no_checkpoint(
    backend: StorageBackend,
) -> None:
    packed = pack(write_checkpoint(backend, 1, ARRAYS).stored)
    backend.put(StepRef(9, "abcxyz").manifest, [packed])
    copied, whole = Inventory(backend).look()
    assert (copied.state, whole.state) == ("damaged", "committed")
    assert copied.reason == "it is that of step 1, attempt 'abcxyz'"


class Counted(Wrapped):
    """A store that counts its requests by their verbs."""

    def __init__(self, inner: StorageBackend) -> None:
        super().__init__(inner)
        self.verbs: list[str] = []

    def __getattr__(self, name: str) -> Any:
        self.verbs += [name] * (name in {"head", "list", "folders", "read_into"})
        return super().__getattr__(name)

    def count(self) -> Counter[str]:
        counted, self.verbs = Counter(self.verbs), []
        return counted


@pytest.mark.parametrize("world_size", [1, 2])
def test_a_look_lists_all_steps_of_an_object_store_at_once(
    backend: StorageBackend, world_size: int
) -> None:
    """A listing of each step came at each look, and two requests more at the first one."""
    written = [write_checkpoint(backend, step, ARRAYS, world_size=world_size) for step in range(40)]
    write_checkpoint(backend, 50, ARRAYS, world_size=world_size, commit=False)
    counted: Any = Counted(backend)
    inventory = Inventory(counted, late_metrics=True)
    first = inventory.look()
    # The steps, all of their objects, those of the incomplete one, and the pins.
    assert (verbs := counted.count())["list"] == 3
    # The size of each manifest, and for the incomplete step its manifest and its fragments.
    assert verbs["head"] == len(written) + 1 + world_size
    assert [held.state for held in first] == ["incomplete", *["committed"] * 40]
    assert first[1:] == [held for held in Inventory(backend).look() if held.state == "committed"]
    put_late(backend, written[7].ref, {"loss": 1.5})
    backend.delete(written[9].ref.manifest)
    second = {held.ref.step: held for held in inventory.look()}
    # Two steps without a manifest now, and one record of metrics.
    assert (verbs := counted.count())["list"] == 4
    assert verbs["head"] == 2 * (1 + world_size) + 1
    assert second[7].metrics == {"loss": 1.5}
    assert second[9].state == "incomplete"


@pytest.mark.parametrize("name", ["rank-00001.safetensors", "rank-00000.json"])
def test_a_step_without_a_file_that_it_needs_is_damaged(backend: StorageBackend, name: str) -> None:
    ref = write_checkpoint(backend, 1, ARRAYS, world_size=2).ref
    backend.delete(ref.key(name))
    (held,) = Inventory(backend).look()
    assert (held.state, held.reason) == ("damaged", f"1 of its files is gone, such as {name}")


def test_a_folder_that_cannot_be_listed_is_damaged_where_steps_are_only_shown(
    backend: StorageBackend,
) -> None:
    for step in (1, 2):
        write_checkpoint(backend, step, ARRAYS)

    def failing() -> StorageBackend:
        fault = Raise(lambda key: StorageError(key, "Input/output error"))
        return FaultyBackend(backend, [Rule(verb="list", key="step-000000002", fault=fault)])

    damaged, whole = Inventory(failing(), for_display=True).look()
    assert (damaged.state, whole.state) == ("damaged", "committed")
    assert "Input/output error" in damaged.reason
    with pytest.raises(StorageError, match="Input/output error"):
        Inventory(failing()).look()


@pytest.mark.parametrize("shown", [False, True])
def test_steps_that_were_seen_committed_cost_no_request(
    backend: StorageBackend, *, shown: bool
) -> None:
    for step in (1, 2, 3):
        write_checkpoint(backend, step, ARRAYS)
    counted = FaultyBackend(backend)
    inventory = Inventory(counted, for_display=shown)
    inventory.look()
    before = len(counted.calls)
    assert len(inventory.look()) == 3
    assert [call.verb for call in counted.calls[before:]] == ["folders", "list"]


def test_a_step_that_lost_its_manifest_is_forgotten_before_others_are_removed_for_it(
    backend: StorageBackend,
) -> None:
    refs = [write_checkpoint(backend, step, ARRAYS).ref for step in (1, 2, 3)]
    inventory = Inventory(backend)
    inventory.look()
    assert inventory.confirm(refs)
    backend.delete(refs[2].manifest)
    assert [held.state for held in inventory.look()] == ["committed"] * 3
    assert not inventory.confirm(refs)
    assert [held.state for held in inventory.look()] == ["incomplete", "committed", "committed"]


def test_many_steps_of_an_object_store_are_confirmed_by_one_listing(
    backend: StorageBackend,
) -> None:
    refs = [write_checkpoint(backend, step, ARRAYS).ref for step in range(60)]
    counted = FaultyBackend(backend)
    inventory = Inventory(counted)
    inventory.look()
    before = len(counted.calls)
    assert inventory.confirm(refs)
    assert [call.verb for call in counted.calls[before:]] == ["list"]


def test_only_the_newest_steps_are_read_if_no_others_are_wanted(backend: StorageBackend) -> None:
    for step in range(10):
        write_checkpoint(backend, step, ARRAYS)
    write_checkpoint(backend, 9, ARRAYS, attempt="aaaaaa")
    counted = FaultyBackend(backend)
    found = Inventory(counted, for_display=True).look(newest=2)
    assert [held.ref.step for held in found] == [9, 9, 8]
    read = {call.key.partition("/")[0] for call in counted.calls if "/manifest" in call.key}
    assert read == {held.ref.folder for held in found}


def test_attempts_that_are_newer_than_the_newest_checkpoint_are_what_a_killed_job_leaves(
    backend: StorageBackend,
) -> None:
    for step, commit in ((1, False), (2, True), (3, False), (4, False)):
        write_checkpoint(backend, step, ARRAYS, commit=commit)
    counted = FaultyBackend(backend)
    begun = Inventory(counted).newest_begun(step_refs(backend))
    assert [(held.ref.step, held.state) for held in begun] == [(4, "incomplete"), (3, "incomplete")]
    assert not [call for call in counted.calls if "step-000000001" in call.key]


def test_metrics_are_found_though_another_file_has_gone(backend: StorageBackend) -> None:
    ref = write_checkpoint(backend, 1, ARRAYS).ref
    backend.put(ref.claim_marker, [b""])
    inventory = Inventory(backend, late_metrics=True)
    (first,) = inventory.look()
    backend.delete(ref.claim_marker)
    put_late(backend, ref, {"loss": 1.5})
    (again,) = inventory.look()
    assert (first.metrics, again.metrics) == ({}, {"loss": 1.5})
