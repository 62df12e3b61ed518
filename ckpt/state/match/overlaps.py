"""Restore targets that share a part of their memory: a flat buffer and views of it, a matrix and
its transpose, or an expanded tensor, whose elements share memory.

If one of these targets is filled, others change. So the restore first reads the values of each
target into separate memory. It then copies them into the targets one after another, and checks that
each target has the values that were read for it.
"""

from __future__ import annotations

from collections.abc import Callable, Hashable, Sequence
from functools import partial
from operator import itemgetter
from typing import Final

import torch

from ckpt.errors import RestoreError
from ckpt.staging.image import copyable
from ckpt.state.match.targets import memory_of
from ckpt.state.tensors.layout import local
from ckpt.state.tensors.local_shards import LocalShards, Source

_SHARED_MEMORY: Final = "shares a part of its memory with another tensor of the target"
_ELEMENTS: Final = "has elements in the target that share their memory"
_WAY: Final = "give each of them memory of its own"


def read_apart(names: Sequence[str], targets: list[Source]) -> Callable[[], None] | None:
    """Replace each target in ``targets`` that ``find_overlaps`` finds by a new tensor in host
    memory.

    Return a function to call after the new tensors were read, which copies their values into the
    original targets. It raises ``RestoreError`` if the targets cannot all have their saved values.
    Return None if no target was replaced.

    Raises:
        RestoreError: Elements of a part of ``LocalShards`` share their memory.
    """
    copies: list[tuple[str, torch.Tensor, torch.Tensor]] = []
    for name, target in zip(names, targets, strict=True):
        if isinstance(target, LocalShards) and any(map(_meets_itself, target.tensors)):
            raise RestoreError(f"{name!r} {_ELEMENTS}: {_WAY}")
    for index, target in find_overlaps(targets):
        targets[index] = read = torch.empty(target.shape, dtype=target.dtype, device="cpu")
        copies.append((names[index], target, read))
    return partial(_put, copies) if copies else None


def find_overlaps(targets: Sequence[Source]) -> list[tuple[int, torch.Tensor]]:
    """Return the index and the local tensor of each target whose memory overlaps with that of
    another target, or whose own elements may share memory.

    Two targets with exactly the same memory and layout do not count as overlapping. ``LocalShards``
    are left out.
    """
    by_memory: dict[Hashable, list[tuple[int, torch.Tensor]]] = {}
    for index, target in enumerate(targets):
        if isinstance(target, torch.Tensor):
            memory = local(target)
            if memory.numel() and memory.data_ptr():  # Tensors without memory have the address 0
                by_memory.setdefault(memory_of(target), []).append((index, memory))
    groups = list(by_memory.values())
    first_ones = [memory for (_, memory), *_ in groups]
    ranges = sorted(
        (str(memory.device), *_range(memory), number) for number, memory in enumerate(first_ones)
    )
    numbers = {number for number, memory in enumerate(first_ones) if _meets_itself(memory)}
    place, end, last = "", 0, -1
    for device, start, stop, number in ranges:
        if device == place and start < end:
            numbers |= {number, last}
        if device != place or stop > end:
            place, end, last = device, stop, number
    return sorted((pair for number in numbers for pair in groups[number]), key=itemgetter(0))


def _meets_itself(memory: torch.Tensor) -> bool:
    """Return True if two elements of ``memory`` may share memory.

    The result is False if the stride of each dimension exceeds the extent of all dimensions with
    smaller strides. Otherwise it is True, even if no two elements of the tensor share memory.
    """
    if memory.is_contiguous():
        return False
    reach = 0
    for stride, length in sorted(zip(memory.stride(), memory.shape, strict=True)):
        if length > 1:
            if stride <= reach:
                return True
            reach += (length - 1) * stride
    return False


def _range(tensor: torch.Tensor) -> tuple[int, int]:
    """Return the address of the first byte of ``tensor``, and the address behind its last byte."""
    reach = sum((n - 1) * stride for n, stride in zip(tensor.shape, tensor.stride(), strict=True))
    start = tensor.data_ptr()
    return start, start + (reach + 1) * tensor.itemsize


def _put(copies: Sequence[tuple[str, torch.Tensor, torch.Tensor]]) -> None:
    """Copy the values that were read into the targets, and check after all copies that each target
    has its values.

    ``copies`` has the name of each target, the target, and the tensor with the values for it.
    """
    for _, target, read in copies:
        dtype = str(target.dtype).removeprefix("torch.")
        view = _without_repeats(copyable(target.detach(), dtype))
        view.copy_(copyable(read, dtype)[tuple(map(slice, view.shape))])
    for name, target, read in copies:
        if not torch.equal(_bytes(target), _bytes(read)):
            raise RestoreError(
                f"{name!r} {_ELEMENTS if _meets_itself(target) else _SHARED_MEMORY}, and the saved "
                "values "
                f"differ: {_WAY}. Do not train on with this state"
            )


def _without_repeats(target: torch.Tensor) -> torch.Tensor:
    """Return a view of ``target`` that has each element of an expanded dimension only once, since
    torch refuses to write to an expanded tensor.
    """
    for dim, stride in enumerate(target.stride()):
        if stride == 0 and target.shape[dim] > 1:
            target = target.narrow(dim, 0, 1)
    return target


def _bytes(tensor: torch.Tensor) -> torch.Tensor:
    plain = copyable(tensor.detach(), str(tensor.dtype).removeprefix("torch."))
    plain = plain.cpu().resolve_conj().resolve_neg().contiguous()
    return plain.reshape(-1).view(torch.uint8)
