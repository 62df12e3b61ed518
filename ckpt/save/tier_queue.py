"""The queue before a farther tier: newest first, bounded, and the same order on all ranks.

A step that lies on a nearer tier costs no memory but its name while it waits. A step that no nearer tier has holds its image: it goes before the others, the oldest first, and is never given up.

A tier that is slow, or down for a while, catches up by itself: the newest step is always next, and
when more than ``backlog`` wait, the oldest are given up, for newer ones will be there sooner. Which it is is the leader's to say: ranks that took different steps would wait for each other.
"""

from __future__ import annotations

import logging
import threading
from collections.abc import Callable, Iterable
from dataclasses import dataclass
from itertools import takewhile
from typing import Final

import msgspec

from ckpt.coordination.api import Coordinator
from ckpt.coordination.commit import LEADER
from ckpt.errors import CkptError, CommitError, TierBehind
from ckpt.model.keys import StepRef
from ckpt.pipeline.workers import Workers

_log = logging.getLogger("ckpt")
_PAUSE_SECONDS: Final = 10.0
"""Before the leader is asked again: the job's store may be gone, and says so at once."""


@dataclass(frozen=True, slots=True)
class QueuedStep:
    """A step that waits.

    Attributes:
        work: Takes the step to the tier.
        failed: Called with the error if the step never gets there.
        held: Whether it holds its image on some rank, since no nearer tier has it.
    """

    ref: StepRef
    work: Callable[[], None]
    failed: Callable[[CkptError], None]
    held: bool = False


class _Order(msgspec.Struct, frozen=True):
    """Folders: what is taken next, and what is given up."""

    next: str
    dropped: tuple[str, ...] = ()


class TierQueue:
    """Threads: ``push`` from the streaming thread; ``waiting`` from any; ``close`` from the owner, once."""

    def __init__(
        self,
        index: int,
        coordinator: Coordinator,
        *,
        backlog: int,
        timeout: float,
        nice: int = 0,
        cpus: Iterable[int] | None = None,
    ) -> None:
        self._index, self._coordinator, self._backlog, self._timeout = index, coordinator, backlog, timeout
        self._queue: dict[str, QueuedStep | None] = {}  # None keeps the place of a step that is expected
        self._busy: QueuedStep | None = None
        self._serial = 0
        self._closing = False
        self._changed = threading.Condition()
        self._workers = Workers(f"drain{index}", 1, nice=nice, cpus=cpus)
        self._running = False

    @property
    def shared(self) -> bool:
        """Whether other ranks have a queue like this."""
        return self._coordinator.world_size > 1

    @property
    def waiting(self) -> list[StepRef]:
        """Steps that are not there yet, the one on its way included."""
        with self._changed:
            busy = [self._busy.ref] if self._busy else []
            return busy + [item.ref for item in self._queue.values() if item is not None]

    def expect(self, ref: StepRef) -> None:
        """Keep a place for a step that holds its image in a nearer tier's queue, and comes here with it if that tier fails.

        A later step that holds its image waits behind that place: a rank with fewer slots cannot begin it before.
        """
        with self._changed:
            self._queue.setdefault(ref.folder, None)

    def expect_no_more(self, ref: StepRef) -> None:
        """Give up the place of a step that does not come."""
        with self._changed:
            if self._queue.get(ref.folder, self) is None:
                del self._queue[ref.folder]
                self._changed.notify_all()

    def push(self, item: QueuedStep) -> None:
        """Queue a step, in its place if it was expected."""
        with self._changed:
            self._queue[item.ref.folder] = item
            self._changed.notify_all()
            if not self._running:
                self._running = True
                self._workers.submit(self._run)

    def close(self) -> None:
        """Return when all that waits is there, or has failed."""
        with self._changed:
            self._closing = True
            self._changed.notify_all()
        self._workers.close()

    def _run(self) -> None:
        while True:
            with self._changed:
                self._changed.wait_for(lambda: self._can_go_on() or self._closing)
                if not any(self._queue.values()):
                    return
            try:
                item, dropped = self._next()
            except BaseException as error:  # noqa: BLE001 - those that wait must hear of it
                if isinstance(error, CommitError) and not self._closing:
                    _log.warning("ckpt: %s; asking again", error)
                    with self._changed:
                        self._changed.wait_for(lambda: self._closing, min(_PAUSE_SECONDS, self._timeout))
                    continue
                for lost in self._take_all():
                    lost.failed(
                        error if isinstance(error, CkptError) else CkptError(f"a drain has failed: {error!r}")
                    )
                continue
            for lost in dropped:
                lost.failed(TierBehind(lost.ref.step))
            self._perform(item)

    def _perform(self, item: QueuedStep) -> None:
        try:
            item.work()
        except CkptError as error:
            item.failed(error)
        except BaseException as error:  # noqa: BLE001 - it must reach the caller, whatever it is
            wrapped = CkptError(f"step {item.ref.step} failed: {error!r}")
            wrapped.__cause__ = error
            item.failed(wrapped)
        finally:
            with self._changed:
                self._busy = None

    def _next(self) -> tuple[QueuedStep, list[QueuedStep]]:
        if self._coordinator.world_size == 1:
            return self._take(self._choose())
        subject = f"order/{self._index}/{self._serial + 1}"
        if self._coordinator.rank == LEADER:
            order = self._choose()
            self._coordinator.set_once(subject, msgspec.json.encode(order))
            self._serial += 1
            return self._take(order)
        told = self._coordinator.verdict(subject, timeout=self._timeout)
        if told is None:
            raise CommitError(
                f"rank {LEADER} did not say within {self._timeout} s which step tier {self._index} takes next"
            )
        order = msgspec.json.decode(told, type=_Order)
        found = self._take(order)
        self._serial += 1
        return found

    def _can_go_on(self) -> bool:
        """Whether there is a step to take or, on a rank that follows, to wait for."""
        follows = self.shared and self._coordinator.rank != LEADER
        held, stored = self._takable()
        return bool(held or stored or (follows and any(self._queue.values())))

    def _takable(self) -> tuple[list[str], list[str]]:
        """Steps that every rank can reach without another slot: those that hold their images, and those that are stored."""
        stored = [name for name, item in self._queue.items() if item is not None and not item.held]
        before = takewhile(lambda each: each[1] is not None, self._queue.items())
        return [name for name, item in before if item is not None and item.held], stored

    def _choose(self) -> _Order:
        """Choose the oldest step that holds its image, or else the newest step. Every rank can reach the oldest one without another slot."""
        with self._changed:
            held, stored = self._takable()
            if not held and not stored:  # at the end, when no step is expected any more
                held = [name for name, item in self._queue.items() if item is not None]
        dropped = stored[: max(0, len(stored) - 1 - self._backlog)]
        return _Order(held[0] if held else stored[-1], tuple(dropped))

    def _take(self, order: _Order) -> tuple[QueuedStep, list[QueuedStep]]:
        """What the order names. The leader may be ahead: its steps come here too, for a verdict on a nearer tier is the same for all."""
        names = (order.next, *order.dropped)
        with self._changed:
            if not self._changed.wait_for(lambda: all(map(self._queue.get, names)), self._timeout):
                raise CommitError(
                    f"{order.next} was to be taken to tier {self._index}, but is not known here"
                )
            taken = [item for name in names if (item := self._queue.pop(name)) is not None]
            self._busy = taken[0]
            return taken[0], taken[1:]

    def _take_all(self) -> list[QueuedStep]:
        with self._changed:
            found = [item for item in self._queue.values() if item is not None]
            self._queue.clear()
            return found
