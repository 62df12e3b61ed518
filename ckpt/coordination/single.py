"""The coordinator of a job with one rank."""

from __future__ import annotations

import secrets
import threading


def new_attempt() -> str:
    """Return a new random id of an attempt: 12 letters from a to s (51 bits).

    It has no digits, so the last number in the name of a step's folder is the step. Tools that find
    the newest checkpoint by that number are then right. ``t`` begins the number of a further try
    (``StepRef.retry``).
    """
    return "".join(secrets.choice("abcdefghijklmnopqrs") for _ in range(12))


class SingleCoordinator:
    """A coordinator for one process, in memory.

    Thread safety:
        All methods may be called from any thread.
    """

    rank = 0
    world_size = 1

    def __init__(self) -> None:
        self.attempt = new_attempt()
        self._messages: dict[str, bytes] = {}
        self._verdicts: dict[str, bytes] = {}
        self._lock = threading.Lock()

    def post(self, subject: str, message: bytes) -> None:
        self._messages[subject] = message

    def collect(self, subject: str, ranks: set[int], *, timeout: float) -> dict[int, bytes]:  # noqa: ARG002
        return {0: self._messages[subject]} if 0 in ranks and subject in self._messages else {}

    def set_once(self, subject: str, verdict: bytes) -> bytes:
        with self._lock:
            return self._verdicts.setdefault(subject, verdict)

    def verdict(self, subject: str, *, timeout: float) -> bytes | None:  # noqa: ARG002
        return self._verdicts.get(subject)

    def forget(self, subject: str) -> None:
        """Remove the message on ``subject``, and the verdicts on ``subject`` and below it
        (``subject/...``).

        No other rank can ask for the verdicts later. If they stayed, memory would grow with the
        number of saves.
        """
        self._messages.pop(subject, None)
        with self._lock:  # Threads of several tiers may call this method at once
            for name in [n for n in self._verdicts if n == subject or n.startswith(f"{subject}/")]:
                del self._verdicts[name]

    def clone(self) -> SingleCoordinator:
        return self

    def close(self) -> None:
        self._messages.clear()
        self._verdicts.clear()
