"""Decide how the box of a shard is cut into chunks.

A writer chooses the length of the first chunk of each box. ``split_rows`` with that many elements
then gives all chunks, so a reader needs only the length of the first chunk. A reader always reads
whole chunks, so small chunks help if it needs only a part of a box. Large chunks need less space in
the fragments (the records of what each rank has written) and fewer calls. A box therefore
has about ``PARTS`` chunks, within bounds on their size. A *row* of a dimension is the elements that
one index of it spans.
"""

from __future__ import annotations

import math
from typing import Final

from ckpt.model.box import Box, split_rows

PARTS: Final = 32
"""The approximate number of chunks of a box, unless the bounds on their size require another.

A rank that restores a part of the box then reads at most about 1/32 of the box too much at each
end of the part.
"""
LEAST_BYTES: Final = 512 << 10
"""The approximate least size of a chunk in bytes, unless the box is smaller.

Smaller chunks increase the processor time of a restore by a third or more (docs/decisions/0015).
"""


def split_box(box: Box, itemsize: int, chunk_bytes: int) -> list[Box]:
    """Return the chunks of a box in row-major order, as boxes of at most ``chunk_bytes`` each.

    The list is empty for a box without elements.
    """
    limit = chunk_bytes // itemsize
    target = min(limit, max(LEAST_BYTES // itemsize, -(-box.numel // PARTS)))
    if target < box.numel:
        target = _whole_rows(box.shape, target, limit)
    return split_rows(box, target)


def chunk_lengths(shape: tuple[int, ...], first_length: int, *, at_most: int) -> list[int] | None:
    """Return the number of elements of each chunk of a box of ``shape`` whose first chunk has
    ``first_length`` elements. The box must have elements.

    Returns None if ``split_rows`` never gives a first chunk of that length for this shape, or if
    there would be more than ``at_most`` chunks.
    """
    if not 0 < first_length <= math.prod(shape):
        return None
    shape = shape or (1,)
    row_lengths = _row_lengths(shape)
    dim = next(dim for dim, row in enumerate(row_lengths) if row <= first_length)
    rows_per_chunk, remainder = divmod(first_length, row_lengths[dim])
    whole_count, rest = divmod(shape[dim], rows_per_chunk)
    outer_count = math.prod(shape[:dim])  # Of the indices of the dimensions before ``dim``
    if remainder or not whole_count or outer_count * (whole_count + bool(rest)) > at_most:
        return None
    last_length = [rest * row_lengths[dim]] if rest else []
    return ([first_length] * whole_count + last_length) * outer_count


def _whole_rows(shape: tuple[int, ...], target: int, limit: int) -> int:
    """Return a chunk length near ``target`` elements, and at most ``limit``, that is a whole number
    of rows.

    This is the length of one row if some dimension has rows of ``target`` to ``2 * target``
    elements. Otherwise it is the length of several rows, whose number is chosen so that the last
    chunk is not much smaller than the others.
    """
    row_lengths = _row_lengths(shape)
    larger = [row for row in row_lengths if target <= row <= min(limit, 2 * target)]
    if larger:
        return larger[-1]
    dim, row = next((dim, row) for dim, row in enumerate(row_lengths) if row <= target)
    count = min(limit // row, -(-target // row))
    chunk_count = -(-shape[dim] // count)
    return -(-shape[dim] // chunk_count) * row  # The rows are divided evenly


def _row_lengths(shape: tuple[int, ...]) -> list[int]:
    """Return for each dimension the number of elements that one index of it spans."""
    return [math.prod(shape[dim + 1 :]) for dim in range(len(shape))]
