"""A compact description of the boxes of a tensor and of the ranks that hold them.

On a mesh, the boxes of ten thousand ranks are repetitions of one box at equal distances. A *run*
describes such boxes: it consists of one box on one rank, and of *levels* that repeat the box. Each
level repeats all boxes of the levels before it ``count`` times. With each repetition the rank grows
by a fixed number, and the offsets grow by a fixed number of elements. A mesh gives one level for
each of its dimensions. An irregular layout gives more runs, and a random layout gives one run for
each box. The description is exact, and there are never more runs than boxes.

A *layout* is the runs of one tensor. A *step* is what one repetition of a level adds to the rank or
to an offset.
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Sequence
from itertools import pairwise
from typing import Any, Final

import msgspec
import numpy as np
import numpy.typing as npt

from ckpt.model.box import Box

Ints = npt.NDArray[np.int64]

MAX_LEVELS: Final = 8
BOXES_PER_RANK: Final = 1 << 16
"""The most boxes that the runs of a tensor may describe for each rank, on average. A save refuses
more boxes on one rank. A reader refuses more because iterating over the boxes of a forged layout
could take forever.
"""


class Level(msgspec.Struct, frozen=True, array_like=True, gc=False):
    """A repetition of the boxes of the levels before it.

    The boxes occur ``count`` times, each time ``rank_step`` ranks further and with offsets that
    are larger by ``offset_steps`` elements.
    """

    count: int
    rank_step: int
    offset_steps: tuple[int, ...]


class Run(msgspec.Struct, frozen=True, array_like=True, gc=False):
    """Boxes of the same ``shape``. The first box is at ``offsets`` on ``rank``, and ``levels``
    repeat it.
    """

    rank: int
    offsets: tuple[int, ...]
    shape: tuple[int, ...]
    levels: tuple[Level, ...]

    @property
    def count(self) -> int:
        """Return the number of boxes."""
        return math.prod(level.count for level in self.levels)


Runs = tuple[Run, ...]


def compress(ranks: Ints, offsets: Ints, shapes: Ints) -> Runs:
    """Return the runs that describe a list of boxes. The same boxes give the same runs on every
    machine.

    Args:
        ranks: The rank of each box, in ascending order.
        offsets: The offsets of the boxes, one row for each box.
        shapes: The shapes of the boxes, one row for each box.
    """
    if not len(ranks):
        return ()
    keys: list[Any] = [tuple(row) for row in np.unique(shapes, axis=0).tolist()]
    key_index = np.unique(shapes, axis=0, return_inverse=True)[1].reshape(-1)
    # The rank and the offsets of each box. ``_join_rows`` joins repetitions of a box to one row.
    # The key of that row is ``(key, count, distance)`` in place of a shape.
    places = np.concatenate([ranks[:, None], offsets], axis=1)
    for _ in range(MAX_LEVELS):
        size = len(places)
        places, key_index, keys = _join_rows(places, key_index, keys)
        if len(places) == size:
            break
    runs: list[Run] = []
    for (rank, *start), index in zip(places.tolist(), key_index.tolist(), strict=True):
        key, levels = keys[index], list[Level]()
        while key and isinstance(key[0], tuple):  # Not a shape, but the key of joined rows
            key, count, (rank_step, *step) = key
            levels.insert(0, Level(count, rank_step, tuple(step)))
        runs.append(Run(rank, tuple(start), key, tuple(levels)))
    return tuple(runs)


def _join_rows(places: Ints, key_index: Ints, keys: list[Any]) -> tuple[Ints, Ints, list[Any]]:
    """Join rows that follow each other at equal distances and have the same key, which adds a
    level.

    Args:
        places: For each row its rank and its offsets.
        key_index: For each row the index of its key.
        keys: The keys. A key is a shape, or ``(key, count, distance)`` for rows that were joined.

    Returns:
        The same three values for the fewer rows that remain.
    """
    # A group is a range of rows with the same distance to their next rows.
    steps = np.diff(places, axis=0)
    has_next_key = key_index[1:] == key_index[:-1]
    begins_group = np.ones(len(steps), dtype=bool)
    if len(steps):
        begins_group[1:] = (
            (steps[1:] != steps[:-1]).any(axis=1) | ~has_next_key[1:] | ~has_next_key[:-1]
        )
    edges = [*np.flatnonzero(begins_group).tolist(), len(steps)]
    starts: list[int] = []
    joint_keys: list[tuple[Any, int, tuple[int, ...]] | None] = []
    next_row = 0  # The first row that is neither joined nor kept yet
    for edge, end in pairwise(edges):
        begin = max(edge, next_row)
        if begin >= end or not has_next_key[begin]:
            continue
        while next_row < begin:
            starts.append(next_row)
            joint_keys.append(None)
            next_row += 1
        starts.append(begin)
        joint_keys.append((keys[key_index[begin]], end - begin + 1, tuple(steps[begin].tolist())))
        next_row = end + 1
    for row in range(next_row, len(places)):
        starts.append(row)
        joint_keys.append(None)
    table: dict[Any, int] = {}
    row_keys = [
        keys[key_index[row]] if joint_key is None else joint_key
        for row, joint_key in zip(starts, joint_keys, strict=True)
    ]
    key_indices = np.array([table.setdefault(key, len(table)) for key in row_keys], dtype=np.int64)
    return places[starts], key_indices, list(table)


def boxes_of(runs: Runs, rank: int) -> Iterator[Box]:
    """Yield the boxes that ``rank`` holds.

    This is a generator because a forged run may describe more boxes than fit into memory.
    """
    for run in runs:
        levels = sorted(run.levels, key=lambda level: -abs(level.rank_step))
        yield from _boxes_at(levels, rank - run.rank, run.offsets, run.shape)


def _boxes_at(
    levels: Sequence[Level], rank_offset: int, offsets: tuple[int, ...], shape: tuple[int, ...]
) -> Iterator[Box]:
    """Yield those repetitions by ``levels`` of the box at ``offsets`` that are ``rank_offset``
    ranks after it.
    """
    if not levels:
        if rank_offset == 0:
            yield Box(offsets, shape)
        return
    level, rest = levels[0], levels[1:]
    # The other levels add at least ``low`` and at most ``high`` to the rank.
    low, high = _added_range([(inner.count, inner.rank_step) for inner in rest])
    for index in _repetitions(level.count, level.rank_step, rank_offset - high, rank_offset - low):
        next_offsets = tuple(
            start + index * step for start, step in zip(offsets, level.offset_steps, strict=True)
        )
        yield from _boxes_at(rest, rank_offset - index * level.rank_step, next_offsets, shape)


def extent(run: Run) -> Box:
    """Return the smallest box that contains all boxes of ``run``."""
    reach = [
        _added_range([(level.count, level.offset_steps[dim]) for level in run.levels])
        for dim in range(len(run.shape))
    ]
    return Box(
        tuple(start + low for start, (low, _) in zip(run.offsets, reach, strict=True)),
        tuple(n + high - low for n, (low, high) in zip(run.shape, reach, strict=True)),
    )


def ranks_meeting(runs: Sequence[Run], box: Box) -> set[int]:
    """Return the ranks that hold an element of ``box``.

    The boxes are not expanded: the time depends on the number of ranks in the result, and not on
    the number of boxes.
    """
    ranks: set[int] = set()
    if not box.numel:
        return ranks
    for run in runs:
        if all(run.shape):
            # Put the level with the largest step first. Most of its repetitions are far from
            # ``box``, so the other levels of these repetitions need not be examined.
            levels = sorted(
                run.levels, key=lambda level: tuple(-abs(step) for step in level.offset_steps)
            )
            _add_ranks(levels, run, run.rank, run.offsets, box, ranks)
    return ranks


def _add_ranks(
    levels: Sequence[Level],
    run: Run,
    rank: int,
    offsets: tuple[int, ...],
    box: Box,
    ranks: set[int],
) -> None:
    """Add to ``ranks`` the ranks of those repetitions by ``levels`` that meet ``box``. The box that
    is repeated is at ``offsets`` on ``rank``, and has the shape of ``run``.
    """
    if not levels:
        if Box(offsets, run.shape).intersect(box):
            ranks.add(rank)
        return
    if rank in ranks and not any(level.rank_step for level in levels):
        return  # More boxes of the same rank add nothing
    level, rest = levels[0], levels[1:]
    begin, last = 0, level.count - 1
    for dim, step in enumerate(level.offset_steps):
        low, high = _added_range([(inner.count, inner.offset_steps[dim]) for inner in rest])
        # The other levels move a box by ``low`` to ``high``. Keep the repetitions of this level
        # for which such a box can overlap ``box`` in this dimension.
        least = box.offsets[dim] - run.shape[dim] + 1 - high - offsets[dim]
        largest = box.offsets[dim] + box.shape[dim] - 1 - low - offsets[dim]
        indices = _repetitions(level.count, step, least, largest)
        begin, last = max(begin, indices.start), min(last, indices.stop - 1)
    for index in range(begin, last + 1):
        next_offsets = tuple(
            start + index * step for start, step in zip(offsets, level.offset_steps, strict=True)
        )
        _add_ranks(rest, run, rank + index * level.rank_step, next_offsets, box, ranks)


def _added_range(levels: Sequence[tuple[int, int]]) -> tuple[int, int]:
    """Return the smallest and the largest number that levels can add to a rank or an offset. A
    level is given as ``(count, step)``, and adds ``step`` from 0 to ``count - 1`` times.
    """
    spans = [(count - 1) * step for count, step in levels]
    return sum(min(0, span) for span in spans), sum(max(0, span) for span in spans)


def _repetitions(count: int, step: int, least: int, largest: int) -> range:
    """Return the range of all ``i`` from 0 to ``count - 1`` with
    ``least <= i * step <= largest``.
    """
    if step == 0:
        return range(count) if least <= 0 <= largest else range(0)
    if step < 0:
        step, least, largest = -step, -largest, -least
    return range(max(0, -(-least // step)), min(count - 1, largest // step) + 1)


def fault_of(runs: Runs, shape: Sequence[int], world_size: int) -> str | None:
    """Return a text that describes the first fault of runs that were read from a manifest; None if
    they are possible for a tensor of ``shape`` on ``world_size`` ranks.

    The boxes are not expanded, so this does not detect that boxes overlap.
    """
    numel = box_count = 0
    for run in runs:
        dims = (
            len(run.offsets),
            len(run.shape),
            *(len(level.offset_steps) for level in run.levels),
        )
        if len(run.levels) > MAX_LEVELS or set(dims) != {len(shape)}:
            return "a run of other dimensions"
        if any(level.count < 1 for level in run.levels) or any(n < 0 for n in run.shape):
            return "a run that counts backwards"
        if any(level.count > 1 and not any(level.offset_steps) for level in run.levels):
            return "a box that is there more than once"
        box_count += run.count
        # The levels add at least ``low`` and at most ``high``: here to a rank, below to an offset.
        low, high = _added_range([(level.count, level.rank_step) for level in run.levels])
        if run.rank + low < 0 or run.rank + high >= world_size:
            return "a run beyond the ranks of the world"
        for dim, size in enumerate(shape):
            low, high = _added_range(
                [(level.count, level.offset_steps[dim]) for level in run.levels]
            )
            if run.offsets[dim] + low < 0 or run.offsets[dim] + high + run.shape[dim] > size:
                return "a run that is not inside the shape"
        numel += run.count * math.prod(run.shape)
    if box_count > world_size * BOXES_PER_RANK:
        return f"runs of {box_count} boxes"
    total = math.prod(shape)
    return None if numel == total else f"runs hold {numel} of {total} elements"
