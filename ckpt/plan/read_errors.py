"""Decide how much of a store a reader skips after an error of that store, and which error it raises
if all stores have failed.
"""

from __future__ import annotations

from collections.abc import Collection, Sequence
from dataclasses import replace
from enum import Enum

from ckpt.errors import (
    AccessDenied,
    CodecMissing,
    FileDamaged,
    FormatUnsupported,
    IntegrityError,
    LinkRefused,
    ObjectNotFound,
    StorageError,
    TransientStorageError,
)
from ckpt.model.manifest import StoredFile
from ckpt.plan.restore import ChunkRead, RestorePlan


class Reach(Enum):
    """The part of a store that a reader does not read again after an error: the chunk, the file, or
    the whole store.
    """

    CHUNK = "chunk"
    FILE = "file"
    STORE = "store"


def reach_of(error: Exception) -> Reach | None:
    """Return the part of a store that a reader does not read again after ``error``.

    Return None if the caller must raise the error and read no other store. This holds for every
    error that is not an error of the store, and for a checkpoint in an unsupported format. If a
    reader went on to another store with an older step, the user would not notice that the installed
    ckpt must be upgraded.
    """
    match error:
        case CodecMissing():  # In another store, the file may have another codec or none
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
    supported: the data may be intact then, and an older step would hide the problem. `LinkRefused`
    counts as damage, since it concerns a single object.
    """
    if isinstance(error, AccessDenied | TransientStorageError):
        return isinstance(error, LinkRefused)
    if isinstance(error, IntegrityError):
        return not isinstance(error, FormatUnsupported)
    return isinstance(error, ObjectNotFound) or type(error) is StorageError


def as_damage(error: Exception, file: StoredFile) -> Exception:
    """Return `FileDamaged` in the place of an ``ObjectNotFound`` about a data file of a manifest,
    and else ``error``.

    The missing object is ``file``, or its ``base``: the file of another step that has its first
    chunks.
    """
    if not isinstance(error, ObjectNotFound):
        return error
    base = file.base
    missing_file = base if base is not None and base.key == error.key else file
    return FileDamaged(missing_file.key, None, missing_file.size)


def combined_error(errors: Sequence[tuple[str, Exception]], name: str) -> Exception:
    """Return the error to raise if no store could give ``name``.

    If some errors do not mean damage (see ``is_damage``), return the first of them, since the data
    may be intact. Otherwise ignore each ``ObjectNotFound``, unless all errors are of this class. If
    one error remains, return that error. If several remain, return an ``IntegrityError`` that names
    them.

    Args:
        errors: The URL and the error of each store, nearest first.
        name: The key of the file or folder, for the message.
    """
    if inconclusive := next((error for _, error in errors if not is_damage(error)), None):
        return inconclusive
    failures = [item for item in errors if not isinstance(item[1], ObjectNotFound)] or list(errors)
    if len(failures) == 1:
        [(_, error)] = failures
        return error
    reasons = "; ".join(f"{url}: {error}" for url, error in failures)
    return IntegrityError(f"no tier has {name!r} intact: {reasons}")


def plan_without(plan: RestorePlan, reads: Collection[ChunkRead]) -> RestorePlan:
    """Return ``plan`` without the chunks of ``reads``. The remaining reads keep their order."""
    if not reads:
        return plan
    chunk_ids = {read.chunk_id for read in reads}
    return replace(plan, reads=tuple(read for read in plan.reads if read.chunk_id not in chunk_ids))
