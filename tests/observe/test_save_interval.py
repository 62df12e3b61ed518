"""The advised interval is the one that loses least, by the formula and in a simulation."""

from __future__ import annotations

import math
import random
from dataclasses import replace

import pytest
from hypothesis import given
from hypothesis import strategies as st

from ckpt.errors import ConfigError
from ckpt.observe.history import history_of
from ckpt.observe.journal_record import OPEN_EVENT, Record
from ckpt.observe.save_interval import (
    DAY_SECONDS,
    Assumptions,
    Measurements,
    advise,
    lost_minutes_per_day,
    measurements_of,
)

FOUND = Measurements(
    stall_seconds=2.0,
    interval_seconds=600.0,
    durable_seconds={"/nvme": 5.0, "s3://b": 900.0},
    nbytes=1 << 30,
    failures_per_day=math.nan,
)
ASSUMED = Assumptions(failures_per_day=4.0, restart_seconds=180.0, drag_seconds=1.0)


def simulated_minutes(interval: float, durable: float, cost: float, assumed: Assumptions) -> float:
    """Return the training minutes lost per day in a job that trains for 400 days."""
    draw, days = random.Random(0), 400
    trained = lost = 0.0  # seconds
    while trained + lost < days * DAY_SECONDS:
        until_failure = draw.expovariate(assumed.failures_per_day / DAY_SECONDS)
        whole, rest = divmod(until_failure, interval + cost)
        done = whole * interval + min(rest, interval)
        # the newest step that was durable when the failure came
        saves = max(0, math.floor((until_failure - durable) / (interval + cost)))
        trained += saves * interval
        lost += whole * cost + (done - saves * interval) + assumed.restart_seconds
    return lost / (trained + lost) * DAY_SECONDS / 60


@pytest.mark.parametrize("interval", [120.0, 360.0, 2000.0])
def test_the_formula_agrees_with_a_simulation(interval: float) -> None:
    formula = lost_minutes_per_day(interval, 5.0, 3.0, ASSUMED)
    assert simulated_minutes(interval, 5.0, 3.0, ASSUMED) == pytest.approx(formula, rel=0.1)


@given(
    cost=st.floats(1e-3, 60),
    failures=st.floats(1e-2, 100),
    durable=st.floats(1e-3, 1000),
    factor=st.floats(0.1, 10),
)
def test_no_other_allowed_interval_loses_less(
    cost: float, failures: float, durable: float, factor: float
) -> None:
    found = replace(FOUND, stall_seconds=cost, durable_seconds={"t": durable})
    assumed = Assumptions(failures_per_day=failures, restart_seconds=60.0)
    (best,) = advise(found, assumed)
    other = max(durable, best.interval_seconds * factor)
    assert best.lost_minutes <= lost_minutes_per_day(other, durable, cost, assumed) * (1 + 1e-9)
    assert best.is_bound == (best.interval_seconds == durable)


def test_a_slow_tier_binds_the_interval() -> None:
    near, far = advise(FOUND, ASSUMED)
    assert near.interval_seconds == pytest.approx(math.sqrt(2 * 3.0 * DAY_SECONDS / 4))
    assert (near.is_bound, far.is_bound) == (False, True)
    assert far.interval_seconds == 900.0
    assert near.lost_minutes < near.lost_minutes_now < far.lost_minutes_now


@pytest.mark.parametrize(
    "wrong",
    [
        {"failures_per_day": 0.0},
        {"failures_per_day": math.inf},
        {"restart_seconds": -1.0},
        {"drag_seconds": math.nan},
    ],
)
def test_a_number_out_of_bounds_is_refused(wrong: dict[str, float]) -> None:
    with pytest.raises(ConfigError, match="out of bounds"):
        advise(FOUND, replace(ASSUMED, **wrong))


def journal(hours: float) -> list[Record]:
    """Three jobs that save, and one that only restores."""
    end = hours * 3600
    return [
        Record(at=0.0, event=OPEN_EVENT, job="1"),
        Record(
            at=10.0, event="SaveStaged", step=1, nbytes=5, seconds=0.25, tiers=("a", "b"), job="1"
        ),
        Record(at=11.0, event="SaveCommitted", step=1, tier="a", seconds=1.0, job="1"),
        Record(at=12.0, event=OPEN_EVENT, job="2"),
        Record(at=12.0, event=OPEN_EVENT, job="evaluation"),
        Record(
            at=40.0, event="SaveStaged", step=2, nbytes=7, seconds=0.5, tiers=("a", "b"), job="2"
        ),
        Record(at=43.0, event="SaveCommitted", step=2, tier="a", seconds=3.0, job="2"),
        Record(at=44.0, event="TierMissed", step=2, tier="b", job="2"),
        Record(at=end, event=OPEN_EVENT, job="3"),
        Record(at=70.0, event="SaveStaged", step=3, nbytes=7, seconds=0.75, tiers=("a",), job="3"),
        Record(at=end, event="SaveCommitted", step=3, tier="a", job="3"),
    ]


def test_a_journal_says_what_saves_have_cost() -> None:
    records = journal(12)
    found = measurements_of(records, history_of(records))
    assert found == Measurements(
        stall_seconds=0.5,
        interval_seconds=30.0,
        durable_seconds={"a": 2.0},
        nbytes=7,
        failures_per_day=4.0,
    )


def test_a_short_journal_says_nothing_of_failures() -> None:
    records = journal(0.5)
    assert math.isnan(measurements_of(records, history_of(records)).failures_per_day)


def test_a_journal_without_a_save_is_an_error() -> None:
    with pytest.raises(ConfigError, match="no save"):
        measurements_of([Record(at=0.0, event=OPEN_EVENT)], history_of([]))
