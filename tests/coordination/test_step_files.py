"""What makes a step a checkpoint, and what ends it, are written in one place and in one order."""

from __future__ import annotations

import uuid
from typing import cast

import pytest

from ckpt.coordination.step_files import delete_files, put_manifest
from ckpt.errors import CommitError, OutOfSpace, TransientStorageError
from ckpt.model.keys import StepRef
from ckpt.storage.api import StorageBackend, read_object
from ckpt.storage.testing import FaultyBackend, LoseReply, Raise, Rule
from ckpt_backends.memory import forget_memory, open_memory
from tests.kit.stores import Wrapped


@pytest.fixture
def store():
    name = uuid.uuid4().hex
    yield open_memory(f"memory://{name}", {"shared": True})
    forget_memory(name)


def test_the_first_put_stands():
    name = uuid.uuid4().hex
    store = open_memory(f"memory://{name}", {})
    put_manifest(store, "m", b"one")
    put_manifest(store, "m", b"one")  # two survivors merged the same fragments
    for other in (b"two", b"", b"one and a lot more", b"onf"):
        with pytest.raises(CommitError, match="other content"):
            put_manifest(store, "m", other)
    assert read_object(store, "m", limit=99) == b"one"
    forget_memory(name)


@pytest.mark.parametrize("there", [b"short", b"x" * 1000])
def test_other_bytes_of_any_length_are_another_job(store, there):
    store.put("m", [there])
    with pytest.raises(CommitError, match="other content"):
        put_manifest(store, "m", b"mine")


def test_a_lost_reply_is_no_failure(store):
    faulty = FaultyBackend(store, [Rule(verb="put", nth=1, fault=LoseReply(TransientStorageError))])
    put_manifest(faulty, "m", b"mine")
    assert read_object(store, "m", limit=99) == b"mine"


def test_a_put_that_did_not_happen_is_its_own_error(store):
    error = TransientStorageError("m", "503")
    faulty = FaultyBackend(store, [Rule(verb="put", fault=Raise(error))])
    with pytest.raises(TransientStorageError) as caught:
        put_manifest(faulty, "m", b"mine")
    assert caught.value is error


def test_when_nobody_can_tell_what_is_there_the_first_error_is_told(store):
    store.put("m", [b"mine"])
    rules = [
        Rule(verb="put", fault=Raise(OutOfSpace)),
        Rule(verb="head", fault=Raise(TransientStorageError)),
    ]
    with pytest.raises(OutOfSpace):
        put_manifest(FaultyBackend(store, rules), "m", b"mine")


def test_a_damaged_manifest_is_replaced(store):
    store.put("m", [b"damaged"])
    put_manifest(store, "m", b"intact", replaces_damaged=True)
    assert read_object(store, "m", limit=99) == b"intact"


def test_the_manifest_goes_first_and_a_fragment_before_its_data(store):
    ref = StepRef(3, "abcxyz")
    names = ["rank-00001.safetensors", "rank-00000.json", "rank-00000.encoded", "rank-00001.json"]
    keys = [*map(ref.key, names), ref.manifest, ref.end_note(0)]
    deleted = []

    class Noting(Wrapped):
        def delete(self, key):
            deleted.append(key.rpartition("/")[2])

    delete_files(cast("StorageBackend", Noting(store)), keys)
    assert deleted[0] == "manifest.json"
    assert sorted(deleted[1:3]) == ["rank-00000.json", "rank-00001.json"]
    assert sorted(deleted) == sorted(key.rpartition("/")[2] for key in keys)
