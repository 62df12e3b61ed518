"""Define stand-ins: objects that take the place of a module or optimizer in a state, for a
framework that keeps its modules or optimizers in a form of its own.

A stand-in saves the names and shapes that a plain module or optimizer of PyTorch would save. So a
stand-in can restore the checkpoint of a plain module or optimizer, and the other way round.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Mapping
from typing import Any

import torch
from torch import nn
from torch.optim import Optimizer

from ckpt.state.tensors.local_shards import TensorOrShards
from ckpt.state.walk.module_entries import ModuleItems


class StandIn(ABC):
    """The base class of stand-ins.

    Thread safety:
        Only the training thread calls the methods.
    """

    @abstractmethod
    def refresh(self) -> None:
        """Bring this stand-in up to date with the object that it stands for, without changing that
        object. ckpt calls this method before every walk over the state.
        """

    @abstractmethod
    def take_restored_values(self) -> None:
        """Pass the restored tensors and values on to the object that this stand-in stands for.

        ckpt calls this method on every rank, after all tensors were read and all values set.
        """


class Refillable(ABC):
    """The base class of objects that give a restore other tensors to fill than those of their
    ``state_dict()``.

    A subclass must also be a ``Stateful`` of ``torch.distributed.checkpoint``.
    """

    @abstractmethod
    def targets(self) -> dict[str, Any]:
        """Return a dict with the keys of ``state_dict()`` and the present values. A restore fills
        the tensors in the dict, and then passes the dict to ``load_state_dict``.
        """


class Checkable(ABC):
    """The base class of objects that check a saved ``state_dict()``, and may refuse it before the
    restore changes anything.
    """

    @abstractmethod
    def check_saved(self, state_dict: Mapping[str, Any]) -> None:
        """Raise a ``CkptError`` if the object must not load ``state_dict``.

        The method changes nothing. The tensors and arrays in ``state_dict`` have their shapes and
        dtypes, but their values have not been read yet.
        """


class ExtraValues(ABC):
    """The base class of optimizers with values to save besides their groups and their state."""

    @abstractmethod
    def extra(self) -> dict[str, Any]:
        """Return the values. They must be equal on all ranks.

        Only a restore into an `OptimizerStandIn` takes them.
        """


class ModuleStandIn(nn.Module, StandIn):
    """The base class of objects that stand for a module.

    Attributes:
        fills_module: True if the items are tensors of the state dict of ``key_module()``. A restore
            then calls the ``load_state_dict()`` of that module if it has code of its own.
    """

    fills_module = False

    @abstractmethod
    def items(self, path: str) -> ModuleItems:
        """Return the items that the stand-in at ``path`` of a state saves. The result is the same
        object as in the last call if nothing has changed.
        """

    def key_module(self) -> nn.Module:
        """Return the module in whose state dict the items have their keys (``Entry.key``)."""
        return self


class OptimizerStandIn(Optimizer, StandIn, ExtraValues):
    """The base class of objects that stand for an optimizer.

    ``param_groups`` and ``state`` are like those of an optimizer of torch. But in place of
    parameters they have the ``Entry.value`` objects of the ``ModuleStandIn`` for the module.

    The stand-in must have the same step hooks as the optimizer that does the step, so that the
    fence can hold this step.
    """

    @abstractmethod
    def new_state(
        self, parameter: Any, key: object, dtype: torch.dtype, shape: tuple[int, ...]
    ) -> TensorOrShards:
        """Return a new tensor for the value ``key`` of the state of ``parameter``.

        A restore calls this method if the optimizer has no such value of this dtype and shape. It
        then fills the tensor.
        """

    @abstractmethod
    def load_extra(self, extra: dict[str, Any]) -> None:
        """Set the values that ``extra`` returned when the checkpoint was saved.

        ckpt calls this method before ``take_restored_values``, and only if the checkpoint has these
        values.
        """
