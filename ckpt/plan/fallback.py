"""How much of a store an error rules out, and what the next store is asked for. Pure decisions."""

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
    """How much of a store a failure rules out. That much is not requested from it again."""

    CHUNK = "chunk"
    FILE = "file"
    STORE = "store"


def reach_of(error: Exception) -> Reach | None:
    """Return how much of the store an error concerns; None if it is no error of the store.

    Such an error is raised, since no other store helps. A later format is of that kind: a store
    with an older step would hide that this ckpt must be upgraded.
    """
    match error:
        case CodecMissing():  # Another store may have it without the codec
            return Reach.FILE
        case FormatUnsupported():
            return None
        case ObjectNotFound() | AccessDenied():
            return Reach.FILE
        case TransientStorageError():  # It was retried for as long as is worthwhile
            return Reach.STORE
        case IntegrityError() | StorageError():
            return Reach.CHUNK
        case _:
            return None


def is_damage(error: Exception) -> bool:
    """Return True if the data is bad or gone.

    A store that refuses or does not answer, or a later format, gives no information about the data.
    An older step would hide that.
    """
    if isinstance(error, AccessDenied | TransientStorageError):
        return isinstance(error, LinkRefused)
    if isinstance(error, IntegrityError):
        return not isinstance(error, FormatUnsupported)
    return isinstance(error, ObjectNotFound) or type(error) is StorageError


def verdict(errors: Sequence[tuple[str, Exception]], what: str) -> Exception:
    """Return the one error that says why no store has ``what``.

    Args:
        errors: The URL and the error of each store, nearest first.

    An error without information about the data goes first, so that it is not taken for damage. That
    a store never had the data is reported only if there is no other error.
    """
    if unsaid := next((error for _, error in errors if not is_damage(error)), None):
        return unsaid
    failures = [item for item in errors if not isinstance(item[1], ObjectNotFound)] or list(errors)
    if len(failures) == 1:
        return failures[0][1]
    reasons = "; ".join(f"{url}: {error}" for url, error in failures)
    return IntegrityError(f"no tier has {what!r} intact: {reasons}")


def without(plan: RestorePlan, reads: Collection[ChunkRead]) -> RestorePlan:
    """Return the rest of ``plan``, in file order."""
    if not reads:
        return plan
    places = {read.place for read in reads}
    return replace(plan, reads=tuple(read for read in plan.reads if read.place not in places))
