"""Where the time of a run went, from its journal. No function does I/O.

An *interval* is a span of time, by its beginning and its end in seconds since 1970. A restore takes
the training back to the save of its step, and what was trained since then is *repeated*.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass

from ckpt.observe.history import History

Interval = tuple[float, float]
"""The begin and the end of an interval, in seconds since 1970."""


@dataclass(frozen=True, slots=True, kw_only=True)
class TimeSpent:
    """The seconds of a run, from the begin of its first job to the end of its last one.

    Attributes:
        training: The time in which jobs trained, or did something that no journal knows.
        stall: How long saves stopped the training thread.
        restore: The time of restores.
        repeats: The training after a step that a restore then went back to.
        down: The time between two jobs.
    """

    training: float = 0.0
    stall: float = 0.0
    restore: float = 0.0
    repeats: float = 0.0
    down: float = 0.0

    @property
    def total(self) -> float:
        return self.training + self.stall + self.restore + self.repeats + self.down


def time_spent(history: History, ends: Mapping[str, float]) -> TimeSpent | None:
    """Return where the time of a run went; None if no job of its journal has saved.

    Jobs that only restore, such as evaluations, do not count. A save in time that was repeated
    counts as a part of that time.

    Args:
        history: The history of the run.
        ends: When each job ended or was alive last, in seconds since 1970, by its id.
    """
    alive_intervals = _union(
        (job.start.at, max(job.start.at, ends.get(name, job.last_at)))
        for name, job in history.jobs.items()
        if job.has_saved
    )
    if not alive_intervals:
        return None
    restores: list[Interval] = []
    losses: list[Interval] = []  # From the save of a restored step to the begin of the restore
    for restore in history.job_restores:
        record = restore.record
        restores.append((record.at - record.seconds, record.at))
        save = history.saves.get(record.step)
        if save is not None and save.at < record.at - record.seconds:
            losses.append((save.at, record.at - record.seconds))
    restores = _common(_union(restores), alive_intervals)
    losses = _common(_union(losses), alive_intervals)
    repeats = _seconds(losses) - _seconds(_common(losses, restores))
    stall = sum(
        save.stall_seconds
        for save in history.saves.values()
        if not any(begin < save.at <= end for begin, end in losses)
    )
    restore_seconds, alive_seconds = _seconds(restores), _seconds(alive_intervals)
    (begin, _), (_, end) = alive_intervals[0], alive_intervals[-1]
    return TimeSpent(
        training=max(0.0, alive_seconds - restore_seconds - repeats - stall),
        stall=stall,
        restore=restore_seconds,
        repeats=repeats,
        down=end - begin - alive_seconds,
    )


def _union(intervals: Iterable[Interval]) -> list[Interval]:
    """Return disjoint intervals, in ascending order, that cover what ``intervals`` cover."""
    union: list[Interval] = []
    for begin, end in sorted(intervals):
        last_begin, last_end = union[-1] if union else (begin, -math.inf)
        if begin <= last_end:
            union[-1] = last_begin, max(last_end, end)
        else:
            union.append((begin, end))
    return union


def _common(intervals_a: Sequence[Interval], intervals_b: Sequence[Interval]) -> list[Interval]:
    """Return what two sequences of disjoint intervals have in common."""
    overlaps = (
        (max(begin_a, begin_b), min(end_a, end_b))
        for begin_a, end_a in intervals_a
        for begin_b, end_b in intervals_b
    )
    return [(begin, end) for begin, end in overlaps if begin < end]


def _seconds(intervals: Iterable[Interval]) -> float:
    return sum(end - begin for begin, end in intervals)
