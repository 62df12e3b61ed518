"""A job that the agent watches: the processes of its trainer, and the worker that finishes it.

An *attempt* is the id of one incarnation of a job. A *tier* is a store of the job, in memory or
durable, and its *root* is the folder or URL.
"""

from __future__ import annotations

import os
import resource
import time
from collections.abc import Callable, Collection, Sequence
from contextlib import suppress
from functools import partial
from selectors import EVENT_READ
from typing import Final

from ckpt.agent.messages import Job, JobStatus, roots_of, urls_of
from ckpt.agent.worker_messages import Copied, Copying, Ended, Order, Report, Task
from ckpt.agent.worker_process import Worker, Workplace
from ckpt.errors import AgentError
from ckpt.errors.sanitize import redact
from ckpt.processes import Process
from ckpt.storage.urls import is_spelling_of, without_query

_FIRST_PAUSE_SECONDS: Final = 1.0
_MOST_PAUSE_SECONDS: Final = 600.0


class WatchedJob:
    """A job, from its registration until its steps are finished.

    ``status`` shows what the worker has reported. ``_copied_steps`` are the steps that it has
    copied, each with its tier. ``_copy_progress`` is the progress of the copy under way, and
    ``_outcome`` is how the last try has ended.

    Args:
        job: The job.
        workplace: The resources for its workers. The selector also watches the trainer's processes.
        on_death: Called when the last process of the trainer on this node has ended.

    Attributes:
        is_finished: Whether durable tiers have the steps that they should have. Then only the
            memory of the job is still to be freed.
        next_at: When the next worker may start, by the monotonic clock; 0 for at once.
        failures: How many tries to finish the job, or to free its memory, have failed.
        worker: The worker that finishes the job, or frees its memory, now; None if there is none.

    Thread safety: one thread.
    """

    def __init__(
        self, job: Job, workplace: Workplace, on_death: Callable[[WatchedJob], None]
    ) -> None:
        """Watch the processes of ``job`` from now on. Raises ``AgentError`` if that fails."""
        self.job, self._workplace, self._on_death = job, workplace, on_death
        self.attempt = job.owner.attempt
        self.urls, self.roots = urls_of(job), roots_of(job)
        self._processes = _descriptors(job.processes)
        for process in self._processes:
            workplace.selector.register(process, EVENT_READ, partial(self._end_process, process))
        self.state_time = time.time()
        """When the state in ``status`` began, in seconds since 1970. It is only displayed."""
        self.next_at = 0.0
        self.ended_at = 0.0
        """When the trainer ended or detached, by the monotonic clock; 0 before that."""
        self.is_finished = False
        self.failures = 0
        self._copy_progress: Copying | None = None
        self._copied_steps: list[str] = []
        self._outcome: Ended | None = None
        self.worker: Worker | None = None

    @property
    def runs(self) -> bool:
        """Whether the trainer lives, and has not detached."""
        return not self.ended_at

    @property
    def waits(self) -> bool:
        """Whether the trainer has ended, and no worker finishes the job now."""
        return not self.runs and self.worker is None

    @property
    def has_memory(self) -> bool:
        """Whether the job has a tier in memory."""
        return any(url.startswith("shm:") for url in self.urls)

    def status(self) -> JobStatus:
        """Return the status of the job, without credentials in URLs."""
        progress = self._copy_progress or Copying(-1, "", 0, 0)  # -1 stands for no step
        state = "running" if self.runs else "kept" if self.is_finished else "waiting"
        state = "finishing" if self.worker else state
        is_planned = state in {"waiting", "kept"} and self.next_at
        return JobStatus(
            attempt=self.attempt,
            state=state,
            tiers=tuple(map(redact, self.urls)),
            processes=tuple(process.pid for process in self.job.processes),
            since=self.state_time,
            in_parts=bool(self.job.node_ranks),
            next_at=time.time() + self.next_at - time.monotonic() if is_planned else 0.0,
            step=progress.step,
            to=progress.to,
            done_bytes=progress.done_bytes,
            total_bytes=progress.total_bytes,
            copied=tuple(self._copied_steps),
            error=self._outcome.error if self._outcome else "",
        )

    def meets(self, other_job: WatchedJob) -> bool:
        """Return True if the two jobs have a root in common."""
        return share_a_root(self.roots, other_job.roots)

    def end(self) -> None:
        """Record that the trainer has ended or detached. A worker for the job may start at once."""
        self.state_time, self.ended_at = time.time(), time.monotonic()
        self.next_at = 0.0

    # -- the processes of the trainer --------------------------------------------------------------

    @property
    def has_died(self) -> bool:
        """Whether all processes of the trainer on this node have ended."""
        return not self._processes

    def forget_ended(self, ready: Collection[int]) -> None:
        """Stop watching the trainer's processes whose descriptors are in ``ready``, since they have
        ended. If no process is left, call ``on_death``. Other descriptors in ``ready`` are ignored.
        """
        for process in self._processes.intersection(ready):
            self._end_process(process)

    def _end_process(self, process: int) -> None:
        self._forget_process(process)
        if self.has_died:
            self._on_death(self)

    def _forget_process(self, process: int) -> None:
        self._workplace.selector.unregister(process)
        self._processes.discard(process)
        os.close(process)

    # -- the worker --------------------------------------------------------------------------------

    def begin(self, on_end: Callable[[WatchedJob, Ended], None], *, frees: bool) -> None:
        """Start a worker that finishes the job, or that frees its memory if ``is_finished``.

        Args:
            frees: Whether a worker that finishes the job frees its memory too.
            on_end: Called with this job and the worker's last report when the worker has ended.

        Raises:
            OSError: The system has no memory or no process id left.
        """
        self._outcome = self._copy_progress = None
        task: Task = "free" if self.is_finished else "finish"
        order = Order(self.job, task, frees=frees and self.has_memory)
        self.worker = Worker(
            order,
            self._workplace,
            self._record,
            lambda code: on_end(self, self._end_worker(code)),
            origin=f"for job {self.attempt}",
        )
        self.state_time = time.time()

    def _record(self, report: Report) -> None:
        """Keep what a report of the worker says, for ``status``."""
        match report:
            case Copying():
                self._copy_progress = report
            case Copied(step, tier):
                self._copied_steps.append(f"{step} {redact(tier)}")
                self._copy_progress = None
            case Ended():
                self._outcome = report
            case _:
                pass  # Workers for other tasks send these reports

    def _end_worker(self, code: int) -> Ended:
        """Record that the worker has ended with the exit code ``code``, and return its last report.
        If it has sent none, return a report with the outcome "failed". If the outcome is "failed",
        also plan the next try.
        """
        self.worker = self._copy_progress = None
        outcome = self._outcome or Ended("failed", f"its worker ended with exit code {code}")
        if outcome.outcome == "failed":
            return self.fail(outcome.error)
        self._outcome, self.state_time = outcome, time.time()
        return outcome

    def fail(self, reason: str) -> Ended:
        """Count a failed try, plan the next one, and return the outcome with the error
        ``reason``.
        """
        outcome = Ended("failed", reason)
        self._outcome, self.state_time = outcome, time.time()
        pause = min(_MOST_PAUSE_SECONDS, _FIRST_PAUSE_SECONDS * 2.0**self.failures)
        self.failures += 1
        self.next_at = time.monotonic() + pause
        return outcome

    def cancel(self) -> None:
        """Kill the worker, if there is one. The next worker continues its work."""
        if self.worker is not None:
            self.worker.kill()
            self.worker = self._copy_progress = None

    def close(self) -> None:
        """Kill the worker, and stop watching the processes of the trainer."""
        self.cancel()
        for process in list(self._processes):
            self._forget_process(process)


def share_a_root(urls: Sequence[str], other_urls: Sequence[str]) -> bool:
    """Return True if a URL of ``urls`` and a URL of ``other_urls`` name the same root.

    Symbolic links are not resolved. So the call does not wait if a file system does not answer.
    """
    return any(
        is_spelling_of(without_query(url), without_query(other_url))
        for url in urls
        for other_url in other_urls
    )


def allow_descriptors() -> None:
    """Raise this process's limit of open descriptors as far as allowed. Each process of a job takes
    one descriptor.
    """
    _, limit = resource.getrlimit(resource.RLIMIT_NOFILE)
    resource.setrlimit(resource.RLIMIT_NOFILE, (limit, limit))


def _descriptors(processes: tuple[Process, ...]) -> set[int]:
    """Return a descriptor for each process that lives. A descriptor becomes readable when its
    process ends. Raises ``AgentError`` if a descriptor cannot be opened.
    """
    descriptors: set[int] = set()
    try:
        for process in processes:
            with suppress(ProcessLookupError):
                descriptor = os.pidfd_open(process.pid)
                if not process.lives:  # Another process has the process id now
                    os.close(descriptor)
                    continue
                descriptors.add(descriptor)
    except OSError as error:
        for descriptor in descriptors:
            os.close(descriptor)
        raise AgentError(f"the processes of the job cannot be watched: {error}") from None
    return descriptors
