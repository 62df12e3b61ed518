"""Any rank of any world in this process: torch's own meshes and DTensors, with a process group
that talks to nobody.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import contextmanager

import torch
import torch.distributed as dist
from hypothesis import strategies as st
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import Replicate, Shard
from torch.distributed.tensor.debug import _clear_sharding_prop_cache
from torch.distributed.tensor.placement_types import Placement, _StridedShard
from torch.testing._internal.distributed.fake_pg import FakeStore


@contextmanager
def rank_of(rank: int, world_size: int) -> Iterator[None]:
    """Be ``rank``."""
    dist.init_process_group("fake", rank=rank, world_size=world_size, store=FakeStore())
    try:
        yield
    finally:
        dist.destroy_process_group()
        # it would give results the mesh of the rank before, whose own coordinate that has
        _clear_sharding_prop_cache()


def mesh_of(shape: Sequence[int]) -> DeviceMesh:
    size = torch.Size(shape).numel()
    return DeviceMesh("cpu", torch.arange(size).view(*shape))


mesh_shapes = st.lists(st.integers(1, 3), min_size=1, max_size=3).map(tuple)


def placements(mesh_shape: Sequence[int], ndim: int) -> st.SearchStrategy[tuple[Placement, ...]]:
    """One of each kind for every mesh dimension."""
    one: st.SearchStrategy[Placement] = st.just(Replicate())
    if ndim:
        dims = st.integers(0, ndim - 1)
        one = one | dims.map(Shard) | st.builds(_StridedShard, dims, split_factor=st.integers(1, 4))
    return st.tuples(*(one for _ in mesh_shape))
