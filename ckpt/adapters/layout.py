"""A tensor as this rank holds it -> a leaf: which boxes of which global tensor, and who else holds the same."""

from __future__ import annotations

from collections.abc import Hashable, Iterator, Sequence
from typing import Any, cast

import torch
from torch.distributed.tensor import DTensor
from torch.distributed.tensor.placement_types import Partial, Replicate, Shard, _StridedShard

from ckpt.adapters.local_shards import LocalShards, Source
from ckpt.errors import UnsupportedValue
from ckpt.model.box import Box
from ckpt.model.cuts import Cut, cut_boxes, local_regions
from ckpt.model.dtype import DTYPES
from ckpt.plan.leaf import Leaf


def local(tensor: torch.Tensor) -> torch.Tensor:
    """The memory this rank holds."""
    if not isinstance(tensor, DTensor):
        return tensor
    held: Any = tensor._local_tensor
    return cast(torch.Tensor, held.wait() if hasattr(held, "wait") else held)  # an unfinished collective


def memories(source: Source, boxes: Sequence[Box]) -> Sequence[torch.Tensor]:
    """The memory of each of the ``boxes`` that ``leaf_of`` has found."""
    if isinstance(source, LocalShards):
        return source.tensors
    memory = local(source)
    if len(boxes) == 1:
        return (memory,)
    return [memory[region.slices()] for region in local_regions(boxes)]


def signature(tensor: Source) -> Hashable:
    """Equal if and only if ``leaf_of`` and the memory format would be equal."""
    if isinstance(tensor, LocalShards):
        formats = tuple((part.device, part.layout) for part in tensor.tensors)
        return (tensor.dtype, tensor.shape, tensor.boxes, tensor.replicas, formats)
    if isinstance(tensor, DTensor):
        return (tensor._spec, tensor._local_tensor.shape)
    shape = None if tensor.is_nested else tensor.shape  # has none, and is refused
    return (tensor.dtype, shape, tensor.device, tensor.layout)


def leaf_of(name: str, tensor: Source, replicas: tuple[int, ...]) -> Leaf:
    """The leaf of ``tensor``. ``replicas`` are the ranks known to hold a *plain* tensor too; a DTensor and ``LocalShards`` know their own.

    Raises:
        UnsupportedValue: A partial, sparse, quantized, nested or meta tensor, with the way out.
    """
    if isinstance(tensor, LocalShards):
        for part in tensor.tensors:
            check(name, part)
        dtype = dtype_name(name, tensor.dtype)
        return Leaf(
            name, dtype, tensor.shape, tensor.boxes, tensor.replicas if len(tensor.replicas) > 1 else ()
        )
    dtype = check(name, tensor)
    if not isinstance(tensor, DTensor):
        return Leaf(
            name,
            dtype,
            tuple(tensor.shape),
            (Box.whole(tensor.shape),),
            replicas if len(replicas) > 1 else (),
        )
    boxes = tuple(cut_boxes(tensor.shape, _cuts(name, tensor))) if tensor.device_mesh.get_coordinate() else ()
    memory = local(tensor)
    if sum(box.numel for box in boxes) != memory.numel() or (
        len(boxes) == 1 and boxes[0].shape != memory.shape
    ):
        raise UnsupportedValue(
            name,
            f"DTensor that holds {list(memory.shape)} of {list(tensor.shape)}, which {tensor.placements} on a mesh of {list(tensor.device_mesh.shape)} does not say",
            "make it with distribute_tensor(), or give LocalShards in its place",
        )
    return Leaf(name, dtype, tuple(tensor.shape), boxes, replicas_of(tensor, replicas))


def check(name: str, tensor: torch.Tensor) -> str:
    """The name of its dtype, if it can be saved at all."""
    if tensor.is_meta:
        raise UnsupportedValue(name, "tensor on the meta device", "it has no data: materialise it first")
    if tensor.is_nested:
        raise UnsupportedValue(name, "nested tensor", "save what unbind() gives, or its values and offsets")
    if tensor.layout is not torch.strided:
        raise UnsupportedValue(
            name, f"{tensor.layout} tensor", "save its parts (indices, values) as tensors of their own"
        )
    if tensor.is_quantized:
        raise UnsupportedValue(
            name, f"quantized tensor ({tensor.dtype})", "save int_repr(), q_scale() and q_zero_point()"
        )
    return dtype_name(name, tensor.dtype)


def dtype_name(name: str, dtype: torch.dtype) -> str:
    """As it is stored, if it can be."""
    found = str(dtype).removeprefix("torch.")
    if found not in DTYPES:
        raise UnsupportedValue(name, f"tensor of {dtype}", "view it as a dtype that safetensors can hold")
    return found


def replicas_of(tensor: DTensor, around: tuple[int, ...] = ()) -> tuple[int, ...]:
    """Global ranks that hold the same boxes: those that differ from this one only along replicated mesh dimensions.

    Args:
        around: The ranks of the widest mesh in the same module. If the tensor's mesh is cut from that one (``mesh["dp"]`` of a 2-D mesh), the dimensions left out count as
            replicated, since the module has one tensor of that name on all its ranks. Without it only the tensor's own mesh counts.
    """
    mesh, here = tensor.device_mesh, tensor.device_mesh.get_coordinate()
    if here is None:
        return ()
    kept = {
        dim: at
        for dim, (placement, at) in enumerate(zip(tensor.placements, here, strict=True))
        if not isinstance(placement, Replicate)
    }
    ranks = sorted(
        mesh.mesh[tuple(kept.get(dim, slice(None)) for dim in range(mesh.ndim))].flatten().tolist()
    )
    root = mesh._get_root_mesh()
    names, root_names = mesh.mesh_dim_names or (), root.mesh_dim_names or ()
    if root is not mesh and names and set(names) <= set(root_names):
        index = tuple(
            kept.get(names.index(name), slice(None)) if name in names else slice(None) for name in root_names
        )
        wider = sorted(root.mesh[index].flatten().tolist())
        if set(wider) <= set(around):
            ranks = wider
    return tuple(ranks) if len(ranks) > 1 else ()


def mesh_ranks(tensor: DTensor) -> tuple[int, ...]:
    """All ranks of a DTensor's mesh, ascending."""
    return tuple(sorted(tensor.device_mesh.mesh.flatten().tolist()))


def _cuts(name: str, tensor: DTensor) -> Iterator[Cut]:
    here = tensor.device_mesh.get_coordinate() or ()
    for dim, (placement, at) in enumerate(zip(tensor.placements, here, strict=True)):
        parts = tensor.device_mesh.size(dim)
        match placement:
            case Replicate():
                pass
            case _StridedShard():
                yield Cut(placement.dim, parts, at, int(placement.split_factor))
            case Shard():
                yield Cut(placement.dim, parts, at)
            case Partial():
                raise UnsupportedValue(
                    name,
                    "DTensor with a partial placement",
                    "reduce it first, with redistribute() to Replicate or Shard",
                )
            case _:
                raise UnsupportedValue(
                    name,
                    f"DTensor with placement {placement}",
                    "redistribute() it to Shard or Replicate first",
                )
