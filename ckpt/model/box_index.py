"""Find the boxes of a list that overlap a given box, without a comparison with each of them."""

from __future__ import annotations

from bisect import bisect_left, bisect_right
from collections.abc import Sequence

import numpy as np

from ckpt.model.box import Box

_MOST_COMPARED = 16  # For fewer boxes, a comparison with each of them is faster than arrays


class BoxIndex:
    """An index of ``boxes``, which have the same number of dimensions and may overlap.

    The boxes are sorted by their start in the dimension with the most different starts. A box that
    extends further than its successors makes the search longer, but not wrong.
    """

    def __init__(self, boxes: Sequence[Box]) -> None:
        self._boxes = boxes
        self._is_sorted = len(boxes) > _MOST_COMPARED and bool(boxes[0].shape)
        if not self._is_sorted:
            return
        solid = np.array([i for i, box in enumerate(boxes) if box.numel], dtype=np.int64)
        dims = len(boxes[0].shape)
        starts = np.array([boxes[i].offsets for i in solid], dtype=np.int64).reshape(-1, dims)
        ends = starts + np.array([boxes[i].shape for i in solid], dtype=np.int64).reshape(-1, dims)
        self._dim = max(range(dims), key=lambda dim: len(np.unique(starts[:, dim])))
        order = np.argsort(starts[:, self._dim], kind="stable")
        self._numbers, self._starts, self._ends = solid[order], starts[order], ends[order]
        self._lowest: list[int] = self._starts[:, self._dim].tolist()
        # The largest end of each box and all boxes before it
        self._reach: list[int] = np.maximum.accumulate(self._ends[:, self._dim]).tolist()

    def search(self, box: Box) -> list[int]:
        """Return the indices of the boxes that have an element in common with ``box``, in
        ascending order.
        """
        if not self._is_sorted:
            return [i for i, candidate in enumerate(self._boxes) if candidate.intersect(box)]
        if not box.numel:
            return []
        start, end = np.array(box.offsets), np.array(box.offsets) + np.array(box.shape)
        near = slice(
            bisect_right(self._reach, int(start[self._dim])),
            bisect_left(self._lowest, int(end[self._dim])),
        )
        meets = ((self._starts[near] < end) & (self._ends[near] > start)).all(axis=1)
        return sorted(self._numbers[near][meets].tolist())
