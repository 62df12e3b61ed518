"""The history of a run as rows of a table, one for each step: ``OpenCheckpoint.history``.

A *listing* is an attempt at a step as a tier lists it now. A save is what a journal says of a step.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from datetime import UTC, datetime
from typing import Any, Final, NamedTuple

from ckpt.catalog.inventory import StoredStep
from ckpt.observe.history import Arrival, History, SavedStep

_COLUMNS: Final = (
    "step",
    "saved_at",
    "state",
    "abandoned",
    "nbytes",
    "stall_seconds",
    "durable_seconds",
)


class StepFacts(NamedTuple):
    """What is known of a step, whether a tier lists it or only a journal has its save.

    Attributes:
        moment: When it was saved, in seconds since 1970; 0 if that is not known.
        nbytes: Its bytes before any codec.
        metrics: Its metrics by name.
    """

    moment: float
    nbytes: int
    metrics: Mapping[str, float]


def facts_of(listing: StoredStep | None, save: SavedStep | None) -> StepFacts:
    """Return what ``listing``, a step of a tier, and ``save``, its save in a journal, say. The
    listing counts first.
    """
    moment, nbytes = (save.at, save.nbytes) if save else (0.0, 0)
    if listing is not None:
        moment, nbytes = listing.created_at or moment, listing.staged_bytes or listing.nbytes
    metrics = {**(save.metrics if save else {}), **(listing.metrics if listing else {})}
    return StepFacts(moment, nbytes, metrics)


def step_rows(url: str, steps: Sequence[StoredStep], history: History) -> list[dict[str, Any]]:
    """Return a row for each step that a tier has or had, in ascending order of the steps.

    A row has the columns "step", "saved_at" (a datetime in UTC, or None), "state" (as the page of
    ``ckpt serve`` names it, such as "committed", "removed", "missed" or "failed"), "abandoned" (a
    bool: whether the run has gone back to an earlier step), "nbytes", "stall_seconds",
    "durable_seconds" (None if they are not known), and one for each metric. A metric whose name is
    that of another column has "metric " before its name.

    Of several attempts at a step, the row is that of the checkpoint on the current branch, or else
    of the youngest checkpoint.

    Args:
        url: The URL of the tier.
        steps: The attempts at steps on the tier.
        history: The history of the run.
    """
    listings: dict[int, StoredStep] = {}
    youngest: dict[int, StoredStep] = {}
    for step in sorted(steps, key=time_of):
        youngest[step.ref.step] = step
    for step in sorted(steps, key=_precedence):  # The last one counts
        listings[step.ref.step] = step
    failures = {record.step: record for record in history.failures}
    rows: list[dict[str, Any]] = []
    for number in sorted({*listings, *history.saves, *failures}):
        listing, save = listings.get(number), history.saves.get(number)
        if listing is not youngest.get(number):
            save = None  # A journal does not name attempts, so its save is the youngest attempt
        arrival = save.tiers.get(url, Arrival()) if save else Arrival()  # On this tier
        if listing is None and save is None:
            rows.append(_row(number, failures[number].at, "failed", 0, None, {}))
            continue
        facts, state = facts_of(listing, save), _state(url, listing, save)
        row = _row(number, facts.moment, state, facts.nbytes, save, facts.metrics)
        row["abandoned"] = (
            listing.is_abandoned if listing else save is not None and save.is_abandoned
        )
        row["durable_seconds"] = arrival.seconds or None
        rows.append(row)
    return rows


def time_of(step: StoredStep) -> float:
    """Return when an attempt was made, in seconds since 1970; infinity if that is not known."""
    return step.created_at or step.last_change or math.inf


def _precedence(step: StoredStep) -> tuple[bool, bool, float]:
    """Return a key that sorts the attempts at a step so that the one that counts comes last."""
    return step.state == "committed", not step.is_abandoned, time_of(step)


def _state(url: str, listing: StoredStep | None, save: SavedStep | None) -> str:
    """Return the state of a step on the tier ``url``, by its listing, or else by its save."""
    if listing is not None:
        return "damaged" if listing.state == "unsupported" else listing.state
    if save is None or url not in save.tiers:
        return "absent"
    state = save.tiers[url].state
    return "removed" if state == "committed" else state


def _datetime(moment: float) -> datetime | None:
    try:
        return datetime.fromtimestamp(moment, UTC) if moment else None
    except (ValueError, OverflowError, OSError):
        return None


def _row(
    step: int,
    moment: float,
    state: str,
    nbytes: int,
    save: SavedStep | None,
    metrics: Mapping[str, float],
) -> dict[str, Any]:
    row: dict[str, Any] = dict.fromkeys(_COLUMNS)
    row |= {
        "step": step,
        "saved_at": _datetime(moment),
        "state": state,
        "abandoned": False,
        "nbytes": nbytes,
        "stall_seconds": save.stall_seconds or None if save else None,
    }
    for name, value in sorted(metrics.items()):
        row[f"metric {name}" if name in _COLUMNS else name] = value
    return row
