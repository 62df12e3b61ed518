"""The runs that the page shows, looked at again and again in the background."""

from __future__ import annotations

import logging
import threading
import time
from collections.abc import Sequence
from dataclasses import replace
from typing import Final

from ckpt.observe.run_view import RunView, RunWatch
from ckpt.pipeline.workers import Workers

_log = logging.getLogger("ckpt")
_IDLE_SECONDS: Final = 60.0
"""How long after the last request the stores are still looked at. Each look may cost money."""
_PATIENCE_SECONDS: Final = 2.0


class Live:
    """The newest view of each run.

    Args:
        runs: The runs.
        interval: Seconds between two looks.

    Thread safety: all methods may be called from any thread. The thread that looks replaces
    ``views`` as a whole, and alone changes ``version``.

    Attributes:
        runs: The runs.
        views: The newest view of each.
        version: Grows when a view has changed.
    """

    def __init__(self, runs: Sequence[RunWatch], interval: float) -> None:
        self.runs = tuple(runs)
        self.views: tuple[RunView, ...] = ()
        self.version = 0
        self._interval, self._touched = interval, 0.0
        self._over = threading.Event()
        self._worker = Workers("page", 1)

    def start(self) -> None:
        """Look at all runs once, then go on in the background."""
        self._look()
        self._worker.submit(self._run)

    def touch(self) -> None:
        """Go on looking for a while: someone reads the page."""
        self._touched = time.monotonic()

    @property
    def closed(self) -> bool:
        """Whether ``close`` was called."""
        return self._over.is_set()

    def close(self) -> None:
        """End the background thread. A look that waits for a store is left alone."""
        self._over.set()

    def _run(self) -> None:
        while not self._over.wait(self._interval):
            if time.monotonic() - self._touched < _IDLE_SECONDS:
                try:
                    self._look()
                except Exception as error:  # noqa: BLE001 - the next look may succeed
                    _log.warning("ckpt: the runs could not be looked at: %r", error)

    def _look(self) -> None:
        views = tuple(run.look(_PATIENCE_SECONDS) for run in self.runs)
        changed = [_lasting(view) for view in views] != [_lasting(view) for view in self.views]
        self.views = views
        if changed:
            self.version += 1


def _lasting(view: RunView) -> RunView:
    """Return ``view`` without what changes all the time."""
    tiers = tuple(replace(tier, free=0.0, size=0.0) for tier in view.tiers)
    return replace(view, at=0.0, tiers=tiers)
