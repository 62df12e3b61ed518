"""Optimizers with a ``state_dict()`` of their own, such as those of bitsandbytes."""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any

from torch.distributed.tensor import DTensor
from torch.optim import Optimizer

from ckpt.state.walk.modules import check_kind, unwrap_optimizer
from ckpt.state.walk.stand_in import OptimizerStandIn
from ckpt.torch_private import is_zero_redundancy


class OwnState:
    """Stands for an optimizer in a state, and saves what the optimizer's own ``state_dict()``
    gives.
    """

    def __init__(self, optimizer: Optimizer) -> None:
        self._optimizer = optimizer

    def state_dict(self) -> dict[str, Any]:
        """Return the optimizer's own state dict."""
        return self._optimizer.state_dict()

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Let the optimizer load its own state dict."""
        self._optimizer.load_state_dict(state)


def saved_as(optimizers: Iterable[Any], path: str, *, is_sharded: bool = False) -> list[Any]:
    """Return what a state holds of each optimizer: the optimizer itself, or its `OwnState`.

    Raises:
        UnsupportedValue: An optimizer has a ``state_dict()`` of its own, and its parameters are
            sharded. The parts of the ranks would not be told apart.
    """
    return [_saved_as(optimizer, path, is_sharded=is_sharded) for optimizer in optimizers]


def _saved_as(optimizer: Any, path: str, *, is_sharded: bool) -> Any:
    """Return what a state holds of one optimizer, as ``saved_as`` describes it."""
    inner = unwrap_optimizer(optimizer)
    if is_zero_redundancy(inner) or isinstance(inner, OptimizerStandIn):
        return optimizer
    if type(inner).state_dict is Optimizer.state_dict:
        return optimizer
    parameters = [value for group in inner.param_groups for value in group["params"]]
    if is_sharded or any(isinstance(value, DTensor) for value in parameters):
        check_kind(path, inner)  # Raises UnsupportedValue
    return OwnState(inner)
