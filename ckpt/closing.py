"""The end of a manager: it finishes its saves or leaves them to the agent, and frees what it holds.

The work of a close runs exactly once, however often ``close`` is called.

The *agent* is a process of the node that can finish what a job leaves. To *detach* is to leave the
rest of the work to it. A rank *leaves* the other ranks if an error ends its process while they go
on. The *coordinator* is the connection to the other ranks. The *saver* writes to the tiers in the
background, and the *ledger* knows each save and its error. The *fence* holds the steps of
optimizers while tensors are copied. *Slots* are buffers in host memory. The *plans* and the *last
walk* are what earlier saves have computed. The *guard* knows which calls are under way, and refuses
those that are not possible. The attribute ``stop`` listens for a planned stop, and the *journals*
record the run.
"""

from __future__ import annotations

import os
import sys
import threading
from collections.abc import Callable, Sequence
from concurrent.futures import Future, wait
from dataclasses import dataclass
from functools import partial
from typing import Final

from ckpt.agent.registration import Registration, check_detach
from ckpt.config import SaveConfig
from ckpt.coordination.coordinator import LEADER
from ckpt.coordination.leaving import END_OF_DATA, OwnCoordinator, reason_of
from ckpt.elastic.ending_error import ending_error
from ckpt.elastic.manager_calls import CallGuard
from ckpt.elastic.stop_listener import StopListener
from ckpt.observe.journal import Journal, end_journals
from ckpt.pending import check_timeout, missing_at_the_end, wait_and_log
from ckpt.pipeline.workers import Workers, await_at_exit, workers_at_exit
from ckpt.save.ledger import SaveLedger
from ckpt.save.saver import Saver
from ckpt.staging.fence import Fence
from ckpt.state.walk.last_walk import LastWalk
from ckpt.state.walk.plan_cache import PlanCache
from ckpt.storage.tiers import OpenTier

_LIST_SECONDS: Final = 1.0
"""How long a close waits for listings of tiers that an earlier restore has begun."""
_LEAVE_SECONDS: Final = 2.0
"""How long a rank that leaves the other ranks waits for the coordinator to answer."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Holdings:
    """What a manager holds until it is closed, and what its close needs."""

    config: SaveConfig
    tiers: Sequence[OpenTier]
    coordinator: OwnCoordinator
    saver: Saver
    ledger: SaveLedger
    agent: Registration | None
    guard: CallGuard
    stop: StopListener
    listers: Workers
    fence: Fence
    plans: PlanCache
    last_walk: LastWalk
    journals: Sequence[Journal]


class Closer:
    """Closes one manager.

    ``_shutdown`` runs the work of the close on a thread, once, and ``_shutdown.outcome`` is the
    future of that work. ``_has_ended`` is True once a call of ``close`` is over.
    ``_is_interrupted`` is True if Ctrl-C has ended a call while the work went on.

    Args:
        holdings: What the manager holds.

    Thread safety: the training thread calls the methods, or the main thread when the script ends.
    """

    def __init__(self, holdings: Holdings) -> None:
        self._holdings = holdings
        self._shutdown = Shutdown(holdings.listers)
        # ``close`` ignores an exception that was already being handled at this point.
        self._earlier_error = sys.exception()
        self._has_ended = self._is_interrupted = False

    def check(self, timeout: float | None, *, detach: bool) -> BaseException | None:
        """Check the arguments of ``CheckpointManager.close``, and return the error that ends the
        process; None if there is none. If Ctrl-C has interrupted an earlier close, wait until the
        work that it has left under way has ended.
        """
        check_timeout(timeout)
        if detach and not self._holdings.guard.is_closed:
            check_detach(self._holdings.config.agent, self._holdings.agent)
        # An error that was being handled as the manager was made does not count.
        error = ending_error(but=self._earlier_error)
        if self._has_ended and self._is_interrupted and error is None:
            wait_and_log(self._shutdown.outcome, (), timeout)
        return error

    def close(
        self, error: BaseException | None, timeout: float | None = None, *, detach: bool = False
    ) -> None:
        """Close the manager as ``CheckpointManager.close`` does.

        Args:
            error: The error that ends the process or the ``with`` block; None if there is none.
            timeout: See ``CheckpointManager.close``.
            detach: See ``CheckpointManager.close``.
        """
        holdings, ledger = self._holdings, self._holdings.ledger
        guard, thread = holdings.guard, threading.get_ident()
        guard.check_alone("close")
        if guard.calls.get(thread) == "close":  # A signal handler has interrupted ``close``
            return
        try:
            guard.calls[thread] = "close"
            # In a forked process, the memory, the threads and the root belong to the parent.
            if self._has_ended or os.getpid() != guard.pid:
                return
            guard.is_closed = True
            holdings.saver.slots.stop()  # Stop first, so that no thread begins another slot
            error = None if isinstance(error, END_OF_DATA) else error  # Such as StopIteration
            reason = reason_of(error)  # Why this rank leaves the other ranks; empty if it does not
            timeout = holdings.config.exit_seconds if reason and timeout is None else timeout
            detach = detach or bool(reason and holdings.agent)
            work = partial(self._detach if detach else self._finish, reason)
            # If Ctrl-C has interrupted an earlier call, its work goes on with its ``detach``.
            detach, future = self._shutdown.begin(work, detaches=detach), self._shutdown.outcome
            in_time = wait_and_log(future, ledger.pending, timeout)
            self._is_interrupted = isinstance(error, KeyboardInterrupt) and not in_time
            if reason and not in_time:
                ledger.give_up(reason, timeout)
                if holdings.coordinator.world_size > 1:
                    self._shutdown.leave(holdings.coordinator, reason)
                holdings.fence.remove()
            holdings.stop.close(error)
            if holdings.agent is not None and in_time and not (detach or future.exception()):
                holdings.agent.forget()
            is_planned = holdings.saver.steps.last_step is not None
            end_journals(holdings.journals, error, is_planned=is_planned)
            self._has_ended = True  # A second call does nothing, even if an error is raised below
            if in_time:
                self._shutdown.end()
                future.result()
            ledger.raise_unreported(includes_kept=False)  # Errors of steps that no tier has
            agent_finishes = in_time and detach
            missing_steps = None if agent_finishes else missing_at_the_end(ledger.pending, timeout)
            if (error := ledger.closing_error(missing_steps)) is not None:
                raise error
        finally:  # The decorator ``one_at_a_time`` would add its frame to each traceback
            guard.calls.pop(thread, None)

    def _detach(self, reason: str) -> None:
        """Finish the work that only this process can do, and leave the other work to the agent.

        Work that this process still has to end, such as the copy of a part of a file to a slow
        tier, ends on a thread of its own. Only the end of the script waits for that thread, at most
        for ``exit_seconds``.

        Args:
            reason: Why this rank leaves the other ranks; empty if it does not leave them.
        """
        holdings = self._holdings
        assert holdings.agent is not None
        try:
            holdings.saver.detach(leaves=bool(reason))
            holdings.agent.detach(reason)
        finally:
            if reason:
                holdings.coordinator.leave(reason)  # The other ranks need not wait for what follows
            end_of_work = Workers("end", 1).submit(self._finish, reason)
            await_at_exit(end_of_work, holdings.config.exit_seconds)

    def _finish(self, reason: str) -> None:
        """Finish all saves, free the memory, and close the coordinator and the tiers.

        Args:
            reason: Why this rank leaves the other ranks; empty if it does not leave them.
        """
        holdings, coordinator = self._holdings, self._holdings.coordinator
        holdings.saver.finish(leaves=bool(reason))
        holdings.fence.remove()
        holdings.plans.forget()
        holdings.last_walk.forget()
        holdings.saver.slots.close()
        if reason:
            coordinator.leave(reason)
        if not reason or coordinator.rank != LEADER:  # A leader would wait for the others
            coordinator.close()
        for tier in holdings.tiers:
            tier.backend.close()


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
        _, begun_detaches = self._work
        return begun_detaches

    def leave(self, coordinator: OwnCoordinator, reason: str) -> None:
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
        """Do the work once, and set ``outcome``."""
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
