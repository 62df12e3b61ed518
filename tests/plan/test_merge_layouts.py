"""The merge by columns gives the same manifest and the same refusals as the merge by objects."""

from __future__ import annotations

import random
from collections.abc import Callable

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from msgspec.structs import replace

from ckpt.errors import CkptError, ManifestCorrupt, ReplicasDiverged, TensorIncomplete
from ckpt.model.box import Box
from ckpt.model.fill_manifest import fill_manifest, ranks_of
from ckpt.model.fragment_columns import fragment_of, pack_fragment, read_fragment
from ckpt.model.manifest import Encoding, Fragment, Manifest
from ckpt.model.record_encoding import pack
from ckpt.plan.leaf import Leaf
from ckpt.plan.merge import MergeCache, merge
from ckpt.plan.restore import plan_restore
from tests.kit.examples import examples
from tests.model.boxes import boxes_in, partition
from tests.plan.oracle import check_fragment, merge_objects
from tests.plan.worlds import assign, merged, raw, with_ref
from tests.plan.worlds import fragment_of as written

Parts = list[Fragment]


@st.composite
def worlds(draw: st.DrawFn) -> Parts:
    """Draw fragments of a random world: random boxes, equal copies, ties, and trees.

    Some of them must be refused.
    """
    rng = draw(st.randoms(use_true_random=False))
    size = draw(st.integers(1, 5))
    arrays: dict[str, np.ndarray] = {}
    ranks: list[list[Leaf]] = [[] for _ in range(size)]
    for index in range(draw(st.integers(1, 4))):
        shape = tuple(draw(st.lists(st.integers(0, 6), max_size=3)))
        arrays[f"t{index}"] = (
            np.arange(int(np.prod(shape)), dtype=np.float32).reshape(shape) + index
        )
        boxes = [box for box in partition(shape, 6, rng) if box.numel or rng.random() < 0.5]
        owned = assign([*boxes, *(box for box in boxes if rng.random() < 0.3)], size, rng)
        for rank, held in enumerate(owned):
            if held or rng.random() < 0.5:
                ranks[rank].append(Leaf(f"t{index}", "float32", shape, tuple(sorted(set(held)))))
    found = [
        written(
            rank,
            size,
            leaves,
            arrays,
            chunk_bytes=draw(st.sampled_from([16, 64, 1000])) if size == 1 else 64,
            tied={"tied": "t0"} if any(leaf.name == "t0" for leaf in leaves) else {},
            tree=raw({"step": 1, f"stage{rank % 2}": [rank % 2]}),
            per_rank=raw({"rng": rank}),
            replicas={"r": f"box{rank % 2}=same"},
        )[1]
        for rank, leaves in enumerate(ranks)
    ]
    for spoil in draw(st.lists(st.sampled_from(SPOILERS), max_size=1)):
        at = rng.randrange(size)
        found[at] = spoil(found[at], rng)
    return found


def _drifted(part: Fragment, rng: random.Random) -> Fragment:
    assert part.file
    chunks = list(part.file.chunks)
    at = rng.randrange(len(chunks))
    chunks[at] = replace(chunks[at], checksum="0" * 32)
    return replace(part, file=replace(part.file, chunks=tuple(chunks)))


def _lacking(part: Fragment, rng: random.Random) -> Fragment:
    """Remove some of its shards, which leaves a hole unless another rank has them too."""
    tensors = [replace(t, shards=t.shards[: rng.randint(0, len(t.shards))]) for t in part.tensors]
    return replace(part, tensors=tuple(tensors))


def _moved(part: Fragment, rng: random.Random) -> Fragment:
    """Move boxes elsewhere, which makes holes and overlaps."""
    tensors = list(part.tensors)
    for index, tensor in enumerate(tensors):
        shards = [
            replace(
                shard,
                offsets=tuple(
                    rng.randint(0, n - m) for n, m in zip(tensor.shape, shard.shape, strict=True)
                ),
            )
            for shard in tensor.shards
        ]
        tensors[index] = replace(tensor, shards=tuple(shards))
    return replace(part, tensors=tuple(tensors))


def _disputed(part: Fragment, rng: random.Random) -> Fragment:
    return replace(
        part,
        tensors=tuple(replace(t, shape=(*t.shape, 1)) if not t.shards else t for t in part.tensors),
    )


def _turned(part: Fragment, rng: random.Random) -> Fragment:
    orders = [rng.choice([(), tuple(reversed(range(len(t.shape))))]) for t in part.tensors]
    pairs = zip(part.tensors, orders, strict=True)
    return replace(part, tensors=tuple(replace(t, order=order) for t, order in pairs))


def _digest(part: Fragment, rng: random.Random) -> Fragment:
    return replace(part, replicas={"r": f"box{part.rank % 2}=other"})


def _tree(part: Fragment, rng: random.Random) -> Fragment:
    return replace(part, tree=raw({"step": 2}))


def _save(part: Fragment, rng: random.Random) -> Fragment:
    return replace(part, step=9)


SPOILERS: list[Callable[[Fragment, random.Random], Fragment]] = [
    _drifted, _drifted, _lacking, _moved, _disputed, _turned, _turned, _digest, _tree, _save,
]  # fmt: skip


def outcome(work: Callable[[], Manifest]) -> tuple[object, ...] | Manifest:
    try:
        return work()
    except CkptError as error:
        return type(error), str(error), getattr(error, "ranks", None)


def by_columns(parts: Parts, known: MergeCache | None = None) -> Manifest:
    """Remove what the merge by objects does not make."""
    return replace(merged(parts, known), layouts=(), layout_of=())


def by_objects(parts: Parts) -> Manifest:
    return merge_objects((part, with_ref(part)[1]) for part in parts)


@settings(max_examples=examples(400))
@given(worlds())
def test_columns_give_the_manifest_or_the_refusal_that_objects_give(parts: Parts) -> None:
    assert outcome(lambda: by_columns(parts)) == outcome(lambda: by_objects(parts))


@settings(max_examples=examples(100))
@given(worlds(), st.randoms(use_true_random=False))
def test_the_order_of_fragments_and_what_is_remembered_change_nothing(
    parts: Parts, rng: random.Random
) -> None:
    known = MergeCache()
    for _ in range(3):
        assert outcome(lambda: by_columns(rng.sample(parts, len(parts)), known)) == outcome(
            lambda: by_objects(parts)
        )


@settings(max_examples=examples(100))
@given(worlds())
def test_a_fragment_in_columns_is_the_same_fragment(parts: Parts) -> None:
    for part in parts:
        data = pack(pack_fragment(part))
        try:
            assert read_fragment(data, key="k") == check_fragment(part, key="k")
        except ManifestCorrupt:
            with pytest.raises(ManifestCorrupt):
                check_fragment(part, key="k")


@settings(max_examples=examples(200))
@given(worlds(), st.data())
def test_a_plan_from_the_fragments_that_are_needed_is_the_plan_from_all(
    parts: Parts, data: st.DataObject
) -> None:
    try:
        whole = by_objects(parts)
    except CkptError:
        return
    packed = {part.rank: pack_fragment(part) for part in parts}
    outline = merge((packed[part.rank], with_ref(part)[1]) for part in parts)
    wanted = [
        Leaf(
            name,
            tensor.dtype,
            tensor.shape,
            tuple(data.draw(st.lists(boxes_in(tensor.shape), max_size=3))),
        )
        for name, tensor in whole.tensor_map().items()
    ]
    ranks = ranks_of(outline, [(leaf.name, leaf.boxes) for leaf in wanted])
    part = fill_manifest(
        outline, {rank: fragment_of(packed[rank], key="k") for rank in ranks}, key="k"
    )
    plan = plan_restore(whole, wanted)
    assert plan_restore(part, wanted) == plan
    assert {read.rank for read in plan.reads} == ranks


def test_copies_are_compared_also_where_the_layout_is_remembered() -> None:
    x = {"x": np.arange(48, dtype=np.float32).reshape(12, 4)}
    leaf = Leaf("x", "float32", (12, 4), (Box((0, 0), (12, 4)),))
    same = [written(rank, 3, [leaf], x)[1] for rank in range(3)]
    known = MergeCache()
    for _ in range(2):
        by_columns(same, known)
    drifted = [*same[:2], written(2, 3, [leaf], {"x": x["x"] + 1})[1]]
    with pytest.raises(ReplicasDiverged, match="'x' differs between ranks 0, 2"):
        by_columns(drifted, known)


def test_a_hole_is_found_after_a_merge_without_one() -> None:
    x = {"x": np.arange(48, dtype=np.float32).reshape(12, 4)}
    halves = [Leaf("x", "float32", (12, 4), (Box((row, 0), (6, 4)),)) for row in (0, 6)]
    good = [written(rank, 2, [leaf], x)[1] for rank, leaf in enumerate(halves)]
    known = MergeCache()
    by_columns(good, known)
    with pytest.raises(TensorIncomplete, match="overlap"):
        by_columns(
            [written(0, 2, [Leaf("x", "float32", (12, 4), (Box((1, 0), (6, 4)),))], x)[1], good[1]],
            known,
        )


def test_encoded_files_keep_their_lengths() -> None:
    x = {"x": np.arange(48, dtype=np.float32).reshape(12, 4)}
    _, part = written(0, 1, [Leaf("x", "float32", (12, 4), (Box((0, 0), (12, 4)),))], x)
    assert part.file
    lengths = tuple(max(1, chunk.nbytes // 2) for chunk in part.file.chunks)
    part = replace(
        part,
        encoded=(Encoding(0, "zstd", lengths),),
        file=replace(part.file, name="rank-00000.encoded"),
    )
    outline = merge([(pack_fragment(part), with_ref(part)[1])])
    assert (outline.encoded[0].lengths, outline.stored_bytes) == ((sum(lengths),), sum(lengths))
    assert by_columns([part]) == by_objects([part])
