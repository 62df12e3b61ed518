"""The background half of a save, which makes a checkpoint on every tier from an image.

An *image* is a rank's part of the state in host memory, in one of the *slots*. A *tier* is a store
that gets checkpoints: near or farther, in memory or durable. All ranks vote on each step on a tier,
and the *verdict* is the outcome.

The image is written while the state is still copied into it. The streaming thread writes it to the
tiers in memory and then to the nearest durable tier. After that the slot is free. Each farther tier
gets its files from the nearest durable tier, on a thread of its own, so that no farther tier delays
a nearer tier or the training. A tier *takes* the steps that are a multiple of its ``every``.

All steps for a farther tier go through the queue of the tier. If no nearer durable tier takes a
step, the step keeps its image until its turn in the queue. If two threads wrote steps to one tier,
the order of the steps could differ between ranks, and the ranks would wait for each other
(docs/decisions/0017).
"""

from __future__ import annotations

import logging
import threading
from collections.abc import Callable, Generator, Sequence
from concurrent.futures import wait
from contextlib import contextmanager
from dataclasses import replace
from functools import partial
from typing import Final

from ckpt.config import SaveConfig
from ckpt.coordination.coordinator import LEADER, Coordinator
from ckpt.errors import LeftToAgent, SaveSkipped, TensorChanged, ThreadLimit
from ckpt.model.delta import check_part
from ckpt.model.keys import StepRef
from ckpt.nodes.replication import NodeReplicas
from ckpt.pending import SaveRecord
from ckpt.pipeline.workers import SingleCall, Workers
from ckpt.plan.save import SavePlan
from ckpt.root.claim import Claim
from ckpt.root.owner import await_others
from ckpt.save.active_save import ActiveSave, HandOver, Reports, SaveOutcome
from ckpt.save.backfill import Backfill
from ckpt.save.delta_writer import delta_memory
from ckpt.save.detach import await_detaches, await_removals, leave_roots
from ckpt.save.job_steps import IMAGE, EarlierSteps, JobSteps, TierSteps
from ckpt.save.last_warnings import warn_of_last_step, warn_of_steps_in_memory, warn_of_untaken
from ckpt.save.queue_tasks import Abort, FromFiles, FromImage, Task
from ckpt.save.rank_files import Copiers
from ckpt.save.save_request import SaveRequest
from ckpt.save.slot_pool_settings import slot_pool
from ckpt.save.slot_steps import SlotSteps
from ckpt.save.tier_queue import QueuedStep, QueueServer, TierQueue
from ckpt.save.tier_writer import TierWriter
from ckpt.save.training_alarm import Suspicions, Trainable
from ckpt.staging.device import Devices
from ckpt.staging.slot import Slot
from ckpt.staging.snapshot import Snapshot
from ckpt.storage.tiers import OpenTier

_log = logging.getLogger("ckpt")
_OWNERS_SECONDS: Final = 1.0
"""How long a restore waits at its end for the look at the owners of the tiers."""


class Saver:
    """Owns the threads of a manager's saves, the slots, and the queues before farther tiers.

    One thread copies (``ckpt-copy``), one streams (``ckpt-save``), one makes slots ahead
    (``ckpt-slots``), and one for each farther tier serves its queue (``ckpt-queue1``, ...). The
    thread ``ckpt-alarm`` of `Suspicions`, which reports training whose tensors do not change any
    more, waits for other ranks. Each tier has a `TierWriter`, which writes and commits the steps
    there.

    ``_backfill`` copies to the farther tiers, after a restore, the steps that earlier jobs have
    committed on nearer tiers only; it is None on a rank that makes no such copies. ``_replicas``
    are the copies of files of other nodes that this node keeps; None if no tier asks for them.
    ``_slot_steps`` records which slots hold steps of the tiers in memory, and ``steps`` the states
    of all steps of the job. ``_durable`` and ``_in_memory`` are the writers of the tiers of either
    kind, nearest first, and ``_queues`` has the queue of each farther tier by its URL.
    ``suspicions`` looks in each save for signs that training is dead.

    Args:
        tiers: All tiers, nearest first.
        coordinator: The connection to the other ranks.
        config: The settings of saves.
        reports: The objects that get the outcomes of saves.
        copiers: Lets the agent copy files to farther tiers; None if there is no agent.

    Raises:
        ConfigError: A tier with replicas is not local, or there is less host memory for a tier in
            memory than an image.
        CommitTimeout: There is a tier with replicas, and some node did not make its saver in time.
        ThreadLimit: The system starts no more threads.

    Thread safety: only the training thread may call the methods, except for ``detach`` and
    ``finish``. Background threads of the manager call ``finish`` once, and ``detach`` at most once
    before it, after the last save was handed over. ``_untaken_step``, the last step of a save if no
    tier takes it, belongs to the training thread until then. ``_lock`` guards ``_has_committed``.
    All other fields are set once, or are thread-safe objects. ``_departure`` is set once ``detach``
    leaves the steps to the agent.
    """

    def __init__(
        self,
        tiers: Sequence[OpenTier],
        coordinator: Coordinator,
        config: SaveConfig,
        reports: Reports,
        copiers: Copiers | None = None,
    ) -> None:
        self._replicas = NodeReplicas.of(tiers, coordinator, config, reports.observers)
        self._coordinator, self._config, self._reports = coordinator, config, reports
        self._is_leader = coordinator.rank == LEADER
        durable = [tier for tier in tiers if not tier.in_memory]
        # On a tier that is local to each node, the leader sees only the files of its own node.
        has_backfill = self._is_leader and len(durable) > 1 and not durable[0].nodes
        patience = config.commit_timeout_seconds
        earlier = EarlierSteps(durable, coordinator.attempt, patience) if has_backfill else None
        copied_refs = self._replicas.copied_refs if self._replicas is not None else None
        self.steps = JobSteps(tiers, earlier, copied_refs)
        self._slot_steps = SlotSteps(coordinator.rank, self.steps)
        self.slots = slot_pool(tiers, config, self._slot_steps)
        # Each farther tier has its own connection, so that its waits delay no other tier.
        self._writers = [
            TierWriter(
                tier,
                coordinator.clone() if tier.index else coordinator,
                config,
                TierSteps(self.steps, tier),
                self._slot_steps,
                copiers.copier(tier) if copiers is not None else None,
            )
            for tier in tiers
        ]
        self._durable = [writer for writer in self._writers if not writer.in_memory]
        self._in_memory = [writer for writer in self._writers if writer.in_memory]
        self._queues = {
            writer.url: QueueServer[Task](
                TierQueue(
                    writer.tier.index, coordinator.clone(), backlog=config.backlog, timeout=patience
                ),
                _one_worker(f"queue{writer.tier.index}", config),
                writer.url,
                self.steps,
                self._perform,
                self._fail,
            )
            for writer in self._durable[1:]
        }
        self._backfill: Backfill | None = None
        if earlier is not None:
            self._backfill = Backfill(self._durable, earlier, self.steps, config)
        self.suspicions = Suspicions(coordinator.clone(), reports.ledger, config, self.steps)
        self._lock, self._departure = threading.Lock(), threading.Event()
        self._has_committed = False
        self._untaken_step: int | None = None
        self._copier = Workers("copy", 1).start()
        self._reserver = Workers("slots", 1, nice=config.nice, cpus=config.cpus)
        self._streamer = _one_worker("save", config)

    # -- slots -------------------------------------------------------------------------------------

    def reserve(
        self,
        nbytes: int,
        warm: Callable[[Sequence[Slot]], None] | None = None,
        *,
        devices: Devices = (),
    ) -> None:
        """Make the slots for images of ``nbytes`` in the background.

        Args:
            nbytes: The size of an image.
            warm: Called with the slots when they are made.
            devices: The devices that the state is copied from. The slots are page-locked for them.
        """
        self._reserver.submit(self.slots.reserve, nbytes, devices)
        if warm is not None:
            self._reserver.submit(lambda: warm(self.slots.slots))

    def reserve_quietly(self, nbytes: int, devices: Devices = ()) -> None:
        """Make the slots as ``reserve`` does, but log an error instead of raising it. The next save
        then makes the slots that it needs.
        """
        if self.slots.has_all(nbytes):
            return
        try:
            self.reserve(nbytes, devices=devices)
        except (ThreadLimit, RuntimeError) as error:  # A closing manager raises RuntimeError
            _log.debug("ckpt: no slot is made ahead: %s", error)

    def expect_deltas(self, plan: SavePlan, *, is_whole: bool = False) -> None:
        """Count the host memory that the deltas of saves with ``plan`` take, before the slots are
        made. A delta is the difference of the part ``config.deltas`` of the state to the step
        before. The bytes of that step stay in memory, for each durable tier that may get steps from
        images.

        Raises:
            ConfigError: The plan ``is_whole``, there is only one rank, and the plan has no tensor
                of the part. With several ranks, another rank may have such tensors, so the first
                merge checks this.
        """
        part = self._config.deltas
        if part is not None and is_whole and self._coordinator.world_size == 1:
            check_part(part, (tensor.name for tensor in plan.tensors))
        reservation = self.slots.reservation
        if part is not None and self._durable and plan is not reservation.plan:
            reservation.plan = plan
            nearest = self._durable[0].tier.tier
            count = 1 if nearest.every == 1 else len(self._durable)
            reservation.last_step_bytes = count * delta_memory(plan, part)

    # -- a save ------------------------------------------------------------------------------------

    def writers_of(self, step: int) -> list[TierWriter]:
        """Return the writers of the tiers that ``step`` goes to, nearest first."""
        is_last = step == self.steps.last_step
        return [writer for writer in self._writers if is_last or writer.tier.takes(step)]

    def claim_of(self, url: str) -> Claim | None:
        """Return the claim of this job on the root of the tier ``url``; None if the job has not
        taken the root.
        """
        claims = (writer.claim for writer in self._writers if writer.url == url)
        return next((claim for claim in claims if claim.is_taken), None)

    def set_chosen(self, ref: StepRef) -> None:
        """Note that a restore has chosen ``ref``, so that no pruning removes it from now on."""
        for writer in self._writers:
            writer.claim.chosen_ref = ref

    @contextmanager
    def owner_warnings(
        self, workers: Workers, *, for_newest: bool, evaluates: bool
    ) -> Generator[None]:
        """Return a context manager. While its block runs, ``workers`` look at the owners of the
        durable tiers, and log a warning about each job that is alive. A tier that does not answer
        delays the end of the block by at most a second. A job that ``evaluates`` gets no warning,
        since it saves nothing.

        If the block restores the newest step (``for_newest``), first wait until one of the tiers
        has the saves that other managers of this process have under way there.
        """
        if for_newest:
            await_others(self._coordinator.attempt)
        writers = () if evaluates else self._durable
        warnings = [workers.submit(writer.claim.warn) for writer in writers]
        yield
        wait(warnings, _OWNERS_SECONDS)

    def tier_names_of(self, step: int) -> dict[str, str]:
        """Return the tiers that the save of ``step`` goes to, nearest first: URL -> the URL as the
        user gave it.

        If no tier takes ``step``, remember ``step`` for a warning in ``finish``.
        """
        names = {writer.url: writer.tier.tier.url for writer in self.writers_of(step)}
        self._untaken_step = None if names else step
        return names

    def set_restored(self, ref: StepRef, *, removes: bool = True) -> None:
        """Note that the job continues from ``ref``.

        If ``removes`` is True, remove other steps of earlier jobs from the tiers in memory (see
        ``TierWriter.remove_earlier_steps``). Otherwise the first commit of this job removes them.
        """
        self.steps.set_restored(ref)
        if self._in_memory:
            self._slot_steps.set_restored(ref)
        if self._replicas is not None:
            for writer in self._writers:
                if self._replicas.keeps_copies_on(writer.tier):
                    writer.claim.note_copy(ref)  # A node that lacks files of ``ref`` gets them now
            self._replicas.set_restored(ref)
        for writer in self._in_memory if removes else ():
            writer.remove_earlier_steps(ref)

    def hand_over(
        self,
        request: SaveRequest,
        snapshot: Snapshot,
        pending: SaveRecord,
        slot: Slot,
        trainable: Trainable | None,
    ) -> HandOver:
        """Return the object that hands a save to the background threads. Nothing starts before its
        ``begin`` is called.
        """
        outcome = SaveOutcome(pending, self._reports, self.slots.nbytes)
        request = replace(
            self.suspicions.scan(request, trainable), restored_ref=self.steps.restored
        )
        save = ActiveSave(request, snapshot, slot, outcome, trainable)
        # While the save waits for its turn, a later step may be announced as the last one.
        writers = self.writers_of(request.ref.step)
        stream, stage = SingleCall(partial(self._stream, writers, save)), SingleCall(save.copy_late)
        return HandOver(save, self.steps, self._streamer, self._copier, stream, stage)

    def give_up(self, ref: StepRef, trial: int, reason: str) -> None:
        """Let the other ranks know, in the background, that this rank's part of ``ref`` has failed.

        ``reason`` is the text of the error that the other ranks get.
        """
        aborts = [Abort(writer, ref, trial, reason) for writer in self.writers_of(ref.step)]
        self._streamer.submit(partial(self._abort_all, aborts, is_awaited=True))

    def finish(self, *, leaves: bool = False) -> None:
        """Finish all saves, stop the threads and release the roots.

        The slots stay until ``slots.close``, because a caller may hold views of them.

        Args:
            leaves: Whether this rank leaves the other ranks. Then the call does not wait for copies
                on other nodes.
        """
        self._finish_images()
        warn_of_untaken(self._untaken_step)
        for writer in self._writers:
            writer.limit_retries()
        for queue in self._queues.values():
            queue.close()
        self.suspicions.close()
        if self._backfill is not None:
            self._backfill.close()
        # These tiers need not keep steps for a farther tier any more.
        for writer in self._durable[: 0 if self._departure.is_set() else -1]:
            writer.request_pruning()
        warns = self._is_leader and not self._departure.is_set()
        if warns and warn_of_steps_in_memory(self._writers, self.steps, self._slot_steps):
            warns = False  # The writers would log a similar warning
        if warns and not leaves:
            newest = self.steps.newest_step
            warn_of_last_step(newest, self.writers_of(newest), self._writers)
        for writer in self._writers:
            writer.close(self.steps.durable_step, logs=warns)
        if self._replicas is not None:
            self._replicas.close(wait=not leaves)
            with self._lock:
                # A rank may leave because a node is lost. This job's steps may lack copies then.
                writers = self._in_memory if self._has_committed and not leaves else ()
            for writer in writers:
                writer.remove_earlier_steps()

    def detach(self, *, leaves: bool) -> None:
        """Finish the work that only this process can do, and leave the other work to the agent.
        Call ``finish`` afterwards.

        On return the nearest durable tier has every step that it takes, and no step needs its image
        any more. If a step waits for a farther tier and a nearer tier has the step, this process
        gives the step up. A copy to a farther tier that is under way ends soon, by itself.

        Args:
            leaves: Whether this rank leaves the other ranks, which go on. If not, the leader waits
                some seconds for the other ranks to detach too.
        """
        self._finish_images()
        for queue in self._queues.values():
            queue.protect()
        self._departure.set()
        for writer in self._writers:
            writer.leave()
        for queue in self._queues.values():
            queue.give_up_stored()
        self.steps.wait_images()
        await_removals(self._writers)
        if not leaves:
            # Without this wait, a rank could remove files that the agent copies.
            await_detaches(self._coordinator)
        leave_roots(self._writers)

    def _finish_images(self) -> None:
        """Finish the work of the copying and the streaming thread, and stop making slots."""
        self.slots.stop()
        self._copier.close()
        self._reserver.close(cancel=True)
        self._streamer.close()

    # -- on the streaming thread, and on those of the queues ---------------------------------------

    def _stream(self, writers: Sequence[TierWriter], save: ActiveSave) -> None:
        """Commit a save to the tiers in memory among those of ``writers``, and then to the nearest
        durable tier. Farther tiers follow by their queues.

        All ranks see the same outcome on every tier, because they get the same verdicts.
        """
        try:
            self._write_image(writers, save)
        except BaseException as error:  # noqa: BLE001 - no caller reads the future of this call
            self._go_on_after_failure(writers, save, error)

    def _write_image(self, writers: Sequence[TierWriter], save: ActiveSave) -> None:
        """Write the image to the tier of the first of ``writers``: when the queue of the tier
        returns the step, or now if the tier has no queue. The tiers of the other writers follow.
        """
        if (queue := self._queues.get(writers[0].url)) is not None:
            if queue.has_other_ranks:
                for farther_writer in writers[1:]:
                    self._queues[farther_writer.url].expect(save.request.ref)
            queue.push(QueuedStep(save.request.ref, FromImage(writers, save), holds_image=True))
        else:
            self._commit(writers, save)

    def _commit(self, writers: Sequence[TierWriter], save: ActiveSave) -> None:
        """Commit a save on the tier of the first of ``writers``. The others follow."""
        writer, farther_writers = writers[0], writers[1:]
        try:
            hashed_chunks = writer.commit(save.request, on_bytes=save.outcome.pending.add_written)
        except BaseException as error:  # noqa: BLE001 - it must reach the caller, whatever it is
            self._go_on_after_failure(writers, save, error)
            return
        is_first_tier = not save.request.hashed_chunks
        request = replace(save.request, hashed_chunks=hashed_chunks)
        save.outcome.committed(writer.url)
        self._on_commit(writer, request.ref)
        if is_first_tier:
            self.suspicions.examine(request, save.trainable)
        if writer.in_memory and farther_writers:
            self._write_image(farther_writers, replace(save, request=request))
            return
        try:
            if farther_writers:
                file_request = request.from_files(writer.stored_image(request), writer.tier)
                for target in farther_writers:
                    task = FromFiles(target, file_request, save.outcome)
                    self._queues[target.url].push(QueuedStep(request.ref, task))
        finally:
            self._end_image(save)

    def _go_on_after_failure(
        self, writers: Sequence[TierWriter], save: ActiveSave, error: BaseException
    ) -> None:
        """After the first of ``writers`` has failed with ``error``, write the image to the tiers of
        the others, or release its slot if the save has failed on all of them.
        """
        if self._report_failure(writers, save, error):
            self._write_image(writers[1:], save)
        else:
            self._end_image(save)

    def _end_image(self, save: ActiveSave) -> None:
        """Release the slot of ``save``. Only the first call for a save has an effect."""
        for queue in self._queues.values():
            if queue.has_other_ranks:
                queue.expect_no_more(save.request.ref)
        if not self.steps.end_waiting(save.request.ref, IMAGE):
            return
        save.await_copies()
        try:
            if self.slots.release(save.slot):
                self.reserve_quietly(save.request.plan.size)
        finally:
            save.outcome.note_free_slot()

    def _report_failure(
        self, writers: Sequence[TierWriter], save: ActiveSave, error: BaseException
    ) -> bool:
        """Report that the save has failed on the tier of the first of ``writers``. Return True if
        the image may go to the tier of the second.

        If it may not, report that the save has failed on the tiers of all ``writers``, and vote on
        the farther tiers that this rank's part of the step has failed.
        """
        writer, farther_writers, request = writers[0], writers[1:], save.request
        # An image that passes through memory in waves cannot be read again.
        is_single_pass = request.is_single_pass and not writer.in_memory
        # The other ranks get `PeerFailed`, whatever the error of this rank is. They go on to the
        # next tier if this tier is not required.
        others_go_on = not writer.tier.required
        goes_on = others_go_on and not isinstance(error, TensorChanged)
        if goes_on and farther_writers and not is_single_pass:
            save.outcome.fail(writer.url, error, required=False)
            return True
        if writer.in_memory and goes_on:
            error = SaveSkipped(
                request.ref.step, f"it was to be kept in memory only, and was not: {error}"
            )
        for target in writers:
            save.outcome.fail(target.url, error, required=True)
        reason = f"tier {writer.url}: {error}"
        aborts = [Abort(target, request.ref, request.trial, reason) for target in farther_writers]
        self._abort_all(aborts, is_awaited=others_go_on)
        return False

    def _abort_all(self, aborts: Sequence[Abort], *, is_awaited: bool) -> None:
        """Vote on some tiers, nearest first, that this rank's part of a step has failed.

        On a tier with a queue the vote always goes through the queue. If a step passed the queue on
        some ranks only, the orders of the ranks would differ.

        Args:
            aborts: The votes.
            is_awaited: Whether the other ranks try to commit the step on the first tier, and so
                wait for the vote there. After a tier that is required they do not try the next
                tier.
        """
        for abort in aborts:
            queue = self._queues.get(abort.writer.url)
            if queue is None:
                if is_awaited:
                    abort.vote()
            elif queue.has_other_ranks:
                queue.push(QueuedStep(abort.ref, abort, holds_image=True))
            is_awaited = is_awaited and not abort.writer.tier.required

    def _on_commit(self, writer: TierWriter, ref: StepRef) -> None:
        """After a commit, start copies on other nodes, the backfill and pruning."""
        if self._replicas is not None:
            self._replicas.committed(writer.tier, ref, partial(self._remove_earlier_steps, writer))
        has_restored = self.steps.restored is not None
        if has_restored and self._backfill is not None and not writer.in_memory:
            self._backfill.begin(writer.url)
        self.slots.wake_waiters()  # The commit may have made the step in a slot unnecessary
        with self._lock:
            is_first, self._has_committed = not self._has_committed, True
        if is_first:  # The steps that earlier jobs left in memory are outdated now
            # On a tier with copies on other nodes, ``committed`` above removes them later.
            for tier_writer in self._in_memory:
                if self._replicas is None or not self._replicas.keeps_copies_on(tier_writer.tier):
                    tier_writer.remove_earlier_steps()
            self.slots.reconsider()
        writer.request_pruning()

    def _remove_earlier_steps(self, writer: TierWriter) -> None:
        """If the tier is in memory, remove the steps that earlier jobs left there. Then let the
        slot pool decide again which memory it uses.
        """
        writer.remove_earlier_steps()
        self.slots.reconsider()

    def _perform(self, task: Task) -> None:
        """Perform the task of a step whose turn has come in the queue of its tier."""
        try:
            match task:
                case FromImage(writers, save):
                    self._commit(writers, save)
                case FromFiles(writer, request, outcome):
                    writer.commit(
                        request, on_bytes=partial(self._add_written, request.ref, outcome)
                    )
                    outcome.committed(writer.url)
                    self._on_commit(writer, request.ref)
                case Abort():
                    task.vote()
        except BaseException as error:  # noqa: BLE001 - it must reach the caller, whatever it is
            self._fail(task, error)

    def _add_written(self, ref: StepRef, outcome: SaveOutcome, nbytes: int) -> None:
        """Add ``nbytes`` to the bytes of a save that were written to a farther tier.

        After a detach, raise `LeftToAgent` to end the copy.
        """
        outcome.pending.add_written(nbytes)
        if self._departure.is_set():
            raise LeftToAgent(ref.step)

    def _fail(self, task: Task, error: BaseException) -> None:
        """Report that the task of a step has failed with ``error``."""
        match task:
            case FromImage(writers, save):
                self._go_on_after_failure(writers, save, error)
            case FromFiles(writer, _, outcome):
                required = writer.tier.required and not self._departure.is_set()
                outcome.fail(writer.url, error, required=required)
            case Abort():
                pass  # The other ranks wait until their time-out


def _one_worker(name: str, config: SaveConfig) -> Workers:
    """Return a group of threads whose only thread is already started.

    If the system had no thread for a save that has begun, the optimizer's step would wait forever,
    or the save would end on no tier.
    """
    return Workers(name, 1, nice=config.nice, cpus=config.cpus).start()
