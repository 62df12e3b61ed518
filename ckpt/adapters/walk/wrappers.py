"""Replace the wrapper tensors (see ``tensors.wrapped``) of a module or optimizer by the tensors
inside of them.
"""

from __future__ import annotations

from collections.abc import Callable, Hashable, Iterator, Sequence

import torch

from ckpt.adapters.tensors.local_shards import Source
from ckpt.adapters.tensors.wrapped import Apart, apart, kind_of, wrappers_in
from ckpt.adapters.walk.choice import Choice
from ckpt.adapters.walk.items import AnyPiece, ModuleItems
from ckpt.adapters.walk.last_walk import OptimizerItems
from ckpt.adapters.walk.modules import state_name
from ckpt.adapters.walk.segments import Held
from ckpt.errors import UnsupportedValue
from ckpt.model.values import Node

Named = tuple[str, AnyPiece | None]
"""The name of a tensor, and the piece of it that this rank holds (None if the tensor is whole)."""
NameOf = Callable[[int], Named | None]
"""A function from the index of a tensor to its name and piece, or None if it is not saved."""


class Wrappers:
    """The wrapper tensors among the tensors of a module or optimizer. Each is taken apart once.

    Attributes:
        tensors: The tensors, with the innermost tensors in place of each wrapper tensor. Wrapper
            tensors that are not saved are left out.
        key: A value that is equal on the next save if the wrapper tensors have not changed. It does
            not cover the innermost tensors, so these must be compared separately.
        nodes: The name of each wrapper tensor -> its node in the manifest's tree.

    Raises:
        UnsupportedValue: A wrapper tensor cannot be saved. The error names it.
    """

    def __init__(
        self, tensors: Sequence[Source], name_of: NameOf, *, are_plain: bool = False
    ) -> None:
        """Take apart the wrapper tensors among ``tensors``. ``name_of`` gives the name of each.

        ``are_plain`` is True if the caller knows that there are no wrapper tensors.
        """
        self._found: dict[int, Apart] = {}
        self.tensors = tensors
        self.key: tuple[Hashable, ...] = ()
        self.nodes: dict[str, Node] = {}
        if are_plain or not (indices := list(wrappers_in(tensors))):
            return
        known: dict[int, Apart] = {}
        for index in indices:
            tensor, named = tensors[index], name_of(index)
            if named is None or not isinstance(tensor, torch.Tensor):
                continue
            name, piece = named
            if piece is not None:
                raise UnsupportedValue(
                    name,
                    f"{kind_of(tensor)} in a part of a parameter",
                    "use fully_shard() (FSDP2), or save it as plain tensors",
                )
            if id(tensor) not in known:
                known[id(tensor)] = apart(name, tensor)
            taken = self._found[index] = known[id(tensor)]
            self.nodes[name] = taken.layer.node(name, str)
        left = set(indices) - self._found.keys()
        self.tensors = [
            each
            for index, tensor in enumerate(tensors)
            if index not in left
            for each in self._innermost(index, tensor)
        ]
        self.key = tuple((index, taken.key) for index, taken in self._found.items())

    def _innermost(self, index: int, tensor: Source) -> list[Source]:
        taken = self._found.get(index)
        return [tensor] if taken is None else [leaf for _, leaf in taken.layer.leaves()]

    def held(self, index: int, item: Held) -> Iterator[Held]:
        """Yield ``item``, whose tensor is the one at ``index``. If this tensor is a wrapper tensor,
        yield an item for each innermost tensor instead.
        """
        if (taken := self._found.get(index)) is None:
            yield item
            return
        for path, inside in taken.sources(item.replicas).items():
            yield item._replace(
                name=f"{item.name}/{path}",
                tensor=inside.source,
                replicas=inside.replicas,
                watched=taken.watched,
            )


def in_module(path: str, items: ModuleItems, choice: Choice) -> Wrappers:
    """Return the wrapper tensors of the module at ``path`` that ``choice`` takes."""

    def name_of(index: int) -> Named | None:
        entry = items.held[index]
        name = f"{path}/{entry.fqn}"
        return (name, entry.piece) if choice.takes(name) else None

    return Wrappers(items.tensors, name_of)


def in_optimizer(path: str, items: OptimizerItems) -> Wrappers:
    """Return the wrapper tensors in the state of the optimizer at ``path``."""

    def name_of(index: int) -> Named:
        part, key, _ = items.owners[index]
        return state_name(path, part.path, key), part.piece

    return Wrappers(items.tensors, name_of, are_plain=items.are_plain)
