"""One tier as a save sees it: make the image durable there, then the fragment, then say so and wait for the verdict.

A rank that fails says that too, so that nobody waits for it. Only what was refused for good, and is seen not to be there, is cleared away.
"""

from __future__ import annotations

import contextlib
import logging
import threading
from collections.abc import Callable
from typing import Final, TypeVar

import msgspec

from ckpt.catalog.index import attempts, is_committed, unfinished_of
from ckpt.config import SaveConfig
from ckpt.coordination.abort_reason import Aborted, rebuild
from ckpt.coordination.api import Coordinator
from ckpt.coordination.claim_marker import clear_away
from ckpt.coordination.commit import LEADER, Durable, Failed, Unknown
from ckpt.coordination.committer import Committer, OneTier, Place, in_turn
from ckpt.coordination.nodes import ManyNodes, on_node
from ckpt.coordination.owner import Owner
from ckpt.errors import (
    CkptError,
    CommitError,
    HistoryHidden,
    OutOfSpace,
    PeerFailed,
    StepExists,
    StorageError,
    about,
    placed,
)
from ckpt.model.keys import StepRef, parse_folder
from ckpt.model.manifest import Chunk
from ckpt.pipeline.retry import RetryPolicy
from ckpt.pipeline.stored import StoredImage
from ckpt.pipeline.workers import Workers
from ckpt.pipeline.writer import OnBytes
from ckpt.plan.merge import Known
from ckpt.retention.claim import Claim, job_of
from ckpt.retention.prune import discard, sweep
from ckpt.retention.pruner import Pruner
from ckpt.retention.quota import Quota
from ckpt.save.rank_files import RankFiles, SaveJob
from ckpt.storage.tiers import OpenTier

T = TypeVar("T")
_log = logging.getLogger("ckpt")
_MANY: Final = 16
"""Ranks; below, threads cost more than they save."""
_READERS: Final = 8
"""Threads that fetch fragments for the merge: what takes time is requests, of which there is one for each rank."""


class TierWriter:
    """Threads: ``close`` from the owner, at the end; all else from any, ``evict`` once for a slot.

    Attributes:
        restored_step: What the job has restored: later steps are history given up.
    """

    def __init__(
        self,
        tier: OpenTier,
        coordinator: Coordinator,
        config: SaveConfig,
        *,
        waiting: Callable[[], frozenset[StepRef]] = frozenset,
        elsewhere: Callable[[StepRef], bool] = lambda _: False,
        needed: Callable[[], frozenset[StepRef]] | None = None,
    ) -> None:
        """``waiting``: steps that farther tiers still read from here. ``elsewhere``: whether another durable tier has a step. ``needed``: what no rule takes off, those that wait if left out."""
        self.tier = tier
        self.restored_step: int | None = None
        self._turn = (
            threading.Lock()
        )  # a tier may be served from the image and by its drain, for different steps
        self._backend = tier.backend
        self._coordinator, self._config = coordinator, config
        self._node = on_node(coordinator, tier.nodes)  # the ranks that share the store
        self._workers = Workers("write", config.threads, nice=config.nice, cpus=config.cpus)
        readers = max(1, min(_READERS, tier.backend.capabilities.max_concurrency))  # fragments, by the leader
        self._readers = Workers("merge", readers, nice=config.nice, cpus=config.cpus)
        follows = self._node.rank != LEADER
        self.root = Claim(
            self._backend,
            Owner.here(coordinator.attempt),
            found_by_leader=self._found_by_leader if follows else None,
        )
        self._pruner: Pruner | None = None
        if not self.in_memory:
            leads = self._node.rank == LEADER
            self._pruner = Pruner(tier, self.root, config, leads=leads, protected=needed or waiting)
        self._quota: Quota | None = None
        if tier.tier.capacity is not None:
            self._quota = Quota(
                tier,
                self._node,
                self.root,
                timeout=config.commit_timeout_seconds,
                waiting=waiting,
                elsewhere=elsewhere,
            )
        self._latest: StepRef | None = None
        self._hurry = threading.Event()
        patience = config.commit_timeout_seconds  # no longer than ranks wait for each other
        self._patient = RetryPolicy(patience_seconds=patience, hurry=self._hurry)
        self._retry = RetryPolicy()
        self._files = RankFiles(tier, coordinator.rank, coordinator.world_size, config, self._workers)
        self._known = Known()
        self._taken: set[int] | None = None
        self._kept_in_slot: dict[str, StepRef] = {}
        self._unclean: set[StepRef] = set()

    @property
    def url(self) -> str:
        return self.tier.url

    @property
    def in_memory(self) -> bool:
        """Whether images stay where they are staged."""
        return self.tier.in_memory

    def commit(self, job: SaveJob, *, on_bytes: OnBytes, intact: Callable[[], None]) -> tuple[Chunk, ...]:
        """Make ``job`` a checkpoint here; returns the chunk table. ``intact`` is asked last, and raises if the image is not what it should be.

        Raises:
            CkptError: It did not become one.
        """
        with self._turn, about(self.url):
            return self._commit(job, on_bytes, intact)

    def _commit(self, job: SaveJob, on_bytes: OnBytes, intact: Callable[[], None]) -> tuple[Chunk, ...]:
        # what waits on a nearer tier can wait out a store that is down for a while
        self._retry = self._patient if job.is_stored else RetryPolicy()
        committer = self._committer(job.trial)
        if abort := self._abort(job):
            committer.commit(
                job.ref, Failed(str(abort)), abort=abort if self._coordinator.rank == LEADER else None
            )
            raise abort
        try:
            with about(self.url):
                chunks, word = self._make_durable(job, on_bytes, intact)
                committer.offer(job.ref, word)
        except Exception as error:
            self._abort_all(job.ref, job.trial, str(error) or repr(error))
            self._clean_up(job)
            raise
        verdict = committer.commit(
            job.ref, word
        )  # raises if there is none: the files may yet become a checkpoint
        if isinstance(verdict, Unknown):
            raise CommitError(
                f"step {job.ref.step}: whether it was committed on {self.url} cannot be seen ({verdict.reason})"
            )
        if isinstance(verdict, Aborted):
            self._clean_up(job)
            raise rebuild(verdict, job.ref.step)
        if self._latest is None or self._latest < job.ref:
            self._latest = job.ref
        if self._quota is not None:
            self._quota.settle(job.ref, restored=self.restored_step)
        return chunks

    def _make_durable(
        self, job: SaveJob, on_bytes: OnBytes, intact: Callable[[], None]
    ) -> tuple[tuple[Chunk, ...], Durable]:
        try:
            return self._write_all(job, on_bytes, intact)
        except OutOfSpace:
            if not self._make_room(job):
                raise
        return self._write_all(job, on_bytes, intact)

    def _make_room(self, job: SaveJob) -> bool:
        """The store is full. Returns whether ``job`` may be tried again."""
        passing = job.image.capacity < job.image.size  # it cannot be had again
        if self._quota is not None:
            return not passing and self._quota.evict(job.ref, job.plan.size, restored=self.restored_step)
        return self._pruner is not None and self._pruner.make_room(self.restored_step) and not passing

    def _call(self, work: Callable[[], T], /) -> T:
        """``work()``, again where the store only stumbled, and once more where it was full and has room now."""
        try:
            return self._retry.call(work)
        except OutOfSpace:
            if self._pruner is None or not self._pruner.make_room(self.restored_step):
                raise
        return self._retry.call(work)

    def _write_all(
        self, job: SaveJob, on_bytes: OnBytes, intact: Callable[[], None]
    ) -> tuple[tuple[Chunk, ...], Durable]:
        if self.in_memory and job.image.path:
            self._kept_in_slot[job.image.path] = job.ref
        chunks, encoding = self._files.write(job, on_bytes, self._retry)
        intact()  # before the fragment: whoever finds all fragments may commit them
        word = Durable(self._files.put_fragment(job, chunks, encoding, self._retry))
        try:
            intact()
        except BaseException:  # at once: if this job dies now, nobody may take it for one to be finished
            with contextlib.suppress(CkptError):
                self._backend.delete(job.ref.key(self._files.names[0]))
            raise
        return chunks, word

    def has(self, ref: StepRef) -> bool:
        """Whether the step, or a newer one of this job, is known to be committed here. The store is asked only while this job has committed nothing: it may be down, and a nearer tier waits."""
        if self._latest is not None:
            return self._latest.step >= ref.step
        with contextlib.suppress(CkptError):
            self._backend.head(ref.manifest)
            return True
        return False

    def claim(self) -> None:
        """Make the root ours. Raises ``RootInUse`` if another job has it."""
        with self._turn, about(self.url):
            self._take_over()

    def sweep(self, restored: StepRef | None = None) -> None:
        """Free the memory of what an earlier job has left here. By the node's leader. Another job that may be alive keeps what it has.

        Args:
            restored: The step that the job goes on from, while it has committed none: what may still be needed stays.
        """
        if self.in_memory and self._node.rank == LEADER:
            with contextlib.suppress(CkptError):
                sweep(self._backend, self.root, restored=restored, part=self.tier.nodes is not None)

    def refuse(self, ref: StepRef, trial: int, reason: str) -> None:
        """This rank's failure as its word; on the leader, as the verdict. What comes back is known already."""
        with self._turn:
            if self._quota is not None:
                with contextlib.suppress(CkptError):
                    self._quota.give_up(ref, trial)
            self._abort_all(ref, trial, reason)

    def _abort_all(self, ref: StepRef, trial: int, reason: str) -> None:
        abort = PeerFailed(ref.step, {LEADER: reason}) if self._coordinator.rank == LEADER else None
        try:
            self._committer(trial).commit(ref, Failed(reason), abort=abort)
        except CkptError as error:
            _log.debug("ckpt: step %d on %s: %s", ref.step, self.url, error)

    def stored(self, job: SaveJob) -> StoredImage:
        """The image of a job that was committed here, the last that was not stored already."""
        return self._files.stored(job, self._retry)

    def hurry(self) -> None:
        """Wait for a store that is down no longer than for any other."""
        self._hurry.set()

    def prune_later(self) -> None:
        """Remove what need not be kept. By the node's leader, on a thread of its own: a store that is slow to delete holds up nobody."""
        if self._pruner is not None:
            self._pruner.ask()

    def evict(self, path: str) -> None:
        """The slot that is this file will be overwritten: take the step that lies in it off, manifest first."""
        if (ref := self._kept_in_slot.get(path)) is not None:
            for name in (ref.manifest, *map(ref.key, self._files.names)):
                self._backend.delete(name)
            del self._kept_in_slot[path]

    def keeps(self, path: str) -> int:
        """The step that lies in the slot that is this file; -1 if there is none."""
        ref = self._kept_in_slot.get(path)
        return -1 if ref is None else ref.step

    @property
    def newest_kept(self) -> int:
        """The newest step of this job that lies here in memory; -1 if there is none."""
        return max((ref.step for ref in self._kept_in_slot.values()), default=-1)

    def newest_committed(self) -> int:
        """The newest step that the store has, of any job; -1 if there is none. Raises ``StorageError``."""
        refs = attempts(self._backend)
        return next((ref.step for ref in refs if is_committed(self._backend, ref)), -1)

    def close(self, durable_step: int) -> None:
        """Stop the threads and give the root back. Steps up to ``durable_step`` need not stay in memory."""
        self._workers.close()
        self._readers.close()
        if self._pruner is not None:
            self._pruner.close()
        for path, ref in list(self._kept_in_slot.items()):
            if ref.step <= durable_step:
                with contextlib.suppress(CkptError):
                    self.evict(path)
            else:
                _log.warning(
                    "ckpt: step %d is in memory only (%s), which it keeps taking: save the last step to a durable tier too",
                    ref.step, self.url,
                )  # fmt: skip
        with contextlib.suppress(CkptError):
            for ref in self._unclean:
                self._discard(ref)
        with contextlib.suppress(CkptError):
            self.root.release()

    def _discard(self, ref: StepRef) -> None:
        """Free what this rank's cut-off writes of ``ref`` take. They are in no listing, and a store may ask money for them."""
        own = {ref.key(name) for name in self._files.names}
        cut = unfinished_of(self._backend, ref)
        discard(self._backend, [one for one in cut if one.key in own])

    # -- inside -------------------------------------------------------------------------------------------------------------

    def _committer(self, trial: int) -> Committer:
        name = f"save/{self.tier.index}/{trial}"
        store = OneTier(self._backend, self._call, confirm=self.root.confirm)
        place: Place = store
        if (nodes := self.tier.nodes) is not None:
            place = ManyNodes(store, self._coordinator, nodes, name=name)
        return Committer(
            self._coordinator,
            place,
            name=name,
            timeout=self._config.commit_timeout_seconds,
            known=self._known,
            read_all=self._readers.stream if self._coordinator.world_size >= _MANY else in_turn,
        )

    def _abort(self, job: SaveJob) -> CkptError | None:
        """Reasons to refuse before anything is written: the leader's own, or that there is no room, of which all ranks hear."""
        abort = self._objection(job.ref) if self._node.rank == LEADER else None
        if self._quota is not None:
            try:
                self._quota.agree(
                    job.ref, job.trial, job.plan.size, restored=self.restored_step, asked=abort is None
                )
            except CkptError as error:
                return placed(error, self.url)
        return abort

    def _objection(self, ref: StepRef) -> CkptError | None:
        """The root is another's, the step is taken, or it would lie behind those of another run."""
        try:
            if self._taken is not None and not self._retry.call(self.root.confirm):
                self._taken = None  # a job had taken the root over, and has closed: there may be other steps
            taken = self._take_over()
        except CkptError as error:
            return placed(error, self.url)
        if ref.step in taken:
            return StepExists(ref.step, self.url)
        if not self.in_memory and (newest := max(taken, default=-1)) > ref.step:
            return HistoryHidden(ref.step, newest, self.url)
        return None

    def _take_over(self) -> set[int]:
        """Make the root ours, if it is not yet; returns the steps that were there then, but for history given up: it may be lived again."""
        if self._taken is None:
            there = self._call(self.root.take)
            if self._node.world_size > 1:  # for ranks that must make room
                folders = msgspec.json.encode([ref.folder for ref in there])
                self._node.set_once(self._found_subject, folders)
            if self._pruner is not None:
                self._pruner.clear()
            done = {other.step for other in there if job_of(other) != self.root.own}
            self._taken = {s for s in done if self.restored_step is None or s <= self.restored_step}
        return self._taken

    def _found_by_leader(self) -> frozenset[StepRef] | None:
        """The checkpoints that were here when the leader took the root. None if it has not."""
        if (told := self._node.verdict(self._found_subject, timeout=0)) is None:
            return None
        refs = map(parse_folder, msgspec.json.decode(told, type=list[str]))
        return frozenset(ref for ref in refs if ref is not None)

    @property
    def _found_subject(self) -> str:
        return f"found/{self.tier.index}"

    def _clean_up(self, job: SaveJob) -> None:
        """Remove this rank's files of a save that was refused for good, or that it has no part in, and what its cut-off writes take."""
        try:
            self._discard(job.ref)
            gone = clear_away(self._backend, job.ref, *map(job.ref.key, self._files.names))
        except StorageError as error:
            self._unclean.add(job.ref)
            _log.debug("ckpt: step %d on %s: its files stay for now: %s", job.ref.step, self.url, error)
        else:
            if gone and job.image.path:
                self._kept_in_slot.pop(job.image.path, None)
