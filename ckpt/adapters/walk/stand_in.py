"""Objects that stand in a state where a module or optimizer would, for a framework that keeps these
in a form of its own.

What they save has the names and shapes that plain PyTorch's would have, so one restores the other.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Mapping
from typing import Any

import torch
from torch import nn
from torch.optim import Optimizer

from ckpt.adapters.tensors.local_shards import Source
from ckpt.adapters.walk.items import ModuleItems


class StandIn(ABC):
    """The training thread calls all methods."""

    @abstractmethod
    def look(self) -> None:
        """Bring this stand-in up to date with the object that it stands for.

        ckpt calls it before every walk over the state. The object itself is not changed.
        """

    @abstractmethod
    def settle(self) -> None:
        """Take over what was restored into what is shown.

        Called on every rank, once everything has been read and set.
        """


class Refilled(ABC):
    """An object with a ``state_dict()`` that a restore must not fill in place.

    A subclass must also be a ``Stateful`` of ``torch.distributed.checkpoint``.
    """

    @abstractmethod
    def targets(self) -> dict[str, Any]:
        """Return what a restore fills and then gives to ``load_state_dict``, with the names of
        ``state_dict()`` and the present values.
        """


class Checked(ABC):
    """An object that refuses some of what was saved before the restore changes anything."""

    @abstractmethod
    def check_saved(self, state_dict: Mapping[str, Any]) -> None:
        """Raise a ``CkptError`` if ``load_state_dict`` must not get this; changes nothing.

        The values of tensors and arrays in it have not been read yet.
        """


class ModuleStandIn(nn.Module, StandIn):
    """Stands for a module."""

    @abstractmethod
    def items(self, path: str) -> ModuleItems:
        """Return its items at ``path`` of a state. They are the same object while nothing has
        changed.
        """


class OptimizerStandIn(Optimizer, StandIn):
    """Stands for an optimizer.

    ``param_groups`` and ``state`` are as torch's, but for what stands for parameters: values of a
    module that stands in, too.

    Its step hooks are those of the optimizer that steps.
    """

    @abstractmethod
    def new_state(
        self, parameter: Any, key: object, dtype: torch.dtype, shape: tuple[int, ...]
    ) -> Source:
        """Return memory for a value of a parameter's state that does not exist yet."""

    @abstractmethod
    def extra(self) -> dict[str, Any]:
        """Return other values to save, equal on all ranks.

        A restore into another kind of optimizer leaves them out.
        """

    @abstractmethod
    def load_extra(self, extra: dict[str, Any]) -> None:
        """Set the values that ``extra`` has returned.

        It is called before ``settle``, and only if these values were saved.
        """
