"""The table of element types: their names in torch, their sizes, and how a safetensors file stores
them.

Safetensors has no complex128, no complex32, and none of torch's ``float4_e2m1fn_x2`` and ``bits``
types. A file stores the first two as floats with one more dimension, whose length is the *lanes* of
the type, and the others as unsigned integers of the same size. The *storage* of a type is the name
that it has in the file.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Final

Entry = Mapping[str, object]


@dataclass(frozen=True, slots=True, kw_only=True)
class DType:
    """An element type.

    Attributes:
        name: The name in torch, without ``torch.``.
        itemsize: The bytes of one element of the tensor.
        storage: The name of the type in the header of a safetensors file.
        lanes: The length of the last dimension that is added in the file; 1 if none is added.
    """

    name: str
    itemsize: int
    storage: str
    lanes: int = 1


def _table() -> dict[str, DType]:
    """Return the element types by name. See ``DType`` for the columns of the rows."""
    rows: list[tuple[str, int, str, int]] = [
        ("float64", 8, "F64", 1),
        ("float32", 4, "F32", 1),
        ("float16", 2, "F16", 1),
        ("bfloat16", 2, "BF16", 1),
        ("float8_e4m3fn", 1, "F8_E4M3", 1),
        ("float8_e5m2", 1, "F8_E5M2", 1),
        ("float8_e4m3fnuz", 1, "F8_E4M3FNUZ", 1),
        ("float8_e5m2fnuz", 1, "F8_E5M2FNUZ", 1),
        ("float8_e8m0fnu", 1, "F8_E8M0", 1),
        ("float4_e2m1fn_x2", 1, "U8", 1),
        ("int64", 8, "I64", 1),
        ("int32", 4, "I32", 1),
        ("int16", 2, "I16", 1),
        ("int8", 1, "I8", 1),
        ("uint64", 8, "U64", 1),
        ("uint32", 4, "U32", 1),
        ("uint16", 2, "U16", 1),
        ("uint8", 1, "U8", 1),
        ("bool", 1, "BOOL", 1),
        ("complex128", 16, "F64", 2),
        ("complex64", 8, "C64", 1),
        ("complex32", 4, "F16", 2),
    ]
    rows += [(name, 1, "U8", 1) for name in ("bits8", "bits1x8", "bits2x4", "bits4x2")]
    rows += [("bits16", 2, "U16", 1)]
    return {
        name: DType(name=name, itemsize=size, storage=code, lanes=lanes)
        for name, size, code, lanes in rows
    }


DTYPES: Final[dict[str, DType]] = _table()


_FLOATS: Final = frozenset(
    (
        "float64",
        "float32",
        "float16",
        "bfloat16",
        "float8_e4m3fn",
        "float8_e5m2",
        "float8_e4m3fnuz",
        "float8_e5m2fnuz",
        "float8_e8m0fnu",
    )
)
_COMPLEX: Final = frozenset(("complex128", "complex64", "complex32"))
_INTEGERS: Final = {
    f"{sign}int{bits}": (sign == "", bits) for sign in ("", "u") for bits in (8, 16, 32, 64)
}
"""The integer types, each with whether it is signed, and its bits."""


def safetensors_entry(dtype: str, shape: Sequence[int], start: int) -> tuple[Entry, int]:
    """Return the entry in a safetensors header for a tensor whose bytes begin at ``start``, and the
    position of the end of its bytes.
    """
    kind = DTYPES[dtype]
    end = start + math.prod(shape) * kind.itemsize
    dims = [*shape, kind.lanes] if kind.lanes > 1 else list(shape)
    return {"dtype": kind.storage, "shape": dims, "data_offsets": [start, end]}, end


def is_float(dtype: str) -> bool:
    """Return True if each element of ``dtype`` is one floating-point number. An element of
    ``float4_e2m1fn_x2`` is two of them, and torch does not convert it.
    """
    return dtype in _FLOATS


def float_width(dtype: str) -> int:
    """Return the size in bytes of a floating point number in an element of ``dtype``. This is half
    of the size of a complex element, and the size of a float element. Return 1 for other types.
    """
    if dtype in _COMPLEX:
        return DTYPES[dtype].itemsize // 2
    return DTYPES[dtype].itemsize if is_float(dtype) else 1


def converts(source: str, target: str) -> bool:
    """Return True if a restore may convert elements of the dtype ``source`` to ``target``.

    A restore may convert any float type to any float type, and any complex type to any complex
    type. Values are rounded as torch rounds them. A restore may also convert an integer type to an
    integer type that can hold all of its values.
    """
    if source in _FLOATS or source in _COMPLEX:
        return target in (_FLOATS if source in _FLOATS else _COMPLEX)
    if source not in _INTEGERS or target not in _INTEGERS:
        return False
    (from_signed, from_bits), (to_signed, to_bits) = _INTEGERS[source], _INTEGERS[target]
    if from_signed == to_signed:
        return from_bits <= to_bits
    return to_signed and from_bits < to_bits
