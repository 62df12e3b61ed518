"""Look at several runs at once, so that a mount that does not answer delays no other run."""

from __future__ import annotations

import time
from collections.abc import Sequence
from concurrent.futures import Future, wait
from dataclasses import replace
from typing import Final

from ckpt.observe.history import History
from ckpt.observe.run_view import RunView, RunWatch, TierView
from ckpt.pipeline.workers import Workers

_MARGIN_SECONDS: Final = 1.0
"""How long to wait for a run after the patience with its tiers, for its journals and the rest."""


class RunLooks:
    """Makes views of all ``runs``, each on a thread of its own.

    Thread safety: one thread at a time.
    """

    def __init__(self, runs: Sequence[RunWatch]) -> None:
        self._looks = [_Look(run) for run in runs]

    def look(self, patience: float) -> tuple[RunView, ...]:
        """Return the newest view of each run.

        A run that takes longer than ``patience`` and a second keeps its last view, and its tiers
        get an error. The next calls do not wait for it until it answers again.

        Args:
            patience: How many seconds to wait for the listings of tiers.
        """
        queries = [(look.is_late, look.ask(patience)) for look in self._looks]
        wait([future for is_late, future in queries if not is_late], patience + _MARGIN_SECONDS)
        return tuple(look.take() for look in self._looks)


class _Look:
    """Looks at one run on a thread of its own. ``_query`` is the look that is under way.

    Attributes:
        is_late: Whether the run had not answered when ``take`` was called last.
    """

    def __init__(self, run: RunWatch) -> None:
        self.is_late = False
        self._run, self._worker = run, Workers("run", 1)
        self._query: Future[RunView] | None = None
        self._asked_at = 0.0
        tiers = tuple(TierView(url=tier.url) for tier in run.tiers)
        self._view = RunView(name=run.name, at=0.0, tiers=tiers, steps=(), history=History())

    def ask(self, patience: float) -> Future[RunView]:
        """Begin to look at the run, unless a look is under way, and return its future."""
        if self._query is None:
            self._query, self._asked_at = self._worker.submit(self._run.look, patience), time.time()
        return self._query

    def take(self) -> RunView:
        """Return the view of the look that ``ask`` began, or the last view with an error."""
        query, current_time = self._query, time.time()
        self.is_late = query is not None and not query.done()
        if query is not None and not self.is_late:
            self._query = None
            self._view = query.result()
            return self._view
        error = f"no answer for {current_time - self._asked_at:.0f} s"
        tiers = tuple(replace(tier, error=tier.error or error) for tier in self._view.tiers)
        return replace(self._view, at=current_time, tiers=tiers)
