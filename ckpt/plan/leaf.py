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
        dtype: The name of the dtype, which is a key of ``ckpt.model.dtype.DTYPES``.
        shape: The shape of the global tensor.
        boxes: The boxes that this rank holds, in the order in which its local tensor contains them.
            A tensor usually has one box, and an empty local tensor has none.
        replicas: The ranks that hold the same boxes, in ascending order and including this rank.
            If the replicas are unknown, the tuple is empty and this rank writes all of its boxes.
            If several ranks then write equal copies of a box, the manifest names one of the copies.
        spare: Whether this rank writes its boxes only as a spare copy, because another rank writes
            the boxes that the checkpoint consists of. The values of the two ranks may differ. The
            fragment does not name the spare boxes. A restore may read a chunk of a spare box in
            place of an equal chunk of the other rank.
        order: The order of the dimensions in this rank's memory (see ``model.manifest.Tensor``).
        is_frozen: Whether nothing is expected to change the tensor between two saves. It is then
            near the begin of the image.
    """

    name: str
    dtype: str
    shape: tuple[int, ...]
    boxes: tuple[Box, ...]
    replicas: tuple[int, ...] = ()
    spare: bool = False
    order: tuple[int, ...] = ()
    is_frozen: bool = False

    @property
    def itemsize(self) -> int:
        """Return the size of one element in bytes."""
        return DTYPES[self.dtype].itemsize

    @property
    def nbytes(self) -> int:
        """Return the size of all boxes of this rank together, in bytes."""
        return sum(box.numel for box in self.boxes) * self.itemsize
