"""The worker that finishes the steps of a job whose trainer has ended.

1. A tier that was away when the job went back gets the rollback. Writes that the trainer had not
   finished when it died are discarded. On each tier, the newest commit that lacks only its manifest
   is finished.
2. The newest step in memory is copied to the nearest durable tier, if all steps on that tier are
   older.
3. The farther tiers get the steps that they lack and would keep, newest first. These are steps of
   the job, and of earlier jobs that could not copy them.
4. Retention is applied as the trainer would apply it.
5. Once durable tiers have the steps of the job, its memory is freed (``Finish.free_memory``).

The agent never owns a root and writes no ``writer.json``, so the next job never waits for the
agent. The agent works on a root only if the owner of the root is the job itself or an earlier job,
or if the root has no owner. It reads the owner again before each manifest and each removal, and
stops if the owner has changed. Without an agent, the next job copies the steps to the farther tiers
(``save.backfill``).

A trainer that leaves its roots to the agent writes an owner without a process into them. The agent
removes the ``writer.json`` of such a root once it has finished the job.

The agent makes no root either. If a root is not the one that the trainer had, for example because
its disk was unmounted, the agent tries again later. The steps stay in memory until then.
"""

from __future__ import annotations

import logging
import time
from collections.abc import Callable, Iterable, Sequence
from contextlib import suppress
from dataclasses import dataclass
from functools import partial
from typing import Self

from ckpt.agent.job_branch import JobBranch
from ckpt.agent.job_tiers import open_tier
from ckpt.agent.messages import Job
from ckpt.agent.node_part_copier import NodeParts
from ckpt.agent.worker_messages import Copied, Ended, OnReport, progress_of
from ckpt.catalog.finalize import RunFacts, finalize
from ckpt.catalog.inventory import Inventory, StoredStep
from ckpt.catalog.step_listing import is_committed, unfinished_of
from ckpt.catalog.transfer_by_rank import copy_part
from ckpt.catalog.verify import Meter, StepFolder
from ckpt.codec.registry import NO_CODEC
from ckpt.coordination.coordinator import LEADER
from ckpt.errors import (
    CkptError,
    CommitError,
    IntegrityError,
    RootInUse,
    StorageError,
    errors_of,
)
from ckpt.model.keys import StepRef
from ckpt.model.readable import rank_list
from ckpt.pipeline.workers import Workers
from ckpt.retention.policy import FixedGuard, PruneContext, Retention, history
from ckpt.retention.pruner import prune
from ckpt.retention.removal import discard, remove
from ckpt.root.attempts import attempts_of
from ckpt.root.claim import Claim
from ckpt.root.owner import NO_PROCESS, Owner, delete_owner, owner_of, read_owner
from ckpt.staging.slot_files import remove_orphans
from ckpt.storage.api import StorageBackend
from ckpt.storage.tiers import OpenTier
from ckpt.upkeep.step_copier import StepCopier

_log = logging.getLogger("ckpt")


@dataclass(frozen=True, eq=False)
class _Root:
    """A tier on which the agent may finish the job.

    Attributes:
        owner: The owner of the root when the agent began; None if the root had none.
        claim: The claim of the job on the root.
        inventory: Remembers the checkpoints that it has read, since several tasks look at the tier.
    """

    tier: OpenTier
    owner: Owner | None
    claim: Claim
    inventory: Inventory


class Finish:
    """Finishes the steps of one job.

    The job is *superseded* once another job has taken one of its roots. ``_node_roots`` are the
    durable roots that belong to this node alone, and have only the files of its ranks.
    ``_durable_roots`` are the other durable roots, nearest first. If the job went back to an older
    step, the later steps are *abandoned*, and are not on its *branch*. To *bring* a step is to make
    it a checkpoint on a shared tier from the files of all nodes.

    An *attempt* is the id of one incarnation of a job. A *claim* decides which steps of a root a
    job may remove, and a *guard* names the steps that must stay. A *copier* makes steps checkpoints
    on its tier, and knows which steps the tier lacks and would keep. *Slot files* are the files
    that hold the tiers in memory. ``_run_task`` calls a task, and adds its error to ``_errors``. A
    task calls ``_confirm`` before it puts a manifest or removes anything.

    Args:
        job: The job. ``job.before`` are the attempts that owned its roots before it, and
            ``job.node_ranks`` the ranks on this node, or none if this node sees the files of all.
        workers: The threads that copy.
        report: Called with a report when a step is copied or a commit is finished, and with the
            progress of each copy.

    Thread safety: one thread calls all methods.
    """

    def __init__(self, job: Job, workers: Workers, report: OnReport) -> None:
        self._job, self._workers, self._report = job, workers, report
        self._owner = job.owner
        self._errors: list[str] = []
        self._is_superseded = False
        self._open_tiers: list[OpenTier] = []
        self._are_roots_left_to_agent = False
        self._ended_jobs: set[str] = set()
        owners: list[tuple[OpenTier, Owner | None]] = []
        for index in range(len(job.tiers)):
            try:
                tier = open_tier(job, index)
                self._open_tiers.append(tier)
                owners.append((tier, owner_of(tier.backend)))
            except CkptError as error:
                self._errors.append(str(error))
        for _, owner in owners:
            if owner is not None and owner.attempt == self._owner.attempt:
                self._are_roots_left_to_agent |= owner.pid == NO_PROCESS
                self._ended_jobs.update(owner.ended)
        roots = [root for tier, owner in owners if (root := self._usable_root(tier, owner))]
        self._memory_roots = [root for root in roots if root.tier.in_memory]
        durable = [root for root in roots if not root.tier.in_memory]
        self._durable_roots = [root for root in durable if not (job.node_ranks and root.tier.local)]
        self._node_roots = [root for root in durable if root not in self._durable_roots]
        self._branch = JobBranch(root.tier.backend for root in durable)
        if not any(root.owner and root.owner.attempt == self._owner.attempt for root in roots):
            # If no root names the job, another job may have taken and released the roots since. If
            # a root could not be read, that root may still name the job.
            self._is_superseded = self._is_superseded or not self._errors

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        for tier in self._open_tiers:
            tier.backend.close()

    def run(self) -> Ended:
        """Finish the steps of the job, and return the outcome.

        The steps in memory stay (see ``free_memory``), but the slot files of processes that have
        ended are removed. At the end, unless a task has failed, the roots of durable tiers are
        given back (``_give_back``).

        A ``CkptError`` is not raised. The outcome contains the first one. An error of
        ``_give_back`` is only logged.
        """
        if self._is_superseded:
            return Ended("superseded")
        remove_orphans()
        for root in (*self._durable_roots, *self._node_roots):
            if root.tier.backend in self._branch.outdated_stores:
                confirm = partial(self._confirm, root)
                self._run_task(partial(self._branch.update, root.tier.backend, confirm))
        if not self._job.node_ranks:
            self._run_whole()
        elif self._durable_roots:
            self._run_task(self._run_parts)
        if self._is_superseded:
            return Ended("superseded")
        if self._errors:
            return Ended("failed", self._errors[0])
        leads = not self._job.node_ranks or LEADER in self._job.node_ranks
        for root in (*self._node_roots, *(self._durable_roots if leads else ())):
            self._run_task(partial(self._give_back, root))
        return Ended("done")

    def _run_whole(self) -> None:
        """Finish the job on the tiers that have the files of all ranks."""
        if self._has_died():
            for root in self._durable_roots:
                self._run_task(partial(self._discard_unfinished, root))
        for root in (*self._memory_roots, *self._durable_roots):
            self._run_task(partial(self._finish_commit, root))
        if self._durable_roots:
            self._run_task(self._make_durable)
        for root in self._durable_roots[1:]:
            self._run_task(partial(self._copy_farther, root))
        for root in self._durable_roots:
            self._run_task(partial(self._prune, root))

    def _run_parts(self) -> None:
        """Copy this node's part of each step to the nearest shared tier. On the leader's node,
        finish the job on the tiers that all nodes share, once all ranks have ended.

        Raises:
            CommitError: Processes of the job still live, or are not known to have ended, and steps
                wait for their end.
        """
        if any(process.lives for process in self._job.processes):
            raise CommitError(
                "processes of the job live on this node: its steps wait for their end"
            )
        parts = self._node_parts()
        self._run_task(parts.bring)
        if not self._errors and (newest := parts.newest()) is not None:
            for root in self._node_roots:
                self._run_task(partial(self._fill_node, root, newest))
                self._run_task(partial(self._prune_node, root, newest))
        self._run_task(parts.check_newer)
        if LEADER not in self._job.node_ranks or self._is_superseded:
            return
        # Each node has noted on the shared tier which of its ranks have ended.
        if not (living_ranks := parts.unnoted_ranks()):
            self._run_whole()
        elif self._has_tier_behind():
            raise CommitError(
                f"what {self._durable_roots[0].tier.url} has is not brought to farther tiers yet: "
                f"rank(s) {rank_list(living_ranks)} have not ended, or their nodes have no agent"
            )

    def _node_parts(self) -> NodeParts:
        stores = [root.tier.backend for root in (*self._memory_roots, *self._node_roots)]
        copier = self._copier_to(self._durable_roots[0], [])
        return NodeParts(self._job, stores, copier, self._workers, self._report)

    def _has_tier_behind(self) -> bool:
        """Return True if a farther tier lacks a step that the nearest shared tier has and that the
        farther tier would keep.
        """
        return any(
            self._missing_steps(self._copier_to(target, []), self._nearer_steps(target))
            for target in self._durable_roots[1:]
        )

    def free_memory(self) -> Ended:
        """Free the memory of the steps that need not stay in memory (see ``_free_root``), and
        remove the slot files of processes that have ended. Return the outcome.
        """
        if self._is_superseded:
            return Ended("superseded")
        for root in self._memory_roots:
            self._run_task(partial(self._free_root, root))
        remove_orphans()
        return Ended("failed", self._errors[0]) if self._errors else Ended("done")

    # -- roots -------------------------------------------------------------------------------------

    def _usable_root(self, tier: OpenTier, owner: Owner | None) -> _Root | None:
        """Return the root of ``tier``, or None if ``_may_finish_for`` is False for its ``owner``.
        In that case, the job counts as superseded, and the agent does no more work for the job on
        any tier.
        """
        if owner and not self._may_finish_for(owner):
            self._is_superseded = True
            _log.info("ckpt: %s belongs to %s now", tier.url, owner)
            return None
        claim = Claim(tier.backend, self._owner)
        claim.act_for_ended(owner)
        return _Root(tier, owner, claim, Inventory(tier.backend))

    def _may_finish_for(self, owner: Owner) -> bool:
        """Return True if ``owner`` is the job itself, or an earlier job that is not known to live.

        A job on another machine counts as earlier only if it owned the root when this job started.
        """
        if owner.attempt in {self._owner.attempt, *self._ended_jobs}:
            return True
        is_earlier_owner = owner.attempt in self._job.before and not owner.alive
        return is_earlier_owner or owner.is_predecessor(self._owner)

    def _confirm(self, target: _Root) -> None:
        """Check that no other job has taken the root ``target``, a root in memory, a root of this
        node alone, or the root of the nearest durable tier.

        Raises:
            RootInUse: One of these roots has another owner than when the agent began.
            RootLost: One of these roots is gone, or another folder has taken its place.
        """
        for root in {*self._memory_roots, *self._node_roots, *self._durable_roots[:1], target}:
            with errors_of(root.tier.url):
                owner = owner_of(root.tier.backend)
            if (owner and owner.attempt) != (root.owner and root.owner.attempt):
                raise RootInUse(root.tier.url, str(owner or "a job that has closed since"))

    def _run_task(self, work: Callable[[], None]) -> None:
        """Call ``work``. Keep its ``CkptError`` for the outcome instead of raising it. Do nothing
        once another job has taken one of the roots.
        """
        if self._is_superseded:
            return
        try:
            work()
        except RootInUse as error:
            _log.info("ckpt: the rest is left to the next job: %s", error)
            self._is_superseded = True
        except CkptError as error:
            _log.warning("ckpt: %s", error)
            self._errors.append(str(error))

    # -- the single tasks --------------------------------------------------------------------------

    def _has_died(self) -> bool:
        """Return True if all processes of the job ran on this node, and none of them lives."""
        processes = self._job.processes
        return len(processes) == self._job.ranks and not any(process.lives for process in processes)

    def _discard_unfinished(self, root: _Root) -> None:
        """Discard the writes that the job had not finished when it died, so that the copies to the
        tier have more room.
        """
        backend = root.tier.backend
        with suppress(StorageError):  # A store may forbid the listing of unfinished writes
            for ref in attempts_of(backend, self._owner.attempt):
                if writes := unfinished_of(backend, ref):
                    self._confirm(root)
                    discard(backend, writes)

    def _finish_commit(self, root: _Root) -> None:
        """Put the manifest of the newest step of the job on the current branch that lacks only its
        manifest, unless a later one is committed.

        Raises:
            CommitError: The trainer still owns the root and lives, so it may yet commit the step.
            RootInUse: Another job has taken the root.
        """
        backend, facts = root.tier.backend, RunFacts(rollback=self._branch.rollback)
        for ref in self._branch.refs(attempts_of(backend, self._owner.attempt)):
            if is_committed(backend, ref):
                return
            if _finish_step(backend, ref, self._workers, facts):
                _log.info("ckpt: step %d on %s lacked only its manifest", ref.step, root.tier.url)
                self._report(Copied(ref.step, root.tier.url))
                return

    def _own_steps(self, root: _Root, inventory: Inventory | None = None) -> list[StoredStep]:
        """Return the committed steps of the job on a tier, newest first, without abandoned ones."""
        steps = (inventory or root.inventory).look()
        return [
            stored_step
            for stored_step in self._branch.steps(steps)
            if stored_step.state == "committed" and stored_step.ref.job == self._owner.attempt
        ]

    def _make_durable(self) -> None:
        """Copy steps of the job from memory to the nearest durable tier. Only steps that are newer
        than all steps of the job on that tier are copied. The newest of them is always copied, and
        each other one only if the tier takes it and would keep it.
        """
        nearest = self._durable_roots[0]
        newest_step = max(
            (stored_step.ref.step for stored_step in self._own_steps(nearest)),
            default=-1,  # Before any step
        )
        for root in self._memory_roots:
            newer_steps = [
                stored_step
                for stored_step in self._own_steps(root)
                if stored_step.ref.step > newest_step
            ]
            # A copy evicts steps of the tier only if the tier has a capacity. Then the steps that
            # farther tiers still need must stay.
            awaited_refs = (
                self._awaited_refs(nearest)
                if nearest.tier.tier.capacity is not None and newer_steps
                else ()
            )
            copier = self._copier_to(nearest, [root, *self._durable_roots[1:]], awaited_refs)
            chosen_steps = {
                stored_step.ref: stored_step
                for stored_step in (
                    *copier.not_being_removed(newer_steps[:1]),
                    *copier.missing_steps(newer_steps, len(newer_steps)),
                )
            }
            for stored_step in chosen_steps.values():
                self._copy(copier, stored_step)

    def _copy_farther(self, target: _Root) -> None:
        """Copy to the tier ``target`` the steps that it lacks and would keep, newest first."""
        other_roots = [root for root in self._durable_roots[1:] if root is not target]
        copier = self._copier_to(
            target, [*self._durable_roots[:1], *self._memory_roots, *other_roots]
        )
        for stored_step in self._missing_steps(copier, self._nearer_steps(target)):
            self._run_task(partial(self._copy, copier, stored_step))

    def _nearer_steps(self, target: _Root) -> list[StoredStep]:
        """Return the steps that the tier ``target`` may get: those in memory and on the durable
        tiers that are nearer than ``target`` (see ``_history``).
        """
        return self._history(
            [*self._durable_roots[: self._durable_roots.index(target)], *self._memory_roots]
        )

    def _history(self, roots: Sequence[_Root]) -> list[StoredStep]:
        """Return the committed steps of the job on ``roots``, and those of earlier jobs that led to
        them, newest step first.
        """
        # The nearest root comes last, so that its entry for a step counts.
        listings = [root.inventory.look() for root in roots[::-1]]
        steps = {
            stored_step.ref: stored_step
            for steps_of_root in listings
            for stored_step in self._branch.steps(steps_of_root)
            if stored_step.state == "committed"
        }
        own_refs = [ref for ref in steps if ref.job == self._owner.attempt]
        return history(steps.values(), max(own_refs)) if own_refs else []

    def _missing_steps(
        self, copier: StepCopier, nearer_steps: Sequence[StoredStep]
    ) -> list[StoredStep]:
        """Return those of ``nearer_steps`` that the tier of ``copier`` lacks and would keep, newest
        first. Return at most one step more than the trainer's tier queue holds, since the trainer
        may also have been copying a step that had left the queue.
        """
        return copier.missing_steps(nearer_steps, self._job.backlog + 1)

    def _copier_to(
        self, target: _Root, sources: Sequence[_Root], awaited_refs: Iterable[StepRef] = ()
    ) -> StepCopier:
        """Return a copier to the tier ``target``.

        Args:
            target: The tier that gets steps.
            sources: The tiers from which steps are copied, nearest first.
            awaited_refs: The steps on the target that must stay when room is made for a copy.
        """
        other_stores = [root.tier.backend for root in self._durable_roots if root is not target]
        return StepCopier(
            target.tier,
            target.claim,
            [root.tier.backend for root in sources],
            FixedGuard(awaited_refs, other_stores),
            rollback=self._branch.rollback,
            confirm=partial(self._confirm, target),
        )

    def _copy(self, copier: StepCopier, stored_step: StoredStep) -> None:
        """Make a step a checkpoint on the tier of ``copier``, from the tiers that have it."""
        step, url = stored_step.ref.step, copier.tier.url
        on_progress = progress_of(step, url, self._report)
        copier.confirm()
        began = time.perf_counter()
        copier.copy(stored_step, self._workers, on_progress=on_progress)
        self._report(Copied(step, url))
        _log.info("ckpt: step %d is on %s now, in %.2f s", step, url, time.perf_counter() - began)

    def _prune(self, root: _Root) -> None:
        """Apply retention to a durable tier. Also keep the steps that farther tiers still lack."""
        rule = Retention.of(root.tier.tier)
        if rule.keeps_all or not self._own_steps(root):
            return
        self._confirm(root)
        guard = FixedGuard(self._awaited_refs(root))
        context = PruneContext(own=self._owner.attempt, alive=False, guard=guard, claim=root.claim)
        prune(root.tier.backend, rule, context)

    def _fill_node(self, root: _Root, newest: StepRef) -> None:
        """Copy the step ``newest`` from this node's memory to ``root``, a durable tier of this node
        alone. The next job then reads the step without the network, although the memory is freed.

        Do nothing if the tier has a codec, a capacity or the step already, or if ``newest`` is not
        the newest step of the job in memory. An ``IntegrityError`` or a ``StorageError`` is only
        logged, since the shared tier has the step.
        """
        tier, ranks = root.tier, self._job.node_ranks
        if tier.tier.codec != NO_CODEC or tier.tier.capacity is not None:
            # This node does not know how other nodes have encoded their files, and the copy makes
            # no room on a tier with a capacity.
            return
        steps = self._own_steps(root, Inventory(tier.backend, part=True))
        for memory in self._memory_roots:
            memory_steps = self._own_steps(memory, Inventory(memory.tier.backend, part=True))
            if (
                not memory_steps
                or memory_steps[0].ref != newest
                or newest in {stored_step.ref for stored_step in steps}
            ):
                continue
            on_progress = progress_of(newest.step, tier.url, self._report)
            meter = Meter(memory_steps[0].staged_bytes, on_progress)
            folder = StepFolder(tier.backend, newest, self._workers)
            confirm = partial(self._confirm, root)
            try:
                copy_part(memory.tier.backend, folder, ranks, meter.add, confirm)
            except (IntegrityError, StorageError) as error:
                _log.warning("ckpt: step %d was not copied to %s: %s", newest.step, tier.url, error)
                continue
            self._report(Copied(newest.step, tier.url))
            _log.info("ckpt: step %d is on %s now", newest.step, tier.url)

    def _prune_node(self, root: _Root, newest: StepRef) -> None:
        """Apply retention to ``root``, a durable tier of this node alone.

        Args:
            root: The root of the tier.
            newest: The newest step of the shared tier. It stays on the node's tier, and so does
                each step that the shared tier lacks and would keep. If the node's tier has a later
                step, nothing is removed.
        """
        rule, backend = Retention.of(root.tier.tier), root.tier.backend
        inventory = Inventory(backend, part=True)  # The tier has only this node's part of each step
        own_steps = self._own_steps(root, inventory)
        if (
            rule.keeps_all
            or not own_steps
            or max(stored_step.ref.step for stored_step in own_steps) > newest.step
        ):
            return
        self._confirm(root)
        steps_to_copy = self._missing_steps(self._copier_to(self._durable_roots[0], []), own_steps)
        guard = FixedGuard({newest, *(stored_step.ref for stored_step in steps_to_copy)})
        context = PruneContext(own=self._owner.attempt, alive=False, guard=guard, claim=root.claim)
        prune(backend, rule, context, inventory=inventory)

    def _awaited_refs(self, root: _Root) -> set[StepRef]:
        """Return the steps that a tier farther than ``root`` lacks and may still get. If a farther
        tier cannot be read, or any task has failed before, return all steps of ``_history``.
        """
        all_refs = {stored_step.ref for stored_step in self._history([root, *self._memory_roots])}
        if self._errors:
            return all_refs
        try:
            missing_by_tier = [
                self._missing_steps(self._copier_to(target, []), self._nearer_steps(target))
                for target in self._durable_roots[self._durable_roots.index(root) + 1 :]
            ]
            return {
                stored_step.ref
                for missing_steps in missing_by_tier
                for stored_step in missing_steps
            }
        except CkptError:  # The copy to the farther tier meets the same error, and reports it
            return all_refs

    def _give_back(self, root: _Root) -> None:
        """Remove ``writer.json`` from a root, if the job still owns the root and has left it to the
        agent. Without ``detach``, the job's own ``close`` would have removed the file.
        """
        owner = read_owner(root.tier.backend)
        if owner and owner.attempt == self._owner.attempt and self._are_roots_left_to_agent:
            delete_owner(root.tier.backend)

    def _free_root(self, root: _Root) -> None:
        """Free the memory of each step of the job that can never become a checkpoint, that is
        abandoned, or for which a durable tier has the same or a later step. If no step is left on
        the tier, remove its ``writer.json`` too.
        """
        newest_durable = max(
            (
                stored_step.ref.step
                for target in self._durable_roots
                for stored_step in self._own_steps(target)
            ),
            default=-1,  # Before any step
        )
        # If nodes have tiers of their own, the memory has only this node's part of each step.
        parts = self._node_parts() if self._job.node_ranks and self._durable_roots else None
        has_steps = False
        for stored_step in Inventory(root.tier.backend, part=bool(self._job.node_ranks)).look():
            is_own = stored_step.ref.job == self._owner.attempt
            is_abandoned = not self._branch.steps([stored_step])
            if is_own and (
                stored_step.ref.step <= newest_durable
                or (is_abandoned and newest_durable >= 0)
                or _is_remains(stored_step, parts)
            ):
                self._confirm(root)
                has_steps |= not remove(root.tier.backend, stored_step, root.claim)
            else:
                has_steps = True
        if not has_steps:
            self._confirm(root)
            delete_owner(root.tier.backend)


def _finish_step(backend: StorageBackend, ref: StepRef, workers: Workers, facts: RunFacts) -> bool:
    """Put the manifest of ``ref``, and return True. Return False if the step lacks more than that,
    or if its save was aborted. ``facts`` has the rollback of the job, which the step's own tier may
    lack.

    Raises:
        CommitError: The trainer still owns the root and lives, so it may yet commit the step.
        RootInUse: Another job has taken the root.
    """
    try:
        finalize(backend, ref, workers=workers, facts=facts)
    except RootInUse as error:
        owner = read_owner(backend)
        if owner is not None and owner.attempt == ref.job:
            raise CommitError(
                f"step {ref.step} on {backend.url} waits for the trainer, which has not left this "
                "root to the agent yet"
            ) from error
        raise
    except (CommitError, IntegrityError):
        return False
    return True


def _is_remains(stored_step: StoredStep, parts: NodeParts | None) -> bool:
    """Return True if a step in memory is incomplete and can never become a checkpoint.

    Args:
        parts: This node's parts of the steps. If it is None, the result is False for each step with
            ``is_part``, since other nodes may need the part.
    """
    return stored_step.state == "incomplete" and not (
        stored_step.is_part and (parts is None or parts.may_be_whole(stored_step.ref))
    )
