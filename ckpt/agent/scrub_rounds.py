"""The rounds of verification, in which the agent lets workers verify the steps of its jobs while it
has nothing else to do. One round verifies the steps of one job.
"""

from __future__ import annotations

import logging
import time
from collections.abc import Callable, Iterable
from dataclasses import dataclass, field
from functools import partial
from typing import Final

from ckpt.agent.messages import Job, ScrubStatus, roots_of
from ckpt.agent.worker_messages import Ended, Order, Report, Verified, Verifying
from ckpt.agent.worker_process import Worker, Workplace
from ckpt.errors.sanitize import redact

_log = logging.getLogger("ckpt")
_LOOK_SECONDS: Final = 300.0
"""The shortest time between two rounds of a job, because each round lists the tiers of the job. If
``again_seconds / 4`` is shorter, it is used instead.
"""
_MOST_JOBS: Final = 64
_DAMAGED_RATE: Final = 24
"""A damaged step is verified this many times as often as an intact step."""


@dataclass(slots=True)
class _Round:
    """The verification of one job, in its rounds so far.

    Attributes:
        next_at: When the next round begins, by the monotonic clock.
        results: For each verified step, as "URL FOLDER": the time of its last verification, by the
            monotonic clock, and the result.
        progress: The progress of the step that is being verified; None if there is none.
        mended_count: How many damaged files were written again.
        error: Why the last round could not verify all tiers; empty if it could.
    """

    job: Job
    next_at: float
    results: dict[str, tuple[float, Verified]] = field(
        default_factory=dict[str, tuple[float, Verified]]
    )
    progress: Verifying | None = None
    mended_count: int = 0
    error: str = ""


class Rounds:
    """Verifies the steps of jobs, one job at a time, by a worker that may be killed at any moment.

    A step is verified some minutes after it was committed, and again after ``again_seconds``. A
    damaged step is verified again after a 24th of that time. If the worker of a round is killed,
    the job's next round begins some minutes later with the steps that were not verified yet. Only
    the newest 64 jobs are remembered.

    ``_current_round`` is the round whose worker runs, and None if no worker runs. ``_rounds`` has a
    `_Round` for each job by its *attempt*, the id of the job's incarnation. Two rounds of one job
    begin at least ``_look_seconds`` apart.

    Args:
        again_seconds: The time between two verifications of an intact step.
        notify: Called with the attempt of a job and the result for one of its steps, so that the
            trainer gets the result. It is not called if a step stays damaged and no file of it was
            mended.

    Thread safety: one thread.
    """

    def __init__(self, again_seconds: float, notify: Callable[[str, Verified], None]) -> None:
        self._again_seconds, self._notify = again_seconds, notify
        self._look_seconds = min(_LOOK_SECONDS, again_seconds / 4)
        self._rounds: dict[str, _Round] = {}
        self._current_round: _Round | None = None
        self._worker: Worker | None = None

    def add(self, job: Job) -> None:
        """Add ``job``, or do nothing if its ``scrub_mb_per_s`` is 0. The next round of the job
        begins some minutes later. If the job was added before, its results are kept.
        """
        if not job.scrub_mb_per_s:
            return
        next_at = time.monotonic() + self._look_seconds
        job_round = self._rounds.get(job.owner.attempt)
        if job_round is not None:
            job_round.job, job_round.next_at = job, next_at
        else:
            self._rounds[job.owner.attempt] = _Round(job, next_at)
            self.forget(list(self._rounds)[:-_MOST_JOBS])

    def forget(self, attempts: Iterable[str]) -> None:
        """Forget the jobs whose attempts are in ``attempts``, and the results of these jobs. No
        further round begins for them, but a round that is under way goes on.
        """
        for attempt in attempts:
            self._rounds.pop(attempt, None)

    def jobs(self) -> dict[str, tuple[str, ...]]:
        """Return the locations of the tiers of each job, by the job's attempt."""
        return {attempt: roots_of(job_round.job) for attempt, job_round in self._rounds.items()}

    def due_in(self) -> float | None:
        """Return in how many seconds the next round begins. Return None if there is no job, or if a
        round is under way.
        """
        if self._worker is not None or not self._rounds:
            return None
        return max(
            0.0, min(job_round.next_at for job_round in self._rounds.values()) - time.monotonic()
        )

    def begin(self, workplace: Workplace) -> None:
        """Start a round for the job that has been due for the longest time.

        Args:
            workplace: The resources for the worker.

        Raises:
            OSError: No worker can be started. The round begins some minutes later.
        """
        time_now = time.monotonic()
        self._current_round = job_round = min(
            self._rounds.values(), key=lambda candidate: candidate.next_at
        )
        job_round.next_at = time_now + self._look_seconds
        job_round.results = {
            key: (date, result)
            for key, (date, result) in job_round.results.items()
            # Older results are of steps that were removed: an existing step would have been
            # verified again since.
            if time_now - date < 2 * self._again_seconds + _LOOK_SECONDS
        }
        fresh_keys = [
            key
            for key, (date, result) in job_round.results.items()
            if time_now - date < self._pause_seconds(result)
        ]
        order = Order(job_round.job, "scrub", tuple(fresh_keys))
        self._worker = Worker(order, workplace, partial(self._record, job_round), self._on_end)

    def _pause_seconds(self, result: Verified) -> float:
        """Return how many seconds after ``result`` a step is verified again. A damaged step is
        tried sooner, since a tier that can mend it may be available again.
        """
        return self._again_seconds / _DAMAGED_RATE if result.damage else self._again_seconds

    def _record(self, job_round: _Round, report: Report) -> None:
        """Record a report of the worker. Call ``notify`` for each result for which
        ``_record_result`` is True. Log the error of the round if it differs from the previous
        error.
        """
        match report:
            case Verifying():
                job_round.progress = report
            case Verified():
                if _record_result(job_round, report):
                    self._notify(job_round.job.owner.attempt, report)
            case Ended(_, error):
                if error and error != job_round.error:
                    _log.warning("ckpt: not all steps can be verified: %s", error)
                job_round.error = error
            case _:
                pass  # Workers for other tasks send these reports

    def _on_end(self, code: int) -> None:
        self._forget_worker()
        if code:
            _log.warning("ckpt: a worker that verifies steps ended with exit code %d", code)

    def cancel(self) -> None:
        """Kill the worker, if a round is under way, so that more urgent work can begin."""
        if self._worker is not None:
            self._worker.kill()
            self._forget_worker()

    def _forget_worker(self) -> None:
        """Note that no round is under way."""
        self._worker = None
        if self._current_round is not None:
            self._current_round.progress = None

    def status(self, attempt: str) -> ScrubStatus:
        """Return the status of the verification of a job, without credentials in URLs."""
        job_round = self._rounds.get(attempt)
        if job_round is None:
            return ScrubStatus()
        progress = job_round.progress
        results = [result for _, result in job_round.results.values()]
        return ScrubStatus(
            step=progress.step if progress else -1,  # -1 stands for none
            tier=redact(progress.tier) if progress else "",
            done_bytes=progress.done_bytes if progress else 0,
            total_bytes=progress.total_bytes if progress else 0,
            verified=sum(not result.damage for result in results),
            mended=job_round.mended_count,
            damaged=tuple(
                f"{result.step} {redact(result.tier)}: {result.damage}"
                for result in results
                if result.damage
            ),
            error=job_round.error,
        )


def _record_result(job_round: _Round, report: Verified) -> bool:
    """Store the result for a step in ``job_round``, and log the mended files and the damage of the
    step. If the step was already damaged in the previous result, is still damaged, and no file was
    mended, log nothing and return False. Otherwise return True.
    """
    key = f"{report.tier} {report.folder}"
    _, last_result = job_round.results.get(key, (0.0, None))
    job_round.results[key] = time.monotonic(), report
    job_round.mended_count += len(report.mended)
    subject = f"step {report.step} on {redact(report.tier)}"
    for name in report.mended:
        _log.warning("ckpt: %s was damaged, and is mended: %s", subject, name)
    if report.damage:
        if last_result is not None and last_result.damage and not report.mended:
            return False
        _log.error("ckpt: %s is damaged: %s", subject, report.damage)
    return True
