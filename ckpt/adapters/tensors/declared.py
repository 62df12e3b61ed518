"""Plain parameters that their owner declares to be parts of larger tensors."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from typing import Any, Final, NamedTuple

import torch

from ckpt.adapters.tensors.local_shards import LocalShards
from ckpt.errors import ConfigError
from ckpt.model.box import Box

_MARK: Final = "_ckpt_part"


class DeclaredPart(NamedTuple):
    """All of a parameter is the box at ``offsets`` of a tensor of ``shape``."""

    shape: tuple[int, ...]
    offsets: tuple[int, ...]
    own_shape: tuple[int, ...]
    replicas: tuple[int, ...]

    @property
    def is_here(self) -> bool:
        """Whether it has any elements."""
        return 0 not in self.own_shape

    def fits(self, memory: torch.Tensor) -> bool:
        """Return True for the memory of the parameter, or of optimizer state with the same
        layout.
        """
        return tuple(memory.shape) == self.own_shape

    def of(self, name: str, memory: torch.Tensor) -> LocalShards:
        """Return the whole tensor, as far as it is in ``memory``.

        Raises ``ConfigError`` if the parameter is another one by now.
        """
        if not self.fits(memory):
            raise ConfigError(
                f"{name!r} has the shape {list(memory.shape)}, and had {list(self.own_shape)} "
                "when declare_part() was called: call it again"
            )
        shards = [(self.offsets, memory)] if self.is_here else []
        return LocalShards(self.shape, shards, self.replicas, dtype=memory.dtype)


def declare_part(
    tensor: torch.Tensor, shape: Sequence[int], offsets: Sequence[int], replicas: Iterable[int] = ()
) -> None:
    """Declare that a plain parameter or buffer is a part of a larger tensor, as one rank's experts
    are.

    The module is saved and restored with the tensor of ``shape`` under the parameter's name, and so
    is an optimizer's state of it, onto any other number of ranks. Call it once, before the module
    is first saved or restored. A DTensor needs no declaration.

    Args:
        shape: The shape of the whole tensor, which all ranks together must hold.
        offsets: Where the parameter begins in it, in elements, one per dimension.
        replicas: Global ranks known to hold the same part with the same values, including this one.

    Raises:
        ConfigError: The parameter is not inside of a tensor of that shape.
    """
    box = Box(tuple(offsets), tuple(tensor.shape))
    if not box.inside(shape):
        raise ConfigError(
            f"declare_part: {list(box.shape)} at {list(box.offsets)} is not inside a tensor of "
            f"{list(shape)}"
        )
    part = DeclaredPart(tuple(shape), box.offsets, box.shape, tuple(sorted(set(replicas))))
    setattr(tensor, _MARK, part)


def declared(value: Any) -> DeclaredPart | None:
    """Return the declaration of a parameter."""
    return getattr(value, _MARK, None) if isinstance(value, torch.Tensor) else None
