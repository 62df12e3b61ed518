"""The candidates for a restore: the committed attempts on all stores, newest step first.

All stores are listed at once, since any of them may have the newest step. If a nearer store has a
checkpoint, a store that does not answer is left out after a bounded wait. While the listing waits
for a store, the nearer stores are asked for a committed attempt. Apart from that, a store is asked
whether an attempt is committed only when the iteration reaches that attempt. Of the stores that
have its folder, the nearest one is asked first. A store is named by its position in the list of all
stores, nearest first.

Each try of a job at a step is an *attempt*, with a folder of its own. A *rollback* is the record
that the run goes on from an older step, which begins the current *branch*. *Heads* are the newest
steps of all attempts. *Rivals* of a step that is wanted by its number are the other committed
attempts at this step.
"""

from __future__ import annotations

import logging
import math
import time
from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from concurrent.futures import FIRST_COMPLETED, Future, wait
from contextlib import suppress
from dataclasses import dataclass, field
from typing import Final

from ckpt.catalog.step_listing import RootContents, creation_time, is_committed, list_root
from ckpt.errors import CkptError, StorageError, TransientStorageError, with_root
from ckpt.model.keys import OWNER, StepId, StepRef
from ckpt.model.rollback import Rollback, heads_of, last_rollback, on_branch
from ckpt.pipeline.workers import Workers
from ckpt.storage.api import StorageBackend

LISTING_SECONDS: Final = 15.0
"""How long a store may take to list its steps once a nearer store is known to have a checkpoint.

The limit is long, since the farther store may have a newer step.
"""
ANSWER_SECONDS: Final = 3.0
"""How long a store may show no sign of life once a nearer store is known to have a checkpoint.

A store that has not been listed after a third of this time gets one more small request. If it
answers neither request in time, it counts as down. Otherwise it has ``LISTING_SECONDS`` in all.
"""

Finish = Callable[[StorageBackend, StepRef, Rollback | None], bool]
"""A function that tries to finish an uncommitted attempt on a store. It gets the rollback that
counts on all stores, and returns True on success.
"""
ListStore = Callable[[StorageBackend], RootContents]
"""A function that lists the attempts at steps on a store, committed or not, and its rollback."""

_NEWEST_IS_UNKNOWN: Final = (
    "; no other tier has a step, so the newest step of the job is not known: start again when the "
    "store answers, or take that tier out to begin without a checkpoint"
)
_log = logging.getLogger("ckpt")


@dataclass(frozen=True, slots=True, kw_only=True)
class Candidate:
    """A committed attempt that a restore may choose.

    Attributes:
        nearest: The position of the nearest store on which the attempt is committed.
        reachable: The positions of the stores that have not failed so far. The restore leaves out
            all other stores.
        rollback: The rollback that counts; None if there is none.
        heads: The newest step of each attempt on any store, committed or not.
        rivals: If one step was wanted, the other committed attempts at it (see
            ``rollback.is_newest``).
        rollbacks: For each store that was listed, by its position, the rollback that counts there.
    """

    ref: StepRef
    nearest: int
    reachable: tuple[int, ...]
    rollback: Rollback | None = None
    heads: tuple[StepRef, ...] = ()
    rivals: tuple[StepRef, ...] = ()
    rollbacks: Mapping[int, Rollback | None] = field(default_factory=dict[int, Rollback | None])


def candidates(
    stores: Sequence[StorageBackend],
    step: StepId | None,
    *,
    workers: Workers,
    finish: Finish = lambda _store, _ref, _rollback: False,
    list_store: ListStore = list_root,
    rollback: Rollback | None = None,
) -> Iterator[Candidate]:
    """Yield the committed attempts at ``step`` (None: at any step), newest step first.

    If ``step`` is None, only attempts of the current branch count, or all if this branch has no
    checkpoint any more. Otherwise attempts of the current branch come first. Of several attempts at
    a step, the one with the youngest manifest comes first. An attempt whose manifest cannot be read
    comes before the others at its step. If the caller takes all of them, the stores are listed once
    more, since a job may have removed these steps and saved newer ones meanwhile. Attempts that
    only the second listing finds come last.

    Args:
        stores: The stores, nearest first.
        step: The step that is wanted, or the only attempt at it.
        workers: Threads, one for each store. Some of them may still wait for the answer of a store
            when the iterator ends.
        finish: Called for the attempts at a step if none of them is committed.
        list_store: Lists the attempts on a store.
        rollback: A rollback that the caller knows from elsewhere.

    Raises:
        StorageError: A store has failed, and no other store has such an attempt.
    """
    refs: set[StepRef] = set()
    for candidate in _Listing(stores, workers, list_store, rollback).candidates(step, finish):
        refs.add(candidate.ref)
        yield candidate
    if not refs:
        return
    with suppress(StorageError):  # The caller already knows why it could not use the first ones
        for candidate in _Listing(stores, workers, list_store, rollback).candidates(step, finish):
            if candidate.ref not in refs:
                yield candidate


class _Listing:
    """One listing of all stores. Stores that fail later are left out from then on.

    ``_positions_of`` maps each attempt to the positions of the stores that have its folder, nearest
    first. ``_reachable`` are the positions of the stores that have not failed, and ``_failure`` is
    the last error of the others. ``_rollback`` is the last rollback that any store knows, and
    ``_rollbacks`` has the rollback of each store.
    """

    def __init__(
        self,
        stores: Sequence[StorageBackend],
        workers: Workers,
        list_store: ListStore,
        rollback: Rollback | None,
    ) -> None:
        self._stores, self._rollback = stores, rollback
        self._failure: StorageError | None = None
        self._positions_of: dict[StepRef, list[int]] = {}
        self._rollbacks: dict[int, Rollback | None] = {}
        self._reachable = list(range(len(stores)))
        for position, listing in enumerate(_list_all(stores, workers, list_store)):
            if isinstance(listing, StorageError):
                self._drop(position, listing)
                continue
            self._rollback = last_rollback([self._rollback, listing.rollback])
            self._rollbacks[position] = listing.rollback
            for ref in listing.refs:
                self._positions_of.setdefault(ref, []).append(position)
        self._heads = tuple(heads_of(self._positions_of))

    def candidates(self, step: StepId | None, finish: Finish) -> Iterator[Candidate]:
        """Yield the candidates at ``step`` (None: at any step) that this listing has."""
        is_empty = True
        branch = set(on_branch(self._rollback, self._positions_of))
        for refs in (branch, self._positions_of.keys() - branch):
            if not is_empty and step is None:
                break
            for candidate in self._candidates_among(refs, step, finish):
                is_empty = False
                yield candidate
        if is_empty and self._failure is not None:
            if len(self._stores) > 1:
                self._failure.detail += _NEWEST_IS_UNKNOWN
            raise self._failure

    def _candidates_among(
        self, refs: Collection[StepRef], step: StepId | None, finish: Finish
    ) -> Iterator[Candidate]:
        """Yield the candidates at ``step`` (None: at any step) among ``refs``, newest first."""
        for number in sorted({ref.step for ref in refs}, reverse=True):
            if step is not None and number != (step.step if isinstance(step, StepRef) else step):
                continue
            attempts = [ref for ref in self._positions_of if ref in refs and ref.step == number]
            choices = [ref for ref in attempts if not isinstance(step, StepRef) or ref == step]
            # Unfinished attempts are finished only if none is committed.
            positions = {
                ref: position
                for ref in choices
                if (position := self._nearest_position(ref)) is not None
            } or {
                ref: position
                for ref in choices
                if (position := self._finish_on(ref, finish)) is not None
            }
            rivals = [
                ref
                for ref in (attempts if step is not None and positions else ())
                if ref in positions
                or (ref not in choices and self._nearest_position(ref) is not None)
            ]
            for ref in sorted(
                positions, key=lambda ref: self._creation_time(ref, len(positions)), reverse=True
            ):
                # A store may have failed since the listing.
                position = (
                    positions[ref]
                    if positions[ref] in self._reachable
                    else self._nearest_position(ref)
                )
                if position is not None:
                    yield Candidate(
                        ref=ref,
                        nearest=position,
                        reachable=tuple(self._reachable),
                        rollback=self._rollback,
                        heads=self._heads,
                        rivals=tuple(rival for rival in rivals if rival != ref),
                        rollbacks=self._rollbacks,
                    )

    def _nearest_position(self, ref: StepRef) -> int | None:
        """Return the position of the nearest store on which ``ref`` is committed; None if there is
        no such store.
        """
        for position in self._positions_of[ref]:
            if position in self._reachable:
                try:
                    if is_committed(self._stores[position], ref):
                        return position
                except StorageError as error:
                    self._drop(position, error)
        return None

    def _finish_on(self, ref: StepRef, finish: Finish) -> int | None:
        """Return the position of the nearest store on which ``finish`` commits ``ref``, or None."""
        positions = [
            position for position in self._positions_of[ref] if position in self._reachable
        ]
        for position in positions:
            if finish(self._stores[position], ref, self._rollback):
                return position
        return None

    def _creation_time(self, ref: StepRef, attempt_count: int) -> float:
        """Return when the manifest of an attempt was made, in seconds since 1970.

        Returns infinity if no manifest of the attempt can be read: the attempt may be the youngest,
        and the restore then reports why it cannot use the attempt. Returns 0 if there is no other
        attempt at the step to compare it with. ``attempt_count`` is the number of committed
        attempts at the step.
        """
        if attempt_count < 2:
            return 0.0
        for position in self._positions_of[ref]:
            if position in self._reachable:
                try:
                    if created_at := creation_time(self._stores[position], ref):
                        return created_at
                except StorageError as error:
                    self._drop(position, error)
        return math.inf

    def _drop(self, position: int, error: StorageError) -> None:
        """Leave the store at ``position`` out from now on, because of ``error``."""
        with_root(error, self._stores[position].url)
        if len(self._stores) > 1:  # With a single store, ``candidates`` raises the error
            _log.warning(
                "ckpt: the tier %s cannot be listed: %s", self._stores[position].url, error
            )
        self._reachable.remove(position)
        self._failure = error


def _list_all(
    stores: Sequence[StorageBackend], workers: Workers, list_store: ListStore
) -> list[RootContents | StorageError]:
    """Return for each store its listing, or the error of a store that failed or is too slow."""
    futures = [workers.submit(_list_or_error, store, list_store) for store in stores]
    pending = set(futures)
    while pending:
        wait(pending, None, FIRST_COMPLETED)
        pending = {future for future in futures if not future.done()}
        # Those of the stores before the nearest one that has not answered.
        nearer = futures[: min((futures.index(future) for future in pending), default=0)]
        if any(map(_has_checkpoint, stores, (future.result() for future in nearer))):
            break
    # A store may be silent for this time after a nearer one is known to have a checkpoint.
    began, silence_seconds = time.monotonic(), min(ANSWER_SECONDS, LISTING_SECONDS)
    pending = wait(pending, silence_seconds / 3).not_done
    probes = {
        future: workers.submit(_why_silent, stores[futures.index(future)]) for future in pending
    }
    pending = wait(pending, silence_seconds * 2 / 3).not_done
    reasons = {future: probes[future].result() for future in pending if probes[future].done()}
    # The stores that have answered the small request get more time.
    live = {future for future, reason in reasons.items() if reason is None}
    wait(live, max(0.0, began + LISTING_SECONDS - time.monotonic()))

    def timeout_error(future: Future[RootContents | StorageError]) -> StorageError:
        seconds = LISTING_SECONDS if future in live else ANSWER_SECONDS
        reason = f" ({reasons[future]})" if reasons.get(future) else ""
        return TransientStorageError(
            "", f"no answer within {seconds:.0f} s{reason}, and a nearer tier has a step"
        )

    return [future.result() if future.done() else timeout_error(future) for future in futures]


def _why_silent(store: StorageBackend) -> str | None:
    """Return None if the store answers a small request, even with an error. A transient error, such
    as a refused connection, counts as no answer, and its detail is returned.
    """
    try:
        store.head(OWNER)
    except TransientStorageError as error:
        return error.detail
    except CkptError:
        return None
    return None


def _has_checkpoint(store: StorageBackend, listing: RootContents | StorageError) -> bool:
    """Return True if an attempt in the listing of the store is committed."""
    with suppress(StorageError):
        return not isinstance(listing, StorageError) and any(
            is_committed(store, ref) for ref in listing.refs
        )
    return False


def _list_or_error(store: StorageBackend, list_store: ListStore) -> RootContents | StorageError:
    """Return what ``list_store`` returns for the store, or the error that it raises."""
    try:
        return list_store(store)
    except StorageError as error:
        return error
