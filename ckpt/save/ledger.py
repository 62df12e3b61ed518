"""Records the saves of one manager, and the errors of saves that no call has raised yet."""

from __future__ import annotations

import logging
import threading
import time
from collections.abc import Callable, Collection, Iterable
from functools import partial
from itertools import chain
from typing import Final, TypeGuard

from ckpt.config import SaveConfig
from ckpt.errors import (
    CkptError,
    ConfigError,
    ManagerClosed,
    SaveSkipped,
    StepExists,
    StepsMissing,
    SuspiciousState,
    TierBehind,
    UnsupportedValue,
)
from ckpt.errors.base import few
from ckpt.errors.storage import without_frames
from ckpt.events import Observers, SaveFailed, SaveSuspicious
from ckpt.model.keys import StepRef
from ckpt.model.rollback import Rollback, on_branch
from ckpt.model.selector import Selector
from ckpt.pending import PendingSave, SaveRecord, missing_at_the_end
from ckpt.pipeline.workers import THREAD_PREFIX
from ckpt.storage.tiers import OpenTier
from ckpt.storage.urls import place_of

_log = logging.getLogger("ckpt")
_CALLER_ERRORS: Final = (ConfigError, ManagerClosed, StepExists, UnsupportedValue)
"""Errors that the caller must correct. They are raised even with ``on_error="warn"``."""
_NEWEST_STEP_SECONDS: Final = 30.0
"""How long a restore of the newest step waits for saves under way."""
_TRAINING_GOES_ON: Final = '; training goes on (on_error="warn")'


class SaveLedger:
    """Records the saves of one manager, and raises or logs their errors.

    A save is *kept* once some tier has its step.

    Args:
        observers: The observers, which get a `SaveFailed` for each save that ends with an error.
        config: Says whether later calls raise the errors of saves that have failed or are
            suspicious.
        tiers: The tiers that the saves go to.

    Attributes:
        places: The URL of each tier, by a text that is the same for all URLs of one root.

    A *rollback* is the record that the run goes on from an older step, and begins a new *branch* of
    it; ``_rollback`` is the one that counts. A step may be tried again on the new branch. ``_refs``
    has the tries at each step that were saved or are under way, on any branch, and ``_trials`` the
    number of the next try, which is at least ``_first_trial`` on this branch. ``_entries`` has the
    try and the owner of each save that is under way, by the ``id`` of the save. ``_warns`` is True
    with ``on_error="warn"``.

    Thread safety: all methods may be called from any thread. ``_lock`` guards all fields, except
    that ``closing_error`` reads ``_suspicions`` without it.
    """

    def __init__(
        self, observers: Observers, config: SaveConfig, tiers: Iterable[OpenTier] = ()
    ) -> None:
        self.places = {place_of(tier.url): tier.url for tier in tiers}
        self._observers, self._warns = observers, config.on_error == "warn"
        self._raises_suspicions = config.on_suspicious == "raise"
        self._patience_seconds = config.commit_timeout_seconds
        self._lock = threading.Lock()
        self._pending: list[SaveRecord] = []
        self._refs: dict[int, list[StepRef]] = {}
        self._rollback: Rollback | None = None
        self._trials: dict[int, int] = {}
        self._first_trial = 0
        self._entries: dict[int, tuple[StepRef, object]] = {}
        self._skip_count = 0
        self._failed_steps: list[int] = []
        self._suspicions: list[SuspiciousState] = []

    @property
    def skipped(self) -> int:
        """The number of saves that ended with `SaveSkipped`, such as for lack of a free slot."""
        with self._lock:
            return self._skip_count

    @property
    def failed(self) -> int:
        """The number of saves that have failed. Skipped saves do not count."""
        with self._lock:
            return len(self._failed_steps)

    @property
    def pending(self) -> list[SaveRecord]:
        """The saves that are under way, or whose error no call has raised yet, oldest first."""
        with self._lock:
            return list(self._pending)

    @property
    def is_idle(self) -> bool:
        """Whether no save is under way."""
        return all(save.done() for save in self.pending)

    def wait_kept(self, urls: Collection[str]) -> None:
        """Wait until one of the tiers ``urls`` has each save that is under way, or the save is
        over, but at most for the commit timeout.
        """
        self._wait(partial(SaveRecord.wait_kept, urls=urls))

    def await_restorable(self, step: Selector | None) -> None:
        """Wait until some tier has the save under way that a restore of ``step`` takes: the save of
        this number; the newest one for None, or if that fails, the one before; and all saves for a
        step that is looked up, such as the best. The saves of abandoned steps do not count. The
        call waits at most for the commit timeout, and for the newest save at most for half a
        minute, since a rank whose training has failed may not have begun it.

        A thread of ckpt does not wait, since an observer of a save may restore, and the save waits
        for the observer.
        """
        if threading.current_thread().name.startswith(THREAD_PREFIX):
            return
        longest = _NEWEST_STEP_SECONDS if step is None else self._patience_seconds
        deadline = time.monotonic() + min(longest, self._patience_seconds)
        is_looked_up = not (step is None or isinstance(step, int))
        for save in reversed(self.pending):
            if (is_looked_up or step in (None, save.step)) and self.has(save.step):
                save.wait_kept(max(0.0, deadline - time.monotonic()))
                if save.is_kept and not is_looked_up:
                    return

    def await_end(self, step: int) -> None:
        """Wait until no save of ``step`` is under way."""
        for save in self.pending:
            if save.step == step:
                save.wait()

    def wait_idle(self) -> None:
        """Wait until no save is under way, but at most for the commit timeout."""
        self._wait(SaveRecord.wait)

    def _wait(self, wait: Callable[[SaveRecord, float], bool]) -> None:
        deadline = time.monotonic() + self._patience_seconds
        for save in self.pending:
            wait(save, max(0.0, deadline - time.monotonic()))

    def has(self, step: int) -> bool:
        """Return True if ``step`` was saved on the current branch, or if its save is under way."""
        with self._lock:
            refs = self._refs.get(step, ())
            return bool(refs and on_branch(self._rollback, refs))

    def save_of(self, step: int) -> SaveRecord | None:
        """Return the save of ``step`` on the current branch once some tier has the step; None if
        there is no such save, or if it fails. The next try stands for one that has failed, so no
        later call raises its error.

        The call waits for the verdict of the ranks, which is the same on all of them. So all ranks
        try the step again if one of them has refused it. If there is no verdict within the commit
        timeout, the save counts, and its handle has its error later.
        """
        saves = [save for save in self.pending if save.step == step]
        if saves and self.has(step):
            last_save = saves[-1]
            has_verdict = last_save.wait_kept(self._patience_seconds)
            if last_save.is_kept or not has_verdict:
                return last_save
        for save in saves:
            if save.done():
                save.exception()  # Marks the error as raised
        return None

    def next_trial(self, step: int) -> int:
        """Return the number of earlier tries to save ``step``, and count a further try."""
        with self._lock:
            trial = max(self._trials.get(step, 0), self._first_trial)
            self._trials[step] = trial + 1
            return trial

    @property
    def next_branch_trial(self) -> int:
        """The first try at a step on a branch that begins now; 0 if no step was tried yet.

        It is greater than every earlier try, so that names of folders tell the branches apart.
        """
        with self._lock:
            return max(self._trials.values(), default=0)

    def begin_branch(self, rollback: Rollback) -> None:
        """Let the steps that ``rollback`` has abandoned be saved again."""
        first_trial = self.next_branch_trial
        with self._lock:
            self._first_trial, self._rollback = first_trial, rollback

    def begin(self, pending: SaveRecord, ref: StepRef, owner: object) -> None:
        """Add a save.

        Args:
            pending: The handle of the save.
            ref: The try at the step.
            owner: The manager. The ledger holds a reference to it until the save has ended. The
                exit handler has only a weak reference. Without this one, a manager that the script
                has dropped would not be closed at exit.
        """
        with self._lock:
            self._pending = [
                save for save in self._pending if not save.done() or save.unreported_error
            ]
            self._pending.append(pending)
            self._refs.setdefault(ref.step, []).append(ref)
            self._entries[id(pending)] = ref, owner

    def cancel(self, ref: StepRef) -> None:
        """Remove the save ``ref``, if there is one. It was called off before it began."""
        with self._lock:
            for save in list(self._pending):
                save_ref, _ = self._entries.get(id(save), (None, None))
                if save_ref == ref:
                    del self._entries[id(save)]
                    self._pending.remove(save)
                    self._refs[ref.step].remove(ref)

    def give_up(self, reason: str, timeout: float | None) -> None:
        """Give up all saves, because ``reason`` ends the process, and log what the tiers lack.

        Args:
            reason: The exception that ends the process, as text.
            timeout: How many seconds ``close`` has waited, for the log line.
        """
        missing = missing_at_the_end(self.pending, timeout)
        text = f"close has not ended within {timeout} s, and no save was given up"
        _log.error(
            "ckpt: %s: this process ends: %s; older checkpoints are whole",
            reason,
            text if missing is None else missing,
        )
        with self._lock:
            self._pending = []

    def end(self, pending: SaveRecord, error: CkptError | None) -> None:
        """End a save: log and report its error, if there is one, and finish its handle."""
        is_skip = isinstance(error, SaveSkipped | TierBehind)
        if error is not None:
            with self._lock:
                entry = self._entries.get(id(pending))
                # A step that a tier has given up is on nearer tiers.
                if entry is not None and not isinstance(error, TierBehind):
                    save_ref, _ = entry
                    self._refs[pending.step].remove(save_ref)
                self._skip_count += isinstance(error, SaveSkipped)
                if not is_skip:
                    self._failed_steps.append(pending.step)
            level = logging.WARNING if is_skip or self._warns else logging.ERROR
            _log.log(
                level, "ckpt: %s%s", error, "" if is_skip or not self._warns else _TRAINING_GOES_ON
            )
            self._observers.notify(SaveFailed(step=pending.step, error=error))
        # The user has chosen that saves may be skipped or fail, so no later call raises the error.
        pending.finish(error, is_reported=is_skip or self._warns)
        with self._lock:
            entry = self._entries.pop(id(pending), None)
        del entry  # Outside of the lock, since this may be the last reference

    def suspect(self, error: SuspiciousState, *, logs: bool) -> None:
        """Notify the observers that a committed step is suspicious. If ``on_suspicious="raise"``,
        a later call of the manager raises ``error``.

        Args:
            error: The error that describes what is suspicious.
            logs: Whether to log a warning too.
        """
        if logs:
            _log.warning("ckpt: %s", error)
        self._observers.notify(SaveSuspicious(step=error.step, error=error))
        if self._raises_suspicions:
            with self._lock:
                self._suspicions.append(error)

    def failed_save(self, step: int, error: CkptError, *, has_begun: bool = False) -> SaveRecord:
        """Return the handle of a save whose call ended with ``error``.

        Args:
            step: The step.
            error: The error. If the save has not begun, the error is logged and reported to the
                observers, and the returned handle has it.
            has_begun: Whether the save has begun all the same. If so, the handle of that save is
                returned, and the save ends by itself.
        """
        for pending in reversed(self.pending) if has_begun else ():
            if pending.step == step:
                return pending
        pending = SaveRecord(step, nbytes=0, snapshot=None, began=time.perf_counter())
        self.end(pending, error)
        return pending

    def warns_of(self, error: BaseException) -> TypeGuard[CkptError]:
        """Return True if ``error`` of a save is only logged because of ``on_error="warn"``."""
        return (
            self._warns and isinstance(error, CkptError) and not isinstance(error, _CALLER_ERRORS)
        )

    def closing_error(self, missing: StepsMissing | None) -> CkptError | None:
        """Return the error that ``close`` must raise: ``missing``, else the first error of a
        suspicious step, else None.

        With ``on_error="warn"``, ``missing`` is logged and not returned, and the number of failed
        saves is logged too.
        """
        suspicion = next(iter(self._suspicions), None)
        if not self._warns:
            return missing or suspicion
        if missing is not None:
            _log.warning("ckpt: %s", missing)
        with self._lock:
            lost_steps = (
                chain.from_iterable(missing.missing.values()) if missing is not None else ()
            )
            failed_steps = sorted({*self._failed_steps, *lost_steps})
        if failed_steps:
            _log.warning(
                "ckpt: %d save%s failed: step%s %s",
                len(failed_steps),
                *("s" if len(failed_steps) > 1 else "",) * 2,
                few(list(map(str, failed_steps)), quote=False),
            )
        return suspicion

    def raise_unreported(
        self, *, includes_kept: bool = True, but: PendingSave | None = None
    ) -> None:
        """Raise the first error that no call has raised yet.

        Args:
            includes_kept: Whether to raise also the errors of suspicious steps, and of saves whose
                step some tier has.
            but: A save whose error is not raised, since the caller has its handle.

        Raises:
            CkptError: The error.
        """
        for pending in self.pending:
            if pending is but or (pending.is_kept and not includes_kept):
                continue
            if (error := pending.unreported_error) is not None:
                pending.exception()
                with self._lock:
                    self._pending = [save for save in self._pending if save is not pending]
                raise without_frames(error)
        if includes_kept:
            with self._lock:
                suspicion = self._suspicions.pop(0) if self._suspicions else None
            if suspicion is not None:
                raise suspicion
