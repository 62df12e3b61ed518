"""Remove steps from a tier that is full.

Remains of failed saves are removed first, then steps that the retention policy does not keep, then
the oldest of the kept steps. Then come steps of earlier jobs that a farther tier lacks, since the
running job could not save otherwise. The newest step is removed only if another durable tier has it
too. This is for tiers with a capacity, and for copies: on any other durable tier whose store is
full, the `Pruner` makes room.

Each try of a job at a step is an *attempt*, which a `StepRef` names. The *claim* of a job decides
which steps of a root it may remove. A step is *awaited* if a farther tier still reads it from this
one, and *owed* if it is of an earlier job and a farther tier may lack it. Its *heirs* are the steps
that refer to its files. On a tier that is local to a node, a step may be a *part*: only the files
of some ranks. ``own`` is the attempt of the running job, and the *restored* step is the one that
the job continues from. A *verdict* of the retention policy is the reasons to keep a step. An
``OpenTier`` has the settings of a tier as ``tier.tier``.
"""

from __future__ import annotations

import logging
from collections.abc import Container, Iterable, Iterator, Mapping, Sequence
from typing import Final

from ckpt.catalog.inventory import Inventory, StoredStep, heirs_of
from ckpt.catalog.step_listing import is_committed
from ckpt.catalog.tier_usage import TierUsage
from ckpt.codec.registry import NO_CODEC
from ckpt.errors import CkptError, OutOfSpace, RootInUse, StorageError
from ckpt.model.keys import StepRef
from ckpt.model.readable import size
from ckpt.pipeline.retry import RetryPolicy
from ckpt.retention.policy import (
    PruneContext,
    Retention,
    StepGuard,
    first_to_go,
    judge,
    newest,
    on_branch,
)
from ckpt.retention.removal import remove
from ckpt.root.claim import Claim
from ckpt.storage.tiers import OpenTier

_CAPACITY_REACHED: Final = "its capacity is reached"
_log = logging.getLogger("ckpt")


class Evictor:
    """Frees room on one tier.

    Several evictors may work on one tier at once, in other ranks or threads. Together they may
    remove more steps than necessary, but never a step that must stay: each evictor lists the tier
    itself, and a step that a farther tier waits for must stay on every rank until all ranks have
    written it to the farther tier.

    ``_usage`` counts the bytes of all objects of the tier without reading a manifest.
    ``_was_never_full`` is True as long as this count alone has shown that nothing need be removed.

    Args:
        tier: The tier to free room on.
        claim: The claim of the job on the root. ``use`` checks that no other job owns the root.
        guard: The steps that must stay. Its ``is_elsewhere`` is called only if the newest step has
            to be removed.

    Thread safety: one thread at a time.
    """

    def __init__(self, tier: OpenTier, claim: Claim, guard: StepGuard) -> None:
        self._tier, self._claim, self._guard = tier, claim, guard
        self._retry = RetryPolicy()
        self._rule = Retention.of(tier.tier)
        self._inventory = Inventory(
            tier.backend,
            part=tier.tier.local is True,
            late_metrics=self._rule.keep_best is not None,
        )
        self._usage = TierUsage(tier.backend)
        # On a tier that has only a part of each step, the parts come and go.
        self._was_never_full = tier.tier.local is not True

    def evict_to_capacity(
        self, ref: StepRef, nbytes: int, *, restored_ref: StepRef | None, is_exact: bool = False
    ) -> None:
        """Make room so that ``ref`` fits into the capacity of the tier.

        If the store cannot be listed, nothing is removed, and the error is logged and not raised.
        On a tier with a codec, the size of ``ref`` is estimated from the newest encoded step on the
        tier. Without such a step, the estimate is ``nbytes``, but at most the capacity.

        Args:
            ref: The step that is about to be written.
            nbytes: The size of ``ref`` in bytes before any codec.
            restored_ref: The step that the job continues from; None if it has restored none. Until
                the job has a newer step, this step is removed only if another durable tier has it
                too.
            is_exact: Whether ``nbytes`` is the size of the files on the tier, so that nothing has
                to be estimated.

        Raises:
            OutOfSpace: ``ref`` cannot fit.
            RootInUse: The root belongs to another job.
            StorageError: The owner of the root cannot be read.
        """
        capacity = self._tier.tier.capacity_bytes or 0
        try:
            if self._fits(nbytes):
                return
            steps = self._inventory.look()
        except StorageError as error:
            # The save itself finds out whether the store works.
            _log.warning("ckpt: the contents of %s cannot be listed: %s", self._tier.url, error)
            return
        demand, note = nbytes, ""
        if self._tier.tier.codec != NO_CODEC and not is_exact:
            if (ratio := _codec_ratio(steps)) is None:
                demand = min(nbytes, capacity)
            else:
                demand, note = int(nbytes * ratio), f" ({size(nbytes)} before the codec)"
        if demand > capacity:
            raise OutOfSpace(
                ref.folder,
                f"this checkpoint of {size(demand)}{note} is larger than the capacity of "
                f"{size(capacity)}: raise it, or take the tier out",
            )
        excess = sum(step.nbytes for step in steps) + demand - capacity
        if (
            self._evict(steps, ref, excess, restored_ref, _CAPACITY_REACHED, only_if_enough=True)
            > 0
        ):
            raise OutOfSpace(ref.folder, self._refusal(steps, demand, capacity))

    def fit_to_capacity(self, ref: StepRef, *, restored_ref: StepRef | None) -> None:
        """Remove steps until the tier is within its capacity, now that ``ref`` is committed and its
        encoded size is known. A `CkptError` is logged and not raised.
        """
        capacity = self._tier.tier.capacity_bytes or 0
        try:
            if self._fits(0):
                return
            steps = self._inventory.look()
            excess = sum(step.nbytes for step in steps) - capacity
            excess = self._evict(steps, ref, excess, restored_ref, _CAPACITY_REACHED)
        except CkptError as error:
            _log.warning("ckpt: nothing was evicted from %s: %s", self._tier.url, error)
            return
        if excess > 0:
            _log.warning(
                "ckpt: step %d takes %s more than the capacity of %s",
                ref.step,
                size(excess),
                self._tier.url,
            )

    def evict(self, ref: StepRef, nbytes: int, *, restored_ref: StepRef | None) -> bool:
        """Free at least ``nbytes`` for the step ``ref``, if possible, in a store that is full.

        Return True if any bytes were freed. Raise ``RootInUse`` or the errors of the store.
        """
        self._retry.call(self._claim.use)
        steps = self._inventory.look()
        remaining_bytes = self._evict(steps, ref, nbytes, restored_ref, "the store is full")
        return remaining_bytes < nbytes

    def _fits(self, nbytes: int) -> bool:
        """Return True if ``nbytes`` more than what is there fit into the capacity.

        Before the tier is full for the first time, this tells so without a read of the manifests.
        """
        if self._was_never_full:
            capacity = self._tier.tier.capacity_bytes or 0
            self._was_never_full = self._usage.total() + nbytes <= capacity
        return self._was_never_full

    def _evict(
        self,
        steps: list[StoredStep],
        ref: StepRef,
        excess: int,
        restored_ref: StepRef | None,
        reason: str,
        *,
        only_if_enough: bool = False,
    ) -> int:
        """Remove steps of ``steps`` until ``excess`` bytes are freed, in the order of
        ``_candidates``.

        Args:
            steps: The attempts that the tier lists.
            ref: The step that the room is for. It is not removed.
            excess: The number of bytes to free.
            restored_ref: The step that the job has restored; None if there is none.
            reason: The reason, for the log.
            only_if_enough: Whether to stop as soon as all steps that may still be removed have too
                few bytes together. Steps that were removed earlier in the call stay removed.

        Returns:
            The number of bytes that are still to be freed, which is 0 or less on success.
        """
        exclusions: set[StepRef] = set()
        while excess > 0:
            candidates = list(self._candidates(steps, ref, excess, restored_ref, exclusions))
            if not candidates or (
                only_if_enough and sum(step.nbytes for step in candidates) < excess
            ):
                break
            excess -= self._remove(candidates, heirs_of(steps), reason, exclusions)
        return excess

    def _candidates(
        self,
        steps: list[StoredStep],
        ref: StepRef,
        excess: int,
        restored_ref: StepRef | None,
        exclusions: Container[StepRef],
    ) -> Iterator[StoredStep]:
        """Yield the steps to remove to free ``excess`` bytes.

        Remains of failed saves come first, then steps of abandoned branches, and then the other
        committed steps in the order of ``first_to_go``.
        Parts of steps of ended jobs and unfinished copies follow, and then the steps that a farther
        tier lacks. The newest step comes last, and only if another durable tier has it too. Steps
        in ``exclusions`` are left out, and so are ``ref`` and all steps that must stay.
        """
        own = self._claim.own_job
        committed = [step for step in steps if step.state == "committed"]
        committed_steps = {step.ref: step for step in committed}
        branch = {step.ref: step for step in on_branch(committed)}
        metrics = {ref: step.metrics for ref, step in branch.items()}
        most_needed = self._most_needed(branch, restored_ref)
        awaited_refs = self._guard.awaited_refs()
        order = [
            verdict.step
            for verdict in judge(steps, self._rule, PruneContext(own=own, claim=self._claim))
            if not verdict.reasons
            and verdict.step.ref not in committed_steps
            and not (verdict.step.is_part and verdict.step.ref == restored_ref)
        ]
        candidates = sorted(committed_steps.keys() - branch.keys()) + [
            ref for ref in first_to_go(branch, self._rule, metrics, own=own) if ref != most_needed
        ]
        owed_refs = {ref for ref in candidates if ref in branch and self._guard.is_owed(ref)}
        order += [committed_steps[ref] for ref in candidates if ref not in owed_refs]
        parts = [step for step in steps if step.is_part and self._claim.is_dead(step.ref)]
        order += [step for step in parts if step.ref != restored_ref]
        # Next are unfinished copies that this job makes of steps of earlier jobs.
        order += [
            step for step in steps if step.state == "incomplete" and self._claim.is_copied(step.ref)
        ]
        order += [committed_steps[ref] for ref in candidates if ref in owed_refs]
        order += [committed_steps[most_needed]] if most_needed is not None else []
        # A step that another one here refers to stays as long as that one.
        present_steps = {
            ref: step for ref, step in committed_steps.items() if ref not in exclusions
        }
        # Remains may be in two of the groups of ``order``.
        for step in {step.ref: step for step in order}.values():
            if excess <= 0:
                return
            if (
                step.ref not in awaited_refs
                and step.ref not in heirs_of(present_steps.values())
                and step.ref not in exclusions
                and step.ref != ref
                and not step.pins
                and (step.ref not in committed_steps or self._claim.may_remove(step))
                and (step.ref != most_needed or self._guard.is_elsewhere(step.ref))
            ):
                excess -= step.nbytes
                present_steps.pop(step.ref, None)
                yield step

    def _most_needed(
        self, checkpoints: Mapping[StepRef, StoredStep], restored_ref: StepRef | None
    ) -> StepRef | None:
        """Return the one of ``checkpoints`` that a restarted job needs most; None if it is empty.

        That is the newest one of this job. As long as there is none, it is the restored step. Of
        several attempts at a step, it is the one with the youngest manifest, as for a restore.
        """
        own = self._claim.own_job
        if restored_ref in checkpoints and not any(ref.job == own for ref in checkpoints):
            return restored_ref
        dates = {ref: step.created_at for ref, step in checkpoints.items()}
        restorable = [ref for ref in checkpoints if self._is_restorable(ref, restored_ref)]
        return newest(restorable or checkpoints, own=own, dates=dates)

    def _is_restorable(self, ref: StepRef, restored_ref: StepRef | None) -> bool:
        """Return True if a restarted job may restore ``ref``.

        A step of another job that is newer than the restored step belongs to an abandoned history.
        """
        is_own = ref.job == self._claim.own_job
        return restored_ref is None or ref.step <= restored_ref.step or is_own

    def _remove(
        self,
        candidates: list[StoredStep],
        heirs: Mapping[StepRef, Sequence[StepRef]],
        reason: str,
        exclusions: set[StepRef],
    ) -> int:
        """Remove the steps of ``candidates``, and return how many bytes were freed. A step stays if
        the removal of one of its ``heirs`` has failed.

        All steps of ``candidates`` are added to ``exclusions``, including those that could not be
        removed.

        Raises:
            RootInUse: The root belongs to another job now.
            StorageError: The owner of the root cannot be read.
        """
        freed_bytes = 0
        exclusions.update(step.ref for step in candidates)
        self._retry.call(self._claim.use)
        for step in candidates:
            try:
                if any(is_committed(self._tier.backend, heir) for heir in heirs.get(step.ref, ())):
                    continue  # The removal of a step that refers to it has failed
                is_removed = remove(self._tier.backend, step, self._claim)
            except RootInUse:
                raise
            except CkptError as error:
                _log.warning(
                    "ckpt: step %d on %s was not evicted: %s", step.ref.step, self._tier.url, error
                )
                continue
            if not is_removed:
                _log.warning(
                    "ckpt: step %d on %s was not evicted: it is being finished, or is pinned",
                    step.ref.step,
                    self._tier.url,
                )
            else:
                freed_bytes += step.nbytes
                subject = "what was begun of step" if step.state == "incomplete" else "step"
                _log.info(
                    "ckpt: %s %d was evicted from %s: %s, which gives %s",
                    subject,
                    step.ref.step,
                    self._tier.url,
                    reason,
                    size(step.nbytes),
                )
        return freed_bytes

    def _refusal(self, steps: list[StoredStep], demand: int, capacity: int) -> str:
        """Return the text of the error which says that no more room can be made."""
        awaited_refs = self._guard.awaited_refs() & {step.ref for step in steps}
        awaited_numbers = _numbers(awaited_refs)
        pinned_numbers = _numbers({step.ref for step in steps if step.pins})
        return (
            f"this checkpoint needs {size(demand)} of the capacity of {size(capacity)}, and "
            "nothing there can be removed: the newest has no other copy, farther tiers wait for "
            f"these steps: {awaited_numbers}, and these are pinned: {pinned_numbers}. "
            "Give it room for two checkpoints, and one for each step that may wait (backlog)"
        )


def _numbers(refs: Iterable[StepRef]) -> str:
    return ", ".join(str(ref.step) for ref in sorted(refs)) or "none"


def _codec_ratio(steps: list[StoredStep]) -> float | None:
    """Return the stored bytes per staged byte of the newest encoded step, at most 1.

    Returns None if ``steps`` has no encoded step.
    """
    encoded_steps = (
        step
        for step in steps
        if step.staged_bytes > 0 and step.codecs and not (step.bases or step.outer_bases)
    )
    newest_step = max(encoded_steps, key=lambda step: step.ref, default=None)
    return min(1.0, newest_step.nbytes / newest_step.staged_bytes) if newest_step else None
