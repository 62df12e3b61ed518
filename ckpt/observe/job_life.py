"""Whether the job of a run lives, from its journal and from its process. It does almost no I/O.

A *beat* is the time at which a job last showed in its journal that it is alive.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Final, Literal

from ckpt.observe.history import History, Job
from ckpt.observe.journal_files import BEAT_SECONDS
from ckpt.observe.journal_record import PLANNED_STOP
from ckpt.processes import Process, boot_identity

Life = Literal["lives", "begins", "evaluates", "stopped", "ended", "failed", "died"]
LIFE_MEANING: Final[Mapping[Life, str]] = {
    "lives": "the job lives",
    "begins": "the job lives, and has not saved yet",
    "evaluates": "the job lives, and only evaluates",
    "stopped": "the job was stopped as planned",
    "ended": "the job has ended",
    "failed": "the job ended with an error",
    "died": "the job died without a word",
}
"""The explanation of each state of a job, as the page of ``ckpt serve`` shows it."""
_SILENT_SECONDS: Final = 8 * BEAT_SECONDS
"""A job on another machine is dead if it was not alive for this time. A network file system may
show the time of a file a minute late.
"""


@dataclass(frozen=True, slots=True)
class JobLife:
    """Whether a job lives.

    Attributes:
        state: The state; ``LIFE_MEANING`` explains each.
        time: When the state began, in seconds since 1970. For "died": when the job was alive last.
        host: The host of rank 0.
        pid: The process id of rank 0.
        reason: The error that has ended the job; empty if there is none.
    """

    state: Life
    time: float
    host: str = ""
    pid: int = 0
    reason: str = ""

    @property
    def is_alive(self) -> bool:
        """Whether the job lives, and may save."""
        return self.state in ("lives", "begins")


def life_of(history: History, beats: Mapping[str, float], current_time: float) -> JobLife | None:
    """Return whether the job of a run lives; None if the journal has no job.

    The newest job that has saved and lives counts: a newer one may have been refused since it
    lives. If none lives, the newest job that has saved counts, or a newer job that lives, since it
    may be the same job that was started again.

    Args:
        history: The history of the run.
        beats: When each job that has not closed its manager was alive last, by its id.
        current_time: The time, in seconds since 1970.
    """
    jobs = list(history.jobs.items())
    lives = lives_of(history, beats, current_time)
    saving_jobs = [name for name, job in reversed(jobs) if job.has_saved]
    for name in saving_jobs:
        if lives[name].is_alive:
            return lives[name]
    newest_saving_job = next(iter(saving_jobs), None)
    for name, job in reversed(jobs):
        if job.has_saved:
            break
        if lives[name].is_alive:
            return lives[name]
    return lives[newest_saving_job] if newest_saving_job is not None else None


def lives_of(
    history: History, beats: Mapping[str, float], current_time: float
) -> dict[str, JobLife]:
    """Return whether each job of a run lives, by its id.

    Args:
        history: The history of the run.
        beats: When each job that has not closed its manager was alive last, by its id.
        current_time: The time, in seconds since 1970.
    """
    evaluations = history.evaluations
    return {
        name: _life_of_job(job, beats.get(name), current_time, evaluates=name in evaluations)
        for name, job in history.jobs.items()
    }


def _life_of_job(job: Job, beat: float | None, current_time: float, *, evaluates: bool) -> JobLife:
    """Return whether a job lives. On this machine, its process tells; on another machine, its beat.

    Args:
        job: The job.
        beat: When it was alive last; None if it has closed its manager.
        current_time: The time, in seconds since 1970.
        evaluates: Whether the job has restored only to evaluate.
    """
    start = job.start
    if (end := job.end) is not None:
        state: Life = "stopped" if end.reason == PLANNED_STOP else "ended"
        if end.error:
            state = "failed"
        reason = f"{end.error}: {end.reason}" if end.error else ""
        return JobLife(state, end.at, start.host, start.pid, reason)
    if start.machine == boot_identity() and start.pid:
        is_alive = Process(start.pid, start.start_time).lives
    else:
        is_alive = beat is not None and current_time - beat < _SILENT_SECONDS
    if is_alive:
        state = "lives" if job.has_saved else "evaluates" if evaluates else "begins"
        return JobLife(state, start.at, start.host, start.pid)
    return JobLife("died", end_of(job, beat), start.host, start.pid)


def end_of(job: Job, beat: float | None) -> float:
    """Return when a job ended, or was alive last, in seconds since 1970.

    Args:
        job: The job.
        beat: When it was alive last, if it has not closed its manager.
    """
    return job.end.at if job.end is not None else max(job.last_at, beat or 0.0)
