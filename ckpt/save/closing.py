"""The end of a manager's work, which begins once however often a caller asks for it."""

from __future__ import annotations

import threading
from collections.abc import Callable
from concurrent.futures import Future, wait
from typing import Final

from ckpt.coordination.leaving import Leaving
from ckpt.pipeline.workers import Workers, workers_at_exit

_LIST_SECONDS: Final = 1.0
"""How long a close waits for listings that a restore has given up."""
_LEAVE_SECONDS: Final = 2.0
"""How long a rank that leaves waits for the job's store."""


class Closing:
    """Ends the work of a manager in the background.

    Ctrl-C may interrupt the thread that waits for it, at any instruction. A later ``begin`` then
    begins nothing again, and its caller waits for the same end.

    Args:
        listers: The threads that list tiers. They end beside the rest.

    Thread safety: the owner's thread calls the methods. ``_begun`` lets one thread do the work.
    """

    def __init__(self, listers: Workers) -> None:
        self._listers = listers
        self._workers = workers_at_exit("close", 3)
        self._begun = threading.Lock()
        self._work: tuple[Callable[[], None], bool] | None = None
        self._listed: Future[None] | None = None
        self.done: Future[None] = Future()

    def begin(self, work: Callable[[], None], *, detaches: bool) -> bool:
        """Begin ``work``, which may take long, unless an earlier call has given other work.

        ``done`` has the outcome.

        Args:
            work: What ends the work of the manager.
            detaches: Whether ``work`` leaves the rest to the agent.

        Returns:
            Whether the work that was begun does so.
        """
        if self._work is None:
            self._work = work, detaches
        if self._listed is None:  # A tier that does not answer may keep one thread, and not two
            self._listed = self._workers.submit(self._listers.close)
        self._workers.submit(self._run)
        return self._work[1]

    def leave(self, coordinator: Leaving, reason: str) -> None:
        """Leave the other ranks. Threads that wait for them end then, and this waits for that."""
        wait([self._workers.submit(coordinator.leave, reason)], _LEAVE_SECONDS)
        wait([self.done], coordinator.look_seconds + _LEAVE_SECONDS)

    def end(self) -> None:
        """End the threads. A tier that does not answer may keep a listing thread busy, which then
        ends by itself.
        """
        if self._listed is not None and wait([self._listed], _LIST_SECONDS).done:
            self._workers.close()

    def _run(self) -> None:
        if self._work is None or not self._begun.acquire(blocking=False):
            return
        work, detaches = self._work
        try:
            work()
        except BaseException as error:  # noqa: BLE001 - the caller of ``close`` raises it
            self.done.set_exception(error)
        else:
            self.done.set_result(None)
        self._work = _do_nothing, detaches  # Otherwise this and the manager keep each other


def _do_nothing() -> None: ...
