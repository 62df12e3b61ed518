"""Compute the largest difference between two stored tensors."""

from __future__ import annotations

import math
from typing import Final

import numpy as np
import torch

from ckpt.catalog.difference import pairs
from ckpt.catalog.tensor_reader import Piece, StepReader

_INTEGERS: Final = ("int", "uint", "bool")
_NOT_NUMBERS: Final = ("bits", "float4")


def max_difference(reader_a: StepReader, reader_b: StepReader, name: str) -> float | None:
    """Return the largest absolute difference between elements of the tensor ``name`` at the same
    position in two checkpoints.

    The result is None if an element of the dtype is not one number (``float4_e2m1fn_x2``,
    ``bits8``). It is inf if two elements at the same position differ, and at least one of them is
    infinite or NaN. Two NaNs count as equal. Floats are subtracted in float64 or complex128.
    Integers are subtracted exactly, and a result above 2**53 is rounded. Both tensors must have the
    same dtype and shape.
    """
    dtype = reader_a.tensors[name].dtype
    if dtype.startswith(_NOT_NUMBERS):
        return None
    of = _of_integers if dtype.startswith(_INTEGERS) else _of_floats
    return max((of(a, b, dtype) for a, b in pairs(reader_a, reader_b, name)), default=0.0)


def _of_integers(piece_a: Piece, piece_b: Piece, dtype: str) -> float:
    x, y = (np.frombuffer(piece.data, dtype=dtype) for piece in (piece_a, piece_b))
    # uint64 wraps, so it holds the difference of any two integers of 64 bits.
    difference = np.maximum(x, y).astype(np.uint64) - np.minimum(x, y).astype(np.uint64)
    return float(difference.max())


def _of_floats(piece_a: Piece, piece_b: Piece, dtype: str) -> float:
    x, y = (
        _comparable(torch.frombuffer(piece.data, dtype=torch.uint8).view(getattr(torch, dtype)))
        for piece in (piece_a, piece_b)
    )
    is_same = (x == y) | (x.isnan() & y.isnan())
    difference = torch.where(is_same, 0.0, (x - y).abs())
    return float(difference.nan_to_num(nan=math.inf, posinf=math.inf).max())


def _comparable(tensor: torch.Tensor) -> torch.Tensor:
    """Return the tensor converted to complex128 or float64, since torch has no arithmetic for some
    dtypes.
    """
    return tensor.to(torch.complex128 if tensor.is_complex() else torch.float64)
