"""Test the properties of a state's values that decide how a restore treats them."""

from __future__ import annotations

from collections.abc import Hashable, Mapping, MutableMapping
from typing import Any, TypeGuard

import numpy as np
import torch
from torch import nn
from torch.distributed.tensor import DTensor
from torch.optim import Optimizer

from ckpt.state.tensors.layout import PLAIN, local
from ckpt.state.tensors.local_shards import LocalShards, Source
from ckpt.state.tensors.per_rank import PerRank
from ckpt.state.tensors.sharded import as_source
from ckpt.state.walk.adapted import adapt
from ckpt.state.walk.objects import declares_state, has_only_values, is_stateful


def memory_of(target: Source) -> Hashable:
    """Return a value that is equal for targets with the same memory, dtype, shape and strides. For
    targets without elements, it is equal only if they are the same object.
    """
    if isinstance(target, LocalShards):
        return tuple(map(memory_of, target.tensors)) or id(target)
    memory = local(target)
    address = memory.data_ptr()  # The address is 0 for all tensors without memory
    if not address or not memory.numel():
        return id(target)
    return address, memory.dtype, memory.shape, memory.stride()


def has_memory(value: object) -> TypeGuard[torch.Tensor]:
    """Return True if ``value`` is a plain or distributed dense tensor with data."""
    return (
        isinstance(value, torch.Tensor)
        and (type(value) in PLAIN or isinstance(value, DTensor))
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
        return isinstance(value, DTensor | LocalShards) or isinstance(as_source(value), LocalShards)
    if isinstance(value, Mapping):
        return any(map(has_sharded, value.values()))
    return isinstance(value, list | tuple) and any(map(has_sharded, value))


def holds_names(target: Any) -> bool:
    """Return True if the values inside of ``target`` are matched one by one, by their own names."""
    if isinstance(target, nn.Module | Optimizer):
        return not declares_state(target)
    return (
        isinstance(target, MutableMapping | list | tuple)
        and not is_stateful(target)
        and has_live(target)
    )
