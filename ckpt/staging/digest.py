"""Compute digests of tensors, to detect replicas that hold different values."""

from __future__ import annotations

import ctypes
from collections.abc import Iterable
from functools import cache
from typing import Any, Final

import torch

from ckpt.model.checksum import checksum

_ROW_WORDS: Final = 1021
"""The number of 64-bit words of a row, which is odd (see ``digest``)."""


def digest(tensor: torch.Tensor) -> str:
    """Return a digest of the elements of ``tensor``. Replicas with different values have different
    digests, except for rare collisions.

    The digest is not a checksum of all bytes. A large tensor is first folded on its own device:
    each row of 64-bit words is replaced by the xor of its words. A row has an odd number of words,
    so the xor of a row of equal words is that word, and not 0.
    """
    return digest_of(fold(tensor))


def fold(tensor: torch.Tensor) -> tuple[torch.Tensor, ...]:
    """Return the folded tensor, from which ``digest_of`` computes the digest.

    On an accelerator, this only queues work. The result has its own memory there, so operations
    that are queued later may change the tensor. In host memory, the result may be a view of the
    tensor.
    """
    whole = tensor.detach().contiguous()
    # A tensor of one element may have any stride.
    flat = whole.as_strided((whole.numel(),), (1,)).view(torch.uint8)
    rows = flat.numel() // (8 * _ROW_WORDS)
    if not rows:
        return (_own_memory(flat),)
    if flat.storage_offset() % 8:  # A view of 64-bit words needs an aligned address
        flat = flat.clone()
    end = rows * 8 * _ROW_WORDS
    words = flat[:end].view(torch.int64).view(rows, _ROW_WORDS)
    return torch.hash_tensor(words, dim=1).view(torch.int64), _own_memory(flat[end:])


def digest_of(parts: Iterable[torch.Tensor]) -> str:
    """Return the digest for the result of ``fold``. This waits for the work on an accelerator."""
    return "".join(_checksum(part.cpu()) for part in parts)


def _own_memory(flat: torch.Tensor) -> torch.Tensor:
    """Return a tensor on an accelerator in memory of its own. See ``fold``."""
    return flat if flat.device.type == "cpu" else flat.clone()


def exact_digest(tensor: torch.Tensor) -> str:
    """Return the checksum of all bytes of the elements. A tensor on an accelerator is first copied
    to host memory.
    """
    return _checksum(tensor.detach().cpu().contiguous())


def host_bytes(address: int, nbytes: int) -> Any:
    """Return an object with the buffer protocol for host memory, without a copy.

    ``Tensor.numpy()`` is not used. After that call, torch does not let the owner of the tensor
    resize its storage any more.
    """
    return _char_array(nbytes).from_address(address)


def _checksum(tensor: torch.Tensor) -> str:
    return checksum(memoryview(host_bytes(tensor.data_ptr(), tensor.nbytes)))


@cache
def _char_array(nbytes: int) -> Any:
    """Return the type of ctypes for ``nbytes`` bytes."""
    return ctypes.c_char * nbytes
