"""What all ranks do together in a restore: the leader chooses, each does its part, and what fails on one is heard by all.

Every call is made alike on all ranks, and waits for all of them, within a bound. No process group is used.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Collection, Iterator
from typing import Any, Final, TypeVar

import msgspec

from ckpt.coordination.api import Coordinator
from ckpt.coordination.commit import LEADER
from ckpt.coordination.exchange import Wait, leader_decides
from ckpt.errors import CkptError, RestoreError, StorageError
from ckpt.plan.sources import is_damage

_GRACE_SECONDS: Final = 60.0
"""How much longer than the leader the others wait: what it says of a rank that is late must reach them."""

_PARTED_SECONDS: Final = 10.0
"""How long a rank that others have lost is given to say why."""
_GRAVITY: Final = {"ok": 0, "damaged": 1, "parted": 2, "stop": 3}

T = TypeVar("T")


class Damaged(Exception):
    """Some rank met damage: all of them know."""


class Parted(Exception):
    """This rank has lost touch with others: what went wrong did so on one of them, or on the way."""


class _Answer(msgspec.Struct, frozen=True):
    """``ok``, ``damaged`` (try the next), ``parted`` (lost touch with some rank, which may know why) or ``stop``. ``names`` are what a rank's ``work`` is known by to the others."""

    outcome: str
    reason: str = ""
    names: tuple[str, ...] = ()


class Together:
    """Threads: the training thread.

    Args:
        subject: Tells this conversation from all others of the attempt.
        patience: Seconds that ranks wait for each other.
    """

    def __init__(self, coordinator: Coordinator, *, subject: str, patience: float) -> None:
        self._coordinator, self._subject, self._patience = coordinator, subject, patience
        self._round = 0

    @property
    def subject(self) -> str:
        """Of the present round."""
        return f"{self._subject}/{self._round}"

    def next(self, choices: Iterator[T], kind: type[T]) -> T | None:
        """The leader's next choice, on all ranks; begins a round.

        Args:
            choices: The leader's; nobody else's is looked at.

        Raises:
            StorageError: The leader failed to choose.
            CommitTimeout: It did not choose in time.
        """
        self._round += 1
        subject = f"{self.subject}/proposal"
        chosen: list[T | Exception | None] = []

        def choose() -> bytes:
            try:
                chosen.append(next(choices, None))
            except Exception as error:  # noqa: BLE001 - the others wait for it
                chosen.append(error)
            choice = chosen[0]
            return msgspec.json.encode({"error": str(choice)} if isinstance(choice, Exception) else choice)

        decided = leader_decides(
            self._coordinator, subject, choose, Wait(self._patience, "the choice of a step")
        )
        if chosen:
            if isinstance(chosen[0], Exception):
                raise chosen[0]
            return chosen[0]
        node: Any = msgspec.json.decode(decided)
        if node and "error" in node:
            raise StorageError("", f"rank {LEADER} cannot list the tiers: {node['error']}")
        return msgspec.convert(node, kind, str_keys=True) if node else None

    def do(
        self, what: str, step: int, work: Callable[[], T], names: Callable[[T], tuple[str, ...]]
    ) -> tuple[T, tuple[str, ...]]:
        """Do ``work`` on all ranks; returns its result and the ``names`` that all ranks gave (one stands for all below it, by slashes), or raises on all what failed on one.

        Raises:
            Damaged: Some rank met damage.
            RestoreError: Some rank failed otherwise. On that rank its own error, if it is one of ours.
        """
        result: T | None = None
        error: Exception | None = None
        try:
            result = work()
            mine = _Answer("ok", names=names(result))
        except Exception as failed:  # noqa: BLE001 - the others must hear of it before it is raised
            error = failed
            outcome = "damaged" if is_damage(failed) else "parted" if isinstance(failed, Parted) else "stop"
            mine = _Answer(outcome, str(failed) or repr(failed))
        answer = self._poll(f"{self.subject}/{what}", step, mine)
        if answer.outcome == "damaged":
            raise Damaged(answer.reason) from error
        if answer.outcome != "ok" or result is None:
            raise error if isinstance(error, CkptError) else RestoreError(answer.reason) from error
        return result, answer.names

    def _poll(self, subject: str, step: int, mine: _Answer) -> _Answer:
        """The worst answer of all ranks, on all ranks."""
        self._coordinator.post(subject, msgspec.json.encode(mine))
        decided = leader_decides(
            self._coordinator,
            subject,
            lambda: msgspec.json.encode(self._worst(subject, step)),
            Wait(self._patience + _GRACE_SECONDS, "the end of the restore", step),
        )
        return msgspec.json.decode(decided, type=_Answer)

    def _worst(self, subject: str, step: int) -> _Answer:
        missing = set(range(self._coordinator.world_size))
        deadline = time.monotonic() + self._patience
        worst = _Answer("ok")
        shared: set[str] | None = None
        while (
            missing and worst.outcome != "stop"
        ):  # nobody shall wait for more: one of the others may be dead
            messages = self._coordinator.collect(
                subject, missing, timeout=max(0.0, deadline - time.monotonic())
            )
            if not messages:
                ranks = ", ".join(map(str, sorted(missing)[:16]))
                if worst.outcome == "parted":
                    return _Answer("stop", f"step {step}: rank(s) {ranks} are gone; {worst.reason}")
                late = f"rank(s) {ranks} did not finish the restore in {self._patience:.0f} s"
                return _Answer("stop", f"step {step}: {late}")
            for rank, data in messages.items():
                missing.discard(rank)
                answer = msgspec.json.decode(data, type=_Answer)
                shared = set(answer.names) if shared is None else common(shared, set(answer.names))
                if _GRAVITY[answer.outcome] > _GRAVITY[worst.outcome]:
                    where = f"rank {rank}: " if self._coordinator.world_size > 1 else ""
                    worst = _Answer(answer.outcome, where + answer.reason)
            if worst.outcome == "parted":  # whose fault it was is about to be told, or that one is dead
                deadline = min(deadline, time.monotonic() + _PARTED_SECONDS)
        return worst if worst.outcome != "ok" else _Answer("ok", names=tuple(sorted(shared or ())))


def common(one: Collection[str], two: Collection[str]) -> set[str]:
    """The names in both. They are parted by slashes, and one stands for all below it."""
    return {name for name in {*one, *two} if _holds(one, name) and _holds(two, name)}


def _holds(names: Collection[str], name: str) -> bool:
    while name and name not in names:
        name = name.rpartition("/")[0]
    return bool(name)
