"""The agent: one loop that listens, watches the processes of jobs, and starts workers.

The agent itself copies nothing and imports no client of a store, so it needs little memory. A
worker is a separate process that works for one job, with the environment of that job. The agent
stops a worker by killing it, since a worker may be killed at any instruction.

Two agents never copy at the same time. ``listen.lock`` belongs to the agent that has the socket,
and ``work.lock`` to the agent that may start workers. Workers inherit ``work.lock``, so an agent
that replaces a dead one waits until the last worker of the dead agent has ended. An agent that was
replaced and only has memory left to free releases ``work.lock``.

A job is *finished* once durable tiers have its steps. Then only its memory is left to free. A job
is *held up* while another job on the same root has a living trainer or a worker. A *lent* worker
copies files for a living trainer.
"""

from __future__ import annotations

import logging
import os
import selectors
import signal
import socket
import time
from contextlib import suppress
from functools import partial
from typing import Final

import msgspec

from ckpt.agent.connections import Caller, Callers
from ckpt.agent.folder import AgentFolder, Lock
from ckpt.agent.messages import (
    VERSION,
    AgentStatus,
    Answer,
    AskStatus,
    AskWorker,
    Detach,
    Done,
    Forget,
    Job,
    JobStatus,
    Refused,
    Request,
    Stop,
    Stopped,
    encode,
)
from ckpt.agent.scrub_rounds import Rounds
from ckpt.agent.watched_job import WatchedJob, allow_descriptors, share_a_root
from ckpt.agent.worker_messages import Ended, Order, Report, Verified
from ckpt.agent.worker_process import Worker, Workplace
from ckpt.errors import AgentError, ConfigError

_log = logging.getLogger("ckpt")
_READ_BYTES: Final = 1 << 16
_LOOK_SECONDS: Final = 0.2
"""The shortest time that the loop waits before it checks again for work that is due. An agent that
waits for ``work.lock`` tries to take it that often.
"""
_SOCKET_SECONDS: Final = 5.0
"""How often an agent checks that its socket exists. A program that cleans up temporary files may
have removed it.
"""
_GIVE_UP_SECONDS: Final = 24 * 3600.0
"""For how long after the end of its trainer the agent tries to finish a job."""
_MAX_JOBS_LISTED: Final = 16
"""The status lists at most this many jobs that are over."""
_MOST_WORKERS: Final = 8
"""The most jobs that the agent finishes at the same time. Each takes a worker, and so memory."""
_MOST_LENT_WORKERS: Final = 32
"""The most workers that copy for living trainers at the same time. A trainer process needs one
worker for each farther tier.
"""


class Agent:
    """The agent of one user on one node.

    An *attempt* is the id of one incarnation of a job. ``_jobs`` has a `WatchedJob` for each job
    that is not over. ``_past_jobs`` has the status of the last jobs that are over, and
    ``_given_up_jobs`` the status of each job that the agent has given up. ``_stop_caller`` is the
    connection that has sent `Stop`. ``_rounds`` starts the rounds of verification one after
    another, and its ``cancel`` kills the worker of the present round. ``_workplace`` is what each
    worker needs. ``_lent_workers`` has the attempt that each lent worker copies for. The agent
    holds ``work.lock`` while ``_has_work_lock`` is True. Once ``_is_ending`` is True, the agent
    takes no new jobs. The loop waits at ``_selector``, and calls the data of each ready key.

    Args:
        folder: The folder of the agent.
        idle_seconds: After how many seconds without a job the agent ends.
        memory_seconds: How many seconds the steps of an ended job stay in memory after durable
            tiers have them.
        scrub_seconds: The time between two verifications of a step.

    Thread safety: one thread, which calls ``listen`` and then ``run``.
    """

    def __init__(
        self,
        folder: AgentFolder,
        *,
        idle_seconds: float,
        memory_seconds: float,
        scrub_seconds: float,
    ) -> None:
        self._folder, self._rounds = folder, Rounds(scrub_seconds, self._tell_trainer)
        self._idle_seconds, self._memory_seconds = idle_seconds, memory_seconds
        self._work_lock = Lock(folder, "work")
        self._has_work_lock = self._is_ending = self._has_signal = False
        # ``_busy_at`` is when the agent last had a job, by the monotonic clock.
        self._start_time, self._busy_at = time.time(), time.monotonic()
        self._jobs: list[WatchedJob] = []
        self._past_jobs: list[JobStatus] = []
        self._given_up_jobs: list[JobStatus] = []
        self._stop_caller: Caller | None = None
        self._selector = selectors.DefaultSelector()
        self._callers = Callers(folder, self._selector, self._answer)
        self._workplace = Workplace(folder, self._work_lock, self._selector)
        self._lent_workers: dict[Worker, str] = {}

    def listen(self) -> bool:
        """Open the socket, and return True. Return False if another agent has it."""
        return self._callers.listen()

    def run(self) -> None:
        """Run the loop until the agent has been idle for ``idle_seconds``, or until its work is
        done after a request to stop or a signal.
        """
        allow_descriptors()
        read_end, write_end = socket.socketpair()
        read_end.setblocking(False)
        write_end.setblocking(False)
        self._selector.register(read_end, selectors.EVENT_READ, partial(self._on_signal, read_end))
        old_descriptor = signal.set_wakeup_fd(write_end.fileno())
        for number in (signal.SIGTERM, signal.SIGINT):
            signal.signal(number, lambda *_: None)  # The loop reads the signal from ``read_end``
        _log.info("ckpt: agent %s listens, process %d", VERSION, os.getpid())
        try:
            while not self._is_over():
                self._restore_socket()
                self._begin_what_is_due()
                ready = self._selector.select(self._wait_seconds())
                # If callers were not accepted because no descriptor was free, one may be free now.
                self._callers.accept_again()
                for key, _ in ready:
                    # An event before this one may have closed the descriptor.
                    if self._selector.get_map().get(key.fd) == key:
                        key.data()
        finally:
            signal.set_wakeup_fd(old_descriptor)
            self._close()
            read_end.close()
            write_end.close()
        _log.info("ckpt: agent ends, process %d", os.getpid())

    # -- planning ----------------------------------------------------------------------------------

    def _is_over(self) -> bool:
        if self._jobs or self._lent_workers:
            self._busy_at = time.monotonic()
            return False
        return self._is_ending or time.monotonic() - self._busy_at > self._idle_seconds

    def _wait_seconds(self) -> float | None:
        """Return how many seconds the loop may wait for events; None for no limit."""
        time_now = time.monotonic()
        waits = [_SOCKET_SECONDS] if self._callers.is_listening else []
        if (round_in := self._seconds_to_round()) is not None:
            waits.append(max(_LOOK_SECONDS, round_in))
        if not self._jobs:
            waits.append(max(0.0, self._busy_at + self._idle_seconds - time_now) + _LOOK_SECONDS)
        waits += [
            max(_LOOK_SECONDS, job.next_at - time_now)
            for job in self._jobs
            if job.waits and not self._is_held_up(job)
        ]
        return min(waits, default=None)

    def _begin_what_is_due(self) -> None:
        """Start workers for the jobs that are due. If there is nothing to finish, start a round of
        verification. An agent that ends and only has memory left to free releases ``work.lock``.
        """
        due = [job for job in self._jobs if job.waits and time.monotonic() >= job.next_at]
        only_frees_memory = self._is_ending and all(job.is_finished for job in self._jobs)
        if only_frees_memory and self._has_work_lock and not any(job.worker for job in self._jobs):
            self._has_work_lock = False
            self._work_lock.release()
        elif due:
            self._take_work_lock()
        # A job that has failed often comes last, so that a store that hangs delays no other job.
        due.sort(key=lambda job: job.failures)
        for job in due if self._has_work_lock or only_frees_memory else ():
            worker_count = sum(other_job.worker is not None for other_job in self._jobs)
            if worker_count < _MOST_WORKERS and not self._is_held_up(job):
                self._rounds.cancel()
                try:
                    job.begin(self._after_try, frees=self._memory_seconds <= 0)
                except OSError as error:  # The system has no memory or no process id left
                    self._after_try(job, job.fail(f"no worker could be started: {error}"))
        self._begin_round()

    def _begin_round(self) -> None:
        """Start a round of verification, if one is due and there is nothing else to do."""
        if self._seconds_to_round() == 0.0 and self._take_work_lock():
            try:
                self._rounds.begin(self._workplace)
            except OSError as error:
                _log.warning("ckpt: no worker could be started: %s", error)

    def _take_work_lock(self) -> bool:
        """Take ``work.lock``, if this agent does not have it. Return True if it has the lock, and
        False while workers of an agent that it has replaced still run.
        """
        self._has_work_lock = self._has_work_lock or self._work_lock.take()
        return self._has_work_lock

    def _seconds_to_round(self) -> float | None:
        """Return in how many seconds a round of verification is due. Return None if no round may
        begin: the agent ends, a worker finishes a job, a round is under way, or no job is known.
        """
        if self._is_ending or any(job.worker is not None for job in self._jobs):
            return None
        return self._rounds.due_in()

    def _tell_trainer(self, attempt: str, report: Verified) -> None:
        """Send the result of a verification to the trainer of the job."""
        for caller in [caller for caller in self._callers if caller.attempt == attempt]:
            try:
                caller.connection.sendall(encode(report))
            except OSError as error:  # The trainer notices the end of the connection
                _log.warning(
                    "ckpt: the trainer of job %s was not told of a verification: %s", attempt, error
                )
                self._callers.disconnect(caller)

    def _is_held_up(self, job: WatchedJob) -> bool:
        """Return True if another job that shares a root with ``job`` has a living trainer or a
        worker. ``job`` must then wait.
        """
        return any(
            other_job is not job
            and (other_job.runs or other_job.worker is not None)
            and other_job.meets(job)
            for other_job in self._jobs
        )

    # -- jobs --------------------------------------------------------------------------------------

    def _check_job(self, job: Job, caller: Caller) -> None:
        """Raise ``AgentError`` or ``ConfigError`` if the agent cannot work for a job."""
        if self._is_ending:
            raise AgentError("it is about to end: try again")
        if caller.pid not in [process.pid for process in job.processes]:
            raise AgentError(
                f"it sees this process as number {caller.pid}: the two are in different process "
                "namespaces, as containers have: run an agent in this one (CKPT_AGENT_FOLDER)"
            )
        job.tier_settings()  # Raises the ``ConfigError`` that a worker would meet

    def _register(self, job: Job, caller: Caller) -> Answer:
        """Watch the processes of a job from now on, and add the job to the rounds of verification.

        An earlier registration of the same attempt is replaced. If another job shares a root with
        this one, its worker is killed, and it gets no more rounds of verification.

        Raises:
            AgentError, ConfigError: The agent cannot work for the job (``_check_job``).
            AgentError: The processes of the job cannot be watched.
        """
        self._check_job(job, caller)
        new_job = WatchedJob(job, self._workplace, self._on_death)
        for other_job in [
            other_job for other_job in self._jobs if other_job.attempt == new_job.attempt
        ]:
            self._drop(other_job)
        self._rounds.cancel()
        self._rounds.forget(
            attempt
            for attempt, roots in self._rounds.jobs().items()
            if attempt != new_job.attempt and share_a_root(roots, new_job.roots)
        )
        self._rounds.add(job)
        for other_job in self._jobs:  # The new job must not wait for the worker of an earlier one
            if other_job.worker is not None and other_job.meets(new_job):
                other_job.cancel()
        self._jobs.append(new_job)
        caller.attempt = new_job.attempt
        _log.info("ckpt: job %s is registered", new_job.attempt)
        if new_job.has_died:  # Its processes have ended since they sent the request
            self._end_of_trainer(new_job)
        return Done()

    def _lend(self, job: Job, caller: Caller) -> None:
        """Start a worker that copies files for a trainer, and pass the caller's connection on to
        the worker.

        Raises:
            AgentError: No worker can be lent.
        """
        self._check_job(job, caller)
        if not self._take_work_lock():
            raise AgentError("an agent that it has replaced still works")
        if len(self._lent_workers) >= _MOST_LENT_WORKERS:
            raise AgentError(f"{_MOST_LENT_WORKERS} of its workers copy for trainers already")
        order = Order(job, "copy", connection=caller.connection.fileno())
        try:
            worker = Worker(
                order, self._workplace, _log_error, lambda _: self._lent_workers.pop(worker, None)
            )
        except OSError as error:
            raise AgentError(f"no worker could be started: {error}") from None
        self._lent_workers[worker] = job.owner.attempt
        self._callers.disconnect(caller)

    def _kill_lent_workers(self, attempt: str | None = None) -> None:
        """Kill the workers that copy for living trainers: those of the job ``attempt``, or all if
        ``attempt`` is None.
        """
        for worker in [
            worker
            for worker, owner_attempt in self._lent_workers.items()
            if attempt in (None, owner_attempt)
        ]:
            del self._lent_workers[worker]
            worker.kill()

    def _detach(self, attempt: str) -> Answer:
        """Begin to finish the job ``attempt``, whose trainer may live on."""
        for job in self._jobs:
            if job.attempt == attempt and job.runs:
                self._end_of_trainer(job)
                return Done()
        return Refused(f"it does not know the job {attempt}: it was started again since")

    def _forget(self, attempt: str) -> Answer:
        for job in [job for job in self._jobs if job.attempt == attempt]:
            self._drop(job, "closed")
        return Done()

    def _on_death(self, job: WatchedJob) -> None:
        """Kill the workers that copy for a job whose last process on this node has ended. Begin to
        finish the job, unless its trainer has detached before.
        """
        self._kill_lent_workers(job.attempt)
        if job.runs:
            _log.info("ckpt: the trainer of job %s has ended", job.attempt)
            self._end_of_trainer(job)

    def _end_of_trainer(self, job: WatchedJob) -> None:
        """Begin to finish a job whose trainer has ended or detached. An agent that is about to end
        forgets the job instead.
        """
        job.end()
        if self._is_ending:
            self._drop(job)

    def _after_try(self, job: WatchedJob, outcome: Ended) -> None:
        """Decide how to go on after a try to finish ``job`` has ended: try again later, free the
        memory of the job later, or drop the job.
        """
        if outcome.error:
            _log.warning("ckpt: job %s: %s", job.attempt, outcome.error)
        if outcome.outcome == "superseded":
            self._drop(job, "superseded")
        elif outcome.outcome == "failed":
            if self._is_ending or time.monotonic() - job.ended_at > _GIVE_UP_SECONDS:
                self._drop(job, "given up")
        elif outcome.outcome == "done" and job.has_memory and not job.is_finished:
            job.is_finished, job.next_at = True, time.monotonic() + self._memory_seconds
        else:
            self._drop(job, "done")

    def _drop(self, job: WatchedJob, state: str = "") -> None:
        """Forget a job, and kill its worker. If ``state`` is not empty, the agent's status still
        lists the job as over, with this state. If ``state`` is neither empty nor "done" nor
        "closed", the job also gets no more rounds of verification.
        """
        job.close()
        if state:
            _log.info("ckpt: job %s is over: %s", job.attempt, state)
            status = msgspec.structs.replace(job.status(), state=state, since=time.time())
            self._past_jobs = [*self._past_jobs, status][-_MAX_JOBS_LISTED:]
            if state == "given up":
                self._given_up_jobs.append(status)
            if state not in {"done", "closed"}:
                self._rounds.forget([job.attempt])
        self._jobs.remove(job)

    # -- requests ----------------------------------------------------------------------------------

    def _answer(self, request: Request, caller: Caller) -> Answer | None:
        """Carry out ``request``, and return the answer. Return None if a worker answers instead."""
        try:
            match request:
                case Job():
                    return self._register(request, caller)
                case Detach(attempt):
                    return self._detach(attempt)
                case Forget(attempt):
                    return self._forget(attempt)
                case AskStatus():
                    return self._status()
                case AskWorker(job):
                    self._lend(job, caller)
                    return None
                case Stop(at_once, keep_memory):
                    self._stop_caller = caller
                    self._stop(at_once=at_once, keep_memory=keep_memory)
                    return Done()
        except (AgentError, ConfigError) as error:
            return Refused(str(error))

    def _status(self) -> AgentStatus:
        return AgentStatus(
            version=VERSION,
            pid=os.getpid(),
            started=self._start_time,
            idle_seconds=self._idle_seconds,
            works=self._has_work_lock,
            jobs=tuple(
                msgspec.structs.replace(job, scrub=self._rounds.status(job.attempt))
                for job in (*self._past_jobs, *(entry.status() for entry in self._jobs))
            ),
        )

    # -- the end -----------------------------------------------------------------------------------

    def _stop(self, *, at_once: bool = False, keep_memory: bool = False) -> None:
        """Begin to end the agent, and close its socket, so that another agent can listen.

        All connections are closed except that of the caller that has sent `Stop`. Living trainers
        then register with the other agent, and this agent forgets their jobs. The workers that copy
        for living trainers or verify steps are killed. This agent still finishes the jobs whose
        trainers have ended.

        Args:
            at_once: Whether to give up the jobs whose trainers have ended instead.
            keep_memory: Whether steps stay in memory for ``memory_seconds``. Otherwise their memory
                is freed as soon as durable tiers have them.
        """
        self._callers.stop_listening()
        self._rounds.cancel()
        self._kill_lent_workers()
        self._is_ending = True
        if not keep_memory:
            self._memory_seconds = 0.0
        for caller in [caller for caller in self._callers if caller is not self._stop_caller]:
            self._callers.disconnect(caller)
        for job in list(self._jobs):
            if job.runs:
                self._drop(job)
            elif at_once:
                self._drop(job, "given up")
            elif not (keep_memory and job.is_finished):
                job.next_at = 0.0

    def _on_signal(self, read_end: socket.socket) -> None:
        """Stop the agent once the jobs whose trainers have ended are finished and their memory is
        freed. At a second signal, give these jobs up and stop at once.
        """
        read_end.recv(_READ_BYTES)
        ready = {key.fd for key, _ in self._selector.select(0)}
        for job in list(self._jobs):
            job.forget_ended(ready)  # The trainer may have ended just before the signal
        self._stop(at_once=self._has_signal)
        self._has_signal = True

    def _restore_socket(self) -> None:
        """Make the socket again if it was removed. If a lock file was removed too, another agent
        may have started in the folder, so this agent stops.
        """
        if not self._callers.has_lost_socket:
            return
        if self._callers.is_lock_in_place and self._work_lock.is_in_place():
            try:
                self._callers.bind()
                _log.warning("ckpt: the agent's socket was removed: it was made again")
            except OSError as error:  # The next call tries again
                _log.warning("ckpt: the agent's socket was removed, and is not made: %s", error)
        else:
            _log.warning("ckpt: the agent's folder was removed or replaced: the agent ends")
            self._stop()

    def _close(self) -> None:
        """Kill all workers, tell a caller that has sent `Stop` the end, and close all sockets."""
        self._rounds.cancel()
        self._kill_lent_workers()
        for job in list(self._jobs):
            self._drop(job)
        if self._stop_caller is not None:
            with suppress(OSError):  # The caller has not waited for the end of the agent
                self._stop_caller.connection.sendall(encode(Stopped(tuple(self._given_up_jobs))))
        self._callers.stop_listening()
        for key in list(self._selector.get_map().values()):
            if isinstance(connection := key.fileobj, socket.socket):
                connection.close()
        self._selector.close()
        self._work_lock.close()


def _log_error(report: Report) -> None:
    """Log the error in the last report of a worker that copies for a trainer."""
    if isinstance(report, Ended) and report.error:
        _log.warning("ckpt: %s", report.error)
