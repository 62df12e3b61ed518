"""Which errors are worth another try, how often, how long apart.

Only ``TransientStorageError`` is.
"""

from __future__ import annotations

import random
import threading
import time
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import TypeVar

from tenacity import (
    RetryCallState,
    Retrying,
    retry_if_exception_type,
    stop_after_attempt,
    stop_after_delay,
    stop_when_event_set,
    wait_exponential,
)

from ckpt.errors import TransientStorageError

T = TypeVar("T")

_dice = random.SystemRandom()
"""A generator for jitter. tenacity would use Python's global one, which belongs to the training."""


@dataclass(frozen=True, slots=True, kw_only=True)
class RetryPolicy:
    """``attempts`` in all; waits grow from ``first_seconds`` to ``most_seconds``, with jitter so
    that ranks do not retry in step.

    Attributes:
        patience_seconds: Go on for so long, however many attempts that makes.
        hurry: Ends the patience when it is set. No work is then retried longer than ``attempts``
            says.
    """

    attempts: int = 6
    first_seconds: float = 0.2
    most_seconds: float = 10.0
    patience_seconds: float = 0.0
    hurry: threading.Event = field(default_factory=threading.Event)

    def call(self, work: Callable[[], T]) -> T:
        """Return ``work()``, tried again while it raises ``TransientStorageError``. The last error
        is raised as it is.
        """
        attempts = Retrying(
            retry=retry_if_exception_type(TransientStorageError),
            stop=stop_after_attempt(self.attempts)
            & (stop_after_delay(self.patience_seconds) | stop_when_event_set(self.hurry)),
            sleep=self._sleep,
            wait=self._wait,
            reraise=True,
        )
        return attempts(work)

    def _wait(self, state: RetryCallState) -> float:
        growing = wait_exponential(multiplier=self.first_seconds, max=self.most_seconds)
        return growing(state) + _dice.uniform(0, self.first_seconds)

    def _sleep(self, seconds: float) -> None:
        if self.hurry.is_set():
            time.sleep(seconds)
        else:
            self.hurry.wait(seconds)
