"""Hold the state of one save while it runs in the background, and report its outcome.

Before ``save_async`` returns, some tensors are copied into the image. The others, the *late
sources*, are copied while training goes on. They have landed once their bytes are in the image.
"""

from __future__ import annotations

import contextlib
import logging
import threading
from collections.abc import Iterable
from dataclasses import dataclass

from ckpt.errors import CkptError, LeftToAgent, PeerFailed, SaveSkipped, StagingError
from ckpt.events import Observers, SaveCommitted, SaveStaged, TierMissed
from ckpt.locks import Event
from ckpt.pending import SaveRecord
from ckpt.pipeline.workers import SingleCall, Workers
from ckpt.save.job_steps import IMAGE, JobSteps
from ckpt.save.ledger import SaveLedger
from ckpt.save.save_request import SaveRequest
from ckpt.save.training_alarm import Trainable
from ckpt.staging.slot import Slot
from ckpt.staging.snapshot import Snapshot

_log = logging.getLogger("ckpt")
NO_SLOT = "skipped: no slot was free"
"""The failure that a rank reports to the other ranks if it skips a save for lack of a free slot."""
EARLIER_FAILED = "an earlier save had failed there"
"""The failure that a rank reports to the other ranks if its ``save_async`` raised the error of an
earlier save and did not begin the new save.
"""


class MissedSteps:
    """Logs each step that was to go to a tier but is not kept there, for tiers that are not
    required.

    For a tier in memory, the first missed step is logged as a warning, and later ones at debug
    level until the tier keeps a step again. For any other tier, each missed step is logged as a
    warning.

    Args:
        urls: The URLs of the tiers in memory.

    Thread safety: all methods may be called from any thread. ``_lock`` guards ``_missing_urls``.
    """

    def __init__(self, urls: Iterable[str]) -> None:
        self._memory_urls, self._missing_urls = frozenset(urls), set[str]()
        self._lock = threading.Lock()

    def note_miss(self, step: int, url: str, error: CkptError) -> None:
        """Log that the tier ``url``, which is not required, does not keep ``step``."""
        with self._lock:
            was_missing, suffix = url in self._missing_urls, ""
            if url in self._memory_urls:
                self._missing_urls.add(url)
                suffix = "; later steps are not either, until the log says so"
        level = logging.DEBUG if was_missing else logging.WARNING
        _log.log(level, "ckpt: step %d is not kept in %s: %s%s", step, url, error, suffix)

    def note_keep(self, step: int, url: str) -> None:
        """Note that the tier ``url`` keeps ``step``, and log it if an earlier step was missed."""
        with self._lock:
            was_missing = url in self._missing_urls
            self._missing_urls.discard(url)
        if was_missing:
            _log.warning("ckpt: step %d is kept in %s again", step, url)


@dataclass(frozen=True, slots=True)
class Reports:
    """The objects that are notified of the outcomes of saves."""

    ledger: SaveLedger
    observers: Observers
    missed_steps: MissedSteps


class SaveOutcome:
    """Reports the outcome of one save on each of its tiers to its handle, the ledger and the
    observers.

    The save ends when it has ended on all tiers and its slot is free again. So a caller that has
    waited for the save finds a free slot.

    Args:
        pending: The handle of the save.
        reports: The objects that get the outcome.
        slot_bytes: The size of all slots of this rank together, in bytes.

    Attributes:
        stage_end: Set once the observers have been notified that the state is in host memory, or
            once the copy of the state has failed. Later events wait for this, so that observers get
            them in order.

    ``_misses`` are the tiers that do not get the step, and that the observers do not know of yet.
    ``_outcome`` is what ``SaveRecord.end_on`` has returned last: True as long as a tier is left,
    then the error of the save or None.

    Thread safety: all methods may be called from any thread. ``_lock`` guards ``_outcome``,
    ``_is_slot_free`` and ``_misses``.
    """

    def __init__(self, pending: SaveRecord, reports: Reports, slot_bytes: int) -> None:
        self.pending = pending
        self.stage_end = Event()
        self._reports, self._slot_bytes = reports, slot_bytes
        self._lock = threading.Lock()
        self._misses: list[TierMissed] = []
        self._outcome: CkptError | bool | None = True
        self._is_slot_free = False

    def on_staged(self) -> None:
        """Report that the state is in host memory."""
        pending = self.pending
        event = SaveStaged(
            step=pending.step,
            nbytes=pending.nbytes,
            stall_seconds=pending.stall_seconds,
            tiers=pending.tiers,
            slot_bytes=self._slot_bytes,
            metrics=pending.metrics,
        )
        self._reports.observers.notify(event)

    def committed(self, url: str) -> None:
        """Report that the step is a checkpoint on the tier ``url``."""
        pending = self.pending
        self._reports.missed_steps.note_keep(pending.step, url)
        self.stage_end.wait()
        event = SaveCommitted(
            step=pending.step, tier=url, nbytes=pending.nbytes, durable_seconds=pending.age
        )
        self._reports.observers.notify(event)
        self._end(url, None, required=True)

    def fail(self, url: str, error: BaseException, *, required: bool) -> None:
        """Report that this process does not make the step a checkpoint on the tier ``url``.

        Args:
            url: The tier.
            error: The reason. `LeftToAgent` does not count as a failure.
            required: Whether ``error`` fails the save.
        """
        if not isinstance(error, CkptError):
            ckpt_error = CkptError(f"step {self.pending.step} failed: {error!r}")
            ckpt_error.__cause__ = error
            error = ckpt_error
        if isinstance(error, PeerFailed) and set(error.failures.values()) <= {
            NO_SLOT,
            EARLIER_FAILED,
        }:
            # Another rank did not begin the save, and has reported the reason itself.
            reasons = "; ".join(f"rank {rank}: {reason}" for rank, reason in error.failures.items())
            error = SaveSkipped(self.pending.step, reasons)
        left_to_agent = LeftToAgent(self.pending.step)
        if isinstance(error, PeerFailed) and set(error.failures.values()) == {str(left_to_agent)}:
            error = left_to_agent  # Another rank has detached, and this rank is about to detach
        if isinstance(error, LeftToAgent):  # The agent copies the step to this tier
            self._end(url, error, required=False)
            return
        if not required:
            self._reports.missed_steps.note_miss(self.pending.step, url, error)
        with self._lock:
            self._misses.append(TierMissed(step=self.pending.step, tier=url, error=error))
        # If ``stage_end`` is not set, ``note_free_slot`` reports the event later. Waiting here
        # could deadlock, because the copying thread may wait for this thread.
        if self.stage_end.is_set():
            self._report_missed()
        self._end(url, error, required=required)

    def note_free_slot(self) -> None:
        """Report that the slot of the save was released."""
        self.stage_end.wait()
        if self._misses:  # From now on, ``fail`` reports others itself
            self._report_missed()
        with self._lock:
            self._is_slot_free = True
            self._end_if_over()

    def _report_missed(self) -> None:
        with self._lock:
            misses, self._misses = self._misses, []
        for event in misses:
            self._reports.observers.notify(event)

    def _end(self, url: str, error: CkptError | None, *, required: bool) -> None:
        with self._lock:
            self._outcome = self.pending.end_on(url, error, required=required)
            self._end_if_over()

    def _end_if_over(self) -> None:
        """End the save if it has ended on all tiers and its slot is free. The caller holds
        ``_lock``.
        """
        if self._is_slot_free and self._outcome is not True:
            self._reports.ledger.end(self.pending, self._outcome or None)


@dataclass(frozen=True, slots=True)
class ActiveSave:
    """A save whose image is still in its slot, because it is yet to be written to some tier.

    Attributes:
        request: The description of the save for the tier writers.
        snapshot: The copy of the state into the image.
        slot: The memory of the image. The saver releases it when no tier needs the image any more.
        outcome: Reports the outcome of the save.
        trainable: The tensors that the optimizers train; None if saves are not checked for changes.
    """

    request: SaveRequest
    snapshot: Snapshot
    slot: Slot
    outcome: SaveOutcome
    trainable: Trainable | None

    def copy_late(self) -> None:
        """Copy the late sources into the image, and report when the state is in host memory."""
        try:
            self.snapshot.copy_late()
            with contextlib.suppress(CkptError):  # The streaming thread reports the error
                self.snapshot.wait_landed()
                self.outcome.on_staged()
        finally:
            self.outcome.stage_end.set()

    def await_copies(self) -> None:
        """Abandon the copies that wait for room in the image, and wait until no copy into the slot
        is under way.
        """
        self.snapshot.window.abandon()
        self.snapshot.wait_ended()


@dataclass(frozen=True, slots=True)
class HandOver:
    """Hands a save to the threads that copy and stream it.

    Attributes:
        save: The save.
        steps: The steps of the job.
        streamer: The thread that calls ``stream``.
        copier: The thread that calls ``stage``.
        stream: Streams the image to the tiers.
        stage: Copies the late sources into the image.

    ``revoke`` of ``stream`` or ``stage`` prevents the call, and returns False if it has begun.

    Thread safety: only the training thread may call the methods.
    """

    save: ActiveSave
    steps: JobSteps
    streamer: Workers
    copier: Workers
    stream: SingleCall
    stage: SingleCall

    def begin(self) -> None:
        """Start to stream the image and to copy the late sources. The slot is released when both
        have ended.

        The call returns at once, unless ``snapshot.foreground`` is set. In that case the calling
        thread copies the late sources before the call returns.
        """
        # Now and not when the thread runs, since a restore that comes first has to know the step.
        self.steps.begin_waiting(self.save.request.ref, IMAGE)
        self.streamer.submit(self.stream)
        if self.save.snapshot.foreground:
            self.stage()
        else:
            self.copier.submit(self.stage)

    def call_off(self, error: BaseException) -> bool:
        """Stop the save because ``error``, such as Ctrl-C, has interrupted its hand-over.

        If the copying of the late sources has not begun, or ``error`` has interrupted it in the
        calling thread, they are never copied, and no optimizer's step waits for them.

        Returns:
            True if the save was stopped before it was streamed; the slot then belongs to the
            caller. False if the streaming has begun. The save then ends by itself and releases its
            slot. It fails on all ranks if its late sources were not copied.
        """
        snapshot = self.save.snapshot
        if self.stage.revoke() or snapshot.foreground:
            snapshot.give_up(
                StagingError(f"step {snapshot.step} was interrupted as it began: {error!r}")
            )
            self.save.outcome.stage_end.set()
        if not self.stream.revoke():
            return False
        snapshot.wait_ended()
        self.steps.end_waiting(self.save.request.ref, IMAGE)
        return True
