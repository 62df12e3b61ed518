"""What a value of the state is to a restore."""

from __future__ import annotations

from collections.abc import Hashable, Mapping, MutableMapping
from typing import Any

import numpy as np
import torch
from torch import nn
from torch.optim import Optimizer

from ckpt.adapters.collect import is_stateful
from ckpt.adapters.layout import local
from ckpt.adapters.local_shards import LocalShards, Source
from ckpt.adapters.per_rank import PerRank


def memory_of(target: Source) -> Hashable:
    """Equal for targets that share it."""
    if isinstance(target, LocalShards):
        return tuple(map(memory_of, target.tensors)) or id(target)
    memory = local(target)
    return (
        (memory.data_ptr(), memory.shape, memory.stride())
        if memory.numel() and not memory.is_meta
        else id(target)
    )


def has_live(value: Any, depth: int = 0) -> bool:
    """Whether a container holds anything that is loaded in place."""
    if isinstance(value, torch.Tensor | LocalShards | np.ndarray | nn.Module | Optimizer | PerRank) or (
        depth and is_stateful(value)
    ):
        return True
    if isinstance(value, Mapping):
        return any(has_live(item, depth + 1) for item in value.values())
    return isinstance(value, list | tuple) and any(has_live(item, depth + 1) for item in value)


def holds_names(target: Any) -> bool:
    """Whether what is below it has names of its own."""
    if isinstance(target, nn.Module | Optimizer):
        return True
    return isinstance(target, MutableMapping | list | tuple) and not is_stateful(target) and has_live(target)
