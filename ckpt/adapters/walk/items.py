"""What a module or an optimizer of a state consists of: entries, and parts of parameters."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any, NamedTuple

import torch

from ckpt.adapters.tensors.declared import DeclaredPart
from ckpt.adapters.tensors.local_shards import Source
from ckpt.adapters.tensors.sharded import Piece

AnyPiece = Piece | DeclaredPart


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class Entry:
    """One item of a module's state dict.

    Attributes:
        key: The module's own name for it.
        fqn: The canonical one.
        piece: The piece of the entry's tensor that ``value`` holds; None if it holds all of it.
        replicas: Ranks known to hold the same, if it is a plain tensor.
        left: Whether this rank leaves the saving of it to another of ``replicas``, which may hold
            something else.
    """

    key: str
    fqn: str
    value: Any
    piece: AnyPiece | None = None
    replicas: tuple[int, ...] = ()
    left: bool = False


class Part(NamedTuple):
    """A parameter that an optimizer has, all of it or a piece."""

    path: str
    piece: AnyPiece | None = None

    @property
    def is_here(self) -> bool:
        """Whether this rank holds any part of it."""
        return self.piece is None or self.piece.is_here

    def all_of(self, parameter: Source) -> Source:
        """Return the parameter itself."""
        if self.piece is None or not isinstance(parameter, torch.Tensor):
            return parameter
        return self.piece.of(self.path, parameter)

    def keeps(self, value: object) -> bool:
        """Return True if this rank saves a value of the optimizer's state.

        The ranks that hold a part of the parameter save a value that belongs to the whole
        parameter, such as a step counter, since an optimizer does not step a parameter without
        elements.
        """
        return self.is_here or (
            isinstance(value, torch.Tensor) and self.piece is not None and self.piece.fits(value)
        )

    def of(self, name: str, value: Source) -> Source:
        """Return a value of the optimizer's state, as far as it belongs to this part. A step
        counter belongs to all parts.
        """
        if self.piece is None or not isinstance(value, torch.Tensor) or not self.piece.fits(value):
            return value
        return self.piece.of(name, value)


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class ModuleItems:
    """A module's state.

    Attributes:
        parts: Identity of each parameter -> its canonical path, or what it consists of.
        holders: Identity of each parameter -> the ranks known to have one of its name, whatever
            they hold of it.
        held: The entries that are tensors.
        tensors: The tensors of these.
        others: The entries that are no tensors.
        left: Names of the module's that are not saved.
    """

    entries: tuple[Entry, ...]
    parts: Mapping[int, tuple[Part, ...]]
    holders: Mapping[int, tuple[int, ...]]
    held: tuple[Entry, ...] = field(init=False)
    tensors: tuple[Source, ...] = field(init=False)
    others: tuple[Entry, ...] = field(init=False)
    left: tuple[str, ...] = ()

    def __post_init__(self) -> None:
        held = tuple(entry for entry in self.entries if isinstance(entry.value, Source))
        others = tuple(entry for entry in self.entries if not isinstance(entry.value, Source))
        object.__setattr__(self, "held", held)
        object.__setattr__(self, "tensors", tuple(entry.value for entry in held))
        object.__setattr__(self, "others", others)
