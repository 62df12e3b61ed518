"""Decide after an error of a store how much of the store is not read any more, and which error is
raised if all stores have failed.
"""

from __future__ import annotations

from collections.abc import Collection, Sequence
from dataclasses import replace
from enum import Enum

from ckpt.errors import (
    AccessDenied,
    CodecMissing,
    FormatUnsupported,
    IntegrityError,
    LinkRefused,
    ObjectNotFound,
    StorageError,
    TransientStorageError,
)
from ckpt.plan.restore import ChunkRead, RestorePlan


class Reach(Enum):
    """How much of a store is not read again after an error: the chunk, the file, or the whole
    store.
    """

    CHUNK = "chunk"
    FILE = "file"
    STORE = "store"


def reach_of(error: Exception) -> Reach | None:
    """Return how much of a store is not read again after ``error``. Return None if another store
    would not help, so that the caller must raise the error.

    The result is None for every error that is not an error of the store, and for a checkpoint in an
    unsupported format. If a reader went on to another store with an older step, the user would not
    notice that this ckpt must be upgraded.
    """
    match error:
        case CodecMissing():  # Another store may have the file without the codec
            return Reach.FILE
        case FormatUnsupported():
            return None
        case ObjectNotFound() | AccessDenied():
            return Reach.FILE
        case TransientStorageError():  # All retries have failed
            return Reach.STORE
        case IntegrityError() | StorageError():
            return Reach.CHUNK
        case _:
            return None


def is_damage(error: Exception) -> bool:
    """Return True if ``error`` means that data is damaged or missing, so that a restore may take an
    older step.

    The result is False if the store denies access or does not answer, or if the format is not
    supported: the data may be intact then, and an older step would hide the problem.
    """
    if isinstance(error, AccessDenied | TransientStorageError):
        return isinstance(error, LinkRefused)
    if isinstance(error, IntegrityError):
        return not isinstance(error, FormatUnsupported)
    return isinstance(error, ObjectNotFound) or type(error) is StorageError


def verdict(errors: Sequence[tuple[str, Exception]], what: str) -> Exception:
    """Return the error to raise if no store could give ``what``.

    If an error does not mean damage (see ``is_damage``), the first such error is returned, since
    the data may be intact. Otherwise an ``ObjectNotFound`` does not count if there is another
    error. The result is then the only error that counts, or an ``IntegrityError`` that names
    several.

    Args:
        errors: The URL and the error of each store, nearest first.
        what: The key of the file or folder, for the message.
    """
    if unsaid := next((error for _, error in errors if not is_damage(error)), None):
        return unsaid
    failures = [item for item in errors if not isinstance(item[1], ObjectNotFound)] or list(errors)
    if len(failures) == 1:
        return failures[0][1]
    reasons = "; ".join(f"{url}: {error}" for url, error in failures)
    return IntegrityError(f"no tier has {what!r} intact: {reasons}")


def without(plan: RestorePlan, reads: Collection[ChunkRead]) -> RestorePlan:
    """Return ``plan`` without the chunks of ``reads``. The remaining reads keep their order."""
    if not reads:
        return plan
    places = {read.place for read in reads}
    return replace(plan, reads=tuple(read for read in plan.reads if read.place not in places))
