"""Telling replicas apart that should be equal."""

from __future__ import annotations

import ctypes
from collections.abc import Iterable
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
    return digest_of(folded(tensor))


def folded(tensor: torch.Tensor) -> tuple[torch.Tensor, ...]:
    """Return what ``digest_of`` makes the digest of a tensor from.

    On an accelerator this only queues work: the result is memory of its own there, and the tensor
    may change behind that work. In host memory the result may be a view of the tensor.
    """
    whole = tensor.detach().contiguous()
    # A tensor of one element may have any stride.
    flat = whole.as_strided((whole.numel(),), (1,)).view(torch.uint8)
    rows = flat.numel() // (8 * _ROW)
    if not rows:
        return (_own(flat),)
    if flat.storage_offset() % 8:
        flat = flat.clone()
    end = rows * 8 * _ROW
    words = flat[:end].view(torch.int64).view(rows, _ROW)
    return torch.hash_tensor(words, dim=1).view(torch.int64), _own(flat[end:])


def digest_of(parts: Iterable[torch.Tensor]) -> str:
    """Return the digest for what ``folded`` has returned. Waits for an accelerator."""
    return "".join(_checksum(part.cpu()) for part in parts)


def _own(flat: torch.Tensor) -> torch.Tensor:
    return flat if flat.device.type == "cpu" else flat.clone()


def exact_digest(tensor: torch.Tensor) -> str:
    """Return a checksum of every byte of the elements, which are read through host memory."""
    return _checksum(tensor.detach().cpu().contiguous())


def host_bytes(address: int, nbytes: int) -> Any:
    """Return host memory as an object that holds bytes.

    ``Tensor.numpy()`` would forbid the owner of the memory to resize it.
    """
    return _array(nbytes).from_address(address)


def _checksum(held: torch.Tensor) -> str:
    return checksum(memoryview(host_bytes(held.data_ptr(), held.nbytes)))


@cache
def _array(nbytes: int) -> Any:
    return ctypes.c_char * nbytes
