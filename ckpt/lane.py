"""One tier as a save sees it: make the image durable there, then the fragment, then say so and wait for the verdict.

A rank that fails says that too, so that nobody waits for it. Only what was refused for good, and is seen not to be there, is cleared away.
"""

from __future__ import annotations

import contextlib
import logging
import threading
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from functools import partial

import msgspec

from ckpt.catalog.index import committed, sweep
from ckpt.catalog.prune import prune
from ckpt.config import NO_CODEC, SaveConfig
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
)
from ckpt.model.checksum import checksum
from ckpt.model.encoding import pack
from ckpt.model.layout import StepRef, data_name, fragment_name
from ckpt.model.manifest import ENCODED_FORMAT, FORMAT, Chunk, Encoding, File, Fragment, FragmentRef
from ckpt.pipeline.codec import Encoder, widths_of
from ckpt.pipeline.encoded import write_encoded
from ckpt.pipeline.retry import RetryPolicy
from ckpt.pipeline.stored import EncodedImage, StoredImage
from ckpt.pipeline.workers import Workers
from ckpt.pipeline.writer import OnBytes, Source, adopt_image, write_image
from ckpt.plan.merge import Known
from ckpt.plan.retention import Retention
from ckpt.plan.save import SavePlan
from ckpt.storage.api import Adopting
from ckpt.storage.tiers import OpenTier

_log = logging.getLogger("ckpt")


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


class Lane:
    """Threads: ``evict`` and ``keeps`` from the training thread; ``close`` from the owner, at the end; all else from any.

    Attributes:
        restored_step: What the job has restored: later steps are history given up.
    """

    def __init__(self, tier: OpenTier, coordinator: Coordinator, config: SaveConfig) -> None:
        self.tier = tier
        self.restored_step: int | None = None
        self._turn = (
            threading.Lock()
        )  # a tier may be served from the image and by its drain, for different steps
        self._backend = tier.backend
        self._coordinator, self._config = coordinator, config
        self._workers = Workers("write", config.threads, nice=config.nice, cpus=config.cpus)
        self._pruner: Workers | None = None
        if tier.tier.keep_last is not None and coordinator.rank == LEADER:
            self._pruner = Workers("prune", 1, nice=config.nice, cpus=config.cpus)
        self._prune_queued = False
        self._retry = RetryPolicy()
        self._encoder = None if tier.tier.codec == NO_CODEC else Encoder(tier.tier.codec)
        self._streamed: Encoding | None = None
        self._owner = Owner.here(coordinator.attempt)
        self._known = Known()
        self._taken: set[int] | None = None
        self._lodgers: dict[str, StepRef] = {}

    @property
    def url(self) -> str:
        return self.tier.url

    @property
    def in_memory(self) -> bool:
        """Whether images stay where they are staged."""
        return isinstance(self._backend, Adopting)

    def commit(self, job: SaveJob, *, on_bytes: OnBytes, intact: Callable[[], None]) -> tuple[Chunk, ...]:
        """Make ``job`` a checkpoint here; returns the chunk table. ``intact`` is asked last, and raises if the image is not what it should be.

        Raises:
            CkptError: It did not become one.
        """
        with self._turn:
            return self._commit(job, on_bytes, intact)

    def _commit(self, job: SaveJob, on_bytes: OnBytes, intact: Callable[[], None]) -> tuple[Chunk, ...]:
        committer = self._committer(job.trial)
        if veto := self._veto(job.ref):
            committer.commit(job.ref, Failed(str(veto)), veto=veto)
            raise veto
        try:
            chunks, encoding = self._write(job, on_bytes)
            intact()  # before the fragment: whoever finds all fragments may commit them
            word = Durable(self._put_fragment(job, chunks, encoding))
            intact()
        except Exception as error:
            self._refuse(job.ref, job.trial, str(error) or repr(error))
            self._clean_up(job)
            raise
        verdict = committer.commit(
            job.ref, word
        )  # raises if there is none: the files may yet become a checkpoint
        if isinstance(verdict, Unknown):
            raise CommitError(
                f"step {job.ref.step}: whether it was committed on {self.url} cannot be seen ({verdict.reason})"
            )
        if isinstance(verdict, Refused):
            self._clean_up(job)
            raise rebuild(verdict, job.ref.step)
        return chunks

    def sweep(self, *, but_newest: bool = False) -> None:
        """Free the memory of what an earlier job has left here: all of it, or all but the newest step. By the leader."""
        if self.in_memory and self._coordinator.rank == LEADER:
            with contextlib.suppress(CkptError):
                sweep(self._backend, keep=self._coordinator.attempt, but_newest=but_newest)

    def refuse(self, ref: StepRef, trial: int, reason: str) -> None:
        """This rank's failure as its word; on the leader, as the verdict. What comes back is known already."""
        with self._turn:
            self._refuse(ref, trial, reason)

    def _refuse(self, ref: StepRef, trial: int, reason: str) -> None:
        veto = PeerFailed(ref.step, {LEADER: reason}) if self._coordinator.rank == LEADER else None
        try:
            self._committer(trial).commit(ref, Failed(reason), veto=veto)
        except CkptError as error:
            _log.debug("ckpt: step %d on %s: %s", ref.step, self.url, error)

    def stored(self, job: SaveJob) -> StoredImage:
        """The image of a job that was committed here, the last that was not stored already."""
        key = job.ref.key(self._data_name)
        if self._streamed is None:
            return StoredImage(self._backend, key, job.plan.size, self._retry)
        return EncodedImage(self._backend, key, job.plan.chunks, self._streamed.lengths, self._retry)

    def prune_later(self, waiting: Callable[[], frozenset[StepRef]]) -> None:
        """Remove what need not be kept, but nothing that farther tiers are ``waiting`` for. By the leader, on a thread of its own: a store that is slow to delete holds up nobody."""
        if self._pruner is not None and not self._prune_queued:
            self._prune_queued = True
            self._pruner.submit(self._prune, waiting)

    def _prune(self, waiting: Callable[[], frozenset[StepRef]]) -> None:
        self._prune_queued = False
        keep = self.tier.tier
        try:
            rule = Retention(keep_last=keep.keep_last, keep_every=keep.keep_every)
            prune(self._backend, rule, own=self._coordinator.attempt, protected=waiting)
        except Exception as error:  # noqa: BLE001 - what is not removed now is removed after the next save
            _log.warning("ckpt: old steps on %s were not removed: %s", self.url, error)

    def evict(self, path: str) -> None:
        """The slot that is this file will be overwritten: take the step that lies in it off, manifest first."""
        if (ref := self._lodgers.get(path)) is not None:
            for name in (ref.manifest, *map(ref.key, self._own_names())):
                self._backend.delete(name)
            del self._lodgers[path]

    def keeps(self, path: str) -> int:
        """The step that lies in the slot that is this file; -1 if there is none."""
        ref = self._lodgers.get(path)
        return -1 if ref is None else ref.step

    def close(self, durable_step: int) -> None:
        """Stop the threads and give the root back. Steps up to ``durable_step`` need not stay in memory."""
        self._workers.close()
        if self._pruner is not None:
            self._pruner.close()
        for path, ref in list(self._lodgers.items()):
            if ref.step <= durable_step:
                with contextlib.suppress(CkptError):
                    self.evict(path)
            else:
                _log.warning(
                    "ckpt: step %d is in memory only (%s), which it keeps taking: save the last step to a durable tier too",
                    ref.step, self.url,
                )  # fmt: skip
        if self._taken is not None:
            with contextlib.suppress(CkptError):
                release(self._backend, self._owner)

    # -- inside -------------------------------------------------------------------------------------------------------------

    def _committer(self, trial: int) -> Committer:
        name = f"save/{self.tier.index}/{trial}"
        return Committer(
            self._coordinator,
            self._backend,
            name=name,
            timeout=self._config.commit_timeout_seconds,
            retry=self._retry.call,
            known=self._known,
            before_put=self._confirm,
        )

    def _confirm(self) -> None:
        """Asked right before the manifest is put: since the first check another job may have taken the root over, and cleared away what it took for remains."""
        self._retry.call(lambda: confirm(self._backend, self._owner))

    def _veto(self, ref: StepRef) -> CkptError | None:
        """The leader's reasons to refuse before anything is written: the root is another's, or the step is taken."""
        if self._coordinator.rank != LEADER:
            return None
        try:
            if self._taken is not None:
                self._retry.call(lambda: confirm(self._backend, self._owner))
            else:
                self._retry.call(lambda: claim(self._backend, self._owner))
                done = {other.step for other in committed(self._backend)}
                # what lies after the step that was restored is history given up: it may be lived again
                self._taken = {s for s in done if self.restored_step is None or s <= self.restored_step}
        except CkptError as error:
            return error
        return StepExists(ref.step, self.url) if ref.step in self._taken else None

    def _write(self, job: SaveJob, on_bytes: OnBytes) -> tuple[tuple[Chunk, ...], Encoding | None]:
        key = job.ref.key(self._data_name)
        stored = isinstance(job.image, StoredImage)
        write: Callable[..., tuple[Chunk, ...]] = partial(write_image, backend=self._backend)
        lengths: list[int] = []
        if isinstance(self._backend, Adopting):
            write = partial(adopt_image, backend=self._backend)
            if job.image.path:
                self._lodgers[job.image.path] = job.ref
        elif self._encoder is not None:
            widths = widths_of(job.plan.chunks, job.plan.tensors)
            write = partial(
                write_encoded, backend=self._backend, encoder=self._encoder, widths=widths, lengths=lengths
            )
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
        encoder = self._encoder
        encoding = Encoding(self._coordinator.rank, encoder.name, tuple(lengths)) if encoder else None
        if not stored:
            self._streamed = encoding
        return chunks, encoding

    @property
    def _data_name(self) -> str:
        return data_name(self._coordinator.rank, encoded=self._encoder is not None)

    def _own_names(self) -> tuple[str, str]:
        return fragment_name(self._coordinator.rank), self._data_name

    def _put_fragment(
        self, job: SaveJob, chunks: tuple[Chunk, ...], encoding: Encoding | None
    ) -> FragmentRef:
        rank = self._coordinator.rank
        name = fragment_name(rank)
        data = pack(self._fragment(job, chunks, encoding))
        self._retry.call(lambda: self._backend.put(job.ref.key(name), [data]))
        return FragmentRef(name, rank, len(data), checksum(data))

    def _fragment(self, job: SaveJob, chunks: tuple[Chunk, ...], encoding: Encoding | None) -> Fragment:
        rank = self._coordinator.rank
        return Fragment(
            format=ENCODED_FORMAT if encoding else FORMAT,
            step=job.ref.step,
            attempt=job.ref.attempt,
            rank=rank,
            world_size=self._coordinator.world_size,
            created_at=job.created_at,
            chunk_bytes=self._config.chunk_bytes,
            file=File(self._data_name, rank, job.plan.size, chunks),
            tensors=job.plan.tensors,
            tied=dict(job.tied),
            tree=msgspec.Raw(job.tree),
            per_rank=msgspec.Raw(job.per_rank),
            replicas=dict(job.replicas()),
            metadata=msgspec.Raw(job.metadata),
            encoded=(encoding,) if encoding else (),
        )

    def _clean_up(self, job: SaveJob) -> None:
        """Remove this rank's files of a save that was refused for good; nothing that a manifest may name."""
        try:
            self._backend.head(job.ref.manifest)
        except ObjectNotFound:
            for name in self._own_names():
                with contextlib.suppress(StorageError):
                    self._backend.delete(job.ref.key(name))
            if job.image.path:
                self._lodgers.pop(job.image.path, None)
        except StorageError:
            pass
