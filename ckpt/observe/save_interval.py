"""Compute how often to save, so that a run loses the least training time. No function does I/O.

Let a failure happen every M seconds, let a save cost the training C seconds, and let a tier have a
step D seconds after the call of the save. A job that saves every T seconds then loses

    C / T + (R + D + T / 2) / M

seconds per second, where R is the time from a failure until training runs again. A failure happens
at any moment between two saves with equal probability, so training repeats half an interval on
average. It also repeats D, because a restart cannot use a step that is not on the tier yet. The
loss is least at T = sqrt(2 C M), which is Young's interval (Communications of the ACM 17 (1974),
530). Daly's higher-order terms (Future Generation Computer Systems 22 (2006), 303) matter only if C
is not much smaller than M. Here C is much smaller, so they are left out.

No interval shorter than D is advised, because the tier would fall behind.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from itertools import pairwise
from statistics import median

from ckpt.errors import ConfigError
from ckpt.observe.history import History
from ckpt.observe.journal_record import Record

DAY_SECONDS = 24 * 3600.0
_MINUTES_PER_SECOND = 1 / 60
_LEAST_JOURNAL_SECONDS = 3600.0
"""The time that a journal must cover before a rate of failures is computed from it."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Measurements:
    """The measurements of the saves of a run, from its journal. All times are medians.

    Attributes:
        stall_seconds: How long a save stops the training thread.
        interval_seconds: The time between two saves; nan if there are fewer than two saves.
        durable_seconds: The time from the call of a save to its commit on a tier, by the URL of the
            tier. A tier without a commit is left out.
        nbytes: The bytes that rank 0 staged for the newest save.
        failures_per_day: How often per day a job began again after the first one; nan if the
            journal covers less than an hour.
    """

    stall_seconds: float
    interval_seconds: float
    durable_seconds: dict[str, float]
    nbytes: int
    failures_per_day: float


@dataclass(frozen=True, slots=True, kw_only=True)
class Assumptions:
    """The inputs of `advise` that are not measured from a journal.

    Attributes:
        failures_per_day: How often the whole job fails per day.
        restart_seconds: The time from a failure until training runs again, including the restore.
        drag_seconds: How much training time a save costs while its data streams to the tiers,
            beside the stall.
    """

    failures_per_day: float
    restart_seconds: float
    drag_seconds: float = 0.0


@dataclass(frozen=True, slots=True, kw_only=True)
class Advice:
    """How often to save if a restart takes the newest step of ``tier``.

    Attributes:
        tier: The URL of the tier.
        durable_seconds: The time from the call of a save to its commit on the tier.
        interval_seconds: The advised time between two saves.
        is_bound: Whether ``interval_seconds`` equals ``durable_seconds``, because the tier is too
            slow for the interval with the least loss.
        lost_minutes: How many minutes of training are lost per day with ``interval_seconds``.
        lost_minutes_now: How many minutes of training are lost per day with the measured interval;
            nan if that interval is not known.
    """

    tier: str
    durable_seconds: float
    interval_seconds: float
    is_bound: bool
    lost_minutes: float
    lost_minutes_now: float


def measurements_of(records: Sequence[Record], history: History) -> Measurements:
    """Return the measurements from the records of a journal, oldest first, and their history.

    Raises:
        ConfigError: ``history`` has no save.
    """
    saves = sorted(history.saves.values(), key=lambda save: save.at)
    if not saves:
        raise ConfigError("the journal has no save: train without journal=False first")
    seconds_by_tier: dict[str, list[float]] = {}
    for save in saves:
        for tier, arrival in save.tiers.items():
            if arrival.state == "committed" and arrival.seconds > 0:
                seconds_by_tier.setdefault(tier, []).append(arrival.seconds)
    gaps = [successor.at - save.at for save, successor in pairwise(saves)]
    saving_jobs = [job for job in history.jobs.values() if job.has_saved]
    journal_seconds = records[-1].at - records[0].at
    return Measurements(
        stall_seconds=median(save.stall_seconds for save in saves),
        interval_seconds=median(gaps) if gaps else math.nan,
        durable_seconds={tier: median(seconds) for tier, seconds in seconds_by_tier.items()},
        nbytes=saves[-1].nbytes,
        failures_per_day=max(0, len(saving_jobs) - 1) * DAY_SECONDS / journal_seconds
        if journal_seconds >= _LEAST_JOURNAL_SECONDS
        else math.nan,
    )


def advise(measurements: Measurements, assumptions: Assumptions) -> list[Advice]:
    """Return how often to save, for each tier whose time until a commit was measured.

    Args:
        measurements: What the journal of the job has recorded.
        assumptions: The numbers that the user assumes, such as the failures per day.

    Raises:
        ConfigError: A number of ``assumptions`` is negative or not finite, or
            ``assumptions.failures_per_day`` is 0.
    """
    _check_assumptions(assumptions)
    cost_seconds, current_interval_seconds = (
        measurements.stall_seconds + assumptions.drag_seconds,
        measurements.interval_seconds,
    )
    best_seconds = math.sqrt(2 * cost_seconds * DAY_SECONDS / assumptions.failures_per_day)
    return [
        Advice(
            tier=tier,
            durable_seconds=durable_seconds,
            interval_seconds=max(best_seconds, durable_seconds),
            is_bound=durable_seconds > best_seconds,
            lost_minutes=lost_minutes_per_day(
                max(best_seconds, durable_seconds), durable_seconds, cost_seconds, assumptions
            ),
            lost_minutes_now=lost_minutes_per_day(
                current_interval_seconds, durable_seconds, cost_seconds, assumptions
            )
            if current_interval_seconds > 0
            else math.nan,
        )
        for tier, durable_seconds in measurements.durable_seconds.items()
    ]


def lost_minutes_per_day(
    interval_seconds: float, durable_seconds: float, cost_seconds: float, assumptions: Assumptions
) -> float:
    """Return how many minutes of training are lost per day, by the formula in the docstring of
    this module.
    """
    saving_seconds = DAY_SECONDS / interval_seconds * cost_seconds
    repeated_seconds = assumptions.restart_seconds + durable_seconds + interval_seconds / 2
    return (saving_seconds + assumptions.failures_per_day * repeated_seconds) * _MINUTES_PER_SECOND


def _check_assumptions(assumptions: Assumptions) -> None:
    for name, value, least in (
        ("failures per day", assumptions.failures_per_day, 1e-9),
        ("restart time", assumptions.restart_seconds, 0.0),
        ("drag", assumptions.drag_seconds, 0.0),
    ):
        if not least <= value < math.inf:
            range_text = "above 0" if least else "of at least 0"
            raise ConfigError(f"{name}: {value:g} is out of bounds: give a number {range_text}")
