"""The rounds of a restore. In a round, the leader chooses a step, each rank does its part, and all
ranks learn the result.

All ranks make the same calls in the same order. Each call waits for all ranks, within a bound. No
process group is used. A *subject* is the name of an exchange between ranks. A rank that has lost
the connection to another rank has *parted*.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Collection, Iterator
from typing import Final, TypeVar, cast

import msgspec
from msgspec.structs import replace

from ckpt.coordination.coordinator import LEADER, Coordinator
from ckpt.coordination.exchanges import Wait, encode_json, leader_decides
from ckpt.coordination.long_message import drop, receive, send
from ckpt.errors import CkptError, RestoreError, StorageError
from ckpt.plan.read_errors import is_damage

_GRACE_SECONDS: Final = 60.0
"""How many seconds longer than the leader the other ranks wait, so that they get its error."""

_PARTED_SECONDS: Final = 10.0
"""How many seconds the leader waits for more answers, once a rank has answered ``parted``."""
_SEVERITY: Final = {"ok": 0, "damaged": 1, "parted": 2, "stop": 3}

_LONG_BYTES: Final = 1 << 20
"""Names are sent apart from their answer if their JSON is longer than this."""
_SENT_SECONDS: Final = 30.0
"""How many seconds to wait for names that were sent before their answer."""

T = TypeVar("T")


class DamageError(Exception):
    """A rank has met damaged data. All ranks raise this error."""


class ConnectionLost(Exception):
    """This rank has lost the connection to other ranks.

    The cause is an error on one of the other ranks, or in the network.
    """


class _Answer(msgspec.Struct, frozen=True):
    """The answer of a rank after its part of a round.

    Attributes:
        outcome: ``ok``, ``damaged`` (try the next step), ``parted`` (the rank has lost the
            connection to another rank, which may report the cause) or ``stop`` (end the restore).
        reason: Why the outcome is not ``ok``.
        names: The names that the rank reports (see `RestoreRounds.do`), unless they are long.
        nbytes: The size of the JSON of long names, which the rank has sent as a long message; 0 if
            ``names`` has all names. An expert-parallel job has names for more than one request.
    """

    outcome: str
    reason: str = ""
    names: tuple[str, ...] = ()
    nbytes: int = 0


_answer_decoder: Final = msgspec.json.Decoder(_Answer)
_names_decoder: Final = msgspec.json.Decoder(tuple[str, ...])


class RestoreRounds:
    """The rounds of one restore.

    ``_round`` is the number of the round, which is a part of its subjects.

    Args:
        coordinator: The connection to the other ranks.
        subject: A name that no other restore of the attempt has.
        patience: How many seconds ranks wait for each other.

    Thread safety:
        Only the training thread may call the methods.
    """

    def __init__(self, coordinator: Coordinator, *, subject: str, patience: float) -> None:
        self._coordinator, self._subject, self._patience = coordinator, subject, patience
        self._round = 0

    @property
    def subject(self) -> str:
        """The subject of the current round."""
        return f"{self._subject}/{self._round}"

    def next(self, choices: Iterator[T], kind: type[T]) -> T | None:
        """Begin a round, and return the leader's next choice on all ranks. Return None if the
        leader has no more choices.

        Args:
            choices: The choices. Only those on the leader are used.
            kind: The type of a choice.

        Raises:
            StorageError: ``choices`` has raised an error on the leader. The leader itself raises
                that error.
            CommitTimeout: The leader did not choose in time.
        """
        self._round += 1
        subject = f"{self.subject}/proposal"
        failure: Exception | None = None

        def choose() -> dict[str, str] | T | None:
            nonlocal failure
            try:
                return next(choices, None)
            except Exception as error:  # noqa: BLE001 - the other ranks wait for an answer
                failure = error
                return {"error": str(error)}

        wait = Wait(self._patience, "the choice of a step")
        choice = leader_decides(self._coordinator, subject, choose, wait, object)
        if failure is not None:
            raise failure
        if isinstance(choice, dict) and "error" in choice:
            raise StorageError("", f"rank {LEADER} cannot choose a step: {choice['error']}")
        return None if choice is None else msgspec.convert(choice, kind, str_keys=True)

    def do(
        self, topic: str, step: int, work: Callable[[], T], names: Callable[[T], tuple[str, ...]]
    ) -> tuple[T, tuple[str, ...]]:
        """Call ``work`` on all ranks, and wait until all ranks have ended it.

        Args:
            topic: The name of this work in the subject of the exchange.
            step: The step, for errors.
            work: The work of this rank.
            names: A function that takes the result of ``work`` and returns the names that this rank
                reports. Names are paths with slashes, and a name stands for all names below it.

        Returns:
            The result of ``work`` on this rank, and the names that every rank has reported.

        Raises:
            DamageError: A rank has met damaged data.
            RestoreError: A rank has failed in another way, or has not answered in time. If ``work``
                has raised a ``CkptError`` on this rank, this rank raises that error instead.
            CommitTimeout: The leader has not answered in time.
        """
        result: T | None = None
        error: Exception | None = None
        try:
            result = work()
            own_answer = _Answer("ok", names=names(result))
        except Exception as cause:  # noqa: BLE001 - raised below, once the other ranks know
            error = cause
            outcome = (
                "damaged"
                if is_damage(cause)
                else "parted"
                if isinstance(cause, ConnectionLost)
                else "stop"
            )
            own_answer = _Answer(outcome, str(cause) or repr(cause))
        answer = self._poll(f"{self.subject}/{topic}", step, own_answer)
        if answer.outcome == "damaged":
            raise DamageError(answer.reason) from error
        if answer.outcome != "ok":
            raise error if isinstance(error, CkptError) else RestoreError(answer.reason) from error
        return cast("T", result), answer.names  # ``work`` has returned, and may have returned None

    def _poll(self, subject: str, step: int, own_answer: _Answer) -> _Answer:
        """Post the answer of this rank, and return the worst answer of all ranks on each rank."""
        own_subject, shared_subject = f"{subject}/names", f"{subject}/shared"
        short_answer, pieces = self._send(own_subject, own_answer)
        self._coordinator.post(subject, encode_json(short_answer))
        wait = Wait(self._patience + _GRACE_SECONDS, "the end of the restore", step)

        def decide() -> _Answer:
            shared_answer, _ = self._send(shared_subject, self._worst_answer(subject, step))
            return shared_answer

        answer = leader_decides(self._coordinator, subject, decide, wait, _Answer)
        if pieces:
            drop(self._coordinator, own_subject, pieces)
        return self._with_names(shared_subject, LEADER, answer)

    def _send(self, subject: str, answer: _Answer) -> tuple[_Answer, int]:
        """If the names of ``answer`` are long, send them on ``subject``.

        Returns:
            The answer as it is to be posted, and the number of pieces that were sent.
        """
        names = encode_json(answer.names)
        if len(names) <= _LONG_BYTES:
            return answer, 0
        pieces = send(self._coordinator, subject, names)
        return replace(answer, names=(), nbytes=len(names)), pieces

    def _with_names(self, subject: str, rank: int, answer: _Answer) -> _Answer:
        """Return ``answer`` of ``rank`` with its names, which may be sent on ``subject``."""
        if not answer.nbytes:
            return answer
        names = receive(
            self._coordinator, subject, rank, limit=answer.nbytes, timeout=_SENT_SECONDS
        )
        return replace(answer, names=_names_decoder.decode(names), nbytes=0)

    def _worst_answer(self, subject: str, step: int) -> _Answer:
        """Collect the answers of all ranks, on the leader, and return the worst. If all are "ok",
        it has the names that all ranks have reported.
        """
        missing = set(range(self._coordinator.world_size))
        deadline = time.monotonic() + self._patience
        worst = _Answer("ok")
        common_names: set[str] | None = None
        # After "stop", the leader waits for no more answers, since another rank may be dead.
        while missing and worst.outcome != "stop":
            messages = self._coordinator.collect(
                subject, missing, timeout=max(0.0, deadline - time.monotonic())
            )
            if not messages:
                ranks = ", ".join(map(str, sorted(missing)[:16]))
                if worst.outcome == "parted":
                    return _Answer("stop", f"step {step}: rank(s) {ranks} are gone; {worst.reason}")
                reason = f"rank(s) {ranks} did not finish the restore in {self._patience:.0f} s"
                return _Answer("stop", f"step {step}: {reason}")
            for rank, data in messages.items():
                missing.discard(rank)
                answer = self._with_names(f"{subject}/names", rank, _answer_decoder.decode(data))
                common_names = (
                    set(answer.names)
                    if common_names is None
                    else common(common_names, set(answer.names))
                )
                if _SEVERITY[answer.outcome] > _SEVERITY[worst.outcome]:
                    prefix = f"rank {rank}: " if self._coordinator.world_size > 1 else ""
                    worst = _Answer(answer.outcome, prefix + answer.reason)
            # The rank that caused the lost connection answers soon, or is dead.
            if worst.outcome == "parted":
                deadline = min(deadline, time.monotonic() + _PARTED_SECONDS)
        return (
            worst
            if worst.outcome != "ok"
            else _Answer("ok", names=tuple(sorted(common_names or ())))
        )


def common(names_a: Collection[str], names_b: Collection[str]) -> set[str]:
    """Return the names that both collections hold. A name stands for all names below it."""
    return {
        name for name in {*names_a, *names_b} if _covers(names_a, name) and _covers(names_b, name)
    }


def _covers(names: Collection[str], name: str) -> bool:
    while name and name not in names:
        name = name.rpartition("/")[0]
    return bool(name)
