"""The states of the steps of one job: under way, committed, restored, or yet to be copied.

The tier writers, the queues and the backfill share these objects. Each class guards its fields with
a lock of its own. A step that a *rollback* has abandoned is not on the current branch: the job went
back to an older step.
"""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from typing import Final

from ckpt.coordination.tombstone import has_manifest
from ckpt.errors import CkptError
from ckpt.locks import Condition
from ckpt.model.keys import StepRef
from ckpt.model.rollback import Rollback
from ckpt.root.attempts import step_refs
from ckpt.staging.memory_budget import Reservation
from ckpt.storage.tiers import OpenTier

IMAGE: Final = ""
"""What takes the place of the URL of a tier for steps that are written from their images."""


class EarlierSteps:
    """The steps of earlier jobs that the backfill has yet to copy to farther tiers.

    A step is *owed* if a farther tier wants and lacks it.

    Args:
        tiers: The durable tiers, nearest first.
        own_job: The running job, as ``StepRef.job`` names it.
        patience_seconds: How long ``needed_refs`` waits for the backfill to list the steps.

    ``_owed_refs`` are the steps that are owed; None until the backfill has found them.
    ``_has_begun`` is True from the first commit of this job on, with which the backfill begins.
    ``_listing_end`` is set once the backfill has listed the tiers, or has given that up, and
    ``_unlisted_indices`` are the tiers whose steps it could not list.

    Thread safety: all methods may be called from any thread. ``_lock`` guards all fields.
    """

    def __init__(self, tiers: Sequence[OpenTier], own_job: str, patience_seconds: float) -> None:
        self._tiers, self._own_job = tuple(tiers), own_job
        self._patience_seconds = patience_seconds
        self._lock = threading.Lock()
        self._restored_ref: StepRef | None = None
        self._has_begun = False
        self._owed_refs: frozenset[StepRef] | None = None
        self._unlisted_indices: frozenset[int] = frozenset()
        self._listing_end = threading.Event()

    def set_restored(self, ref: StepRef) -> None:
        """Note that the job has restored ``ref``, from which it continues with its first save."""
        with self._lock:
            self._restored_ref = ref

    def note_first_commit(self) -> StepRef | None:
        """Note that this job has committed its first step. Only the first call has an effect.

        Returns:
            The step that the job has restored. None if it has restored none, or if this is not the
            first call: then there is nothing to copy.
        """
        with self._lock:
            if self._has_begun:
                return None
            self._has_begun = True
            if self._restored_ref is None:
                self._owed_refs = frozenset()
                self._listing_end.set()
            return self._restored_ref

    def set_owed(self, refs: Iterable[StepRef]) -> None:
        """Set the steps that a farther tier wants and lacks."""
        with self._lock:
            self._owed_refs = frozenset(refs)
        self.end_listing()

    def set_unlisted(self, tier: OpenTier) -> None:
        """Note that the steps on ``tier`` cannot be listed. All of them that a farther tier takes
        then stay there, since the steps of ``set_owed`` may lack some.
        """
        with self._lock:
            self._unlisted_indices |= {tier.index}

    def end_listing(self) -> None:
        """Let no call of ``needed_refs`` wait any more. If ``set_owed`` was not called, all steps
        stay that a farther tier takes.
        """
        self._listing_end.set()

    def needed_refs(self, tier: OpenTier) -> frozenset[StepRef]:
        """Return the steps of earlier jobs that must stay on ``tier``, since a farther tier wants
        and lacks them.

        Until the backfill has listed them, and if it cannot, these are all steps of other jobs on
        ``tier`` that a farther tier takes, or none if this job has restored no step. After
        ``note_first_commit`` the call waits for the backfill, at most for ``patience_seconds``.

        Raises:
            StorageError: The tier cannot be listed.
        """
        with self._lock:
            has_begun = self._has_begun
        if has_begun:
            self._listing_end.wait(self._patience_seconds)
        with self._lock:
            if self._restored_ref is None:
                return frozenset()
            if self._owed_refs is not None and tier.index not in self._unlisted_indices:
                return self._owed_refs
        return frozenset(ref for ref in step_refs(tier.backend) if self._may_be_owed(tier, ref))

    def is_owed(self, tier: OpenTier, ref: StepRef) -> bool:
        """Return True if ``needed_refs`` has ``ref``. The call neither waits nor lists the tier."""
        with self._lock:
            if self._restored_ref is None:
                return False
            if self._owed_refs is not None and tier.index not in self._unlisted_indices:
                return ref in self._owed_refs
        return self._may_be_owed(tier, ref)

    def _may_be_owed(self, tier: OpenTier, ref: StepRef) -> bool:
        farther_tiers = (candidate for candidate in self._tiers if candidate.index > tier.index)
        return ref.job != self._own_job and any(
            candidate.takes(ref.step) for candidate in farther_tiers
        )


class JobSteps:
    """Records which steps of one job are under way, which are committed, and which was restored.

    Args:
        tiers: All tiers, nearest first.
        earlier: The steps that the backfill copies, if this rank has a backfill.
        copied_refs: Returns the steps that must stay on a tier because later steps may lack their
            copies on other nodes; None if no tier has replicas.

    Attributes:
        restored: The step that the job has restored; None if it has restored none.
        restores: How often the job has restored a step.
        durable_step: The newest step that this job has committed on a durable tier; -1 if there is
            none. If the job then restores an earlier step, it is the number of that step.
        rollback: The rollback that counts; None if the run has none.
        reservation: The host memory that saves keep outside of slots.
        last_step: The last step of the job: the one after which it stops (see
            `ckpt.elastic.planned_stop`), or that was saved as the final one. It goes to every tier.
            None if it is not known.

    ``_waiting_refs`` has the steps that wait for a tier, by its URL, or that need their image
    (``IMAGE``). ``_newest_refs`` has the newest step that this job has committed on each tier.

    Thread safety: all methods may be called from any thread. ``_change`` guards all changes,
    except that the training thread alone sets ``last_step``. The attributes are references and
    numbers, and are read without the lock.
    """

    def __init__(
        self,
        tiers: Sequence[OpenTier],
        earlier: EarlierSteps | None = None,
        copied_refs: Callable[[OpenTier], frozenset[StepRef]] | None = None,
    ) -> None:
        self._durable_tiers = tuple(tier for tier in tiers if not tier.in_memory)
        self._earlier, self._copied_refs = earlier, copied_refs
        self._change = Condition()
        self._waiting_refs: dict[str, set[StepRef]] = {}
        self._newest_refs: dict[str, StepRef] = {}
        self.restored: StepRef | None = None
        self.restores = 0
        self.rollback: Rollback | None = None
        self.reservation = Reservation()
        self.durable_step = -1
        self.last_step: int | None = None

    # -- the state of the job ----------------------------------------------------------------------

    def set_restored(self, ref: StepRef) -> None:
        """Note that the job has restored ``ref`` and continues from it. Steps after ``ref`` do not
        belong to the job's history any more.
        """
        with self._change:
            has_begun = self.durable_step >= 0
            self.restored, self.durable_step = ref, min(self.durable_step, ref.step)
            self.restores += 1
            self._newest_refs = {
                url: newest for url, newest in self._newest_refs.items() if newest.step <= ref.step
            }
        if self._earlier is not None and not has_begun:
            self._earlier.set_restored(ref)

    def has_abandoned(self, ref: StepRef) -> bool:
        """Return True if ``ref`` is not on the current branch. If it is a step of this job, its
        save may have been under way when the job went back.
        """
        return self.rollback is not None and not self.rollback.keeps(ref)

    def set_committed(self, tier: OpenTier, ref: StepRef) -> None:
        """Note that ``ref`` is a checkpoint on ``tier`` now. An abandoned step does not count."""
        if self.has_abandoned(ref):
            return
        with self._change:
            newest = self._newest_refs.get(tier.url)
            self._newest_refs[tier.url] = ref if newest is None else max(newest, ref)
            if not tier.in_memory:
                self.durable_step = max(self.durable_step, ref.step)

    @property
    def newest_step(self) -> int:
        """The newest step that this job has committed on any tier; -1 if there is none."""
        with self._change:
            return max((ref.step for ref in self._newest_refs.values()), default=-1)

    # -- steps under way ---------------------------------------------------------------------------

    def wait_images(self) -> None:
        """Wait until no step needs its image any more."""
        with self._change:
            self._change.wait_for(lambda: not self._waiting_refs.get(IMAGE))

    def begin_waiting(self, ref: StepRef, url: str) -> None:
        """Note that ``ref`` waits for the tier ``url``, or needs its image (``IMAGE``)."""
        with self._change:
            self._waiting_refs.setdefault(url, set()).add(ref)

    def end_waiting(self, ref: StepRef, url: str) -> bool:
        """Note that ``ref`` does not wait for the tier ``url`` any more, or does not need its image
        (``IMAGE``). Return True if it has until now.
        """
        with self._change:
            refs = self._waiting_refs.get(url, set())
            was_waiting = ref in refs
            refs.discard(ref)
            self._change.notify_all()
            return was_waiting

    def awaited_refs(self) -> frozenset[StepRef]:
        """Return the steps whose images are in use, and those that wait for a farther tier."""
        with self._change:
            return frozenset().union(*self._waiting_refs.values())

    def wait_idle(self, url: str, stop: threading.Event) -> None:
        """Wait until no step of this job waits for the tier ``url``, or until ``stop`` is set.

        A thread that sets ``stop`` must call ``wake`` afterwards.
        """
        with self._change:
            self._change.wait_for(lambda: stop.is_set() or not self._waiting_refs.get(url))

    def wake(self) -> None:
        """Wake the threads that wait in ``wait_idle``, so that they check their ``stop`` again."""
        with self._change:
            self._change.notify_all()

    # -- what other tiers have ---------------------------------------------------------------------

    def protected_refs(self, tier: OpenTier) -> frozenset[StepRef]:
        """Return the steps that no retention rule may remove from ``tier`` yet.

        If this rank has a backfill, the call may wait for it (see ``EarlierSteps.needed_refs``).

        Raises:
            StorageError: ``tier``, on which steps of earlier jobs must be listed, does not answer.
        """
        earlier_refs = (
            self._earlier.needed_refs(tier) if self._earlier is not None else frozenset[StepRef]()
        )
        copied_refs = (
            self._copied_refs(tier) if self._copied_refs is not None else frozenset[StepRef]()
        )
        return self.awaited_refs() | earlier_refs | copied_refs

    def is_nearest(self, tier: OpenTier) -> bool:
        """Return True if ``tier`` is the nearest durable one."""
        return self._durable_tiers[:1] == (tier,)

    def is_owed(self, tier: OpenTier, ref: StepRef) -> bool:
        """Return True if ``ref`` is a step of an earlier job that a farther tier than ``tier`` may
        want and lack.
        """
        return self._earlier is not None and self._earlier.is_owed(tier, ref)

    def is_on_other_tier(self, own_tier: OpenTier, ref: StepRef) -> bool:
        """Return True if a durable tier other than ``own_tier`` has ``ref``, or a newer step of
        this job.

        The call asks the store of a tier for the step. If the newest step that this job has
        committed on the tier is older than ``ref``, it does not ask, since a store that is down
        delays the caller. If that step is not older, it asks for that one, which an eviction may
        have removed. A tier that does not answer counts as one that has no step.
        """
        return any(
            self._has(tier, ref) for tier in self._durable_tiers if tier.index != own_tier.index
        )

    def _has(self, tier: OpenTier, ref: StepRef) -> bool:
        """Return True if ``tier`` has ``ref``, or a newer step of this job."""
        with self._change:
            newest = self._newest_refs.get(tier.url)
        if newest is not None and newest.step < ref.step:
            return False
        try:
            return has_manifest(tier.backend, newest or ref)
        except CkptError:
            return False


@dataclass(frozen=True, slots=True)
class TierSteps:
    """The `StepGuard` of one tier: the steps that must stay there, as `JobSteps` knows them.

    Thread safety: see `JobSteps`.
    """

    job_steps: JobSteps
    tier: OpenTier

    @property
    def restored(self) -> StepRef | None:
        """The step that the job has restored; None if it has restored none."""
        return self.job_steps.restored

    @property
    def rollback(self) -> Rollback | None:
        """The rollback that counts; None if the run has none."""
        return self.job_steps.rollback

    @property
    def is_on_nearest_tier(self) -> bool:
        """Whether this is the nearest durable tier."""
        return self.job_steps.is_nearest(self.tier)

    def awaited_refs(self) -> frozenset[StepRef]:
        """Return the steps whose images are in use, and those that wait for a farther tier."""
        return self.job_steps.awaited_refs()

    def protected_refs(self) -> frozenset[StepRef]:
        """Return the steps that no retention rule may remove from this tier yet."""
        return self.job_steps.protected_refs(self.tier)

    def is_owed(self, ref: StepRef) -> bool:
        """Return True if a farther tier may want and lack ``ref``, a step of an earlier job."""
        return self.job_steps.is_owed(self.tier, ref)

    def is_elsewhere(self, ref: StepRef) -> bool:
        """Return True if another durable tier has ``ref``, or a newer step of this job."""
        return self.job_steps.is_on_other_tier(self.tier, ref)
