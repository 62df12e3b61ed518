"""Which step shall be restored? Newest first, whichever stores hold it.

One LIST for each store, all at once, for the newest step may be on any; but one that does not
answer is not waited for when a nearer one has a checkpoint. Whether an attempt is committed is
asked of the nearest store that has its folder, and only when its turn comes.
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

Long: what it holds may be newer.
"""
ANSWER_SECONDS: Final = 3.0
"""How long it may then take to answer a small request.

A store that does not is down, and is not waited for any longer.
"""

Finish = Callable[[StorageBackend, StepRef], bool]
"""Whether an attempt that is not committed on a store is so now."""
Lists = Callable[[StorageBackend], list[StepRef]]
"""How a store is asked which attempts it has."""

_NO_OTHER: Final = (
    "; no other tier has a step, so it is not known where the job left off: start again when the "
    "store answers, "
    "or take that tier out to start afresh"
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
    """Committed attempts at ``step`` (None: any), newest step first, of attempts at one step the
    youngest.

    Args:
        workers: One thread for each store; some may still wait for an answer when all steps are
            told.
        finish: Asked where no attempt at a step is committed.

    Raises:
        StorageError: Some store could not be listed, and the others hold nothing.
    """
    return _Listing(stores, workers, lists).candidates(step, finish)


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
                # a store may have failed since
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
        """Only asked for where it decides."""
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
        if len(self._stores) > 1:  # else it is the error that is raised
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
    """Whether the store answers at all, whatever it says."""
    try:
        store.head(OWNER)
    except TransientStorageError:
        return False
    except CkptError:
        return True
    return True


def _holds_any(store: StorageBackend, refs: list[StepRef] | StorageError) -> bool:
    """Whether something is committed there: remains and partial caches are nothing to restore."""
    with suppress(StorageError):
        return not isinstance(refs, StorageError) and any(is_committed(store, ref) for ref in refs)
    return False


def _attempts(store: StorageBackend, lists: Lists) -> list[StepRef] | StorageError:
    try:
        return lists(store)
    except StorageError as error:
        return error
