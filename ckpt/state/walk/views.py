"""Find the tensors of a state that share a buffer with others, and their places in it."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterator, Sequence
from typing import Final

import torch

from ckpt.model.views import View, without_sparse
from ckpt.state.tensors.layout import dtype_name, is_expanded, is_plain
from ckpt.state.walk.segments import NamedTensor, Segment, is_part
from ckpt.torch_private import storage_identity

_ALIGNMENT: Final = 16  # The bytes of the largest element


def views_of(parts: Sequence[Segment | NamedTensor]) -> dict[str, View]:
    """Return the places of those tensors that share their storage with another tensor.

    Only plain tensors that a restore may have to make are looked at. A restore fills the tensors of
    a module in place, and a DTensor may have other memory there.
    """
    # Nearly every tensor is all of its storage, so that there is nothing to do.
    if not any(
        (part.is_made and part.parts_of_buffers)
        if isinstance(part, Segment)
        else is_part(part.tensor)
        for part in parts
    ):
        return {}
    by_storage: dict[int, list[tuple[str, torch.Tensor]]] = defaultdict(list)
    for name, tensor in _plain(parts):
        by_storage[storage_identity(tensor)].append((name, tensor))
    views: dict[str, View] = {}
    kinds: dict[str, tuple[str, tuple[int, ...]]] = {}
    for group in by_storage.values():
        if len(group) == 1:
            continue
        start = group[0][1].untyped_storage().data_ptr()
        base = min(tensor.data_ptr() - start for _, tensor in group) // _ALIGNMENT * _ALIGNMENT
        for name, tensor in group:
            offset = tensor.data_ptr() - start - base
            views[name] = View(group[0][0], offset, tensor.stride())
            kinds[name] = dtype_name(name, tensor.dtype), tuple(tensor.shape)
    return without_sparse(views, kinds)


def _plain(parts: Sequence[Segment | NamedTensor]) -> Iterator[tuple[str, torch.Tensor]]:
    for part in parts:
        if isinstance(part, Segment):
            items: Sequence[NamedTensor] = part.named_tensors if part.is_made else ()
        else:
            items = (part,)
        for item in items:
            tensor = item.tensor
            if (
                is_plain(tensor)
                and tensor.layout is torch.strided
                and tensor.numel()
                and not tensor.is_conj()
                and not tensor.is_neg()
                and not is_expanded(tensor)
            ):
                yield item.name, tensor
