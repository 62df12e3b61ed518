"""The coordinator of a job with one rank.

A *subject* is the name of an exchange: each rank may post one message on it, and one *verdict* is
set for all ranks.
"""

from __future__ import annotations

import secrets
import threading

from ckpt.errors import CommitError


def new_attempt() -> str:
    """Return a new random id of an attempt: 12 letters from a to s (51 bits).

    It has no digits, so the last number in the name of a step's folder is the step. Tools that find
    the newest checkpoint by that number are then right. ``t`` begins the number of a further try
    (``StepRef.retry``).
    """
    return "".join(secrets.choice("abcdefghijklmnopqrs") for _ in range(12))


class SingleCoordinator:
    """A coordinator for one process, in memory.

    Args:
        attempt: The id of the attempt; None for a new one.

    Thread safety:
        All methods may be called from any thread.
    """

    rank = 0
    world_size = 1
    look_seconds = 0.0
    """No call waits (see `DepartingCoordinator`)."""

    def __init__(self, attempt: str | None = None) -> None:
        self.attempt = attempt or new_attempt()
        self._has_left = False
        self._messages: dict[str, bytes] = {}
        self._verdicts: dict[str, bytes] = {}
        self._lock = threading.Lock()

    def leave(self, reason: str) -> None:  # noqa: ARG002 - no other rank asks for it
        """End the exchanges of the job, as `DepartingCoordinator` does."""
        self._has_left = True

    def post(self, subject: str, message: bytes) -> None:
        self._check_not_left()
        self._messages[subject] = message

    def collect(self, subject: str, ranks: set[int], *, timeout: float) -> dict[int, bytes]:  # noqa: ARG002
        return {0: self._messages[subject]} if 0 in ranks and subject in self._messages else {}

    def set_once(self, subject: str, verdict: bytes) -> bytes:
        self._check_not_left()
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

    def _check_not_left(self) -> None:
        if self._has_left:
            raise CommitError("rank 0 ends, and has left the exchanges of the job")
