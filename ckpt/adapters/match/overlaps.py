"""Targets that share a part of their memory: a flat buffer and views of it, a matrix and its
transpose.

What is read into one of them changes the others. They are therefore read apart, put into their
places one after the other, and compared with what was read.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from functools import partial
from typing import Final

import torch

from ckpt.adapters.match.targets import memory_of
from ckpt.adapters.tensors.layout import PLAIN
from ckpt.adapters.tensors.local_shards import Source
from ckpt.errors import RestoreError
from ckpt.staging.image import copyable

_WAY: Final = "give each of them memory of its own. Do not train on with this state"


def read_apart(names: Sequence[str], targets: list[Source]) -> Callable[[], None] | None:
    """Replace targets that share memory in part by memory of their own.

    Returns the action that fills the targets once this memory is read; None if there is no such
    target. The action raises ``RestoreError`` if their values cannot be had side by side.
    """
    shared: list[tuple[str, torch.Tensor, torch.Tensor]] = []
    for index, target in overlapping(targets):
        targets[index] = read = torch.empty(target.shape, dtype=target.dtype, device="cpu")
        shared.append((names[index], target, read))
    return partial(_put, shared) if shared else None


def overlapping(targets: Sequence[Source]) -> list[tuple[int, torch.Tensor]]:
    """Return the plain tensors among ``targets``, with their indices, whose memory reaches into
    that of another one. Tensors that are the same memory do not count.
    """
    plain = {
        memory_of(target): (index, target)
        for index, target in enumerate(targets)
        if type(target) in PLAIN and isinstance(target, torch.Tensor) and target.numel()
    }
    ranges = sorted(
        (str(target.device), *_range(target), index) for index, target in plain.values()
    )
    found: set[int] = set()
    place, end, last = "", 0, -1
    for device, first, beyond, index in ranges:
        if device == place and first < end:
            found |= {index, last}
        if device != place or beyond > end:
            place, end, last = device, beyond, index
    return [(index, target) for index, target in plain.values() if index in found]


def _range(tensor: torch.Tensor) -> tuple[int, int]:
    reach = sum((n - 1) * stride for n, stride in zip(tensor.shape, tensor.stride(), strict=True))
    first = tensor.data_ptr()
    return first, first + (reach + 1) * tensor.itemsize


def _put(shared: Sequence[tuple[str, torch.Tensor, torch.Tensor]]) -> None:
    for _, target, read in shared:
        dtype = str(target.dtype).removeprefix("torch.")
        copyable(target.detach(), dtype).copy_(copyable(read, dtype))
    for name, target, read in shared:
        if not torch.equal(_bytes(target), _bytes(read)):
            raise RestoreError(
                f"{name!r} shares a part of its memory with another tensor of the target, and "
                f"their saved values differ: {_WAY}"
            )


def _bytes(tensor: torch.Tensor) -> torch.Tensor:
    plain = copyable(tensor.detach(), str(tensor.dtype).removeprefix("torch."))
    plain = plain.cpu().resolve_conj().resolve_neg().contiguous()
    return plain.reshape(-1).view(torch.uint8)
