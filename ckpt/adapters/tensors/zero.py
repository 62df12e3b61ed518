"""The place of an optimizer's state.

It is the optimizer itself, or for ``ZeroRedundancyOptimizer`` another optimizer with this rank's
share of the parameters.
"""

from __future__ import annotations

import sys
from collections.abc import MutableMapping
from dataclasses import dataclass
from typing import Any

import torch
from torch.optim import Optimizer

from ckpt.adapters.torch_private import overlaps_with_ddp
from ckpt.errors import UnsupportedValue

State = MutableMapping[torch.Tensor, dict[Any, Any]]


@dataclass(frozen=True, slots=True)
class Keeper:
    """The state of an optimizer.

    Attributes:
        own: Identities of the parameters whose state this rank keeps; None for all.
    """

    state: State
    own: frozenset[int] | None = None

    def keeps(self, parameter: torch.Tensor) -> bool:
        """Return True if the state of ``parameter`` is kept here."""
        return self.own is None or id(parameter) in self.own


def is_zero(optimizer: Optimizer) -> bool:
    """Return True for torch's ``ZeroRedundancyOptimizer``."""
    api = sys.modules.get("torch.distributed.optim.zero_redundancy_optimizer")
    return api is not None and isinstance(optimizer, api.ZeroRedundancyOptimizer)


def keeper_of(path: str, optimizer: Optimizer) -> Keeper:
    """Return the keeper of the state of ``optimizer``.

    Its groups, with all parameters, are its own in either case.
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
