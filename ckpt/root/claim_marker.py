"""The claim marker: one object on the tier that decides between finishing a save and removing it.

A *fragment* is an object that describes what one rank has made durable of a save. A manifest, which
makes the save a checkpoint, needs the fragments of all ranks.

The ranks of a job agree through the job's store. A finisher (``ckpt finalize``, an agent or a later
job) cannot use that store. So a finisher puts the marker *if absent* before it puts the manifest. A
rank puts the marker *if absent* before it removes files that a complete set of fragments may name.
The first marker wins, and the other process leaves all files as they are.

A rank deletes its marker once its files are gone. From then on the set of fragments is incomplete.
A finisher checks that the set is complete while its own marker exists. A finisher deletes its
marker when the manifest exists, and a rank checks for the manifest while its own marker exists. A
process that removes a checkpoint puts a third kind of marker before it removes the manifest, and
deletes the marker last. If a rank of another job may still put the manifest, the removal leaves a
tombstone in its place (``coordination.tombstone``). Therefore no manifest ever names a removed
file, in whatever order the processes run, as long as no rank stops for a day between its last look
at the owner of the root and its put of the manifest.

On a tier that nodes share, a rank also has a marker of its own, which it puts first and deletes
last. If a node is lost, the agent of another node puts the markers of that node's ranks before it
brings their files. The marker of the step cannot show whether a certain rank is still removing its
files, since all ranks share it. The marker of the rank shows this.
"""

from __future__ import annotations

import contextlib
from typing import Final

from ckpt.coordination.step_files import delete_files
from ckpt.coordination.tombstone import has_manifest
from ckpt.errors import CkptError, ObjectExists, ObjectNotFound, OutOfSpace, StorageError
from ckpt.model.keys import StepRef
from ckpt.storage.api import StorageBackend, is_there

_RANK_REMOVAL: Final = b""
"""The content of the marker of a rank that removes its files. It is empty to fit on a full disk.

The sizes of all contents differ, so that the size of a marker tells which kind it is.
"""
_CHECKPOINT_REMOVAL: Final = b"removed\n"
_FINISH: Final = b"finished from outside of its job\n"
_BRING: Final = b"brought from a copy on another node\n"
_MOST_TRIES: Final = 10


def claim_for_finish(backend: StorageBackend, ref: StepRef) -> bool:
    """Put the marker of a finisher. Return True if the step now has a marker of this kind.

    After True, no rank of the job removes files of the save. The caller must check that the files
    exist after this call, not before.
    """
    return _claim(backend, ref.claim_marker, _FINISH)


def require_finish(backend: StorageBackend, ref: StepRef) -> None:
    """Put the marker of a finisher.

    Raises:
        StorageError: The step has a marker of a removal.
    """
    if not claim_for_finish(backend, ref):
        raise StorageError(
            ref.folder,
            f"it is being removed on {backend.url}: if that was cut short, 'ckpt prune "
            f"{backend.url} --keep-last N' ends it",
        )


def claim_for_removal(backend: StorageBackend, ref: StepRef) -> bool:
    """Put the marker of a rank that removes its files of a save. Return True if the step now has a
    marker of this kind and no manifest.

    After True, the save is no checkpoint, and never becomes one.
    """
    if not _claim(backend, ref.claim_marker, _RANK_REMOVAL):
        return False
    if has_manifest(backend, ref):
        # A finisher was faster, and has deleted its marker already.
        release_removal(backend, ref)
        return False
    return True


def claim_committed_for_removal(backend: StorageBackend, ref: StepRef) -> bool:
    """Put the marker of the removal of a checkpoint. Return True if the step now has a marker of
    this kind.

    After True, no process finishes the step or copies it to this tier. The caller may remove the
    step, and must remove the manifest first. If the removal is interrupted, the marker stays, and
    the next prune completes the removal.
    """
    return _claim(backend, ref.claim_marker, _CHECKPOINT_REMOVAL)


def is_removal_marker(marker_bytes: int) -> bool:
    """Return True if a marker of ``marker_bytes`` bytes is one for the removal of a checkpoint.

    The kinds of markers differ in their size.
    """
    return marker_bytes == len(_CHECKPOINT_REMOVAL)


def is_being_removed(backend: StorageBackend, ref: StepRef) -> bool:
    """Return True if the step has the marker of the removal of a checkpoint."""
    try:
        return is_removal_marker(backend.head(ref.claim_marker).size)
    except ObjectNotFound:
        return False


def claim_rank_to_bring(backend: StorageBackend, ref: StepRef, rank: int) -> bool:
    """Put a rank's marker for an agent that brings the rank's files from a copy on another node.
    Return True if the rank now has a marker of this kind.

    After True, the rank does not remove its files of the save. No function of this module deletes
    the marker.
    """
    return _claim(backend, ref.rank_marker(rank), _BRING)


def is_marker_to_bring(marker_bytes: int) -> bool:
    """Return True if a rank's marker of ``marker_bytes`` bytes is one of ``claim_rank_to_bring``.

    The kinds of markers differ in their size.
    """
    return marker_bytes == len(_BRING)


def claim_rank_to_remove(backend: StorageBackend, ref: StepRef, rank: int) -> bool:
    """Put a rank's marker for the removal of its files. Return True if the rank now has a marker of
    this kind.
    """
    return _claim(backend, ref.rank_marker(rank), _RANK_REMOVAL)


def release_rank(backend: StorageBackend, ref: StepRef, rank: int) -> None:
    """Delete the marker of a rank that has removed its files. The call raises no ``CkptError``."""
    _release(backend, ref.rank_marker(rank), (_RANK_REMOVAL,))


def release_finish(backend: StorageBackend, ref: StepRef) -> None:
    """Delete the marker of the step if a finisher has put it. The call raises no ``CkptError``."""
    _release(backend, ref.claim_marker, (_FINISH,))


def release_removal(backend: StorageBackend, ref: StepRef) -> None:
    """Delete the marker of the step if it is one for a removal. It raises no ``CkptError``."""
    _release(backend, ref.claim_marker, (_RANK_REMOVAL, _CHECKPOINT_REMOVAL))


def release_marker(backend: StorageBackend, ref: StepRef) -> None:
    """Delete the marker of the step, whichever process put it. The call raises no ``CkptError``.

    If the deletion fails, the files of a failed save are removed some days later than otherwise
    (see ``ckpt.retention.removal``).
    """
    with contextlib.suppress(CkptError):
        backend.delete(ref.claim_marker)


def _release(backend: StorageBackend, key: str, contents: tuple[bytes, ...]) -> None:
    """Delete the marker ``key`` if it has the size of one of ``contents``.

    A marker with another size belongs to another process, and stays.
    """
    with contextlib.suppress(CkptError):
        if backend.head(key).size in map(len, contents):
            backend.delete(key)


def discard_part(
    backend: StorageBackend, ref: StepRef, fragment: str, *data: str, rank: int | None = None
) -> bool:
    """Remove the fragment and the other files of one rank of a save, unless a manifest names them
    or may name them later.

    Args:
        backend: The tier.
        ref: The save.
        fragment: The key of the rank's fragment.
        data: The keys of the rank's other files.
        rank: The rank, if an agent of another node may bring its files; else None.

    Returns:
        True if the files are gone. False if they stay, because another process finishes the save,
        has finished it, or brings the files.

    Raises:
        StorageError: The store has failed, so the files may still exist.
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
    delete_files(backend, [fragment, *data])
    release_removal(backend, ref)
    if rank is not None:
        release_rank(backend, ref, rank)
    return True


def _claim(backend: StorageBackend, key: str, content: bytes) -> bool:
    """Put a marker if there is none. Return True if the marker has the size of ``content`` now.

    Return False also if other processes put and delete their markers at each of the tries.
    """
    for _ in range(_MOST_TRIES):
        with contextlib.suppress(ObjectExists):
            backend.put(key, [content], if_absent=True)
            return True
        # If another process has deleted its marker since the put, the next put may succeed.
        with contextlib.suppress(ObjectNotFound):
            return backend.head(key).size == len(content)
    return False
