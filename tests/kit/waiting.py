"""Wait for what another thread or process does."""

from __future__ import annotations

import time
from collections.abc import Callable


def until(condition: Callable[[], object], seconds: float = 100) -> bool:
    """Return whether ``condition`` becomes true within the bound.

    The pauses grow with the time that has passed, up to 0.1 s: many conditions ask another process
    or look through all processes, and those who wait would take the time of those who work.
    """
    start = time.monotonic()
    while not condition():
        age = time.monotonic() - start
        if age > seconds:
            return False
        time.sleep(min(max(0.02, age / 20), 0.1))
    return True
