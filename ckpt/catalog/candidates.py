"""Which step shall be restored? Newest first, whichever stores hold it.

One LIST for each store; whether an attempt is committed is asked of the nearest that has its folder, and only when its turn comes.
"""

from __future__ import annotations

import logging
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from functools import partial

from ckpt.catalog.index import attempts, born, is_committed
from ckpt.errors import StorageError
from ckpt.model.layout import StepRef
from ckpt.pipeline.workers import Workers
from ckpt.storage.api import StorageBackend

_log = logging.getLogger("ckpt")


@dataclass(frozen=True, slots=True, kw_only=True)
class Candidate:
    """A committed attempt.

    Attributes:
        nearest: Position of the nearest store that lists it.
        answering: Positions of the stores that could be listed; the others are left out of this restore.
    """

    ref: StepRef
    nearest: int
    answering: tuple[int, ...]


def candidates(
    stores: Sequence[StorageBackend], step: int | None, *, workers: Workers
) -> Iterator[Candidate]:
    """Committed attempts at ``step`` (None: any), newest step first, of attempts at one step the youngest.

    Raises:
        StorageError: Some store could not be listed, and the others hold nothing.
    """
    return _Listing(stores, workers).candidates(step)


class _Listing:
    def __init__(self, stores: Sequence[StorageBackend], workers: Workers) -> None:
        self._stores = stores
        self._failure: StorageError | None = None
        self._holders: dict[StepRef, list[int]] = {}
        self._answering = list(range(len(stores)))
        found = workers.run_all(partial(_attempts, store) for store in stores)
        for position, refs in enumerate(found):
            if isinstance(refs, StorageError):
                self._drop(position, refs)
            else:
                for ref in refs:
                    self._holders.setdefault(ref, []).append(position)

    def candidates(self, step: int | None) -> Iterator[Candidate]:
        none = True
        for number in sorted({ref.step for ref in self._holders}, reverse=True):
            if step not in (None, number):
                continue
            rivals = [ref for ref in self._holders if ref.step == number]
            nearest = {ref: place for ref in rivals if (place := self._nearest(ref)) is not None}
            for ref in sorted(nearest, key=lambda ref: self._age(ref, len(nearest)), reverse=True):
                none = False
                yield Candidate(ref=ref, nearest=nearest[ref], answering=tuple(self._answering))
        if none and self._failure is not None:
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
        if len(self._stores) > 1:  # else it is the error that is raised
            _log.warning("ckpt: the tier %s cannot be listed: %s", self._stores[position].url, error)
        self._answering.remove(position)
        self._failure = error


def _attempts(store: StorageBackend) -> list[StepRef] | StorageError:
    try:
        return attempts(store)
    except StorageError as error:
        return error
