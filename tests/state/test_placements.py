"""The boxes of placements equal what torch itself puts on each rank."""

from __future__ import annotations

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch.distributed.tensor import DTensor, Partial, Replicate, Shard, distribute_tensor
from torch.distributed.tensor._utils import _compute_local_shape_and_global_offset
from torch.distributed.tensor.placement_types import _StridedShard

from ckpt.errors import UnsupportedValue
from ckpt.model.box import Box
from ckpt.model.mesh_boxes import Cut, cut_boxes
from ckpt.state.tensors.layout import leaf_of, memories
from tests.kit.examples import examples
from tests.model.boxes import shapes
from tests.state.ranks import RELEASE, mesh_of, mesh_shapes, placements, rank_of


@settings(max_examples=examples(60))
@given(st.data(), mesh_shapes, shapes)
def test_the_boxes_of_a_dtensor_hold_what_they_say(
    data: st.DataObject, mesh_shape: tuple[int, ...], shape: tuple[int, ...]
) -> None:
    placed = data.draw(placements(mesh_shape, len(shape)))
    world_size = torch.Size(mesh_shape).numel()
    rank = data.draw(st.integers(0, world_size - 1))
    whole = torch.arange(torch.Size(shape).numel()).view(shape)
    with rank_of(rank, world_size):
        tensor = distribute_tensor(whole, mesh_of(mesh_shape), placed, src_data_rank=None)
        leaf = leaf_of("x", tensor, ())
        held = memories(tensor, leaf.boxes)
        assert len(held) == len(leaf.boxes)
        for box, memory in zip(leaf.boxes, held, strict=True):
            assert torch.equal(memory, whole[box.slices()])
        assert sum(box.numel for box in leaf.boxes) == tensor.to_local().numel()


@settings(max_examples=examples(200))
@given(st.data(), mesh_shapes, shapes)
def test_every_element_is_somewhere_and_only_replicas_share_it(
    data: st.DataObject, mesh_shape: tuple[int, ...], shape: tuple[int, ...]
) -> None:
    placed = data.draw(placements(mesh_shape, len(shape)))
    copies = np.zeros(shape, dtype=int)
    for here in np.ndindex(*mesh_shape):
        for box in cut_boxes(shape, cuts(mesh_shape, placed, here)):
            copies[box.slices()] += 1
    replicas = [
        parts
        for parts, placement in zip(mesh_shape, placed, strict=True)
        if isinstance(placement, Replicate)
    ]
    assert (copies == np.prod(replicas, dtype=int)).all()


@given(st.data(), mesh_shapes, shapes)
def test_a_layout_of_one_box_is_as_torch_says(
    data: st.DataObject, mesh_shape: tuple[int, ...], shape: tuple[int, ...]
) -> None:
    placed = data.draw(placements(mesh_shape, len(shape)))
    here = tuple(data.draw(st.integers(0, parts - 1)) for parts in mesh_shape)
    boxes = cut_boxes(shape, cuts(mesh_shape, placed, here))
    if len(boxes) == 1 and boxes[0].numel:
        local_shape, offset = _compute_local_shape_and_global_offset(
            shape, mesh_shape, list(here), placed
        )
        assert boxes == [Box(tuple(offset), tuple(local_shape))]


def cuts(
    mesh_shape: tuple[int, ...], placed: tuple[object, ...], here: tuple[int, ...]
) -> list[Cut]:
    return [
        Cut(placement.dim, parts, at, getattr(placement, "split_factor", 1))
        for placement, parts, at in zip(placed, mesh_shape, here, strict=True)
        if isinstance(placement, Shard | _StridedShard)
    ]


@pytest.mark.parametrize(
    ("size", "placed", "ranges"),
    [
        (8, [_StridedShard(0, split_factor=2), Replicate()], [[0, 1, 4, 5], [0, 1, 4, 5], [2, 3, 6, 7], [2, 3, 6, 7]]),  # noqa: E501
        (8, [Shard(0), _StridedShard(0, split_factor=2)], [[0, 2], [1, 3], [4, 6], [5, 7]]),
        (8, [_StridedShard(0, split_factor=2), Shard(0)], [[0, 1], [4, 5], [2, 3], [6, 7]]),
        (7, [_StridedShard(0, split_factor=2), Shard(0)], [[0, 1], [4, 5], [2, 3], [6]]),
        (3, [_StridedShard(0, split_factor=2), Shard(0)], [[0], [2], [1], []]),
        (10, [Shard(0), Shard(0)], [[0, 1, 2], [3, 4], [5, 6, 7], [8, 9]]),
        (9, [Replicate(), Shard(0)], [[0, 1, 2, 3, 4], [5, 6, 7, 8]] * 2),
        (1, [Shard(0), Shard(0)], [[0], [], [], []]),
    ],
)  # fmt: skip
def test_layouts_of_two_by_two(size: int, placed: list[object], ranges: list[list[int]]) -> None:
    for rank, expected in enumerate(ranges):
        here = divmod(rank, 2)
        boxes = cut_boxes((size,), cuts((2, 2), tuple(placed), here))
        assert [
            i for box in boxes for i in range(box.offsets[0], box.offsets[0] + box.shape[0])
        ] == expected


@pytest.mark.skipif(RELEASE < (2, 12), reason="torch makes no such view until 2.12")
def test_a_view_of_columns_is_many_boxes() -> None:
    with rank_of(1, 2):
        flat = distribute_tensor(
            torch.arange(32).view(4, 8), mesh_of((2,)), [Shard(1)], src_data_rank=None
        ).view(32)
        leaf = leaf_of("x", flat, ())
        assert leaf.boxes == tuple(Box((at,), (4,)) for at in (4, 12, 20, 28))
        assert [memory.tolist() for memory in memories(flat, leaf.boxes)] == [
            list(range(at, at + 4)) for at in (4, 12, 20, 28)
        ]


def test_a_partial_tensor_is_refused_by_name() -> None:
    with rank_of(0, 2):
        tensor = DTensor.from_local(torch.ones(3), mesh_of((2,)), [Partial()])
        with pytest.raises(UnsupportedValue, match=r"'layer/x'.*partial placement.*redistribute"):
            leaf_of("layer/x", tensor, ())


def test_a_local_tensor_of_another_size_than_its_placements_say_is_refused() -> None:
    with rank_of(0, 2):
        tensor = DTensor.from_local(
            torch.ones(3),
            mesh_of((2,)),
            [Shard(0)],
            run_check=False,
            shape=torch.Size([5]),
            stride=(1,),
        )
        assert leaf_of("x", tensor, ()).boxes == (Box((0,), (3,)),)
        tensor = DTensor.from_local(
            torch.ones(2),
            mesh_of((2,)),
            [Shard(0)],
            run_check=False,
            shape=torch.Size([5]),
            stride=(1,),
        )
        with pytest.raises(UnsupportedValue, match=r"'x'.*holds \[2\] of \[5\].*LocalShards"):
            leaf_of("x", tensor, ())
