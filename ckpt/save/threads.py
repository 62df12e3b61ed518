"""The threads behind a manager, and what each does for a save: one copies, one streams (with the writers it commands), one makes slots ahead."""

from __future__ import annotations

import contextlib
import logging
import threading
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from functools import partial

from ckpt.config import SaveConfig, ranks_on_this_node
from ckpt.coordination.api import Coordinator
from ckpt.errors import CkptError, PeerFailed, SaveSkipped, StagingError, ThreadLimit
from ckpt.events import Event, Observer, SaveCommitted, SaveStaged
from ckpt.model.keys import StepRef
from ckpt.pending import PendingSave
from ckpt.pipeline.workers import Once, Workers
from ckpt.save.rank_files import SaveJob
from ckpt.save.saver import SKIPPED, UNHEARD, Saver
from ckpt.staging.device import Devices
from ckpt.staging.slot import Slot
from ckpt.staging.slots import SlotPool
from ckpt.staging.snapshot import Snapshot
from ckpt.storage.tiers import OpenTier

OnEnd = Callable[[PendingSave, CkptError | None], None]
_log = logging.getLogger("ckpt")


class Background:
    """Threads: ``notify`` from any, all else from the training thread; ``on_end`` is called by the thread that ends a save's last tier."""

    def __init__(
        self,
        tiers: Sequence[OpenTier],
        coordinator: Coordinator,
        config: SaveConfig,
        *,
        observers: Sequence[Observer],
        on_end: OnEnd,
    ) -> None:
        self.saver = Saver(tiers, coordinator, config, on_room=self._reconsider)
        self.slots = SlotPool(
            config.slots,
            ranks=ranks_on_this_node(),
            limit=config.staging_bytes,
            on_drop=self.saver.evict,
            keeps=self.saver.keeps,
        )
        self._observers, self._on_end = tuple(observers), on_end
        self._absences = _Absences(tier.url for tier in tiers if tier.in_memory)
        self._copier = Workers("copy", 1)
        self._reserver = Workers("slots", 1, nice=config.nice, cpus=config.cpus)
        self._streamer = Workers("save", 1, nice=config.nice, cpus=config.cpus)
        # started now: a save that could not start one after it has begun would hold the optimizer's step
        self._copier.start()
        self._streamer.start()

    def reserve(
        self,
        nbytes: int,
        warm: Callable[[Sequence[Slot]], None] | None = None,
        *,
        devices: Devices = (),
    ) -> None:
        """Make the slots for images of ``nbytes`` ahead, and pin them for copies from ``devices``; then ``warm`` them."""
        self._reserver.submit(self.slots.reserve, nbytes)
        self._reserver.submit(self._pin, devices)
        if warm is not None:
            self._reserver.submit(lambda: warm(self.slots.made))

    def reserve_quietly(self, nbytes: int, devices: Devices = ()) -> None:
        """As ``reserve``, where a save makes the slots itself if this does not."""
        try:
            self.reserve(nbytes, devices=devices)
        except (ThreadLimit, RuntimeError) as error:  # RuntimeError: the manager is closing
            _log.debug("ckpt: no slot is made ahead: %s", error)

    def acquire(self, nbytes: int, *, wait: bool, devices: Devices = ()) -> Slot | None:
        """A slot to fill from ``devices``, None if none is free (see ``SlotPool.acquire``). A step that was kept in it is given up."""
        slot = self.slots.acquire(nbytes, wait=wait)
        if slot is not None:
            slot.pin(devices)
        return slot

    def hand_over(self, job: SaveJob, snapshot: Snapshot, pending: PendingSave, slot: Slot) -> HandOver:
        """What takes a save into the background. Nothing happens until its ``begin``."""
        staged = threading.Event()
        stream = Once(partial(self._stream, job, snapshot, pending, slot, staged))
        stage = Once(partial(self._stage, snapshot, pending, staged))
        return HandOver(self._streamer, self._copier, snapshot, staged, stream, stage)

    def give_up(self, ref: StepRef, trial: int, reason: str) -> None:
        """Let the other ranks know that this one has no part in a save."""
        self._streamer.submit(self.saver.give_up, ref, trial, reason)

    def notify(self, event: Event) -> None:
        """Tell the observers."""
        for observer in self._observers:
            try:
                observer(event)
            except BaseException:  # noqa: BLE001 - an observer's mistake must not cost a checkpoint
                _log.exception("ckpt: an observer failed on %s", type(event).__name__)

    def finish(self) -> None:
        """Finish all saves and stop the threads. Slots stay until ``slots.close``: views of them may be held."""
        self.slots.stop()
        self._copier.close()
        self._reserver.close(cancel=True)
        self._streamer.close()
        self.saver.close()

    def _reconsider(self) -> None:
        self.slots.reconsider()

    def _pin(self, devices: Devices) -> None:
        for slot in self.slots.made:
            slot.pin(devices)

    def _stage(self, snapshot: Snapshot, pending: PendingSave, staged: threading.Event) -> None:
        """The copying that is left. ``staged`` is set when that has been told."""
        try:
            snapshot.copy_late()
            with contextlib.suppress(CkptError):  # told by `_stream`
                snapshot.wait_landed()
                self.notify(
                    SaveStaged(step=pending.step, nbytes=pending.nbytes, stall_seconds=pending.stall_seconds)
                )
        finally:
            staged.set()

    def _stream(
        self, job: SaveJob, snapshot: Snapshot, pending: PendingSave, slot: Slot, staged: threading.Event
    ) -> None:
        listener = _Listener(pending, staged, self.notify, self._on_end, self._absences)

        def over() -> None:
            snapshot.window.abandon()  # a copy under way needs no room any more, and must be over before the slot is another's
            snapshot.wait_ended()
            try:
                if self.slots.release(slot):
                    self.reserve_quietly(job.plan.size)
            finally:
                listener.slot_is_free()

        self.saver.run(job, listener, intact=snapshot.confirm, over=over)


@dataclass(frozen=True, slots=True)
class HandOver:
    """A save on its way into the background: copying what is left, and streaming. Threads: the training thread."""

    _streamer: Workers
    _copier: Workers
    _snapshot: Snapshot
    _staged: threading.Event
    _stream: Once
    _stage: Once

    def begin(self) -> None:
        """Copy what is left, and stream; the slot is given back when both are over. Returns at once unless the snapshot says ``foreground``."""
        self._streamer.submit(self._stream)
        if self._snapshot.foreground:
            self._stage()
        else:
            self._copier.submit(self._stage)

    def call_off(self, error: BaseException) -> bool:
        """After any exception since the fence has known of the snapshot, Ctrl-C included: no step waits for it any more.

        Returns whether the save was not begun. The slot is the caller's then. Else the save fails by itself, gives the slot
        back, and the other ranks hear of it.
        """
        step = self._snapshot.step
        if self._stage.revoke():
            self._snapshot.give_up(StagingError(f"step {step} was interrupted as it began: {error!r}"))
            self._staged.set()
        if not self._stream.revoke():
            return False
        self._snapshot.wait_ended()
        return True


class _Absences:
    """Says when steps that were to go to a tier in memory are not kept there: once, until one is kept again. Threads: any.

    Args:
        urls: The tiers in memory. What happens to others is said for each step.
    """

    def __init__(self, urls: Iterable[str]) -> None:
        self._urls, self._absent = frozenset(urls), set[str]()
        self._lock = threading.Lock()

    def missed(self, step: int, url: str, error: CkptError) -> None:
        """``step`` did not get to ``url``, where it was not required."""
        with self._lock:
            known, more = url in self._absent, ""
            if url in self._urls:
                self._absent.add(url)
                more = "; later steps are not either, until the log says so"
        level = logging.DEBUG if known else logging.WARNING
        _log.log(level, "ckpt: step %d is not kept in %s: %s%s", step, url, error, more)

    def kept(self, step: int, url: str) -> None:
        """``step`` is at ``url``."""
        with self._lock:
            back = url in self._absent
            self._absent.discard(url)
        if back:
            _log.warning("ckpt: step %d is kept in %s again", step, url)


class _Listener:
    """What becomes of one save, for its handle and the observers."""

    def __init__(
        self,
        pending: PendingSave,
        staged: threading.Event,
        notify: Observer,
        on_end: OnEnd,
        absences: _Absences,
    ) -> None:
        self._pending, self._staged, self._notify, self._on_end = pending, staged, notify, on_end
        self._absences = absences
        self._lock = threading.Lock()
        self._outcome: CkptError | bool | None = True
        self._free = False

    def written(self, nbytes: int) -> None:
        self._pending.add_written(nbytes)

    def committed(self, url: str) -> None:
        pending = self._pending
        self._absences.kept(pending.step, url)
        self._staged.wait()  # events come in order
        self._notify(
            SaveCommitted(step=pending.step, tier=url, nbytes=pending.nbytes, durable_seconds=pending.age)
        )
        self._end(url, None, required=True)

    def failed(self, url: str, error: BaseException, *, required: bool) -> None:
        if not isinstance(error, CkptError):
            wrapped = CkptError(f"step {self._pending.step} failed: {error!r}")
            wrapped.__cause__ = error
            error = wrapped
        if isinstance(error, PeerFailed) and set(error.failures.values()) <= {SKIPPED, UNHEARD}:
            # another rank did not begin it, for a reason that was told there
            reasons = "; ".join(f"rank {rank}: {why}" for rank, why in error.failures.items())
            error = SaveSkipped(self._pending.step, reasons)
        if not required:
            self._absences.missed(self._pending.step, url, error)
        self._end(url, error, required=required)

    def _end(self, url: str, error: CkptError | None, *, required: bool) -> None:
        with self._lock:
            self._outcome = self._pending.end_on(url, error, required=required)
            self._end_if_over()

    def slot_is_free(self) -> None:
        """Only now may the save be over: who has waited for it will find a slot, and events come in order."""
        self._staged.wait()
        with self._lock:
            self._free = True
            self._end_if_over()

    def _end_if_over(self) -> None:
        if self._free and self._outcome is not True:
            self._on_end(self._pending, self._outcome or None)
