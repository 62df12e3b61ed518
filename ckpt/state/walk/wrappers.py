"""Replace the wrapper tensors (see ``tensors.wrapped``) of a module or optimizer by the tensors
inside of them.

A wrapper tensor is one whose elements are in other tensors, down to the innermost ones, which are
no wrapper tensors.
"""

from __future__ import annotations

from collections.abc import Callable, Hashable, Iterator, Sequence
from dataclasses import dataclass, field

import torch

from ckpt.errors import UnsupportedValue
from ckpt.model.values import Node
from ckpt.state.tensors.local_shards import TensorOrShards
from ckpt.state.tensors.wrapped import WrapperParts, kind_of, take_apart, wrappers_in
from ckpt.state.walk.last_walk import OptimizerItems
from ckpt.state.walk.module_entries import AnyPiece, ModuleItems
from ckpt.state.walk.modules import state_name
from ckpt.state.walk.segments import NamedTensor
from ckpt.state.walk.state_objects import Choice

NameAndPiece = tuple[str, AnyPiece | None]
"""The name of a tensor, and the piece of it that this rank holds (None if the tensor is whole)."""
NameOf = Callable[[int], NameAndPiece | None]
"""A function from the index of a tensor to its name and piece, or None if it is not saved."""


@dataclass(slots=True)
class Wrappers:
    """The wrapper tensors among the tensors of a module or optimizer.

    Attributes:
        tensors: The tensors, with the innermost tensors in place of each wrapper tensor. Wrapper
            tensors that are not saved are left out.
        key: A value that is equal on the next save if the wrapper tensors have not changed. It does
            not cover the innermost tensors, so these must be compared separately.
        nodes: The name of each wrapper tensor -> its node in the manifest's tree.
        parts: The index of each wrapper tensor that is saved -> its parts.
    """

    tensors: Sequence[TensorOrShards]
    key: tuple[Hashable, ...] = ()
    nodes: dict[str, Node] = field(default_factory=dict[str, Node])
    parts: dict[int, WrapperParts] = field(default_factory=dict[int, WrapperParts])

    @classmethod
    def among(cls, tensors: Sequence[TensorOrShards], name_of: NameOf) -> Wrappers:
        """Take apart the wrapper tensors among ``tensors``, each once. ``name_of`` gives the name
        of each.

        Raises:
            UnsupportedValue: A wrapper tensor cannot be saved. The error names it.
        """
        parts_by_index: dict[int, WrapperParts] = {}
        nodes: dict[str, Node] = {}
        parts_by_id: dict[int, WrapperParts] = {}
        indices = list(wrappers_in(tensors))
        for index in indices:
            tensor, name_and_piece = tensors[index], name_of(index)
            if name_and_piece is None or not isinstance(tensor, torch.Tensor):
                continue
            name, piece = name_and_piece
            if piece is not None:
                raise UnsupportedValue(
                    name,
                    f"{kind_of(tensor)} in a part of a parameter",
                    "use fully_shard() (FSDP2), or save it as plain tensors",
                )
            if id(tensor) not in parts_by_id:
                parts_by_id[id(tensor)] = take_apart(name, tensor)
            parts = parts_by_index[index] = parts_by_id[id(tensor)]
            # The innermost tensors are stored under their own names.
            nodes[name] = parts.layer.node(name, str)
        unsaved_indices = set(indices) - parts_by_index.keys()
        inner_tensors = [
            inner
            for index, tensor in enumerate(tensors)
            if index not in unsaved_indices
            for inner in _innermost(tensor, parts_by_index.get(index))
        ]
        key = tuple((index, parts.key) for index, parts in parts_by_index.items())
        return cls(inner_tensors, key, nodes, parts_by_index)

    def expand(self, index: int, item: NamedTensor) -> Iterator[NamedTensor]:
        """Yield ``item``. If its tensor is a wrapper tensor, yield an item for each innermost
        tensor instead, with the ranks that have an equal copy of it.

        Args:
            index: The position of the tensor of ``item`` among the tensors of the constructor.
            item: The tensor, and in ``replicas`` the ranks that have an equal copy.
        """
        if (parts := self.parts.get(index)) is None:
            yield item
            return
        for path, inner in parts.innermost_tensors(item.replicas).items():
            yield item._replace(
                name=f"{item.name}/{path}",
                tensor=inner.tensor,
                replicas=inner.replicas,
                outer_tensors=parts.outer_tensors,
            )


def _innermost(tensor: TensorOrShards, parts: WrapperParts | None) -> list[TensorOrShards]:
    return (
        [tensor]
        if parts is None
        else [inner_tensor for _, inner_tensor in parts.layer.inner_tensors()]
    )


def module_wrappers(path: str, items: ModuleItems, choice: Choice) -> Wrappers:
    """Return the wrapper tensors of the module at ``path`` that ``choice`` takes."""

    def name_of(index: int) -> NameAndPiece | None:
        entry = items.tensor_entries[index]
        name = f"{path}/{entry.fqn}"
        return (name, entry.piece) if choice.takes(name) else None

    return Wrappers.among(items.tensors, name_of)


def optimizer_wrappers(path: str, items: OptimizerItems) -> Wrappers:
    """Return the wrapper tensors in the state of the optimizer at ``path``."""

    def name_of(index: int) -> NameAndPiece:
        part, key, _ = items.owners[index]
        return state_name(path, part.path, key), part.piece

    return Wrappers.among(items.tensors, name_of)
