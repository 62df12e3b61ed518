"""The claim marker: one object on the tier that decides between finishing a save and removing it.

Ranks of a job agree through the job's store. ``ckpt finalize`` and a later job cannot use that
store. So a finisher puts the marker *if absent* before it puts the manifest, and a rank puts the
marker before it removes files that a complete set of fragments may name. The first marker that is
written wins. The other side leaves all files as they are.

A rank deletes its marker once its files are gone. From then on the set of fragments is incomplete,
and a finisher checks for completeness while its own marker is in place. A finisher deletes its
marker when the manifest exists, and a rank checks for the manifest while its own marker is in
place. A process that removes a checkpoint puts a third kind of marker before it removes the
manifest, and deletes the marker last. So no manifest ever names a file that is removed after it, in
any order of instructions, and with any process stopped for any time.

On a tier that nodes share, a rank first puts a marker of its own, and deletes it last. If a node is
lost, the agent of another node puts such a marker before it brings the files of a rank of that
node. Ranks share the marker of the step, so it does not say whether one of them is still removing
its files. The marker of the rank does.
"""

from __future__ import annotations

import contextlib
from typing import Final

from ckpt.errors import CkptError, ObjectExists, ObjectNotFound, OutOfSpace
from ckpt.model.keys import StepRef
from ckpt.storage.api import StorageBackend, is_there

_REMOVE: Final = b""
"""The content of the marker of a rank that removes its files. Empty, to fit on a full disk."""
_REMOVED: Final = b"removed\n"
_FINISHED: Final = b"finished from outside of its job\n"
_BROUGHT: Final = b"brought from a copy on another node\n"
_TRIES: Final = 10


def claim_for_finish(backend: StorageBackend, ref: StepRef) -> bool:
    """Put the marker of a finisher. Return True if the step now has a marker of this kind.

    No rank of the job then removes files of the save. The caller must look for the files after this
    call, not before.
    """
    return _claim(backend, ref.claim_marker, _FINISHED)


def claim_for_removal(backend: StorageBackend, ref: StepRef) -> bool:
    """Put the marker of the removal of a save. Return True if the step now has a marker of this
    kind.

    The save is then no checkpoint, and never becomes one.
    """
    if not _claim(backend, ref.claim_marker, _REMOVE):
        return False
    if is_there(backend, ref.manifest):
        # A finisher was faster, and has deleted its marker already.
        release_removal(backend, ref)
        return False
    return True


def claim_committed_for_removal(backend: StorageBackend, ref: StepRef) -> bool:
    """Put the marker of the removal of a checkpoint. Return True if the step now has a marker of
    this kind.

    From then on no process finishes the step or copies it to this tier, and the caller may remove
    it, manifest first. A removal that is cut off leaves the marker, and the next removal completes
    it.
    """
    return _claim(backend, ref.claim_marker, _REMOVED)


def is_removal_marker(marker_bytes: int) -> bool:
    """Return True if a marker of this size is that of the removal of a checkpoint."""
    return marker_bytes == len(_REMOVED)


def claim_rank_to_bring(backend: StorageBackend, ref: StepRef, rank: int) -> bool:
    """Put a rank's marker for an agent that brings the rank's files from a copy. Return True if the
    rank now has a marker of this kind.

    The rank then does not remove its files of the save. The marker stays.
    """
    return _claim(backend, ref.rank_marker(rank), _BROUGHT)


def is_marker_to_bring(marker_bytes: int) -> bool:
    """Return True if a rank's marker of ``marker_bytes`` bytes is that of ``claim_rank_to_bring``:
    an agent copies the files of the rank to this tier. The kinds of markers differ in their size.
    """
    return marker_bytes == len(_BROUGHT)


def claim_rank_to_remove(backend: StorageBackend, ref: StepRef, rank: int) -> bool:
    """Put a rank's marker for the removal of its files. Return True if the rank now has a marker of
    this kind.
    """
    return _claim(backend, ref.rank_marker(rank), _REMOVE)


def release_rank(backend: StorageBackend, ref: StepRef, rank: int) -> None:
    """Delete the marker of a rank that has removed its files. It raises no ``CkptError``."""
    _release(backend, ref.rank_marker(rank), (_REMOVE,))


def release_finish(backend: StorageBackend, ref: StepRef) -> None:
    """Delete the marker of the step if it is that of a finisher. It raises no ``CkptError``."""
    _release(backend, ref.claim_marker, (_FINISHED,))


def release_removal(backend: StorageBackend, ref: StepRef) -> None:
    """Delete the marker of the step if it is that of a removal. It raises no ``CkptError``."""
    _release(backend, ref.claim_marker, (_REMOVE, _REMOVED))


def release_marker(backend: StorageBackend, ref: StepRef) -> None:
    """Delete the marker of the step, whichever process put it. It raises no ``CkptError``.

    A marker that stays only delays the removal of the files of failed saves by some days (see
    ``ckpt.retention.removal``).
    """
    with contextlib.suppress(CkptError):
        backend.delete(ref.claim_marker)


def _release(backend: StorageBackend, key: str, contents: tuple[bytes, ...]) -> None:
    """Delete the marker ``key`` if it has the size of one of ``contents``. Another process may have
    put a marker of another kind since.
    """
    with contextlib.suppress(CkptError):
        if backend.head(key).size in map(len, contents):
            backend.delete(key)


def clear_away(
    backend: StorageBackend, ref: StepRef, fragment: str, data: str, *, rank: int | None = None
) -> bool:
    """Remove the files of one rank of a save that was aborted, or in which the rank has no part.

    No file is removed that a manifest names, or may name later.

    Args:
        rank: The rank, if an agent of another node may bring its files; else None.

    Returns:
        True if the files are gone. False if another process finishes the save, or brings the files.

    Raises:
        StorageError: The files may still exist.
    """
    try:
        if rank is not None and not claim_rank_to_remove(backend, ref, rank):
            return False
        if not claim_for_removal(backend, ref):
            if rank is not None:
                release_rank(backend, ref, rank)
            return False
    except OutOfSpace:
        # There is no room even for a marker. Data without a fragment can still be removed.
        if is_there(backend, fragment):
            raise
    backend.delete(fragment)
    backend.delete(data)
    release_removal(backend, ref)
    if rank is not None:
        release_rank(backend, ref, rank)
    return True


def _claim(backend: StorageBackend, key: str, content: bytes) -> bool:
    for _ in range(_TRIES):
        with contextlib.suppress(ObjectExists):
            backend.put(key, [content], if_absent=True)
            return True
        # If the marker was deleted just now, its owner is done, and the key is free again.
        with contextlib.suppress(ObjectNotFound):
            return backend.head(key).size == len(content)
    return False
