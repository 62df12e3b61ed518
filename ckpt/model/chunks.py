"""The cut of a box into chunks: by rows, all as long as the first chunk.

So the length of a box's first chunk tells a reader how the other chunks are cut (``split_rows``
with that many elements), and a writer may choose a length for each box. Small chunks help a reader
that wants a part of a box, since it reads whole chunks. Each chunk costs a line in the manifest and
a turn of a thread. So a box has about ``PARTS`` chunks, within bounds.
"""

from __future__ import annotations

import math
from typing import Final

from ckpt.model.box import Box, split_rows

PARTS: Final = 32
"""A cut anywhere in a box costs at most a 32nd of it."""
LEAST_BYTES: Final = 512 << 10
"""With smaller chunks, the processor time of a restore grows by a third and more
(docs/decisions/0015).
"""


def cut(box: Box, itemsize: int, chunk_bytes: int) -> list[Box]:
    """Return the chunks in which a box is written, each of at most ``chunk_bytes``.

    An empty box has no chunks.
    """
    most = chunk_bytes // itemsize
    wanted = min(most, max(LEAST_BYTES // itemsize, -(-box.numel // PARTS)))
    if wanted < box.numel:
        wanted = _whole_rows(box.shape, wanted, most)
    return split_rows(box, wanted)


def lengths_like(shape: tuple[int, ...], first: int, *, at_most: int) -> list[int] | None:
    """Return the elements of each chunk of a non-empty box whose first chunk has ``first``.

    Returns None if no cut begins in that way, or if it has more than ``at_most`` chunks.
    """
    if not 0 < first <= math.prod(shape):
        return None
    shape = shape or (1,)
    rows = _rows(shape)
    dim = next(dim for dim, row in enumerate(rows) if row <= first)
    each, left = divmod(first, rows[dim])
    whole, rest = divmod(shape[dim], each)
    outer = math.prod(shape[:dim])
    if left or not whole or outer * (whole + bool(rest)) > at_most:
        return None
    return ([first] * whole + [rest * rows[dim]] * bool(rest)) * outer


def _whole_rows(shape: tuple[int, ...], wanted: int, most: int) -> int:
    """Return about ``wanted`` elements that are whole rows, so that no chunk is much smaller than
    the others: one row of up to twice as many, or several, as many in each chunk.
    """
    rows = _rows(shape)
    larger = [row for row in rows if wanted <= row <= min(most, 2 * wanted)]
    if larger:
        return larger[-1]
    dim, row = next((dim, row) for dim, row in enumerate(rows) if row <= wanted)
    each = min(most // row, -(-wanted // row))
    return -(-shape[dim] // -(-shape[dim] // each)) * row


def _rows(shape: tuple[int, ...]) -> list[int]:
    """Return the elements of a row, for each dimension that rows could be counted along."""
    return [math.prod(shape[dim + 1 :]) for dim in range(len(shape))]
