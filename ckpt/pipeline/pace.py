"""Holds work in the background to a rate."""

from __future__ import annotations

import threading
import time


class Pace:
    """Holds what several threads do to a rate in MB/s (None: as fast as it goes), and can end it.

    Attributes:
        stopped: Whether the work is to end.

    Thread safety: all methods may be called from any thread. ``_lock`` guards ``_free_at``.
    """

    def __init__(self, mb_per_s: float | None) -> None:
        self._seconds_per_byte = 1e-6 / mb_per_s if mb_per_s else 0.0
        self._hurry, self._lock = threading.Event(), threading.Lock()
        self.stopped = False
        self._free_at = 0.0

    def end(self, *, now: bool) -> None:
        """Limit the rate no more. With ``now``, the work is to end."""
        self.stopped = now
        self._hurry.set()

    def spend(self, nbytes: int) -> None:
        """Return when ``nbytes`` more may follow those before."""
        with self._lock:
            now = time.monotonic()
            self._free_at = max(now, self._free_at) + nbytes * self._seconds_per_byte
            left = self._free_at - now
        self._hurry.wait(left)
