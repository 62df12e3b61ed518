"""Which dtype may become which when a restore is asked to convert."""

from __future__ import annotations

from typing import Final

_FLOATS: Final = frozenset(
    ("float64", "float32", "float16", "bfloat16", "float8_e4m3fn", "float8_e5m2", "float8_e4m3fnuz", "float8_e5m2fnuz", "float8_e8m0fnu")
)  # fmt: skip
_COMPLEX: Final = frozenset(("complex128", "complex64", "complex32"))
_BITS: Final = {f"{sign}int{bits}": (sign == "", bits) for sign in ("", "u") for bits in (8, 16, 32, 64)}


def converts(saved: str, wanted: str) -> bool:
    """Between floats, rounding as torch does; between complex ones; from an integer to one that holds all of its values."""
    if saved in _FLOATS or saved in _COMPLEX:
        return wanted in (_FLOATS if saved in _FLOATS else _COMPLEX)
    if saved not in _BITS or wanted not in _BITS:
        return False
    (from_signed, from_bits), (to_signed, to_bits) = _BITS[saved], _BITS[wanted]
    if from_signed == to_signed:
        return from_bits <= to_bits
    return to_signed and from_bits < to_bits
