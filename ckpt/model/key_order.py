"""The order of the keys in an optimizer's state of each parameter.

Nearly all parameters of an optimizer have the same keys, so one list has the order of most of them.
The node of an optimizer has this list as ``keys``. Only the parameters whose keys have another
order have lists of their own, in ``keys_of``.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Self, TypeVar

from ckpt.model.values import Node

T = TypeVar("T")


@dataclass(frozen=True, slots=True)
class KeyOrder:
    """The order of the keys of each parameter's state.

    A key is given as the text that stands for it in a name.

    Attributes:
        keys: The keys of most parameters, which may have only some of them.
        keys_of: The path of each parameter with keys in another order -> its keys.
    """

    keys: tuple[str, ...] = ()
    keys_of: Mapping[str, tuple[str, ...]] = field(default_factory=dict[str, tuple[str, ...]])

    @classmethod
    def of(cls, orders: Mapping[str, tuple[str, ...]]) -> Self:
        """Return the order for parameters whose keys are ``orders``, by their paths."""
        keys: tuple[str, ...] = ()
        fit: set[tuple[str, ...]] = set()
        for order in dict.fromkeys(orders.values()):
            wider = (*keys, *(key for key in order if key not in keys))
            if _is_within(order, wider):
                keys = wider
                fit.add(order)
        return cls(keys, {path: order for path, order in orders.items() if order not in fit})

    @classmethod
    def from_node(cls, node: Mapping[str, Node]) -> Self:
        """Return the order that ``node``, the node of an optimizer, has; empty if it has none."""
        own = {path: tuple(keys) for path, keys in node.get("keys_of", {}).items()}
        return cls(tuple(node.get("keys", ())), own)

    def node(self) -> dict[str, Node]:
        """Return the fields for the node of the optimizer."""
        own = {path: list(keys) for path, keys in self.keys_of.items()}
        return {
            **({"keys": list(self.keys)} if self.keys else {}),
            **({"keys_of": own} if own else {}),
        }

    def union(self, other: KeyOrder, paths: Iterable[str]) -> KeyOrder:
        """Return the order for the parameters of two ranks: for ``paths``, the parameters that only
        the second rank has, that of ``other``.
        """
        if self == other:
            return self
        if not self.keys:
            return other
        added = {path: other.of_parameter(path) for path in paths}
        same = other.keys == self.keys[: len(other.keys)]
        own = {path: keys for path, keys in added.items() if not same or path in other.keys_of}
        return KeyOrder(self.keys, {**self.keys_of, **own})

    def of_parameter(self, path: str) -> tuple[str, ...]:
        """Return the keys of the parameter at ``path`` in their order. It may have only some of
        them.
        """
        return self.keys_of.get(path, self.keys)


def in_order(found: Iterable[T], keys: Sequence[str], text: Callable[[T], str]) -> list[T]:
    """Return the keys ``found`` in the order of ``keys``. Those that ``keys`` lacks come last.

    ``text`` returns the text that stands for a key in a name.
    """
    place = {key: index for index, key in enumerate(keys)}
    return sorted(found, key=lambda key: place.get(text(key), len(place)))


def _is_within(order: Sequence[str], keys: Sequence[str]) -> bool:
    rest = iter(keys)
    return all(key in rest for key in order)
