from __future__ import annotations

import json
from collections import defaultdict

import numpy as np
import pytest
import safetensors
import safetensors.numpy
from hypothesis import example, given, settings
from hypothesis import strategies as st

from ckpt.model.box import Box, even_slab, tiling_fault
from ckpt.model.dtype import DTYPES
from ckpt.model.manifest import HEADER_ALIGNMENT
from ckpt.plan.leaf import Leaf
from ckpt.plan.save import SPLIT_FROM_BYTES, plan_save
from tests.kit.examples import examples
from tests.plan.worlds import image_of

CHUNK = 1 << 12
names = st.text(st.characters(exclude_categories=["Cs"]), max_size=6) | st.sampled_from(
    [
        "a",
        "a@1",
        "a@2",
        "a@1@1",
        "layer/0/weight",
        "modèle",
        'quo"te',
        "new\nline",
        "\x00",
        "__metadata__",
        "\\",
    ]
)


@st.composite
def worlds(draw: st.DrawFn) -> list[list[Leaf]]:
    """Draw the leaves of each rank: replicated on groups, or cut along the first dimension.

    They are large and small.
    """
    size = draw(st.integers(1, 4))
    ranks: list[list[Leaf]] = [[] for _ in range(size)]
    for name in draw(st.lists(names, max_size=8, unique=True)):
        dtype = draw(st.sampled_from(sorted(DTYPES)))
        shape = tuple(draw(st.lists(st.sampled_from([0, 1, 2, 3, 5, 8]), max_size=3)))
        if draw(st.booleans()):
            shape = (SPLIT_FROM_BYTES // 8 + 3, *shape)
        if draw(st.booleans()):
            group = tuple(sorted(draw(st.sets(st.integers(0, size - 1), min_size=1))))
            whole = Box.whole(shape)
            boxes: tuple[Box, ...] = (whole,)
            if shape and shape[0] >= 2 and draw(st.booleans()):
                boxes = tuple(slab for k in range(2) if (slab := even_slab(whole, 2, k)))
            for rank in group:
                ranks[rank].append(Leaf(name, dtype, shape, boxes, group))
        else:
            parts = [even_slab(Box.whole(shape), size, rank) for rank in range(size)]
            if parts[0] is None:
                parts = [Box.whole(shape), *[None] * (size - 1)]
            for rank, part in enumerate(parts):
                ranks[rank].append(Leaf(name, dtype, shape, (part,) if part else ()))
    return ranks


def plans_of(ranks):
    return [plan_save(leaves, rank=rank, chunk_bytes=CHUNK) for rank, leaves in enumerate(ranks)]


@settings(max_examples=examples(200))
@given(worlds())
def test_all_ranks_together_write_every_tensor_exactly_once(ranks):
    written: dict[str, list[Box]] = defaultdict(list)
    shapes: dict[str, tuple[int, ...]] = {}
    for leaves, plan in zip(ranks, plans_of(ranks), strict=True):
        shapes |= {leaf.name: leaf.shape for leaf in leaves}
        for item in plan.items:
            written[leaves[item.leaf].name].append(item.box)
    assert {
        name: tiling_fault(shape, written[name]) for name, shape in shapes.items()
    } == dict.fromkeys(shapes)


@settings(max_examples=examples(200))
@given(worlds())
@example(
    [
        [
            Leaf("a", "float64", (1,), (Box((0,), (1,)),)),
            Leaf("b", "complex128", (1,), (Box((0,), (1,)),)),
        ]
    ]
)
@example(
    [
        [
            Leaf("a", "float16", (1,), (Box((0,), (1,)),)),
            Leaf("b", "complex32", (1,), (Box((0,), (1,)),)),
        ]
    ]
)
def test_an_image_is_gapless_and_every_item_is_aligned_to_its_elements(ranks):
    for leaves, plan in zip(ranks, plans_of(ranks), strict=True):
        assert len(plan.header) % HEADER_ALIGNMENT == 0
        end = len(plan.header)
        for item in plan.items:
            leaf = leaves[item.leaf]
            assert item.offset == end
            assert item.offset % leaf.itemsize == 0
            assert item.nbytes == item.box.numel * leaf.itemsize
            end += item.nbytes
        assert plan.size == end


@settings(max_examples=examples(200))
@given(worlds())
def test_chunks_cover_the_file_and_none_reaches_over_an_item(ranks):
    for plan in plans_of(ranks):
        assert plan.chunks[0] == len(plan.header)
        assert sum(plan.chunks) == plan.size
        assert all(0 < nbytes <= CHUNK for nbytes in plan.chunks[1:])
        edges = set(np.cumsum((0, *plan.chunks)).tolist())
        assert {item.offset for item in plan.items} | {plan.size} <= edges


@settings(max_examples=examples(100))
@given(worlds())
def test_the_fragment_tells_of_every_leaf_and_where_its_boxes_lie(ranks):
    for rank, (leaves, plan) in enumerate(zip(ranks, plans_of(ranks), strict=True)):
        assert [(t.name, t.dtype, t.shape) for t in plan.tensors] == [
            (x.name, x.dtype, x.shape) for x in leaves
        ]
        reported = {
            (i, shard.box, shard.offset)
            for i, tensor in enumerate(plan.tensors)
            for shard in tensor.shards
        }
        assert reported == {(item.leaf, item.box, item.offset) for item in plan.items}
        assert {shard.rank for tensor in plan.tensors for shard in tensor.shards} <= {rank}


@settings(max_examples=examples(100))
@given(worlds(), st.randoms(use_true_random=False))
def test_the_layout_depends_neither_on_the_order_of_leaves_nor_on_the_run(ranks, rng):
    for rank, leaves in enumerate(ranks):
        shuffled = rng.sample(leaves, len(leaves))
        one, two = (plan_save(order, rank=rank, chunk_bytes=CHUNK) for order in (leaves, shuffled))
        assert (one.header, one.chunks, one.size) == (two.header, two.chunks, two.size)
        assert [(leaves[i.leaf].name, i.box, i.offset) for i in one.items] == [
            (shuffled[i.leaf].name, i.box, i.offset) for i in two.items
        ]
        assert plan_save(leaves, rank=rank, chunk_bytes=CHUNK) == one


@settings(max_examples=examples(100))
@given(worlds())
def test_safetensors_reads_every_image(ranks):
    for leaves, plan in zip(ranks, plans_of(ranks), strict=True):
        found = safetensors.deserialize(plan.header + bytes(plan.size - len(plan.header)))
        assert len({name for name, _ in found}) == len(found) == len(plan.items)
        shapes = sorted(
            (list(item.box.shape), DTYPES[leaves[item.leaf].dtype].storage) for item in plan.items
        )
        writers = [DTYPES[leaves[item.leaf].dtype].lanes for item in plan.items]
        if set(writers) == {1}:
            assert sorted((entry["shape"], entry["dtype"]) for _, entry in found) == shapes


@given(st.lists(names, min_size=1, max_size=6, unique=True))
@example(["a", "a@1", "a@2", "__metadata__"])
def test_a_file_on_disk_gives_the_tensors_under_their_names(tmp_path_factory, names_of_leaves):
    rng = np.random.default_rng(1)
    arrays = {name: rng.standard_normal((4, 3)) for name in names_of_leaves}
    leaves = [
        Leaf(name, "float64", (4, 3), (Box((0, 0), (2, 3)), Box((2, 0), (2, 3)))) for name in arrays
    ]
    path = tmp_path_factory.mktemp("image") / "rank.safetensors"
    path.write_bytes(image_of(plan_save(leaves, rank=0, chunk_bytes=64), leaves, arrays))
    with safetensors.safe_open(path, framework="numpy") as file:
        assert file.metadata()["format"] == "pt"
        found = {name: file.get_tensor(name) for name in file.keys()}  # noqa: SIM118 - not a dict
    assert len(found) == 2 * len(arrays)
    for name in set(arrays) - {"__metadata__"}:  # safetensors keeps only this name for itself
        assert np.array_equal(found[name], arrays[name][:2])
    pieces = {array.tobytes() for array in found.values()}
    assert pieces == {
        half.tobytes() for array in arrays.values() for half in (array[:2], array[2:])
    }


def test_the_second_piece_has_a_serial_that_no_other_leaf_has():
    two = (Box((0,), (1,)), Box((1,), (1,)))
    leaves = [Leaf("a", "int8", (2,), two), Leaf("a@1", "int8", (2,), two)]
    header = plan_save(leaves, rank=0, chunk_bytes=64).header
    assert set(json.loads(header[8:])) == {"__metadata__", "a", "a@2", "a@1", "a@1@1"}


def transformer(layers: int, width: int, replicas: tuple[int, ...]) -> list[Leaf]:
    shapes: dict[str, tuple[int, ...]] = {"embed": (50257, width)}
    for i in range(layers):
        shapes |= {
            f"{i}/attn": (3 * width, width),
            f"{i}/proj": (width, width),
            f"{i}/up": (4 * width, width),
            f"{i}/down": (width, 4 * width),
            f"{i}/attn.bias": (3 * width,),
            f"{i}/ln": (width,),
            f"{i}/up.bias": (4 * width,),
        }
    return [
        Leaf(name, "float32", shape, (Box.whole(shape),), replicas)
        for name, shape in shapes.items()
    ]


@pytest.mark.parametrize("count", [2, 3, 7, 8, 32])
def test_replicas_of_a_large_model_write_nearly_equal_shares(count):
    replicas = tuple(range(count))
    leaves = transformer(4, 768, replicas)
    sizes = [
        sum(item.nbytes for item in plan_save(leaves, rank=rank, chunk_bytes=1 << 22).items)
        for rank in replicas
    ]
    assert sum(sizes) == sum(leaf.nbytes for leaf in leaves)
    assert max(sizes) <= 1.05 * sum(sizes) / count


@pytest.mark.parametrize("count", [2, 5])
def test_many_small_tensors_are_spread_whole(count):
    replicas = tuple(range(count))
    leaves = [
        Leaf(f"t{i}", "float32", (100 + i,), (Box.whole((100 + i,)),), replicas) for i in range(200)
    ]
    plans = [plan_save(leaves, rank=rank, chunk_bytes=1 << 20) for rank in replicas]
    sizes = [sum(item.nbytes for item in plan.items) for plan in plans]
    assert max(sizes) <= 1.05 * min(sizes)
    assert sum(len(plan.items) for plan in plans) == len(leaves)


def test_a_rank_without_tensors_has_a_header_and_nothing_else():
    plan = plan_save([], rank=3, chunk_bytes=64)
    assert (plan.size, plan.chunks, plan.items) == (len(plan.header), (len(plan.header),), ())
    assert safetensors.deserialize(plan.header) == []
    assert json.loads(plan.header[8:])["__metadata__"]["rank"] == "3"
