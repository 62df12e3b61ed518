"""The policy of retries: how often a call is repeated, and how long the pauses are.

Only a call that raises ``TransientStorageError`` is repeated.
"""

from __future__ import annotations

import random
import threading
import time
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Final, TypeVar

from tenacity import (
    RetryCallState,
    Retrying,
    retry_if_exception_type,
    stop_after_attempt,
    stop_after_delay,
    stop_when_event_set,
    wait_exponential,
)

from ckpt.errors import TransientStorageError, errors_of
from ckpt.storage.api import StorageBackend

T = TypeVar("T")

_jitter_random = random.SystemRandom()
"""The random generator for jitter. tenacity would draw from Python's global generator, and so
change the random numbers of the training.
"""


@dataclass(frozen=True, slots=True, kw_only=True)
class RetryPolicy:
    """How often and for how long a call is repeated.

    The waits between two calls double from ``first_seconds`` to at most ``most_seconds``. Jitter of
    up to ``first_seconds`` is added, so that ranks do not retry at the same moments.

    Attributes:
        attempts: The number of calls, including the first one, after which the policy gives up.
        first_seconds: The first wait.
        most_seconds: The longest wait, without jitter.
        patience_seconds: The policy does not give up before this time has passed since the first
            call, even if ``attempts`` calls have failed.
        hurry: While this event is set, ``patience_seconds`` counts as 0. Setting the event also
            ends a wait that is under way.
    """

    attempts: int = 6
    first_seconds: float = 0.2
    most_seconds: float = 10.0
    patience_seconds: float = 0.0
    hurry: threading.Event = field(default_factory=threading.Event)

    def call(self, work: Callable[[], T]) -> T:
        """Call ``work`` until it raises no ``TransientStorageError``, and return its result.

        Any other error is raised at once and unchanged. If the policy gives up, the error of the
        last call is raised.
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
        backoff = wait_exponential(multiplier=self.first_seconds, max=self.most_seconds)
        return backoff(state) + _jitter_random.uniform(0, self.first_seconds)

    def _sleep(self, seconds: float) -> None:
        if self.hurry.is_set():  # ``wait`` would return at once
            time.sleep(seconds)
        else:
            self.hurry.wait(seconds)


_RETRY: Final = RetryPolicy()


def ask(backend: StorageBackend, work: Callable[[], T]) -> T:
    """Return the result of ``work``, which sends a request to a store.

    Transient errors are retried. A storage error names the store.
    """
    with errors_of(backend.url):
        return _RETRY.call(work)
