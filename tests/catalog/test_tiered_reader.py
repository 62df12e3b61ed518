"""Every byte comes from the nearest store that has it intact."""

from __future__ import annotations

import uuid
from collections.abc import Iterator

import numpy as np
import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from ckpt.catalog.step_listing import is_committed
from ckpt.catalog.tiered_reader import Repair, TieredReader
from ckpt.catalog.transfer import fetch_step
from ckpt.catalog.verify import StepFolder, verify_step
from ckpt.errors import (
    AccessDenied,
    ChecksumMismatch,
    FileDamaged,
    FormatTooNew,
    IntegrityError,
    ObjectNotFound,
    TransientStorageError,
)
from ckpt.model.box import Box
from ckpt.model.manifest import chunk_offsets
from ckpt.pipeline.retry import RetryPolicy
from ckpt.pipeline.workers import Workers
from ckpt.plan.leaf import Leaf
from ckpt.plan.restore import RestorePlan, plan_restore
from ckpt.storage.api import StorageBackend, read_object
from ckpt.storage.registry import open_backend
from ckpt.storage.testing.faulty import FaultyBackend, Raise, Rule, flip_byte
from tests.checkpoints import Written, write_checkpoint
from tests.kit.examples import examples
from tests.kit.sinks import ArraySink

ARRAY = np.random.default_rng(3).standard_normal(
    (12, 16)
)  # a row of 128 bytes is a chunk; six rows each on two ranks
IMPATIENT = RetryPolicy(attempts=2, first_seconds=0.001, most_seconds=0.002)
WANTED = [Leaf("x", "float64", ARRAY.shape, (Box.whole(ARRAY.shape),))]


def written(*names: str) -> tuple[list[StorageBackend], Written]:
    """The same step on this many stores."""
    stores = [open_backend(f"memory://{uuid.uuid4().hex}/{name}") for name in names]
    for store in stores:
        done = write_checkpoint(store, 7, {"x": ARRAY}, world_size=2, chunk_bytes=128)
    return stores, done


@pytest.fixture(scope="module")
def workers() -> Iterator[Workers]:
    with Workers("test", 3) as group:
        yield group


def key(done: Written, rank: int) -> str:
    return done.ref.key(done.manifest.files[rank].name)


def read(
    stores: list[StorageBackend], done: Written, workers: Workers, *, direct: bool = True
) -> tuple[np.ndarray, TieredReader, list[RestorePlan], list[Repair]]:
    reported: list[Repair] = []
    origin = TieredReader(stores, done.ref, retry=IMPATIENT, on_repair=reported.append)
    manifest = origin.with_fragments(origin.manifest(), None).manifest
    sink = ArraySink(WANTED, direct=direct)
    given_by = origin.read(plan_restore(manifest, WANTED), sink, workers=workers)
    return sink.arrays[0], origin, given_by, reported


@pytest.mark.parametrize("direct", [True, False])
def test_only_the_bad_chunk_comes_from_the_next(workers: Workers, direct: bool) -> None:
    (near, far), done = written("near", "far")
    flip_byte(near, key(done, 1), chunk_offsets(done.manifest.files[1])[3] + 5)
    far = FaultyBackend(far)
    array, origin, given_by, reported = read([near, far], done, workers, direct=direct)
    assert np.array_equal(array, ARRAY)
    assert [len(part.reads) for part in given_by] == [11, 1]
    asked = [(call.verb, call.key, call.nbytes) for call in far.calls if call.key == key(done, 1)]
    assert asked == [("read_into", key(done, 1), 128)]
    (repair,) = origin.repairs
    assert reported == [repair]
    assert (repair.tier, repair.key, repair.nbytes) == (near.url, key(done, 1), 128)
    assert "checksum mismatch" in repair.reason


def test_a_whole_near_tier_leaves_the_far_one_alone(workers: Workers) -> None:
    (near, far), done = written("near", "far")
    far = FaultyBackend(far)
    array, origin, _, reported = read([near, far], done, workers)
    assert np.array_equal(array, ARRAY)
    assert far.calls == []
    assert reported == list(origin.repairs) == []


def test_many_bad_chunks_of_a_file_are_one_repair(workers: Workers) -> None:
    (near, far), done = written("near", "far")
    for place in chunk_offsets(done.manifest.files[0])[1:4]:
        flip_byte(near, key(done, 0), place)
    _, origin, _, reported = read([near, far], done, workers)
    assert [(one.key, one.nbytes) for one in origin.repairs] == [(key(done, 0), 3 * 128)]
    assert len(reported) == 1


@pytest.mark.parametrize("damage", ["gone", "empty", "cut"])
def test_a_file_that_is_missing_or_short_comes_from_the_next(workers: Workers, damage: str) -> None:
    (near, far), done = written("near", "far")
    whole = read_object(near, key(done, 0), limit=1 << 20)
    if damage == "gone":
        near.delete(key(done, 0))
    else:
        near.put(key(done, 0), [b"" if damage == "empty" else whole[:-130]])
    near = FaultyBackend(near)
    array, origin, given_by, reported = read([near, far], done, workers)
    assert np.array_equal(array, ARRAY)
    # what is before the cut is intact
    assert len(given_by[1].reads) == (2 if damage == "cut" else 6)
    assert len(reported) == len(origin.repairs) == 1
    if damage == "gone":
        # each worker asks once at most
        assert sum(call.key == key(done, 0) for call in near.calls) <= 3


def test_files_serve_where_there_is_no_manifest(workers: Workers) -> None:
    """The cache is partial: what it lacks was never there, and is not damage."""
    (near, far), done = written("near", "far")
    near.delete(done.ref.manifest)
    near.delete(key(done, 1))
    array, origin, given_by, _ = read([near, far], done, workers)
    assert np.array_equal(array, ARRAY)
    assert [{one.rank for one in part.reads} for part in given_by] == [{0}, {1}]
    assert origin.repairs == ()


def test_a_torn_manifest_does_not_stop_its_data_from_serving(workers: Workers) -> None:
    (near, far), done = written("near", "far")
    near.put(done.ref.manifest, [read_object(near, done.ref.manifest, limit=1 << 20)[:-9]])
    array, origin, given_by, reported = read([near, far], done, workers)
    assert np.array_equal(array, ARRAY)
    assert [len(part.reads) for part in given_by] == [12, 0]
    assert [one.key for one in reported] == [done.ref.manifest]
    assert [one.nbytes for one in origin.repairs] == [0]


def test_a_store_that_does_not_answer_is_asked_once_and_passed_over(workers: Workers) -> None:
    (near, far), done = written("near", "far")
    dead = FaultyBackend(
        near,
        [
            Rule(verb="read_into", fault=Raise(TransientStorageError)),
            Rule(verb="head", fault=Raise(TransientStorageError)),
        ],
    )
    array, _, _, reported = read([dead, far], done, workers)
    assert np.array_equal(array, ARRAY)
    assert len(dead.calls) == IMPATIENT.attempts
    assert [(one.tier, one.key) for one in reported] == [(near.url, "")]


def test_a_store_that_dies_while_it_is_read_is_not_asked_for_each_chunk(workers: Workers) -> None:
    (near, far), done = written("near", "far")
    dying = FaultyBackend(
        near, [Rule(verb="read_into", key="safetensors", fault=Raise(TransientStorageError))]
    )
    array, origin, _, _ = read([dying, far], done, workers)
    assert np.array_equal(array, ARRAY)
    assert sum("safetensors" in call.key for call in dying.calls) <= 3 * IMPATIENT.attempts
    assert [(one.tier, one.key) for one in origin.repairs] == [(near.url, "")]


def test_damage_near_and_silence_far_is_no_reason_to_go_back_in_history(workers: Workers) -> None:
    (near, far), done = written("near", "far")
    flip_byte(near, key(done, 0), -3)
    silent = FaultyBackend(far, [Rule(verb="read_into", fault=Raise(TransientStorageError))])
    with pytest.raises(TransientStorageError):
        read([near, silent], done, workers)
    denied = FaultyBackend(far, [Rule(verb="read_into", fault=Raise(AccessDenied))])
    with pytest.raises(AccessDenied):
        read([near, denied], done, workers)


def test_what_is_intact_nowhere_is_an_error_that_names_all(workers: Workers) -> None:
    stores, done = written("near", "mid", "far")
    for store in stores:
        flip_byte(store, key(done, 0), -3)
    with pytest.raises(
        IntegrityError,
        match=r"no tier has .* intact: .*/near: checksum.*/mid: checksum.*/far: checksum",
    ):
        read(stores, done, workers)


def test_a_later_format_is_not_hidden_by_a_store_that_has_an_older_one(workers: Workers) -> None:
    (near, far), done = written("near", "far")
    newer = FaultyBackend(
        near, [Rule(verb="read_into", key="manifest", fault=Raise(FormatTooNew("k", 9, 1)))]
    )
    with pytest.raises(FormatTooNew):
        read([newer, far], done, workers)


def test_a_mistake_of_ours_is_no_damage(workers: Workers) -> None:
    stores, done = written("near", "far")

    class Broken(ArraySink):
        def place(self, read: object, data: object) -> None:
            raise ZeroDivisionError

    origin = TieredReader(stores, done.ref, retry=IMPATIENT)
    manifest = origin.with_fragments(origin.manifest(), None).manifest
    with pytest.raises(ZeroDivisionError):
        origin.read(plan_restore(manifest, WANTED), Broken(WANTED, direct=False), workers=workers)
    assert origin.repairs == ()


BAD = st.sets(st.tuples(st.integers(0, 2), st.integers(0, 1), st.integers(0, 6)), max_size=25)
"""(store, file, chunk); chunk 0 is the header, which no restore of tensors reads."""


@settings(max_examples=examples(60), suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(bad=BAD, gone=st.sets(st.tuples(st.integers(0, 2), st.integers(0, 1)), max_size=2))
def test_a_step_is_whole_if_and_only_if_each_chunk_is_intact_somewhere(
    workers: Workers, bad: set[tuple[int, int, int]], gone: set[tuple[int, int]]
) -> None:
    stores, done = written("near", "mid", "far")
    for store, file, chunk in bad:
        flip_byte(
            stores[store], key(done, file), chunk_offsets(done.manifest.files[file])[chunk] + 7
        )
    for store, file in gone:
        stores[store].delete(key(done, file))

    def nearest(file: int, chunk: int) -> int | None:
        return next(
            (s for s in range(3) if (s, file) not in gone and (s, file, chunk) not in bad), None
        )

    expected = {(file, chunk): nearest(file, chunk) for file in range(2) for chunk in range(7)}
    tensors = {place: store for place, store in expected.items() if place[1] > 0}
    if None in tensors.values():
        with pytest.raises(IntegrityError if gone == set() else (IntegrityError, ObjectNotFound)):
            read(stores, done, workers)
    else:
        array, _, given_by, _ = read(stores, done, workers)
        assert np.array_equal(array, ARRAY)
        for store, part in enumerate(given_by):
            offsets = [chunk_offsets(file) for file in done.manifest.files]
            got = {(one.rank, list(offsets[one.rank]).index(one.offset)) for one in part.reads}
            assert got == {place for place, one in tensors.items() if one == store}
    there = open_backend(f"memory://{uuid.uuid4().hex}")
    if None in expected.values():
        with pytest.raises(IntegrityError):
            fetch_step(stores, StepFolder(there, done.ref, workers, IMPATIENT))
        assert not is_committed(there, done.ref)
    else:
        fetch_step(stores, StepFolder(there, done.ref, workers, IMPATIENT))
        assert verify_step(there, done.ref, workers=workers).intact


def test_a_fetch_tells_once_for_each_file_and_store_what_it_took_from_elsewhere(
    workers: Workers,
) -> None:
    (near, far), done = written("near", "far")
    flip_byte(near, key(done, 0), 4096 + 3)
    flip_byte(near, key(done, 0), 4096 + 300)
    near.delete(done.ref.key(done.manifest.fragments[1].name))
    reported: list[Repair] = []
    there = open_backend(f"memory://{uuid.uuid4().hex}")
    fetch_step(
        [near, far], StepFolder(there, done.ref, workers, IMPATIENT), on_repair=reported.append
    )
    assert {one.key for one in reported} == {
        key(done, 0),
        done.ref.key(done.manifest.fragments[1].name),
    }
    assert len(reported) == 2


def test_one_source_says_what_is_wrong_as_it_always_did(workers: Workers) -> None:
    (only,), done = written("only")
    flip_byte(only, key(done, 0), 4096 + 130)
    with pytest.raises(ChecksumMismatch) as caught:
        read([only], done, workers)
    assert (caught.value.key, caught.value.offset, caught.value.nbytes) == (
        key(done, 0),
        4096 + 128,
        128,
    )
    only.put(key(done, 0), [b"short"])
    with pytest.raises(FileDamaged, match=r"has 5 bytes, should have .*: it was cut"):
        read([only], done, workers)
