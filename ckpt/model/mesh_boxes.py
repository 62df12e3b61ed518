"""Compute the boxes of a sharded tensor that one rank of a device mesh holds.

A tensor dimension may be cut more than once, and each cut divides the indices that the cuts before
it have kept. The indices that are kept of a dimension are therefore a list of runs, and the boxes
of the tensor are the products of the runs of all its dimensions.
"""

from __future__ import annotations

import itertools
from collections.abc import Iterable, Sequence
from dataclasses import dataclass

from ckpt.model.box import Box

Run = tuple[int, int]
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
    runs_by_dim: list[list[Run]] = [[(0, size)] for size in shape]
    for cut in cuts:
        runs_by_dim[cut.dim] = _apply_cut(runs_by_dim[cut.dim], cut)
    boxes = [
        Box(tuple(start for start, _ in runs), tuple(n for _, n in runs))
        for runs in itertools.product(*runs_by_dim)
    ]
    return [box for box in boxes if box.numel or not all(shape)]


def local_regions(boxes: Sequence[Box]) -> list[Box]:
    """Return the region of the local tensor that holds each box. ``boxes`` is a result of
    ``cut_boxes``, and the regions are in the same order.
    """
    starts: list[dict[int, int]] = []  # For each dimension: the start of a run -> its local start
    for runs in zip(*(zip(box.offsets, box.shape, strict=True) for box in boxes), strict=True):
        lengths = dict(sorted(runs))
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


def _apply_cut(runs: Sequence[Run], cut: Cut) -> list[Run]:
    """Return the runs that ``cut`` keeps of the indices of ``runs``. If it keeps none, return one
    run of no indices.
    """
    selection: list[Run] = []
    for piece in range(cut.pieces):
        piece_start, count = _part_of_run((0, sum(n for _, n in runs)), cut.pieces, piece)
        for start, n in _select(runs, _part_of_run((piece_start, count), cut.parts, cut.index)):
            if selection and sum(selection[-1]) == start:  # The last run ends where this one begins
                last_start, last_n = selection[-1]
                selection[-1] = (last_start, last_n + n)
            else:
                selection.append((start, n))
    return selection or [(sum(runs[-1]), 0)]


def _part_of_run(run: Run, count: int, index: int) -> Run:
    """Return the part number ``index`` of ``count`` parts of a run, as `Cut` describes them."""
    start, n = run
    size = -(-n // count)
    offset = min(n, size * index)
    return start + offset, min(size, n - offset)


def _select(runs: Iterable[Run], positions: Run) -> Iterable[Run]:
    """Yield runs of the indices at ``positions`` in the list of all indices of ``runs``."""
    begin, count = positions
    position = 0  # That of the first index of the next run
    for start, n in runs:
        low, high = max(begin, position), min(begin + count, position + n)
        if low < high:
            yield start + low - position, high - low
        position += n
