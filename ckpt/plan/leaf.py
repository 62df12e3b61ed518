"""The description of one tensor as one rank holds it, without the data."""

from __future__ import annotations

from dataclasses import dataclass

from ckpt.model.box import Box
from ckpt.model.dtype import DTYPES


@dataclass(frozen=True, slots=True)
class Leaf:
    """One named tensor as this rank holds it.

    Attributes:
        name: The canonical name, which is the same on all ranks and under all wrappers.
        dtype: A key of ``model.dtype.DTYPES``.
        shape: The shape of the global tensor.
        boxes: The boxes that this rank holds, in the order in which its local tensor contains them.
            Usually there is one; there is none if the local tensor is empty.
        replicas: The ranks that are known to hold the same boxes, in ascending order and including
            this rank. It is empty if they are not known. Then this rank writes all of its boxes,
            and the commit keeps one of several equal copies.
        spare: Whether this rank writes its boxes only as a spare copy, because another rank writes
            the boxes that the checkpoint consists of. Values may differ between the two. The
            fragment does not name the spare boxes. A restore may read a chunk of them in place of
            an equal chunk of the other rank.
    """

    name: str
    dtype: str
    shape: tuple[int, ...]
    boxes: tuple[Box, ...]
    replicas: tuple[int, ...] = ()
    spare: bool = False

    @property
    def itemsize(self) -> int:
        """Return the bytes of one element."""
        return DTYPES[self.dtype].itemsize

    @property
    def nbytes(self) -> int:
        """Return the bytes of all boxes of this rank together."""
        return sum(box.numel for box in self.boxes) * self.itemsize
