"""The views of the runs that the page shows. A background thread renews them."""

from __future__ import annotations

import logging
import re
import threading
import time
from collections.abc import Sequence
from dataclasses import replace
from typing import Final

from ckpt.observe.run_looks import RunLooks
from ckpt.observe.run_view import RunView, RunWatch, TierView
from ckpt.pipeline.workers import Workers

_log = logging.getLogger("ckpt")
_IDLE_SECONDS: Final = 60.0
"""How long the tiers are still listed after the last request. A store may charge for each listing.
"""
_PATIENCE_SECONDS: Final = 2.0
"""How long the thread waits for the listings of the tiers of one run."""
_SILENCE_ERROR: Final = re.compile(r"no answer for (\d+) s")
"""The error of a tier that does not answer."""


class Live:
    """The newest view of each run, and the thread that renews the views.

    ``_looks`` reads all runs, each with a bounded wait. ``_touch_time`` is the time of the last
    request: without requests the thread rests. ``_end`` ends the thread.

    Args:
        runs: The runs that the page shows.
        interval: The seconds between two renewals of all views.

    Thread safety: all methods may be called from any thread. After ``start``, only the background
    thread changes ``views`` and ``version``, and it replaces ``views`` as a whole.

    Attributes:
        runs: The runs that the page shows.
        views: The newest view of each run, in the order of ``runs``; empty before ``start``.
        version: A number that grows by one when a renewal changes any view. Values that change with
            every renewal, such as the time of a view, do not count.
    """

    def __init__(self, runs: Sequence[RunWatch], interval: float) -> None:
        self.runs, self._looks = tuple(runs), RunLooks(runs)
        self.views: tuple[RunView, ...] = ()
        self.version = 0
        self._interval, self._touch_time = interval, 0.0
        self._end = threading.Event()
        self._worker = Workers("page", 1)

    def start(self) -> None:
        """Make the first views, and start the background thread, which renews them from then on."""
        self._look()
        self._worker.submit(self._run)

    def touch(self) -> None:
        """Note that there was a request, so that the views are renewed for the next 60 seconds."""
        self._touch_time = time.monotonic()

    @property
    def closed(self) -> bool:
        """True once ``close`` was called."""
        return self._end.is_set()

    def close(self) -> None:
        """End the background thread. Do not wait for a renewal that is under way."""
        self._end.set()

    def _run(self) -> None:
        while not self._end.wait(self._interval):
            if time.monotonic() - self._touch_time < _IDLE_SECONDS:
                try:
                    self._look()
                except Exception as error:  # noqa: BLE001 - the next look may succeed
                    _log.warning("ckpt: the runs could not be read: %r", error)

    def _look(self) -> None:
        views = self._looks.look(_PATIENCE_SECONDS)
        has_changed = [_stable_part(view) for view in views] != [
            _stable_part(view) for view in self.views
        ]
        self.views = views
        if has_changed:
            self.version += 1


def silent_since(tier: TierView, view_time: float) -> float | None:
    """Return the time since which a tier has not answered, in seconds since 1970; None if it
    answers.

    Args:
        tier: The view of the tier.
        view_time: The time of the view.
    """
    match = _SILENCE_ERROR.fullmatch(tier.error)
    return view_time - int(match[1]) if match else None


def _stable_part(view: RunView) -> RunView:
    """Return ``view`` without the values that change with every renewal: its time, the time that
    it has spent, the free and total space of its tiers, and for how long a tier has not answered. A
    change of these values is no reason to show the page again.
    """

    def stable_tier(tier: TierView) -> TierView:
        error = "no answer" if _SILENCE_ERROR.fullmatch(tier.error) else tier.error
        return replace(tier, free=0.0, size=0.0, error=error)

    return replace(view, at=0.0, time_spent=None, tiers=tuple(map(stable_tier, view.tiers)))
