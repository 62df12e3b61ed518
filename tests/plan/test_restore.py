from __future__ import annotations

import itertools

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from ckpt.errors import DtypeMismatch, EntryMissing, ShapeMismatch
from ckpt.model.box import Box
from ckpt.model.manifest import Manifest
from ckpt.plan.leaf import Leaf
from ckpt.plan.restore import ChunkRead, coalesce, plan_restore
from tests.kit.examples import examples
from tests.model.boxes import boxes_in, partition
from tests.plan.worlds import assign, fetch, fragment_of, merged

DTYPES = ["float64", "float32", "float16", "int8", "uint32", "bool", "complex64", "complex128"]


def numbers(shape: tuple[int, ...], dtype: str, seed: int) -> np.ndarray:
    nbytes = int(np.prod(shape)) * np.dtype(dtype).itemsize
    data = np.random.default_rng(seed).bytes(nbytes)
    return np.frombuffer(
        bytes(b & 1 for b in data) if dtype == "bool" else data, dtype=dtype
    ).reshape(shape)


@st.composite
def saved_worlds(draw: st.DrawFn):
    """Draw global tensors, saved by a random world with random boxes, some boxes by
    several ranks.
    """
    rng = draw(st.randoms(use_true_random=False))
    world_size = draw(st.integers(1, 4))
    chunk_bytes = draw(st.sampled_from([16, 24, 64, 1000]))
    arrays: dict[str, np.ndarray] = {}
    ranks: list[list[Leaf]] = [[] for _ in range(world_size)]
    for index in range(draw(st.integers(1, 3))):
        shape = tuple(draw(st.lists(st.integers(0, 6), max_size=3)))
        dtype = draw(st.sampled_from(DTYPES))
        arrays[f"t{index}"] = numbers(shape, dtype, index)
        boxes = [box for box in partition(shape, 6, rng) if box.numel or rng.random() < 0.5]
        owned = assign([*boxes, *(box for box in boxes if rng.random() < 0.3)], world_size, rng)
        for rank, held in enumerate(owned):
            ranks[rank].append(Leaf(f"t{index}", dtype, shape, tuple(sorted(set(held)))))
    images: dict[int, bytes] = {}
    parts = []
    for rank, leaves in enumerate(ranks):
        images[rank], fragment = fragment_of(
            rank, world_size, leaves, arrays, chunk_bytes=chunk_bytes, tied={"tied": "t0"}
        )
        parts.append(fragment)
    return arrays, images, merged(rng.sample(parts, len(parts)))


@settings(max_examples=examples(400))
@given(saved_worlds(), st.data())
def test_any_boxes_of_any_save_are_read_as_numpy_slices_them(saved, data):
    arrays, images, manifest = saved
    wanted = [
        Leaf(
            name,
            str(array.dtype),
            array.shape,
            tuple(data.draw(st.lists(boxes_in(array.shape), max_size=3))),
        )
        for name, array in {**arrays, "tied": arrays["t0"]}.items()
        if data.draw(st.booleans())
    ]
    found = fetch(
        manifest,
        images,
        wanted,
        most=data.draw(st.sampled_from([1, 100, 1 << 20])),
        gap=data.draw(st.sampled_from([0, 8, 1 << 20])),
    )
    for leaf, pieces in zip(wanted, found, strict=True):
        array = arrays["t0" if leaf.name == "tied" else leaf.name]
        for box, piece in zip(leaf.boxes, pieces, strict=True):
            assert piece.tobytes() == array[box.slices()].tobytes()


@settings(max_examples=examples(100))
@given(saved_worlds())
def test_a_plan_reads_every_chunk_at_most_once_in_file_order_and_no_more_than_is_needed(saved):
    arrays, _, manifest = saved
    everything = [
        Leaf(name, str(a.dtype), a.shape, (Box.whole(a.shape),)) for name, a in arrays.items()
    ]
    plan = plan_restore(manifest, everything)
    places = [(read.rank, read.offset) for read in plan.reads]
    assert places == sorted(set(places))
    assert plan.read_bytes == plan.wanted_bytes == sum(array.nbytes for array in arrays.values())
    assert all(read.targets for read in plan.reads)


def manifest_of(array: np.ndarray, chunk_bytes: int = 16) -> Manifest:
    leaf = Leaf("x", str(array.dtype), array.shape, (Box.whole(array.shape),))
    return merged(
        [fragment_of(0, 1, [leaf], {"x": array}, chunk_bytes=chunk_bytes, tied={"y": "x"})[1]]
    )


def test_only_chunks_that_meet_the_wanted_box_are_read():
    manifest = manifest_of(np.arange(40, dtype=np.float32).reshape(10, 4))  # one row is one chunk
    plan = plan_restore(manifest, [Leaf("x", "float32", (10, 4), (Box((3, 1), (2, 2)),))])
    assert [read.box.offsets[0] for read in plan.reads] == [3, 4]
    assert (plan.wanted_bytes, plan.read_bytes) == (16, 32)


def test_nothing_wanted_is_nothing_read():
    manifest = manifest_of(np.arange(4, dtype=np.float32))
    assert plan_restore(manifest, []).reads == ()
    assert plan_restore(manifest, [Leaf("x", "float32", (4,), (Box((2,), (0,)),))]).reads == ()


def test_two_names_of_the_same_bytes_are_read_once():
    manifest = manifest_of(np.arange(4, dtype=np.float32))
    wanted = [Leaf(name, "float32", (4,), (Box((0,), (4,)),)) for name in ("x", "y")]
    [read] = plan_restore(manifest, wanted).reads
    assert [target.leaf for target in read.targets] == [0, 1]


def test_missing_names_are_all_told():
    manifest = manifest_of(np.arange(4, dtype=np.float32))
    with pytest.raises(EntryMissing, match="step 5 has no 'a', 'b'") as caught:
        plan_restore(manifest, [Leaf(name, "float32", (4,), ()) for name in ("a", "x", "b")])
    assert (caught.value.names, caught.value.step) == (("a", "b"), 5)


@pytest.mark.parametrize("name", ["x", "y"])
def test_another_shape_or_dtype_is_refused_with_both(name):
    manifest = manifest_of(np.arange(4, dtype=np.float32))
    with pytest.raises(ShapeMismatch) as shape:
        plan_restore(manifest, [Leaf(name, "float32", (2, 2), ())])
    assert (shape.value.name, shape.value.saved, shape.value.wanted) == (name, (4,), (2, 2))
    with pytest.raises(DtypeMismatch) as dtype:
        plan_restore(manifest, [Leaf(name, "int32", (4,), ())])
    assert (dtype.value.name, dtype.value.saved, dtype.value.wanted) == (name, "float32", "int32")


def read(rank: int, offset: int, nbytes: int) -> ChunkRead:
    return ChunkRead(
        rank=rank,
        index=0,
        offset=offset,
        nbytes=nbytes,
        checksum="",
        dtype="uint8",
        box=Box((0,), (nbytes,)),
        targets=(),
    )


def runs_of(reads, most, gap):
    return [
        (run.rank, run.offset, run.nbytes, len(run.reads))
        for run in coalesce(reads, most_bytes=most, gap_bytes=gap)
    ]


@st.composite
def files(draw: st.DrawFn) -> list[ChunkRead]:
    found = []
    for rank in range(draw(st.integers(0, 3))):
        offset = 0
        for _ in range(draw(st.integers(0, 6))):
            offset += draw(st.integers(0, 20))
            nbytes = draw(st.integers(1, 30))
            found.append(read(rank, offset, nbytes))
            offset += nbytes
    return found


@given(files(), st.integers(1, 80), st.integers(0, 15))
def test_runs_hold_all_reads_in_order_within_their_bounds(reads, most, gap):
    runs = coalesce(reads, most_bytes=most, gap_bytes=gap)
    assert [one for run in runs for one in run.reads] == reads
    for run in runs:
        assert {one.rank for one in run.reads} == {run.rank}
        assert run.offset == run.reads[0].offset
        assert run.offset + run.nbytes == run.reads[-1].offset + run.reads[-1].nbytes
        assert run.nbytes <= most or len(run.reads) == 1
        assert run.nbytes - sum(one.nbytes for one in run.reads) <= gap * (len(run.reads) - 1)


@given(files(), st.integers(1, 80), st.integers(0, 15))
def test_two_runs_that_could_be_one_are_one(reads, most, gap):
    runs = coalesce(reads, most_bytes=most, gap_bytes=gap)
    for one, two in itertools.pairwise(runs):
        first = two.reads[0]
        near = one.rank == two.rank and first.offset - (one.offset + one.nbytes) <= gap
        assert not near or first.offset + first.nbytes - one.offset > most


def test_neighbours_are_joined_until_the_run_is_full():
    reads = [read(0, 0, 10), read(0, 10, 10), read(0, 25, 5), read(0, 31, 10), read(1, 41, 10)]
    assert runs_of(reads, 100, 5) == [(0, 0, 41, 4), (1, 41, 10, 1)]
    assert runs_of(reads, 100, 4) == [(0, 0, 20, 2), (0, 25, 16, 2), (1, 41, 10, 1)]
    assert runs_of(reads, 20, 5) == [(0, 0, 20, 2), (0, 25, 16, 2), (1, 41, 10, 1)]
    assert runs_of(reads, 1, 5) == [
        (0, 0, 10, 1),
        (0, 10, 10, 1),
        (0, 25, 5, 1),
        (0, 31, 10, 1),
        (1, 41, 10, 1),
    ]
    assert runs_of([], 1, 5) == []
