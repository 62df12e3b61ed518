"""The order of the parameters in an optimizer's state, and of the keys of each of them.

Nearly all parameters of an optimizer have the same keys, so one list has the order of most of them.
The node of an optimizer has this list as ``keys``. Only the parameters whose keys have another
order have lists of their own, in ``keys_of``. Nearly always, the state has the parameters in the
order of the groups. If it does not, the node has their order as ``order``. The *node* of an
optimizer is its JSON in the tree of the state. The *path* of a parameter is its name in the state.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Self, TypeVar

from ckpt.model.values import Node

T = TypeVar("T")


@dataclass(frozen=True, slots=True)
class KeyOrder:
    """The order of the parameters in the state, and of the keys of each of them.

    A key is given as the text that stands for it in a name.

    Attributes:
        keys: The keys of most parameters, which may have only some of them.
        keys_of: The path of each parameter with keys in another order -> its keys.
        parameters: The paths of the parameters in their order; empty if it is that of the groups.
    """

    keys: tuple[str, ...] = ()
    keys_of: Mapping[str, tuple[str, ...]] = field(default_factory=dict[str, tuple[str, ...]])
    parameters: tuple[str, ...] = ()

    @classmethod
    def of(
        cls, orders: Mapping[str, tuple[str, ...]], parameters: Sequence[str] | None = None
    ) -> Self:
        """Return the order for parameters whose keys are ``orders``, by their paths in the order of
        the groups. ``parameters`` are these paths in the order of the state, None if it is the same
        order.
        """
        keys: tuple[str, ...] = ()
        orders_within: set[tuple[str, ...]] = set()
        # Add the keys of each order at the end of ``keys`` if the order then is within ``keys``.
        for order in dict.fromkeys(orders.values()):
            wider = (*keys, *(key for key in order if key not in keys))
            if _is_within(order, wider):
                keys = wider
                orders_within.add(order)
        keys_of = {path: order for path, order in orders.items() if order not in orders_within}
        return cls(keys, keys_of, () if parameters in (None, list(orders)) else tuple(parameters))

    @classmethod
    def from_node(cls, node: Mapping[str, Node]) -> Self:
        """Return the order that ``node``, the node of an optimizer, has; empty if it has none."""
        keys_of = {path: tuple(keys) for path, keys in node.get("keys_of", {}).items()}
        return cls(tuple(node.get("keys", ())), keys_of, tuple(node.get("order", ())))

    def node(self) -> dict[str, Node]:
        """Return the fields for the node of the optimizer."""
        keys_of = {path: list(keys) for path, keys in self.keys_of.items()}
        return {
            **({"keys": list(self.keys)} if self.keys else {}),
            **({"keys_of": keys_of} if keys_of else {}),
            **({"order": list(self.parameters)} if self.parameters else {}),
        }

    def union(self, second: KeyOrder, paths: Iterable[str]) -> KeyOrder:
        """Return the order for the parameters of two ranks: for ``paths``, the parameters that only
        the second rank has, that of ``second``.
        """
        if self == second:
            return self
        parameters = tuple(dict.fromkeys((*self.parameters, *second.parameters)))
        if not self.keys:
            return replace(second, parameters=parameters)
        new_keys = {path: second.of_parameter(path) for path in paths}
        # Keys of ``second`` that are the first ones of this order need no lists of their own.
        is_prefix = second.keys == self.keys[: len(second.keys)]
        new_keys_of = {
            path: keys for path, keys in new_keys.items() if not is_prefix or path in second.keys_of
        }
        return KeyOrder(self.keys, {**self.keys_of, **new_keys_of}, parameters)

    def of_parameter(self, path: str) -> tuple[str, ...]:
        """Return the keys of the parameter at ``path`` in their order. It may have only some of
        them.
        """
        return self.keys_of.get(path, self.keys)


def in_order(values: Iterable[T], keys: Sequence[str], text: Callable[[T], str]) -> list[T]:
    """Return ``values``, which are keys, in the order of ``keys``. Those that ``keys`` lacks come
    last.

    ``text`` returns the text that stands for a key in a name.
    """
    position_of = {key: index for index, key in enumerate(keys)}
    return sorted(values, key=lambda key: position_of.get(text(key), len(position_of)))


def _is_within(order: Sequence[str], keys: Sequence[str]) -> bool:
    """Return True if ``keys`` has all keys of ``order``, in the same order."""
    rest = iter(keys)  # Each search goes on after the key that was found last
    return all(key in rest for key in order)
