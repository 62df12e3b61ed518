"""Plain parameters that are a part of something larger, because their owner says so."""

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
        """Whether it is the memory of that parameter, or of a value of its optimizer's state that is laid out like it."""
        return tuple(memory.shape) == self.own_shape

    def of(self, name: str, memory: torch.Tensor) -> LocalShards:
        """The whole tensor, as far as it is in ``memory``. Raises ``ConfigError`` if the parameter is another one by now."""
        if not self.fits(memory):
            raise ConfigError(
                f"{name!r} has the shape {list(memory.shape)}, and had {list(self.own_shape)} when declare_part() was called: call it again"
            )
        shards = [(self.offsets, memory)] if self.is_here else []
        return LocalShards(self.shape, shards, self.replicas, dtype=memory.dtype)


def declare_part(
    tensor: torch.Tensor, shape: Sequence[int], offsets: Sequence[int], replicas: Iterable[int] = ()
) -> None:
    """Say that a plain parameter or buffer of a module is a part of a larger tensor, as the experts of a rank are of all experts.

    The module is saved and restored with the tensor of ``shape`` under the parameter's name, and so is what an optimizer keeps for it, onto any other number of ranks.
    Call it once, before the module is first saved or restored. A DTensor says so itself.

    Args:
        shape: Of the whole tensor, which all ranks together must hold.
        offsets: Where the parameter begins in it, in elements, one per dimension.
        replicas: Global ranks known to hold the same part with the same values, this one included.

    Raises:
        ConfigError: The parameter does not lie in a tensor of that shape.
    """
    box = Box(tuple(offsets), tuple(tensor.shape))
    if not box.inside(shape):
        raise ConfigError(
            f"declare_part: {list(box.shape)} at {list(box.offsets)} is not inside a tensor of {list(shape)}"
        )
    part = DeclaredPart(tuple(shape), box.offsets, box.shape, tuple(sorted(set(replicas))))
    setattr(tensor, _MARK, part)


def declared(value: Any) -> DeclaredPart | None:
    """What was said of it."""
    return getattr(value, _MARK, None) if isinstance(value, torch.Tensor) else None
