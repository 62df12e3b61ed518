"""Convert NumPy arrays to tensors."""

from __future__ import annotations

from typing import Any, Final

import numpy as np
import torch

from ckpt.errors import UnsupportedValue

_SUPPORTED_CLASSES: Final = (np.ndarray, np.memmap)


def tensor_of(array: np.ndarray[Any, Any], path: str) -> torch.Tensor:
    """Return the elements of the array at ``path`` of a state as a tensor of the same shape, with
    the dimensions in the same order in memory.

    The tensor shares the memory of the array if ``is_fillable`` is True of the array. Otherwise the
    tensor has a copy of the elements.

    Raises:
        UnsupportedValue: The array has a dtype that torch lacks, or belongs to a subclass of
            ``np.ndarray`` other than ``np.memmap``.
    """
    if isinstance(array, np.ma.MaskedArray):
        raise UnsupportedValue(
            path, "masked array", "save its data and its mask as arrays of their own"
        )
    if type(array) not in _SUPPORTED_CLASSES:
        raise UnsupportedValue(
            path,
            f"NumPy array of the class {type(array).__qualname__}",
            "a restore could not make it again: save np.asarray() of it",
        )
    try:
        return torch.from_numpy(array if is_fillable(array) else array.copy(order="K"))
    except (TypeError, ValueError):
        raise UnsupportedValue(
            path, f"NumPy array of dtype {array.dtype}", "convert it to a numeric dtype"
        ) from None


def is_fillable(array: np.ndarray[Any, Any]) -> bool:
    """Return True if the array is writeable and dense: its elements lie one after another in
    memory, with the dimensions in any order.
    """
    order = sorted(range(array.ndim), key=array.strides.__getitem__, reverse=True)
    return array.flags.writeable and array.transpose(order).flags.c_contiguous
