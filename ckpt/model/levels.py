"""Encode plain values level by level.

`ckpt.model.values.encode` makes a call for each container. For a state with hundreds of thousands
of small containers, such as a history of tuples, the functions here take all values of one depth
together. They run at the speed of C, and make no new object for a list or a dict that is its own
node.
"""

from __future__ import annotations

import gc
import math
from collections.abc import Callable, Generator, Iterator, Mapping, Sequence
from collections.abc import Set as AbstractSet
from contextlib import contextmanager
from itertools import chain, islice
from typing import Any, Final

from ckpt.errors import UnsupportedValue

Leaf = Callable[[Any, int], Any]
"""Returns the node of a value that is no list, tuple or dict, and that has so many containers
around it. It raises ``UnsupportedValue`` if the value is not plain.
"""

CONTAINERS: Final = frozenset({dict, list, tuple})
_LARGE: Final = 1 << 16
"""The most values of a level that is never looked at for shared containers."""
_NOT_PLAIN: Final = UnsupportedValue("", "value that is not plain")


class Growth:
    """Tells a walk level by level when it may take exponential time: on a large level, a list or a
    dict occurs twice. A list that has itself inside twice has twice as many values on each level.
    """

    def __init__(self) -> None:
        self._limit = _LARGE

    def is_bounded(self, containers: Mapping[type, Sequence[Any]]) -> bool:
        """Return False if the walk must not go on to the values inside of all ``containers``."""
        size = sum(sum(map(len, members)) for members in containers.values())
        if size <= self._limit:
            return True
        self._limit = 2 * size
        return all(
            kind is tuple or len(set(map(id, members))) == len(members)
            for kind, members in containers.items()
        )


def contents(containers: Mapping[type, Sequence[Any]]) -> list[Any]:
    """Return the values inside of all containers, in their order. ``containers`` has the lists,
    tuples and dicts by their types.
    """
    values: list[Any] = []
    for kind, members in containers.items():
        parts = map(dict.values, members) if kind is dict else members
        values += chain.from_iterable(parts)
    return values


def by_type(values: Sequence[Any], kinds: AbstractSet[type]) -> dict[type, Sequence[Any]]:
    """Return the values of each of ``kinds`` among ``values``, in their order."""
    types = set(map(type, values))
    if len(types) == 1:
        return dict.fromkeys(types & kinds, values)
    return {kind: [value for value in values if type(value) is kind] for kind in types & kinds}


def is_plain(value: Any, leaves: AbstractSet[type], deepest: int) -> bool:
    """Return True if ``value`` is of one of the types ``leaves``, or if all values in its lists,
    tuples and dicts are. These may be nested ``deepest`` times.
    """
    level: Sequence[Any] = (value,)
    types, growth = CONTAINERS | leaves, Growth()
    for _ in range(deepest):
        if not types.issuperset(map(type, level)):
            return False
        containers = by_type(level, CONTAINERS)
        if not containers or not growth.is_bounded(containers):
            return not containers
        level = contents(containers)
    return False


@contextmanager
def _without_collector() -> Generator[None]:
    """Pause the garbage collector. It would look at all new objects again and again, which takes
    longer than to make them, and there is no garbage among them.
    """
    if not gc.isenabled():
        yield
        return
    gc.disable()
    try:
        yield
    finally:
        gc.enable()


def node_of(value: Any, depth: int, deepest: int, leaf: Leaf) -> Any:
    """Return the node of ``value``. It is ``value`` itself if this is its own node.

    Args:
        value: A value with ``depth`` containers around it.
        depth: The number of these containers.
        deepest: The largest such number that a container may have.
        leaf: See ``Leaf``.

    Raises:
        UnsupportedValue: A value inside is not plain, many lists or dicts are shared, a dict has
            other keys than names, or containers are nested too deeply. The error has no name.
    """
    with _without_collector():
        return _nodes([value], depth, deepest, leaf, Growth())[0]


def _nodes(
    values: Sequence[Any], depth: int, deepest: int, leaf: Leaf, growth: Growth
) -> Sequence[Any]:
    """Return the node of each value. The result is ``values`` itself if all are their own nodes."""
    groups: Mapping[type, Sequence[Any]] = by_type(values, set(map(type, values)))
    containers: dict[type, Sequence[Any]] = {
        kind: groups[kind] for kind in groups if kind in CONTAINERS
    }
    nodes = {
        kind: _leaves(kind, group, depth, leaf)
        for kind, group in groups.items()
        if kind not in containers
    }
    if containers:
        is_bounded = depth <= deepest and growth.is_bounded(containers)
        if not is_bounded or not _are_named(containers):
            raise _NOT_PLAIN
        items = contents(containers)
        inner_nodes = _nodes(items, depth + 1, deepest, leaf, growth)
        rest = iter(inner_nodes)
        for kind, members in containers.items():
            nodes[kind] = _container_nodes(kind, members, None if inner_nodes is items else rest)
    if all(nodes[kind] is group for kind, group in groups.items()):
        return values
    if len(groups) == 1:
        return next(iter(nodes.values()))
    turns = {kind: iter(group) for kind, group in nodes.items()}
    return [next(turns[type(value)]) for value in values]


def _are_named(containers: Mapping[type, Sequence[Any]]) -> bool:
    """Return True if all keys of all dicts are ASCII strings that do not begin with "$"."""
    keys = set(chain.from_iterable(containers.get(dict, ())))
    return set(map(type, keys)) <= {str} and all(key.isascii() and key[:1] != "$" for key in keys)


def _container_nodes(
    kind: type, members: Sequence[Any], items: Iterator[Any] | None
) -> Sequence[Any]:
    """Return the nodes of containers of one kind. ``items`` has the nodes of all values inside of
    them; None if these are their own nodes.
    """
    if kind is dict:
        # ``zip`` asks the keys first, so that it takes no item more than the dict has.
        return members if items is None else [dict(zip(container, items)) for container in members]  # noqa: B905
    if kind is list:
        return (
            members
            if items is None
            else [list(islice(items, len(container))) for container in members]
        )
    if items is None:
        return [{"$": "tuple", "v": list(container)} for container in members]
    return [{"$": "tuple", "v": list(islice(items, len(container)))} for container in members]


def _leaves(kind: type, values: Sequence[Any], depth: int, leaf: Leaf) -> Sequence[Any]:
    if kind is bool or kind is type(None):
        return values
    if kind is float:
        is_own = all(map(math.isfinite, values))
    elif kind is int:
        is_own = min(values) >= -(2**63) and max(values) < 2**63
    else:
        is_own = kind is str and all(map(str.isascii, values))
    return values if is_own else [leaf(value, depth) for value in values]
