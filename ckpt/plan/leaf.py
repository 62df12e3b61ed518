"""One tensor as one rank holds it, without the data."""

from __future__ import annotations

from dataclasses import dataclass

from ckpt.model.box import Box
from ckpt.model.dtype import DTYPES


@dataclass(frozen=True, slots=True)
class Leaf:
    """One named tensor as this rank sees it.

    Attributes:
        name: Canonical, the same on all ranks and under all wrappers.
        dtype: A key of ``model.dtype.DTYPES``.
        shape: Of the global tensor.
        boxes: What this rank holds, in the row-major order of its local tensor's pieces; usually
            one, none if its shard is empty.
        replicas: Ranks known to hold the same boxes, ascending, this one included; empty if
            unknown, then all of it is written and equal copies are found at commit.
        spare: Whether another rank answers for the boxes, and may hold something else in them. They
            are written here without being named in the fragment: their chunks serve wherever they
            equal those of that rank.
    """

    name: str
    dtype: str
    shape: tuple[int, ...]
    boxes: tuple[Box, ...]
    replicas: tuple[int, ...] = ()
    spare: bool = False

    @property
    def itemsize(self) -> int:
        """Bytes per element."""
        return DTYPES[self.dtype].itemsize

    @property
    def nbytes(self) -> int:
        """Bytes of the boxes held here."""
        return sum(box.numel for box in self.boxes) * self.itemsize
