"""The queue before a farther tier: newest first, bounded, and in the same order on all ranks.

A waiting step that a nearer tier has costs almost no memory. A waiting step that no nearer tier has
holds its image, which is this rank's part of the state, in a slot of memory. Steps that hold their
images go first, the oldest first, and are never given up.

Of the steps that a nearer tier has, the newest goes first. So a tier that is slow, or was down for
a while, gets current steps again by itself. When more than ``backlog`` such steps wait, the oldest
are given up. The leader decides the order for all ranks, because ranks that took different steps
would wait for each other.
"""

from __future__ import annotations

import logging
import threading
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from itertools import takewhile
from typing import Final, Generic, TypeVar

import msgspec

from ckpt.coordination.coordinator import LEADER, Coordinator
from ckpt.errors import CkptError, CommitError, LeftToAgent, TierBehind
from ckpt.model.keys import StepRef
from ckpt.pipeline.workers import Workers
from ckpt.save.job_steps import JobSteps

T = TypeVar("T")
_log = logging.getLogger("ckpt")
_PAUSE_SECONDS: Final = 10.0
"""The pause before the queue asks for the leader's order again. Without a pause it would ask in a
busy loop if the coordinator fails at once.
"""


@dataclass(frozen=True, slots=True)
class QueuedStep(Generic[T]):
    """A step that waits.

    Attributes:
        ref: The step.
        task: The work on the step. The queue returns it to its owner and does not use it.
        holds_image: Whether the step holds its image on some rank, because no nearer tier has the
            step.
    """

    ref: StepRef
    task: T
    holds_image: bool = False


@dataclass(frozen=True, slots=True)
class Turn(Generic[T]):
    """The result of one call of `TierQueue.take`.

    Attributes:
        next: The step to write to the tier now; None if the ranks could not agree on an order, or
            if the step was given up meanwhile.
        losses: The steps that were given up on the tier, each with the error that is the reason.
    """

    next: QueuedStep[T] | None
    losses: tuple[tuple[QueuedStep[T], CkptError], ...] = ()


class _Order(msgspec.Struct, frozen=True):
    """The leader's order: the folder of the next step, and the folders of steps to give up."""

    next: str
    dropped: tuple[str, ...] = ()


class TierQueue(Generic[T]):
    """The steps that wait for one farther tier. Its owner runs the thread that calls ``take``.

    Args:
        index: The index of the tier, counted from the nearest. It is the same on all ranks.
        coordinator: The connection of this queue to the other ranks.
        backlog: How many steps that a nearer tier has may wait, not counting the next one.
        timeout: How many seconds to wait for the leader's order, and until the steps in that order
            are in this queue.

    Attributes:
        has_other_ranks: Whether other ranks have a queue for the same tier. A job of one rank
            needs no vote there.

    Thread safety: ``push`` and ``close`` may be called from any thread; ``take`` from one thread at
    a time. ``_change`` guards all fields, except for ``_serial``, which belongs to the thread that
    calls ``take``. ``_is_closing`` and ``_asks_once`` are set once, and may be read without
    ``_change``. ``_serial`` counts the orders of the leader. After ``_asks_once`` is set, ``take``
    does not ask a silent leader a second time. ``_steps`` maps the folder of each step that waits
    to the step; None keeps the place of an expected step. ``_given_up`` are the folders of steps
    that were given up, and ``_is_served`` is True while a thread calls ``take``. The leader sets an
    order once (``set_once``), and the other ranks wait for it (``verdict``).
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
        self._steps: dict[str, QueuedStep[T] | None] = {}
        self._given_up: set[str] = set()
        self._serial = 0
        self._is_closing = self._is_served = self._asks_once = False
        self.has_other_ranks = coordinator.world_size > 1
        self._change = threading.Condition()

    def expect(self, ref: StepRef) -> None:
        """Keep a place in this queue for a step that waits for a nearer tier with its image.

        If the nearer tier fails, the step is pushed to this queue with its image. A later step that
        holds its image waits behind the place. A rank with fewer slots cannot begin the later step
        before it has released the slot of the expected step.
        """
        with self._change:
            self._steps.setdefault(ref.folder, None)

    def expect_no_more(self, ref: StepRef) -> None:
        """Remove the place of an expected step that will not be pushed to this queue."""
        with self._change:
            # None keeps a place; without a place, the result is ``self``.
            if self._steps.get(ref.folder, self) is None:
                del self._steps[ref.folder]
                self._change.notify_all()

    def push(self, step: QueuedStep[T]) -> bool:
        """Add a step to the queue. If it was expected, it gets the place that was kept for it.

        Returns:
            True if the caller must start a thread that calls ``take`` until that returns None.
        """
        with self._change:
            self._steps[step.ref.folder] = step
            self._change.notify_all()
            start, self._is_served = not self._is_served, True
            return start

    def take(self) -> Turn[T] | None:
        """Return the step to write next, and the steps that are given up.

        The call waits for expected steps and for the leader's order.

        Returns:
            The next turn; None if no step waits. After None, the next ``push`` returns True.
        """
        while True:
            with self._change:
                if not any(self._steps.values()):
                    self._is_served = False
                    return None
                self._change.wait_for(lambda: self._is_closing or self._can_go_on())
            try:
                return self._next_turn()
            except CommitError as error:
                if self._asks_once:
                    return Turn(None, self.lose_all(error))
                _log.warning("ckpt: %s; asking again", error)
                with self._change:
                    self._change.wait_for(
                        lambda: self._asks_once, min(_PAUSE_SECONDS, self._timeout)
                    )
            except CkptError as error:
                return Turn(None, self.lose_all(error))
            except BaseException as error:  # noqa: BLE001 - the steps that wait end with it
                ckpt_error = CkptError(f"the queue before a tier has failed: {error!r}")
                ckpt_error.__cause__ = error
                return Turn(None, self.lose_all(ckpt_error))

    def lose_all(self, error: CkptError) -> tuple[tuple[QueuedStep[T], CkptError], ...]:
        """Remove all steps that wait, and return each with ``error``."""
        with self._change:
            losses = tuple((step, error) for step in self._steps.values() if step is not None)
            self._steps.clear()
            return losses

    def give_up_stored(self) -> list[QueuedStep[T]]:
        """Remove the steps that a nearer tier has, and return them. From now on, a leader that does
        not answer is asked only once, since the owner waits for the other steps.
        """
        with self._change:
            self._asks_once = True
            stored_steps = [
                step for step in self._steps.values() if step is not None and not step.holds_image
            ]
            for step in stored_steps:
                del self._steps[step.ref.folder]
                self._given_up.add(step.ref.folder)
            self._change.notify_all()
            return stored_steps

    def close(self) -> None:
        """Make ``take`` return soon. It still returns the steps that wait, but it does not wait for
        expected steps, and it asks a leader that does not answer only once.
        """
        with self._change:
            self._is_closing = self._asks_once = True
            self._change.notify_all()

    def _next_turn(self) -> Turn[T]:
        """Return the turn that the leader has chosen. Other ranks wait for its order."""
        subject = f"order/{self._index}/{self._serial + 1}"
        if not self.has_other_ranks or self._coordinator.rank == LEADER:
            if (order := self._choose()) is None:
                return Turn(None)
            if self.has_other_ranks:
                # An earlier call may have set an order and got no answer. That order is valid.
                order_in_store = self._coordinator.set_once(subject, msgspec.json.encode(order))
                order = msgspec.json.decode(order_in_store, type=_Order)
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
        """Return True if there is a step to take or, on a rank other than the leader, a step whose
        order is to be awaited.

        The caller holds ``_change``.
        """
        is_follower = self.has_other_ranks and self._coordinator.rank != LEADER
        image_folders, stored_folders = self._takable()
        return bool(image_folders or stored_folders or (is_follower and any(self._steps.values())))

    def _takable(self) -> tuple[list[str], list[str]]:
        """Return the folders of the steps that may be next: every rank can begin them without
        another slot.

        The caller holds ``_change``.

        Returns:
            The steps that hold their images, and the steps that a nearer tier has.
        """
        stored_folders = [
            name for name, step in self._steps.items() if step is not None and not step.holds_image
        ]
        steps_before_place = takewhile(lambda entry: entry[1] is not None, self._steps.items())
        return [
            name for name, step in steps_before_place if step is not None and step.holds_image
        ], stored_folders

    def _choose(self) -> _Order | None:
        """Return the order of the leader; None if all steps have been given up meanwhile.

        The next step is the oldest step that holds its image, since every rank can begin that step
        without another slot. If no step holds its image, the next step is the newest one.
        """
        with self._change:
            image_folders, stored_folders = self._takable()
            if (
                not image_folders and not stored_folders
            ):  # After ``close``, no step is expected any more
                image_folders = [name for name, step in self._steps.items() if step is not None]
        if not image_folders and not stored_folders:
            return None
        dropped_folders = stored_folders[: max(0, len(stored_folders) - 1 - self._backlog)]
        return _Order(
            image_folders[0] if image_folders else stored_folders[-1], tuple(dropped_folders)
        )

    def _take(self, order: _Order) -> Turn[T]:
        """Remove the steps of ``order`` from the queue, and return them. Steps that have been given
        up meanwhile are left out.

        The leader may be ahead of this rank. The call then waits until the steps are in this queue.
        They will be, because the outcome of a save on a nearer tier is the same for all ranks.

        Raises:
            CommitError: A step of ``order`` was not in this queue after ``timeout`` seconds.
        """

        def are_known() -> bool:
            return all(self._steps.get(name) or name in self._given_up for name in names)

        names = (order.next, *order.dropped)
        with self._change:
            if not self._change.wait_for(are_known, self._timeout):
                raise CommitError(
                    f"{order.next} was to be taken to tier {self._index}, but is not known here"
                )
            next_, *dropped_steps = [self._steps.pop(name, None) for name in names]
            losses = [
                (step, TierBehind(step.ref.step)) for step in dropped_steps if step is not None
            ]
            return Turn(next_, tuple(losses))


class QueueServer(Generic[T]):
    """Performs the tasks of the steps that wait for one farther tier, on a thread of its own.

    Args:
        queue: The steps that wait.
        thread: The thread.
        url: The URL of the tier.
        steps: The states of the steps. A step in the queue waits for the tier.
        perform: Performs the task of a step. It raises nothing.
        fail: Called with the task of a step that never gets to the tier, and with the error.

    Thread safety: all methods may be called from any thread. ``_keeps_protection`` is set once.
    """

    def __init__(
        self,
        queue: TierQueue[T],
        thread: Workers,
        url: str,
        steps: JobSteps,
        perform: Callable[[T], None],
        fail: Callable[[T, CkptError], None],
    ) -> None:
        self._queue, self._thread, self._url, self._steps = queue, thread, url, steps
        self._perform, self._fail = perform, fail
        self._keeps_protection = False
        self.has_other_ranks = queue.has_other_ranks
        self.expect, self.expect_no_more = queue.expect, queue.expect_no_more

    def push(self, step: QueuedStep[T]) -> None:
        """Let ``step`` wait for its turn."""
        self._steps.begin_waiting(step.ref, self._url)
        if self._queue.push(step):
            try:
                self._thread.submit(self._serve)
            except CkptError as error:
                # The system has no thread for the queue.
                self._lose(self._queue.lose_all(error))

    def protect(self) -> None:
        """From now on, let the steps that a nearer tier has stay protected there when their turn is
        over, since the agent reads their files.
        """
        self._keeps_protection = True

    def give_up_stored(self) -> None:
        """Leave the steps that a nearer tier has to the agent. They stay protected."""
        for step in self._queue.give_up_stored():
            self._fail(step.task, LeftToAgent(step.ref.step))

    def close(self) -> None:
        """Perform the tasks of the steps that wait, and stop the thread."""
        self._queue.close()
        self._thread.close()

    def _serve(self) -> None:
        """Perform the tasks that the queue returns, until no step waits."""
        while (turn := self._queue.take()) is not None:
            if turn.losses:
                self._lose(turn.losses)
            if turn.next is not None:
                try:
                    self._perform(turn.next.task)
                finally:
                    if turn.next.holds_image or not self._keeps_protection:
                        self._steps.end_waiting(turn.next.ref, self._url)

    def _lose(self, losses: Sequence[tuple[QueuedStep[T], CkptError]]) -> None:
        """Fail each step of ``losses`` with its error."""
        for step, error in losses:
            self._steps.end_waiting(step.ref, self._url)
            self._fail(step.task, error)
