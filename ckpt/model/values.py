"""Plain values <-> JSON nodes, without pickle and without loss.

None, bool, str, finite float, 64-bit int, list and dict with ordinary string keys are themselves in JSON. Everything else is a *tagged* node
``{"$": tag, ...}``. Tags of this module: tuple, set, frozenset, bytes, bytearray, complex, float (nan, inf), int (large), dict (other keys), OrderedDict, Counter,
numpy (scalars). The adapters add their own (tensor, module, optimizer, object, dtype, device, Size, per_rank) through the two hooks.
"""

from __future__ import annotations

import base64
import math
from collections import Counter, OrderedDict
from collections.abc import Callable, Mapping
from typing import Any, Final

import msgspec
import numpy as np

from ckpt.errors import ManifestCorrupt, UnsupportedValue

Node = Any  # what msgspec's JSON encoder takes and gives; the one border where types end
OtherEncoder = Callable[[object, str], Node]
OtherDecoder = Callable[[str, Mapping[str, Node]], object]

_MAX_DEPTH: Final = 100
_SEQUENCES: Final[dict[type, str]] = {tuple: "tuple", set: "set", frozenset: "frozenset"}
_BYTES: Final[dict[type, str]] = {bytes: "bytes", bytearray: "bytearray"}
_MAPPINGS: Final[dict[type, str]] = {dict: "dict", OrderedDict: "OrderedDict", Counter: "Counter"}


def join(path: str, part: object) -> str:
    """Path of a child: '/' between parts, '~' and '/' in a part escaped as in JSON pointers, a key that is no string marked with '~2'."""
    if type(part) is str:
        text = part.replace("~", "~0").replace("/", "~1")
    else:
        text = f"~2{part!r}"
    return f"{path}/{text}" if path else text


def encode(value: object, path: str, other: OtherEncoder, *, depth: int = 0) -> Node:
    """The node of ``value``. What is not plain goes to ``other(value, path)``, which returns a node or raises ``UnsupportedValue``."""
    kind = type(value)
    if value is None or kind is bool or kind is str:
        return value
    if kind is int:
        return value if -(2**63) <= value < 2**63 else {"$": "int", "v": hex(value)}  # type: ignore[operator, arg-type]
    if kind is float:
        return value if math.isfinite(value) else {"$": "float", "v": repr(value)}  # type: ignore[arg-type]
    if depth > _MAX_DEPTH:
        raise UnsupportedValue(path, "container nested too deeply, or in itself")

    def inner(item: object, part: object) -> Node:
        return encode(item, join(path, part), other, depth=depth + 1)

    if kind is list:
        return [inner(item, i) for i, item in enumerate(value)]  # type: ignore[arg-type, var-annotated]
    if kind in _SEQUENCES:
        items = list(value) if kind is tuple else sorted(value, key=repr)  # type: ignore[call-overload]
        return {"$": _SEQUENCES[kind], "v": [inner(item, i) for i, item in enumerate(items)]}
    if kind in _MAPPINGS:
        return _encode_mapping(value, kind, inner)  # type: ignore[arg-type]
    if kind in _BYTES:
        return {"$": _BYTES[kind], "v": base64.b64encode(value).decode()}  # type: ignore[arg-type]
    if kind is complex:
        return {"$": "complex", "v": [repr(value.real), repr(value.imag)]}  # type: ignore[attr-defined]
    if isinstance(value, np.generic) and value.dtype.kind in "biufc":
        return {"$": "numpy", "d": value.dtype.str, "v": base64.b64encode(value.tobytes()).decode()}
    return other(value, path)


def _encode_mapping(value: Mapping[Any, Any], kind: type, inner: Callable[[object, object], Node]) -> Node:
    if kind is dict and all(type(key) is str and not key.startswith("$") for key in value):
        return {key: inner(item, key) for key, item in value.items()}
    pairs = [[inner(key, "key"), inner(item, key)] for key, item in value.items()]
    return {"$": _MAPPINGS[kind], "v": pairs}


def decode(node: Node, other: OtherDecoder) -> Any:
    """The value of ``node``. Tags that are not of this module go to ``other(tag, node)``. Raises ``ManifestCorrupt`` for nonsense."""
    if isinstance(node, list):
        return [decode(item, other) for item in node]
    if not isinstance(node, dict):
        return node
    tag = node.get("$")
    if tag is None:
        return {key: decode(item, other) for key, item in node.items()}
    try:
        return _decode_tagged(tag, node, other)
    except (KeyError, TypeError, ValueError, AttributeError) as error:
        raise ManifestCorrupt("tree", f"node with tag {str(tag)[:40]!r}: {error}") from None


def _decode_tagged(tag: str, node: Mapping[str, Node], other: OtherDecoder) -> Any:
    match tag:
        case "tuple" | "set" | "frozenset":
            return {"tuple": tuple, "set": set, "frozenset": frozenset}[tag](
                decode(item, other) for item in node["v"]
            )
        case "dict" | "OrderedDict" | "Counter":
            pairs = {decode(key, other): decode(item, other) for key, item in node["v"]}
            return {"dict": dict, "OrderedDict": OrderedDict, "Counter": Counter}[tag](pairs)
        case "bytes" | "bytearray":
            raw = base64.b64decode(node["v"], validate=True)
            return raw if tag == "bytes" else bytearray(raw)
        case "int":
            return int(node["v"], 16)
        case "float":
            return float(node["v"])
        case "complex":
            return complex(float(node["v"][0]), float(node["v"][1]))
        case "numpy":
            dtype = np.dtype(node["d"])
            if dtype.kind not in "biufc":
                raise ValueError(f"dtype {node['d']!r}")
            return np.frombuffer(base64.b64decode(node["v"], validate=True), dtype=dtype)[0]
        case _:
            return other(tag, node)


def to_json(name: str, value: object) -> bytes:
    """Canonical JSON of a value made of plain values only. Raises ``UnsupportedValue`` naming the part that is not."""

    def refuse(item: object, path: str) -> Node:
        raise UnsupportedValue(path, type(item).__name__, "plain values only")

    return dumps(encode(value, name, refuse), name)


def dumps(node: Node, name: str) -> bytes:
    """The bytes of a node."""
    try:
        return msgspec.json.encode(node, order="deterministic")
    except (UnicodeError, TypeError, RecursionError) as error:  # a lone surrogate, say
        raise UnsupportedValue(name, "value", str(error)) from None
