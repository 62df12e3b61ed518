"""Exchanges between ranks: gather a message of each rank, and let the leader decide for all ranks.

A *subject* is the name of an exchange. Every wait is bounded. If ranks do not answer in time, an
error names them. Messages are JSON, whose texts may come from errors (``encode_json``).
"""

from __future__ import annotations

import time
from collections.abc import Callable, Collection, Iterator
from dataclasses import dataclass
from typing import Any, TypeVar

import msgspec

from ckpt.coordination.coordinator import LEADER, Coordinator
from ckpt.errors import CommitTimeout

T = TypeVar("T")


@dataclass(frozen=True, slots=True)
class Wait:
    """How long to wait for other ranks, and what the error says if they do not answer in time.

    Attributes:
        seconds: How long to wait for all ranks together.
        topic: The name, in the error, of the message that the ranks must post, such as "the size".
        step: The step that the wait belongs to; -1 if it belongs to no step.
    """

    seconds: float
    topic: str
    step: int = -1

    def timeout_error(self, ranks: Collection[int]) -> CommitTimeout:
        """Return the error which says that ``ranks`` did not answer."""
        return CommitTimeout(self.step, sorted(ranks), self.seconds, self.topic)


def arrivals(
    coordinator: Coordinator, subject: str, ranks: Collection[int], wait: Wait
) -> Iterator[tuple[int, bytes]]:
    """Yield each of ``ranks`` with its message on ``subject``, in the order of arrival.

    Raises:
        CommitTimeout: Some ranks have posted nothing within ``wait.seconds``.
    """
    missing, deadline = set(ranks), time.monotonic() + wait.seconds
    while missing:
        seconds = max(0.0, deadline - time.monotonic())
        messages = coordinator.collect(subject, missing, timeout=seconds)
        if not messages:
            raise wait.timeout_error(missing)
        missing -= messages.keys()
        yield from messages.items()


def gather(
    coordinator: Coordinator, subject: str, wait: Wait, *, ranks: Collection[int] | None = None
) -> dict[int, bytes]:
    """Return the message of each of ``ranks`` (of all ranks if None), in the order of the ranks.

    Raises:
        CommitTimeout: Some ranks have posted nothing within ``wait.seconds``.
    """
    senders = range(coordinator.world_size) if ranks is None else ranks
    return dict(sorted(arrivals(coordinator, subject, senders, wait)))


def leader_decides(
    coordinator: Coordinator, subject: str, decide: Callable[[], T], wait: Wait, kind: type[T]
) -> T:
    """Return on all ranks the value that ``decide`` returns on the leader.

    All ranks must call this function.

    Args:
        coordinator: The connection to the other ranks.
        subject: The subject of the exchange.
        decide: A function that is called on the leader only. If it raises, the leader raises its
            error, and the other ranks wait in vain. So the result must contain each error that the
            other ranks must learn of.
        wait: How long the other ranks wait for the leader.
        kind: The type of the result of ``decide``, which is sent as JSON.

    Raises:
        CommitTimeout: The leader has not decided within ``wait.seconds``.
    """
    decision: bytes | None
    if coordinator.rank == LEADER:
        decision = coordinator.set_once(subject, encode_json(decide()))
    else:
        decision = coordinator.verdict(subject, timeout=wait.seconds)
    if decision is None:
        raise wait.timeout_error([LEADER])
    return msgspec.json.decode(decision, type=kind)


def encode_json(message: object) -> bytes:
    """Return ``message`` as JSON, in which characters that UTF-8 cannot encode are escaped.

    The text of an error may have the name of a file that is not UTF-8. Python represents the bytes
    of such a name as lone surrogates, which JSON does not have.
    """
    try:
        return msgspec.json.encode(message)
    except UnicodeEncodeError:
        return msgspec.json.encode(_escape(msgspec.to_builtins(message)))


def _escape(value: Any) -> Any:
    """Return a plain value with the lone surrogates in its texts escaped."""
    match value:
        case str():
            return value.encode(errors="backslashreplace").decode()
        case dict():
            return {_escape(key): _escape(item) for key, item in value.items()}
        case list() | tuple():
            return [_escape(item) for item in value]
        case _:
            return value
