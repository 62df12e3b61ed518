"""A save plan laid over a slot: one typed view per item, so that copying to a view is serializing."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Final

import torch

from ckpt.plan.leaf import Leaf
from ckpt.plan.save import SavePlan
from ckpt.staging.slots import Slot

# torch cannot copy or index these; the same bytes under another name it can
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
    """The tensor under a dtype that torch can copy bit for bit; shares memory."""
    stand_in = _AS_INTEGERS.get(dtype)
    return tensor.view(stand_in) if stand_in is not None else tensor


def over(memory: torch.Tensor, dtype: str, shape: Sequence[int]) -> torch.Tensor:
    """Bytes (1-D uint8, contiguous) seen as a tensor of ``dtype`` that torch can copy to and from."""
    stand_in = _AS_INTEGERS.get(dtype) or getattr(torch, dtype)
    return memory.view(stand_in).view(tuple(shape))


class Image:
    """The destination views of a plan in one slot, in the order of ``plan.items``. Built once per slot and plan."""

    def __init__(self, plan: SavePlan, leaves: Sequence[Leaf], slot: Slot) -> None:
        self.plan, self.slot = plan, slot
        slot.view[: len(plan.header)] = plan.header
        self.views = [
            over(
                slot.tensor[item.offset : item.offset + item.nbytes], leaves[item.leaf].dtype, item.box.shape
            )
            for item in plan.items
        ]

    @property
    def bytes(self) -> memoryview:
        """The file."""
        return self.slot.view[: self.plan.size]
