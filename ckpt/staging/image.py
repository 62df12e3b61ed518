"""A save plan laid over a slot: typed views for every item, so that copying to a view is
serializing.
"""

from __future__ import annotations

import itertools
from collections.abc import Sequence
from typing import Final, NamedTuple

import torch

from ckpt.plan.leaf import Leaf
from ckpt.plan.save import SavePlan
from ckpt.staging.copies import PIECE_BYTES
from ckpt.staging.slot import Slot
from ckpt.staging.window import Window

# torch cannot copy or index these dtypes, but it can do so under another dtype of the same size.
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
    """Return the tensor under a dtype that torch can copy bit for bit. It shares the memory."""
    stand_in = _AS_INTEGERS.get(dtype)
    return tensor.view(stand_in) if stand_in is not None else tensor


def over(memory: torch.Tensor, dtype: str, shape: Sequence[int]) -> torch.Tensor:
    """Return bytes (1-D uint8, contiguous) as a tensor of ``dtype`` that torch can copy to and
    from.
    """
    stand_in = _AS_INTEGERS.get(dtype) or getattr(torch, dtype)
    return memory.view(stand_in).view(tuple(shape))


class Target(NamedTuple):
    """A place for one item, or for a part of its flattened elements, that ends at byte ``end``
    of the image.
    """

    view: torch.Tensor
    end: int
    part: slice | None


class Image:
    """The places of a plan's items in one slot, built once per slot and plan.

    A slot smaller than the image is a ring: byte ``o`` is at ``o % capacity``.
    """

    def __init__(self, plan: SavePlan, leaves: Sequence[Leaf], slot: Slot) -> None:
        self.plan, self.slot = plan, slot
        self._leaves = leaves
        self._typed: dict[str, torch.Tensor] = {}
        self._ring = plan.size > slot.capacity

    def window(self) -> Window:
        """Return a new image in the slot, which holds its header only."""
        header = self.plan.header
        self.slot.view[: len(header)] = header
        memory = self.slot.view if self._ring else self.slot.view[: self.plan.size]
        return Window(memory, self.plan.size, self.slot.path)

    def targets(self, index: int, *, flat: bool) -> list[Target]:
        """Return the places of item ``index`` of the plan.

        A large item with a contiguous source (``flat``), and an item that crosses the end of a
        ring, have several places; others have one.
        """
        item, leaf = self.plan.items[index], self._leaves[self.plan.items[index].leaf]
        start, end = item.offset, item.offset + item.nbytes
        cuts: Sequence[int] = ()
        if self._ring or (flat and item.nbytes > PIECE_BYTES):
            cuts = range(-(-(start + 1) // PIECE_BYTES) * PIECE_BYTES, end, PIECE_BYTES)
        if not cuts:
            return [Target(self._view(start, leaf, item.box.shape), end, None)]
        return [
            Target(
                self._view(a, leaf, ((b - a) // leaf.itemsize,)),
                b,
                slice((a - start) // leaf.itemsize, (b - start) // leaf.itemsize),
            )
            for a, b in itertools.pairwise([start, *cuts, end])
        ]

    def _view(self, start: int, leaf: Leaf, shape: tuple[int, ...]) -> torch.Tensor:
        typed = self._typed.get(leaf.dtype)
        if typed is None:
            memory = self.slot.tensor
            typed = self._typed[leaf.dtype] = over(
                memory, leaf.dtype, [len(memory) // leaf.itemsize]
            )
        strides = [1]
        for length in reversed(shape[1:]):
            strides.insert(0, strides[0] * max(1, length))
        at = start % self.slot.capacity // leaf.itemsize
        # One call instead of three saves time, since there are thousands of tensors.
        return typed.as_strided(shape, strides[: len(shape)], at)
