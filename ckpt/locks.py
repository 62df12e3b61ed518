"""A condition and an event that an interrupted training thread leaves free.

The handler of a signal runs between two instructions of Python code, and ``__enter__`` of
`threading.Condition` is Python code. If the handler raises an exception as ``__enter__`` returns,
as for Ctrl-C, the lock stays taken, and every thread that needs it hangs. `threading.Event` has
such a condition inside.
"""

from __future__ import annotations

import threading
from typing import Any


class Condition:
    """A `threading.Condition` whose ``with`` statement calls the methods of the lock directly.

    These are C code, which no handler interrupts.
    """

    def __init__(self) -> None:
        self._held = threading.RLock()
        self._condition = threading.Condition(self._held)
        self.wait, self.wait_for = self._condition.wait, self._condition.wait_for
        self.notify_all = self._condition.notify_all

    @property
    def __enter__(self) -> Any:
        return self._held.__enter__

    @property
    def __exit__(self) -> Any:
        return self._held.__exit__


class Event:
    """A `threading.Event` that is set once.

    Thread safety: all methods may be called from any thread.
    """

    def __init__(self) -> None:
        self._is_set, self._changed = False, Condition()

    def is_set(self) -> bool:
        return self._is_set

    def set(self) -> None:
        """Let all waiting threads go on."""
        with self._changed:
            self._is_set = True
            self._changed.notify_all()

    def wait(self, timeout: float | None = None) -> bool:
        """Wait until it is set. Returns False if it is not set in time."""
        with self._changed:
            return self._changed.wait_for(self.is_set, timeout)
