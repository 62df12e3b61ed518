"""Encode and decode plain values level by level.

`ckpt.model.values` makes a call for each container. For a state with hundreds of thousands of small
containers, such as a history of tuples, the functions here take all values of one depth together.
They run at the speed of C. An encoding makes no new object for a list or a dict that is its own
node.
"""

from __future__ import annotations

import gc
import math
from collections import OrderedDict
from collections.abc import Callable, Generator, Iterator, Mapping, Sequence
from collections.abc import Set as AbstractSet
from contextlib import contextmanager
from itertools import chain, compress, islice, repeat
from operator import eq, is_
from typing import Any, Final

from ckpt.errors import UnsupportedValue

Leaf = Callable[[Any, int], Any]
"""Returns the node of a value that is no list, tuple or dict, and that has so many containers
around it. It raises ``UnsupportedValue`` if the value is not plain.
"""

Tagged = Callable[[Any], Any]
"""Returns the value of a node with a tag that is no tuple."""

CONTAINERS: Final = frozenset({dict, list, tuple})
_ALL_CONTAINERS: Final = CONTAINERS | {OrderedDict}
_LARGE: Final = 1 << 10
"""The most values of a level that is never looked at for shared containers."""
_MOST_TIMES: Final = 128
"""How many times more values a large level may have than all distinct containers together. A
default that 100,000 entries share has a few times more.
"""
_MANY: Final = 1 << 18
"""The most values of a level on which containers may be shared in any way. A walk over so many
values takes a fraction of a second.
"""
_NOT_PLAIN: Final = UnsupportedValue("", "value that is not plain")


class Growth:
    """Finds containers that occur twice, on the few levels of a walk where it matters. A list that
    holds another one twice, and so on, has twice as many values on each level.
    """

    def __init__(self) -> None:
        self._limit = _LARGE
        self._total = 0  # The values inside of all distinct containers, or more

    def distinct(self, containers: Mapping[type, Sequence[Any]]) -> Mapping[type, Sequence[Any]]:
        """Return ``containers``, each of them once if they have many values inside."""
        size = size_of(containers)
        if size <= self._limit:
            self._total += size
            return containers
        singles: Mapping[type, Sequence[Any]] = {
            kind: list(dict(zip(map(id, members), members, strict=True)).values())
            for kind, members in containers.items()
        }
        number = size_of(singles)
        if number == size:
            self._limit = 2 * size
        self._total += number
        return singles

    def is_bounded(self, containers: Mapping[type, Sequence[Any]]) -> bool:
        """Return False if the values inside of ``containers`` are so many that some containers hold
        others again and again.
        """
        self.distinct(containers)
        return size_of(containers) <= max(_MANY, _MOST_TIMES * self._total)


def size_of(containers: Mapping[type, Sequence[Any]]) -> int:
    """Return the number of values inside of all containers."""
    return sum(sum(map(len, members)) for members in containers.values())


def contents(containers: Mapping[type, Sequence[Any]]) -> list[Any]:
    """Return the values inside of all containers, in their order. ``containers`` has the lists,
    tuples and dicts by their types.
    """
    values: list[Any] = []
    for kind, members in containers.items():
        parts = map(dict.values, members) if issubclass(kind, dict) else members
        values += chain.from_iterable(parts)
    return values


def by_type(values: Sequence[Any], kinds: AbstractSet[type]) -> dict[type, Sequence[Any]]:
    """Return the values of each of ``kinds`` among ``values``, in their order."""
    return _groups(values, set(map(type, values)), kinds)


def _groups(
    values: Sequence[Any], types: AbstractSet[type], kinds: AbstractSet[type]
) -> dict[type, Sequence[Any]]:
    """Return what ``by_type`` returns. ``types`` are the types of all values."""
    if len(types) == 1:
        return dict.fromkeys(types & kinds, values)
    return {kind: [value for value in values if type(value) is kind] for kind in types & kinds}


def is_plain(value: Any, leaves: AbstractSet[type], deepest: int) -> bool:
    """Return True if ``value`` is of one of the types ``leaves``, or if all values in its lists,
    tuples and dicts are. These may be nested ``deepest`` times.
    """
    level: Sequence[Any] = (value,)
    plain, growth = CONTAINERS | leaves, Growth()
    for _ in range(deepest):
        types = set(map(type, level))
        if not types <= plain:
            return False
        containers = _groups(level, types, CONTAINERS)
        if not containers:
            return True
        level = contents(growth.distinct(containers))
    return False


def is_bounded(value: Any, deepest: int) -> bool:
    """Return False if containers inside of ``value`` hold others so often, or themselves, that a
    walk over all values would take exponential time. ``deepest`` is the depth where a walk ends.
    """
    level: Sequence[Any] = (value,)
    growth = Growth()
    for _ in range(deepest):
        containers = by_type(level, _ALL_CONTAINERS)
        if not containers:
            return True
        if not growth.is_bounded(containers):
            return False
        level = contents(containers)
    return True


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
        UnsupportedValue: A value inside is not plain, a dict has other keys than names, or
            containers are nested too deeply or not bounded (``is_bounded``). The error has no name.
    """
    with _without_collector():
        return _nodes([value], depth, deepest, leaf, Growth())[0]


def _nodes(
    values: Sequence[Any], depth: int, deepest: int, leaf: Leaf, growth: Growth
) -> Sequence[Any]:
    """Return the node of each value. The result is ``values`` itself if all are their own nodes."""
    types = set(map(type, values))
    groups: Mapping[type, Sequence[Any]] = _groups(values, types, types)
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


def value_of(node: Any, tagged: Tagged) -> Any:
    """Return the value of ``node``, with new lists and dicts."""
    with _without_collector():
        return _values([node], tagged)[0]


def _values(nodes: Sequence[Any], tagged: Tagged) -> Sequence[Any]:
    """Return the value of each node. The result is ``nodes`` itself if there is no container."""
    groups = by_type(nodes, CONTAINERS)
    if not groups:
        return nodes
    lists, dicts = groups.get(list, ()), groups.get(dict, ())
    dicts_alone, tuples, tagged_nodes = _by_tag(dicts)
    parts = chain(lists, tuples, map(dict.values, dicts_alone))
    items = iter(_values(list(chain.from_iterable(parts)), tagged))
    new_lists = [list(islice(items, len(node))) for node in lists]
    new_tuples = [tuple(islice(items, len(node))) for node in tuples]
    # ``zip`` asks the keys first, so that it takes no item more than the dict has.
    new_dicts = [dict(zip(node, items)) for node in dicts_alone]  # noqa: B905
    for values in (new_lists, new_tuples, new_dicts):
        if len(values) == len(nodes):
            return values
    turns = {None: iter(new_dicts), "tuple": iter(new_tuples)}
    list_turn, tagged_turn = iter(new_lists), map(tagged, tagged_nodes)
    return [
        next(list_turn)
        if type(node) is list
        else next(turns.get(node.get("$"), tagged_turn))
        if type(node) is dict
        else node
        for node in nodes
    ]


def _by_tag(dicts: Sequence[Any]) -> tuple[Sequence[Any], Sequence[Any], Sequence[Any]]:
    """Return the dicts without a tag, the items of the tuples, and the nodes with other tags."""
    if "$" not in set(chain.from_iterable(dicts)):
        return dicts, (), ()
    tags = list(map(dict.get, dicts, repeat("$")))
    plain = list(compress(dicts, map(is_, tags, repeat(None))))
    tuples = [node["v"] for node in compress(dicts, map(eq, tags, repeat("tuple")))]
    tagged = [node for node, tag in zip(dicts, tags, strict=True) if tag not in (None, "tuple")]
    return plain, tuples, tagged
