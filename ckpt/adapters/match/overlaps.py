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

from ckpt.adapters.match.targets import memory_of
from ckpt.adapters.tensors.layout import local
from ckpt.adapters.tensors.local_shards import LocalShards, Source
from ckpt.errors import RestoreError
from ckpt.staging.image import copyable

_OTHERS: Final = "shares a part of its memory with another tensor of the target"
_ELEMENTS: Final = "has elements in the target that share their memory"
_WAY: Final = "give each of them memory of its own"


def read_apart(names: Sequence[str], targets: list[Source]) -> Callable[[], None] | None:
    """Replace each target in ``targets`` that ``overlapping`` finds by a new tensor in host memory.

    Return a function to call after the new tensors were read, which copies their values into the
    original targets. It raises ``RestoreError`` if the targets cannot all have their saved values.
    Return None if no target was replaced.

    Raises:
        RestoreError: Elements of a part of ``LocalShards`` share their memory.
    """
    shared: list[tuple[str, torch.Tensor, torch.Tensor]] = []
    for name, target in zip(names, targets, strict=True):
        if isinstance(target, LocalShards) and any(map(_meets_itself, target.tensors)):
            raise RestoreError(f"{name!r} {_ELEMENTS}: {_WAY}")
    for index, target in overlapping(targets):
        targets[index] = read = torch.empty(target.shape, dtype=target.dtype, device="cpu")
        shared.append((names[index], target, read))
    return partial(_put, shared) if shared else None


def overlapping(targets: Sequence[Source]) -> list[tuple[int, torch.Tensor]]:
    """Return the index and the local tensor of each target whose memory overlaps with that of
    another target, or whose own elements may share memory.

    Two targets with exactly the same memory and layout do not count as overlapping. ``LocalShards``
    are left out.
    """
    same: dict[Hashable, list[tuple[int, torch.Tensor]]] = {}
    for index, target in enumerate(targets):
        if isinstance(target, torch.Tensor):
            memory = local(target)
            if memory.numel() and memory.data_ptr():  # Tensors without memory have the address 0
                same.setdefault(memory_of(target), []).append((index, memory))
    alike = list(same.values())
    first_ones = [memory for (_, memory), *_ in alike]
    ranges = sorted(
        (str(memory.device), *_range(memory), known) for known, memory in enumerate(first_ones)
    )
    found = {known for known, memory in enumerate(first_ones) if _meets_itself(memory)}
    place, end, last = "", 0, -1
    for device, first, beyond, known in ranges:
        if device == place and first < end:
            found |= {known, last}
        if device != place or beyond > end:
            place, end, last = device, beyond, known
    return sorted((pair for known in found for pair in alike[known]), key=itemgetter(0))


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
    first = tensor.data_ptr()
    return first, first + (reach + 1) * tensor.itemsize


def _put(shared: Sequence[tuple[str, torch.Tensor, torch.Tensor]]) -> None:
    """Copy the values that were read into the targets, and check after all copies that each target
    has its values.

    ``shared`` has the name of each target, the target, and the tensor with the values for it.
    """
    for _, target, read in shared:
        dtype = str(target.dtype).removeprefix("torch.")
        once = _once(copyable(target.detach(), dtype))
        once.copy_(copyable(read, dtype)[tuple(map(slice, once.shape))])
    for name, target, read in shared:
        if not torch.equal(_bytes(target), _bytes(read)):
            raise RestoreError(
                f"{name!r} {_ELEMENTS if _meets_itself(target) else _OTHERS}, and the saved values "
                f"differ: {_WAY}. Do not train on with this state"
            )


def _once(target: torch.Tensor) -> torch.Tensor:
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
