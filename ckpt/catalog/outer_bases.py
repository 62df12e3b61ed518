"""Checks that what the increments of a root refer to outside of the root is still there.

An *increment* is a data file that leaves out the chunks that the file of an older step, its *base*,
also has. An *outer* base is in another root. The files of an *adopted* base are files of another
program. The ``adoption`` of the increment names these files and the places of the chunks in them.
"""

from __future__ import annotations

import logging
from collections.abc import Callable, Iterable
from contextlib import suppress
from functools import partial
from typing import TypeVar

from ckpt.catalog.step_listing import is_committed
from ckpt.errors import (
    AccessDenied,
    CkptError,
    ForeignFileMismatch,
    LinkRefused,
    StorageError,
    TransientStorageError,
)
from ckpt.model.fragment_columns import read_fragment
from ckpt.model.keys import BaseRef, is_fragment, parse_base
from ckpt.model.manifest import Increment, bases_of
from ckpt.model.record_encoding import MAX_RECORD_BYTES
from ckpt.pipeline.retry import RetryPolicy
from ckpt.storage.api import ObjectInfo, StorageBackend, read_record
from ckpt.storage.outside_files import AdoptedBaseStore, root_at

_log = logging.getLogger("ckpt")

Result = TypeVar("Result")


class OuterBases:
    """The steps in other roots that increments of one root refer to.

    What denies access counts as present, since only the user of the other root can tell. The first
    such error is logged.

    Args:
        backend: The root of the increments.
        retry: The retry policy of requests.
    """

    def __init__(self, backend: StorageBackend, retry: RetryPolicy) -> None:
        self._backend, self._retry = backend, retry
        self._has_warned = False

    def absent(self, bases: Iterable[BaseRef]) -> frozenset[BaseRef]:
        """Return those of ``bases`` that are gone. Raises ``TransientStorageError`` if another root
        does not answer.
        """
        return frozenset(
            base for base in set(bases) if self._ask(partial(self._is_absent, base), False)
        )

    def fault_of(self, increments: Iterable[Increment]) -> str:
        """Return what is wrong with the files of other programs that increments refer to; empty if
        they are there. Raises ``StorageError`` if a file cannot be examined.
        """
        faults = (self._ask(partial(self._fault, increment), "") for increment in increments)
        return next(filter(None, faults), "")

    def _is_absent(self, base: BaseRef) -> bool:
        try:
            return not is_committed(root_at(self._backend, base.root), base.ref)
        except (AccessDenied, TransientStorageError):
            raise
        except StorageError:  # The path leads to no root of the store
            return True

    def _fault(self, increment: Increment) -> str:
        base = parse_base(increment.base)
        if base is None or increment.adoption is None:
            return ""
        url = root_at(self._backend, base.root).url
        store = AdoptedBaseStore(url, base.root, increment.adoption)
        try:
            self._retry.call(partial(store.head, increment.base))
        except ForeignFileMismatch as error:
            return f"{error.key!r} {error.detail}"
        return ""

    def _ask(self, look: Callable[[], Result], default: Result) -> Result:
        """Return the result of ``look``, or ``default`` if the store denies access."""
        try:
            return look()
        except LinkRefused:
            raise
        except AccessDenied as error:
            if not self._has_warned:
                _log.warning(
                    "ckpt: whether the base of steps on %s is there is not known, and they count "
                    "as whole: %s: give this user the right to read there",
                    self._backend.url,
                    error,
                )
            self._has_warned = True
            return default


def roots_of_unfinished(backend: StorageBackend, objects: Iterable[ObjectInfo]) -> set[str]:
    """Return the paths to other roots that the fragments of an unfinished step refer to. A fragment
    that cannot be read is left out.
    """
    roots = set[str]()
    for info in objects:
        if is_fragment(info.name) and info.size <= MAX_RECORD_BYTES:
            with suppress(CkptError):
                decode = partial(read_fragment, key=info.key)
                fragment = read_record(backend, info.key, decode, limit=info.size)
                roots |= {base.root for base in bases_of(fragment.increments)}
    return roots - {""}
