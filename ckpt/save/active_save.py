"""One save on its way into the background, and what becomes of it."""

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
from ckpt.pipeline.workers import Once, Workers
from ckpt.save.ledger import SaveLedger
from ckpt.save.rank_files import SaveJob
from ckpt.save.trained import Trained
from ckpt.staging.slot import Slot
from ckpt.staging.snapshot import Snapshot

_log = logging.getLogger("ckpt")
SKIPPED = "skipped: no slot was free"
"""The reason a rank gives for a save it had no slot for."""
EARLIER_FAILED = "an earlier save had failed there"
"""The reason a rank gives for a save that it did not begin, because the call raised the error of an
earlier one.
"""


class MemoryNotices:
    """Log lines about steps that a tier in memory does not keep.

    The first step that is not kept there costs a warning, later ones do not, until one is kept
    again.

    Args:
        urls: The tiers in memory. For other tiers there is a warning for each step.

    Thread safety: all methods may be called from any thread. ``_lock`` guards ``_absent``.
    """

    def __init__(self, urls: Iterable[str]) -> None:
        self._urls, self._absent = frozenset(urls), set[str]()
        self._lock = threading.Lock()

    def missed(self, step: int, url: str, error: CkptError) -> None:
        """Note that ``step`` did not get to ``url``, where it was not required."""
        with self._lock:
            known, more = url in self._absent, ""
            if url in self._urls:
                self._absent.add(url)
                more = "; later steps are not either, until the log says so"
        level = logging.DEBUG if known else logging.WARNING
        _log.log(level, "ckpt: step %d is not kept in %s: %s%s", step, url, error, more)

    def kept(self, step: int, url: str) -> None:
        """Note that ``step`` is at ``url``."""
        with self._lock:
            back = url in self._absent
            self._absent.discard(url)
        if back:
            _log.warning("ckpt: step %d is kept in %s again", step, url)


@dataclass(frozen=True, slots=True)
class Reports:
    """Where the outcomes of saves go. It is made before the threads that report them."""

    ledger: SaveLedger
    observers: Observers
    notices: MemoryNotices


class SaveOutcome:
    """What becomes of one save on its tiers, for its handle and the observers.

    The save ends when it has ended on all tiers and its slot is free again, so that a caller that
    waited for it finds a free slot.

    Args:
        pending: The handle of the save.
        reports: Where its outcome goes.
        slot_bytes: The size of all slots of this rank.

    Thread safety: all methods may be called from any thread. ``_lock`` guards ``_outcome``,
    ``_free`` and ``_missed``.
    """

    def __init__(self, pending: SaveRecord, reports: Reports, slot_bytes: int) -> None:
        self.pending = pending
        self.staged = Event()
        """Set once the observers know that the state is in host memory, so that events come in
        order.
        """
        self._reports, self._slot_bytes = reports, slot_bytes
        self._lock = threading.Lock()
        self._missed: list[TierMissed] = []
        self._outcome: CkptError | bool | None = True
        self._free = False

    def on_staged(self) -> None:
        """Report that the state is in host memory."""
        pending = self.pending
        event = SaveStaged(
            step=pending.step,
            nbytes=pending.nbytes,
            stall_seconds=pending.stall_seconds,
            tiers=pending.tiers,
            slot_bytes=self._slot_bytes,
        )
        self._reports.observers.notify(event)

    def written(self, nbytes: int) -> None:
        """Report that ``nbytes`` more are on some tier."""
        self.pending.add_written(nbytes)

    def committed(self, url: str) -> None:
        """Report that the step is a checkpoint on the tier ``url``."""
        pending = self.pending
        self._reports.notices.kept(pending.step, url)
        self.staged.wait()
        event = SaveCommitted(
            step=pending.step, tier=url, nbytes=pending.nbytes, durable_seconds=pending.age
        )
        self._reports.observers.notify(event)
        self._end(url, None, required=True)

    def failed(self, url: str, error: BaseException, *, required: bool) -> None:
        """Report that the step did not become a checkpoint on the tier ``url``, and never will."""
        if not isinstance(error, CkptError):
            wrapped = CkptError(f"step {self.pending.step} failed: {error!r}")
            wrapped.__cause__ = error
            error = wrapped
        if isinstance(error, PeerFailed) and set(error.failures.values()) <= {
            SKIPPED,
            EARLIER_FAILED,
        }:
            # Another rank did not begin the save, and has reported the reason itself.
            reasons = "; ".join(f"rank {rank}: {why}" for rank, why in error.failures.items())
            error = SaveSkipped(self.pending.step, reasons)
        left = LeftToAgent(self.pending.step)
        if isinstance(error, PeerFailed) and set(error.failures.values()) == {str(left)}:
            error = left  # Another rank has detached, and this one is about to
        if isinstance(error, LeftToAgent):  # The agent takes the step there
            self._end(url, error, required=False)
            return
        if not required:
            self._reports.notices.missed(self.pending.step, url, error)
        with self._lock:
            self._missed.append(TierMissed(step=self.pending.step, tier=url, error=error))
        if self.staged.is_set():  # Do not wait for it: the copying may wait for this thread
            self._report_missed()
        self._end(url, error, required=required)

    def slot_is_free(self) -> None:
        """Report that the slot of the save was released."""
        self.staged.wait()
        self._report_missed()
        with self._lock:
            self._free = True
            self._end_if_over()

    def _report_missed(self) -> None:
        with self._lock:
            missed, self._missed = self._missed, []
        for event in missed:
            self._reports.observers.notify(event)

    def _end(self, url: str, error: CkptError | None, *, required: bool) -> None:
        with self._lock:
            self._outcome = self.pending.end_on(url, error, required=required)
            self._end_if_over()

    def _end_if_over(self) -> None:
        """End the save if nothing is left of it. The caller holds ``_lock``."""
        if self._free and self._outcome is not True:
            self._reports.ledger.end(self.pending, self._outcome or None)


@dataclass(frozen=True, slots=True)
class ActiveSave:
    """A save as long as a tier is served from its image.

    Attributes:
        job: What the tiers need to know.
        snapshot: The copying of the state into the image.
        slot: The memory of the image. The saver releases it when no tier needs the image any more.
        outcome: What becomes of the save.
        trained: What the optimizers train; None if that is not looked at.
    """

    job: SaveJob
    snapshot: Snapshot
    slot: Slot
    outcome: SaveOutcome
    trained: Trained | None

    def copy_late(self) -> None:
        """Copy what is left of the state, and report it."""
        try:
            self.snapshot.copy_late()
            with contextlib.suppress(CkptError):  # The streaming thread reports the error
                self.snapshot.wait_landed()
                self.outcome.on_staged()
        finally:
            self.outcome.staged.set()

    def await_copies(self) -> None:
        """Return when no copy into the slot is under way. No copy waits for room in the image any
        more.
        """
        self.snapshot.window.abandon()
        self.snapshot.wait_ended()


@dataclass(frozen=True, slots=True)
class HandOver:
    """A save on its way into the background: the copying that is left, and the streaming.

    Attributes:
        save: The save.
        streamer: The thread that streams.
        copier: The thread that copies.
        stream: Streams the image to the tiers.
        stage: Copies what is left.

    Thread safety: only the training thread may call the methods.
    """

    save: ActiveSave
    streamer: Workers
    copier: Workers
    stream: Once
    stage: Once

    def begin(self) -> None:
        """Copy what is left, and stream. The slot is released when both are over.

        It returns at once unless the snapshot says ``foreground``.
        """
        self.streamer.submit(self.stream)
        if self.save.snapshot.foreground:
            self.stage()
        else:
            self.copier.submit(self.stage)

    def call_off(self, error: BaseException) -> bool:
        """Stop the save after an exception, Ctrl-C included, that came when the fence knew the
        snapshot.

        No step of an optimizer waits for the save any more.

        Returns:
            Whether the save had not begun. Then the slot belongs to the caller. Otherwise the save
            fails by itself, releases the slot, and lets the other ranks know.
        """
        snapshot = self.save.snapshot
        if self.stage.revoke():
            snapshot.give_up(
                StagingError(f"step {snapshot.step} was interrupted as it began: {error!r}")
            )
            self.save.outcome.staged.set()
        if not self.stream.revoke():
            return False
        snapshot.wait_ended()
        return True
