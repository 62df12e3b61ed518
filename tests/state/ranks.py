"""Any rank of any world in this process.

Meshes and DTensors are torch's own, and the process group communicates with no process.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from typing import Any

import torch
import torch.distributed as dist
from hypothesis import strategies as st
from torch.distributed.device_mesh import DeviceMesh, _mesh_resources
from torch.distributed.tensor import DTensor, Replicate, Shard
from torch.distributed.tensor.placement_types import Placement, _StridedShard
from torch.testing._internal.distributed.fake_pg import FakeStore

RELEASE = tuple(map(int, torch.__version__.split(".")[:2]))


@contextmanager
def rank_of(rank: int, world_size: int) -> Iterator[None]:
    """Act as ``rank``."""
    dist.init_process_group("fake", rank=rank, world_size=world_size, store=FakeStore())
    try:
        yield
    finally:
        dist.destroy_process_group()
        _forget_shardings()


def _forget_shardings() -> None:
    """Clear torch's caches.

    They would give results the mesh of the rank before, which has that rank's coordinate.
    """
    propagate: Any = DTensor._op_dispatcher.sharding_propagator.propagate_op_sharding
    getattr(propagate, "cache", propagate).cache_clear()  # until torch 2.9 the function is inside
    # torch 2.10 and later
    getattr(torch._C, "_clear_DTensor_sharding_propagator_cache", int)()
    # until torch 2.9: flattened meshes, by the contents of the mesh that they were made of
    vars(_mesh_resources).get("root_to_flatten_mapping", {}).clear()


def mesh_of(shape: Sequence[int]) -> DeviceMesh:
    size = torch.Size(shape).numel()
    return DeviceMesh("cpu", torch.arange(size).view(*shape))


mesh_shapes = st.lists(st.integers(1, 3), min_size=1, max_size=3).map(tuple)


def placements(mesh_shape: Sequence[int], ndim: int) -> st.SearchStrategy[tuple[Placement, ...]]:
    """Return one placement of each kind for every mesh dimension."""
    one: st.SearchStrategy[Placement] = st.just(Replicate())
    if ndim:
        dims = st.integers(0, ndim - 1)
        one = one | dims.map(Shard)
        # torch 2.9 distributes a dimension that cannot be cut evenly in another way than FSDP2 does
        if RELEASE >= (2, 10):
            one = one | st.builds(_StridedShard, dims, split_factor=st.integers(1, 4))
    return st.tuples(*(one for _ in mesh_shape))
