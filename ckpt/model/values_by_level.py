"""Encode and decode plain values level by level.

`ckpt.model.values` makes a call for each container. For a state with hundreds of thousands of small
containers, such as a history of tuples, the functions here take all values of one depth together.
They run at the speed of C.

A *node* is the JSON of a value. None, bool, str, finite floats and 64-bit ints are their own nodes,
and so are lists, and dicts whose keys are names, if the values inside of them are. An encoding
makes no new object for them. Any other value has a node with a *tag*, ``{"$": tag, "v": content}``.
The content of a mapping whose keys are not names is a list of *pairs* of a key and a value. A
*container* is a list, tuple or mapping, and a *leaf* is any other value. The items of a walk are
grouped by type, so each function takes the *members* of one type. The *name* of a value is its path
in the state. The *form* of a node is the type of the value that it stands for. ``encode_leaf`` is a
function that returns the node of a leaf.
"""

from __future__ import annotations

import gc
import math
from collections import Counter, OrderedDict
from collections.abc import Callable, Collection, Generator, Iterable, Iterator, Mapping, Sequence
from collections.abc import Set as AbstractSet
from contextlib import contextmanager
from itertools import chain, compress, islice, repeat
from operator import is_, itemgetter, not_
from typing import Any, Final

import msgspec

from ckpt.errors import UnsupportedValue

Leaf = Callable[[Any, int], Any]
"""Returns the node of a value that is no list, tuple or dict, and that has so many containers
around it. It raises ``UnsupportedValue`` if the value is not plain.
"""

DecodeTagged = Callable[[Any], Any]
"""Returns the value of a node with a tag that this module does not have."""

MAPPINGS: Final[dict[str, type]] = {"dict": dict, "OrderedDict": OrderedDict, "Counter": Counter}
"""The types of mappings by the tags of their nodes, which have a list of pairs. A dict whose keys
are names needs no tag.
"""
_TAG_BY_TYPE: Final = {kind: tag for tag, kind in MAPPINGS.items()}
CONTAINERS: Final[frozenset[type]] = frozenset({dict, list, tuple, OrderedDict, Counter})
_FORM_BY_TAG: Final[dict[str | None, type]] = {
    None: dict,
    "tuple": tuple,
    **dict.fromkeys(MAPPINGS, Mapping),
}
_OWN_NODES: Final = frozenset({bool, float, int, str, type(None)})
"""The types whose values are their own nodes, but for a few: NaN, very large numbers, and text that
UTF-8 cannot encode.
"""
_NODE_TYPES: Final = frozenset({dict, list})  # The types of nodes that contain nodes
MOST_COLLISIONS: Final = 16
"""The most members of a set, or keys of a dict, that may have the same hash.

Building a set or dict takes quadratic time in the number of members with the same hash.
"""
_LARGE: Final = 1 << 10
"""The most values of a level that is never looked at for shared containers."""
_MOST_REPEATS: Final = 128
"""How many times more values a large level may have than all distinct containers together. A
default that 100,000 entries share has a few times more.
"""
_MANY: Final = 1 << 18
"""The most values of a level on which containers may be shared in any way. A walk over so many
values takes a fraction of a second.
"""
_NOT_PLAIN: Final = UnsupportedValue("", "value that is not plain")
"""The error of ``node_of``. Its caller walks over the value again, for an error with the name."""
MODULE_VERSIONS: Final = "m"
"""The key of the versions of modules, which torch gives to an ``OrderedDict``, in its node."""
INDEX_CHARS: Final = 8
"""The most characters that the index of a list adds to a name, or a number as the key of a dict."""


class TupleNode(msgspec.Struct, tag_field="$", tag="tuple", gc=False):
    """The node of a tuple in a value that becomes JSON at once. It has the same JSON as the dict
    that is the node otherwise, and a dict takes six times the memory and time.
    """

    v: Any


class WalkSize:
    """Counts the values of a walk over nested containers, and finds containers that occur twice, on
    the few levels where it matters. If each list holds the next one twice, each level has twice as
    many values as the one before.

    Attributes:
        value_count: The number of values in the nodes of the levels, or more.
        name_chars: The most characters that the names of the containers around these values have
            together; infinite if this is not known.
        is_compact: Whether the node of a tuple is a `TupleNode`.
    """

    def __init__(self, *, is_compact: bool = False) -> None:
        self.is_compact = is_compact
        self._limit = _LARGE
        self._total = 0  # The values inside of all distinct containers, or more
        self.value_count = 0
        self.name_chars = 0.0
        self._prefix_chars = 0  # The most characters of a name on the present level

    def distinct(self, containers: Mapping[type, Sequence[Any]]) -> Mapping[type, Sequence[Any]]:
        """Return ``containers``, each of them once if they have many values inside."""
        size = size_of(containers)
        if size <= self._limit:
            self._total += size
            return containers
        if all(len(set(map(id, members))) == len(members) for members in containers.values()):
            self._limit = 2 * size
            self._total += size
            return containers
        singles: Mapping[type, Sequence[Any]] = {
            kind: list(dict(zip(map(id, members), members, strict=True)).values())
            for kind, members in containers.items()
        }
        self._total += size_of(singles)
        return singles

    def is_bounded(self, containers: Mapping[type, Sequence[Any]]) -> bool:
        """Return False if the values inside of ``containers`` are so many that some containers hold
        others again and again.
        """
        self.distinct(containers)
        return size_of(containers) <= max(_MANY, _MOST_REPEATS * self._total)

    def count(self, number: int, keys: Iterable[str]) -> None:
        """Count the values of one level, with the keys of its dicts. The node of a tuple takes two
        levels.
        """
        self.value_count += number
        self.name_chars += (self._prefix_chars + 2) * number
        self._prefix_chars += 2 + max(INDEX_CHARS, 1 + max(map(len, keys), default=0))


def size_of(containers: Mapping[type, Sequence[Any]]) -> int:
    """Return the number of values inside of all containers."""
    return sum(sum(map(len, members)) for members in containers.values())


def contents(containers: Mapping[type, Sequence[Any]]) -> list[Any]:
    """Return the values inside of all containers, in their order. ``containers`` has the lists,
    tuples and mappings by their types.
    """
    values: list[Any] = []
    for kind, members in containers.items():
        nonempty = filter(None, members)
        values += chain.from_iterable(
            map(kind.values, nonempty) if issubclass(kind, dict) else nonempty
        )
    return values


def has_hash_collisions(items: Collection[Any]) -> bool:
    """Return True if too many of the members of a set, or of the keys of a dict, have the same
    hash.
    """
    return (
        len(items) > MOST_COLLISIONS and max(Counter(map(hash, items)).values()) > MOST_COLLISIONS
    )


def is_text(value: str) -> bool:
    """Return True if UTF-8 can encode ``value``, which means that it has no lone surrogate."""
    if value.isascii():
        return True
    try:
        value.encode()
    except UnicodeEncodeError:
        return False
    return True


def by_type(values: Sequence[Any], kinds: AbstractSet[type]) -> dict[type, Sequence[Any]]:
    """Return the values of each of ``kinds`` among ``values``, in their order."""
    return _group_by_type(values, set(map(type, values)), kinds)


def _group_by_type(
    values: Sequence[Any], types: AbstractSet[type], kinds: AbstractSet[type]
) -> dict[type, Sequence[Any]]:
    """Return what ``by_type`` returns. ``types`` are the types of all values."""
    if len(types) == 1:
        return dict.fromkeys(types & kinds, values)
    return {kind: [value for value in values if type(value) is kind] for kind in types & kinds}


def is_plain(value: Any, leaves: AbstractSet[type], deepest: int) -> bool:
    """Return True if ``value`` is of one of the types ``leaves``, or if all values in its lists,
    tuples and mappings are. These may be nested ``deepest`` times.
    """
    if type(value) not in CONTAINERS:
        return type(value) in leaves
    level: Sequence[Any] = (value,)
    plain, walk_size = CONTAINERS | leaves, WalkSize()
    for _ in range(deepest):
        types = set(map(type, level))
        if not types <= plain:
            return False
        containers = _group_by_type(level, types, CONTAINERS)
        if not containers:
            return True
        level = contents(walk_size.distinct(containers))
    return False


def is_bounded(value: Any, deepest: int) -> bool:
    """Return False if containers inside of ``value`` hold others so often, or themselves, that a
    walk over all values would take exponential time. ``deepest`` is the depth where a walk ends.
    """
    if type(value) not in CONTAINERS:
        return True
    level: Sequence[Any] = (value,)
    walk_size = WalkSize()
    for _ in range(deepest):
        containers = by_type(level, CONTAINERS)
        if not containers:
            return True
        if not walk_size.is_bounded(containers):
            return False
        level = contents(containers)
    return True


@contextmanager
def without_collector() -> Generator[None]:
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


def node_of(
    value: Any, depth: int, deepest: int, encode_leaf: Leaf, walk_size: WalkSize | None = None
) -> Any:
    """Return the node of ``value``. It is ``value`` itself if this is its own node.

    Args:
        value: A value with ``depth`` containers around it.
        depth: The number of these containers.
        deepest: The largest such number that a container may have.
        encode_leaf: See ``Leaf``.
        walk_size: Counts the values inside.

    Raises:
        UnsupportedValue: A value inside is not plain, too many keys of a dict have the same hash,
            or containers are nested too deeply or not bounded (``is_bounded``). The error has no
            name.
    """
    with without_collector():
        return _nodes([value], depth, deepest, encode_leaf, walk_size or WalkSize())[0]


def _nodes(
    values: Sequence[Any], depth: int, deepest: int, encode_leaf: Leaf, walk_size: WalkSize
) -> Sequence[Any]:
    """Return the node of each value. The result is ``values`` itself if all are their own nodes."""
    types = set(map(type, values))
    groups = _group_by_type(values, types, types)
    containers: dict[type, Sequence[Any]] = {
        kind: group for kind, group in groups.items() if kind in CONTAINERS
    }
    nodes: dict[type, Sequence[Any]] = {
        kind: _leaf_nodes(kind, group, depth, encode_leaf)
        for kind, group in groups.items()
        if kind not in containers
    }
    if any(nodes[kind] is not groups[kind] for kind in nodes):
        walk_size.name_chars = math.inf  # Some nodes are dicts with a tag
    if containers:
        # torch gives an ``OrderedDict`` an attribute, which takes a tag of its own.
        if depth > deepest or any(map(vars, containers.get(OrderedDict, ()))):
            raise _NOT_PLAIN
        nodes |= _container_nodes(containers, depth, deepest, encode_leaf, walk_size)
    if all(nodes[kind] is group for kind, group in groups.items()):
        return values
    if len(groups) == 1:
        return next(iter(nodes.values()))
    # Put the nodes into the order of ``values`` again.
    node_iterators = {kind: iter(group) for kind, group in nodes.items()}
    return list(map(next, map(node_iterators.__getitem__, map(type, values))))


def _container_nodes(
    containers: Mapping[type, Sequence[Any]],
    depth: int,
    deepest: int,
    encode_leaf: Leaf,
    walk_size: WalkSize,
) -> dict[type, Sequence[Any]]:
    """Return the nodes of containers, by their types. A dict with keys other than plain text is
    stored as a list of pairs.

    Args:
        containers: The containers by their types, with ``depth`` containers around each.
        depth: The number of containers around them.
        deepest: The largest such number that a container may have.
        encode_leaf: See ``Leaf``.
        walk_size: Counts the values inside, and finds containers that hold others again and again.
            If some mapping is stored as pairs, the length of its names is not known any more.
    """
    nonempty = {kind: list(filter(None, members)) for kind, members in containers.items()}
    if not walk_size.is_bounded(nonempty):
        raise _NOT_PLAIN
    items = contents(nonempty)
    # A dict of thousands of tensors is no plain value, whatever its keys are.
    for kind in set(map(type, items)) - CONTAINERS - _OWN_NODES:
        # Raises if such a value is not plain
        encode_leaf(next(item for item in items if type(item) is kind), depth + 1)
    names = set(chain.from_iterable(nonempty.get(dict, ())))
    pair_flags = {
        kind: _pair_flags(kind, members, names)
        for kind, members in containers.items()
        if issubclass(kind, dict)
    }
    paired_mappings = [list(compress(containers[kind], pair_flags[kind])) for kind in pair_flags]
    item_count = len(items)
    if any(paired_mappings):
        walk_size.name_chars = math.inf
        items += chain.from_iterable(chain.from_iterable(paired_mappings))  # Their keys
    else:
        walk_size.count(item_count + 2 * len(containers.get(tuple, ())), names)
    nodes = _nodes(items, depth + 1, deepest, encode_leaf, walk_size)
    item_nodes, key_nodes = iter(nodes), islice(nodes, item_count, None)
    items_are_nodes = nodes is items and not any(paired_mappings)
    return {
        kind: _mapping_nodes(_TAG_BY_TYPE[kind], members, pair_flags[kind], item_nodes, key_nodes)
        if any(pair_flags.get(kind, ()))
        else _plain_container_nodes(
            kind,
            members,
            item_nodes,
            items_are_nodes=items_are_nodes,
            is_compact=walk_size.is_compact,
        )
        for kind, members in containers.items()
    }


def _pair_flags(kind: type, members: Sequence[Any], keys: AbstractSet[Any]) -> Sequence[bool]:
    """Return for each mapping whether its node has a list of pairs, and nothing if none has. A
    dict has none if all of its keys are text that does not begin with "$". ``keys`` are those of
    all dicts.
    """
    flags: Sequence[bool] = [True] * len(members)
    if kind is dict:
        # Keys of different types may be equal, so that only one of them is in the set.
        types = set(map(type, chain.from_iterable(filter(None, members))))
        if any(issubclass(key_type, str) for key_type in types - {str}):
            raise _NOT_PLAIN
        names = keys if types <= {str} else {key for key in keys if type(key) is str}
        if not (all(map(str.isascii, names)) or all(map(is_text, names))):
            raise _NOT_PLAIN
        keys_in_pairs = {*(keys - names), *compress(names, map(str.startswith, names, repeat("$")))}
        if not keys_in_pairs:
            return ()
        flags = list(map(not_, map(keys_in_pairs.isdisjoint, members)))
    if any(has_hash_collisions(member) for member in compress(members, flags) if len(member) > 1):
        raise _NOT_PLAIN
    return flags


def _mapping_nodes(
    tag: str,
    members: Sequence[Any],
    flags: Sequence[bool],
    items: Iterator[Any],
    keys: Iterator[Any],
) -> Sequence[Any]:
    """Return the nodes of mappings. A mapping whose flag is True becomes a list of pairs. ``items``
    has the nodes of the values of all mappings, and ``keys`` those of the keys in pairs.
    """
    # ``zip`` asks its first argument first, so that it takes no item more than the mapping has.
    return [
        {"$": tag, "v": list(map(list, zip(islice(keys, len(member)), islice(items, len(member)))))}  # noqa: B905
        if flag
        else dict(zip(member, items))  # noqa: B905
        for member, flag in zip(members, flags, strict=True)
    ]


def _plain_container_nodes(
    kind: type,
    members: Sequence[Any],
    items: Iterator[Any],
    *,
    items_are_nodes: bool,
    is_compact: bool,
) -> Sequence[Any]:
    """Return the nodes of lists, tuples or dicts without pairs. ``items`` has the nodes of all
    values inside of them. It is not used if ``items_are_nodes``: the values are then their own
    nodes.
    """
    if kind is tuple and items_are_nodes:
        if is_compact:
            return list(map(TupleNode, members))
        return [{"$": "tuple", "v": list(member)} for member in members]
    if items_are_nodes:
        return members
    if kind is dict:
        # ``zip`` asks the keys first, so that it takes no item more than the dict has.
        return list(map(dict, map(zip, members, repeat(items))))
    if kind is tuple and is_compact:
        return list(map(TupleNode, _parts_of_tuples(members, items)))
    parts = map(list, map(islice, repeat(items), map(len, members)))
    return list(parts) if kind is list else [{"$": "tuple", "v": part} for part in parts]


def _parts_of_tuples(members: Sequence[tuple[Any, ...]], items: Iterator[Any]) -> Iterable[Any]:
    """Yield the nodes of the values inside of each of ``members`` as a list or tuple."""
    lengths = set(map(len, members))
    if len(lengths) == 1 and 0 < (length := lengths.pop()) <= _LARGE:
        # ``islice`` ends before ``zip`` takes an item of another container.
        return islice(zip(*repeat(items, length), strict=False), len(members))
    return map(list, map(islice, repeat(items), map(len, members)))


def _leaf_nodes(kind: type, values: Sequence[Any], depth: int, encode_leaf: Leaf) -> Sequence[Any]:
    """Return the nodes of values of one type, which is no container. The result is ``values``
    itself if all are their own nodes.
    """
    if kind is bool or kind is type(None):
        return values
    if kind is float:
        if all(map(math.isfinite, values)):
            return values
        return [value if math.isfinite(value) else encode_leaf(value, depth) for value in values]
    if kind is int:
        are_own_nodes = min(values) >= -(2**63) and max(values) < 2**63
    else:
        are_own_nodes = kind is str and (all(map(str.isascii, values)) or is_text("".join(values)))
    return values if are_own_nodes else [encode_leaf(value, depth) for value in values]


def value_of(node: Any, decode_tagged: DecodeTagged) -> Any:
    """Return the value of ``node``, with new lists and dicts. ``decode_tagged`` returns the value
    of a node with a tag that this module does not have.
    """
    with without_collector():
        return _values([node], decode_tagged)[0]


def _values(nodes: Sequence[Any], decode_tagged: DecodeTagged) -> Sequence[Any]:
    """Return the value of each node. The result is ``nodes`` itself if there is no container.
    ``decode_tagged`` returns the value of a node with a tag that this module does not have.
    """
    groups = by_type(nodes, _NODE_TYPES)
    if not groups:
        return nodes
    lists, all_dicts = groups.get(list, ()), groups.get(dict, ())
    forms = _forms(all_dicts)
    dicts = all_dicts if forms is None else _of_form(dict, all_dicts, forms)
    tuples, mappings, leaf_nodes = (
        _of_form(form, all_dicts, forms or ()) for form in (tuple, Mapping, object)
    )
    tuples = list(map(itemgetter("v"), tuples))
    pairs = list(chain.from_iterable(map(itemgetter("v"), mappings)))
    items = contents({list: lists, tuple: tuples, dict: dicts})
    item_count = len(items)
    items += [item for _, item in pairs]
    items += [key for key, _ in pairs]
    values = _values(items, decode_tagged)
    items_are_values = values is items
    # If all items are their own values, ``_containers`` copies the members and takes no item.
    item_values = islice(values, item_count if items_are_values else 0, None)
    results: dict[type, Sequence[Any]] = {
        list: _containers(list, lists, item_values, items_are_values=items_are_values),
        tuple: _containers(tuple, tuples, item_values, items_are_values=items_are_values),
        dict: _containers(dict, dicts, item_values, items_are_values=items_are_values),
        Mapping: _mappings(mappings, item_values, islice(values, item_count + len(pairs), None)),
    }
    for members in results.values():
        if len(members) == len(nodes):
            return members
    # The nodes are of several forms. Put their values into the order of ``nodes`` again.
    value_iterators: dict[type, Iterator[Any]] = {
        form: iter(group) for form, group in results.items()
    }
    value_iterators[object] = map(decode_tagged, leaf_nodes)
    form_iterator = iter(forms) if forms else repeat(dict)
    return [
        next(value_iterators[next(form_iterator) if kind is dict else list])
        if kind in _NODE_TYPES
        else node
        for node, kind in zip(nodes, map(type, nodes), strict=True)
    ]


def _containers(
    kind: type, members: Sequence[Any], items: Iterator[Any], *, items_are_values: bool
) -> Sequence[Any]:
    """Return containers of this kind with the lengths, or keys, of ``members``. ``items`` has the
    values inside of all of them. It is not used if ``items_are_values``: the items of ``members``
    are then these values.
    """
    if items_are_values:
        return list(map(kind, members))
    if kind is dict:
        # ``zip`` asks the keys first, so that it takes no item more than the dict has.
        return list(map(dict, map(zip, members, repeat(items))))
    return list(map(kind, map(islice, repeat(items), map(len, members))))


def _mappings(
    nodes: Sequence[Any], items: Iterator[Any], keys: Iterator[Any]
) -> Sequence[Mapping[Any, Any]]:
    """Return the mappings of nodes with pairs. ``items`` and ``keys`` have their values and keys.

    Raises:
        ValueError: Too many keys of one mapping have the same hash.
    """
    results: list[Mapping[Any, Any]] = []
    for node in nodes:
        number = len(node["v"])
        parts = list(islice(keys, number))
        if number > 1 and has_hash_collisions(parts):
            raise ValueError("too many members of one hash")
        mapping = dict(zip(parts, islice(items, number), strict=True))
        results.append(mapping if node["$"] == "dict" else MAPPINGS[node["$"]](mapping))
    return results


def _forms(dicts: Sequence[Any]) -> Sequence[type] | None:
    """Return for each node that is a dict what it stands for: a ``dict``, a ``tuple``, a
    ``Mapping`` with pairs, or any other ``object``. Return None if all of them are dicts.
    """
    keys = set(chain.from_iterable(dicts))
    if "$" not in keys:
        return None
    forms = list(map(_FORM_BY_TAG.get, map(dict.get, dicts, repeat("$")), repeat(object)))
    if MODULE_VERSIONS not in keys:
        return forms
    return [
        object if form is Mapping and MODULE_VERSIONS in node else form
        for form, node in zip(forms, dicts, strict=True)
    ]


def _of_form(form: type, dicts: Sequence[Any], forms: Sequence[type]) -> Sequence[Any]:
    """Return those of ``dicts`` that stand for ``form``; none if ``forms`` is empty."""
    return list(compress(dicts, map(is_, forms, repeat(form))))
