"""A coordinator by which a rank leaves the exchanges of the job when an exception ends its process.

The other ranks learn that the rank posts nothing more, so that they do not wait for its messages.
A *subject* is the name of an exchange: each rank may post one message on it, and one *verdict* is
set for all ranks.
"""

from __future__ import annotations

import threading
import time
from collections.abc import Callable, Collection
from contextlib import suppress
from typing import Final, TypeVar

import msgspec

from ckpt.coordination.coordinator import Coordinator
from ckpt.coordination.exchanges import encode_json
from ckpt.coordination.single import SingleCoordinator
from ckpt.errors import CkptError, CommitError

T = TypeVar("T")

END_OF_DATA: Final = (StopIteration, StopAsyncIteration, GeneratorExit)
"""The exceptions that end an iteration normally, and so are no failures."""
_DEPARTURE_SUBJECT: Final = "gone"
_LOOK_SECONDS: Final = 1.0
_MOST_LOOK_SECONDS: Final = 10.0
_MOST_LOOKS_PER_SECOND: Final = 256
"""The most requests per second to the job's store by all waiting ranks together."""


def reason_of(error: BaseException | None) -> str:
    """Return the text of ``error``, which ends the process, in at most 200 characters.

    Return an empty string if ``error`` is None or a ``SystemExit`` without a failure.
    """
    if error is None or (isinstance(error, SystemExit) and not error.code):
        return ""
    return f"{type(error).__name__}: {error}"[:200]


class Departure(msgspec.Struct, frozen=True):
    """A rank that has left the exchanges of the job, and its reason."""

    rank: int
    reason: str


_departure_decoder: Final = msgspec.json.Decoder(Departure)


class DepartingCoordinator:
    """A coordinator with a method ``leave``, by which this rank leaves the exchanges of the job.

    After ``leave``, the calls that post, set or wait raise ``CommitError``: ``post``, ``set_once``,
    ``collect`` and ``verdict``. A wait that is under way ends within ``look_seconds``. ``leave``
    has the same effect on all clones. If this rank has not reported its part of a save as durable
    before ``leave``, the part never belongs to a checkpoint.

    Attributes:
        look_seconds: How many seconds a wait takes at most before it checks whether ``leave`` was
            called.

    Thread safety:
        ``leave`` may be called once, from any thread. The other methods are as safe as the methods
        of the wrapped coordinator.
    """

    def __init__(self, inner: Coordinator, departure: threading.Event | None = None) -> None:
        self._inner, self._departure = inner, departure or threading.Event()
        self.rank, self.world_size, self.attempt = inner.rank, inner.world_size, inner.attempt
        self.look_seconds = min(
            _MOST_LOOK_SECONDS, max(_LOOK_SECONDS, inner.world_size / _MOST_LOOKS_PER_SECOND)
        )

    def leave(self, reason: str) -> None:
        """Leave the exchanges of the job, and tell the other ranks the reason.

        The call raises no ``CkptError``.
        """
        self._departure.set()
        message = encode_json(Departure(self.rank, reason))
        with suppress(CkptError):
            # The verdict names only the first rank that leaves. Its existence is cheap to check.
            self._inner.post(_DEPARTURE_SUBJECT, message)
            self._inner.set_once(_DEPARTURE_SUBJECT, message)

    def post(self, subject: str, message: bytes) -> None:
        self._check_not_left()
        self._inner.post(subject, message)

    def collect(self, subject: str, ranks: set[int], *, timeout: float) -> dict[int, bytes]:
        return self._wait(
            lambda seconds: self._inner.collect(subject, ranks, timeout=seconds), timeout
        )

    def set_once(self, subject: str, verdict: bytes) -> bytes:
        self._check_not_left()
        return self._inner.set_once(subject, verdict)

    def verdict(self, subject: str, *, timeout: float) -> bytes | None:
        return self._wait(lambda seconds: self._inner.verdict(subject, timeout=seconds), timeout)

    def forget(self, subject: str) -> None:
        self._inner.forget(subject)

    def clone(self) -> DepartingCoordinator:
        return DepartingCoordinator(self._inner.clone(), self._departure)

    def close(self) -> None:
        self._inner.close()

    def _wait(self, ask: Callable[[float], T], timeout: float) -> T:
        """Call ``ask`` until it returns an answer or ``timeout`` seconds are over, and return its
        last result. ``ask`` gets the number of seconds that it may wait.
        """
        deadline = time.monotonic() + timeout
        while True:
            self._check_not_left()
            seconds = deadline - time.monotonic()
            answer = ask(min(seconds, self.look_seconds))
            if answer or seconds <= self.look_seconds:
                return answer

    def _check_not_left(self) -> None:
        if self._departure.is_set():
            raise CommitError(f"rank {self.rank} ends, and has left the others")


OwnCoordinator = DepartingCoordinator | SingleCoordinator
"""A coordinator with the method ``leave``."""


def own_coordinator(coordinator: Coordinator) -> OwnCoordinator:
    """Return a coordinator for the rank of ``coordinator`` with the method ``leave``.

    A process that is alone waits for no other rank, so it needs no `DepartingCoordinator`. It gets
    an object of its own, since others may use ``coordinator`` after it has left.
    """
    if type(coordinator) is SingleCoordinator:
        return SingleCoordinator(coordinator.attempt)
    return DepartingCoordinator(coordinator)


def first_departure(coordinator: Coordinator) -> Departure | None:
    """Return the first rank that has left the exchanges of the job, or None if no rank has left.

    The call costs one request to the job's store.
    """
    message = coordinator.verdict(_DEPARTURE_SUBJECT, timeout=0.0)
    return None if message is None else _departure_decoder.decode(message)


def who_has_left(coordinator: Coordinator, ranks: Collection[int]) -> dict[int, str]:
    """Return which of ``ranks`` have left the exchanges of the job: rank -> reason.

    The call costs one request to the job's store as long as no rank of the job has left.
    """
    departure = first_departure(coordinator)
    if departure is None:
        return {}
    reasons = {departure.rank: departure.reason} if departure.rank in ranks else {}
    messages = coordinator.collect(_DEPARTURE_SUBJECT, set(ranks), timeout=0.0)
    return reasons | {
        rank: _departure_decoder.decode(message).reason for rank, message in messages.items()
    }
