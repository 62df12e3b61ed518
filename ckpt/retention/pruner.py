"""Prune a tier: remove the steps that its retention policy does not keep, and the remains of failed
saves.

The leader prunes after each commit, on a thread of its own. ``ckpt prune`` and the agent prune too.

Each try of a job at a step is an *attempt*, which a `StepRef` names. A *verdict* on a step is the
reasons to keep it. The *heirs* of a step are the steps that refer to its files. The *claim* of a
job decides which steps of a root it may remove: its ``listing`` has the attempts that were there
when the job took the root. On a tier that is local to a node, a step may be a *part*: only the
files of some ranks. *Orphans* are unfinished writes of jobs that have ended.
"""

from __future__ import annotations

import logging
import threading
from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Final

from ckpt.catalog.inventory import Inventory, State, StoredStep, heirs_of
from ckpt.config import SaveConfig
from ckpt.errors import CkptError, StorageError, TransientStorageError
from ckpt.model.keys import StepRef
from ckpt.model.readable import size
from ckpt.pipeline.workers import Workers
from ckpt.retention.policy import (
    GRACE_SECONDS,
    NEWEST,
    NEWEST_OWN,
    NO_JOB,
    PruneContext,
    Retention,
    StepGuard,
    Verdict,
    heirs_first,
    is_old,
    judge,
    unknown_metric,
)
from ckpt.retention.removal import discard_orphans, remove
from ckpt.root.claim import Claim
from ckpt.root.pins import remove_ended
from ckpt.storage.api import StorageBackend
from ckpt.storage.tiers import OpenTier

_log = logging.getLogger("ckpt")
_MOST_EXAMINED: Final = 64
"""The most attempts of which all are looked at before the first commit of a job."""
_REASONS_BY_AGE: Final = frozenset({NEWEST, NEWEST_OWN})


@dataclass(frozen=True, slots=True, kw_only=True)
class Removal:
    """A step that was removed or, in a dry run, would be removed.

    Attributes:
        nbytes: The bytes that the step took on the tier.
        state: The state of the step before its removal.
    """

    ref: StepRef
    nbytes: int
    state: State


def prune(
    backend: StorageBackend,
    rule: Retention,
    context: PruneContext = NO_JOB,
    *,
    dry_run: bool = False,
    inventory: Inventory | None = None,
) -> list[Removal]:
    """Remove the steps that ``rule`` does not keep, and the remains of failed saves.

    A damaged checkpoint is removed too if no file of it was put for ``context.grace_seconds``. It
    stays if ``rule`` keeps everything, or if the tier has no intact checkpoint. Steps that are
    pinned or in a format that this ckpt cannot read stay. With ``context.claim``, checkpoints that
    ``Claim.may_remove`` does not allow to remove stay, too. Pins that have ended are removed. Other
    than these pins, only files with names of checkpoint files in the folders of steps, and
    unfinished writes to such files, are removed. A call that is interrupted at any moment leaves
    complete checkpoints, and remains that the next call removes.

    Args:
        backend: The store.
        rule: The retention policy.
        context: The job that prunes, and the steps that it must keep beside those of ``rule``.
        dry_run: Whether to remove nothing, and only return the steps that would be removed.
        inventory: The inventory of the tier, which remembers the steps that earlier calls have
            read; None to read all steps.

    Returns:
        The steps that were removed or, in a dry run, would be removed, oldest first. Steps without
        bytes are left out.

    Raises:
        RootInUse: Another job has taken the root over.
        StorageError: The tier could not be listed, or a step could not be removed. In the second
            case, all other steps were removed, unless the store does not answer any more.
    """
    inventory = inventory or Inventory(backend)
    verdicts = judge_now(inventory, rule, context)
    if not dry_run:
        remove_ended(backend, inventory.pins)
    return carry_out(backend, verdicts, dry_run=dry_run, claim=context.claim)


def judge_now(inventory: Inventory, rule: Retention, context: PruneContext) -> list[Verdict]:
    """Return the verdicts on the present steps of a tier.

    If a checkpoint goes because newer ones are kept, the store is asked whether these still have
    their manifests: a removal of one of them may have begun since the inventory has read it.
    """
    while True:
        verdicts = judge(inventory.look(without_manifest=rule.keeps_all), rule, context)
        removes_checkpoint = any(
            not verdict.reasons and verdict.step.state == "committed" for verdict in verdicts
        )
        refs_kept_as_newest = [
            verdict.step.ref
            for verdict in verdicts
            if not _REASONS_BY_AGE.isdisjoint(verdict.reasons)
        ]
        if not removes_checkpoint or inventory.confirm(refs_kept_as_newest):
            return verdicts


def carry_out(
    backend: StorageBackend,
    verdicts: Sequence[Verdict],
    *,
    dry_run: bool = False,
    claim: Claim | None = None,
) -> list[Removal]:
    """Remove the steps of ``verdicts`` without a reason to keep them, oldest first. A step goes
    after those that refer to it, and stays if one of them does.

    Args:
        backend: The store.
        verdicts: The verdicts on the steps.
        dry_run: Whether to remove nothing.
        claim: The claim of the job on the root; None if a person decides (``ckpt prune``).

    Returns:
        The steps that were removed or, in a dry run, would be removed. Steps without any bytes are
        left out, and so are steps that stay because they are pinned, a restore has chosen them, or
        another process finishes them.

    Raises:
        RootInUse: Another job has taken the root over. The remaining steps were not removed.
        StorageError: A step could not be removed. All other steps were removed, unless the store
            does not answer any more.
    """
    removed_steps: list[StoredStep] = []
    failure: StorageError | None = None
    present_steps = {verdict.step.ref: verdict.step for verdict in verdicts}
    for step in heirs_first(verdict.step for verdict in verdicts if not verdict.reasons):
        is_base = step.ref in heirs_of(present_steps.values())
        if is_base or (claim is not None and step.ref == claim.chosen_ref):
            continue
        try:
            if dry_run or remove(backend, step, claim):
                removed_steps.append(step)
                del present_steps[step.ref]
        except TransientStorageError:
            raise
        except StorageError as error:
            failure = failure or error
    if failure is not None:
        raise failure
    return [
        Removal(ref=step.ref, nbytes=step.nbytes, state=step.state)
        for step in removed_steps
        if step.nbytes
    ]


def remove_earlier_steps(
    backend: StorageBackend,
    claim: Claim,
    *,
    restored_ref: StepRef | None = None,
    part: bool = False,
) -> None:
    """Remove the steps and the remains of earlier jobs from a tier in memory.

    Such a tier has room only for the steps of the running job. Pinned steps, steps in a format that
    this ckpt cannot read, and steps of jobs that may be alive stay.

    Args:
        backend: The store.
        claim: The claim of the job on the root.
        restored_ref: The step that the job continues from; None if the job has a step of its own.
            The restored step stays, and so does the newest checkpoint on the tier.
        part: Whether the tier has only a part of each step, since each node has a tier of its own.
            If ``restored_ref`` is not None, the newest step without a manifest here then stays too,
            since another node may have its manifest.

    Raises:
        RootInUse: The root belongs to another job, which is not known to have ended.
        StorageError: The tier cannot be listed, or a step cannot be removed. The other steps may
            not have been removed.
    """
    steps = Inventory(backend, part=part).look()
    # The listing was made before this check, so it has no steps of a job that takes the root later.
    claim.use()
    kept_refs: set[StepRef | None] = set()
    if restored_ref is not None:
        committed_refs, part_refs = (
            [step.ref for step in steps if step.state == "committed"],
            [step.ref for step in steps if step.is_part],
        )
        kept_refs = {restored_ref, max(committed_refs, default=None), max(part_refs, default=None)}
    for step in steps:
        if step.state == "incomplete":
            is_removable = (
                step.has_removal_begun or claim.is_dead(step.ref) or is_old(step, GRACE_SECONDS)
            )
        else:
            is_removable = step.state != "unsupported" and claim.may_remove(step)
        if (
            is_removable
            and not step.pins
            and step.ref.job != claim.own_job
            and step.ref not in kept_refs
        ):
            remove(backend, step, claim)


class Pruner:
    """Applies the retention policy of one tier.

    If the policy keeps everything, the remains of failed saves are removed once, after the first
    commit.

    Args:
        tier: The tier to prune.
        claim: The claim of the job on the root.
        guard: The steps that the policy may not remove.
        config: The settings, for the priority and the cores of the thread.
        leads: Whether this rank prunes for all ranks that share the store. Other ranks only make
            room in a full store, and remove only steps that are certainly not in use.

    Thread safety: ``request_run``, ``remove_remains`` and ``evict`` may be called from any thread;
    ``close`` by the owner, once. ``_lock`` guards ``_is_queued``. Only the pruning thread changes
    ``_has_pruned``, ``_is_finished`` and ``_has_warned``.
    """

    def __init__(
        self,
        tier: OpenTier,
        claim: Claim,
        guard: StepGuard,
        config: SaveConfig,
        *,
        leads: bool,
    ) -> None:
        self._tier, self._claim, self._guard, self._leads = tier, claim, guard, leads
        self._rule = Retention.of(tier.tier)
        self._inventory = Inventory(
            tier.backend,
            part=tier.tier.local is True,
            late_metrics=self._rule.keep_best is not None,
        )
        self._workers = Workers("prune", 1, nice=config.nice, cpus=config.cpus)
        if leads:
            self._workers.start()  # Later the system might refuse to start a thread
        self._lock = threading.Lock()
        self._is_queued = self._has_pruned = self._is_finished = self._has_warned = False

    def request_run(self) -> None:
        """Queue a run of the pruning thread, and return at once.

        This has no effect on a rank that does not lead, while a run is queued already, or after a
        successful run if the policy keeps everything.
        """
        with self._lock:
            if not self._leads or self._is_queued or self._is_finished:
                return
            self._is_queued = True
        self._workers.submit(self._prune)

    def remove_remains(self, restored_ref: StepRef | None) -> None:
        """Remove the remains of ended jobs: their unfinished saves and unfinished writes, and the
        steps that they saved and the retention policy does not keep.

        If the tier keeps all steps or has many, only remains that are newer than the newest
        checkpoint are removed, as a killed job leaves them. The first commit is followed by the
        rest, since finding it takes requests for each step.

        This has no effect on a rank that does not lead. If an earlier job is known to have ended,
        this method waits until the removal is done. Otherwise it returns at once. Errors are logged
        and not raised.

        Args:
            restored_ref: The step that the job continues from, which stays; None if it continues
                from none.
        """
        if self._leads:
            completion = self._workers.submit(self._remove_remains, restored_ref)
            if self._claim.has_ended_jobs:
                # Without the wait, jobs that are killed in quick succession could fill the store.
                completion.result()

    def evict(self, restored_ref: StepRef | None) -> bool:
        """Remove from a full store the steps that need not be kept. Wait until this is done.

        Args:
            restored_ref: The step that the job continues from, which stays; None if it continues
                from none.

        Returns:
            True if any step was removed. False if none was, or after an error, which is logged.
        """
        return self._workers.submit(self._evict, restored_ref).result()

    def close(self) -> None:
        """Wait until the queued work is done, and end the pruning thread."""
        self._workers.close()

    def _prune(self) -> None:
        """Apply the policy once. Errors are logged, since the next save leads to another run."""
        with self._lock:
            self._is_queued = False
        if self._is_finished:  # ``request_run`` was called during the first run
            return
        try:
            context = PruneContext(own=self._claim.own_job, guard=self._guard, claim=self._claim)
            if not self._has_pruned:
                discard_orphans(self._tier.backend, self._claim, sorted(self._claim.listing))
            prune(self._tier.backend, self._rule, context, inventory=self._inventory)
            self._has_pruned, self._is_finished = True, self._rule.keeps_all
            if not self._has_warned and (
                warning := unknown_metric(self._rule, self._inventory.metrics)
            ):
                self._has_warned = True
                _log.warning("ckpt: %s: %s", self._tier.url, warning)
        except Exception as error:  # noqa: BLE001
            # Steps that are not removed now are removed after the next save.
            _log.warning("ckpt: old steps on %s were not removed: %s", self._tier.url, error)

    def _remove_remains(self, restored_ref: StepRef | None) -> None:
        """Do the work of ``remove_remains`` on the pruning thread."""
        try:
            attempts = sorted(self._claim.listing, reverse=True)
            if self._claim.has_ended_jobs:  # Otherwise no earlier job is known to have ended
                examines_newest_only = self._rule.keeps_all or len(attempts) > _MOST_EXAMINED
                steps = (
                    self._inventory.newest_begun(attempts)
                    if examines_newest_only
                    else self._inventory.look()
                )
                discard_orphans(self._tier.backend, self._claim, [step.ref for step in steps])
                needed_refs = {*self._guard.protected_refs(), restored_ref}
                context = PruneContext(own=self._claim.own_job, claim=self._claim)
                remains = [
                    verdict
                    for verdict in judge(steps, self._rule, context)
                    if self._claim.is_dead(ref := verdict.step.ref)
                    and (
                        (verdict.step.state == "incomplete" and not verdict.step.is_part)
                        or ref not in needed_refs
                    )
                ]
                carry_out(self._tier.backend, remains, claim=self._claim)
        except Exception as error:  # noqa: BLE001
            # Remains that are not removed now are removed after the next save.
            _log.warning(
                "ckpt: what dead jobs left on %s was not removed: %s", self._tier.url, error
            )

    def _evict(self, restored_ref: StepRef | None) -> bool:
        """Do the work of ``evict`` on the pruning thread."""
        try:
            self._claim.use()
            context = PruneContext(own=self._claim.own_job, guard=self._guard, claim=self._claim)
            verdicts = judge_now(self._inventory, self._rule, context)
            # A full tier also loses the parts of steps that jobs which have ended left here.
            eviction_verdicts = [
                replace(verdict, reasons=())
                if verdict.step.is_part and self._claim.is_dead(verdict.step.ref)
                else verdict
                for verdict in verdicts
                if verdict.step.ref != restored_ref
                and (self._leads or self._may_remove(verdict.step))
            ]
            removed_steps = carry_out(self._tier.backend, eviction_verdicts, claim=self._claim)
        except CkptError as error:
            _log.warning("ckpt: %s is full, and no room could be made: %s", self._tier.url, error)
            return False
        if removed_steps:
            nbytes = size(sum(removal.nbytes for removal in removed_steps))
            _log.warning(
                "ckpt: %s is full: steps of %s that need not be kept were removed",
                self._tier.url,
                nbytes,
            )
        return bool(removed_steps)

    def _may_remove(self, step: StoredStep) -> bool:
        """Return True if a rank that is not the leader may remove ``step``.

        Only the leader knows which steps of an earlier job a farther tier still lacks. So other
        ranks remove only steps of this job, and saves that no process can finish.
        """
        is_remains = step.state == "incomplete" and (
            step.has_removal_begun or self._claim.is_dead(step.ref)
        )
        return is_remains or step.ref.job == self._claim.own_job
