"""A rank whose process is ended by an exception: it leaves at once, and the others learn that it will say nothing more."""

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
"""Exceptions by which an iteration ends in order."""
_SUBJECT: Final = "gone"
_LOOK_SECONDS: Final = 1.0
_MOST_LOOK_SECONDS: Final = 10.0
_LOOKS: Final = 256
"""Requests to the job's store in a second, at most, by all ranks that wait."""


def reason_of(error: BaseException | None) -> str:
    """The failure by which ``error`` ends the process, in words; empty if it is none."""
    if error is None or (isinstance(error, SystemExit) and not error.code):
        return ""
    return f"{type(error).__name__}: {error}"[:200]


class Gone(msgspec.Struct, frozen=True):
    """The first rank that left, and why."""

    rank: int
    reason: str


class Leaving:
    """A coordinator that can be left. Threads: ``leave`` from any, once; all else as the coordinator that it stands for.

    After ``leave`` every other call raises ``CommitError``, and a wait that is under way does so within ``look_seconds``.
    This rank has then told its last word: what it has not said to be durable never will be.
    """

    def __init__(self, whole: Coordinator, left: threading.Event | None = None) -> None:
        self._whole, self._left = whole, left or threading.Event()
        self.rank, self.world_size, self.attempt = whole.rank, whole.world_size, whole.attempt
        self.look_seconds = min(_MOST_LOOK_SECONDS, max(_LOOK_SECONDS, whole.world_size / _LOOKS))

    def leave(self, reason: str) -> None:
        """Say nothing more, and let the others know. Never raises."""
        self._left.set()
        with suppress(CkptError):
            self._whole.set_once(_SUBJECT, msgspec.json.encode(Gone(self.rank, reason)))

    def post(self, subject: str, message: bytes) -> None:
        self._check()
        self._whole.post(subject, message)

    def collect(self, subject: str, ranks: set[int], *, timeout: float) -> dict[int, bytes]:
        return self._wait(lambda seconds: self._whole.collect(subject, ranks, timeout=seconds), timeout)

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
        """``ask``, which waits for so many seconds, again until it has an answer or the time is over."""
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
    """The first rank that has left, None if none has. One request."""
    told = coordinator.verdict(_SUBJECT, timeout=0.0)
    return None if told is None else msgspec.json.decode(told, type=Gone)
