"""Find the object that keeps the state of an optimizer on this rank.

This object is the optimizer itself. For a ``ZeroRedundancyOptimizer``, it is the optimizer inside
of it, which has this rank's share of the parameters.
"""

from __future__ import annotations

import sys
from collections.abc import MutableMapping
from dataclasses import dataclass
from typing import Any

import torch
from torch.optim import Optimizer

from ckpt.errors import UnsupportedValue
from ckpt.torch_private import overlaps_with_ddp

State = MutableMapping[torch.Tensor, dict[Any, Any]]


@dataclass(frozen=True, slots=True)
class Keeper:
    """The state of an optimizer on this rank.

    Attributes:
        state: The state of each parameter.
        own_ids: The identities (``id``) of the parameters whose state this rank keeps; None if it
            keeps the state of all.
    """

    state: State
    own_ids: frozenset[int] | None = None

    def keeps(self, parameter: torch.Tensor) -> bool:
        """Return True if this rank keeps the state of ``parameter``."""
        return self.own_ids is None or id(parameter) in self.own_ids


def is_zero(optimizer: Optimizer) -> bool:
    """Return True if ``optimizer`` is torch's ``ZeroRedundancyOptimizer``."""
    api = sys.modules.get("torch.distributed.optim.zero_redundancy_optimizer")
    return api is not None and isinstance(optimizer, api.ZeroRedundancyOptimizer)


def keeper_of(path: str, optimizer: Optimizer) -> Keeper:
    """Return the state of ``optimizer``, which is at ``path`` in the state to save or restore.

    The result has no parameter groups. ``optimizer.param_groups`` has all parameters, also for a
    ``ZeroRedundancyOptimizer``.

    Raises:
        UnsupportedValue: ``optimizer`` is a ``ZeroRedundancyOptimizer`` that steps during
            ``backward()``.
    """
    if not is_zero(optimizer):
        return Keeper(optimizer.state)
    if overlaps_with_ddp(optimizer):
        raise UnsupportedValue(
            path,
            "ZeroRedundancyOptimizer with overlap_with_ddp, which steps inside of backward()",
            "make it with overlap_with_ddp=False",
        )
    inner: Optimizer = optimizer.optim  # type: ignore[attr-defined]
    return Keeper(
        inner.state, frozenset(id(p) for group in inner.param_groups for p in group["params"])
    )
