"""The queue before a farther tier: newest first, bounded, and in the same order on all ranks.

A step that a nearer tier has costs no memory but its name while it waits. A step that no nearer
tier has holds its image. It goes before the others, the oldest first, and is never given up.

The newest step is always next, so a tier that is slow, or down for a while, becomes current by
itself. When more than ``backlog`` steps wait, the oldest are given up, because newer ones will be
there sooner. The leader says which, because ranks that took different steps would wait for each
other.
"""

from __future__ import annotations

import logging
import threading
from dataclasses import dataclass
from itertools import takewhile
from typing import Final, Generic, TypeVar

import msgspec

from ckpt.coordination.api import LEADER, Coordinator
from ckpt.errors import CkptError, CommitError, TierBehind
from ckpt.model.keys import StepRef

T = TypeVar("T")
_log = logging.getLogger("ckpt")
_PAUSE_SECONDS: Final = 10.0
"""The pause before the leader is asked again. A store that is gone raises its error at once."""


@dataclass(frozen=True, slots=True)
class QueuedStep(Generic[T]):
    """A step that waits.

    Attributes:
        ref: The step.
        task: What to do with it, for the owner of the queue.
        held: Whether it holds its image on some rank, since no nearer tier has it.
    """

    ref: StepRef
    task: T
    held: bool = False


@dataclass(frozen=True, slots=True)
class Turn(Generic[T]):
    """What a queue gives out at a time.

    Attributes:
        next: The step to take to the tier now; None if the order could not be agreed on, or if it
            was given up meanwhile.
        lost: The steps that never get to the tier, each with the error that says why.
    """

    next: QueuedStep[T] | None
    lost: tuple[tuple[QueuedStep[T], CkptError], ...] = ()


class _Order(msgspec.Struct, frozen=True):
    """What the leader posts. Folders: the step that is taken next, and those that are given up."""

    next: str
    dropped: tuple[str, ...] = ()


class TierQueue(Generic[T]):
    """The steps that wait for one tier. It has no thread: its owner runs one that takes turns.

    Args:
        index: Counts the tier from the nearest. All ranks use the same.
        coordinator: The connection of this queue to the other ranks.
        backlog: How many steps that a nearer tier has may wait beside the next one.
        timeout: How many seconds to wait for the leader, or for a step the leader has taken.

    Thread safety: ``push`` and ``close`` may be called from any thread; ``take`` from one thread at
    a time. ``_changed`` guards all fields, except for ``_serial``, which belongs to the thread that
    takes. ``_closing`` is set once, and may be read without it.
    """

    def __init__(
        self, index: int, coordinator: Coordinator, *, backlog: int, timeout: float
    ) -> None:
        self._index, self._coordinator, self._backlog, self._timeout = (
            index,
            coordinator,
            backlog,
            timeout,
        )
        # None keeps the place of an expected step
        self._steps: dict[str, QueuedStep[T] | None] = {}
        self._given_up: set[str] = set()
        self._serial = 0
        self._closing = self._served = False
        self._changed = threading.Condition()

    @property
    def shared(self) -> bool:
        """Whether other ranks have a queue like this."""
        return self._coordinator.world_size > 1

    def expect(self, ref: StepRef) -> None:
        """Keep a place for a step that holds its image in the queue of a nearer tier.

        The step comes here with its image if that tier fails. A later step that holds its image
        waits behind that place, because a rank with fewer slots cannot begin the later step before.
        """
        with self._changed:
            self._steps.setdefault(ref.folder, None)

    def expect_no_more(self, ref: StepRef) -> None:
        """Give up the place of a step that does not come."""
        with self._changed:
            if self._steps.get(ref.folder, self) is None:
                del self._steps[ref.folder]
                self._changed.notify_all()

    def push(self, step: QueuedStep[T]) -> bool:
        """Queue a step, in its place if it was expected.

        Returns:
            Whether the caller has to start a thread that calls ``take`` until it returns None.
        """
        with self._changed:
            self._steps[step.ref.folder] = step
            self._changed.notify_all()
            start, self._served = not self._served, True
            return start

    def take(self) -> Turn[T] | None:
        """Return what is to be done next. It waits for expected steps and for the leader's order.

        Returns:
            The next turn; None if no step waits. Then the next ``push`` asks for a thread again.
        """
        while True:
            with self._changed:
                if not any(self._steps.values()):
                    self._served = False
                    return None
                self._changed.wait_for(lambda: self._closing or self._can_go_on())
            try:
                return self._next()
            except CommitError as error:
                if self._closing:
                    return Turn(None, self.lose_all(error))
                _log.warning("ckpt: %s; asking again", error)
                with self._changed:
                    self._changed.wait_for(
                        lambda: self._closing, min(_PAUSE_SECONDS, self._timeout)
                    )
            except CkptError as error:
                return Turn(None, self.lose_all(error))
            except BaseException as error:  # noqa: BLE001 - the steps that wait end with it
                wrapped = CkptError(f"the queue before a tier has failed: {error!r}")
                wrapped.__cause__ = error
                return Turn(None, self.lose_all(wrapped))

    def lose_all(self, error: CkptError) -> tuple[tuple[QueuedStep[T], CkptError], ...]:
        """Remove all steps that wait, and return each with ``error``."""
        with self._changed:
            lost = tuple((step, error) for step in self._steps.values() if step is not None)
            self._steps.clear()
            return lost

    def give_up_stored(self) -> list[QueuedStep[T]]:
        """Remove the steps that a nearer tier has, and return them."""
        with self._changed:
            stored = [step for step in self._steps.values() if step is not None and not step.held]
            for step in stored:
                del self._steps[step.ref.folder]
                self._given_up.add(step.ref.folder)
            self._changed.notify_all()
            return stored

    def close(self) -> None:
        """Do not wait for a leader that does not answer. Steps that wait are still taken."""
        with self._changed:
            self._closing = True
            self._changed.notify_all()

    def _next(self) -> Turn[T]:
        subject = f"order/{self._index}/{self._serial + 1}"
        if not self.shared or self._coordinator.rank == LEADER:
            if (order := self._choose()) is None:
                return Turn(None)
            if self.shared:
                self._coordinator.set_once(subject, msgspec.json.encode(order))
                self._serial += 1
            return self._take(order)
        answer = self._coordinator.verdict(subject, timeout=self._timeout)
        if answer is None:
            raise CommitError(
                f"rank {LEADER} did not say within {self._timeout} s which step tier "
                f"{self._index} takes next"
            )
        turn = self._take(msgspec.json.decode(answer, type=_Order))
        self._serial += 1
        return turn

    def _can_go_on(self) -> bool:
        """Return whether there is a step to take or, on a rank that follows, to wait for.

        The caller holds ``_changed``.
        """
        follows = self.shared and self._coordinator.rank != LEADER
        held, stored = self._takable()
        return bool(held or stored or (follows and any(self._steps.values())))

    def _takable(self) -> tuple[list[str], list[str]]:
        """Return the steps that every rank can reach without another slot.

        The caller holds ``_changed``.

        Returns:
            Those that hold their images, and those that a nearer tier has.
        """
        stored = [name for name, step in self._steps.items() if step is not None and not step.held]
        before = takewhile(lambda each: each[1] is not None, self._steps.items())
        return [name for name, step in before if step is not None and step.held], stored

    def _choose(self) -> _Order | None:
        """Choose the oldest step that holds its image, or else the newest step.

        Every rank can reach the oldest one without another slot. Return None if all steps have been
        given up meanwhile.
        """
        with self._changed:
            held, stored = self._takable()
            if not held and not stored:  # At the end, no step is expected any more
                held = [name for name, step in self._steps.items() if step is not None]
        if not held and not stored:
            return None
        dropped = stored[: max(0, len(stored) - 1 - self._backlog)]
        return _Order(held[0] if held else stored[-1], tuple(dropped))

    def _take(self, order: _Order) -> Turn[T]:
        """Remove what ``order`` names, except for steps that have been given up meanwhile.

        The leader may be ahead. Its steps come here too, because the outcome of a save on a nearer
        tier is the same for all ranks.
        """

        def are_known() -> bool:
            return all(self._steps.get(name) or name in self._given_up for name in names)

        names = (order.next, *order.dropped)
        with self._changed:
            if not self._changed.wait_for(are_known, self._timeout):
                raise CommitError(
                    f"{order.next} was to be taken to tier {self._index}, but is not known here"
                )
            next_, *dropped = [self._steps.pop(name, None) for name in names]
            lost = [(step, TierBehind(step.ref.step)) for step in dropped if step is not None]
            return Turn(next_, tuple(lost))
