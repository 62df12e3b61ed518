"""Lets a rank whose process ends by an exception leave the exchanges of the job at once.

The other ranks learn that this rank posts nothing more, so that they do not wait for it.
"""

from __future__ import annotations

import threading
import time
from collections.abc import Callable
from contextlib import suppress
from typing import Final, TypeVar

import msgspec

from ckpt.coordination.api import Coordinator
from ckpt.errors import CkptError, CommitError

T = TypeVar("T")

END_OF_DATA: Final = (StopIteration, StopAsyncIteration, GeneratorExit)
"""Exceptions that end an iteration in the ordinary way."""
_SUBJECT: Final = "gone"
_LOOK_SECONDS: Final = 1.0
_MOST_LOOK_SECONDS: Final = 10.0
_LOOKS: Final = 256
"""The most requests per second to the job's store by all waiting ranks together."""


def reason_of(error: BaseException | None) -> str:
    """Return ``error``, which ends the process, as text; an empty string if it is no failure."""
    if error is None or (isinstance(error, SystemExit) and not error.code):
        return ""
    return f"{type(error).__name__}: {error}"[:200]


class Gone(msgspec.Struct, frozen=True):
    """The first rank that left, and the reason."""

    rank: int
    reason: str


_decoder: Final = msgspec.json.Decoder(Gone)


class Leaving:
    """A coordinator with a method ``leave``, by which this rank leaves the exchanges of the job.

    After ``leave``, every other call raises ``CommitError``, and a wait that is under way raises it
    within ``look_seconds``. The clones of this coordinator leave with it. A part that this rank has
    not reported as durable by then never becomes part of a checkpoint.

    Thread safety:
        ``leave`` may be called once, from any thread. The other methods are as safe as those of the
        wrapped coordinator.
    """

    def __init__(self, whole: Coordinator, left: threading.Event | None = None) -> None:
        self._whole, self._left = whole, left or threading.Event()
        self.rank, self.world_size, self.attempt = whole.rank, whole.world_size, whole.attempt
        self.look_seconds = min(_MOST_LOOK_SECONDS, max(_LOOK_SECONDS, whole.world_size / _LOOKS))

    def leave(self, reason: str) -> None:
        """Post nothing more, and let the other ranks know. It raises no ``CkptError``."""
        self._left.set()
        with suppress(CkptError):
            self._whole.set_once(_SUBJECT, msgspec.json.encode(Gone(self.rank, reason)))

    def post(self, subject: str, message: bytes) -> None:
        self._check()
        self._whole.post(subject, message)

    def collect(self, subject: str, ranks: set[int], *, timeout: float) -> dict[int, bytes]:
        return self._wait(
            lambda seconds: self._whole.collect(subject, ranks, timeout=seconds), timeout
        )

    def set_once(self, subject: str, verdict: bytes) -> bytes:
        self._check()
        return self._whole.set_once(subject, verdict)

    def verdict(self, subject: str, *, timeout: float) -> bytes | None:
        return self._wait(lambda seconds: self._whole.verdict(subject, timeout=seconds), timeout)

    def forget(self, subject: str) -> None:
        self._whole.forget(subject)

    def clone(self) -> Leaving:
        return Leaving(self._whole.clone(), self._left)

    def close(self) -> None:
        self._whole.close()

    def _wait(self, ask: Callable[[float], T], timeout: float) -> T:
        """Call ``ask``, which waits for the seconds that it gets, until it returns an answer or
        ``timeout`` seconds are over. Return its last result.
        """
        deadline = time.monotonic() + timeout
        while True:
            self._check()
            left = deadline - time.monotonic()
            found = ask(min(left, self.look_seconds))
            if found or left <= self.look_seconds:
                return found

    def _check(self) -> None:
        if self._left.is_set():
            raise CommitError(f"rank {self.rank} ends, and has left the others")


def who_left(coordinator: Coordinator) -> Gone | None:
    """Return the first rank that has left, or None. The call costs one request to the store."""
    message = coordinator.verdict(_SUBJECT, timeout=0.0)
    return None if message is None else _decoder.decode(message)
