"""Map the boxes of a save plan to views of a slot, each with the dtype and shape of its box.

A copy of a tensor to its view writes the bytes to their final positions in the rank's file.

An *item* of the plan is one box, a region of a tensor, which is a *leaf* of the state. A *slot* is
a reusable buffer for images. An image that is larger than its slot, a *ring*, passes through it *in
waves*, divided into *pieces* of equal size.
"""

from __future__ import annotations

import itertools
from collections.abc import Sequence
from typing import Final, NamedTuple

import torch

from ckpt.plan.leaf import Leaf
from ckpt.plan.save import SavePlan
from ckpt.staging.copies import PIECE_BYTES
from ckpt.staging.ring import Ring
from ckpt.staging.slot import Slot, capacity_of

# torch cannot copy or index tensors of these dtypes, so such a tensor is viewed as another dtype of
# the same size.
_AS_INTEGERS: Final[dict[str, torch.dtype]] = {
    "float8_e8m0fnu": torch.uint8,
    "float4_e2m1fn_x2": torch.uint8,
    "bits8": torch.uint8,
    "bits1x8": torch.uint8,
    "bits2x4": torch.uint8,
    "bits4x2": torch.uint8,
    "bits16": torch.int16,
}


def copyable(tensor: torch.Tensor, dtype: str) -> torch.Tensor:
    """Return a view of ``tensor`` with a dtype that torch can copy without changing a bit.

    ``dtype`` is the name of the dtype of ``tensor``. The result is ``tensor`` itself if torch can
    copy it.
    """
    stand_in = _AS_INTEGERS.get(dtype)
    return tensor.view(stand_in) if stand_in is not None else tensor


def view_as(memory: torch.Tensor, dtype: str, shape: Sequence[int]) -> torch.Tensor:
    """Return a view of ``memory`` (1-D, uint8, contiguous) as a tensor of ``shape`` and ``dtype``,
    or of another dtype of the same size if torch cannot copy tensors of ``dtype``.
    """
    stand_in = _AS_INTEGERS.get(dtype) or getattr(torch, dtype)
    return memory.view(stand_in).view(tuple(shape))


class Target(NamedTuple):
    """A place in the image for one planned box, or for a part of it.

    Attributes:
        view: The place, as a tensor. If the image passes through a ring, the tensor has no memory
            (it is on the device "meta"), and each save finds its memory with ``Window.place``.
        end: The offset in the image at which the place ends, in bytes.
        part: The range of elements of the flattened box that belong into the place; None for all.
    """

    view: torch.Tensor
    end: int
    part: slice | None


class Image:
    """The places of the boxes of a save plan in one slot. There is one object for each pair of slot
    and plan.

    If the slot is smaller than the image, the slot is a `Ring`. The image then has its pieces in
    other frames in each save.

    ``_views`` has the whole memory as a tensor of each dtype. ``_is_in_waves`` says whether the
    slot is a ring for this image, and ``_piece_bytes`` is the size of its pieces, or else of the
    parts of a large item.
    """

    def __init__(self, plan: SavePlan, leaves: Sequence[Leaf], slot: Slot) -> None:
        self.plan, self.slot = plan, slot
        self._leaves = leaves
        self._views: dict[str, torch.Tensor] = {}
        self._is_in_waves = plan.size > slot.capacity
        self._piece_bytes = slot.spill.frame_bytes if isinstance(slot, Ring) else PIECE_BYTES

    def targets(self, index: int, *, flat: bool) -> list[Target]:
        """Return the places for item ``index`` of the plan.

        A large item with a contiguous source has several places. In a ring, any item that crosses
        the end of a piece also has several places. Any other item has one place.

        Args:
            index: The index of the item in ``SavePlan.items``.
            flat: Whether the source of the item is contiguous.
        """
        item, leaf = self.plan.items[index], self._leaves[self.plan.items[index].leaf]
        start, end = item.offset, item.offset + item.nbytes
        cuts: Sequence[int] = ()
        piece_bytes = self._piece_bytes
        if self._is_in_waves or (flat and item.nbytes > piece_bytes):
            # The ends of pieces within the item
            cuts = range(-(-(start + 1) // piece_bytes) * piece_bytes, end, piece_bytes)
        if not cuts:
            return [Target(self._view(start, leaf, item.box.shape), end, None)]
        return [
            Target(
                self._view(part_start, leaf, ((part_end - part_start) // leaf.itemsize,)),
                part_end,
                slice((part_start - start) // leaf.itemsize, (part_end - start) // leaf.itemsize),
            )
            for part_start, part_end in itertools.pairwise([start, *cuts, end])
        ]

    def _view(self, start: int, leaf: Leaf, shape: tuple[int, ...]) -> torch.Tensor:
        """Return the place at ``start`` as a tensor of ``shape`` with the dtype of ``leaf``."""
        view = self._views.get(leaf.dtype)
        if view is None:
            memory = self.slot.tensor
            if self._is_in_waves:
                memory = torch.empty(capacity_of(self.plan.size), dtype=torch.uint8, device="meta")
            view = self._views[leaf.dtype] = view_as(
                memory, leaf.dtype, [len(memory) // leaf.itemsize]
            )
        strides = [1]
        for length in reversed(shape[1:]):
            strides.insert(0, strides[0] * max(1, length))
        # This single call is faster than slicing and two views, and there are thousands of tensors.
        return view.as_strided(shape, strides[: len(shape)], start // leaf.itemsize)
