"""The views of buffers: tensors of a state that shared memory with other tensors when it was saved.

The bytes of each tensor are stored by themselves. A restore that makes such tensors puts the views
of one buffer into one piece of memory, so that they share it as before. A *buffer* is this memory.
In the functions here, ``kinds`` has the dtype and the shape of tensors, by name.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterable, Mapping
from typing import Final

import msgspec

from ckpt.model.dtype import DTYPES

_MOST_BUFFER_RATIO: Final = 8
"""A buffer has at most this many times the bytes of its views together, and a page more."""
_PAGE_BYTES: Final = 4096
_IMPOSSIBLE: Final = 1 << 60
"""An offset or a stride that no buffer has."""

Kinds = Mapping[str, tuple[str, tuple[int, ...]]]
"""The dtype and the shape of tensors, by name."""


class View(msgspec.Struct, frozen=True, array_like=True, gc=False):
    """The place of a tensor in a buffer.

    Attributes:
        buffer: The name of the buffer, which is that of one of its views.
        offset: The byte of the buffer at which the tensor begins.
        strides: The strides of the tensor, in elements.
    """

    buffer: str
    offset: int
    strides: tuple[int, ...]

    def end(self, dtype: str, shape: tuple[int, ...]) -> int:
        """Return the byte of the buffer behind the last byte of the tensor."""
        last = sum((n - 1) * stride for n, stride in zip(shape, self.strides, strict=True))
        return self.offset + (last + 1) * DTYPES[dtype].itemsize


def buffer_sizes(views: Mapping[str, View], kinds: Kinds) -> dict[str, int]:
    """Return the bytes of each buffer."""
    ends: dict[str, int] = defaultdict(int)
    for name, view in views.items():
        ends[view.buffer] = max(ends[view.buffer], view.end(*kinds[name]))
    return ends


def without_sparse(views: Mapping[str, View], kinds: Kinds) -> dict[str, View]:
    """Return ``views`` without those of buffers that are too large for their views.

    Memory is reserved for a whole buffer, so a restore accepts no buffer that is mostly gaps.
    """
    limits = {
        buffer: _PAGE_BYTES + _MOST_BUFFER_RATIO * nbytes
        for buffer, nbytes in _view_bytes(views, kinds).items()
    }
    sparse_buffers = {
        buffer for buffer, size in buffer_sizes(views, kinds).items() if size > limits[buffer]
    }
    return {name: view for name, view in views.items() if view.buffer not in sparse_buffers}


def views_fault(views: Mapping[str, View], kinds: Kinds) -> str:
    """Return a text that names the first fault of ``views``; empty if there is none.

    Args:
        kinds: The stored tensors.
    """
    for name, view in views.items():
        if name not in kinds:
            return f"{name[:80]!r} is a view, and is not stored"
        dtype, shape = kinds[name]
        fits = len(view.strides) == len(shape) and all(0 <= n < _IMPOSSIBLE for n in view.strides)
        if not fits or not 0 <= view.offset < _IMPOSSIBLE or view.offset % DTYPES[dtype].itemsize:
            return f"tensor {name!r} has an impossible place in a buffer"
        if not all(shape):
            return f"tensor {name!r} is a view without elements"
    if len(without_sparse(views, kinds)) != len(views):
        return "a buffer is larger than its views allow"
    return ""


def _view_bytes(views: Mapping[str, View], kinds: Kinds) -> Mapping[str, int]:
    """Return the bytes of the views of each buffer together."""
    nbytes_of: dict[str, int] = defaultdict(int)
    for name, view in views.items():
        dtype, shape = kinds[name]
        count = 1
        for length in shape:
            count *= length
        nbytes_of[view.buffer] += count * DTYPES[dtype].itemsize
    return nbytes_of


def views_of_all(parts: Iterable[Mapping[str, View]], kinds: Kinds) -> dict[str, View]:
    """Return the views of all ranks. If ranks have different views of one name or one buffer, those
    of the lowest rank count.

    Args:
        parts: The views of each rank, in the order of the ranks.
        kinds: The tensors of the manifest.
    """
    union: dict[str, View] = {}
    for views in parts:
        buffers = {view.buffer for view in union.values()}
        union |= {
            name: view
            for name, view in views.items()
            if name not in union and view.buffer not in buffers
        }
    return without_sparse({name: union[name] for name in sorted(union) if name in kinds}, kinds)
