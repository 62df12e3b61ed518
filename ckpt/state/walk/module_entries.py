"""Describe the entries of a module, and the parts of parameters that an optimizer holds.

A piece says which elements of a parameter a tensor has: a range of them in a flat tensor of FSDP1
(`Piece`), or one box that the user has declared (`DeclaredPart`).
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any, Final, NamedTuple

import torch

from ckpt.state.tensors.declared import DeclaredPart
from ckpt.state.tensors.layout import PLAIN_CLASSES
from ckpt.state.tensors.local_shards import TensorOrShards
from ckpt.state.tensors.sharded import Piece

AnyPiece = Piece | DeclaredPart
FIRST_VERSION: Final = {"version": 1}
"""The metadata of a module whose class does not set a version."""


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class Entry:
    """One item of a module's state dict.

    Attributes:
        key: The key of the item in the module's own state dict.
        fqn: The canonical name of the item, without the additions of wrappers such as DDP.
        value: The tensor, or the value of an extra state.
        piece: The piece of a larger tensor that ``value`` holds; None if ``value`` is the whole
            tensor.
        replica_ranks: If ``value`` is a plain tensor, the ranks that are known to hold the same
            tensor. If it is a DTensor, the ``unit_ranks`` of ``layout.replicas_of``.
        is_delegated: True if another of ``replica_ranks`` saves the entry and this rank does not.
            The values on the two ranks may differ.
    """

    key: str
    fqn: str
    value: Any
    piece: AnyPiece | None = None
    replica_ranks: tuple[int, ...] = ()
    is_delegated: bool = False


class Part(NamedTuple):
    """One named parameter in a tensor of an optimizer's parameter groups. A flat parameter of FSDP1
    may contain several named parameters, whole or in pieces. Any other tensor contains one.

    Attributes:
        path: The path of the named parameter in the state.
        piece: The piece of this parameter that the tensor holds; None if the tensor is the whole
            parameter.
    """

    path: str
    piece: AnyPiece | None = None

    @property
    def has_elements(self) -> bool:
        """True if this rank holds any part of the parameter."""
        return self.piece is None or self.piece.has_elements

    def parameter_elements(self, parameter: TensorOrShards) -> TensorOrShards:
        """Return the piece of the named parameter in the tensor ``parameter``, as ``LocalShards``.
        If the tensor is the whole named parameter, return ``parameter`` itself.
        """
        if self.piece is None or not isinstance(parameter, torch.Tensor):
            return parameter
        return self.piece.as_shards(self.path, parameter)

    def keeps(self, value: object) -> bool:
        """Return True if this rank saves ``value``, a value of the optimizer's state of this part.

        A value that belongs to the whole parameter, such as a step counter, is saved only by ranks
        that hold elements of the parameter. On any other rank, the optimizer does not step the
        parameter.
        """
        return self.has_elements or (
            isinstance(value, torch.Tensor) and self.piece is not None and self.piece.fits(value)
        )

    def elements_of(self, name: str, value: TensorOrShards) -> TensorOrShards:
        """Return the elements of ``value``, a value of the optimizer's state called ``name``, that
        belong to this part. A value that belongs to the whole parameter, such as a step counter, is
        returned as it is.
        """
        if self.piece is None or not isinstance(value, torch.Tensor) or not self.piece.fits(value):
            return value
        return self.piece.as_shards(name, value)


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class ModuleItems:
    """The items of a module's state dict that are saved.

    Attributes:
        entries: The items.
        parts: The identity (``id``) of each parameter -> its parts. A flat parameter of FSDP1 may
            have several parts; any other parameter has one.
        holders: The identity of each parameter -> the ranks that are known to have a parameter with
            the same name. They may hold other parts of it.
        tensor_entries: The entries whose values are tensors.
        tensors: The values of ``tensor_entries``.
        are_plain: True if each of them is exactly a ``torch.Tensor`` or an ``nn.Parameter``.
        value_entries: The entries whose values are no tensors.
        piece_ids: The identity of each tensor that holds pieces of larger tensors.
        omissions: The canonical names of the items that are not saved.
        module_versions: The canonical name of each module inside -> the version, and other
            metadata, that its state dict has, unless it is ``FIRST_VERSION``. It is None if the
            state dict has no metadata.
    """

    entries: tuple[Entry, ...]
    parts: Mapping[int, tuple[Part, ...]]
    holders: Mapping[int, tuple[int, ...]]
    tensor_entries: tuple[Entry, ...] = field(init=False)
    tensors: tuple[TensorOrShards, ...] = field(init=False)
    are_plain: bool = field(init=False)
    value_entries: tuple[Entry, ...] = field(init=False)
    piece_ids: frozenset[int] = field(init=False)
    omissions: tuple[str, ...] = ()
    module_versions: Mapping[str, Mapping[str, Any]] | None = None

    def __post_init__(self) -> None:
        tensor_entries = tuple(
            entry for entry in self.entries if isinstance(entry.value, TensorOrShards)
        )
        value_entries = tuple(
            entry for entry in self.entries if not isinstance(entry.value, TensorOrShards)
        )
        object.__setattr__(self, "tensor_entries", tensor_entries)
        object.__setattr__(self, "tensors", tuple(entry.value for entry in tensor_entries))
        object.__setattr__(self, "are_plain", PLAIN_CLASSES.issuperset(map(type, self.tensors)))
        object.__setattr__(self, "value_entries", value_entries)
        piece_ids = frozenset(
            id(entry.value) for entry in tensor_entries if entry.piece is not None
        )
        object.__setattr__(self, "piece_ids", piece_ids)
