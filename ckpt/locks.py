"""A condition and an event whose lock is released even if Ctrl-C interrupts the training thread.

A signal handler runs between two instructions of Python code, and ``__enter__`` of
`threading.Condition` is Python code. If the handler raises an exception when ``__enter__`` has
taken the lock and is about to return, as the handler of Ctrl-C does, the lock is never released.
Every thread that needs the lock then hangs. `threading.Event` contains such a condition.
"""

from __future__ import annotations

import threading
from typing import Any


class Condition:
    """A `threading.Condition` whose ``with`` statement calls the methods of the lock directly.

    The methods of the lock are C code, and no signal handler runs within C code.
    """

    def __init__(self) -> None:
        self._lock = threading.RLock()
        self._condition = threading.Condition(self._lock)
        self.wait, self.wait_for = self._condition.wait, self._condition.wait_for
        self.notify_all = self._condition.notify_all

    @property
    def __enter__(self) -> Any:
        return self._lock.__enter__

    @property
    def __exit__(self) -> Any:
        return self._lock.__exit__


class Event:
    """A `threading.Event` that cannot be cleared, and whose lock Ctrl-C does not leave taken.

    Thread safety: all methods may be called from any thread.
    """

    def __init__(self) -> None:
        self._is_set, self._condition = False, Condition()

    def is_set(self) -> bool:
        return self._is_set

    def set(self) -> None:
        """Set the event, and wake all threads that wait for it."""
        with self._condition:
            self._is_set = True
            self._condition.notify_all()

    def wait(self, timeout: float | None = None) -> bool:
        """Wait until the event is set, at most ``timeout`` seconds (None: without a limit).

        Return True if the event is set, and False if the time is over.
        """
        with self._condition:
            return self._condition.wait_for(self.is_set, timeout)
