"""Remove steps from a tier that is full.

Remains of failed saves are removed first, then steps that the retention policy does not keep, then
the oldest of the kept steps. Then come steps of earlier jobs that a farther tier lacks, since the
running job could not save otherwise. The newest step is removed only if another durable tier has it
too.
"""

from __future__ import annotations

import logging
from collections.abc import Container, Iterable, Iterator, Mapping
from typing import Final

from ckpt.catalog.inventory import Inventory, StoredStep
from ckpt.codec.registry import NO_CODEC
from ckpt.errors import CkptError, OutOfSpace, RootInUse, StorageError
from ckpt.model.keys import StepRef
from ckpt.model.readable import size
from ckpt.pipeline.retry import RetryPolicy
from ckpt.retention.claim import Claim
from ckpt.retention.policy import PruneContext, Retention, StepGuard, first_to_go, judge, newest
from ckpt.retention.removal import remove
from ckpt.storage.tiers import OpenTier

_REACHED: Final = "its capacity is reached"
_log = logging.getLogger("ckpt")


class Evictor:
    """Frees room on one tier.

    Several evictors may work on one tier at once, in other ranks or threads. Together they may
    remove more steps than necessary, but never a step that must stay: each evictor lists the tier
    itself, and a step that a farther tier waits for must stay on every rank until all ranks have
    written it to the farther tier.

    Args:
        tier: The tier to free room on.
        claim: The claim of the job on the root.
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

    def free_space(
        self, ref: StepRef, staged: int, *, restored: StepRef | None, stored: bool = False
    ) -> None:
        """Make room so that ``ref`` fits into the capacity of the tier.

        If the store cannot be listed, nothing is removed, and the error is logged and not raised.
        On a tier with a codec, the size of ``ref`` is estimated from the newest encoded step on the
        tier. Without such a step, the estimate is ``staged``, but at most the capacity.

        Args:
            ref: The step that is about to be written.
            staged: The size of ``ref`` in bytes before any codec.
            restored: The step that the job continues from; None if it has restored none. Until the
                job has a newer step, this step is removed only if another durable tier has it too.
            stored: Whether ``staged`` is the size of the files on the tier, so that nothing has to
                be estimated.

        Raises:
            OutOfSpace: ``ref`` cannot fit.
            RootInUse: The root belongs to another job.
            StorageError: The owner of the root cannot be read.
        """
        capacity = self._tier.tier.capacity_bytes or 0
        try:
            found = self._inventory.look()
        except StorageError as error:
            # The save itself finds out whether the store works.
            _log.warning("ckpt: the contents of %s cannot be listed: %s", self._tier.url, error)
            return
        needed, how = staged, ""
        if self._tier.tier.codec != NO_CODEC and not stored:
            if (ratio := _ratio(found)) is None:
                needed = min(staged, capacity)
            else:
                needed, how = int(staged * ratio), f" ({size(staged)} before the codec)"
        if needed > capacity:
            raise OutOfSpace(
                ref.folder,
                f"this checkpoint of {size(needed)}{how} is larger than the capacity of "
                f"{size(capacity)}: raise it, or take the tier out",
            )
        over = sum(held.nbytes for held in found) + needed - capacity
        if self._evict(found, ref, over, restored, _REACHED, or_none=True) > 0:
            raise OutOfSpace(ref.folder, self._why(found, needed, capacity))

    def settle(self, ref: StepRef, *, restored: StepRef | None) -> None:
        """Remove steps until the tier is within its capacity, now that ``ref`` is committed and its
        encoded size is known. A `CkptError` is logged and not raised.
        """
        capacity = self._tier.tier.capacity_bytes or 0
        try:
            found = self._inventory.look()
            over = sum(held.nbytes for held in found) - capacity
            over = self._evict(found, ref, over, restored, _REACHED)
        except CkptError as error:
            _log.warning("ckpt: nothing was evicted from %s: %s", self._tier.url, error)
            return
        if over > 0:
            _log.warning(
                "ckpt: step %d takes %s more than the capacity of %s",
                ref.step,
                size(over),
                self._tier.url,
            )

    def free(self, ref: StepRef, nbytes: int, *, restored: StepRef | None) -> bool:
        """Free at least ``nbytes`` for the step ``ref``, if possible, in a store that is full.

        Return True if any bytes were freed. Raise ``RootInUse`` or the errors of the store.
        """
        self._retry.call(self._claim.use)
        found = self._inventory.look()
        return self._evict(found, ref, nbytes, restored, "the store is full") < nbytes

    def _evict(
        self,
        found: list[StoredStep],
        ref: StepRef,
        over: int,
        restored: StepRef | None,
        why: str,
        *,
        or_none: bool = False,
    ) -> int:
        """Remove steps of ``found`` until ``over`` bytes are freed, in the order of ``_going``.

        Args:
            found: The attempts that the tier lists.
            ref: The step that the room is for. It is not removed.
            over: The number of bytes to free.
            restored: The step that the job has restored; None if there is none.
            why: The reason, for the log.
            or_none: Whether to stop as soon as all steps that may still be removed have too few
                bytes together. Steps that were removed earlier in the call stay removed.

        Returns:
            The number of bytes that are still to be freed, which is 0 or less on success.
        """
        tried: set[StepRef] = set()
        while over > 0:
            going = list(self._going(found, ref, over, restored, tried))
            if not going or (or_none and sum(held.nbytes for held in going) < over):
                break
            over -= self._remove(going, why, tried)
        return over

    def _going(
        self,
        found: list[StoredStep],
        ref: StepRef,
        over: int,
        restored: StepRef | None,
        tried: Container[StepRef],
    ) -> Iterator[StoredStep]:
        """Yield the steps to remove to free ``over`` bytes.

        Remains of failed saves come first, then committed steps in the order of ``first_to_go``.
        Parts of steps of ended jobs and unfinished copies follow, and then the steps that a farther
        tier lacks. The newest step comes last, and only if another durable tier has it too. Steps
        in ``tried`` are left out, and so are ``ref`` and all steps that must stay.
        """
        own = self._claim.own
        whole = {held.ref: held for held in found if held.state == "committed"}
        metrics = {other: held.metrics for other, held in whole.items()}
        last = self._last(whole, restored)
        waiting = self._guard.waiting()
        order = [
            one.held
            for one in judge(found, self._rule, PruneContext(own=own, claim=self._claim))
            if not one.kept
            and one.held.ref not in whole
            and not (one.held.is_part and one.held.ref == restored)
        ]
        going = [ref for ref in first_to_go(whole, self._rule, metrics, own=own) if ref != last]
        owed = {ref for ref in going if self._guard.is_owed(ref)}
        order += [whole[other] for other in going if other not in owed]
        parts = [held for held in found if held.is_part and self._claim.is_dead(held.ref)]
        order += [held for held in parts if held.ref != restored]
        # Next are unfinished copies that this job makes of steps of earlier jobs.
        order += [h for h in found if h.state == "incomplete" and self._claim.brings(h.ref)]
        order += [whole[other] for other in going if other in owed]
        order += [whole[last]] if last is not None else []
        # Remains may be in two of these groups.
        for held in {held.ref: held for held in order}.values():
            if over <= 0:
                return
            if (
                held.ref not in waiting
                and held.ref not in tried
                and held.ref != ref
                and not held.pins
                and (held.ref not in whole or self._claim.may_remove(held))
                and (held.ref != last or self._guard.is_elsewhere(held.ref))
            ):
                over -= held.nbytes
                yield held

    def _last(
        self, whole: Mapping[StepRef, StoredStep], restored: StepRef | None
    ) -> StepRef | None:
        """Return the checkpoint of ``whole`` that a restarted job needs most; None if it is empty.

        That is the newest one of this job. As long as there is none, it is the restored step. Of
        several attempts at a step, it is the one with the youngest manifest, as for a restore.
        """
        own = self._claim.own
        if restored in whole and not any(ref.job == own for ref in whole):
            return restored
        dates = {ref: held.created_at for ref, held in whole.items()}
        counting = [ref for ref in whole if self._counts(ref, restored)]
        return newest(counting or whole, own=own, dates=dates)

    def _counts(self, ref: StepRef, restored: StepRef | None) -> bool:
        """Return True if a restarted job may restore ``ref``.

        A step of another job that is newer than the restored step belongs to an abandoned history.
        """
        is_own = ref.job == self._claim.own
        return restored is None or ref.step <= restored.step or is_own

    def _remove(self, going: list[StoredStep], why: str, tried: set[StepRef]) -> int:
        """Remove the steps of ``going``, and return how many bytes were freed.

        All steps of ``going`` are added to ``tried``, including those that could not be removed.

        Raises:
            RootInUse: The root belongs to another job now.
            StorageError: The owner of the root cannot be read.
        """
        freed = 0
        tried.update(held.ref for held in going)
        self._retry.call(self._claim.use)
        for held in going:
            try:
                gone = remove(self._tier.backend, held, self._claim)
            except RootInUse:
                raise
            except CkptError as error:
                _log.warning(
                    "ckpt: step %d on %s was not evicted: %s", held.ref.step, self._tier.url, error
                )
                continue
            if not gone:
                _log.warning(
                    "ckpt: step %d on %s was not evicted: it is being finished, or is pinned",
                    held.ref.step,
                    self._tier.url,
                )
            else:
                freed += held.nbytes
                what = "what was begun of step" if held.state == "incomplete" else "step"
                _log.info(
                    "ckpt: %s %d was evicted from %s: %s, which gives %s",
                    what,
                    held.ref.step,
                    self._tier.url,
                    why,
                    size(held.nbytes),
                )
        return freed

    def _why(self, found: list[StoredStep], needed: int, capacity: int) -> str:
        """Return the text of the error which says that no more room can be made."""
        waiting = self._guard.waiting() & {held.ref for held in found}
        held = _numbers(waiting)
        pinned = _numbers({one.ref for one in found if one.pins})
        return (
            f"this checkpoint needs {size(needed)} of the capacity of {size(capacity)}, and "
            "nothing there can be removed: the newest has no other copy, farther tiers wait for "
            f"these steps: {held}, and these are pinned: {pinned}. Give it room for two "
            "checkpoints, and one for each step that may wait (backlog)"
        )


def _numbers(refs: Iterable[StepRef]) -> str:
    return ", ".join(str(ref.step) for ref in sorted(refs)) or "none"


def _ratio(found: list[StoredStep]) -> float | None:
    """Return the stored bytes per staged byte of the newest encoded step, at most 1.

    Returns None if ``found`` has no encoded step.
    """
    encoded = (held for held in found if held.staged_bytes > 0 and held.codecs)
    newest_first = max(encoded, key=lambda held: held.ref, default=None)
    return min(1.0, newest_first.nbytes / newest_first.staged_bytes) if newest_first else None
