"""Copy committed steps from nearer tiers to a farther tier: the steps that the farther tier takes
(``every``) and that its retention policy keeps.

The backfill uses this module for the steps of the job that this job continues. The agent uses it
for the steps of a job that has ended.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field

from ckpt.catalog.index import is_committed, own_objects, step_refs
from ckpt.catalog.inventory import StoredStep
from ckpt.catalog.transfer import FetchReport, fetch_step
from ckpt.catalog.verify import OnProgress, StepFolder
from ckpt.codec.registry import encoder_of
from ckpt.errors import CkptError
from ckpt.model.keys import StepRef, data_name
from ckpt.pipeline.retry import RetryPolicy
from ckpt.pipeline.workers import Workers
from ckpt.retention.claim import Claim
from ckpt.retention.evictor import Evictor
from ckpt.retention.policy import StepGuard
from ckpt.storage.api import StorageBackend
from ckpt.storage.tiers import OpenTier
from ckpt.upkeep.look import checkpoints
from ckpt.upkeep.plan import lacking


@dataclass(frozen=True, slots=True)
class _CopyGuard(StepGuard):
    """The guard of a tier while ``ref`` is copied there.

    Steps that are newer than ``ref`` must stay, and so must the steps of ``guard``.
    """

    far: StorageBackend
    guard: StepGuard
    ref: StepRef

    def waiting(self) -> frozenset[StepRef]:
        newer = frozenset(other for other in step_refs(self.far) if other > self.ref)
        return newer | self.guard.waiting()

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
        confirm: Called before a manifest is put. It raises if the steps must not become checkpoints
            on the tier any more.
    """

    tier: OpenTier
    claim: Claim
    sources: Sequence[StorageBackend]
    guard: StepGuard
    retry: RetryPolicy = field(default_factory=RetryPolicy)
    confirm: Callable[[], object] = lambda: None

    def lacking(self, line: Sequence[StoredStep], most: int) -> list[StoredStep]:
        """Return the steps of ``line`` that the tier lacks and would keep (``plan.lacking``), at
        most ``most`` of them.

        Raises:
            StorageError: The tier does not answer.
        """
        present = checkpoints(self.tier.backend, self.tier.tier, line)
        return lacking(self.tier.tier, present, line, most)

    def copy(
        self, held: StoredStep, workers: Workers, *, on_progress: OnProgress | None = None
    ) -> FetchReport:
        """Copy ``held`` to the tier and commit the copy. If the tier has a capacity, make room
        first.

        Raises:
            CkptError: The step could not be copied or committed. Files that were copied stay for
                the next try.
        """
        sources = self._sources_of(held.ref)
        self.claim.bring(held.ref)
        far, codec = self.tier, self.tier.tier.codec
        has_capacity = far.tier.capacity is not None
        evictor = Evictor(far, self.claim, _CopyGuard(far.backend, self.guard, held.ref))
        encoder = encoder_of(codec)
        is_alike = held.codecs == ((encoder.codec,) if encoder else ())
        # If the copy encodes the files in another way, their size is not known in advance.
        known = encoder is None or is_alike
        if has_capacity:
            nbytes = held.nbytes if is_alike or not held.codecs else held.staged_bytes
            if known:
                nbytes -= self._left(held, encoded=encoder is not None)
            evictor.free_space(held.ref, nbytes, restored=None, stored=known)
        folder = StepFolder(far.backend, held.ref, workers, self.retry)
        report = fetch_step(
            sources, folder, codec=codec, on_progress=on_progress, confirm=self.confirm
        )
        if has_capacity and not known:
            evictor.settle(held.ref, restored=None)
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

    def _left(self, held: StoredStep, *, encoded: bool) -> int:
        """Return the size of the data files that an interrupted copy of ``held`` has left on the
        tier, in bytes. Files in another encoding (``encoded``) do not count.
        """
        ref = held.ref
        names = {ref.key(data_name(rank, is_encoded=encoded)) for rank in range(held.ranks)}
        return sum(info.size for info in own_objects(self.tier.backend, ref) if info.key in names)
