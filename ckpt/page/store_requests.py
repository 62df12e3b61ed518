"""The requests of a run to an object store, computed from its steps. Pure functions.

``tests/save/test_requests.py`` compares them with the requests that a server gets.

A row stands for one attempt of a job at a step. It has a cell for each tier of the run, with the
state of the attempt there.
"""

from __future__ import annotations

import math
import statistics
from dataclasses import asdict, dataclass
from itertools import pairwise
from typing import Final

from ckpt.observe.run_view import RunView, StepView

_PART_BYTES: Final = 8 << 20
"""The size of a part of an upload. A file of less than two parts is put by one request."""
_ARRIVAL_STATES: Final = frozenset({"committed", "verified", "removed"})
_PRESENT_STATES: Final = _ARRIVAL_STATES - {"removed"}
_KEYS_PER_PAGE: Final = 1000
"""The most keys that a store gives in one page of a listing."""
_MOST_INTERVALS: Final = 100
_MONTH_SECONDS: Final = 30 * 24 * 3600.0


@dataclass(frozen=True, slots=True, kw_only=True)
class Requests:
    """Numbers of requests to an object store, by kind. A part of an upload is a put."""

    puts: int = 0
    gets: int = 0
    heads: int = 0
    lists: int = 0
    deletes: int = 0

    @property
    def total(self) -> int:
        return sum(asdict(self).values())

    @property
    def words(self) -> str:
        """The numbers as text, such as "4 puts, 5 gets, 2 heads, 3 lists"."""
        return ", ".join(f"{count} {kind}" for kind, count in asdict(self).items() if count)

    def __add__(self, addend: Requests) -> Requests:
        counts = asdict(addend)
        return Requests(**{kind: count + counts[kind] for kind, count in asdict(self).items()})


@dataclass(frozen=True, slots=True, kw_only=True)
class SaveRequests:
    """The requests of the saves of a run to one of its tiers.

    Attributes:
        per_save: The requests of a save, and of the removal of an older step if the tier removes
            steps.
        interval_seconds: The median time between two saves to the tier; 0 if not known.
    """

    per_save: Requests
    interval_seconds: float

    @property
    def saves_per_month(self) -> float:
        """How many saves a month has at this interval; 0 if it is not known."""
        return _MONTH_SECONDS / self.interval_seconds if self.interval_seconds else 0.0


def requests_of_save(ranks: int, nbytes: int, steps: int) -> Requests:
    """Return the requests of the save of a step of ``nbytes`` to a tier with ``steps`` steps.

    Retention, which looks at the new step after each commit, is included. The ranks are taken to
    write equal shares.
    """
    part_count = math.ceil(nbytes / ranks / _PART_BYTES)
    is_in_parts = part_count > 1 and nbytes / ranks >= 2 * _PART_BYTES
    puts_of_file = part_count + 2 if is_in_parts else 1  # An upload has a begin and an end, too
    # Puts: each rank's file and fragment, and the manifest. Gets: the fragments, the owner of the
    # root three times, and the manifest, for retention (see the table in ``docs/scale.md``).
    return Requests(
        puts=ranks * (puts_of_file + 1) + 1,
        gets=ranks + 3 + 1,
        heads=2,
        lists=_listing_pages(steps) + 2,
    )


def requests_of_removal(ranks: int) -> Requests:
    """Return the requests of the removal of a step, while two newer ones stay."""
    return Requests(puts=1, gets=1, heads=4, lists=2, deletes=2 * ranks + 2)


def save_requests(run: RunView, index: int) -> SaveRequests | None:
    """Return the requests of the saves to the tier ``run.tiers[index]``; None if it has no step.

    They are those of a whole step without a codec. A save that writes less may need fewer puts.
    """
    # The steps that the tier has or had. A row has a cell for each tier.
    rows = [row for row in run.steps if row.cells[index].state in _ARRIVAL_STATES]
    newest = next(
        (row for row in rows if row.ranks and row.cells[index].state in _PRESENT_STATES), None
    )
    if newest is None:
        return None
    per_save = requests_of_save(newest.ranks, newest.nbytes, run.tiers[index].steps)
    if any(row.cells[index].state == "removed" for row in rows):
        per_save += requests_of_removal(newest.ranks)
    return SaveRequests(per_save=per_save, interval_seconds=_interval(rows))


def _interval(rows: list[StepView]) -> float:
    """Return the median time between two of the newest saves, in seconds; 0 if not known."""
    moments = sorted((row.at for row in rows if row.at), reverse=True)[: _MOST_INTERVALS + 1]
    gaps = [newer - older for newer, older in pairwise(moments)]
    return statistics.median(gaps) if gaps else 0.0


def _listing_pages(steps: int) -> int:
    return 1 + steps // _KEYS_PER_PAGE
