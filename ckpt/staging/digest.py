"""Telling replicas apart that should be equal."""

from __future__ import annotations

import ctypes
from functools import cache
from typing import Any, Final

import torch

from ckpt.model.checksum import checksum

_ROW: Final = 1021


def digest(tensor: torch.Tensor) -> str:
    """Return a digest that differs for replicas that have drifted apart.

    It is no checksum of stored data. Large tensors are folded on their own device first: each row
    of words to its xor. A row has an odd number of words, so that constants do not cancel out.
    """
    whole = tensor.detach().contiguous()
    flat = whole.as_strided((whole.numel(),), (1,)).view(torch.uint8)  # one element may have any stride
    rows = flat.numel() // (8 * _ROW)
    if not rows:
        return _checksum(flat.cpu())
    if flat.storage_offset() % 8:
        flat = flat.clone()
    folded = rows * 8 * _ROW
    words = flat[:folded].view(torch.int64).view(rows, _ROW)
    xors = torch.hash_tensor(words, dim=1).view(torch.int64)
    return f"{_checksum(xors.cpu())}{_checksum(flat[folded:].cpu())}"


def exact_digest(tensor: torch.Tensor) -> str:
    """A checksum of every byte of the elements, which are read through host memory."""
    return _checksum(tensor.detach().cpu().contiguous())


def host_bytes(address: int, nbytes: int) -> Any:
    """Host memory as an object that holds bytes. ``Tensor.numpy()`` would forbid the owner of the memory to resize it."""
    return _array(nbytes).from_address(address)


def _checksum(held: torch.Tensor) -> str:
    return checksum(memoryview(host_bytes(held.data_ptr(), held.nbytes)))


@cache
def _array(nbytes: int) -> Any:
    return ctypes.c_char * nbytes
