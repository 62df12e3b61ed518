"""One job as the agent knows it: the processes of its trainer, and the worker that finishes it."""

from __future__ import annotations

import ctypes
import os
import resource
import signal
import time
from collections.abc import Sequence
from contextlib import suppress
from dataclasses import dataclass, field
from typing import Final

from ckpt.agent.messages import Job, JobStatus, urls_of
from ckpt.agent.place import Lock, Place
from ckpt.agent.reports import Copied, Copying, Ended, Order, Report
from ckpt.agent.worker import Worker
from ckpt.errors import AgentError
from ckpt.errors.text import redact
from ckpt.processes import Process
from ckpt.storage.places import relation

_FIRST_PAUSE_SECONDS: Final = 5.0
_MOST_PAUSE_SECONDS: Final = 600.0


@dataclass(slots=True)
class Progress:
    """What the workers of a job have reported."""

    copying: Copying | None = None
    copied: list[str] = field(default_factory=list[str])
    ended: Ended | None = None


class WatchedJob:
    """A job, from its registration until nothing is left to do.

    Thread safety: one thread.
    """

    def __init__(self, job: Job) -> None:
        """Raises ``AgentError`` if the agent cannot see the job's processes."""
        self.job = job
        self.attempt = job.owner.attempt
        self.urls = urls_of(job)
        self.processes = _descriptors(job.processes)
        self.detached = False
        self.since = time.time()
        """When the state began, by the wall clock, for people. All planning uses the monotonic
        clock.
        """
        self.next_at = 0.0
        self.ended_at = 0.0
        """When the trainer ended, or detached; 0 while it lives."""
        self.settled = False
        """Whether durable tiers have what they should have. Only memory is left to be freed."""
        self.failures = 0
        self.progress = Progress()
        self.worker: Worker | None = None

    @property
    def runs(self) -> bool:
        """Whether the trainer lives, and has not detached."""
        return not self.ended_at

    @property
    def has_memory(self) -> bool:
        return any(url.startswith("shm:") for url in self.urls)

    def status(self) -> JobStatus:
        """Return what the agent shows of the job."""
        now, copying = self.progress.copying, self.progress.copying or Copying(-1, "", 0, 0)
        state = "running" if self.runs else "kept" if self.settled else "waiting"
        state = "finishing" if self.worker else state
        planned = state in {"waiting", "kept"} and self.next_at
        return JobStatus(
            attempt=self.attempt,
            state=state,
            tiers=tuple(map(redact, self.urls)),
            processes=tuple(process.pid for process in self.job.processes),
            since=self.since,
            in_parts=bool(self.job.here),
            next_at=time.time() + self.next_at - time.monotonic() if planned else 0.0,
            step=copying.step if now else -1,
            to=copying.to,
            done_bytes=copying.done_bytes,
            total_bytes=copying.total_bytes,
            copied=tuple(self.progress.copied),
            error=self.progress.ended.error if self.progress.ended else "",
        )

    def meets(self, other: WatchedJob) -> bool:
        """Return whether the two jobs have a root in common."""
        return share_a_root(self.urls, other.urls)

    def end(self) -> None:
        """The trainer has ended, or has detached: its steps are to be finished."""
        self.since, self.ended_at = time.time(), time.monotonic()
        self.next_at = 0.0

    # -- the worker --------------------------------------------------------------------------------

    def begin(self, place: Place, lock: Lock) -> int:
        """Start the worker. Returns the descriptor of its reports."""
        self.progress.ended = self.progress.copying = None
        order = Order(self.job, "free" if self.settled else "finish")
        self.worker, self.since = Worker(order, place, lock), time.time()
        return self.worker.reports

    def read(self) -> bool:
        """Take in what the worker has reported. Returns whether it goes on."""
        assert self.worker is not None
        reports = self.worker.read()
        for report in reports or ():
            self._take_in(report)
        return reports is not None

    def _take_in(self, report: Report) -> None:
        match report:
            case Copying():
                self.progress.copying = report
            case Copied(step, to):
                self.progress.copied.append(f"{step} {redact(to)}")
                self.progress.copying = None
            case Ended():
                self.progress.ended = report
            case _:
                pass  # of another task

    def finish(self) -> Ended:
        """The worker has ended: return its outcome, and plan the next try if it has failed."""
        assert self.worker is not None
        code = self.worker.end()
        self.worker, self.progress.copying = None, None
        outcome = self.progress.ended or Ended("failed", f"its worker ended with exit code {code}")
        if outcome.outcome == "failed":
            return self.fail(outcome.error)
        self.progress.ended, self.since = outcome, time.time()
        return outcome

    def fail(self, why: str) -> Ended:
        """Count a failed try, and plan the next one."""
        outcome = Ended("failed", why)
        self.progress.ended, self.since = outcome, time.time()
        pause = min(_MOST_PAUSE_SECONDS, _FIRST_PAUSE_SECONDS * 2.0**self.failures)
        self.failures += 1
        self.next_at = time.monotonic() + pause
        return outcome

    def cancel(self) -> None:
        """End the worker at once. What it has begun is continued by the next one."""
        if self.worker is not None:
            self.worker.kill()
            self.worker, self.progress.copying = None, None

    def close(self) -> None:
        """End the worker, and forget the processes."""
        self.cancel()
        while self.processes:
            os.close(self.processes.pop())


def share_a_root(some: Sequence[str], others: Sequence[str]) -> bool:
    """Return whether one of the URLs is the same place as one of the others."""
    return any(relation(one, two) == "same" for one in some for two in others)


def end_with_parent(parent: int) -> None:
    """Let the kernel end this process when the agent ends."""
    ctypes.CDLL(None).prctl(1, signal.SIGKILL, 0, 0, 0)  # PR_SET_PDEATHSIG
    if os.getppid() != parent:
        os.kill(os.getpid(), signal.SIGKILL)


def allow_descriptors() -> None:
    """Let this process have as many descriptors as it may: each process of a job takes one."""
    _, most = resource.getrlimit(resource.RLIMIT_NOFILE)
    resource.setrlimit(resource.RLIMIT_NOFILE, (most, most))


def _descriptors(processes: tuple[Process, ...]) -> set[int]:
    """Return a descriptor of each process that lives. It becomes readable when the process ends."""
    found: set[int] = set()
    try:
        for process in processes:
            with suppress(ProcessLookupError):
                descriptor = os.pidfd_open(process.pid)
                if not process.lives:  # Another process has its number
                    os.close(descriptor)
                    continue
                found.add(descriptor)
    except OSError as error:
        for descriptor in found:
            os.close(descriptor)
        raise AgentError(f"the processes of the job cannot be watched: {error}") from None
    return found
