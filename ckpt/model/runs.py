"""A short form for the boxes of a tensor and the ranks that hold them. The boxes of ten thousand
ranks of a mesh are one box that is repeated.

A *run* is a box on a rank, and *levels* that repeat it: ``count`` times, each so many ranks and so
many elements further. A mesh gives one level for each of its dimensions. An irregular layout gives
more runs, and a random one gives a run for each box. The runs always stand for the same boxes, and
there are never more runs than boxes.
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
# A tensor with more boxes, on average, is nonsense that would take forever to walk.
_BOXES_PER_RANK: Final = 1 << 16


class Level(msgspec.Struct, frozen=True, array_like=True, gc=False):
    """A repetition: ``count`` times, each ``ranks`` ranks and ``offsets`` elements further."""

    count: int
    ranks: int
    offsets: tuple[int, ...]


class Run(msgspec.Struct, frozen=True, array_like=True, gc=False):
    """Boxes of one ``shape``: the first at ``offsets`` on ``rank``, the others where ``levels``
    repeat it.
    """

    rank: int
    offsets: tuple[int, ...]
    shape: tuple[int, ...]
    levels: tuple[Level, ...]

    @property
    def count(self) -> int:
        """How many boxes."""
        return math.prod(level.count for level in self.levels)


Runs = tuple[Run, ...]


def compress(ranks: Ints, offsets: Ints, shapes: Ints) -> Runs:
    """Return the runs of boxes, which are in the order of their ranks, one a row.

    The same rows give the same runs on every machine.
    """
    if not len(ranks):
        return ()
    keys: list[Any] = [tuple(row) for row in np.unique(shapes, axis=0).tolist()]
    number = np.unique(shapes, axis=0, return_inverse=True)[1].reshape(-1)
    places = np.concatenate([ranks[:, None], offsets], axis=1)
    for _ in range(MAX_LEVELS):
        before = len(places)
        places, number, keys = _repeat(places, number, keys)
        if len(places) == before:
            break
    found: list[Run] = []
    for (rank, *first), index in zip(places.tolist(), number.tolist(), strict=True):
        key, levels = keys[index], list[Level]()
        while key and isinstance(key[0], tuple):
            key, count, (by, *step) = key
            levels.insert(0, Level(count, by, tuple(step)))
        found.append(Run(rank, tuple(first), key, tuple(levels)))
    return tuple(found)


def _repeat(places: Ints, number: Ints, keys: list[Any]) -> tuple[Ints, Ints, list[Any]]:
    """Join neighbours with one key at equal distances, on the next level.

    A key is a shape, or ``(key, count, distance)``.
    """
    steps = np.diff(places, axis=0)
    alike = number[1:] == number[:-1]
    change = np.ones(len(steps), dtype=bool)
    if len(steps):
        change[1:] = (steps[1:] != steps[:-1]).any(axis=1) | ~alike[1:] | ~alike[:-1]
    edges = [*np.flatnonzero(change).tolist(), len(steps)]
    starts: list[int] = []
    joined: list[tuple[Any, int, tuple[int, ...]] | None] = []
    free = 0  # The first row that is in no run yet
    for edge, end in pairwise(edges):
        begin = max(edge, free)
        if begin >= end or not alike[begin]:
            continue
        while free < begin:
            starts.append(free)
            joined.append(None)
            free += 1
        starts.append(begin)
        joined.append((keys[number[begin]], end - begin + 1, tuple(steps[begin].tolist())))
        free = end + 1
    for row in range(free, len(places)):
        starts.append(row)
        joined.append(None)
    table: dict[Any, int] = {}
    wanted = [
        keys[number[row]] if new is None else new for row, new in zip(starts, joined, strict=True)
    ]
    renumbered = np.array([table.setdefault(key, len(table)) for key in wanted], dtype=np.int64)
    return places[starts], renumbered, list(table)


def boxes_of(runs: Runs, rank: int) -> Iterator[Box]:
    """Yield the boxes that ``rank`` holds.

    They are not kept, since a run may claim more boxes than fit into memory.
    """
    for run in runs:
        levels = sorted(run.levels, key=lambda level: -abs(level.ranks))
        yield from _on(levels, rank - run.rank, run.offsets, run.shape)


def _on(
    levels: Sequence[Level], left: int, offsets: tuple[int, ...], shape: tuple[int, ...]
) -> Iterator[Box]:
    if not levels:
        if left == 0:
            yield Box(offsets, shape)
        return
    level, rest = levels[0], levels[1:]
    low, high = _reach([(each.count, each.ranks) for each in rest])
    for index in _steps(level.count, level.ranks, left - high, left - low):
        moved = tuple(o + index * d for o, d in zip(offsets, level.offsets, strict=True))
        yield from _on(rest, left - index * level.ranks, moved, shape)


def ranks_meeting(runs: Runs, box: Box) -> set[int]:
    """Return the ranks that hold some element of ``box``. The work is arithmetic, and grows with
    the ranks that are found only.
    """
    found: set[int] = set()
    if not box.numel:
        return found
    for run in runs:
        if all(run.shape):
            # With the coarsest step first, what it leaves out need not be examined.
            levels = sorted(
                run.levels, key=lambda level: tuple(-abs(step) for step in level.offsets)
            )
            _meet(levels, run, run.rank, run.offsets, box, found)
    return found


def _meet(
    levels: Sequence[Level],
    run: Run,
    rank: int,
    offsets: tuple[int, ...],
    box: Box,
    found: set[int],
) -> None:
    if not levels:
        if Box(offsets, run.shape).intersect(box):
            found.add(rank)
        return
    if rank in found and not any(level.ranks for level in levels):
        return  # More boxes of the same rank add nothing
    level, rest = levels[0], levels[1:]
    first, last = 0, level.count - 1
    for dim, step in enumerate(level.offsets):
        low, high = _reach([(each.count, each.offsets[dim]) for each in rest])
        # Some box of ``rest`` must begin before the end of ``box``, and end after its begin.
        least = box.offsets[dim] - run.shape[dim] + 1 - high - offsets[dim]
        most = box.offsets[dim] + box.shape[dim] - 1 - low - offsets[dim]
        near = _steps(level.count, step, least, most)
        first, last = max(first, near.start), min(last, near.stop - 1)
    for index in range(first, last + 1):
        moved = tuple(o + index * d for o, d in zip(offsets, level.offsets, strict=True))
        _meet(rest, run, rank + index * level.ranks, moved, box, found)


def _reach(levels: Sequence[tuple[int, int]]) -> tuple[int, int]:
    """Return how far the steps of runs lead, down and up."""
    far = [(count - 1) * step for count, step in levels]
    return sum(min(0, each) for each in far), sum(max(0, each) for each in far)


def _steps(count: int, step: int, least: int, most: int) -> range:
    """Return the ``i`` below ``count`` with ``least <= i * step <= most``."""
    if step == 0:
        return range(count) if least <= 0 <= most else range(0)
    if step < 0:
        step, least, most = -step, -most, -least
    return range(max(0, -(-least // step)), min(count - 1, most // step) + 1)


def fault_of(runs: Runs, shape: Sequence[int], world_size: int) -> str | None:
    """Return what is impossible about runs that were read, or None.

    Boxes may still overlap; nothing is expanded.
    """
    held = boxes = 0
    for run in runs:
        dims = (len(run.offsets), len(run.shape), *(len(level.offsets) for level in run.levels))
        if len(run.levels) > MAX_LEVELS or set(dims) != {len(shape)}:
            return "a run of other dimensions"
        if any(level.count < 1 for level in run.levels) or any(n < 0 for n in run.shape):
            return "a run that counts backwards"
        if any(level.count > 1 and not any(level.offsets) for level in run.levels):
            return "a box that is there more than once"
        boxes += run.count
        low, high = _reach([(level.count, level.ranks) for level in run.levels])
        if run.rank + low < 0 or run.rank + high >= world_size:
            return "a run beyond the ranks of the world"
        for dim, size in enumerate(shape):
            low, high = _reach([(level.count, level.offsets[dim]) for level in run.levels])
            if run.offsets[dim] + low < 0 or run.offsets[dim] + high + run.shape[dim] > size:
                return "a run that is not inside the shape"
        held += run.count * math.prod(run.shape)
    if boxes > world_size * _BOXES_PER_RANK:
        return f"runs of {boxes} boxes"
    total = math.prod(shape)
    return None if held == total else f"runs hold {held} of {total} elements"
