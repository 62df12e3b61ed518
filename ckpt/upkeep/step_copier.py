"""Copy committed steps from nearer tiers to a farther tier: the steps that the farther tier takes
(``every``) and that its retention policy keeps.

The backfill uses this module for the steps of the job that this job continues. The agent uses it
for the steps of a job that has ended. Those of a running job go through ``save.tier_writer``.

A step is *awaited* if a farther tier still reads it. A step is *owed* if it is one of an earlier
job that a farther tier wants and lacks. A step has increments if its data files lack chunks that
files of other steps have: its bases, or its outer bases in other roots. An *adopted* step has files
of another program.
"""

from __future__ import annotations

import logging
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field

from ckpt.catalog.inventory import StoredStep
from ckpt.catalog.step_listing import is_committed, list_root, own_objects
from ckpt.catalog.transfer import FetchReport, fetch_step
from ckpt.catalog.verify import OnProgress, StepFolder
from ckpt.codec.registry import encoder_of
from ckpt.errors import CkptError
from ckpt.model.keys import StepRef, data_name
from ckpt.model.rollback import Rollback
from ckpt.pipeline.retry import RetryPolicy
from ckpt.pipeline.workers import Workers
from ckpt.retention.evictor import Evictor
from ckpt.retention.policy import StepGuard
from ckpt.root.claim import Claim
from ckpt.root.claim_marker import is_being_removed
from ckpt.storage.api import StorageBackend
from ckpt.storage.tiers import OpenTier
from ckpt.upkeep.look import checkpoints
from ckpt.upkeep.plan import missing_steps

_log = logging.getLogger("ckpt")


@dataclass(frozen=True, slots=True)
class _CopyGuard(StepGuard):
    """The guard of a tier while ``ref`` is copied there.

    The steps of ``guard`` must stay. So must the steps that are newer than ``ref``, unless a
    rollback has abandoned them.
    """

    target: StorageBackend
    guard: StepGuard
    ref: StepRef

    def awaited_refs(self) -> frozenset[StepRef]:
        branch = list_root(self.target).on_branch
        return frozenset(ref for ref in branch if ref > self.ref) | self.guard.awaited_refs()

    def is_owed(self, ref: StepRef) -> bool:
        return self.guard.is_owed(ref)

    def is_elsewhere(self, ref: StepRef) -> bool:
        return self.guard.is_elsewhere(ref)


@dataclass(frozen=True, slots=True)
class StepCopier:
    """Copies steps to one tier.

    Attributes:
        tier: The tier to which the steps are copied.
        claim: The claim of the job on the root of the tier.
        sources: The stores that may have the steps, nearest first. Some of them may be in memory.
        guard: The steps of the tier that must stay when room is made for a copy.
        retry: How requests are retried.
        rollback: The rollback that counts on the sources; None if there is none.
        confirm: Called before a manifest is put. It raises if the steps must not become checkpoints
            on the tier any more.
    """

    tier: OpenTier
    claim: Claim
    sources: Sequence[StorageBackend]
    guard: StepGuard
    retry: RetryPolicy = field(default_factory=RetryPolicy)
    rollback: Rollback | None = None
    confirm: Callable[[], object] = lambda: None

    def missing_steps(self, nearer_steps: Sequence[StoredStep], limit: int) -> list[StoredStep]:
        """Return those of ``nearer_steps`` that the tier lacks and would keep
        (``plan.missing_steps``), at most ``limit`` of them. A step whose removal from the tier has
        begun is left out, whether it goes on or was cut short.

        Raises:
            StorageError: The tier does not answer.
        """
        present = checkpoints(self.tier.backend, self.tier.tier, nearer_steps, self.rollback)
        while True:
            steps = missing_steps(self.tier.tier, present, nearer_steps, limit)
            if (candidates := self.not_being_removed(steps)) == steps:
                return steps
            nearer_steps = [
                step for step in nearer_steps if step in candidates or step not in steps
            ]

    def not_being_removed(self, steps: Sequence[StoredStep]) -> list[StoredStep]:
        """Return the steps whose removal from the tier has not begun, and log the others.

        Raises:
            StorageError: The tier does not answer.
        """
        candidates: list[StoredStep] = []
        for step in steps:
            if not is_being_removed(self.tier.backend, step.ref):
                candidates.append(step)
                continue
            _log.info(
                "ckpt: step %d is not copied to %s: its removal there has begun (if it was cut "
                "short, 'ckpt rm' or 'ckpt prune' ends it)",
                step.ref.step,
                self.tier.backend.url,
            )
        return candidates

    def copy(
        self, step: StoredStep, workers: Workers, *, on_progress: OnProgress | None = None
    ) -> FetchReport:
        """Copy ``step`` to the tier and commit the copy. If the tier has a capacity, make room
        first.

        Raises:
            CkptError: The step could not be copied or committed. Files that were copied stay for
                the next try.
        """
        sources = self._sources_of(step.ref)
        self.claim.note_copy(step.ref)  # So that this job may remove the step there
        target, codec = self.tier, self.tier.tier.codec
        has_capacity = target.tier.capacity is not None
        evictor = Evictor(target, self.claim, _CopyGuard(target.backend, self.guard, step.ref))
        encoder = encoder_of(codec)
        has_increments = bool(step.bases or step.outer_bases)
        own_codecs = (encoder.codec,) if encoder else ()
        keeps_encoding = step.codecs == own_codecs and not has_increments
        # If the copy encodes the files in another way, their size is not known in advance.
        is_exact = encoder is None or keeps_encoding
        if has_capacity:
            # The copy also gets the bytes that the step has in files of other steps or programs.
            needs_other_files = has_increments or step.is_adopted
            is_copied_as_stored = not needs_other_files and (keeps_encoding or not step.codecs)
            # Otherwise the size of the images of all ranks counts.
            nbytes = step.nbytes if is_copied_as_stored else step.staged_bytes
            if is_exact:
                nbytes -= self._copied_bytes(step, is_encoded=encoder is not None)
            evictor.evict_to_capacity(step.ref, nbytes, restored_ref=None, is_exact=is_exact)
        folder = StepFolder(target.backend, step.ref, workers, self.retry)
        report = fetch_step(
            sources, folder, codec=codec, on_progress=on_progress, confirm=self.confirm
        )
        if has_capacity and not is_exact:  # The copy may be larger than was expected
            evictor.fit_to_capacity(step.ref, restored_ref=None)
        return report

    def _sources_of(self, ref: StepRef) -> list[StorageBackend]:
        """Return the sources that have the checkpoint ``ref``. One that does not answer is left
        out, unless no other one has the checkpoint.
        """
        sources: list[StorageBackend] = []
        failure: CkptError | None = None
        for store in self.sources:
            try:
                if is_committed(store, ref):
                    sources.append(store)
            except CkptError as error:
                failure = error
        if failure is not None and not sources:
            raise failure
        return sources

    def _copied_bytes(self, step: StoredStep, *, is_encoded: bool) -> int:
        """Return the size of the data files that an interrupted copy of ``step`` has left on the
        tier, in bytes. Files in another encoding (``is_encoded``) do not count.
        """
        ref = step.ref
        names = {ref.key(data_name(rank, is_encoded=is_encoded)) for rank in range(step.ranks)}
        return sum(info.size for info in own_objects(self.tier.backend, ref) if info.key in names)
