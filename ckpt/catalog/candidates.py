"""The steps that a restore may choose, newest first, whichever stores have them.

All stores are listed at once, since any of them may have the newest step. A store that does not
answer is not waited for if a nearer store has a checkpoint. The nearest store that has the folder
of an attempt is asked whether it is committed, and only when it is the attempt's turn.
"""

from __future__ import annotations

import logging
import time
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import FIRST_COMPLETED, Future, wait
from contextlib import suppress
from dataclasses import dataclass
from typing import Final

from ckpt.catalog.index import attempts, born, is_committed
from ckpt.errors import CkptError, StorageError, TransientStorageError, placed
from ckpt.model.keys import OWNER, StepRef
from ckpt.pipeline.workers import Workers
from ckpt.storage.api import StorageBackend

LISTING_SECONDS: Final = 15.0
"""How long a store may take to list its steps once a nearer one is known to have a checkpoint.

It is long, since the store may have a newer step.
"""
ANSWER_SECONDS: Final = 3.0
"""How long it may then take to answer a small request.

A store that does not answer counts as down, and is not waited for any longer.
"""

Finish = Callable[[StorageBackend, StepRef], bool]
"""Tries to finish an attempt on a store. Returns whether it is committed now."""
Lists = Callable[[StorageBackend], list[StepRef]]
"""Returns the attempts that a store has."""

_NO_OTHER: Final = (
    "; no other tier has a step, so the newest step of the job is not known: start again when the "
    "store answers, or take that tier out to begin without a checkpoint"
)
_log = logging.getLogger("ckpt")


@dataclass(frozen=True, slots=True, kw_only=True)
class Candidate:
    """A committed attempt.

    Attributes:
        nearest: Position of the nearest store that lists it.
        answering: Positions of the stores that could be listed; the others are left out of this
            restore.
    """

    ref: StepRef
    nearest: int
    answering: tuple[int, ...]


def candidates(
    stores: Sequence[StorageBackend],
    step: int | None,
    *,
    workers: Workers,
    finish: Finish = lambda _store, _ref: False,
    lists: Lists = attempts,
) -> Iterator[Candidate]:
    """Yield the committed attempts at ``step`` (None: any), newest step first.

    Of several attempts at a step, the youngest comes first. After the last attempt, the stores are
    listed once more, since a job may have removed these steps and saved newer ones. Attempts that
    only the second listing finds follow then.

    Args:
        stores: The stores, nearest first.
        step: The step that is wanted.
        workers: One thread for each store. Some threads may still wait for an answer when the
            iterator ends.
        finish: Called for each attempt at a step that has no committed attempt.
        lists: Lists a store.

    Raises:
        StorageError: A store could not be listed, and the others have no step.
    """
    seen: set[StepRef] = set()
    for found in _Listing(stores, workers, lists).candidates(step, finish):
        seen.add(found.ref)
        yield found
    if not seen:
        return
    with suppress(StorageError):  # The caller knows what was wrong with each attempt
        for found in _Listing(stores, workers, lists).candidates(step, finish):
            if found.ref not in seen:
                yield found


class _Listing:
    def __init__(self, stores: Sequence[StorageBackend], workers: Workers, lists: Lists) -> None:
        self._stores = stores
        self._failure: StorageError | None = None
        self._holders: dict[StepRef, list[int]] = {}
        self._answering = list(range(len(stores)))
        for position, refs in enumerate(_list_all(stores, workers, lists)):
            if isinstance(refs, StorageError):
                self._drop(position, refs)
            else:
                for ref in refs:
                    self._holders.setdefault(ref, []).append(position)

    def candidates(self, step: int | None, finish: Finish) -> Iterator[Candidate]:
        none = True
        for number in sorted({ref.step for ref in self._holders}, reverse=True):
            if step not in (None, number):
                continue
            rivals = [ref for ref in self._holders if ref.step == number]
            nearest = {
                ref: place for ref in rivals if (place := self._nearest(ref)) is not None
            } or {
                ref: place for ref in rivals if (place := self._finished(ref, finish)) is not None
            }
            for ref in sorted(nearest, key=lambda ref: self._age(ref, len(nearest)), reverse=True):
                # A store may have failed since the listing.
                place = nearest[ref] if nearest[ref] in self._answering else self._nearest(ref)
                if place is not None:
                    none = False
                    yield Candidate(ref=ref, nearest=place, answering=tuple(self._answering))
        if none and self._failure is not None:
            if len(self._stores) > 1:
                self._failure.detail += _NO_OTHER
            raise self._failure

    def _nearest(self, ref: StepRef) -> int | None:
        for position in self._holders[ref]:
            if position in self._answering:
                try:
                    if is_committed(self._stores[position], ref):
                        return position
                except StorageError as error:
                    self._drop(position, error)
        return None

    def _finished(self, ref: StepRef, finish: Finish) -> int | None:
        places = [position for position in self._holders[ref] if position in self._answering]
        return next((position for position in places if finish(self._stores[position], ref)), None)

    def _age(self, ref: StepRef, rivals: int) -> float:
        """Return when an attempt was committed; 0 if it has no rivals, or if that is not known."""
        if rivals < 2:
            return 0.0
        for position in self._holders[ref]:
            if position in self._answering:
                try:
                    if age := born(self._stores[position], ref):
                        return age
                except StorageError as error:
                    self._drop(position, error)
        return 0.0

    def _drop(self, position: int, error: StorageError) -> None:
        placed(error, self._stores[position].url)
        if len(self._stores) > 1:  # With one store, the error is raised
            _log.warning(
                "ckpt: the tier %s cannot be listed: %s", self._stores[position].url, error
            )
        self._answering.remove(position)
        self._failure = error


def _list_all(
    stores: Sequence[StorageBackend], workers: Workers, lists: Lists
) -> list[list[StepRef] | StorageError]:
    futures = [workers.submit(_attempts, store, lists) for store in stores]
    waiting = set(futures)
    while waiting:
        wait(waiting, None, FIRST_COMPLETED)
        waiting = {future for future in futures if not future.done()}
        nearer = futures[: min((futures.index(future) for future in waiting), default=0)]
        if any(map(_holds_any, stores, (future.result() for future in nearer))):
            break
    began, patience = time.monotonic(), min(ANSWER_SECONDS, LISTING_SECONDS)
    waiting = wait(waiting, patience / 3).not_done
    answers = {
        future: workers.submit(_answers, stores[futures.index(future)]) for future in waiting
    }
    waiting = wait(waiting, patience * 2 / 3).not_done
    up = {future for future in waiting if answers[future].done() and answers[future].result()}
    wait(up, max(0.0, began + LISTING_SECONDS - time.monotonic()))

    def late(future: Future[list[StepRef] | StorageError]) -> StorageError:
        seconds = LISTING_SECONDS if future in up else ANSWER_SECONDS
        return TransientStorageError(
            "", f"no answer within {seconds:.0f} s, and a nearer tier has a step"
        )

    return [future.result() if future.done() else late(future) for future in futures]


def _answers(store: StorageBackend) -> bool:
    """Return True if the store answers a request, whatever the answer is."""
    try:
        store.head(OWNER)
    except CkptError as error:
        return not isinstance(error, TransientStorageError)
    return True


def _holds_any(store: StorageBackend, refs: list[StepRef] | StorageError) -> bool:
    """Return True if one of ``refs`` is committed on the store."""
    with suppress(StorageError):
        return not isinstance(refs, StorageError) and any(is_committed(store, ref) for ref in refs)
    return False


def _attempts(store: StorageBackend, lists: Lists) -> list[StepRef] | StorageError:
    try:
        return lists(store)
    except StorageError as error:
        return error
