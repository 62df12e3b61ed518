"""Copies to the farther tiers the steps that earlier jobs have committed on nearer durable tiers
only, however many jobs have ended since.

The backfill begins after the first commit of this job, because the roots belong to this job only
from then on. It copies nothing unless this job has restored a step. The steps to copy follow from
what the tiers have and take, not from what any job has noted. The steps that led to the restored
step are its *lineage* (``retention.policy.history``). Those that a farther tier wants and lacks are
*owed* to that tier. The leader copies the files of all ranks, newest step first, to each farther
tier at most ``backlog`` steps. Steps of the running job have priority. If the earlier job had an
agent, the agent has copied these steps right after the end of that job
(``ckpt.agent.finish_worker``).

Until a farther tier has such a step, retention keeps it on the nearer ones. Before a farther tier
was asked which steps it lacks, the nearer tiers keep all that it takes. If a tier does not take a
step now, the step stays. It is tried again after the next commit on that tier, and by later jobs.
"""

from __future__ import annotations

import logging
import threading
import time
from collections.abc import Iterable, Sequence
from contextlib import suppress
from dataclasses import dataclass
from functools import partial

from ckpt.catalog.inventory import Inventory, StoredStep
from ckpt.config import SaveConfig
from ckpt.errors import CkptError, IntegrityError
from ckpt.model.keys import StepRef
from ckpt.model.readable import size
from ckpt.pipeline.retry import RetryPolicy
from ckpt.pipeline.workers import Workers
from ckpt.retention.policy import FixedGuard, history
from ckpt.root.attempts import step_refs
from ckpt.save.job_steps import EarlierSteps, JobSteps
from ckpt.save.tier_writer import TierWriter
from ckpt.upkeep.step_copier import StepCopier

_log = logging.getLogger("ckpt")


@dataclass(slots=True)
class _Tries:
    """The commits on a tier since the last try to copy steps there, and the number of commits after
    which the next try comes.
    """

    commits: int = 0
    next_try: int = 1

    def count_commit(self) -> bool:
        """Count a commit. Return True if the copies are to be tried again now."""
        self.commits += 1
        if self.commits < self.next_try:
            return False
        self.commits, self.next_try = 0, 2 * self.next_try
        return True


class Backfill:
    """Copies steps of earlier jobs to farther durable tiers, on a thread of its own.

    Args:
        writers: The writers of the durable tiers, nearest first.
        earlier_steps: Gets the steps to copy, so that the pruners of the nearer tiers keep them.
        steps: The steps of the running job.
        config: The threads to use, the backlog, and how long to retry requests.

    Thread safety: ``begin`` may be called from any thread. The owner calls ``close`` once. All
    fields are set once, or are thread-safe objects, except that the backfill's thread alone changes
    ``_owed_refs``, the steps that each farther tier wants and lacks, by the URL of the tier.
    ``_hurry`` is set once the job closes its manager.

    ``_nearest`` is the writer of the nearest durable tier, ``_farther_writers`` are those of the
    others, nearest first, and ``_watcher`` is the thread of the backfill. ``_tries`` counts, for
    each farther tier, the commits until the next try to copy there.
    """

    def __init__(
        self,
        writers: Sequence[TierWriter],
        earlier_steps: EarlierSteps,
        steps: JobSteps,
        config: SaveConfig,
    ) -> None:
        self._nearest, self._farther_writers, self._earlier_steps = (
            writers[0],
            writers[1:],
            earlier_steps,
        )
        self._job_steps, self._config, self._backlog = steps, config, config.backlog
        self._hurry = threading.Event()
        patience = config.commit_timeout_seconds
        self._retry = RetryPolicy(patience_seconds=patience, hurry=self._hurry)
        self._watcher = Workers("backfill", 1, nice=config.nice, cpus=config.cpus).start()
        self._restored_ref: StepRef | None = None
        self._owed_refs: dict[str, frozenset[StepRef]] = {}
        self._tries: dict[str, _Tries] = {writer.url: _Tries() for writer in self._farther_writers}

    def begin(self, url: str) -> None:
        """Start to copy in the background, and return at once.

        The saver of a job that has restored a step calls this after each commit of a step on a
        durable tier. The first call starts the copies. Later calls start those again that the tier
        ``url`` has not taken, each time after twice as many commits as before.
        """
        if (restored_ref := self._earlier_steps.note_first_commit()) is not None:
            self._restored_ref = restored_ref
            self._watcher.submit(self._run, restored_ref)
        elif (
            self._restored_ref is not None
            and self._owed_refs.get(url)
            and self._tries[url].count_commit()
        ):
            self._watcher.submit(self._retry_tier, url, self._restored_ref)

    def close(self) -> None:
        """Wait until the backfill has copied its steps or has failed to copy them. A failure is
        only logged. If the backfill has not begun, do not wait. After a planned stop, whose grace
        time may be short, wait only for the copy of the step that is under way.

        From now on, the backfill does not wait for saves of the running job. It gives up a request
        after the usual number of tries, and no longer repeats it for ``commit_timeout_seconds``.
        """
        self._hurry.set()
        self._job_steps.wake()
        self._watcher.close()

    def _run(self, restored_ref: StepRef) -> None:
        """List the steps of earlier jobs, and copy to each farther tier what it lacks."""
        try:
            lineages = [
                self._lineage(index, restored_ref) for index in range(len(self._farther_writers))
            ]
            for writer, lineage in zip(self._farther_writers, lineages, strict=True):
                # Until the tier was asked, it may lack any of the steps that it takes.
                self._set_owed(
                    writer, [step for step in lineage if writer.tier.takes(step.ref.step)]
                )
            missing_steps = [
                self._missing_steps(writer, lineage)
                for writer, lineage in zip(self._farther_writers, lineages, strict=True)
            ]
            for writer, steps in zip(self._farther_writers, missing_steps, strict=True):
                self._copy_steps(writer, steps)
        except Exception as error:  # noqa: BLE001 - of no consequence for the running job
            _log.warning(
                "ckpt: steps of earlier jobs on %s were not copied to farther tiers: %s",
                self._nearest.url,
                error,
            )
        finally:
            self._earlier_steps.end_listing()
            self._request_pruning()

    def _retry_tier(self, url: str, restored_ref: StepRef) -> None:
        """Copy to the tier ``url`` what it has not taken before, if it still lacks that."""
        index = next(
            index for index, writer in enumerate(self._farther_writers) if writer.url == url
        )
        try:
            if self._owed_refs[url]:
                writer = self._farther_writers[index]
                self._copy_steps(
                    writer, self._missing_steps(writer, self._lineage(index, restored_ref))
                )
        except Exception as error:  # noqa: BLE001 - of no consequence for the running job
            _log.warning("ckpt: steps of earlier jobs were not copied to %s: %s", url, error)
        finally:
            self._request_pruning()

    def _request_pruning(self) -> None:
        for writer in (self._nearest, *self._farther_writers[:-1]):
            writer.request_pruning()  # The tier need not keep all of these steps any more

    def _set_owed(self, writer: TierWriter, steps: Iterable[StoredStep]) -> None:
        """Note that the tier of ``writer`` wants and lacks ``steps``, and no others."""
        self._owed_refs[writer.url] = frozenset(step.ref for step in steps)
        # Before all farther tiers were asked, all steps of earlier jobs stay.
        if len(self._owed_refs) == len(self._farther_writers):
            self._earlier_steps.set_owed(frozenset[StepRef]().union(*self._owed_refs.values()))

    def _lineage(self, index: int, restored_ref: StepRef) -> list[StoredStep]:
        """Return the steps up to ``restored_ref`` on the durable tiers that are nearer than the
        farther tier ``index``, newest step first.

        Of the tiers between the nearest and that one, only steps count that the nearest tier does
        not have and whose folders that one lacks: at most ``backlog`` of each tier. Steps on a tier
        between them that cannot be listed do not count, and stay there.
        """
        own_job, target = self._nearest.claim.own_job, self._farther_writers[index].tier
        steps = [
            step for step in Inventory(self._nearest.tier.backend).look() if step.ref.job != own_job
        ]
        target_refs = set[StepRef]()
        if index > 0:
            with suppress(CkptError):  # If the target lacks nothing after all, nothing is copied
                target_refs = {*step_refs(target.backend)}
        for nearer_writer in self._farther_writers[:index]:
            store = nearer_writer.tier.backend
            try:
                absent = {*step_refs(store)} - target_refs - {step.ref for step in steps}
                absent = {ref for ref in absent if ref <= restored_ref and target.takes(ref.step)}
                newest = sorted((ref for ref in absent if ref.job != own_job), reverse=True)
                steps += Inventory(store).look(among={*newest[: self._backlog]})
            except CkptError as error:
                _log.warning(
                    "ckpt: steps of earlier jobs on %s are not known: %s", store.url, error
                )
                self._earlier_steps.set_unlisted(nearer_writer.tier)
        branch = [step for step in steps if not self._job_steps.has_abandoned(step.ref)]
        return history(branch, restored_ref)

    def _missing_steps(self, writer: TierWriter, lineage: Sequence[StoredStep]) -> list[StoredStep]:
        """Return the steps of ``lineage`` that the tier of ``writer`` wants and lacks, and note
        them.

        If the tier cannot be asked, return none. The nearer tiers then keep the newest steps that
        it takes.
        """
        wanted_steps = [step for step in lineage if writer.tier.takes(step.ref.step)]
        try:
            missing = self._retry.call(
                partial(self._copier(writer).missing_steps, wanted_steps, self._backlog)
            )
        except CkptError as error:
            _log.warning("ckpt: steps of earlier jobs were not copied to %s: %s", writer.url, error)
            self._set_owed(writer, wanted_steps[: self._backlog])
            return []
        self._set_owed(writer, missing)
        return missing

    def _copier(self, writer: TierWriter) -> StepCopier:
        """Return the object that copies a step to the tier of ``writer`` from the other tiers."""
        sources = [
            self._nearest.tier,
            *(candidate.tier for candidate in self._farther_writers if candidate is not writer),
        ]
        durable_stores = [candidate.backend for candidate in sources if not candidate.in_memory]
        farther_urls = [
            candidate.url
            for candidate in self._farther_writers
            if candidate.tier.index > writer.tier.index
        ]
        owed_farther = frozenset[StepRef]().union(*(self._owed_refs[url] for url in farther_urls))
        # The steps that must stay on the target when the copy makes room there
        guard = FixedGuard(owed_farther, durable_stores)
        rollback = self._job_steps.rollback
        return StepCopier(writer.tier, writer.claim, durable_stores, guard, self._retry, rollback)

    def _copy_steps(self, writer: TierWriter, steps: Sequence[StoredStep]) -> None:
        """Copy ``steps`` to the tier of ``writer``, which lacks them."""
        if not steps:
            return
        url, copier = writer.url, self._copier(writer)
        _log.info(
            "ckpt: %s lacks steps %s of earlier jobs: they are copied from %s",
            url,
            _step_numbers(steps),
            self._nearest.url,
        )
        try:
            writer.claim_root()
        except CkptError as error:
            _log.warning("ckpt: steps of earlier jobs were not copied to %s: %s", url, error)
            return
        owed_steps = {step.ref: step for step in steps}
        for index, step in enumerate(steps):
            self._job_steps.wait_idle(url, self._hurry)
            if self._hurry.is_set() and self._job_steps.last_step is not None:
                _log.warning(
                    "ckpt: steps %s of earlier jobs are not copied to %s: a planned stop ends "
                    "this job",
                    _step_numbers(steps[index:]),
                    url,
                )
                return
            if self._copy_step(copier, step):
                del owed_steps[step.ref]
                self._set_owed(writer, owed_steps.values())
            writer.request_pruning()

    def _copy_step(self, copier: StepCopier, step: StoredStep) -> bool:
        """Copy ``step``. A failure is logged, and does not stop the other copies.

        Return True if the tier has the step, or can never get it since its files are damaged.
        """
        config, began = self._config, time.perf_counter()
        try:
            with Workers("backfill", config.threads, nice=config.nice, cpus=config.cpus) as workers:
                report = copier.copy(step, workers)
        except CkptError as error:
            _log.warning(
                "ckpt: step %d of an earlier job was not copied to %s: %s",
                step.ref.step,
                copier.tier.url,
                error,
            )
            return isinstance(error, IntegrityError)
        _log.info(
            "ckpt: step %d of an earlier job is on %s now: %s in %.2f s",
            step.ref.step,
            copier.tier.url,
            size(report.copied_bytes),
            time.perf_counter() - began,
        )
        return True


def _step_numbers(steps: Sequence[StoredStep]) -> str:
    return ", ".join(str(step.ref.step) for step in steps)
