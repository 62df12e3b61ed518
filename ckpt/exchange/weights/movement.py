"""Compute how far a stored tensor has moved from one checkpoint to another."""

from __future__ import annotations

import math
from typing import Final

import numpy as np
import torch

from ckpt.catalog.difference import piece_pairs
from ckpt.catalog.tensor_movement import Movement
from ckpt.catalog.tensor_reader import Piece, StepReader

_INTEGERS: Final = ("int", "uint", "bool")
_NOT_NUMBERS: Final = ("bits", "float4")


def movement(reader_a: StepReader, reader_b: StepReader, name: str) -> Movement | None:
    """Return how far the tensor ``name`` has moved from the first checkpoint to the second.

    The result is None if an element of the dtype is not one number (``float4_e2m1fn_x2``,
    ``bits8``). Floats are subtracted in float64 or complex128. Integers are subtracted exactly, and
    a result above 2**53 is rounded. Both tensors must have the same dtype and shape.
    """
    dtype = reader_a.tensors[name].dtype
    if dtype.startswith(_NOT_NUMBERS):
        return None
    compute = _integer_movement if dtype.startswith(_INTEGERS) else _float_movement
    return sum((compute(a, b, dtype) for a, b in piece_pairs(reader_a, reader_b, name)), Movement())


def _integer_movement(piece_a: Piece, piece_b: Piece, dtype: str) -> Movement:
    """Return how far one piece of a tensor of integers has moved."""
    values_a, values_b = (np.frombuffer(piece.data, dtype=dtype) for piece in (piece_a, piece_b))
    # uint64 wraps, so it holds the difference of any two integers of 64 bits.
    difference = np.maximum(values_a, values_b).astype(np.uint64) - np.minimum(
        values_a, values_b
    ).astype(np.uint64)
    distance, norm = (
        float(np.linalg.norm(values.astype(np.float64))) for values in (difference, values_a)
    )
    return Movement(float(difference.max()), distance, norm)


def _float_movement(piece_a: Piece, piece_b: Piece, dtype: str) -> Movement:
    """Return how far a piece of a tensor of floats has moved. NaN that stays has not moved."""
    values_a, values_b = (
        _comparable(torch.frombuffer(piece.data, dtype=torch.uint8).view(getattr(torch, dtype)))
        for piece in (piece_a, piece_b)
    )
    is_same = (values_a == values_b) | (values_a.isnan() & values_b.isnan())
    difference = torch.where(is_same, 0.0, (values_a - values_b).abs()).nan_to_num(
        nan=math.inf, posinf=math.inf
    )
    finite = torch.where(values_a.isfinite(), values_a, 0.0).abs()
    return Movement(float(difference.max()), float(difference.norm()), float(finite.norm()))


def _comparable(tensor: torch.Tensor) -> torch.Tensor:
    """Return the tensor converted to complex128 or float64, since torch has no arithmetic for some
    dtypes.
    """
    return tensor.to(torch.complex128 if tensor.is_complex() else torch.float64)
