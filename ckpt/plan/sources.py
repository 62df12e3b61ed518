"""What one store could not give -> what the next is asked for. Pure decisions; who asks is the catalog."""

from __future__ import annotations

from collections.abc import Collection, Sequence
from dataclasses import replace
from enum import Enum

from ckpt.errors import (
    AccessDenied,
    FormatTooNew,
    IntegrityError,
    LinkRefused,
    ObjectNotFound,
    StorageError,
    TransientStorageError,
)
from ckpt.plan.restore import ChunkRead, RestorePlan


class Reach(Enum):
    """How much of a store a failure speaks of: what it reaches is not asked for there again."""

    CHUNK = "chunk"
    FILE = "file"
    STORE = "store"


def reach_of(error: Exception) -> Reach | None:
    """None for what is not the store's: it shall be raised, and no other store will do.

    A later format is of that kind: a store that has an older one would hide that this ckpt must be upgraded.
    """
    match error:
        case FormatTooNew():
            return None
        case ObjectNotFound() | AccessDenied():
            return Reach.FILE
        case TransientStorageError():  # as often as is worth it
            return Reach.STORE
        case IntegrityError() | StorageError():
            return Reach.CHUNK
        case _:
            return None


def is_damage(error: Exception) -> bool:
    """Whether the data is bad or gone. A store that forbids or does not answer, or a later format, says nothing about the data: going back in history would hide it."""
    if isinstance(error, AccessDenied | TransientStorageError):
        return isinstance(error, LinkRefused)
    if isinstance(error, IntegrityError):
        return not isinstance(error, FormatTooNew)
    return isinstance(error, ObjectNotFound) or type(error) is StorageError


def verdict(errors: Sequence[tuple[str, Exception]], what: str) -> Exception:
    """Of what each store (URL, error; nearest first) said, the one error that tells why none has ``what``.

    One that says nothing about the data goes first, for it keeps others from taking this for damage. That a store never had it is told only if none has anything else to say.
    """
    if unsaid := next((error for _, error in errors if not is_damage(error)), None):
        return unsaid
    told = [item for item in errors if not isinstance(item[1], ObjectNotFound)] or list(errors)
    if len(told) == 1:
        return told[0][1]
    reasons = "; ".join(f"{url}: {error}" for url, error in told)
    return IntegrityError(f"no tier has {what!r} intact: {reasons}")


def without(plan: RestorePlan, reads: Collection[ChunkRead]) -> RestorePlan:
    """The rest of ``plan``, in file order."""
    if not reads:
        return plan
    places = {(read.rank, read.offset) for read in reads}
    return replace(plan, reads=tuple(r for r in plan.reads if (r.rank, r.offset) not in places))
