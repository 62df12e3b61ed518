"""Find the layout of a tensor: the boxes that this rank holds, the memory of each box, and the
ranks that hold the same boxes. ``leaf_of`` makes the leaf of a tensor from its layout.

A box is a rectangular region of a tensor: offsets and a shape. A leaf describes a tensor without
its data. The order of a tensor lists its dimensions from the largest stride to the smallest. It is
empty for a row-major tensor. Replicas are ranks that hold the same boxes, and a unit is the part of
a module that one wrapper, such as DDP, keeps equal on its ranks. A form is the layout and the
memory that a tensor has at one time. `LocalShards` describe a tensor by the boxes that this rank
holds, each with its own memory.
"""

from __future__ import annotations

from collections.abc import Hashable, Iterator, Mapping, Sequence
from contextlib import suppress
from operator import ge, gt
from typing import Final, NamedTuple, TypeGuard

import torch
from torch import nn
from torch.distributed.tensor import DTensor
from torch.distributed.tensor.placement_types import Partial, Replicate, Shard
from torch.nn.parameter import is_lazy

from ckpt.errors import UnsupportedValue
from ckpt.model.box import Box
from ckpt.model.dtype import DTYPES
from ckpt.model.mesh_boxes import Cut, cut_boxes, local_regions
from ckpt.model.views import View
from ckpt.plan.leaf import Leaf
from ckpt.state.tensors.local_shards import LocalShards, TensorOrShards
from ckpt.torch_private import (
    StridedShard,
    plain_alias,
    ranks_of_mesh,
    root_mesh,
    wait_for,
)

_DTYPE_NAMES: Final = {
    dtype: name for name in DTYPES if isinstance(dtype := getattr(torch, name, None), torch.dtype)
}
PLAIN_CLASSES: Final = frozenset((torch.Tensor, nn.Parameter))


def is_plain(tensor: TensorOrShards) -> TypeGuard[torch.Tensor]:
    """Return True if ``tensor`` is exactly a ``torch.Tensor`` or an ``nn.Parameter``, not of
    another subclass.
    """
    return type(tensor) in PLAIN_CLASSES


def to_local(tensor: torch.Tensor) -> torch.Tensor:
    """Return the part of ``tensor`` that this rank holds, as a plain tensor with the same memory.

    Operations on the result run no code of a tensor subclass.
    """
    if type(tensor) in PLAIN_CLASSES:  # Nearly all tensors; a restore asks often
        return tensor
    return part if is_plain(part := without_dtensor(tensor)) else plain_alias(part)


def without_dtensor(tensor: torch.Tensor) -> torch.Tensor:
    """Return the local tensor of a DTensor, and any other tensor as it is. If the tensor is the
    result of a collective that is under way, the call waits for the collective.
    """
    if is_plain(tensor):
        return tensor
    return wait_for(tensor._local_tensor if isinstance(tensor, DTensor) else tensor)


def _tensors_of(source: TensorOrShards) -> tuple[torch.Tensor, ...]:
    """Return the tensors with the parts of ``LocalShards``, or a tensor itself."""
    return source.tensors if isinstance(source, LocalShards) else (source,)


def memories(source: TensorOrShards, boxes: Sequence[Box]) -> Sequence[torch.Tensor]:
    """Return a plain tensor for each of ``boxes``, with the memory of ``source`` for this box.

    ``boxes`` must be those of the leaf that ``leaf_of`` makes of ``source``.
    """
    return _in_boxes(tuple(map(to_local, _tensors_of(source))), boxes)


def _in_boxes(tensors: tuple[torch.Tensor, ...], boxes: Sequence[Box]) -> Sequence[torch.Tensor]:
    """Return a tensor for each of ``boxes``. One local tensor may hold several boxes."""
    if len(boxes) == len(tensors):
        return tensors
    (whole,) = tensors
    return [whole[region.slices()] for region in local_regions(boxes)]


class Form(NamedTuple):
    """The layout and the memory that a tensor or ``LocalShards`` has at one time. Both are kept as
    values, since the object itself may get another dtype, shape or memory later.

    Attributes:
        signature: A value that is equal for two sources if and only if their leaves and the formats
            of their memory are equal.
        tensors: Plain tensors with the memory that this rank holds. They keep this memory when the
            source gets other memory.
        wrapper: The DTensor if the source is one, else None. Operations on a DTensor move its own
            version counter, and operations on its local tensor move that of the tensor in
            ``tensors``.
    """

    signature: Hashable
    tensors: tuple[torch.Tensor, ...]
    wrapper: torch.Tensor | None = None

    def memories(self, boxes: Sequence[Box]) -> Sequence[torch.Tensor]:
        """Return a plain tensor with the memory of each of ``boxes``.

        ``boxes`` must be those of the leaf that ``leaf_of`` made of the source.
        """
        return _in_boxes(self.tensors, boxes)


def form_of(source: TensorOrShards) -> Form:
    """Return the form that ``source`` has now."""
    parts = _tensors_of(source)
    signature = tuple(_memory_format(without_dtensor(part)) for part in parts)
    wrapper: torch.Tensor | None = None
    if isinstance(source, LocalShards):
        signature += (source.dtype, source.shape, source.boxes, source.replicas)
    elif isinstance(source, DTensor):
        spec, wrapper = source._spec, source
        signature += (spec.mesh, spec.placements, spec.tensor_meta)
    return Form(signature, tuple(to_local(part).detach() for part in parts), wrapper)


def _memory_format(tensor: torch.Tensor) -> Hashable:
    """Return a value that is equal for two local tensors whose memory has the same format."""
    shape = None if tensor.is_nested else tensor.shape  # A nested tensor has no shape
    kind = None if is_plain(tensor) else type(tensor)
    return (tensor.dtype, shape, tensor.device, tensor.layout, kind, order_of(tensor))


def order_of(memory: torch.Tensor) -> tuple[int, ...]:
    """Return the dimensions of a local tensor from the largest stride to the smallest; empty if the
    tensor is row-major, or has no order.

    Of two dimensions with equal strides, one of one element is the smaller one. Only a plain dense
    tensor (see ``is_plain``) has an order. A tensor of at most one element, and one whose elements
    share memory, have none.
    """
    if not is_plain(memory) or memory.layout is not torch.strided or memory.is_nested:
        return ()
    strides = memory.stride()
    if all(map(gt, strides, strides[1:])):  # By far the most tensors are row-major
        return ()
    sort_keys = [(stride, length > 1) for stride, length in zip(strides, memory.shape, strict=True)]
    is_row_major = all(map(ge, sort_keys, sort_keys[1:]))
    if is_row_major or memory.numel() < 2 or is_expanded(memory):
        return ()
    return tuple(sorted(range(len(sort_keys)), key=sort_keys.__getitem__, reverse=True))


def is_expanded(memory: torch.Tensor) -> bool:
    """Return True if a dimension of ``memory`` has the same elements again and again."""
    strides = memory.stride()
    return 0 in strides and any(
        not stride and length > 1 for stride, length in zip(strides, memory.shape, strict=True)
    )


def empty_in_order(
    shape: Sequence[int],
    order: Sequence[int],
    *,
    dtype: torch.dtype,
    device: torch.device | str = "cpu",
) -> torch.Tensor:
    """Return a new dense tensor of ``shape`` whose dimensions have the order ``order`` in memory
    (see ``order_of``).
    """
    if not order:
        return torch.empty(shape, dtype=dtype, device=device)
    memory = torch.empty([shape[dim] for dim in order], dtype=dtype, device=device)
    return memory.permute(inverse(order))


def empty_like_in_order(
    tensor: torch.Tensor, order: Sequence[int], dtype: torch.dtype
) -> torch.Tensor:
    """Return a new tensor with the layout of ``tensor``, which may be a DTensor, and with the order
    ``order`` of the dimensions in local memory.
    """
    order = order or range(tensor.ndim)
    view = tensor.detach().permute(tuple(order))
    memory = torch.empty_like(view, dtype=dtype, memory_format=torch.contiguous_format)
    return memory.permute(inverse(order))


def view_in(buffer: torch.Tensor, view: View, dtype: str, shape: tuple[int, ...]) -> torch.Tensor:
    """Return the tensor that has the place ``view`` in ``buffer``."""
    tensor = torch.empty(0, dtype=getattr(torch, dtype), device=buffer.device)
    start = view.offset // tensor.itemsize
    return tensor.set_(buffer.untyped_storage(), start, shape, view.strides)


def inverse(order: Sequence[int]) -> list[int]:
    """Return the permutation that undoes the permutation ``order``."""
    return sorted(range(len(order)), key=order.__getitem__)


def leaf_of(name: str, tensor: TensorOrShards, replicas: tuple[int, ...]) -> Leaf:
    """Return the leaf of ``tensor``.

    Args:
        replicas: For a plain tensor, the ranks that are known to hold the same tensor. For a
            DTensor, the ``unit_ranks`` of ``replicas_of``. ``LocalShards`` have replicas of their
            own.

    Raises:
        UnsupportedValue: The tensor cannot be saved, since it is partial, sparse, quantized,
            nested, or on the meta device, for instance. The error says what to do.
    """
    if isinstance(tensor, LocalShards):
        for part, box in zip(tensor.tensors, tensor.boxes, strict=True):
            checked_dtype(name, part)
            if (part.dtype, tuple(part.shape)) != (tensor.dtype, box.shape):
                raise UnsupportedValue(
                    name,
                    f"LocalShards made for {box.shape} of {tensor.dtype}, whose memory is now "
                    f"{tuple(part.shape)} of {part.dtype}",
                    "make new LocalShards when their memory takes another shape or dtype",
                )
        dtype = dtype_name(name, tensor.dtype)
        return Leaf(
            name,
            dtype,
            tensor.shape,
            tensor.boxes,
            tensor.replicas if len(tensor.replicas) > 1 else (),
        )
    dtype = checked_dtype(name, tensor)
    if not isinstance(tensor, DTensor):
        return Leaf(
            name,
            dtype,
            tuple(tensor.shape),
            (Box.whole(tensor.shape),),
            replicas if len(replicas) > 1 else (),
            order=order_of(to_local(tensor)),
        )
    boxes = boxes_of(name, tensor)
    memory = to_local(tensor)
    if memory.dtype != tensor.dtype:
        raise UnsupportedValue(
            name,
            f"DTensor of {tensor.dtype} whose local tensor is of {memory.dtype}",
            "convert it with Module.to() or Tensor.to(), not through .data",
        )
    if sum(box.numel for box in boxes) != memory.numel() or (
        len(boxes) == 1 and boxes[0].shape != memory.shape
    ):
        raise UnsupportedValue(
            name,
            f"DTensor that holds {list(memory.shape)} of {list(tensor.shape)}, which "
            f"{tensor.placements} on a mesh of {list(tensor.device_mesh.shape)} does not say",
            "make it with distribute_tensor(), or give LocalShards in its place",
        )
    ranks = replicas_of(tensor, replicas)
    return Leaf(name, dtype, tuple(tensor.shape), boxes, ranks, order=order_of(memory))


def boxes_of(name: str, tensor: DTensor, rank: int | None = None) -> tuple[Box, ...]:
    """Return the boxes of a DTensor that ``rank`` holds; empty if it holds none. None stands for
    this rank.

    Raises:
        UnsupportedValue: A placement does not assign boxes to ranks, such as ``Partial``. The error
            has ``name``.
    """
    if rank is None:
        coordinate = tensor.device_mesh.get_coordinate()
    else:
        places = (ranks_of_mesh(tensor.device_mesh) == rank).nonzero().tolist()
        # The first index is that of a mesh beside others (see ``ranks_of_mesh``).
        coordinate = places[0][1:] if places else None
    return tuple(cut_boxes(tensor.shape, _cuts(name, tensor, coordinate))) if coordinate else ()


def check_initialized(name: str, tensor: TensorOrShards) -> None:
    """Raise ``UnsupportedValue`` if ``tensor`` is a parameter of a lazy module before its first
    forward pass, when it has no shape and no data.
    """
    if isinstance(tensor, torch.Tensor) and is_lazy(tensor):
        raise UnsupportedValue(
            name, "parameter that is not initialized", "run a forward pass, which gives it a shape"
        )


def checked_dtype(name: str, tensor: torch.Tensor) -> str:
    """Return the name of the tensor's dtype in a checkpoint. Raise ``UnsupportedValue`` if the
    tensor ``name`` cannot be saved.
    """
    check_initialized(name, tensor)
    if tensor.is_meta:
        raise UnsupportedValue(
            name, "tensor on the meta device", "it has no data: materialise it first"
        )
    if tensor.is_nested:
        raise UnsupportedValue(
            name, "nested tensor", "save what unbind() gives, or its values and offsets"
        )
    if tensor.layout is not torch.strided:
        raise UnsupportedValue(
            name,
            f"{tensor.layout} tensor",
            "save its parts (indices, values) as tensors of their own",
        )
    if tensor.is_quantized:
        raise UnsupportedValue(
            name,
            f"quantized tensor ({tensor.dtype})",
            "save int_repr(), q_scale() and q_zero_point()",
        )
    if is_plain(tensor):
        # Most tensors are plain. After the checks above, only their storage can be missing.
        check_storage(name, tensor)
        return dtype_name(name, tensor.dtype)
    part, memory = without_dtensor(tensor), to_local(tensor)
    if memory.is_meta:
        raise UnsupportedValue(name, f"{type(part).__name__} without data", "materialise it first")
    if hasattr(part, "__tensor_flatten__") or not (is_plain(part) or has_storage(memory)):
        raise UnsupportedValue(
            name,
            f"{type(part).__name__}, a tensor whose elements are in other tensors",
            f"save the tensors that it holds{_inner_names_text(part)} under names of their own, or "
            "dequantise it first",
        )
    check_storage(name, memory)
    return dtype_name(name, tensor.dtype)


def has_storage(memory: torch.Tensor) -> bool:
    """Return True if the storage of a plain tensor contains all its elements.

    A wrapper tensor (see ``tensors.wrapped``) has no storage. A parameter that FSDP has freed has
    an empty storage.
    """
    if not (count := memory.numel()):
        return True
    if memory.is_contiguous():
        span = count
    else:
        lengths_and_strides = zip(memory.shape, memory.stride(), strict=True)
        span = 1 + sum((length - 1) * stride for length, stride in lengths_and_strides)
    end = (memory.storage_offset() + span) * memory.element_size()
    return memory.data_ptr() != 0 and end <= memory.untyped_storage().nbytes()


def check_storage(name: str, memory: torch.Tensor) -> None:
    """Raise ``UnsupportedValue`` if the storage of ``memory`` was freed, since reading it would end
    the process with a signal.
    """
    if not has_storage(memory):
        raise UnsupportedValue(
            name,
            "tensor without storage, which was freed",
            "save while it is there, or leave it out",
        )


def _inner_names_text(tensor: torch.Tensor) -> str:
    """Return the attributes that hold the tensors inside of a wrapper tensor, as text in
    parentheses for an error; empty if the class does not give them.
    """
    with suppress(Exception):  # A user's code may raise anything
        names, _ = tensor.__tensor_flatten__()  # type: ignore[attr-defined]
        return f" ({', '.join(names)})"
    return ""


def dtype_name(name: str, dtype: torch.dtype) -> str:
    """Return the name of a dtype in a checkpoint. Raise ``UnsupportedValue``, which names the
    tensor ``name``, if a checkpoint cannot hold this dtype.
    """
    if (text := _DTYPE_NAMES.get(dtype)) is None:
        raise UnsupportedValue(
            name, f"tensor of {dtype}", "view it as a dtype that safetensors can hold"
        )
    return text


def replicas_of(tensor: DTensor, unit_ranks: tuple[int, ...] = ()) -> tuple[int, ...]:
    """Return the global ranks that hold the same boxes as this rank, ascending and including this
    rank. Return an empty tuple if no other rank holds them, or if this rank is not in the mesh of
    the tensor.

    The mesh coordinates of these ranks differ only in replicated dimensions.

    Args:
        unit_ranks: The ranks of the widest mesh in the same unit (see ``tensors.units``). The mesh
            of the tensor may be a part of that mesh, such as ``mesh["dp"]`` of a 2-D mesh. The
            tensor then counts as replicated over the dimensions that its own mesh lacks, since all
            ranks of the unit have a tensor of that name. If ``unit_ranks`` is empty, only the
            tensor's own mesh counts.
    """
    coordinate = tensor.device_mesh.get_coordinate()
    if coordinate is None:
        return ()
    fixed_dims = {
        dim: index
        for dim, (placement, index) in enumerate(zip(tensor.placements, coordinate, strict=True))
        if not isinstance(placement, Replicate)
    }
    ranks = _ranks_at(tensor, fixed_dims, unit_ranks)
    return ranks if len(ranks) > 1 else ()


def holders_of(tensor: DTensor, unit_ranks: tuple[int, ...] = ()) -> tuple[int, ...]:
    """Return the global ranks that are known to have a tensor with the name of ``tensor``. They may
    hold other boxes of it. ``unit_ranks`` is as in ``replicas_of``.
    """
    return _ranks_at(tensor, {}, unit_ranks)


def mesh_ranks(tensor: DTensor) -> tuple[int, ...]:
    """Return all ranks of a DTensor's mesh, ascending."""
    return tuple(sorted(tensor.device_mesh.mesh.flatten().tolist()))


def _ranks_at(
    tensor: DTensor, coordinates: Mapping[int, int], unit_ranks: tuple[int, ...]
) -> tuple[int, ...]:
    """Return the ranks that have the mesh coordinates ``coordinates``, ascending.

    ``coordinates`` is a mapping: a dimension of the tensor's mesh -> the coordinate in this
    dimension. The result has the ranks with these coordinates in the tensor's own mesh. If this
    mesh is a part of a wider mesh, and ``unit_ranks`` contains all of these ranks, the result also
    has the other ranks in ``unit_ranks`` that have these coordinates in the wider mesh.
    """
    mesh = tensor.device_mesh
    own_mesh_ranks = (
        mesh.mesh[tuple(coordinates.get(dim, slice(None)) for dim in range(mesh.ndim))]
        .flatten()
        .tolist()
    )
    root = root_mesh(mesh)
    names, root_names = mesh.mesh_dim_names or (), root.mesh_dim_names or ()
    if root is not mesh and names and set(names) <= set(root_names):
        index = tuple(
            coordinates.get(names.index(name), slice(None)) if name in names else slice(None)
            for name in root_names
        )
        wider_ranks = set(root.mesh[index].flatten().tolist()) & set(unit_ranks)
        if wider_ranks.issuperset(own_mesh_ranks):
            return tuple(sorted(wider_ranks))
    return tuple(sorted(own_mesh_ranks))


def _cuts(name: str, tensor: DTensor, coordinate: Sequence[int]) -> Iterator[Cut]:
    """Yield the cuts of a DTensor for the rank at ``coordinate`` of its mesh.

    A cut divides one dimension of the tensor among the ranks of one dimension of the mesh.
    """
    for dim, (placement, index) in enumerate(zip(tensor.placements, coordinate, strict=True)):
        parts = tensor.device_mesh.size(dim)
        match placement:
            case Replicate():
                pass
            case StridedShard():
                yield Cut(placement.dim, parts, index, int(placement.split_factor))
            case Shard():
                yield Cut(placement.dim, parts, index)
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
