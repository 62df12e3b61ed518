from __future__ import annotations

import os
from dataclasses import replace

import numpy as np
import pytest

from ckpt.errors import ChecksumMismatch, FileDamaged, TransientStorageError
from ckpt.model.box import Box
from ckpt.model.keys import StepRef, data_name
from ckpt.pipeline.chunk_reader import GAP_BYTES, RUN_BYTES, ChunkReader, join_adjacent, read_plan
from ckpt.plan.leaf import Leaf
from ckpt.plan.restore import RestorePlan, plan_restore
from ckpt.storage.testing import FaultyBackend, Raise, Rule, flip_byte
from ckpt_backends.folder.posix import open_posix
from tests.kit.sinks import ArraySink
from tests.plan.worlds import fragment_of, merged

ARRAY = np.random.default_rng(9).standard_normal((64, 1024))  # a row of 8 KiB is a chunk


def key_of(rank: int) -> str:
    """Return where the file of a rank of ``fragment_of`` is."""
    return StepRef(5, "abcxyz").key(data_name(rank))


@pytest.fixture
def saved(memory):
    """ARRAY on two ranks, in chunks of one row."""
    parts = []
    for rank in range(2):
        leaf = Leaf("x", "float64", ARRAY.shape, (Box((32 * rank, 0), (32, 1024)),))
        image, fragment = fragment_of(rank, 2, [leaf], {"x": ARRAY}, chunk_bytes=8192)
        memory.put(key_of(rank), [image])
        parts.append(fragment)
    return merged(parts)


def read(backend, manifest, wanted, workers, retry, *, direct=True):
    sink = ArraySink(wanted, direct=direct)
    seen: list[int] = []
    plan = plan_restore(manifest, wanted)
    read_plan(
        plan,
        sink,
        reader=ChunkReader(backend, retry),
        files=manifest.stored_files(),
        workers=workers,
        on_bytes=seen.append,
    )
    return sink, plan, seen


def leaf(box: Box) -> Leaf:
    return Leaf("x", "float64", ARRAY.shape, (box,))


ROW = Box((5, 0), (1, 1024))


@pytest.mark.parametrize("direct", [True, False])
@pytest.mark.parametrize(
    "box",
    [
        Box.whole(ARRAY.shape),
        ROW,
        Box((31, 3), (2, 700)),
        Box((0, 1023), (64, 1)),
        Box((63, 0), (1, 1024)),
    ],
)
def test_what_is_read_is_the_slice(memory, saved, workers, retry, box, direct):
    sink, plan, seen = read(memory, saved, [leaf(box)], workers, retry, direct=direct)
    assert np.array_equal(sink.arrays[0], ARRAY[box.slices()])
    assert len(sink.direct_reads) + len(sink.placed_reads) == len(plan.reads)
    assert sum(seen) >= plan.read_bytes


def test_a_single_whole_chunk_goes_straight_into_the_target(memory, saved, workers, retry):
    sink, _, seen = read(memory, saved, [leaf(ROW)], workers, retry)
    assert (len(sink.direct_reads), sink.placed_reads, seen) == (1, [], [8192])


def test_chunks_that_are_neighbours_in_file_and_target_are_read_as_one_piece(
    memory, saved, workers, retry
):
    faulty = FaultyBackend(memory)
    sink, plan, _ = read(faulty, saved, [leaf(Box.whole(ARRAY.shape))], workers, retry)
    assert np.array_equal(sink.arrays[0], ARRAY)
    assert (len(sink.direct_reads), sink.placed_reads) == (len(plan.reads), [])
    assert sorted(call.nbytes for call in faulty.calls) == [32 * 8192, 32 * 8192]


def test_pieces_of_memory_that_follow_each_other_are_joined():
    room = memoryview(bytearray(range(100)))
    pieces = [room[10:20], room[20:25], room[30:40], room[40:41], room[0:10]]
    found = join_adjacent(pieces)
    assert [bytes(piece) for piece in found] == [
        bytes(room[10:25]),
        bytes(room[30:41]),
        bytes(room[0:10]),
    ]
    found[0][0] = 200
    assert room[10] == 200
    assert join_adjacent(pieces[:1]) == pieces[:1]


def test_a_part_of_a_chunk_goes_through_a_buffer(memory, saved, workers, retry):
    sink, _, _ = read(memory, saved, [leaf(Box((5, 1), (1, 1000)))], workers, retry)
    assert (sink.direct_reads, len(sink.placed_reads)) == ([], 1)


def test_neighbouring_chunks_are_one_request_and_far_ones_are_not(memory, saved, workers, retry):
    faulty = FaultyBackend(memory)
    gap_rows = GAP_BYTES // 8192
    wanted = [
        leaf(Box((0, 0), (3, 1024))),
        leaf(Box((3 + gap_rows, 0), (1, 1024))),
        leaf(Box((5 + 2 * gap_rows, 0), (1, 1024))),
    ]
    sink, _, _ = read(faulty, saved, wanted, workers, retry)
    sizes = sorted(call.nbytes for call in faulty.calls)
    assert sizes == [8192, (4 + gap_rows) * 8192]
    assert all(
        np.array_equal(array, ARRAY[one.boxes[0].slices()])
        for array, one in zip(sink.arrays, wanted, strict=True)
    )
    assert max(sizes) <= RUN_BYTES


def test_nothing_wanted_is_no_request(memory, workers, retry):
    faulty = FaultyBackend(memory)
    plan = RestorePlan(reads=(), wanted_bytes=0)
    read_plan(
        plan,
        ArraySink([], direct=True),
        reader=ChunkReader(faulty, retry),
        files={},
        workers=workers,
        on_bytes=print,
    )
    assert faulty.calls == []


@pytest.mark.parametrize("box", [ROW, Box((3, 1), (6, 100))], ids=["direct", "bounce"])
@pytest.mark.parametrize("place", [0, 4000, 8191])
def test_a_damaged_chunk_is_named_by_key_and_offset(memory, saved, workers, retry, box, place):
    offset = 4096 + 5 * 8192
    flip_byte(memory, key_of(0), offset + place)
    with pytest.raises(ChecksumMismatch) as caught:
        read(memory, saved, [leaf(box)], workers, retry)
    assert (caught.value.key, caught.value.offset, caught.value.nbytes) == (
        key_of(0),
        offset,
        8192,
    )


def test_damage_beside_what_is_wanted_is_not_looked_at(memory, saved, workers, retry):
    flip_byte(memory, key_of(0), 4096 + 6 * 8192)
    sink, _, _ = read(memory, saved, [leaf(ROW)], workers, retry)
    assert np.array_equal(sink.arrays[0], ARRAY[5:6])


def test_a_damaged_chunk_is_never_placed(memory, saved, workers, retry):
    flip_byte(memory, key_of(0), 4096 + 5 * 8192)
    sink = ArraySink([leaf(Box((5, 0), (1, 512)))], direct=False)
    plan = plan_restore(saved, sink.wanted)
    with pytest.raises(ChecksumMismatch):
        read_plan(
            plan,
            sink,
            reader=ChunkReader(memory, retry),
            files=saved.stored_files(),
            workers=workers,
            on_bytes=lambda _: None,
        )
    assert sink.placed_reads == []


@pytest.mark.parametrize("keep", [0, 4096, 4096 + 6 * 8192 - 1])
def test_a_short_file_is_damage_and_both_sizes_are_named(memory, saved, workers, retry, keep):
    image = bytearray(memory.head(key_of(0)).size)
    memory.read_into(key_of(0), 0, memoryview(image))
    memory.put(key_of(0), [image[:keep]])
    with pytest.raises(FileDamaged, match="rank-00000") as caught:
        read(memory, saved, [leaf(ROW)], workers, retry)
    assert (caught.value.size, caught.value.wanted) == (keep, len(image))


def test_a_missing_file_is_named(memory, saved, workers, retry):
    memory.delete(key_of(1))
    with pytest.raises(FileDamaged, match="is missing") as caught:
        read(memory, saved, [leaf(Box.whole(ARRAY.shape))], workers, retry)
    assert caught.value.key == key_of(1)


def test_a_read_is_tried_again_after_a_transient_error(memory, saved, workers, retry):
    faulty = FaultyBackend(
        memory, [Rule(verb="read_into", nth=n, fault=Raise(TransientStorageError)) for n in (1, 3)]
    )
    sink, _, _ = read(faulty, saved, [leaf(Box.whole(ARRAY.shape))], workers, retry)
    assert np.array_equal(sink.arrays[0], ARRAY)


class Aligned:
    """A store where all but the end of a file must be aligned, as in direct I/O."""

    def __init__(self, inner) -> None:
        self.inner = inner
        self.capabilities = replace(inner.capabilities, alignment=4096)
        self.reads: list[tuple[str, int, int]] = []

    def read_into(self, key: str, offset: int, out: memoryview) -> None:
        assert offset % 4096 == 0
        assert np.frombuffer(out, np.uint8).ctypes.data % 4096 == 0
        assert out.nbytes % 4096 == 0 or offset + out.nbytes == self.inner.head(key).size
        self.reads.append((key, offset, out.nbytes))
        self.inner.read_into(key, offset, out)


@pytest.mark.parametrize("rows", [[0], [31], [63], [3, 17, 40], list(range(64))])
def test_a_store_that_wants_alignment_gets_it(memory, workers, retry, rows):
    array = ARRAY[:, :1000]  # chunks of 8000 bytes are not aligned
    parts = []
    for rank in range(2):
        part = Leaf("x", "float64", array.shape, (Box((32 * rank, 0), (32, 1000)),))
        image, fragment = fragment_of(rank, 2, [part], {"x": array}, chunk_bytes=8000)
        memory.put(key_of(rank), [image])
        parts.append(fragment)
    backend = Aligned(memory)
    wanted = [Leaf("x", "float64", array.shape, (Box((row, 0), (1, 1000)),)) for row in rows]
    sink, _, _ = read(backend, merged(parts), wanted, workers, retry)
    assert backend.reads
    for row, found in zip(rows, sink.arrays, strict=True):
        assert np.array_equal(found, array[row : row + 1])


# a store that can read into many places at once

SIZES = [1000, 2000, 600_000, 3000, 1, 1_300_001, 5000, 5000]
"""Of chunks, in file order, so that few of them lie at a block of the disk."""


class Scattering:
    """A store that records its requests."""

    def __init__(self, inner) -> None:
        self.inner, self.capabilities = inner, inner.capabilities
        self.asked: list[tuple[int, list[memoryview]]] = []
        self.stumbles = 0

    def read_parts(self, key: str, offset: int, outs: list[memoryview]) -> None:
        self.asked.append((offset, list(outs)))
        if self.stumbles:
            self.stumbles -= 1
            outs[0][:] = b"\xff" * outs[0].nbytes  # the read fails halfway
            raise TransientStorageError(key)
        self.inner.read_parts(key, offset, outs)

    def head(self, key: str):
        return self.inner.head(key)


@pytest.fixture
def mixed(tmp_path, monkeypatch):
    """A file of large and small chunks, each of which is a whole tensor.

    The values are its store, its manifest, what is in it, and what can be wanted.
    """
    monkeypatch.setattr("ckpt.model.chunks.LEAST_BYTES", 8 << 20)
    leaves = [Leaf(f"x{k}", "uint8", (n,), (Box((0,), (n,)),)) for k, n in enumerate(SIZES)]
    arrays = [
        np.random.default_rng(k).integers(0, 256, n, dtype=np.uint8) for k, n in enumerate(SIZES)
    ]
    named = {leaf.name: array for leaf, array in zip(leaves, arrays, strict=True)}
    image, fragment = fragment_of(0, 1, leaves, named, chunk_bytes=8 << 20)
    store = open_posix(str(tmp_path), {})
    store.put(key_of(0), [image])
    return Scattering(store), merged([fragment]), arrays, leaves


def test_neighbours_of_any_size_come_by_one_request_into_their_own_memory(mixed, workers, retry):
    store, manifest, arrays, wanted = mixed
    sink, _, _ = read(store, manifest, wanted, workers, retry)
    [(offset, outs)] = store.asked
    assert (offset, [out.nbytes for out in outs]) == (4096, SIZES)
    assert len(sink.direct_reads) == len(SIZES)
    assert sink.placed_reads == []
    assert all(
        np.array_equal(found, array) for found, array in zip(sink.arrays, arrays, strict=True)
    )


def test_what_nobody_wants_between_two_chunks_goes_to_a_buffer(mixed, workers, retry):
    store, manifest, arrays, wanted = mixed
    sink, _, _ = read(store, manifest, [wanted[0], wanted[3], wanted[5]], workers, retry)
    assert [(offset, [out.nbytes for out in outs]) for offset, outs in store.asked] == [
        (4096, SIZES[:1]),
        (4096 + sum(SIZES[:3]), [SIZES[3], SIZES[4], SIZES[5]]),
    ]
    assert all(
        np.array_equal(found, arrays[k]) for found, k in zip(sink.arrays, (0, 3, 5), strict=True)
    )


def test_parts_of_chunks_share_a_buffer_that_is_aligned_as_the_file(mixed, workers, retry):
    store, manifest, arrays, wanted = mixed
    part = Leaf("x1", "uint8", (SIZES[1],), (Box((7,), (1000,)),))
    other = Leaf("x2", "uint8", (SIZES[2],), (Box((1,), (SIZES[2] - 1,)),))
    sink, _, _ = read(store, manifest, [part, other, wanted[3]], workers, retry)
    [(offset, outs)] = store.asked
    assert (offset, [out.nbytes for out in outs]) == (
        4096 + SIZES[0],
        [SIZES[1] + SIZES[2], SIZES[3]],
    )
    assert np.frombuffer(outs[0], np.uint8).ctypes.data % 4096 == offset % 4096
    assert len(sink.placed_reads) == 2
    expected = [arrays[1][7:1007], arrays[2][1:], arrays[3]]
    assert all(
        np.array_equal(found, array) for found, array in zip(sink.arrays, expected, strict=True)
    )


@pytest.mark.parametrize("direct", [True, False])
@pytest.mark.parametrize("index", range(len(SIZES)))
def test_damage_is_named_whichever_way_a_chunk_goes(mixed, workers, retry, index, direct):
    store, manifest, _, wanted = mixed
    start = 4096 + sum(SIZES[:index])
    flip_byte(store.inner, key_of(0), start + SIZES[index] - 1)
    with pytest.raises(ChecksumMismatch) as caught:
        read(store, manifest, wanted, workers, retry, direct=direct)
    assert (caught.value.offset, caught.value.nbytes) == (start, SIZES[index])


def test_a_request_that_stumbles_half_way_is_made_again(mixed, workers, retry):
    store, manifest, arrays, wanted = mixed
    store.stumbles = 2
    sink, _, _ = read(store, manifest, wanted, workers, retry)
    assert len(store.asked) == 3
    assert all(
        np.array_equal(found, array) for found, array in zip(sink.arrays, arrays, strict=True)
    )


def test_a_file_that_ends_early_is_damage(mixed, workers, retry, tmp_path):
    store, manifest, _, wanted = mixed
    os.truncate(tmp_path / key_of(0), 700_000)
    with pytest.raises(FileDamaged, match="has 700000 bytes, should have 1920098: it was cut"):
        read(store, manifest, wanted, workers, retry)
