"""Test the properties of a state's values that decide how a restore treats them, and remove the
copies of parameters that torch keeps.

Targets may share a part of their memory: a flat buffer and views of it, a matrix and its transpose,
or an expanded tensor, whose elements share memory. If one of these targets is filled, others
change. So the restore first reads the values of each target into separate memory (``read_apart``).
It then copies them into the targets one after another, and checks that each target has the values
that were read for it.

A restore does not fill the copies. FSDP keeps the gathered parameters of some modules after a
forward pass, and its next forward pass uses them again. ``torch.autocast`` keeps parameters that it
has converted to the lower precision until its outermost block ends. A graph that inductor has
frozen holds parameters as constants.

A value is live if a restore does not replace it as a whole. An adapter (see ``adapt``) gives an
object with a ``state_dict()`` for a value that has none. `LocalShards` describe a tensor by the
parts that this rank holds.
"""

from __future__ import annotations

import logging
import sys
from collections.abc import Callable, Hashable, Mapping, MutableMapping, Sequence
from functools import partial
from operator import itemgetter
from typing import Any, Final, TypeGuard

import numpy as np
import torch
from torch import nn
from torch.distributed.tensor import DTensor
from torch.optim import Optimizer

from ckpt.errors import RestoreError
from ckpt.staging.image import copyable
from ckpt.state.tensors.layout import PLAIN_CLASSES, to_local
from ckpt.state.tensors.local_shards import LocalShards, TensorOrShards
from ckpt.state.tensors.per_rank import PerRank
from ckpt.state.tensors.sharded import tensor_or_shards
from ckpt.state.walk.adapted import adapt
from ckpt.state.walk.state_objects import has_only_values, inherits_stateful, is_stateful
from ckpt.torch_private import (
    fsdp1_handle,
    fsdp1_reshard,
    fsdp1_wrappers,
    fsdp2_groups,
    has_frozen_graphs,
    may_be_gathering,
)

_log = logging.getLogger("ckpt")


def memory_of(target: TensorOrShards) -> Hashable:
    """Return a value that is equal for targets with the same memory, dtype, shape and strides. For
    targets without elements, it is equal only if they are the same object.
    """
    if isinstance(target, LocalShards):
        return tuple(map(memory_of, target.tensors)) or id(target)
    memory = to_local(target)
    address = memory.data_ptr()  # The address is 0 for all tensors without memory
    if not address or not memory.numel():
        return id(target)
    return address, memory.dtype, memory.shape, memory.stride()


def has_memory(value: object) -> TypeGuard[torch.Tensor]:
    """Return True if ``value`` is a plain or distributed dense tensor with data."""
    return (
        isinstance(value, torch.Tensor)
        and (type(value) in PLAIN_CLASSES or isinstance(value, DTensor))
        and value.layout is torch.strided
        and not (value.is_nested or value.is_meta)
    )


def has_live(value: Any, depth: int = 0) -> bool:
    """Return True if ``value`` is a tensor, ``LocalShards``, an array, a module, an optimizer or a
    ``PerRank`` value, or a dict, list or tuple with such a value inside.

    Any other object with ``state_dict`` and ``load_state_dict`` counts only if it is inside of a
    container.
    """
    if has_only_values(value):
        return False
    if isinstance(
        value, torch.Tensor | LocalShards | np.ndarray | nn.Module | Optimizer | PerRank
    ) or (depth and is_stateful(adapt(value))):
        return True
    if isinstance(value, Mapping):
        return any(has_live(item, depth + 1) for item in value.values())
    return isinstance(value, list | tuple) and any(has_live(item, depth + 1) for item in value)


def has_sharded(value: Any) -> bool:
    """Return True if ``value`` is a DTensor, a ``ShardedTensor`` or ``LocalShards``, or a container
    with such a value inside.
    """
    if has_only_values(value):
        return False
    if isinstance(value, torch.Tensor | LocalShards):
        return isinstance(value, DTensor | LocalShards) or isinstance(
            tensor_or_shards(value), LocalShards
        )
    if isinstance(value, Mapping):
        return any(map(has_sharded, value.values()))
    return isinstance(value, list | tuple) and any(map(has_sharded, value))


def is_matched_by_parts(target: Any) -> bool:
    """Return True if the values inside of ``target`` are matched one by one, by their own names."""
    if isinstance(target, nn.Module | Optimizer):
        return not inherits_stateful(target)
    return (
        isinstance(target, MutableMapping | list | tuple)
        and not is_stateful(target)
        and has_live(target)
    )


_SHARED_MEMORY: Final = "shares a part of its memory with another tensor of the target"
_SHARED_ELEMENTS: Final = "has elements in the target that share their memory"
_OWN_MEMORY_ADVICE: Final = "give each of them memory of its own"


def read_apart(names: Sequence[str], targets: list[TensorOrShards]) -> Callable[[], None] | None:
    """Replace each target in ``targets`` that ``find_overlaps`` finds by a new tensor in host
    memory.

    Return a function to call after the new tensors were read, which copies their values into the
    original targets. It raises ``RestoreError`` if the targets cannot all have their saved values.
    Return None if no target was replaced.

    Raises:
        RestoreError: Elements of a part of ``LocalShards`` share their memory.
    """
    copies: list[tuple[str, torch.Tensor, torch.Tensor]] = []
    for name, target in zip(names, targets, strict=True):
        if isinstance(target, LocalShards) and any(map(_may_overlap_itself, target.tensors)):
            raise RestoreError(f"{name!r} {_SHARED_ELEMENTS}: {_OWN_MEMORY_ADVICE}")
    for index, target in find_overlaps(targets):
        targets[index] = copy = torch.empty(target.shape, dtype=target.dtype, device="cpu")
        copies.append((names[index], target, copy))
    return partial(_copy_back, copies) if copies else None


def find_overlaps(targets: Sequence[TensorOrShards]) -> list[tuple[int, torch.Tensor]]:
    """Return the index and the local tensor of each target whose memory overlaps with that of
    another target, or whose own elements may share memory.

    Two targets with exactly the same memory and layout do not count as overlapping. ``LocalShards``
    are left out.
    """
    by_memory: dict[Hashable, list[tuple[int, torch.Tensor]]] = {}
    for index, target in enumerate(targets):
        if isinstance(target, torch.Tensor):
            memory = to_local(target)
            if memory.numel() and memory.data_ptr():  # Tensors without memory have the address 0
                by_memory.setdefault(memory_of(target), []).append((index, memory))
    groups = list(by_memory.values())
    memories = [memory for (_, memory), *_ in groups]
    ranges = sorted(
        (str(memory.device), *_address_range(memory), number)
        for number, memory in enumerate(memories)
    )
    overlap_numbers = {
        number for number, memory in enumerate(memories) if _may_overlap_itself(memory)
    }
    last_device, last_stop, last_number = "", 0, -1
    # Of the ranges so far on a device, ``last_stop`` is the largest end, that of ``last_number``.
    for device, start, stop, number in ranges:
        if device == last_device and start < last_stop:
            overlap_numbers |= {number, last_number}
        if device != last_device or stop > last_stop:
            last_device, last_stop, last_number = device, stop, number
    return sorted(
        (indexed_memory for number in overlap_numbers for indexed_memory in groups[number]),
        key=itemgetter(0),
    )


def _may_overlap_itself(memory: torch.Tensor) -> bool:
    """Return True if two elements of ``memory`` may share memory.

    The result is False if the stride of each dimension exceeds the extent of all dimensions with
    smaller strides. Otherwise it is True, even if no two elements of the tensor share memory.
    """
    if memory.is_contiguous():
        return False
    reach = 0
    for stride, length in sorted(zip(memory.stride(), memory.shape, strict=True)):
        if length > 1:
            if stride <= reach:
                return True
            reach += (length - 1) * stride
    return False


def _address_range(tensor: torch.Tensor) -> tuple[int, int]:
    """Return the address of the first byte of ``tensor``, and the address behind its last byte."""
    start = tensor.data_ptr()
    if tensor.is_contiguous():
        return start, start + tensor.nbytes
    reach = sum((n - 1) * stride for n, stride in zip(tensor.shape, tensor.stride(), strict=True))
    return start, start + (reach + 1) * tensor.itemsize


def _copy_back(copies: Sequence[tuple[str, torch.Tensor, torch.Tensor]]) -> None:
    """Copy the values that were read into the targets, and check after all copies that each target
    has its values.

    ``copies`` has the name of each target, the target, and the tensor with the values for it. Some
    dtypes are copied as an integer dtype (see ``copyable``).
    """
    for _, target, copy in copies:
        dtype = str(target.dtype).removeprefix("torch.")
        view = _without_repeats(copyable(target.detach(), dtype))
        view.copy_(copyable(copy, dtype)[tuple(map(slice, view.shape))])
    for name, target, copy in copies:
        if not torch.equal(_bytes(target), _bytes(copy)):
            problem = _SHARED_ELEMENTS if _may_overlap_itself(target) else _SHARED_MEMORY
            raise RestoreError(
                f"{name!r} {problem}, and the saved values differ: {_OWN_MEMORY_ADVICE}. Do not "
                "train on with this state"
            )


def _without_repeats(target: torch.Tensor) -> torch.Tensor:
    """Return a view of ``target`` that has each element of an expanded dimension only once, since
    torch refuses to write to an expanded tensor.
    """
    for dim, stride in enumerate(target.stride()):
        if stride == 0 and target.shape[dim] > 1:
            target = target.narrow(dim, 0, 1)
    return target


def _bytes(tensor: torch.Tensor) -> torch.Tensor:
    plain = copyable(tensor.detach(), str(tensor.dtype).removeprefix("torch."))
    plain = plain.cpu().resolve_conj().resolve_neg().contiguous()
    return plain.reshape(-1).view(torch.uint8)


def release_gathered(module: nn.Module) -> None:
    """Free the parameters that FSDP has gathered in ``module``, so that the next forward pass
    gathers the restored parameters.

    All ranks call this function in the same order, since it waits for the end of an all-gather that
    is under way. Parameters of FSDP1 inside ``summon_full_params()`` stay gathered.
    """
    for _, wrapper in fsdp1_wrappers(module):
        if (handle := fsdp1_handle(wrapper)) is not None:
            fsdp1_reshard(handle)
    for child in _fsdp2_modules(module):
        if any(map(may_be_gathering, fsdp2_groups(child))):
            # A call of ``unshard(async_op=True)`` may be under way, and this call waits for it.
            child.unshard()
        child.reshard()


def forget_copies() -> None:
    """Drop the converted parameters that ``torch.autocast`` keeps, and all compiled graphs of this
    process if inductor may have frozen one. Torch makes both again when it needs them.
    """
    torch.clear_autocast_cache()
    if has_frozen_graphs():
        _log.warning(
            "ckpt: torch.compile has frozen parameters into a graph of this process: all graphs "
            "are compiled again after this restore"
        )
        torch.compiler.reset()


def _fsdp2_modules(module: nn.Module) -> list[Any]:
    """Return the modules in ``module`` that ``fully_shard`` has wrapped."""
    api: Any = sys.modules.get("torch.distributed.fsdp")
    return (
        []
        if api is None
        else [child for child in module.modules() if isinstance(child, api.FSDPModule)]
    )
