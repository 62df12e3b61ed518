"""Commits steps to one tier: writes the image, then the fragment, votes, and awaits the verdict.

A *fragment* describes what one rank has made durable. With its *vote* a rank tells the leader that
its part is durable, or has failed. The *verdict* is the outcome, which is the same on all ranks.
The quota of a tier with a capacity makes room before a step is written. The pruner removes the
steps that retention does not keep. An *increment* is a data file without the chunks of frozen
tensors that the file of an older step, its *base*, has. A rank that fails votes too, so that no
other rank waits for it. The files of a failed step are removed only if the step was aborted for
good, and the tier has no manifest of the step.

To *claim* or to take a root is to become the job that owns it, and the *takeover* is what was on
the root at that time. Each try of a job at a step is an *attempt*, which a `StepRef` names. A
*rollback* is the record on a tier that the run went back to an older step: it begins a new *branch*
of the run, and abandons the later steps of the old one. A *foreign* attempt is one of another job.
"""

from __future__ import annotations

import contextlib
import logging
import threading
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Final, TypeVar

from ckpt.catalog.rollbacks import put_rollback
from ckpt.catalog.step_listing import is_committed
from ckpt.config import SaveConfig
from ckpt.coordination.abort_reason import Abort, rebuild
from ckpt.coordination.commit_state_machine import Bounds, Durable, Failure, Unknown
from ckpt.coordination.committer import CommitStore, Committer, SharedStore, in_turn
from ckpt.coordination.coordinator import LEADER, Coordinator
from ckpt.coordination.node_commits import NodeLocalStore, on_node
from ckpt.coordination.step_files import delete_files
from ckpt.errors import (
    CkptError,
    CommitError,
    HistoryHidden,
    ObjectExists,
    OutOfSpace,
    PeerFailed,
    StepExists,
    StorageError,
    errors_of,
    with_root,
)
from ckpt.model.keys import StepRef
from ckpt.model.manifest import Chunk
from ckpt.model.rollback import Rollback, on_branch
from ckpt.pipeline.image_writer import OnBytes
from ckpt.pipeline.retry import RetryPolicy
from ckpt.pipeline.stored_image import StoredImage
from ckpt.pipeline.workers import Workers
from ckpt.plan.merge import MergeCache
from ckpt.retention.pruner import Pruner, remove_earlier_steps
from ckpt.retention.quota import Quota
from ckpt.root.attempts import step_refs
from ckpt.root.claim import Claim, TakeoverPost
from ckpt.root.claim_marker import claim_rank_to_remove, discard_part
from ckpt.root.leases import Leases
from ckpt.root.owner import Owner
from ckpt.save.increments import WrittenFile
from ckpt.save.job_steps import TierSteps
from ckpt.save.rank_files import FileCopier, RankFiles
from ckpt.save.save_request import SaveRequest
from ckpt.save.slot_steps import SlotSteps
from ckpt.storage.tiers import OpenTier, warn_of_unconditional_puts

T = TypeVar("T")
_log = logging.getLogger("ckpt")
_MANY_RANKS: Final = 16
"""From this number of ranks on, the leader reads fragments for the manifest on several threads."""
_READERS: Final = 8
"""The most threads that read the fragments for a manifest. Each rank has one fragment."""
_DETACH_RETRY: Final = RetryPolicy(attempts=3)


@dataclass(frozen=True, slots=True)
class RetryWhenFull:
    """Frees space on a tier whose store is full, and then repeats the write that has failed once.

    If no step can be removed, the save fails on this tier with `OutOfSpace`. Other tiers, and the
    checkpoints on this tier, stay as they are.

    Attributes:
        quota: The quota of the tier; None if the tier has no capacity.
        pruner: The pruner of the tier; None if the tier is in memory.
        steps: The steps of the job on the tier.
    """

    quota: Quota | None
    pruner: Pruner | None
    steps: TierSteps

    def call(self, work: Callable[[], T], request: SaveRequest | None = None) -> T:
        """Call ``work``, which writes the files of ``request``, or else a small object, and return
        its result.

        If the store is full and space was freed, call ``work`` once more.
        """
        try:
            return work()
        except OutOfSpace:
            if not self._evict(request):
                raise
        return work()

    def _evict(self, request: SaveRequest | None) -> bool:
        """Remove steps to free space.

        Return True if any were removed and ``request`` can be written again. An image that passes
        through memory in waves cannot be written again.
        """
        restored_ref, can_repeat = (
            self.steps.restored,
            request is None or not request.is_single_pass,
        )
        if request is not None and self.quota is not None:
            return can_repeat and self.quota.evict(
                request.ref, request.plan.size, restored_ref=restored_ref
            )
        return self.pruner is not None and self.pruner.evict(restored_ref) and can_repeat


class TierWriter:
    """Commits the steps of one job to one tier, one at a time, and cleans up those that fail.

    Args:
        tier: The tier.
        coordinator: The connection of this writer to the other ranks.
        config: The settings of saves.
        steps: The state of the job's steps on this tier: committed, waiting or restored. Its
            ``job_steps`` are the steps on all tiers, and its ``rollback`` is the one that counts.
        slots: The steps that stay in slots. Only a tier in memory uses them.
        copier: Lets the agent copy files of nearer tiers to this tier; None if there is no agent.

    Attributes:
        in_memory: Whether the tier keeps images in the slots in which they were staged.
        claim: The claim of the job on the root of the tier, which says what the job may remove
            there. ``claim.take`` makes the job the owner, and lists the root.

    Thread safety: the owner may call ``close`` once, after all other calls have returned. All other
    methods may be called from any thread. ``_turn_lock`` guards ``_retry``, ``_merge_cache``,
    ``_foreign_refs``, ``_rollback``, ``_unclean_refs`` and ``_files``, because ``commit``,
    ``abort`` and ``claim_root`` may be called by different threads. A thread that has just
    committed calls ``stored_image`` before it commits again. Only the owner, which closes, uses
    ``_is_detached``. All other fields are set once, or are thread-safe objects.

    ``_node_coordinator`` connects the ranks that share the store: those of this node if the tier is
    local to it, or else all. Their leader takes the root, and posts the takeover in
    ``_takeover_post`` for the others. ``_rollback`` is the one that this writer has put on the
    tier. ``_foreign_refs`` are the attempts of other jobs that the tier had when this job took the
    root, None before that. ``_unclean_refs`` are failed saves whose files could not be removed yet.
    ``_departure`` is set once the agent may work on the steps.

    ``_files`` writes the files of this rank. ``_when_full`` calls a write again after it has freed
    space in a store that is full. ``_retry`` repeats the requests of the save under way. If its
    files come from a nearer tier, it is ``_patient_retry``, which repeats them as long as ranks
    wait for each other. ``_leases`` keep the base of increments from being removed. ``_readers``
    are the threads with which the leader reads fragments.
    """

    def __init__(
        self,
        tier: OpenTier,
        coordinator: Coordinator,
        config: SaveConfig,
        steps: TierSteps,
        slots: SlotSteps,
        copier: FileCopier | None = None,
    ) -> None:
        self.tier, self.url, self.in_memory = tier, tier.url, tier.in_memory
        self._turn_lock = threading.Lock()
        self._backend = tier.backend
        self._coordinator, self._config, self._steps, self._slots = (
            coordinator,
            config,
            steps,
            slots,
        )
        self._node_coordinator = on_node(coordinator, tier.nodes)
        self._workers = Workers("write", config.threads, nice=config.nice, cpus=config.cpus)
        reader_count = max(1, min(_READERS, tier.backend.capabilities.max_concurrency))
        self._readers = Workers("merge", reader_count, nice=config.nice, cpus=config.cpus)
        self._takeover_post = TakeoverPost(self._node_coordinator, tier.index)
        takeover = None if self._node_coordinator.rank == LEADER else self._takeover_post
        self.claim = Claim(
            self._backend, Owner.of_this_process(coordinator.attempt), takeover_post=takeover
        )
        self._pruner: Pruner | None = None
        if not self.in_memory:
            self._pruner = Pruner(
                tier, self.claim, steps, config, leads=self._node_coordinator.rank == LEADER
            )
        self._quota: Quota | None = None
        if tier.tier.capacity is not None:
            timeout = config.commit_timeout_seconds
            self._quota = Quota(tier, self._node_coordinator, self.claim, steps, timeout=timeout)
        self._when_full = RetryWhenFull(self._quota, self._pruner, steps)
        self._hurry_event, self._departure = threading.Event(), threading.Event()
        self._discard_lock = threading.Lock()
        patience = config.commit_timeout_seconds  # Ranks wait for each other at most this long
        self._patient_retry = RetryPolicy(patience_seconds=patience, hurry=self._hurry_event)
        self._retry = RetryPolicy()
        self._files = RankFiles(tier, coordinator, config, self._workers, copier, steps.job_steps)
        # If nodes share the tier, an agent of another node may copy the files of this rank there.
        # So this rank puts a marker before it removes them (see ``claim_marker``).
        is_alone = tier.local or coordinator.world_size == 1
        self._marker_rank = None if is_alone else coordinator.rank
        self._merge_cache = MergeCache(config.deltas)
        self._leases = Leases(tier.backend)
        self._foreign_refs: list[StepRef] | None = None
        self._rollback: Rollback | None = None
        self._committed_cache: dict[StepRef, bool] = {}
        self._unclean_refs: set[StepRef] = set()
        self._is_detached = False

    def commit(self, request: SaveRequest, *, on_bytes: OnBytes) -> tuple[Chunk, ...]:
        """Make ``request`` a checkpoint on this tier, together with the other ranks.

        Args:
            request: The save. Its ``confirm`` is called before the commit.
            on_bytes: Called with the number of bytes just written, from the writing threads.

        Returns:
            The chunk table of the image.

        Raises:
            CkptError: The step did not become a checkpoint here, or this rank cannot find out
                whether it did (`CommitError`).
        """
        with self._turn_lock, errors_of(self.url):
            return self._commit(request, on_bytes)

    def _commit(self, request: SaveRequest, on_bytes: OnBytes) -> tuple[Chunk, ...]:
        """Do the work of ``commit``. The caller holds ``_turn_lock``."""
        # A step that a nearer tier has can wait until a store answers again.
        self._retry = self._patient_retry if request.source is not None else RetryPolicy()
        committer = self._committer(request.trial)
        if abort := self._reason_to_abort(request):
            committer.commit(
                request.ref,
                Failure(str(abort)),
                abort=abort if self._coordinator.rank == LEADER else None,
            )
            raise abort
        try:
            with errors_of(self.url):
                file, vote = self._when_full.call(
                    partial(self._write_all, request, on_bytes), request
                )
                # Before the vote, let the other ranks read the fragment
                committer.store.offer(request.ref, vote.fragment)
        except Exception as error:
            self._vote_failure(request.ref, request.trial, str(error) or repr(error))
            self._discard(request)
            raise
        if self.in_memory:
            self._slots.set_voted(request.ref)
        # This raises if there is no verdict. The files stay, since they may become a checkpoint.
        verdict = committer.commit(request.ref, vote)
        if self.in_memory:
            self._slots.set_decided(request.ref)
        if isinstance(verdict, Unknown):
            raise CommitError(
                f"step {request.ref.step}: whether it was committed on {self.url} cannot be seen "
                f"({verdict.reason})"
            )
        if isinstance(verdict, Abort):
            self._discard(request)
            raise rebuild(verdict, request.ref.step)  # The error that the verdict carries
        self._steps.job_steps.set_committed(self.tier, request.ref)
        if request.plan.frozen_chunks:
            self._files.set_committed(request, file)
            if file.increment is None:
                self._leases.release()  # The next increments refer to this file
        if not self._steps.job_steps.has_abandoned(request.ref):
            self.claim.chosen_ref = None
        if self.in_memory:
            self._slots.set_committed(request.ref)
        if self._quota is not None:
            # Evict more steps if the files are larger than was expected.
            self._quota.fit_to_capacity(request.ref, restored_ref=self._steps.restored)
        return file.chunks

    def _request(self, work: Callable[[], T], /) -> T:
        """Call ``work`` with retries. If the store is full and room was made, call it once more."""
        return self._when_full.call(partial(self._retry.call, work))

    def _write_all(self, request: SaveRequest, on_bytes: OnBytes) -> tuple[WrittenFile, Durable]:
        """Write all files of this rank. Return the data file, and the vote for them."""
        if self.in_memory and request.image.path:
            self._slots.keep(request.image.path, self.tier, request.ref)
        file = self._files.write(request, on_bytes, self._retry)
        # Before the fragment, since a rank that finds all fragments may commit them
        request.confirm()
        vote = Durable(self._files.put_fragment(request, file, self._retry))
        try:
            request.confirm()
        except BaseException:
            # Delete the fragment at once. If this job dies now, no other job may complete the step.
            with contextlib.suppress(CkptError):
                self._remove_fragment(request.ref)
            raise
        return file, vote

    def _remove_fragment(self, ref: StepRef) -> None:
        if self._marker_rank is None or claim_rank_to_remove(self._backend, ref, self._marker_rank):
            delete_files(self._backend, [ref.key(self._files.names[0])])

    def claim_root(self) -> None:
        """Claim the root, if this job has not claimed it yet, and remove what ended jobs left there
        (see ``Pruner.remove_remains``).

        Raises:
            RootInUse: The root belongs to a job that is alive on this machine.
            StorageError: The store has failed.
        """
        with self._turn_lock, errors_of(self.url):
            self._take_over()

    def remove_earlier_steps(self, restored: StepRef | None = None) -> None:
        """Remove the steps that earlier jobs left on this tier in memory, and so free the memory.
        Only the leader of the node does this.

        The steps of a job that may be alive stay. A `CkptError` is ignored.

        Args:
            restored: The step that this job continues from, as long as it has committed no step.
                That step stays, and so does the newest step on the tier.
        """
        if self._node_coordinator.rank == LEADER:
            with contextlib.suppress(CkptError):
                remove_earlier_steps(
                    self._backend,
                    self.claim,
                    restored_ref=restored,
                    part=self.tier.nodes is not None,  # The node has only its ranks' files
                )

    def abort(self, ref: StepRef, trial: int, reason: str) -> None:
        """Vote that this rank's part of ``ref`` has failed, and wait for the verdict. On the
        leader, this also aborts the step. A `CkptError` is only logged.
        """
        with self._turn_lock:
            if self._quota is not None:
                with contextlib.suppress(CkptError):
                    self._quota.give_up(ref, trial)
            self._vote_failure(ref, trial, reason)

    def _vote_failure(self, ref: StepRef, trial: int, reason: str) -> None:
        """Vote that this rank's part of ``ref`` has failed. The caller holds ``_turn_lock``."""
        abort = PeerFailed(ref.step, {LEADER: reason}) if self._coordinator.rank == LEADER else None
        try:
            self._committer(trial).commit(ref, Failure(reason), abort=abort)
        except CkptError as error:
            _log.debug("ckpt: step %d on %s: %s", ref.step, self.url, error)

    def stored_image(self, request: SaveRequest) -> StoredImage:
        """Return the image of ``request`` as this tier stores it. ``request`` must be the last job
        that was committed from memory.
        """
        return self._files.stored_image(request, self._retry)

    def limit_retries(self) -> None:
        """From now on, give up each request to the store after the usual number of tries, and not
        only after ``commit_timeout_seconds``.
        """
        self._hurry_event.set()

    def leave(self) -> None:
        """Remove no files of failed saves from now on, since the agent may work on the steps. Also
        do what ``limit_retries`` does.
        """
        self._departure.set()
        self.limit_retries()

    def await_discards(self, seconds: float) -> None:
        """Wait until no files of a failed save are being removed, for at most ``seconds``. Call
        ``leave`` first.
        """
        if self._discard_lock.acquire(timeout=seconds):
            self._discard_lock.release()
        else:
            _log.info("ckpt: %s does not answer while a save is discarded there", self.url)

    def request_pruning(self) -> None:
        """Let the pruner remove, on its own thread, the steps that retention does not keep.

        This has an effect only on the leader of the node, and only after the job has claimed the
        root.
        """
        if self._pruner is not None and self.claim.is_claimed:
            self._pruner.request_run()

    def newest_committed(self) -> int:
        """Return the number of the newest committed step of the branch, of any job; -1 if there is
        none.

        Raises:
            StorageError: The store does not answer.
        """
        refs = on_branch(self._steps.rollback, step_refs(self._backend))
        return next((ref.step for ref in refs if is_committed(self._backend, ref)), -1)

    def detach(self) -> None:
        """Hand the root over to the agent. Steps that only memory has stay there. Call ``close``
        afterwards.

        Raises:
            StorageError: The store does not answer. The agent then removes the job's record from
                the root.
        """
        self._is_detached = True
        _DETACH_RETRY.call(self.claim.detach)

    def close(self, durable_step: int, *, logs: bool = True) -> None:
        """Stop the threads, and release the root unless ``detach`` has handed it over.

        Args:
            durable_step: The newest durable step. Steps up to this one are removed from memory.
            logs: Whether to log a warning that names the newest step which only memory has.
        """
        self._files.close()
        self._workers.close()
        self._readers.close()
        if self._pruner is not None:
            self._pruner.close()
        self._leases.release()
        refs_by_path = self._slots.kept_by(self.tier)
        for path, ref in list(refs_by_path.items()):
            is_abandoned = self._steps.job_steps.has_abandoned(ref)
            if ref.step <= durable_step or (is_abandoned and durable_step >= 0):
                with contextlib.suppress(CkptError):
                    self._slots.evict(path)
            if is_abandoned:
                del refs_by_path[path]
        newest = max((ref.step for ref in refs_by_path.values()), default=-1)
        if logs and newest > durable_step and not self._is_detached:
            _log.warning(
                "ckpt: step %d is in memory only (%s), which it keeps taking: save the last step "
                "to a durable tier too",
                newest,
                self.url,
            )
        with contextlib.suppress(CkptError):
            for ref in self._unclean_refs:
                self._files.discard_unfinished(ref)
        if not self._is_detached:
            with contextlib.suppress(CkptError):
                self.claim.release()

    # -- inside ------------------------------------------------------------------------------------

    def _committer(self, trial: int) -> Committer:
        """Return the object that votes and commits in try number ``trial`` of a step here."""
        name = f"save/{self.tier.index}/{trial}"
        store = SharedStore(
            self._backend, self._request, confirm=self.claim.confirm, pins=self._leases.keep
        )
        commit_store: CommitStore = store
        if (nodes := self.tier.nodes) is not None:
            commit_store = NodeLocalStore(store, self._coordinator, nodes, name=name)
        return Committer(
            self._coordinator,
            commit_store,
            name=name,
            bounds=Bounds(self._config.commit_timeout_seconds),
            merge_cache=self._merge_cache,
            # How the leader reads the fragments of all ranks
            read_all=self._readers.stream
            if self._coordinator.world_size >= _MANY_RANKS
            else in_turn,
        )

    def _reason_to_abort(self, request: SaveRequest) -> CkptError | None:
        """Return the error if ``request`` must be aborted before its files are written, or None.

        If the tier has a capacity, wait until the leader has made room for ``request``. The error
        is an objection of the leader (see ``_objection``), or says why no room was made.
        """
        abort = self._objection(request) if self._node_coordinator.rank == LEADER else None
        if self._quota is not None:
            try:
                self._files.has_room_for_base = self._quota.agree(
                    request.ref,
                    request.trial,
                    request.plan.size,
                    restored_ref=self._steps.restored,
                    evicts=abort is None,
                )
            except CkptError as error:
                return with_root(error, self.url)
        return abort

    def _objection(self, request: SaveRequest) -> CkptError | None:
        """Claim the root, if this job has not claimed it yet. Return the error if ``request``
        cannot be saved, else None.

        The error says that another job owns the root, that the root has this step of another job
        or, on a durable tier, a newer one, or that the store has failed. The steps of other jobs
        that count are those that ``_take_over`` returns, up to the step that this job continued
        from at the call of the save.
        """
        ref, restored_ref = request.ref, request.restored_ref
        try:
            if self._foreign_refs is not None and not self._retry.call(self.claim.confirm):
                # Another job has owned the root meanwhile, and may have saved steps there.
                self._foreign_refs = None
                self._committed_cache.clear()
            foreign_refs = self._take_over()
            refs_until_restored = [
                foreign_ref
                for foreign_ref in foreign_refs
                if restored_ref is None or foreign_ref.step <= restored_ref.step
            ]
            if self._first_committed(
                foreign_ref for foreign_ref in refs_until_restored if foreign_ref.step == ref.step
            ):
                return StepExists(ref.step, self.url, earlier=True)
            later_ref = self._first_committed(
                foreign_ref for foreign_ref in refs_until_restored if foreign_ref.step > ref.step
            )
        except CkptError as error:
            return with_root(error, self.url)
        if later_ref is not None and not self.in_memory:
            return HistoryHidden(ref.step, later_ref.step, self.url)
        return None

    def _take_over(self) -> Sequence[StepRef]:
        """Claim the root, if this job has not claimed it yet, and remove what ended jobs left there
        (see ``Pruner.remove_remains``).

        Returns:
            The attempts of other jobs on the current branch that the tier had when the root was
            claimed, newest step first.
        """
        if self._foreign_refs is None:
            listing = self._request(self.claim.take)
            self._put_rollback()
            takeover = self.claim.takeover
            if self._node_coordinator.world_size > 1 and takeover is not None:
                self._takeover_post.post(takeover)  # Other ranks read it when they must make room
            if self._pruner is not None:
                self._pruner.remove_remains(self._steps.restored)
            if self._steps.is_on_nearest_tier:
                warn_of_unconditional_puts(self.tier)
            branch = on_branch(self._steps.rollback, listing)
            self._foreign_refs = [ref for ref in branch if ref.job != self.claim.own_job]
            self._warn_of_later(self._foreign_refs)
        elif self._steps.job_steps.rollback != self._rollback:
            self._put_rollback()
        return self._foreign_refs

    def _put_rollback(self) -> None:
        """Put the rollback that counts on the tier, if the tier lacks it: it may not have answered
        when the job went back, or its owner may have been alive. So no step of the new branch is
        committed there beside abandoned ones that nothing tells from it.
        """
        rollback = self._steps.rollback
        if rollback is None or self.in_memory:
            return
        try:
            self._request(partial(put_rollback, self._backend, rollback))
        except ObjectExists:
            _log.warning(
                "ckpt: %s has another rollback %d, which counts there: `ckpt log` shows it",
                self.url,
                rollback.number,
            )
        self._rollback = rollback

    def _warn_of_later(self, foreign_refs: Sequence[StepRef]) -> None:
        """Log a warning if another job has a later step than the restored one."""
        restored_ref = self._steps.restored
        if restored_ref is None or self.in_memory:
            return
        later_ref = self._first_committed(
            ref for ref in foreign_refs if ref.step > restored_ref.step
        )
        if later_ref is not None:
            _log.warning(
                "ckpt: %s holds step %d, and this job continues from step %d: a restart takes "
                "the higher step if it is intact, so remove it, or save higher steps",
                self.url,
                later_ref.step,
                restored_ref.step,
            )

    def _first_committed(self, refs: Iterable[StepRef]) -> StepRef | None:
        """Return the first of ``refs`` that is committed on the tier. The store is asked once."""
        for ref in refs:
            if ref not in self._committed_cache:
                self._committed_cache[ref] = is_committed(self._backend, ref)
            if self._committed_cache[ref]:
                return ref
        return None

    def _discard(self, request: SaveRequest) -> None:
        """Remove this rank's files and unfinished writes of a save that was aborted, or in which
        this rank's part has failed. A `StorageError` is only logged.

        After ``leave`` nothing is removed, since the agent may work on the step.
        """
        with self._discard_lock:
            if not self._departure.is_set():
                self._discard_files(request)

    def _discard_files(self, request: SaveRequest) -> None:
        """Do the work of ``_discard``. If the store does not answer, ``close`` tries again."""
        try:
            self._files.discard_unfinished(request.ref)
            keys = self._files.keys(request.ref)
            is_gone = discard_part(self._backend, request.ref, *keys, rank=self._marker_rank)
        except StorageError as error:
            self._unclean_refs.add(request.ref)
            _log.debug(
                "ckpt: step %d on %s: its files stay for now: %s", request.ref.step, self.url, error
            )
        else:
            if is_gone and request.image.path:
                self._slots.forget(request.image.path, self.tier)
