"""Plain values <-> JSON nodes, without pickle and without loss.

None, bool, str, finite float, 64-bit int, list and dict with ordinary string keys are themselves in
JSON. Everything else is a *tagged* node ``{"$": tag, ...}``. Tags of this module: tuple, set,
frozenset, bytes, bytearray, complex, float (nan, inf), int (large), dict (other keys), OrderedDict,
Counter, numpy (scalars). The adapters add their own (tensor, module, optimizer, object, dtype,
device, Size, per_rank) through the two hooks.
"""

from __future__ import annotations

import base64
import math
import re
import struct
from bisect import bisect_left
from collections import Counter, OrderedDict
from collections.abc import Callable, Collection, Generator, Mapping, Sequence
from contextlib import contextmanager
from itertools import compress
from typing import Any, Final

import msgspec
import numpy as np

from ckpt.errors import ManifestCorrupt, UnsupportedValue

# The values that msgspec's JSON encoder takes and gives have no static type.
Node = Any
OtherEncoder = Callable[[object, str], Node]
OtherDecoder = Callable[[str, Mapping[str, Node]], object]

_MAX_DEPTH: Final = 100
_MAX_JSON_DEPTH: Final = 320
"""Objects and arrays in each other: a container of a state takes up to three."""
_NAME_CHARS_PER_BYTE: Final = 256
"""The most characters of all names in a tree together, for each byte of the tree. A long name
repeats in all names below it.
"""
_MOST_COLLISIONS: Final = 16
"""The most members of a set or keys of a dict with one hash. More would take quadratic time."""
_INT_KEY: Final = re.compile(r"~2-?[0-9]{1,19}")
_NAN: Final = "nan:"
"""Before the bits of a NaN that is not Python's own."""
_SCALAR_DTYPE: Final = re.compile(r"[<>|][biufc][0-9]{1,2}")
_SEQUENCES: Final[dict[type, str]] = {tuple: "tuple", set: "set", frozenset: "frozenset"}
_BYTES: Final[dict[type, str]] = {bytes: "bytes", bytearray: "bytearray"}
_MAPPINGS: Final[dict[type, str]] = {dict: "dict", OrderedDict: "OrderedDict", Counter: "Counter"}


VERSIONS: Final = "_metadata"
"""The attribute of a ``Module.state_dict()`` that has the versions of the modules."""
_NESTED_KEYS: Final = frozenset({tuple, frozenset})
_CONTAINERS: Final = frozenset({dict, list})  # Containers of JSON

LARGE: Final = 32
"""The number of entries from which ``encode`` offers a dict to its hook as a whole."""


def join(path: str, part: object) -> str:
    """Return the path of a child, with '/' between parts. '~' and '/' in a part are escaped as in
    JSON pointers, and a key that is no string is marked with '~2'.
    """
    if type(part) is str:
        text = part.replace("~", "~0").replace("/", "~1")
    else:
        text = f"~2{exact(part)}"
    return f"{path}/{text}" if path else text


def unescape(part: str) -> str | int:
    """Return the key that ``join`` made ``part`` of, if it was a string or a 64-bit int. ``part``
    of another key is returned as it is, and begins with '~2' as no other result does.
    """
    if part.startswith("~2"):
        return int(part[2:]) if _INT_KEY.fullmatch(part) else part
    return part.replace("~1", "/").replace("~0", "~")


def is_text(value: str) -> bool:
    """Return False for a str that UTF-8 cannot encode, since it contains a lone surrogate."""
    if value.isascii():
        return True
    try:
        value.encode()
    except UnicodeEncodeError:
        return False
    return True


def check_name(key: str, path: str) -> None:
    """Raise ``UnsupportedValue`` for ``path`` if its last part, ``key``, is not text."""
    if not is_text(key):
        raise UnsupportedValue(path, "name that is not text", "rename it")


def below(names: Sequence[str], path: str) -> Sequence[str]:
    """Return those of the sorted names that are inside of ``path``."""
    return names[bisect_left(names, f"{path}/") : bisect_left(names, f"{path}0")]  # '0' follows '/'


def exact(value: object) -> str:
    """Return the ``repr`` of a plain value, with large ints in hexadecimal and the members of
    frozensets in order.

    Python refuses to print large ints in decimal, and equal sets may have another order.
    """
    if type(value) is frozenset and value:
        return f"frozenset({{{', '.join(sorted(map(exact, value)))}}})"
    if type(value) is tuple and any(type(item) in _NESTED_KEYS for item in value):
        return f"({', '.join(map(exact, value))}{',' if len(value) == 1 else ''})"
    try:
        return repr(value)
    except ValueError:
        pass
    if isinstance(value, int):
        return hex(value)
    if isinstance(value, Mapping):
        items = (f"{exact(key)}: {exact(item)}" for key, item in value.items())
        return f"{type(value).__name__}({{{', '.join(items)}}})"
    if isinstance(value, list | tuple | set | frozenset):
        return f"{type(value).__name__}({', '.join(map(exact, value))})"
    return object.__repr__(value)


def parse(raw: msgspec.Raw, what: str = "tree") -> Node:
    """Return the nodes of a tree; None if it is empty.

    Raises:
        ManifestCorrupt: It is not JSON, is nested too deeply, or its names take too much memory.
    """
    if not bytes(raw):
        return None
    try:
        node = msgspec.json.decode(raw)
    except (msgspec.MsgspecError, UnicodeError, RecursionError) as error:
        raise ManifestCorrupt(what, str(error)[:200]) from None
    if fault := _excess(node, len(bytes(raw))):
        raise ManifestCorrupt(what, fault)
    return node


@contextmanager
def following(what: str) -> Generator[None]:
    """Raise ``ManifestCorrupt`` for errors in the block, which follows a tree that may hold any
    JSON.
    """
    try:
        yield
    except (
        LookupError,
        TypeError,
        ValueError,
        AttributeError,
        ArithmeticError,
        RuntimeError,
    ) as error:
        raise ManifestCorrupt(what, f"it is none that ckpt writes ({str(error)[:200]!r})") from None


def _excess(tree: Node, nbytes: int) -> str:
    """Return which bound a tree of so many bytes exceeds; an empty text if it exceeds none.

    Takes time that grows linearly with it.
    """
    # A pair for each container would start the garbage collector, so these are two lists.
    nodes = [tree] if type(tree) in _CONTAINERS else []
    outside = [0] * len(nodes)  # Characters of the names around each of them
    left = (1 << 20) + _NAME_CHARS_PER_BYTE * nbytes
    for _ in range(_MAX_JSON_DEPTH):
        if not nodes:
            return ""
        within: list[Node] = []
        around: list[int] = []
        for chars, node in zip(outside, nodes, strict=True):
            left -= chars * len(node)
            items = node.values() if isinstance(node, dict) else node
            if _CONTAINERS.isdisjoint(map(type, items)):
                continue
            inner = list(map(_CONTAINERS.__contains__, map(type, items)))
            within += compress(items, inner)
            if isinstance(node, dict):
                around += [chars + len(key) + 1 for key in compress(node, inner)]
            else:
                around += [chars + _chars_of_key(node)] * sum(inner)
        if left < 0:
            return (
                f"its names have more than {_NAME_CHARS_PER_BYTE} times as many characters as it "
                "has bytes"
            )
        nodes, outside = within, around
    return "nested too deeply"


def _chars_of_key(items: Sequence[Node]) -> int:
    """Return what a container adds to the names below it.

    It is a number, or the key if the container is a mapping.
    """
    if len(items) != 2 or type(items[0]) not in (str, dict, list):
        return 8
    return len(items[0]) if type(items[0]) is str else len(msgspec.json.encode(items[0]))


def encode(value: object, path: str, other: OtherEncoder, *, depth: int = 0) -> Node:
    """Return the node of ``value``.

    What is not plain goes to ``other(value, path)``, which returns a node or raises
    ``UnsupportedValue``. A large dict is first passed to it as a whole, and it may return None.
    """
    kind = type(value)
    if kind is str:
        if not is_text(value):  # type: ignore[arg-type]
            way = "save its bytes instead: text.encode('utf-8', 'surrogatepass')"
            raise UnsupportedValue(path, "str that is not text", way)
        return value
    if value is None or kind is bool:
        return value
    if kind is int:
        return value if -(2**63) <= value < 2**63 else {"$": "int", "v": hex(value)}  # type: ignore[operator, arg-type]
    if kind is float:
        return value if math.isfinite(value) else {"$": "float", "v": _text(value)}  # type: ignore[arg-type]
    if depth > _MAX_DEPTH:
        raise UnsupportedValue(path, "container nested too deeply, or in itself")

    def inner(item: object, part: object) -> Node:
        return encode(item, join(path, part), other, depth=depth + 1)

    if kind is dict and len(value) >= LARGE and (node := other(value, path)) is not None:  # type: ignore[arg-type]
        return node
    if kind is list:
        return [inner(item, str(i)) for i, item in enumerate(value)]  # type: ignore[arg-type, var-annotated]
    if kind in _SEQUENCES:
        if kind is not tuple:
            _check_hashes(value, path)  # type: ignore[arg-type]
        items = list(value) if kind is tuple else sorted(value, key=_order)  # type: ignore[call-overload]
        return {"$": _SEQUENCES[kind], "v": [inner(item, str(i)) for i, item in enumerate(items)]}
    if kind in _MAPPINGS:
        return _encode_mapping(value, kind, path, inner)  # type: ignore[arg-type]
    if kind in _BYTES:
        return {"$": _BYTES[kind], "v": base64.b64encode(value).decode()}  # type: ignore[arg-type]
    if kind is complex:
        return {"$": "complex", "v": [_text(value.real), _text(value.imag)]}  # type: ignore[attr-defined]
    if isinstance(value, np.generic) and value.dtype.kind in "biufc":
        return {"$": "numpy", "d": value.dtype.str, "v": base64.b64encode(value.tobytes()).decode()}
    return other(value, path)


def _order(item: object) -> str:
    """Return the sort key of a set's member. It is the same on all ranks, unlike the ``repr`` of a
    set.
    """
    if type(item) is frozenset:
        return "{" + ",".join(sorted(map(_order, item))) + "}"
    return "(" + ",".join(map(_order, item)) + ")" if type(item) is tuple else repr(item)


def _encode_mapping(
    value: Mapping[Any, Any], kind: type, path: str, inner: Callable[[object, object], Node]
) -> Node:
    if kind is dict and all(type(key) is str and not key.startswith("$") for key in value):
        for key in value:
            check_name(key, join(path, key))
        return {key: inner(item, key) for key, item in value.items()}
    _check_hashes(value, path)
    pairs = [[inner(key, "key"), inner(item, key)] for key, item in value.items()]
    node = {"$": _MAPPINGS[kind], "v": pairs}
    if kind is OrderedDict and (versions := vars(value).get(VERSIONS)) is not None:
        node["m"] = inner(versions, VERSIONS)
    return node


def decode(node: Node, other: OtherDecoder) -> Any:
    """Return the value of ``node``.

    Tags of other modules are passed to ``other(tag, node)``. Raises ``ManifestCorrupt`` if a node
    has no valid value.
    """
    if not isinstance(node, list | dict):
        return node
    tag = node.get("$") if isinstance(node, dict) else None
    try:
        if isinstance(node, list):
            return [decode(item, other) for item in node]
        if tag is None:
            return {key: decode(item, other) for key, item in node.items()}
        return _decode_tagged(tag, node, other)
    except RecursionError:
        raise ManifestCorrupt("tree", "nested too deeply") from None
    except (
        LookupError,
        TypeError,
        ValueError,
        AttributeError,
        ArithmeticError,
        RuntimeError,
    ) as error:
        raise ManifestCorrupt(
            "tree", f"node with tag {str(tag)[:40]!r}: {str(error)[:200]}"
        ) from None


def _decode_tagged(tag: str, node: Mapping[str, Node], other: OtherDecoder) -> Any:
    match tag:
        case "tuple" | "set" | "frozenset":
            items = [decode(item, other) for item in node["v"]]
            return {"tuple": tuple, "set": set, "frozenset": frozenset}[tag](
                items if tag == "tuple" else _hashable(items)
            )
        case "dict" | "OrderedDict" | "Counter":
            keys = _hashable([decode(key, other) for key, _ in node["v"]])
            pairs = {
                key: decode(item, other) for key, (_, item) in zip(keys, node["v"], strict=True)
            }
            made = {"dict": dict, "OrderedDict": OrderedDict, "Counter": Counter}[tag](pairs)
            if tag == "OrderedDict" and "m" in node:
                vars(made)[VERSIONS] = decode(node["m"], other)
            return made
        case "bytes" | "bytearray":
            raw = base64.b64decode(node["v"], validate=True)
            return raw if tag == "bytes" else bytearray(raw)
        case "int":
            return int(node["v"], 16)
        case "float":
            return _number(node["v"])
        case "complex":
            return complex(_number(node["v"][0]), _number(node["v"][1]))
        case "numpy":
            # NumPy would evaluate a longer dtype as a literal.
            if not _SCALAR_DTYPE.fullmatch(node["d"]):
                raise ValueError(f"dtype {node['d']!r}")
            return np.frombuffer(base64.b64decode(node["v"], validate=True), dtype=node["d"])[0]
        case _:
            return other(tag, node)


def _hashable(items: list[Any]) -> list[Any]:
    """Return ``items`` if only few of them have the same hash.

    Large ints can be chosen so that all of them have the same hash, which makes a set slow.
    """
    if _collide(items):
        raise ValueError("too many members of one hash")
    return items


def _collide(items: Collection[Any]) -> bool:
    return (
        len(items) > _MOST_COLLISIONS and max(Counter(map(hash, items)).values()) > _MOST_COLLISIONS
    )


def _check_hashes(value: Collection[object], path: str) -> None:
    """Raise ``UnsupportedValue`` for a set or a dict that ``decode`` would refuse."""
    if _collide(value):
        raise UnsupportedValue(
            path,
            f"{type(value).__name__} with more than {_MOST_COLLISIONS} members of one hash",
            "save a list of its members instead",
        )


def _text(value: float) -> str:
    """Return the text of a float. That of a NaN has its bits, unless it is Python's own NaN."""
    bits = struct.pack(">d", value)
    own = not math.isnan(value) or bits == struct.pack(">d", math.nan)
    return repr(value) if own else _NAN + bits.hex()


def _number(text: str) -> float:
    if not text.startswith(_NAN):
        return float(text)
    (number,) = struct.unpack(">d", int(text.removeprefix(_NAN), 16).to_bytes(8, "big"))
    return float(number)


def to_json(name: str, value: object) -> bytes:
    """Return the canonical JSON of a value made of plain values only.

    Raises ``UnsupportedValue`` naming the part that is not.
    """

    def refuse(item: object, path: str) -> Node:
        if type(item) is dict:
            return None
        raise UnsupportedValue(path, type(item).__name__, "plain values only")

    return dumps(encode(value, name, refuse), name)


def dumps(node: Node, name: str) -> bytes:
    """Return the bytes of a node. A dict keeps its order.

    Raises:
        UnsupportedValue: ``parse`` would refuse the bytes.
    """
    try:
        data = msgspec.json.encode(node)
    except (UnicodeError, TypeError, RecursionError) as error:
        raise UnsupportedValue(name, "value", str(error)) from None
    if fault := _excess(node, len(data)):
        raise UnsupportedValue(name, "value", fault)
    return data
