"""The handle of a save that is under way.

A save ends on each of its tiers by itself. A tier has *kept* the step if the step is a checkpoint
there. The tiers on which the save has not ended yet are its open tiers.

A ``PendingSave`` has two URLs for each tier: its own, and the one that the user gave
(``_user_urls`` maps the first to the second). ``_outcomes`` says how the save has ended on each
tier, and ``_failures`` has the errors that fail the save. The save is over (``_is_finished``) once
it has ended on all tiers, or was given up, and ``_error`` is its error. The *snapshot* copies the
state into host memory. ``_change`` is notified of each change.
"""

from __future__ import annotations

import logging
import os
import time
from collections.abc import Callable, Collection, Mapping, Sequence
from concurrent.futures import Future, wait
from threading import TIMEOUT_MAX
from typing import TYPE_CHECKING, Any, Final

from ckpt.checks import is_number
from ckpt.errors import (
    CkptError,
    ConfigError,
    SaveSkipped,
    StepsMissing,
    StorageError,
    TierBehind,
)
from ckpt.errors.storage import without_frames
from ckpt.locks import Condition

if TYPE_CHECKING:
    from ckpt.staging.snapshot import Snapshot

_log = logging.getLogger("ckpt")
_SILENT_SECONDS: Final = 2.0
"""How long ``close`` waits before it logs which tiers it waits for."""
_LONG_SECONDS: Final = 30.0
"""How long a wait for one save lasts before the same log lines. A large save takes seconds."""


class PendingSave:
    """The handle of a save. The state is first copied to host memory, and later durable on tiers.

    Attributes:
        step: The step that is saved.
        call_seconds: Seconds that ``save_async`` has cost the calling thread. The sum of these and
            of the waits of the optimizer's step is ``stall_seconds``.
        nbytes: Bytes of this rank's image.
        metrics: The metrics of the step, on rank 0.
        durable_seconds: Seconds from the call until the save had ended on all its tiers; None
            before that, and if the save has failed or was skipped.

    Thread safety: all methods may be called from any thread. ``_change`` guards all changes,
    except that ``call_seconds`` and ``_is_reported`` may be set without it. Single fields are read
    without it.
    """

    def __init__(
        self,
        step: int,
        nbytes: int,
        snapshot: Snapshot | None,
        *,
        began: float,
        tiers: Mapping[str, str] | None = None,
        metrics: Mapping[str, float] | None = None,
    ) -> None:
        """Make the handle.

        Args:
            step: The step.
            nbytes: Bytes of this rank's image.
            snapshot: The copying of the state; None for a save that is not made.
            began: ``time.perf_counter()`` at the call.
            tiers: The tiers that the save goes to: URL -> the URL as the user gave it.
            metrics: The metrics of the step that rank 0 gave; empty on other ranks.
        """
        self.step, self.nbytes, self.metrics = step, nbytes, dict(metrics or {})
        self.call_seconds = 0.0
        self.durable_seconds: float | None = None
        self._snapshot = snapshot
        self._held_seconds = snapshot.held_seconds if snapshot else []
        """How long each step of an optimizer has waited for the copies. The snapshot adds to it."""
        self._user_urls = dict(tiers or {})
        """By the URL of each tier, the URL as the user gave it."""
        self._began, self._total_bytes = began, nbytes * len(self._user_urls)
        self._written_bytes = 0
        self._open_tiers = set(self._user_urls)
        self._outcomes: dict[str, CkptError | None] = {}
        """By URL, how the save has ended on a tier: None if the step is a checkpoint there."""
        self._failures: dict[str, CkptError] = {}
        """Those of the errors that fail the save."""
        self._change = Condition()
        self._pid = os.getpid()
        self._is_finished = False
        self._error: CkptError | None = None
        self._is_reported = False

    @property
    def progress(self) -> float:
        """The part of this rank's bytes that has been written to the tiers, from 0 to 1."""
        return min(1.0, self._written_bytes / self._total_bytes) if self._total_bytes else 1.0

    @property
    def tiers(self) -> tuple[str, ...]:
        """The URLs of the tiers that the save goes to, nearest first."""
        return tuple(self._user_urls)

    @property
    def open_tiers(self) -> list[str]:
        """The URLs of the tiers on which the save has not ended yet."""
        with self._change:
            return sorted(self._open_tiers)

    @property
    def stall_seconds(self) -> float:
        """Seconds that the save has cost the training thread so far: ``call_seconds``, and the time
        for which the optimizer's step has waited for the copies. Until the call returns, its time
        so far counts.
        """
        return (self.call_seconds or self.age) + sum(self._held_seconds)

    @property
    def age(self) -> float:
        """Seconds since the call of ``save`` or ``save_async``."""
        return time.perf_counter() - self._began

    def wait_staged(self, timeout: float | None = None) -> None:
        """Wait until the state is in host memory. Any code may change any tensor from then on.

        The call returns at once if the save was skipped or not begun.

        Raises:
            TimeoutError: The state is not in host memory after ``timeout`` seconds.
            ConfigError: ``timeout`` is no number of seconds.
            CkptError: The copy has failed, usually with a `StagingError`. This save is lost.
        """
        check_timeout(timeout)
        if (snapshot := self._snapshot) is not None:  # ``finish`` may clear it meanwhile
            snapshot.window.hurry()  # The copy need not spare host memory any more
            snapshot.wait_landed(timeout)
            snapshot.settle()  # Raises if a tensor has changed during the copy

    def result(self, timeout: float | None = None, *, tier: str | None = None) -> PendingSave:
        """Wait until the step is committed on all its tiers, or on ``tier``. Return this handle.

        Raises:
            TimeoutError: The step is not committed after ``timeout`` seconds. The save goes on.
            CkptError: The save has failed.
            ConfigError: The save does not go to ``tier``, ``timeout`` is no number of seconds, or
                this process is a fork of the process that saves the step.
        """
        if (error := self.exception(timeout, tier=tier)) is not None:
            raise without_frames(error)
        return self

    def exception(
        self, timeout: float | None = None, *, tier: str | None = None
    ) -> CkptError | None:
        """Wait as ``result`` does, and return the error, or None if the step was committed.

        Without ``tier``, the error then counts as raised: no later call of the manager raises it.
        """
        if tier is not None:
            return self._wait_for_tier(tier, timeout)
        if not self._await(lambda: self._is_finished, timeout):
            raise TimeoutError(f"step {self.step} is not committed after {timeout} s; it goes on")
        self._is_reported = True
        return self._error

    def _wait_for_tier(self, tier: str, timeout: float | None) -> CkptError | None:
        """Do the work of ``exception`` for one tier, which ``tier`` names by either of its URLs."""
        url = next(
            (url for url, user_url in self._user_urls.items() if tier in (url, user_url)), None
        )
        if url is None:
            raise ConfigError(
                f"step {self.step} does not go to {tier!r}; it goes to "
                f"{', '.join(self._user_urls.values())}"
            )
        if not self._await(lambda: url in self._outcomes or self._is_finished, timeout):
            raise TimeoutError(
                f"step {self.step} is not committed on {tier} after {timeout} s; it goes on"
            )
        return self._outcomes.get(url, self._error)

    def _await(self, is_over: Callable[[], bool], timeout: float | None) -> bool:
        """Wait until ``is_over`` returns True. Return False if ``timeout`` seconds pass before. If
        the wait is long, log once which tiers the save has not ended on.
        """
        check_timeout(timeout, "; a tier is named by tier=...")
        if os.getpid() != self._pid and not is_over():  # The copy in a fork is not notified
            raise ConfigError(
                f"step {self.step} is saved by process {self._pid}: only that process can wait "
                "for it"
            )
        is_long = timeout is None or timeout > _LONG_SECONDS
        with self._change:
            if self._change.wait_for(is_over, _LONG_SECONDS if is_long else timeout):
                return True
        if not is_long:
            return False
        _log_open_tiers([self])
        with self._change:
            # None stays None, for no limit.
            return self._change.wait_for(is_over, timeout and timeout - _LONG_SECONDS)

    def wait(self, timeout: float | None = None) -> bool:
        """Wait until the save is over. Return False if ``timeout`` seconds pass before. Its error
        stays for a later call of the manager to raise.
        """
        return self._await(lambda: self._is_finished, timeout)

    def done(self) -> bool:
        """Return True if the save is over on all tiers, whether it has succeeded or failed."""
        return self._is_finished

    @property
    def unreported_error(self) -> CkptError | None:
        """The error of a save that is over, if no call has raised the error; else None."""
        return None if self._is_reported or not self.done() else self._error

    def __repr__(self) -> str:
        state = "committed" if self.done() else f"{self.progress:.0%}"
        if self._error:
            state = "skipped" if isinstance(self._error, SaveSkipped) else "failed"
        return f"<PendingSave step={self.step} {state}>"


class SaveRecord(PendingSave):
    """The handle of a save with the methods by which the manager ends the save.

    A user of the manager sees it as a `PendingSave`.
    """

    def add_written(self, nbytes: int) -> None:
        """Add ``nbytes`` to the bytes of this rank that were written. A negative number takes bytes
        back, since a file may be written again from its start.
        """
        with self._change:
            self._written_bytes += nbytes

    def end_on(
        self, tier: str, error: CkptError | None, *, required: bool = True
    ) -> CkptError | bool | None:
        """Note that the save has ended on ``tier``.

        Args:
            tier: The URL of the tier.
            error: Why the step is no checkpoint on the tier; None if it is a checkpoint.
            required: Whether ``error`` fails the save.

        Returns:
            True if the save has yet to end on other tiers. Otherwise the first error that fails the
            save, or None. An error that only skips the save is returned if there is no other one.
        """
        with self._change:
            self._outcomes[tier] = error
            self._open_tiers.discard(tier)
            if error is not None and required:
                self._failures[tier] = error
            # No later call raises an error that only skips the save. So other errors come first.
            failure = min(self._failures.values(), key=_is_skip, default=None)
            # If ``close`` has given the save up, its error stays.
            if not self._is_finished:
                self._error = failure
            self._change.notify_all()
            return True if self._open_tiers else failure

    def finish(self, error: CkptError | None, *, is_reported: bool = False) -> None:
        """End the save.

        Args:
            error: The error that fails the save; None if it has succeeded.
            is_reported: Whether ``error`` counts as raised, so that no later call raises it.
        """
        with self._change:
            self._is_reported = is_reported
            self._error = error
            if error is None:
                self.durable_seconds = self.age
            self._snapshot = None if error is None else self._snapshot
            self._is_finished = True
            self._change.notify_all()

    @property
    def is_kept(self) -> bool:
        """Whether some tier has the step."""
        return None in self._outcomes.values()

    def wait_kept(self, timeout: float, urls: Collection[str] | None = None) -> bool:
        """Wait until one of the tiers ``urls`` (None: any tier) has the step, or until the save is
        over. Return False if ``timeout`` seconds pass before.
        """
        urls, outcomes = self._user_urls if urls is None else urls, self._outcomes

        def is_kept() -> bool:
            return any(url in outcomes and outcomes[url] is None for url in urls)

        return self._await(lambda: is_kept() or self._is_finished, timeout)

    def missing_tiers(self) -> dict[str, CkptError | None]:
        """Return the tiers that lack the step: URL -> the error, or None if the save has not ended
        on the tier yet. Tiers are left out if their errors do not fail the save.
        """
        with self._change:
            return {**self._failures, **dict.fromkeys(sorted(self._open_tiers))}


def _is_skip(error: CkptError) -> bool:
    """Return True if ``error`` means only that a tier does not take the step."""
    return isinstance(error, SaveSkipped | TierBehind)


def check_timeout(timeout: float | None, hint: str = "") -> None:
    """Check that ``timeout`` is a number of seconds that Python can wait for, or None.

    Raises:
        ConfigError: ``timeout`` is something else, such as inf. ``hint`` ends its message.
    """
    if timeout is not None and not (is_number(timeout) and timeout <= TIMEOUT_MAX):
        raise ConfigError(
            f"timeout={timeout!r}: give seconds, or None to wait without a limit{hint}"
        )


def wait_and_log(future: Future[Any], saves: Sequence[PendingSave], timeout: float | None) -> bool:
    """Wait for ``future``, the work that ends ``saves``. If that takes more than two seconds, log
    once which tiers it waits for.

    Returns:
        True if ``future`` has ended within ``timeout`` seconds.
    """
    silent_seconds = _SILENT_SECONDS if timeout is None else min(timeout, _SILENT_SECONDS)
    if wait([future], silent_seconds).done:
        return True
    _log_open_tiers(saves)
    return bool(wait([future], None if timeout is None else timeout - silent_seconds).done)


def missing_at_the_end(saves: Sequence[SaveRecord], timeout: float | None) -> StepsMissing | None:
    """Return one error for all of ``saves`` that some tier lacks; None if no tier lacks one.

    A save does not count if a call has raised its error. Saves that are under way are given up, and
    end with the returned error. The errors of the other saves count as raised after this call.
    ``timeout`` is how many seconds the caller has waited for the saves.
    """
    losses: list[tuple[SaveRecord, str, str]] = []  # Save, tier, and why the tier lacks the step
    for save in saves:
        if not save.done() or save.unreported_error:
            for tier, error in save.missing_tiers().items():
                reason = (
                    f"{error.what} ({error.detail})"
                    if isinstance(error, StorageError)
                    else str(error)
                )
                losses.append((save, tier, reason if error else f"not finished within {timeout} s"))
    if not losses:
        return None
    steps_by_tier: dict[str, list[int]] = {}
    for save, tier, _ in losses:
        steps_by_tier.setdefault(tier, []).append(save.step)
    _, _, first_reason = losses[0]
    are_kept = all(save.is_kept for save, _, _ in losses)  # Each step is on some nearer tier
    error = StepsMissing(steps_by_tier, first_reason, nearer=are_kept)
    for save in {save for save, _, _ in losses}:
        if save.done():
            save.exception()  # Marks the error as raised
        else:
            save.finish(error, is_reported=True)
    return error


def _log_open_tiers(saves: Sequence[PendingSave]) -> None:
    """Log the tiers on which saves have not ended yet."""
    steps_by_tier: dict[str, list[int]] = {}
    for save in saves:
        for tier in save.open_tiers:
            steps_by_tier.setdefault(tier, []).append(save.step)
    for tier, steps in steps_by_tier.items():
        text = f"{len(steps)} step{'s' if len(steps) > 1 else ''}, newest {max(steps)}"
        _log.warning("ckpt: waiting for %s: %s", tier, text)
