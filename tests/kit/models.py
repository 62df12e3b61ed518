"""Wrap models in place, without losing their types."""

from __future__ import annotations

from typing import Any, TypeVar, cast

import torch
from torch import nn
from torch.distributed.fsdp import fully_shard

M = TypeVar("M", bound=nn.Module)


def sharded(net: M, **how: Any) -> M:
    """Shard ``net`` by ``fully_shard``, which adds ``FSDPModule`` to its class."""
    fully_shard(net, **how)
    return net


def compiled(net: M) -> M:
    """Return ``net`` as ``torch.compile`` wraps it: as a module."""
    return cast("M", torch.compile(net, backend="eager"))
