"""A limit on the rate of background work."""

from __future__ import annotations

import threading
import time


class Pace:
    """A limit on the bytes per second that several threads move together, and a flag that asks them
    to stop.

    Args:
        mb_per_s: The limit in 10**6 bytes per second; None for no limit.

    Attributes:
        stopped: True after ``end(now=True)``. The threads read this flag and stop their work.

    Thread safety: all methods may be called from any thread. ``_lock`` guards ``_free_at``.
    """

    def __init__(self, mb_per_s: float | None) -> None:
        self._seconds_per_byte = 1e-6 / mb_per_s if mb_per_s else 0.0
        self._hurry, self._lock = threading.Event(), threading.Lock()
        self.stopped = False
        self._free_at = 0.0

    def end(self, *, now: bool) -> None:
        """Lift the limit, and wake the threads that wait in ``spend``.

        Args:
            now: The new value of ``stopped``. True asks the threads to stop their work.
        """
        self.stopped = now
        self._hurry.set()

    def spend(self, nbytes: int) -> None:
        """Count ``nbytes`` as moved, and wait until the limit allows further bytes."""
        with self._lock:
            now = time.monotonic()
            self._free_at = max(now, self._free_at) + nbytes * self._seconds_per_byte
            left = self._free_at - now
        self._hurry.wait(left)
