"""The history of a run as rows of a table, one for each step: ``OpenCheckpoint.history``."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from datetime import UTC, datetime
from typing import Any, Final

from ckpt.catalog.inventory import StoredStep
from ckpt.observe.history import Arrival, History, SavedStep

_COLUMNS: Final = ("step", "saved_at", "state", "nbytes", "stall_seconds", "durable_seconds")


def step_rows(url: str, steps: Iterable[StoredStep], history: History) -> list[dict[str, Any]]:
    """Return a row for each step that a tier has or had, in ascending order of the steps.

    A row has the columns "step", "saved_at" (a datetime in UTC, or None), "state" (as the page of
    ``ckpt serve`` names it, such as "committed", "removed", "missed" or "failed"), "nbytes",
    "stall_seconds", "durable_seconds" (None if they are not known), and one for each metric. A
    metric whose name is that of another column has "metric " before its name.

    Args:
        url: The URL of the tier.
        steps: The attempts at steps on the tier.
        history: The history of the run.
    """
    listings: dict[int, StoredStep] = {}
    for step in sorted(steps, key=lambda step: (step.state == "committed", step.created_at)):
        listings[step.ref.step] = step
    failures = {record.step: record for record in history.failures}
    rows: list[dict[str, Any]] = []
    for number in sorted({*listings, *history.saves, *failures}):
        listing, save = listings.get(number), history.saves.get(number)
        arrival = save.tiers.get(url, Arrival()) if save else Arrival()
        if listing is None and save is None:
            rows.append(_row(number, failures[number].at, "failed", 0, None, {}))
            continue
        moment = listing.created_at if listing and listing.created_at else save.at if save else 0.0
        nbytes = listing.staged_bytes or listing.nbytes if listing else save.nbytes if save else 0
        metrics = {**(save.metrics if save else {}), **(listing.metrics if listing else {})}
        state = _state(url, listing, save)
        row = _row(number, moment, state, nbytes, save, metrics)
        row["durable_seconds"] = arrival.seconds or None
        rows.append(row)
    return rows


def _state(url: str, listing: StoredStep | None, save: SavedStep | None) -> str:
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
        "nbytes": nbytes,
        "stall_seconds": save.stall_seconds or None if save else None,
    }
    for name, value in sorted(metrics.items()):
        row[f"metric {name}" if name in _COLUMNS else name] = value
    return row
