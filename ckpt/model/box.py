"""Boxes, which are rectangular regions of a tensor, and functions that compare, cut and combine
boxes without any tensor data.

All resharding uses three operations. ``Box.intersect`` returns the common region of two boxes.
``split_rows`` cuts a box into boxes that follow each other in its row-major order.
``tiling_fault`` checks that boxes cover every element of a tensor exactly once. A `BoxIndex` finds
the boxes of a list that overlap a given box, without a comparison with each of them.
"""

from __future__ import annotations

import itertools
import math
from bisect import bisect_left, bisect_right
from collections.abc import Sequence
from dataclasses import dataclass
from functools import cache

import numpy as np

_PRIMES = (2**31 - 1, 2**31 - 19)  # ``_covers_once`` computes modulo each of them
_MOST_PAIRS, _PAIRS_PER_BOX = 1 << 16, 16  # The most pairs that the search for an overlap compares
_EVEN = 1.05  # The largest accepted ratio of the largest slab to the mean slab


@dataclass(frozen=True, slots=True, order=True)
class Box:
    """A rectangular region of a tensor.

    ``offsets`` and ``shape`` are in elements, with one number for each dimension. The box of a 0-d
    tensor is ``Box((), ())``.
    """

    offsets: tuple[int, ...]
    shape: tuple[int, ...]

    @classmethod
    def whole(cls, shape: Sequence[int]) -> Box:
        """Return the box that covers a tensor of ``shape``."""
        return cls((0,) * len(shape), tuple(shape))

    @property
    def numel(self) -> int:
        return math.prod(self.shape)

    def intersect(self, box: Box) -> Box | None:
        """Return the common region of both boxes, or None if they have no common element."""
        if self == box:  # By far the most common case
            return self if self.numel else None
        offsets = tuple(map(max, self.offsets, box.offsets))
        ends = (
            min(start + n, box_start + box_n)
            for start, n, box_start, box_n in zip(
                self.offsets, self.shape, box.offsets, box.shape, strict=True
            )
        )
        shape = tuple(end - start for start, end in zip(offsets, ends, strict=True))
        return Box(offsets, shape) if all(n > 0 for n in shape) else None

    def relative_to(self, outer: Box) -> Box:
        """Return this box with offsets that count from the first element of ``outer``."""
        return Box(
            tuple(
                start - origin for start, origin in zip(self.offsets, outer.offsets, strict=True)
            ),
            self.shape,
        )

    def slices(self) -> tuple[slice, ...]:
        """Return the slices that select this box from an array of the whole tensor."""
        return tuple(
            slice(start, start + n) for start, n in zip(self.offsets, self.shape, strict=True)
        )

    def contains(self, box: Box) -> bool:
        """Return True if this box contains ``box`` completely."""
        return box.relative_to(self).is_inside(self.shape)

    def is_inside(self, shape: Sequence[int]) -> bool:
        """Return True if a tensor of ``shape`` contains this box completely."""
        return len(shape) == len(self.shape) == len(self.offsets) and all(
            start >= 0 and n >= 0 and start + n <= size
            for start, n, size in zip(self.offsets, self.shape, shape, strict=True)
        )


def split_rows(box: Box, limit: int) -> list[Box]:
    """Cut a box into boxes of at most ``limit`` elements, and return them in the row-major order of
    the box.

    Each part is therefore one contiguous range of the box's memory. A row with more than ``limit``
    elements is cut along the next dimension. The result is empty for an empty box, and contains
    only the box itself for a 0-d box.
    """
    if box.numel == 0:
        return []
    if box.numel <= limit:
        return [box]
    # ``dim`` is the first dimension whose rows have at most ``limit`` elements each. The loop goes
    # through all indices of the dimensions before ``dim``.
    dim = next(d for d in range(len(box.shape)) if math.prod(box.shape[d + 1 :]) <= limit)
    rows = max(1, limit // math.prod(box.shape[dim + 1 :]))
    parts: list[Box] = []
    for index in itertools.product(*map(range, box.shape[:dim])):
        for start in range(0, box.shape[dim], rows):
            length = min(rows, box.shape[dim] - start)
            offsets = (
                *(origin + i for origin, i in zip(box.offsets, index, strict=False)),
                box.offsets[dim] + start,
                *box.offsets[dim + 1 :],
            )
            parts.append(Box(offsets, (*(1 for _ in index), length, *box.shape[dim + 1 :])))
    return parts


def flat_start(part: Box, whole: Box) -> int | None:
    """Return the position of the first element of ``part`` in the row-major order of ``whole``,
    which must contain ``part``.

    Returns None if the elements of ``part`` are not contiguous in that order.
    """
    # From the last dimension on. Once ``part`` has only a piece of a dimension, it must have one
    # index in each dimension before it.
    start, row_length, is_whole_row = 0, 1, True
    dims = zip(part.offsets, part.shape, whole.offsets, whole.shape, strict=True)
    for offset, length, origin, size in reversed(list(dims)):
        if not is_whole_row and length != 1:
            return None
        start += (offset - origin) * row_length
        row_length *= size
        is_whole_row = is_whole_row and length == size
    return start


def split_flat(shape: Sequence[int], start: int, stop: int) -> list[Box]:
    """Return boxes that hold the elements ``start`` to ``stop`` (excluded) of a tensor of
    ``shape``, where elements are counted in row-major order.

    The boxes are in that order. For ``n`` dimensions there are at most ``2n - 1`` boxes.

    Raises:
        ValueError: The range is not within the tensor.
    """
    if not 0 <= start <= stop <= math.prod(shape):
        raise ValueError(f"elements {start} to {stop} are not in a tensor of shape {tuple(shape)}")
    parts: list[Box] = []
    while start < stop:
        # Make a box of the largest rows that begin at ``start`` and end at or before ``stop``. The
        # box has as many rows as fit before ``stop`` and remain in their dimension. From box to
        # box, the rows grow towards the middle of the range, and then shrink.
        rows = [math.prod(shape[dim:]) for dim in range(len(shape) + 1)]
        inner = next(d for d, row in enumerate(rows) if start % row == 0 and start + row <= stop)
        if inner == 0:
            return [Box.whole(shape)]
        dim, row = inner - 1, rows[inner]
        index = tuple(int(i) for i in np.unravel_index(start, tuple(shape)))
        count = min((stop - start) // row, shape[dim] - index[dim])
        parts.append(Box(index, (*(1 for _ in range(dim)), count, *shape[inner:])))
        start += count * row
    return parts


def even_slab(box: Box, count: int, index: int) -> Box | None:
    """Cut a box into ``count`` nearly equal slabs along one dimension, and return the slab number
    ``index``. Each replica writes one slab. Return None if no dimension of the box has at least
    ``count`` indices.

    The cut is along the first dimension for which the largest slab is at most 5 % larger than the
    mean, because cuts along earlier dimensions give more contiguous slabs. If there is no such
    dimension, the cut is along the one that gives the most equal slabs.
    """
    # The ratio of the largest slab to the mean slab, for each dimension that can be cut
    ratios = {d: -(-n // count) * count / n for d, n in enumerate(box.shape) if n >= count}
    if not ratios:
        return None
    dim = next((d for d in ratios if ratios[d] <= _EVEN), min(ratios, key=lambda d: (ratios[d], d)))
    start, end = (box.shape[dim] * k // count for k in (index, index + 1))
    return Box(
        (*box.offsets[:dim], box.offsets[dim] + start, *box.offsets[dim + 1 :]),
        (*box.shape[:dim], end - start, *box.shape[dim + 1 :]),
    )


def tiling_fault(shape: Sequence[int], boxes: Sequence[Box]) -> str | None:
    """Return None if the boxes cover every element of a tensor of ``shape`` exactly once, else a
    text that describes the fault.

    A box that is not inside the tensor is a fault, even if it has no elements. Other boxes without
    elements are ignored. Apart from sorting, the time grows linearly with the number
    of boxes.
    """
    for box in boxes:
        if not box.is_inside(shape):
            return f"box {box.offsets}+{box.shape} is not inside the shape {tuple(shape)}"
    nonempty = [box for box in boxes if box.numel]
    total, count = math.prod(shape), sum(box.numel for box in nonempty)
    if count == total and (len(nonempty) < 2 or _covers_once(shape, nonempty)):
        return None
    if (overlap := _find_overlap(nonempty)) is not None:
        return f"boxes overlap at {overlap}"
    return (
        f"{total - count} of {total} elements are in no box" if count < total else "boxes overlap"
    )


def _covers_once(shape: Sequence[int], boxes: Sequence[Box]) -> bool:
    """Return True if the boxes cover every element of a tensor of ``shape`` exactly once.

    The boxes must have as many elements in total as the tensor. Each edge along a dimension gets a
    random number. The value of a box is the product, over its dimensions, of the differences
    between the numbers of its two edges. If every element is covered once, the values of the boxes
    add up to the value of the whole tensor. Otherwise the two agree by chance with a probability of
    about 2**-60, for any set of boxes.
    """
    starts = np.array([box.offsets for box in boxes], dtype=np.int64)
    ends = starts + np.array([box.shape for box in boxes], dtype=np.int64)
    # Each box has a column. The last column is for the whole tensor.
    products = np.ones((len(_PRIMES), len(boxes) + 1), dtype=np.int64)
    for dim, size in enumerate(shape):
        # The lower and the upper edge of each box
        low, high = np.append(starts[:, dim], 0), np.append(ends[:, dim], size)
        if not low.any() and (high == size).all():
            continue  # Every box extends over the whole dimension
        edges, index = np.unique(np.stack([low, high]), return_inverse=True)
        low, high = index.reshape(2, -1)  # From here on, the indices of the edges
        for row, prime in zip(products, _PRIMES, strict=True):
            numbers = _generator().integers(0, prime, len(edges))
            row *= (numbers[high] - numbers[low]) % prime
            row %= prime
    return all(
        int(row[:-1].sum()) % prime == row[-1] for row, prime in zip(products, _PRIMES, strict=True)
    )


@cache
def _generator() -> np.random.Generator:
    """Return a generator that is independent of the state of NumPy's global generator. It is made
    on first use, since NumPy imports its random numbers late, too.
    """
    return np.random.default_rng()


def _find_overlap(boxes: Sequence[Box]) -> tuple[int, ...] | None:
    """Return the offsets of the common region of two boxes that overlap, for the error message.

    Returns None if no two boxes overlap, or if the search would take too long.
    """
    budget = _MOST_PAIRS + _PAIRS_PER_BOX * len(boxes)
    active: list[Box] = []  # Earlier boxes that have not ended yet along the first dimension
    for box in sorted(boxes):
        budget -= len(active)
        if budget < 0:
            return None
        active = [
            neighbour
            for neighbour in active
            if not box.shape or neighbour.offsets[0] + neighbour.shape[0] > box.offsets[0]
        ]
        for neighbour in active:
            if (common := box.intersect(neighbour)) is not None:
                return common.offsets
        active.append(box)
    return None


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
        nonempty = np.array([i for i, box in enumerate(boxes) if box.numel], dtype=np.int64)
        dims = len(boxes[0].shape)
        starts = np.array([boxes[i].offsets for i in nonempty], dtype=np.int64).reshape(-1, dims)
        ends = starts + np.array([boxes[i].shape for i in nonempty], dtype=np.int64).reshape(
            -1, dims
        )
        self._sort_dim = max(range(dims), key=lambda dim: len(np.unique(starts[:, dim])))
        order = np.argsort(starts[:, self._sort_dim], kind="stable")
        self._box_indices, self._starts, self._ends = nonempty[order], starts[order], ends[order]
        self._sorted_starts: list[int] = self._starts[:, self._sort_dim].tolist()
        # In the dimension ``_sort_dim``, the largest end of each box and all boxes before it
        self._largest_ends: list[int] = np.maximum.accumulate(
            self._ends[:, self._sort_dim]
        ).tolist()

    def search(self, box: Box) -> list[int]:
        """Return the indices of the boxes that have an element in common with ``box``, in
        ascending order.
        """
        if not self._is_sorted:
            return [i for i, other_box in enumerate(self._boxes) if other_box.intersect(box)]
        if not box.numel:
            return []
        start, end = np.array(box.offsets), np.array(box.offsets) + np.array(box.shape)
        # The boxes that begin before ``box`` ends, without the first ones, which all end before it.
        candidates = slice(
            bisect_right(self._largest_ends, int(start[self._sort_dim])),
            bisect_left(self._sorted_starts, int(end[self._sort_dim])),
        )
        overlaps_box = ((self._starts[candidates] < end) & (self._ends[candidates] > start)).all(
            axis=1
        )
        return sorted(self._box_indices[candidates][overlaps_box].tolist())
