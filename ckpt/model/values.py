"""Convert plain values to JSON nodes and back, without loss and without pickle.

A *node* is a value that JSON can represent. A *tree* is the node of a whole state. None, bool, str,
finite floats, 64-bit ints, lists, and dicts whose keys are strings that do not begin with '$' are
nodes themselves. Any other value becomes a *tagged* node ``{"$": tag, "v": content, ...}``. This
module has the tags tuple, set, frozenset, bytes, bytearray, complex, float (nan, inf), int (large),
dict (other keys), OrderedDict, Counter and numpy (scalars). ``ckpt.state`` handles the tags tensor,
module, optimizer, object, dtype, device, Size and per_rank in the hooks that it passes to
``encode`` and ``decode``.

The *path* of a value in the state is its *name*, and a *part* is what a container adds to it for
one item. The node of a mapping whose keys are no names is a list of *pairs* of a key and a value.
"""

from __future__ import annotations

import base64
import math
import re
import struct
from bisect import bisect_left
from collections import OrderedDict
from collections.abc import Callable, Collection, Generator, Iterable, Mapping, Sequence
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from itertools import chain, compress, repeat
from typing import Any, Final

import msgspec
import numpy as np

from ckpt.errors import ManifestCorrupt, UnsupportedValue
from ckpt.model.values_by_level import (
    CONTAINERS,
    INDEX_CHARS,
    MAPPINGS,
    MODULE_VERSIONS,
    MOST_COLLISIONS,
    WalkSize,
    by_type,
    contents,
    has_hash_collisions,
    is_bounded,
    is_text,
    node_of,
    size_of,
    value_of,
    without_collector,
)

# Python has no static type for all values that msgspec's JSON encoder accepts.
Node = Any
OtherEncoder = Callable[[object, str], Node]
OtherDecoder = Callable[[str, Mapping[str, Node]], object]

_MAX_DEPTH: Final = 100
_MAX_JSON_DEPTH: Final = 320
"""The largest depth of nested JSON objects and arrays in a tree. One container of the state takes
up to three levels.
"""
_NAME_CHARS_PER_BYTE: Final = 256
"""The most characters that the names of all values in a tree may have together, for each byte of
the tree. A name contains the keys of all containers around the value, so a long key could make a
small tree need much memory.
"""
_PLAIN, _PAIRS, _PAIR = range(3)
"""The roles of a JSON array: any array, the array of the pairs of a tagged dict, and a pair."""
_INT_KEY: Final = re.compile(r"~2-?[0-9]{1,19}")
_NAN: Final = "nan:"
"""The prefix of a NaN whose bits are not those of ``math.nan``. The bits follow in hexadecimal."""
_SCALAR_DTYPE: Final = re.compile(r"[<>|][biufc][0-9]{1,2}")
_BYTES_TAGS: Final[dict[type, str]] = {bytes: "bytes", bytearray: "bytearray"}
_MAPPING_TAGS: Final[dict[type, str]] = {kind: tag for tag, kind in MAPPINGS.items()}
_PAIR_TAGS: Final = tuple(MAPPINGS)

_DAMAGE_ERRORS: Final = (
    LookupError,
    TypeError,
    ValueError,
    AttributeError,
    ArithmeticError,
    RuntimeError,
)
"""The errors of code that follows a tree which is none that ckpt writes."""

VERSIONS: Final = "_metadata"
"""The attribute of a ``Module.state_dict()`` in which torch keeps the versions of the modules."""
_NESTED_KEYS: Final = frozenset({tuple, frozenset})
_NODE_TYPES: Final = frozenset({dict, list})  # The types of nodes that contain nodes

NO_ENTRIES: Final[Mapping[str, float]] = {}

_LARGE_JSON: Final = 1 << 14
"""The bytes of JSON from which ``plain_node`` returns JSON."""
LARGE: Final = 32
"""``encode`` passes a dict of at least this many entries to its hook as a whole."""


def join(path: str, part: object) -> str:
    """Return the path of the item ``part`` of the container at ``path``.

    '/' separates the parts of a path. '~' and '/' in a part are escaped as in JSON pointers ('~0'
    and '~1'). A key that is not a string is written as '~2' and its ``exact_text``.
    """
    if type(part) is str:
        text = part.replace("~", "~0").replace("/", "~1")
    else:
        text = f"~2{exact_text(part)}"
    return f"{path}/{text}" if path else text


def unescape(part: str) -> str | int:
    """Return the key from which ``join`` has made the path part ``part``, if the key was a string
    or a 64-bit int.

    For any other key, ``part`` is returned unchanged. It then begins with '~2'.
    """
    if part.startswith("~2"):
        return int(part[2:]) if _INT_KEY.fullmatch(part) else part
    return part.replace("~1", "/").replace("~0", "~")


def check_name(key: str, path: str) -> None:
    """Raise ``UnsupportedValue`` if UTF-8 cannot encode ``key``, the last part of ``path``."""
    if not is_text(key):
        raise UnsupportedValue(path, "name that is not text", "rename it")


def names_below(names: Sequence[str], path: str) -> Sequence[str]:
    """Return the names that begin with ``path`` and a slash. ``names`` must be sorted."""
    return names[bisect_left(names, f"{path}/") : bisect_left(names, f"{path}0")]  # '0' follows '/'


def exact_text(value: object) -> str:
    """Return the ``repr`` of a plain value, except that ints of thousands of digits are in
    hexadecimal and the members of frozensets are sorted.

    Python refuses to print such ints in decimal, and equal frozensets may iterate in different
    orders.
    """
    if type(value) is frozenset and value:
        return f"frozenset({{{', '.join(sorted(map(exact_text, value)))}}})"
    if type(value) is tuple and any(type(item) in _NESTED_KEYS for item in value):
        return f"({', '.join(map(exact_text, value))}{',' if len(value) == 1 else ''})"
    try:
        return repr(value)
    except ValueError:
        pass
    if isinstance(value, int):
        return hex(value)
    if isinstance(value, Mapping):
        items = (f"{exact_text(key)}: {exact_text(item)}" for key, item in value.items())
        return f"{type(value).__name__}({{{', '.join(items)}}})"
    if isinstance(value, list | tuple | set | frozenset):
        return f"{type(value).__name__}({', '.join(map(exact_text, value))})"
    return object.__repr__(value)


def parse(raw: msgspec.Raw, name: str = "tree") -> Node:
    """Decode the JSON of a tree and return its node; None if ``raw`` is empty.

    Args:
        raw: The JSON.
        name: The name of the tree in errors.

    Raises:
        ManifestCorrupt: The tree is not JSON, is nested too deeply, or its names would need too
            much memory.
    """
    if not bytes(raw):
        return None
    try:
        with without_collector():
            node = msgspec.json.decode(raw)
    except (msgspec.MsgspecError, UnicodeError, RecursionError) as error:
        raise ManifestCorrupt(name, str(error)[:200]) from None
    if fault := _excess(node, len(bytes(raw))):
        raise ManifestCorrupt(name, fault)
    return node


@contextmanager
def check_structure(name: str) -> Generator[None]:
    """Return a context manager that replaces errors such as ``KeyError`` with ``ManifestCorrupt``.

    The block can read a tree from a checkpoint without checking its structure first. A damaged or
    forged tree may contain any JSON, and then causes such an error.

    Args:
        name: The name of the tree in the error.
    """
    try:
        yield
    except _DAMAGE_ERRORS as error:
        raise ManifestCorrupt(name, f"it is none that ckpt writes ({str(error)[:200]!r})") from None


def _excess(tree: Node, nbytes: int, name_chars: Mapping[str, float] = NO_ENTRIES) -> str:
    """Return a text that names the limit which a tree exceeds; empty if it exceeds none.

    The limits are on the depth, and on the characters of all names for a JSON of ``nbytes`` bytes.
    The time grows linearly with the size of the tree. See ``dumps`` for ``name_chars``.
    """
    budget = _budget(nbytes)
    remainder = (
        {key: item for key, item in tree.items() if key not in name_chars} if name_chars else tree
    )
    if type(remainder) is dict and msgspec.Raw in map(type, remainder.values()):
        remainder = _with_decoded_nodes(remainder)
    if sum(name_chars.values()) + most_name_chars(remainder) <= budget:
        return ""
    if type(tree) is dict:
        tree = _with_decoded_nodes(tree)
    # These are three parallel lists, since a tuple for each container would start the garbage
    # collector.
    nodes = [tree] if type(tree) in _NODE_TYPES else []
    prefix_chars = [0] * len(nodes)  # The number of characters in the name of each container
    roles = [_PLAIN] * len(nodes)  # Whether each is any container, a list of pairs or a pair
    for _ in range(_MAX_JSON_DEPTH):
        if not nodes:
            return ""
        inner_nodes: list[Node] = []
        inner_chars: list[int] = []
        inner_roles: list[int] = []
        for chars, node, role in zip(prefix_chars, nodes, roles, strict=True):
            budget -= chars * len(node)
            items = node.values() if isinstance(node, dict) else node
            if _NODE_TYPES.isdisjoint(map(type, items)):
                continue
            is_container = list(map(_NODE_TYPES.__contains__, map(type, items)))
            inner_nodes += compress(items, is_container)
            count = sum(is_container)
            if isinstance(node, dict):
                inner_chars += [chars + len(key) + 1 for key in compress(node, is_container)]
                inner_roles += [_PAIRS if node.get("$") in _PAIR_TAGS else _PLAIN] * count
            else:
                part_chars = _chars_of_key(node) if role == _PAIR else INDEX_CHARS
                inner_chars += [chars + part_chars] * count
                inner_roles += [_PAIR if role == _PAIRS else _PLAIN] * count
        if budget < 0:
            return (
                f"its names have more than {_NAME_CHARS_PER_BYTE} times as many characters as it "
                "has bytes"
            )
        nodes, prefix_chars, roles = inner_nodes, inner_chars, inner_roles
    return "nested too deeply"


def _budget(nbytes: int) -> int:
    """Return how many characters the names in a tree with a JSON of ``nbytes`` bytes may have."""
    return (1 << 20) + _NAME_CHARS_PER_BYTE * nbytes


def _most_name_chars_of_json(data: bytes) -> float:
    """Return an upper bound for the number of characters in the names of a tree. ``data`` is the
    JSON of the tree, made by ``dumps``. The bound is infinite if the tree may be nested too deeply.

    Each part of a name is an index or is in ``data``, and a comma or a container comes before each
    value. This takes three passes at the speed of C.
    """
    containers = data.count(b"{") + data.count(b"[")
    if containers >= _MAX_JSON_DEPTH:
        return math.inf
    return (containers + data.count(b",")) * (len(data) + INDEX_CHARS * containers)


def _with_decoded_nodes(tree: Mapping[str, Node]) -> Node:
    """Return ``tree`` with the nodes of those values that are JSON already (see ``PlainNode``)."""
    return {
        key: msgspec.json.decode(item) if type(item) is msgspec.Raw else item
        for key, item in tree.items()
    }


def most_name_chars(tree: Node) -> float:
    """Return a number that the names in a tree have at most as characters. It is infinite if the
    tree is nested too deeply, or has keys that are no strings.

    This takes a few passes over each level, and most trees are far below the limit.
    """
    level: Sequence[Node] = [tree]
    longest = total = 0
    for _ in range(_MAX_JSON_DEPTH):
        containers = by_type(level, _NODE_TYPES)
        if not containers:
            return total
        dicts = containers.get(dict, ())
        keys = set(chain.from_iterable(dicts))
        if "$" in keys and any(map(_PAIR_TAGS.__contains__, map(dict.get, dicts, repeat("$")))):
            return math.inf
        total += longest * size_of(containers)
        if keys == {"$", "v"}:  # Tuples, whose tags are no containers
            items = chain.from_iterable(containers.get(list, ()))
            level = list(chain(items, map(dict.get, dicts, repeat("v"))))
        else:
            level = contents(containers)
        longest += max(INDEX_CHARS, 1 + max(map(len, keys), default=0))
    return math.inf


def _chars_of_key(items: Sequence[Node]) -> int:
    """Return how many characters the key of a tagged dict adds to the name of its value. ``items``
    are the key and the value.
    """
    key, *_ = items if len(items) == 2 else (None,)  # A forged tree may have other arrays there
    if type(key) not in (str, dict, list):
        return INDEX_CHARS
    return len(key) if type(key) is str else len(msgspec.json.encode(key))


def encode(value: object, path: str, hook: OtherEncoder, *, depth: int = 0) -> Node:
    """Return the node of ``value``.

    Args:
        value: The value.
        path: The path of the value in the state.
        hook: The hook for values that are not plain. ``hook(value, path)`` returns a node or
            raises ``UnsupportedValue``. ``encode`` also calls the hook for each dict of at least
            ``LARGE`` entries. The hook then returns the node of the dict, or None if ``encode``
            must make the node.
        depth: The number of containers around the value.

    Raises:
        UnsupportedValue: A string is not valid text, containers are nested too deeply, too many
            members of a set or keys of a dict have the same hash, or ``hook`` raised the error.
    """
    kind = type(value)
    if kind is str:
        if not is_text(value):  # type: ignore[arg-type]
            advice = "save its bytes instead: text.encode('utf-8', 'surrogatepass')"
            raise UnsupportedValue(path, "str that is not text", advice)
        return value
    if value is None or kind is bool:
        return value
    if kind is int:
        return value if -(2**63) <= value < 2**63 else {"$": "int", "v": hex(value)}  # type: ignore[operator, arg-type]
    if kind is float:
        return value if math.isfinite(value) else {"$": "float", "v": _float_text(value)}  # type: ignore[arg-type]
    if depth > _MAX_DEPTH:
        raise UnsupportedValue(path, "container nested too deeply, or in itself")

    # Most keys of a state have a few values, and some have a history of hundreds of thousands.
    is_top = depth == 0 and not (kind is dict and _is_small(value))  # type: ignore[arg-type]
    if kind in CONTAINERS and (is_top or len(value) >= LARGE):  # type: ignore[arg-type]
        with suppress(UnsupportedValue):  # It is raised again below, with its name
            return node_of(value, depth, _MAX_DEPTH, _encode_leaf)
    if is_top:
        check_bounded(value, path)
    if kind is list:
        return _encode_items(value, path, hook, depth)  # type: ignore[arg-type]
    if kind is tuple:
        return {"$": "tuple", "v": _encode_items(value, path, hook, depth)}  # type: ignore[arg-type]
    if kind is dict and len(value) >= LARGE and (node := hook(value, path)) is not None:  # type: ignore[arg-type]
        return node
    if kind is set or kind is frozenset:
        _check_hashes(value, path)  # type: ignore[arg-type]
        items = sorted(value, key=_sort_key)  # type: ignore[call-overload]
        return {"$": kind.__name__, "v": _encode_items(items, path, hook, depth)}
    if kind in _MAPPING_TAGS:

        def encode_item(item: object, part: object) -> Node:
            return encode(item, join(path, part), hook, depth=depth + 1)

        return _encode_mapping(value, kind, path, encode_item)  # type: ignore[arg-type]
    if kind in _BYTES_TAGS:
        return {"$": _BYTES_TAGS[kind], "v": base64.b64encode(value).decode()}  # type: ignore[arg-type]
    if kind is complex:
        return {"$": "complex", "v": [_float_text(value.real), _float_text(value.imag)]}  # type: ignore[attr-defined]
    if isinstance(value, np.generic) and value.dtype.kind in "biufc":
        return {"$": "numpy", "d": value.dtype.str, "v": base64.b64encode(value.tobytes()).decode()}
    return hook(value, path)


@dataclass(frozen=True, slots=True)
class PlainNode:
    """The node of a plain list, tuple or mapping.

    Attributes:
        value: The value.
        node: Its node; of a large value, the JSON of the node.
        name_chars: The most characters that the names of all values inside of it have together;
            infinite if this is not known.
    """

    value: object
    node: Node
    name_chars: float


def plain_node(value: object, key: str) -> PlainNode | None:
    """Return the node of a list, tuple or mapping with the name ``key``. Return None if it has
    another value than plain ones inside, or one that ``encode`` refuses. All values are looked at
    once, level by level.

    The nodes of a large value are objects that the garbage collector would look at until the tree
    of the state is JSON. So they become JSON at once.
    """
    if type(value) not in CONTAINERS:
        return None
    walk_size = WalkSize(is_compact=True)
    try:
        with without_collector():
            node = node_of(value, 0, _MAX_DEPTH, _encode_leaf, walk_size)
            data = msgspec.json.encode(node)
            node = msgspec.Raw(data)  # The nodes go while the collector is paused
        if len(data) < _LARGE_JSON:
            walk_size = WalkSize()
            node = node_of(value, 0, _MAX_DEPTH, _encode_leaf, walk_size)
    except (UnsupportedValue, UnicodeError, TypeError, RecursionError):
        return None  # ``encode`` names what it is
    return PlainNode(value, node, walk_size.name_chars + (len(key) + 1) * walk_size.value_count)


def check_bounded(value: object, path: str) -> None:
    """Raise ``UnsupportedValue`` if containers inside of ``value`` hold each other so often that a
    walk over all values would take exponential time.
    """
    if not is_bounded(value, _MAX_DEPTH):
        raise UnsupportedValue(
            path,
            "container that holds others, or itself, again and again",
            "save the shared value once, and make the containers after the restore",
        )


def _is_small(value: dict[Any, Any]) -> bool:
    """Return True if ``value`` has fewer than ``LARGE`` values, those in its lists and tuples
    included, and no other containers, such as the settings of an optimizer. For such a dict,
    ``node_of`` would be slower than a call for each value.
    """
    number = len(value)
    if number >= LARGE:
        return False
    for item in value.values():
        if type(item) in CONTAINERS:
            number += len(item)
            if number >= LARGE or not isinstance(item, list | tuple):
                return False
            if not CONTAINERS.isdisjoint(map(type, item)):
                return False
    return True


def _encode_leaf(value: object, depth: int) -> Node:
    """Return the node of a plain value (see ``values_by_level.Leaf``)."""
    return encode(value, "", _refuse, depth=depth)


def _refuse(value: object, path: str) -> Node:
    raise UnsupportedValue(path, type(value).__name__)


def _encode_items(items: Iterable[object], path: str, hook: OtherEncoder, depth: int) -> Node:
    # The path of a value that is its own node is not made, since it costs more than the node.
    return [
        item if _is_own_node(item) else encode(item, f"{path}/{i}", hook, depth=depth + 1)
        for i, item in enumerate(items)
    ]


def _is_own_node(value: Any) -> bool:
    """Return True if ``value`` contains no other value and is a node itself.

    A string that is not ASCII and a number that is not finite need a second look.
    """
    kind = type(value)
    if kind is float:
        return bool(value - value == 0.0)  # False for infinity and NaN
    if kind is str:
        return str.isascii(value)
    if kind is int:
        return bool(-(2**63) <= value < 2**63)
    return value is None or kind is bool


def _sort_key(item: object) -> str:
    """Return the sort key of a member of a set. Equal members have the same key on all ranks. The
    ``repr`` of a frozenset does not have this property.
    """
    if type(item) is frozenset:
        return "{" + ",".join(sorted(map(_sort_key, item))) + "}"
    return "(" + ",".join(map(_sort_key, item)) + ")" if type(item) is tuple else exact_text(item)


def _encode_mapping(
    value: Mapping[Any, Any], kind: type, path: str, encode_item: Callable[[object, object], Node]
) -> Node:
    """Return the node of a mapping. ``encode_item(item, part)`` returns the node of an item of it,
    and ``part`` is the last part of the path of the item.
    """
    if kind is dict and all(type(key) is str and key[:1] != "$" for key in value):
        for key in value:
            if not key.isascii():
                check_name(key, join(path, key))
        return {
            key: item if _is_own_node(item) else encode_item(item, key)
            for key, item in value.items()
        }
    _check_hashes(value, path)
    pairs = [[encode_item(key, "key"), encode_item(item, key)] for key, item in value.items()]
    node = {"$": _MAPPING_TAGS[kind], "v": pairs}
    if kind is OrderedDict and (versions := vars(value).get(VERSIONS)) is not None:
        node[MODULE_VERSIONS] = encode_item(versions, VERSIONS)
    return node


def decode(node: Node, hook: OtherDecoder) -> Any:
    """Return the value of ``node``.

    Args:
        node: The node.
        hook: The hook for nodes whose tag this module does not have. ``hook(tag, node)`` returns
            the value of the node. It may be called twice for a node.

    Raises:
        ManifestCorrupt: A node does not represent a value.
    """
    if not isinstance(node, list | dict):
        return node
    with suppress(*_DAMAGE_ERRORS):  # It is raised again below, with the tag of its node
        return value_of(node, lambda tagged: _decode_tagged(tagged["$"], tagged, hook))
    return _decode(node, hook)


def _decode(node: Node, hook: OtherDecoder) -> Any:
    """Do what ``decode`` does, but node by node, so that an error names the tag of its node."""
    if not isinstance(node, list | dict):
        return node
    tag = node.get("$") if isinstance(node, dict) else None
    try:
        if isinstance(node, list):
            return [_decode(item, hook) for item in node]
        if tag is None:
            return {key: _decode(item, hook) for key, item in node.items()}
        return _decode_tagged(tag, node, hook)
    except RecursionError:
        raise ManifestCorrupt("tree", "nested too deeply") from None
    except _DAMAGE_ERRORS as error:
        raise ManifestCorrupt(
            "tree", f"node with tag {str(tag)[:40]!r}: {str(error)[:200]}"
        ) from None


def _decode_tagged(tag: str, node: Mapping[str, Node], hook: OtherDecoder) -> Any:
    """Return the value of a node with a tag. The errors of ``_DAMAGE_ERRORS`` mean damage."""
    match tag:
        case "tuple" | "set" | "frozenset":
            items = [decode(item, hook) for item in node["v"]]
            return {"tuple": tuple, "set": set, "frozenset": frozenset}[tag](
                items if tag == "tuple" else _without_collisions(items)
            )
        case "dict" | "OrderedDict" | "Counter":
            keys = _without_collisions([decode(key, hook) for key, _ in node["v"]])
            pairs = {
                key: decode(item, hook) for key, (_, item) in zip(keys, node["v"], strict=True)
            }
            mapping = MAPPINGS[tag](pairs)
            # torch keeps the versions of modules in an attribute of the state of a module.
            if tag == "OrderedDict" and MODULE_VERSIONS in node:
                vars(mapping)[VERSIONS] = decode(node[MODULE_VERSIONS], hook)
            return mapping
        case "bytes" | "bytearray":
            raw = base64.b64decode(node["v"], validate=True)
            return raw if tag == "bytes" else bytearray(raw)
        case "int":
            return int(node["v"], 16)
        case "float":
            return _parse_float(node["v"])
        case "complex":
            return complex(_parse_float(node["v"][0]), _parse_float(node["v"][1]))
        case "numpy":
            # Refuse all other dtypes, because NumPy evaluates their text as Python literals.
            if not _SCALAR_DTYPE.fullmatch(node["d"]):
                raise ValueError(f"dtype {node['d']!r}")
            return np.frombuffer(base64.b64decode(node["v"], validate=True), dtype=node["d"])[0]
        case _:
            return hook(tag, node)


def _without_collisions(items: list[Any]) -> list[Any]:
    """Return ``items``. Raises ``ValueError`` if more than ``MOST_COLLISIONS`` of them have the
    same hash.

    A forged tree could contain large ints that all have the same hash. Building a set of these ints
    would take quadratic time.
    """
    if has_hash_collisions(items):
        raise ValueError("too many members of one hash")
    return items


def _check_hashes(value: Collection[object], path: str) -> None:
    """Raise ``UnsupportedValue`` if too many members of a set, or keys of a dict, have the same
    hash, since ``decode`` would refuse the value.
    """
    if has_hash_collisions(value):
        raise UnsupportedValue(
            path,
            f"{type(value).__name__} with more than {MOST_COLLISIONS} members of one hash",
            "save a list of its members instead",
        )


def _float_text(value: float) -> str:
    """Return the text of a float. The text of a NaN contains the bits of the NaN if these differ
    from the bits of ``math.nan``.
    """
    bits = struct.pack(">d", value)
    is_usual = not math.isnan(value) or bits == struct.pack(">d", math.nan)
    return repr(value) if is_usual else _NAN + bits.hex()


def _parse_float(text: str) -> float:
    """Return the float from which ``_float_text`` made ``text``."""
    if not text.startswith(_NAN):
        return float(text)
    (number,) = struct.unpack(">d", int(text.removeprefix(_NAN), 16).to_bytes(8, "big"))
    return float(number)


def to_json(name: str, value: object) -> bytes:
    """Return the JSON of a value that consists of plain values only. ``name`` is the name of the
    value in errors.

    Raises:
        UnsupportedValue: A part of the value is not plain. The error names the part.
    """

    def refuse(item: object, path: str) -> Node:
        if type(item) is dict:
            return None
        raise UnsupportedValue(path, type(item).__name__, "plain values only")

    return dumps(encode(value, name, refuse), name)


def dumps(node: Node, name: str, name_chars: Mapping[str, float] = NO_ENTRIES) -> bytes:
    """Return the JSON of a node. Dicts keep their order.

    Args:
        node: The node.
        name: The name of the value in errors.
        name_chars: If ``node`` is a dict, those keys whose values are known to have names of so
            many characters at most (see ``PlainNode``).

    Raises:
        UnsupportedValue: The node cannot be encoded as JSON, or ``parse`` would refuse the JSON.
    """
    try:
        data = msgspec.json.encode(node)
    except (UnicodeError, TypeError, RecursionError) as error:
        raise UnsupportedValue(name, "value", str(error)) from None
    if len(data) < _LARGE_JSON and _most_name_chars_of_json(data) <= _budget(len(data)):
        return data
    if fault := _excess(node, len(data), name_chars):
        raise UnsupportedValue(name, "value", fault)
    return data
