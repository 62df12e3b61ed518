"""An image that is landing -> a checkpoint on every tier. The background half of a save.

Writing follows the copying as it goes. Memory and the nearest durable tier of all are served in turn on the streaming thread, from the image itself; then its memory is free. Farther tiers drain from
that tier's files, each at its own pace on a thread of its own, so that none holds up a nearer one, nor training.

All steps for a farther tier go through its queue, also those that no nearer durable tier takes. Their image is kept until the queue has come to them. A tier that two threads served at once would be
served in another order on each rank, and the ranks would wait for each other (decision 17).
"""

from __future__ import annotations

import contextlib
import logging
import threading
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from functools import partial
from typing import Final, Protocol

from ckpt.config import SaveConfig
from ckpt.coordination.api import Coordinator
from ckpt.coordination.commit import LEADER
from ckpt.errors import CkptError, SaveSkipped, TensorChanged
from ckpt.model.keys import StepRef
from ckpt.save.backfill import Backfill, BackfillRoute
from ckpt.save.rank_files import SaveJob
from ckpt.save.tier_queue import QueuedStep, TierQueue
from ckpt.save.tier_writer import TierWriter
from ckpt.storage.tiers import OpenTier

_log = logging.getLogger("ckpt")
SKIPPED: Final = "skipped: no slot was free"
"""The reason a rank gives for a save it had no slot for."""
UNHEARD: Final = "an earlier save had failed there"
"""The reason a rank gives for a save that it did not begin, because the call raised the error of an earlier one."""


class Listener(Protocol):
    """Who is told how a save goes. Called from background threads."""

    def written(self, nbytes: int) -> None:
        """So much more is on some tier."""
        ...

    def committed(self, url: str) -> None:
        """It is a checkpoint there."""
        ...

    def failed(self, url: str, error: BaseException, *, required: bool) -> None:
        """It did not become one there, and never will."""
        ...


@dataclass(frozen=True, slots=True, kw_only=True)
class _Save:
    """What a save needs on its way from tier to tier, as long as it is served from its image."""

    job: SaveJob
    listener: Listener
    intact: Callable[[], None]
    over: Callable[[], None]


class Saver:
    """Threads: ``run`` and ``give_up`` from the streaming thread; ``names_of`` and ``set_restored`` from the training thread; ``close`` from the owner, when the streaming thread has stopped; all else from any.
    A `Listener` hears from the streaming thread and from those of the drains.
    """

    def __init__(
        self,
        tiers: Sequence[OpenTier],
        coordinator: Coordinator,
        config: SaveConfig,
        *,
        on_room: Callable[[], None] = lambda: None,
    ) -> None:
        """``on_room`` is told when memory that an earlier job had left was freed."""
        # farther tiers wait at their own pace, each with a connection of its own to the other ranks
        self._writers = [
            TierWriter(
                tier,
                coordinator.clone() if tier.index else coordinator,
                config,
                waiting=self.waiting,
                elsewhere=partial(self._elsewhere, tier),
                needed=self._needed,
            )
            for tier in tiers
        ]
        self._durable = [writer for writer in self._writers if not writer.in_memory]
        self._queues = {
            writer.url: TierQueue(
                writer.tier.index,
                coordinator.clone(),
                backlog=config.backlog,
                timeout=config.commit_timeout_seconds,
                nice=config.nice,
                cpus=config.cpus,
            )
            for writer in self._durable[1:]
        }
        self._backfill = self._make_backfill(coordinator, config)
        self._lock = threading.Lock()
        self._durable_step = -1
        self._restored_step = -1
        self._is_leader = coordinator.rank == LEADER
        self._leaving: set[StepRef] = set()
        self._swept = False
        self._untaken: int | None = None
        self.last_step: int | None = None
        """Goes to every tier: the job stops after it (`ckpt.elastic.planned_stop`)."""
        self._on_room = on_room

    def writers_of(self, step: int) -> list[TierWriter]:
        """The tiers that ``step`` goes to, nearest first."""
        return [writer for writer in self._writers if writer.tier.takes(step) or step == self.last_step]

    def names_of(self, step: int) -> dict[str, str]:
        """Where ``step``, which is asked for now, goes, nearest first: URL -> what the user calls it."""
        names = {writer.url: writer.tier.tier.url for writer in self.writers_of(step)}
        self._untaken = None if names else step
        return names

    def set_restored(self, ref: StepRef) -> None:
        """The job goes on from ``ref``. Older steps that an earlier job has left in memory are of no use any more."""
        self._durable_step, self._restored_step = min(self._durable_step, ref.step), ref.step
        if self._backfill is not None:
            self._backfill.restored(ref)
        for writer in self._writers:
            writer.restored_step = ref.step
            writer.sweep(ref)

    def run(
        self, job: SaveJob, listener: Listener, *, intact: Callable[[], None], over: Callable[[], None]
    ) -> None:
        """Commit ``job`` to the nearest durable tier, and to those in memory before it; farther ones will have it from there.

        Every tier's end is told to ``listener``; all ranks come to the same ends, for they hear the same verdicts.

        Args:
            intact: Asked last on each tier; raises if the image is not what it should be.
            over: Called once, when the image is not needed any more: from this thread, or from that of a farther tier.
        """
        with self._lock:
            self._leaving.add(job.ref)
        save = _Save(job=job, listener=listener, intact=intact, over=over)
        self._serve(self.writers_of(job.ref.step), save)

    def _serve(self, writers: Sequence[TierWriter], save: _Save) -> None:
        """Let the first of ``lanes`` have the image: now, or when its queue comes to it."""
        if (queue := self._queues.get(writers[0].url)) is None:
            self._commit(writers, save)
        else:
            work, missed = partial(self._commit, writers, save), partial(self._miss, writers, save)
            if queue.shared:
                for farther in writers[1:]:
                    self._queues[farther.url].expect(save.job.ref)
            queue.push(QueuedStep(save.job.ref, work, missed, held=True))

    def _commit(self, writers: Sequence[TierWriter], save: _Save) -> None:
        writer, farther = writers[0], writers[1:]
        try:
            known = writer.commit(save.job, on_bytes=save.listener.written, intact=save.intact)
        except BaseException as error:  # noqa: BLE001 - it must reach the caller, whatever it is
            self._miss(writers, save, error)
            return
        job = replace(save.job, known=known)
        save.listener.committed(writer.url)
        self._on_commit(writer, job.ref)
        if writer.in_memory and farther:
            self._serve(farther, replace(save, job=job))
            return
        try:
            if farther:
                stored = replace(job, image=writer.stored(job), replicas=dict(job.replicas()).copy)
                self._leave(farther, stored, save.listener)
        finally:
            self._end(save)

    def _miss(self, writers: Sequence[TierWriter], save: _Save, error: BaseException) -> None:
        """The first of ``lanes`` does not get the step."""
        if self._goes_on(writers[0], writers[1:], save.job, error, save.listener):
            self._serve(writers[1:], save)
        else:
            self._end(save)

    def _end(self, save: _Save) -> None:
        """The image is not needed any more. Its slot is given back once."""
        for queue in self._queues.values():
            queue.expect_no_more(save.job.ref)
        with self._lock:
            first = save.job.ref in self._leaving
            self._leaving.discard(save.job.ref)
        if first:
            save.over()

    def give_up(self, ref: StepRef, trial: int, reason: str) -> None:
        """Tell the others that this rank has no part in a save, so that they need not wait."""
        self._abort_all(self.writers_of(ref.step), ref, trial, reason, awaited=True)

    def evict(self, path: str) -> None:
        """The slot that is this file will be overwritten."""
        for writer in self._writers:
            writer.evict(path)

    def keeps(self, path: str) -> int:
        """The step that lies in the slot that is this file; -1 if there is none."""
        return max(writer.keeps(path) for writer in self._writers)

    def close(self) -> None:
        """Finish what is left to the farther tiers, stop the threads, give the roots back."""
        if self._untaken is not None:
            _log.warning(
                "ckpt: step %d, the last that was to be saved, was not: no tier takes it (every)",
                self._untaken,
            )
        for writer in self._writers:
            writer.hurry()
        for queue in self._queues.values():
            queue.close()
        if self._backfill is not None:
            self._backfill.close()
        for writer in self._durable[:-1]:  # what it kept for a farther tier need not stay any more
            writer.prune_later()
        if self._is_leader:
            self._tell_what_is_not_durable()
        for writer in self._writers:
            writer.close(self._durable_step)

    def _tell_what_is_not_durable(self) -> None:
        """Warn if only memory has the step that this job went on from, or all its steps: the lanes warn of the last steps alone."""
        durable, in_memory = self._durable, any(writer.in_memory for writer in self._writers)
        kept = max(self._restored_step, *(writer.newest_kept for writer in self._writers))
        if not in_memory or not durable or kept < 0 or max(self._restored_step, 0) <= self._durable_step:
            return
        with contextlib.suppress(CkptError):  # a store that does not answer was told of before
            newest = max(self._durable_step, *(writer.newest_committed() for writer in durable))
            if newest < 0:
                _log.warning("ckpt: no durable tier has any step of this run: all of it is lost with this machine's memory, in which step %d is", kept)  # fmt: skip
            elif newest < self._restored_step:
                _log.warning(
                    "ckpt: the newest durable step is %d, older than %d, which this job went on from: all after it is lost with this machine's memory, in which step %d is",
                    newest, self._restored_step, kept,
                )  # fmt: skip

    def _goes_on(
        self,
        writer: TierWriter,
        farther: Sequence[TierWriter],
        job: SaveJob,
        error: BaseException,
        listener: Listener,
    ) -> bool:
        """After a failure: whether the next tier may have the image. If not, the save has failed everywhere, and a farther tier's queue is told so too."""
        passing = (
            job.image.capacity < job.image.size and not writer.in_memory
        )  # it went by, and cannot be had again
        others_go_on = not writer.tier.required  # to them it is the failure of a peer, whatever it was
        goes_on = others_go_on and not isinstance(error, TensorChanged)
        if goes_on and farther and not passing:
            listener.failed(writer.url, error, required=False)
            return True
        if writer.in_memory and goes_on:
            error = SaveSkipped(job.ref.step, f"it was to be kept in memory only, and was not: {error}")
        for each in (writer, *farther):
            listener.failed(each.url, error, required=True)
        reason = f"tier {writer.url}: {error}"
        self._abort_all(farther, job.ref, job.trial, reason, awaited=others_go_on)
        return False

    def _abort_all(
        self, writers: Sequence[TierWriter], ref: StepRef, trial: int, reason: str, *, awaited: bool
    ) -> None:
        """Tell the other ranks of ``lanes``. ``awaited``: whether they come to the first of them. They come to the next after one that is not required.

        On a tier with a queue the step goes through that queue, awaited or not: each step does, once on each rank, or their orders would not match.
        """
        for writer in writers:
            queue = self._queues.get(writer.url)
            if queue is None:
                if awaited:
                    writer.refuse(ref, trial, reason)
            elif queue.shared:
                work = partial(writer.refuse, ref, trial, reason)
                queue.push(QueuedStep(ref, work, lambda _: None, held=True))
            awaited = awaited and not writer.tier.required

    def _leave(self, writers: Sequence[TierWriter], job: SaveJob, listener: Listener) -> None:
        for writer in writers:
            failed = partial(listener.failed, writer.url, required=writer.tier.required)
            take = partial(self._take, writer, job, listener)
            self._queues[writer.url].push(QueuedStep(job.ref, take, failed, held=False))

    def _take(self, writer: TierWriter, job: SaveJob, listener: Listener) -> None:
        writer.commit(job, on_bytes=listener.written, intact=lambda: None)
        listener.committed(writer.url)
        self._on_commit(writer, job.ref)

    def _on_commit(self, writer: TierWriter, ref: StepRef) -> None:
        if not writer.in_memory:
            with self._lock:
                self._durable_step = max(self._durable_step, ref.step)
            if self._backfill is not None:
                self._backfill.begin()
        if not self._swept:
            self._swept = True  # what an earlier job left in memory is outdated now
            for each in self._writers:
                each.sweep()
            self._on_room()
        writer.prune_later()

    def waiting(self) -> frozenset[StepRef]:
        """Steps that a nearer tier must keep for a farther one."""
        with self._lock:
            return frozenset(self._leaving).union(*(queue.waiting for queue in self._queues.values()))

    def _make_backfill(self, coordinator: Coordinator, config: SaveConfig) -> Backfill | None:
        """On the leader, where a durable tier has others behind it."""
        durable = self._durable
        # of several nodes' own tiers the leader sees a part
        if coordinator.rank != LEADER or len(durable) < 2 or durable[0].tier.nodes:
            return None
        routes = [
            BackfillRoute(
                tier=writer.tier,
                take=writer.claim,
                claim=writer.root,
                is_busy=partial(self._is_busy, writer.url),
                committed=writer.prune_later,
            )
            for writer in durable[1:]
        ]
        return Backfill(durable[0].tier, routes, coordinator.attempt, config, at_end=durable[0].prune_later)

    def _is_busy(self, url: str) -> bool:
        return bool(self._queues[url].waiting)

    def _needed(self) -> frozenset[StepRef]:
        """Steps that no rule may take from a nearer tier yet."""
        late = self._backfill.needed() if self._backfill is not None else frozenset[StepRef]()
        return self.waiting() | late

    def _elsewhere(self, here: OpenTier, ref: StepRef) -> bool:
        """Whether a durable tier other than ``here`` has the step."""
        return any(
            writer.has(ref) for writer in self._writers if writer.tier is not here and not writer.in_memory
        )
