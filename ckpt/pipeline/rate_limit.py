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
        is_stopped: True after ``end(at_once=True)``. The threads read this flag and stop their
            work.

    Thread safety: all methods may be called from any thread. ``_lock`` guards ``_free_at``, the
    time at which the limit allows further bytes.
    """

    def __init__(self, mb_per_s: float | None) -> None:
        self._seconds_per_byte = 1e-6 / mb_per_s if mb_per_s else 0.0
        self._limit_lifted, self._lock = threading.Event(), threading.Lock()
        self.is_stopped = False
        self._free_at = 0.0

    def end(self, *, at_once: bool) -> None:
        """Lift the limit, and wake the threads that wait in ``spend``.

        Args:
            at_once: The new value of ``is_stopped``. True asks the threads to stop their work.
        """
        self.is_stopped = at_once
        self._limit_lifted.set()

    def spend(self, nbytes: int) -> None:
        """Count ``nbytes`` as moved, and wait until the limit allows further bytes."""
        with self._lock:
            current_time = time.monotonic()
            self._free_at = max(current_time, self._free_at) + nbytes * self._seconds_per_byte
            seconds = self._free_at - current_time
        self._limit_lifted.wait(seconds)
