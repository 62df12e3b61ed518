"""Runs the work that closes a manager exactly once, however often ``close`` is called."""

from __future__ import annotations

import threading
from collections.abc import Callable
from concurrent.futures import Future, wait
from typing import Final

from ckpt.coordination.leaving import DepartingCoordinator
from ckpt.pipeline.workers import Workers, workers_at_exit

_LIST_SECONDS: Final = 1.0
"""How long a close waits for listings of tiers that an earlier restore has begun."""
_LEAVE_SECONDS: Final = 2.0
"""How long a rank that leaves the other ranks waits for the coordinator to answer."""


class Shutdown:
    """Runs the work that closes a manager, in the background.

    Ctrl-C may interrupt the caller of ``begin`` at any instruction. The caller may then call
    ``begin`` again, which does not run the work a second time. ``outcome`` stays the same.

    Args:
        listers: The threads that list tiers. They are stopped while the work runs.

    Attributes:
        outcome: The future of the work.

    Thread safety: the owner's thread calls the methods. ``_begin_lock`` lets only one thread of the
    group do the work.
    """

    def __init__(self, listers: Workers) -> None:
        self._listers = listers
        self._workers = workers_at_exit("close", 3)
        self._begin_lock = threading.Lock()
        self._work: tuple[Callable[[], None], bool] | None = None
        self._lister_end: Future[None] | None = None
        self.outcome: Future[None] = Future()

    def begin(self, work: Callable[[], None], *, detaches: bool) -> bool:
        """Begin ``work`` in the background, unless an earlier call has begun other work.

        Args:
            work: Closes the manager. It may take long.
            detaches: Whether ``work`` leaves unfinished steps to the agent.

        Returns:
            ``detaches`` as it was given with the work that was begun.
        """
        if self._work is None:
            self._work = work, detaches
        if self._lister_end is None:  # Otherwise a tier that hangs could block two of the threads
            self._lister_end = self._workers.submit(self._listers.close)
        self._workers.submit(self._run)
        return self._work[1]

    def leave(self, coordinator: DepartingCoordinator, reason: str) -> None:
        """Leave the other ranks, and wait some seconds for the work to end.

        Threads of this rank that wait for other ranks then stop waiting, so the work can end.

        Args:
            coordinator: The connection to the other ranks.
            reason: Why this rank leaves, for the errors of the other ranks.
        """
        wait([self._workers.submit(coordinator.leave, reason)], _LEAVE_SECONDS)
        wait([self.outcome], coordinator.look_seconds + _LEAVE_SECONDS)

    def end(self) -> None:
        """Stop the threads.

        If a tier does not answer, a listing may still be under way after a second. The call then
        returns without stopping the threads, which end later by themselves.
        """
        if self._lister_end is not None and wait([self._lister_end], _LIST_SECONDS).done:
            self._workers.close()

    def _run(self) -> None:
        if self._work is None or not self._begin_lock.acquire(blocking=False):
            return
        work, detaches = self._work
        try:
            work()
        except BaseException as error:  # noqa: BLE001 - the caller of ``close`` raises it
            self.outcome.set_exception(error)
        else:
            self.outcome.set_result(None)
        self._work = _do_nothing, detaches  # Drop ``work``, which refers to the manager


def _do_nothing() -> None: ...
