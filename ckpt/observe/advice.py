"""How often to save: the interval that loses the least training time. Pure.

With a failure every M seconds, a save that costs training C seconds, and a tier that has a step D
seconds after the call, a job that saves every T seconds loses per second

    C / T + (R + D + T / 2) / M

where R is the time from a failure until training runs again. A failure falls at any moment between
two saves with equal probability, so half an interval is repeated on average, and D with it: a step
that is not on the tier yet does not count. The loss is least at T = sqrt(2 C M), which is Young's
interval (Communications of the ACM 17 (1974), 530). Daly's higher-order terms (Future Generation
Computer Systems 22 (2006), 303) matter only if C is not small beside M, which it is here.

An interval below D is of no use: the tier would fall behind.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from itertools import pairwise
from statistics import median

from ckpt.errors import ConfigError
from ckpt.observe.history import History
from ckpt.observe.journal import OPENED, Record

DAY_SECONDS = 24 * 3600.0
_MINUTES = 1 / 60
_LEAST_SECONDS = 3600.0
"""A shorter journal says nothing about the rate of failures."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Measured:
    """What a journal says of the saves of a run. All times are medians.

    Attributes:
        stall_seconds: What a save costs the training thread.
        interval_seconds: The time between two saves; nan with fewer than two.
        durable_seconds: By tier, nearest first: from the call to the commit.
        nbytes: The bytes of the newest save, of rank 0.
        failures_per_day: How often a job began again; nan if the journal covers less than an hour.
    """

    stall_seconds: float
    interval_seconds: float
    durable_seconds: dict[str, float]
    nbytes: int
    failures_per_day: float


@dataclass(frozen=True, slots=True, kw_only=True)
class Assumed:
    """What no journal says.

    Attributes:
        failures_per_day: Of the whole job.
        restart_seconds: From a failure until training runs again, the restore included.
        drag_seconds: What training loses per save while it streams.
    """

    failures_per_day: float
    restart_seconds: float
    drag_seconds: float = 0.0


@dataclass(frozen=True, slots=True, kw_only=True)
class Advice:
    """How often to save, if a restart takes the newest step of ``tier``.

    Attributes:
        is_bound: Whether the tier is too slow for a shorter interval.
        lost_minutes: Training time that is lost per day with that interval.
        lost_minutes_now: The same with the interval of the journal; nan if it is not known.
    """

    tier: str
    durable_seconds: float
    interval_seconds: float
    is_bound: bool
    lost_minutes: float
    lost_minutes_now: float


def measured(records: Sequence[Record], history: History) -> Measured:
    """Return what ``records``, oldest first, and their history say.

    Raises:
        ConfigError: There is no save in them.
    """
    saves = sorted(history.saves.values(), key=lambda save: save.at)
    if not saves:
        raise ConfigError(
            "the journal has no save: train with CheckpointManager(..., observers=[Journal(ROOT)])"
        )
    durable: dict[str, list[float]] = {}
    for save in saves:
        for tier, arrival in save.tiers.items():
            if arrival.state == "committed" and arrival.seconds > 0:
                durable.setdefault(tier, []).append(arrival.seconds)
    gaps = [two.at - one.at for one, two in pairwise(saves)]
    starts = [record.at for record in records if record.event == OPENED]
    covered = records[-1].at - records[0].at
    return Measured(
        stall_seconds=median(save.stall_seconds for save in saves),
        interval_seconds=median(gaps) if gaps else math.nan,
        durable_seconds={tier: median(seconds) for tier, seconds in durable.items()},
        nbytes=saves[-1].nbytes,
        failures_per_day=max(0, len(starts) - 1) * DAY_SECONDS / covered
        if covered >= _LEAST_SECONDS
        else math.nan,
    )


def advise(found: Measured, assumed: Assumed) -> list[Advice]:
    """Return the best interval for each tier.

    Raises:
        ConfigError: A number is negative or not finite, or there are no failures.
    """
    _check(assumed)
    cost, now = found.stall_seconds + assumed.drag_seconds, found.interval_seconds
    best = math.sqrt(2 * cost * DAY_SECONDS / assumed.failures_per_day)
    return [
        Advice(
            tier=tier,
            durable_seconds=durable,
            interval_seconds=max(best, durable),
            is_bound=durable > best,
            lost_minutes=lost_minutes_per_day(max(best, durable), durable, cost, assumed),
            lost_minutes_now=lost_minutes_per_day(now, durable, cost, assumed)
            if now > 0
            else math.nan,
        )
        for tier, durable in found.durable_seconds.items()
    ]


def lost_minutes_per_day(
    interval_seconds: float, durable_seconds: float, cost_seconds: float, assumed: Assumed
) -> float:
    """Return the expected training time that is lost per day, by the formula above."""
    saving = DAY_SECONDS / interval_seconds * cost_seconds
    repeated = assumed.restart_seconds + durable_seconds + interval_seconds / 2
    return (saving + assumed.failures_per_day * repeated) * _MINUTES


def _check(assumed: Assumed) -> None:
    for name, value, least in (
        ("failures per day", assumed.failures_per_day, 1e-9),
        ("restart time", assumed.restart_seconds, 0.0),
        ("drag", assumed.drag_seconds, 0.0),
    ):
        if not least <= value < math.inf:
            raise ConfigError(f"{name}: {value:g} is out of bounds: give a positive number")
