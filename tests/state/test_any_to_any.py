"""Any layout of any world is restored to any layout of any other world.

The tests use real tensors, and the real plan, merge and reads. Every element is where it belongs.
"""

from __future__ import annotations

from collections.abc import Iterator
from itertools import pairwise
from typing import Any

import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch.distributed.tensor import distribute_tensor

from ckpt import LocalShards
from ckpt.model.box import Box
from ckpt.model.manifest import Manifest
from ckpt.state.tensors.layout import leaf_of, memories
from ckpt.state.tensors.local_shards import TensorOrShards
from tests.kit.examples import examples
from tests.model.boxes import partition, shapes
from tests.state.ranks import mesh_of, mesh_shapes, placements, rank_of
from tests.state.worlds import restore, save_each

DTYPES = [torch.float32, torch.bfloat16, torch.int64, torch.uint8]


@st.composite
def layouts(
    draw: st.DrawFn, shape: tuple[int, ...], mesh_shape: tuple[int, ...]
) -> tuple[str, Any]:
    """Return how a tensor is laid out on the ranks: as placements, boxes, or a flat
    range of each.
    """
    world_size = torch.Size(mesh_shape).numel()
    numel = torch.Size(shape).numel()
    kind = draw(st.sampled_from(["placed", "tiles", "ranges", "plain"]))
    if kind == "placed":
        return kind, draw(placements(mesh_shape, len(shape)))
    if kind == "tiles":
        rng = draw(st.randoms(use_true_random=False))
        owned: list[list[Box]] = [[] for _ in range(world_size)]
        for box in partition(shape, 6, rng):
            for rank in rng.sample(range(world_size), rng.choice([1, 1, min(2, world_size)])):
                # on two ranks these are copies that the plan does not know to be copies
                owned[rank].append(box)
        return kind, owned
    ends = draw(
        st.lists(st.integers(0, numel), min_size=world_size - 1, max_size=world_size - 1).map(
            sorted
        )
    )
    return kind, list(pairwise([0, *ends, numel]))


def laid_out(
    whole: torch.Tensor, layout: tuple[str, Any], mesh_shape: tuple[int, ...], rank: int
) -> TensorOrShards:
    """Return what ``rank`` holds of it, in memory of its own that is not always contiguous."""
    kind, how = layout
    if kind == "placed":
        return distribute_tensor(whole, mesh_of(mesh_shape), how, src_data_rank=None)
    if kind == "tiles":
        parts = [(box.offsets, whole[box.slices()].clone()) for box in how[rank]]
        if rank % 2:
            parts = [(at, torch.stack([part, part], dim=-1)[..., 1]) for at, part in parts]
        return LocalShards(whole.shape, parts, dtype=whole.dtype)
    if kind == "ranges":
        start, stop = how[rank]
        padded = torch.cat([whole.new_zeros(3), whole.reshape(-1)[start:stop], whole.new_zeros(2)])
        return LocalShards.of_range(whole.shape, start, padded[3:-2])
    return whole.clone()


@st.composite
def worlds(
    draw: st.DrawFn, wholes: dict[str, torch.Tensor]
) -> tuple[tuple[int, ...], dict[str, tuple[str, Any]]]:
    mesh_shape = draw(mesh_shapes)
    return mesh_shape, {
        name: draw(layouts(tuple(t.shape), mesh_shape)) for name, t in wholes.items()
    }


@st.composite
def tensors(draw: st.DrawFn) -> dict[str, torch.Tensor]:
    found: dict[str, torch.Tensor] = {}
    for index in range(draw(st.integers(1, 3))):
        shape, dtype = draw(shapes), draw(st.sampled_from(DTYPES))
        found[f"t{index}"] = (
            (torch.arange(torch.Size(shape).numel()) % 97 + index).to(dtype).view(shape)
        )
    return found


World = tuple[tuple[int, ...], dict[str, tuple[str, Any]]]


def states(
    world: World, wholes: dict[str, torch.Tensor]
) -> Iterator[tuple[int, int, dict[str, Any]]]:
    """Act as each rank in turn, and yield (rank, size of the world, state)."""
    mesh_shape, how = world
    world_size = torch.Size(mesh_shape).numel()
    for rank in range(world_size):
        with rank_of(rank, world_size):
            state = {
                name: laid_out(whole, how[name], mesh_shape, rank) for name, whole in wholes.items()
            }
            yield rank, world_size, {"deep": state, "step": 3}


def save(
    world: World, wholes: dict[str, torch.Tensor], chunk_bytes: int
) -> tuple[dict[int, bytes], Manifest]:
    return save_each(states(world, wholes), chunk_bytes)


@settings(max_examples=examples(60))
@given(st.data(), tensors(), st.sampled_from([16, 24, 1000]))
def test_every_element_is_where_it_belongs(
    data: st.DataObject, wholes: dict[str, torch.Tensor], chunk_bytes: int
) -> None:
    images, manifest = save(data.draw(worlds(wholes)), wholes, chunk_bytes)
    blanks = {name: torch.full_like(whole, 99) for name, whole in wholes.items()}
    for rank, world_size, state in states(data.draw(worlds(wholes)), blanks):
        restore(state, images, manifest, rank, world_size)
        for name, source in state["deep"].items():
            leaf = leaf_of(name, source, ())
            for box, memory in zip(leaf.boxes, memories(source, leaf.boxes), strict=True):
                assert torch.equal(memory, wholes[name][box.slices()]), (name, box)
