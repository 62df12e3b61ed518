"""Let the user declare that plain parameters and buffers are parts of larger tensors."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from itertools import repeat
from typing import Any, Final, NamedTuple

import torch

from ckpt.errors import ConfigError
from ckpt.model.box import Box
from ckpt.state.tensors.local_shards import LocalShards

_DECLARATION: Final = "_ckpt_part"
"""The attribute of a tensor with its declaration."""


class DeclaredPart(NamedTuple):
    """The declaration that a parameter is one box of a larger tensor.

    Attributes:
        shape: The shape of the larger tensor.
        offsets: The offsets of the box in the larger tensor.
        own_shape: The shape of the box, which is that of the parameter.
        replicas: The ranks that hold the same box with the same values; empty if unknown.
    """

    shape: tuple[int, ...]
    offsets: tuple[int, ...]
    own_shape: tuple[int, ...]
    replicas: tuple[int, ...]

    @property
    def has_elements(self) -> bool:
        """True if the box has any elements."""
        return 0 not in self.own_shape

    def fits(self, memory: torch.Tensor) -> bool:
        """Return True if ``memory`` has the shape of the box. The parameter has this shape, and so
        has optimizer state with one element for each element of the parameter.
        """
        return tuple(memory.shape) == self.own_shape

    def as_shards(self, name: str, memory: torch.Tensor) -> LocalShards:
        """Return the larger tensor as ``LocalShards``. The only part is the box, with its elements
        in ``memory``. A box without elements gives no part.

        ``name`` is the name of the larger tensor, for the error.

        Raises:
            ConfigError: ``memory`` has another shape than the box, since the shape of the parameter
                has changed after its declaration.
        """
        if not self.fits(memory):
            raise ConfigError(
                f"{name!r} has the shape {list(memory.shape)}, and had {list(self.own_shape)} "
                "when declare_part() was called: call it again"
            )
        shards = [(self.offsets, memory)] if self.has_elements else []
        return LocalShards(self.shape, shards, self.replicas, dtype=memory.dtype)


def declare_part(
    tensor: torch.Tensor, shape: Sequence[int], offsets: Sequence[int], replicas: Iterable[int] = ()
) -> None:
    """Declare that a plain parameter or buffer is a part of a larger tensor, for example the
    weights of the experts on one rank.

    The module that holds the parameter is then saved and restored with the whole tensor under the
    parameter's name, and can be restored on any other number of ranks. The same holds for the
    optimizer's state of the parameter. Call this function before the module is first saved or
    restored, and again when the parameter becomes another part: the next save or restore uses the
    last declaration. A DTensor needs no declaration.

    Args:
        tensor: The parameter or buffer of this rank.
        shape: The shape of the whole tensor. All ranks together must hold all its elements.
        offsets: The offsets of ``tensor`` in the whole tensor, in elements, one per dimension.
        replicas: The global ranks that are known to hold the same part with the same values,
            including this rank.

    Raises:
        ConfigError: The part is not inside of a tensor of ``shape``.
    """
    box = Box(tuple(offsets), tuple(tensor.shape))
    if not box.is_inside(shape):
        raise ConfigError(
            f"declare_part: {list(box.shape)} at {list(box.offsets)} is not inside a tensor of "
            f"{list(shape)}"
        )
    part = DeclaredPart(tuple(shape), box.offsets, box.shape, tuple(sorted(set(replicas))))
    setattr(tensor, _DECLARATION, part)


def declaration_of(value: Any) -> DeclaredPart | None:
    """Return the declaration that ``declare_part`` has attached to ``value``, or None if there is
    none.
    """
    return getattr(value, _DECLARATION, None) if isinstance(value, torch.Tensor) else None


def declarations(tensors: Iterable[torch.Tensor]) -> list[DeclaredPart | None]:
    """Return ``declaration_of(tensor)`` for each of ``tensors``. The call is fast for thousands of
    tensors.
    """
    return list(map(getattr, tensors, repeat(_DECLARATION), repeat(None)))
