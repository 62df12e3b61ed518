"""An image that is landing -> a checkpoint on every tier. The background half of a save.

What comes in is a value (`SaveJob`): no live object of the trainer. Writing follows the copying as it goes. For each tier, nearest first: make the image durable, then the fragment, then
say so and wait for the verdict. A rank that fails says that too, so that nobody waits for it.
"""

from __future__ import annotations

import contextlib
import logging
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import partial
from typing import Final

import msgspec

from ckpt.catalog.index import committed, sweep
from ckpt.catalog.prune import prune
from ckpt.config import SaveConfig
from ckpt.coordination.api import Coordinator
from ckpt.coordination.commit import Durable, Failed, Refused, Unknown
from ckpt.coordination.committer import LEADER, Committer, rebuild
from ckpt.coordination.owner import Owner, claim, confirm, release
from ckpt.errors import (
    CkptError,
    CommitError,
    IntegrityError,
    ObjectNotFound,
    PeerFailed,
    StepExists,
    StorageError,
    TensorChanged,
)
from ckpt.model.checksum import checksum
from ckpt.model.encoding import pack
from ckpt.model.layout import StepRef, data_name, fragment_name
from ckpt.model.manifest import FORMAT, Chunk, File, Fragment, FragmentRef
from ckpt.pipeline.retry import RetryPolicy
from ckpt.pipeline.stored import StoredImage
from ckpt.pipeline.workers import Workers
from ckpt.pipeline.writer import OnBytes, Source, adopt_image, write_image
from ckpt.plan.merge import Known
from ckpt.plan.retention import Retention
from ckpt.plan.save import SavePlan
from ckpt.storage.api import Adopting
from ckpt.storage.tiers import OpenTier

_log = logging.getLogger("ckpt")
SKIPPED: Final = "skipped: no slot was free"
"""The reason a rank gives for a save it had no slot for."""
UNHEARD: Final = "an earlier save had failed there"
"""The reason a rank gives for a save that it did not begin, because the call raised the error of an earlier one."""


@dataclass(frozen=True, slots=True, kw_only=True)
class SaveJob:
    """All that streaming needs to know.

    Attributes:
        trial: Counts the tries at one step.
        image: Lent until the job is done.
        replicas: Gives the digests of replicas, once all of the image has landed; raises if it never does.
        known: The chunk table, once the image has been written.
    """

    ref: StepRef
    trial: int
    plan: SavePlan
    image: Source
    tied: Mapping[str, str]
    tree: bytes
    per_rank: bytes
    replicas: Callable[[], Mapping[str, str]]
    metadata: bytes
    created_at: float
    known: tuple[Chunk, ...] = ()


class Saver:
    """Threads: ``run`` and ``give_up`` from one background thread; ``evict`` from the training thread; ``close`` from the owner, when it has stopped."""

    def __init__(self, tiers: Sequence[OpenTier], coordinator: Coordinator, config: SaveConfig) -> None:
        self._tiers, self._coordinator, self._config = tiers, coordinator, config
        self._workers = Workers("write", config.threads, nice=config.nice, cpus=config.cpus)
        self._pruner = Workers("prune", 1, nice=config.nice, cpus=config.cpus)
        self._retry = RetryPolicy()
        self._owner = Owner.here(coordinator.attempt)
        self._known = Known()
        self._owned: set[int] = set()
        self._taken: dict[int, set[int]] = {}
        self._lodgers: dict[str, tuple[OpenTier, StepRef]] = {}
        self._durable_step = -1
        self._swept: set[int] = set()
        self.restored_step: int | None = None

    def run(
        self,
        job: SaveJob,
        *,
        on_bytes: OnBytes,
        on_committed: Callable[[str], None],
        intact: Callable[[], None],
    ) -> None:
        """Commit ``job`` to all tiers. ``on_committed`` is told the URL of each. ``intact`` is asked last, and raises if the image is not what it should be.

        Raises:
            CkptError: It did not become a checkpoint on some tier; those before it stand.
        """
        tiers = self.tiers_of(job.ref.step)
        for position, tier in enumerate(tiers):
            try:
                chunks = self._run_on(tier, job, on_bytes, intact)
            except Exception as error:
                if not tier.required and position + 1 < len(tiers) and not isinstance(error, TensorChanged):
                    _log.warning("ckpt: step %d is not kept in %s: %s", job.ref.step, tier.url, error)
                    continue
                for later in tiers[position + 1 :]:
                    self._refuse(later, job.ref, job.trial, f"tier {tier.url}: {error}")
                raise
            self._committed_on(tier, job.ref)
            on_committed(tier.url)
            job = replace(job, known=chunks)
            if job.image.capacity < job.image.size:  # gone from memory; from here on it is on this tier
                key = job.ref.key(data_name(self._coordinator.rank))
                job = replace(job, image=StoredImage(tier.backend, key, job.plan.size, self._retry))

    def tiers_of(self, step: int) -> list[OpenTier]:
        """Those that ``step`` goes to."""
        return [tier for tier in self._tiers if tier.takes(step)]

    def evict(self, path: str) -> None:
        """The slot that is this file will be overwritten: take the step that lies in it off its tier, manifest first. From the training thread."""
        if found := self._lodgers.pop(path, None):
            tier, ref = found
            for name in (ref.manifest, *map(ref.key, self._own_names())):
                tier.backend.delete(name)

    def give_up(self, ref: StepRef, trial: int, reason: str) -> None:
        """Tell the others that this rank has no part in a save, so that they need not wait."""
        for tier in self.tiers_of(ref.step):
            self._refuse(tier, ref, trial, reason)

    def close(self) -> None:
        """Stop the threads and give the roots back. What lies in memory is freed, unless it is the newest there is."""
        self._workers.close()
        self._pruner.close()
        for path, (_, ref) in list(self._lodgers.items()):
            if ref.step <= self._durable_step:
                with contextlib.suppress(CkptError):
                    self.evict(path)
        for tier in self._tiers:
            if tier.index in self._owned:
                with contextlib.suppress(CkptError):
                    release(tier.backend, self._owner)

    def _committed_on(self, tier: OpenTier, ref: StepRef) -> None:
        if not isinstance(tier.backend, Adopting):
            self._durable_step = max(self._durable_step, ref.step)
            if self._coordinator.rank == LEADER and tier.tier.keep_last is not None:
                self._pruner.submit(self._prune, tier)
        elif self._coordinator.rank == LEADER and tier.index not in self._swept:
            self._swept.add(tier.index)  # what an earlier job left in memory is outdated now
            with contextlib.suppress(CkptError):
                sweep(tier.backend, keep=self._coordinator.attempt)

    def _prune(self, tier: OpenTier) -> None:
        """On a thread of its own: a store that is slow to delete holds up no save."""
        try:
            rule = Retention(keep_last=tier.tier.keep_last, keep_every=tier.tier.keep_every)
            prune(tier.backend, rule, own=self._coordinator.attempt, undated=True)
        except Exception as error:  # noqa: BLE001 - what is not removed now is removed after the next save
            _log.warning("ckpt: old steps on %s were not removed: %s", tier.url, error)

    # -- one tier -----------------------------------------------------------------------------------------------------------

    def _run_on(
        self, tier: OpenTier, job: SaveJob, on_bytes: OnBytes, intact: Callable[[], None]
    ) -> tuple[Chunk, ...]:
        committer = self._committer(tier, job.trial)
        if veto := self._veto(tier, job.ref):
            committer.commit(job.ref, Failed(str(veto)), veto=veto)
            raise veto
        try:
            chunks = self._write(tier, job, on_bytes)
            word = Durable(self._put_fragment(tier, job, chunks))
            intact()
        except Exception as error:
            self._refuse(tier, job.ref, job.trial, str(error) or repr(error))
            self._clean_up(tier, job.ref)
            raise
        verdict = committer.commit(
            job.ref, word
        )  # raises if there is none: the files may yet become a checkpoint
        if isinstance(verdict, Unknown):
            raise CommitError(
                f"step {job.ref.step}: whether it was committed on {tier.url} cannot be seen ({verdict.reason})"
            )
        if isinstance(verdict, Refused):
            self._clean_up(tier, job.ref)
            raise rebuild(verdict, job.ref.step)
        return chunks

    def _committer(self, tier: OpenTier, trial: int) -> Committer:
        name = f"save/{tier.index}/{trial}"
        return Committer(
            self._coordinator,
            tier.backend,
            name=name,
            timeout=self._config.commit_timeout_seconds,
            retry=self._retry.call,
            known=self._known,
        )

    def _veto(self, tier: OpenTier, ref: StepRef) -> CkptError | None:
        """The leader's reasons to refuse before anything is written: the root is another's, or the step is taken."""
        if self._coordinator.rank != LEADER:
            return None
        try:
            if tier.index in self._owned:
                self._retry.call(lambda: confirm(tier.backend, self._owner))
            else:
                self._retry.call(lambda: claim(tier.backend, self._owner))
                done = {other.step for other in committed(tier.backend)}
                # what lies after the step that was restored is history given up: it may be lived again
                self._taken[tier.index] = {
                    s for s in done if self.restored_step is None or s <= self.restored_step
                }
                self._owned.add(tier.index)
        except CkptError as error:
            return error
        return StepExists(ref.step, tier.url) if ref.step in self._taken[tier.index] else None

    def _write(self, tier: OpenTier, job: SaveJob, on_bytes: OnBytes) -> tuple[Chunk, ...]:
        key = job.ref.key(data_name(self._coordinator.rank))
        write: Callable[..., tuple[Chunk, ...]] = partial(write_image, backend=tier.backend)
        if isinstance(tier.backend, Adopting):
            write = partial(adopt_image, backend=tier.backend)
            if job.image.path:
                self._lodgers[job.image.path] = (tier, job.ref)
        stored = isinstance(job.image, StoredImage)
        chunks = write(
            job.image,
            job.plan.chunks,
            key=key,
            workers=self._workers,
            retry=self._retry,
            on_bytes=on_bytes,
            known=() if stored else job.known,
        )
        if stored and job.known != chunks:
            raise IntegrityError(
                f"{key} was read back from the nearer tier, and is not what was written there"
            )
        return chunks

    def _own_names(self) -> tuple[str, str]:
        return fragment_name(self._coordinator.rank), data_name(self._coordinator.rank)

    def _put_fragment(self, tier: OpenTier, job: SaveJob, chunks: tuple[Chunk, ...]) -> FragmentRef:
        rank = self._coordinator.rank
        name = fragment_name(rank)
        data = pack(self._fragment(job, chunks))
        self._retry.call(lambda: tier.backend.put(job.ref.key(name), [data]))
        return FragmentRef(name, rank, len(data), checksum(data))

    def _fragment(self, job: SaveJob, chunks: tuple[Chunk, ...]) -> Fragment:
        rank = self._coordinator.rank
        return Fragment(
            format=FORMAT,
            step=job.ref.step,
            attempt=job.ref.attempt,
            rank=rank,
            world_size=self._coordinator.world_size,
            created_at=job.created_at,
            chunk_bytes=self._config.chunk_bytes,
            file=File(data_name(rank), rank, job.plan.size, chunks),
            tensors=job.plan.tensors,
            tied=dict(job.tied),
            tree=msgspec.Raw(job.tree),
            per_rank=msgspec.Raw(job.per_rank),
            replicas=dict(job.replicas()),
            metadata=msgspec.Raw(job.metadata),
        )

    def _refuse(self, tier: OpenTier, ref: StepRef, trial: int, reason: str) -> None:
        """This rank's failure as its word; on the leader, as the verdict. What comes back is known already."""
        veto = PeerFailed(ref.step, {LEADER: reason}) if self._coordinator.rank == LEADER else None
        try:
            self._committer(tier, trial).commit(ref, Failed(reason), veto=veto)
        except CkptError as error:
            _log.debug("ckpt: step %d on %s: %s", ref.step, tier.url, error)

    def _clean_up(self, tier: OpenTier, ref: StepRef) -> None:
        """Remove this rank's files of a save that was refused for good; nothing that a manifest may name."""
        try:
            tier.backend.head(ref.manifest)
        except ObjectNotFound:
            pass
        except StorageError:
            return
        else:
            return
        for name in self._own_names():
            with contextlib.suppress(StorageError):
                tier.backend.delete(ref.key(name))
