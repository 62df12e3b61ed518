"""The history of a run, computed from the records of its journal. No function does I/O.

A save is *staged* when its state is copied to host memory. From then on it is on its way to its
tiers: each of them commits it, or misses it if the tier is too far behind or fails.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Literal

from ckpt.config import Best, Mode
from ckpt.observe.journal_record import CLOSE_EVENT, OPEN_EVENT, VERIFY_EVENT, Record
from ckpt.storage.urls import is_spelling_of

Progress = Literal["saving", "committed", "missed", "cut"]


@dataclass(slots=True)
class Arrival:
    """The progress of one save on one tier.

    Attributes:
        state: "saving" until the step is "committed" or the tier has "missed" it; "cut" if the job
            ended before that.
        seconds: The time from the call of the save to the commit. It is 0 if the step is not
            committed, or if a restore finished the commit.
        reason: Why the tier missed the step; empty if it did not.
    """

    state: Progress = "saving"
    seconds: float = 0.0
    reason: str = ""


@dataclass(slots=True)
class SavedStep:
    """A save, as the records of rank 0 describe it.

    Attributes:
        step: The number of the step.
        at: When the state was in host memory, in seconds since 1970. If the journal has no record
            of that, it is the time of the first commit or miss.
        stall_seconds: How long the save stopped the training thread.
        nbytes: The bytes that rank 0 staged.
        tiers: The progress on each tier, by the URL of the tier, nearest first.
        metrics: The metrics of the step, by name.
        job: The id of the job that has saved the step.
        is_abandoned: Whether a later job has gone back to an earlier step.
    """

    step: int
    at: float
    stall_seconds: float = 0.0
    nbytes: int = 0
    tiers: dict[str, Arrival] = field(default_factory=dict[str, Arrival])
    metrics: dict[str, float] = field(default_factory=dict[str, float])
    job: str = ""
    is_abandoned: bool = False


@dataclass(slots=True)
class Job:
    """A job that has written to the journal.

    Attributes:
        start: The first record of the job.
        last_at: When the job wrote its last record, in seconds since 1970.
        end: The record that the job has closed its manager; None if it has not.
        has_saved: Whether the job has begun a save. Other jobs only restore.
    """

    start: Record
    last_at: float
    end: Record | None = None
    has_saved: bool = False


@dataclass(frozen=True, slots=True)
class Restore:
    """A restore, as the records of the journal describe it.

    Attributes:
        record: The record of the end of the restore.
        troubles: The records of the files that the restore took from a farther tier, and of the
            damaged steps that it skipped.
    """

    record: Record
    troubles: tuple[Record, ...] = ()


@dataclass(slots=True)
class History:
    """The jobs, saves, restores, failures and verifications of a run.

    Attributes:
        jobs: The jobs, by their ids, in the order in which they began.
        saves: The last save of each step, by the number of the step.
        restores: The restores, oldest first.
        failures: The records of saves that failed, were skipped, or were given up on a tier that is
            behind, oldest first.
        verifications: The record of the last verification of a step on a tier, by (step, URL of the
            tier). Its ``reason`` is empty if the step was intact. A step that was committed again
            has none until it is verified again.
    """

    jobs: dict[str, Job] = field(default_factory=dict[str, Job])
    saves: dict[int, SavedStep] = field(default_factory=dict[int, SavedStep])
    restores: list[Restore] = field(default_factory=list[Restore])
    failures: list[Record] = field(default_factory=list[Record])
    verifications: dict[tuple[int, str], Record] = field(
        default_factory=dict[tuple[int, str], Record]
    )

    @property
    def best_rules(self) -> Sequence[Best]:
        """The rules by which the newest job that saved keeps the best steps, one for a metric."""
        starts = (job.start for job in reversed(self.jobs.values()) if job.has_saved)
        if (start := next(starts, None)) is None:
            return ()
        counts = start.counts
        return [Best(metric, mode, counts.get(metric, 1)) for metric, mode in start.modes.items()]

    @property
    def modes(self) -> Mapping[str, Mode]:
        """Which values of a metric are the best, by its name, as the newest job says that saved."""
        return {rule.metric: rule.mode for rule in self.best_rules}

    @property
    def evaluations(self) -> set[str]:
        """The ids of the jobs that have saved nothing, and have restored only to evaluate."""
        trainings = {name for name, job in self.jobs.items() if job.has_saved}
        trainings |= {
            restore.record.job for restore in self.restores if not restore.record.evaluates
        }
        return {restore.record.job for restore in self.restores} - trainings

    def is_of(self, root: str) -> bool:
        """Return True if jobs have used the root at the path ``root``, which has no links. If not,
        it was moved or copied with its journal, and the jobs are those of another place.
        """
        urls = {url for save in self.saves.values() for url in save.tiers}
        urls |= {job.start.root for job in self.jobs.values()} - {""}
        return any(is_spelling_of(url, root) for url in urls)

    @property
    def job_restores(self) -> list[Restore]:
        """The restores of jobs that have saved, and so not those of evaluations."""
        saving_jobs = {name for name, job in self.jobs.items() if job.has_saved}
        return [restore for restore in self.restores if restore.record.job in saving_jobs]


def history_of(records: Sequence[Record]) -> History:
    """Return the history of a run from the records of its journal, oldest first."""
    history = History()
    troubles: list[Record] = []  # What the restore under way could not use
    staged_steps: set[int] = set()  # Steps that the current job has staged
    for record in records:
        job = history.jobs.get(record.job)
        if job is not None:
            job.last_at = record.at
        match record.event:
            case "SaveStaged":
                if job is not None and not job.has_saved:
                    # The previous job has ended, so no tier gets what it had staged
                    job.has_saved = True
                    mark_cut(history.saves[step] for step in staged_steps)
                    staged_steps.clear()
                history.saves[record.step] = _staged_save(record)
                staged_steps.add(record.step)
            case "MetricsAdded" if record.step in history.saves:
                history.saves[record.step].metrics.update(_metric_values(record.metrics))
            case "SaveCommitted" | "CommitFinished":
                save = history.saves.setdefault(record.step, SavedStep(record.step, record.at))
                save.tiers[record.tier] = Arrival("committed", record.seconds)
                # The verification was of an earlier attempt.
                history.verifications.pop((record.step, record.tier), None)
            case "TierMissed":
                save = history.saves.setdefault(record.step, SavedStep(record.step, record.at))
                save.tiers[record.tier] = Arrival("missed", 0.0, record.reason)
            case "SaveFailed":
                history.failures.append(record)
            case "Repaired" | "StepDamaged":
                troubles.append(record)
            case "RolledBack":
                for save in history.saves.values():
                    save.is_abandoned |= save.step > record.step
            case "Restored":
                history.restores.append(Restore(record, tuple(troubles)))
                troubles = []
            case _ if record.event == OPEN_EVENT:
                history.jobs.setdefault(record.job, Job(record, record.at))
            case _ if record.event == CLOSE_EVENT and job is not None:
                job.end = record
            case _ if record.event == VERIFY_EVENT:
                history.verifications[record.step, record.tier] = record
            case _:
                pass  # An event that only later versions of ckpt have
    if troubles and history.restores:  # Other ranks wrote these after rank 0 wrote its "Restored"
        last_restore = history.restores.pop()
        history.restores.append(Restore(last_restore.record, (*last_restore.troubles, *troubles)))
    return history


def _staged_save(record: Record) -> SavedStep:
    """Return the save that a record of the event ``SaveStaged`` begins."""
    return SavedStep(
        record.step,
        record.at,
        record.seconds,
        record.nbytes,
        {tier: Arrival() for tier in record.tiers},
        _metric_values(record.metrics),
        record.job,
    )


def _metric_values(metrics: Mapping[str, float | None]) -> dict[str, float]:
    """Return the metrics of a record. It has None for values that are not finite."""
    return {name: math.nan if value is None else value for name, value in metrics.items()}


def mark_cut(saves: Iterable[SavedStep]) -> None:
    """Replace the state "saving" in ``saves`` by "cut", since the job of these saves has ended."""
    for save in saves:
        for arrival in save.tiers.values():
            if arrival.state == "saving":
                arrival.state = "cut"
