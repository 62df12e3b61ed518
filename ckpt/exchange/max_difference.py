"""Compute the largest difference between two stored tensors."""

from __future__ import annotations

import math

import torch

from ckpt.catalog.difference import pairs
from ckpt.catalog.tensor_reader import StepReader


def max_difference(one: StepReader, two: StepReader, name: str) -> float:
    """Return the largest absolute difference between elements of the tensor ``name`` at the same
    position in two checkpoints.

    The result is inf if two elements at the same position differ, and at least one of them is
    infinite or NaN. Two NaNs count as equal. Differences are computed in float64 or complex128, so
    integers above 2**53 are rounded first. Both tensors must have the same dtype and shape.
    """
    dtype = getattr(torch, one.tensors[name].dtype)
    largest = 0.0
    for a, b in pairs(one, two, name):
        x, y = (
            _comparable(torch.frombuffer(piece.data, dtype=torch.uint8).view(dtype))
            for piece in (a, b)
        )
        same = (x == y) | (x.isnan() & y.isnan())
        far = torch.where(same, 0.0, (x - y).abs())
        found = float(far.nan_to_num(nan=math.inf, posinf=math.inf).max())
        largest = max(largest, found)
    return largest


def _comparable(tensor: torch.Tensor) -> torch.Tensor:
    """Return the tensor converted to complex128 or float64, since torch has no arithmetic for some
    dtypes.
    """
    return tensor.to(torch.complex128 if tensor.is_complex() else torch.float64)
