"""Compute the boxes of a sharded tensor that one rank of a device mesh holds.

A tensor dimension may be cut more than once, and each cut divides the indices that the cuts before
it have kept. The indices that are kept of a dimension are therefore a list of spans, and the boxes
of the tensor are the products of the spans of all its dimensions.
"""

from __future__ import annotations

import itertools
from collections.abc import Iterable, Sequence
from dataclasses import dataclass

from ckpt.model.box import Box

Span = tuple[int, int]
"""Consecutive indices of a dimension: the first index, and the number of indices."""


@dataclass(frozen=True, slots=True)
class Cut:
    """The effect of one mesh dimension on the tensor dimension ``dim``.

    The tensor dimension is divided into ``pieces`` pieces, and each piece into ``parts`` parts. The
    rank keeps part number ``index`` of each piece. As in ``torch.chunk``, a division of ``n``
    indices by ``count`` gives each part ``ceil(n / count)`` indices, and the last parts fewer or
    none.
    """

    dim: int
    parts: int
    index: int
    pieces: int = 1


def cut_boxes(shape: Sequence[int], cuts: Iterable[Cut]) -> list[Box]:
    """Return the boxes that ``cuts`` keep of a tensor of ``shape``, in ascending order.

    The local tensor consists of these boxes, in this order along every dimension. The list is empty
    if the cuts keep no element of a tensor that has elements.
    """
    spans_by_dim: list[list[Span]] = [[(0, size)] for size in shape]
    for cut in cuts:
        spans_by_dim[cut.dim] = _apply_cut(spans_by_dim[cut.dim], cut)
    boxes = [
        Box(tuple(start for start, _ in spans), tuple(length for _, length in spans))
        for spans in itertools.product(*spans_by_dim)
    ]
    return [box for box in boxes if box.numel or not all(shape)]


def local_regions(boxes: Sequence[Box]) -> list[Box]:
    """Return the region of the local tensor that holds each box. ``boxes`` is a result of
    ``cut_boxes``, and the regions are in the same order.
    """
    starts: list[dict[int, int]] = []  # For each dimension: the start of a span -> its local start
    for spans in zip(*(zip(box.offsets, box.shape, strict=True) for box in boxes), strict=True):
        lengths = dict(sorted(spans))
        local_offsets = itertools.accumulate(lengths.values(), initial=0)  # And the local length
        starts.append(dict(zip(lengths, local_offsets, strict=False)))
    return [
        Box(
            tuple(
                local_starts[offset]
                for local_starts, offset in zip(starts, box.offsets, strict=True)
            ),
            box.shape,
        )
        for box in boxes
    ]


def _apply_cut(spans: Sequence[Span], cut: Cut) -> list[Span]:
    """Return the spans that ``cut`` keeps of the indices of ``spans``. If it keeps none, return one
    span of no indices.
    """
    selection: list[Span] = []
    for piece in range(cut.pieces):
        piece_start, count = _part_of_span(
            (0, sum(length for _, length in spans)), cut.pieces, piece
        )
        for start, length in _select(
            spans, _part_of_span((piece_start, count), cut.parts, cut.index)
        ):
            # If the last span ends where this one begins, the two become one.
            if selection and sum(selection[-1]) == start:
                last_start, last_length = selection[-1]
                selection[-1] = (last_start, last_length + length)
            else:
                selection.append((start, length))
    return selection or [(sum(spans[-1]), 0)]


def _part_of_span(span: Span, count: int, index: int) -> Span:
    """Return the part number ``index`` of ``count`` parts of a span, as `Cut` describes them."""
    start, length = span
    size = -(-length // count)
    offset = min(length, size * index)
    return start + offset, min(size, length - offset)


def _select(spans: Iterable[Span], positions: Span) -> Iterable[Span]:
    """Yield spans of the indices at ``positions`` in the list of all indices of ``spans``."""
    begin, count = positions
    position = 0  # That of the first index of the next span
    for start, length in spans:
        low, high = max(begin, position), min(begin + count, position + length)
        if low < high:
            yield start + low - position, high - low
        position += length
