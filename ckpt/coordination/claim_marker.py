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
"""

from __future__ import annotations

import contextlib
from typing import Final

from ckpt.errors import CkptError, ObjectExists, ObjectNotFound, OutOfSpace
from ckpt.model.keys import StepRef
from ckpt.storage.api import StorageBackend, is_there

_REMOVE: Final = b""
"""An empty object: it fits on a full disk."""
_REMOVED: Final = b"removed\n"
_FINISHED: Final = b"finished from outside of its job\n"


def claim_for_finish(backend: StorageBackend, ref: StepRef) -> bool:
    """Put the marker of a finisher, and return whether it stands.

    If it stands, no rank of the job removes files of the save. Look for the files after this call.
    """
    return _claim(backend, ref, _FINISHED)


def claim_for_removal(backend: StorageBackend, ref: StepRef) -> bool:
    """Put the marker of a removal, and return whether it stands.

    If it stands, the save is no checkpoint and never becomes one.
    """
    if not _claim(backend, ref, _REMOVE):
        return False
    if is_there(backend, ref.manifest):
        # A finisher was faster, and has deleted its marker already.
        release_removal(backend, ref)
        return False
    return True


def claim_committed_for_removal(backend: StorageBackend, ref: StepRef) -> bool:
    """Return whether a checkpoint may be removed: no process finishes it, or copies it here, from
    now on.

    The marker comes before the manifest goes. A removal that is cut off leaves the marker, and the
    next removal completes it.
    """
    return _claim(backend, ref, _REMOVED)


def is_removal_marker(marker_bytes: int) -> bool:
    """Return True if a marker of this size is that of a removal."""
    return marker_bytes == len(_REMOVED)


def release_finish(backend: StorageBackend, ref: StepRef) -> None:
    """Delete the marker of a finisher. See ``release_marker``."""
    _release(backend, ref, (_FINISHED,))


def release_removal(backend: StorageBackend, ref: StepRef) -> None:
    """Delete the marker of a removal. See ``release_marker``."""
    _release(backend, ref, (_REMOVE, _REMOVED))


def release_marker(backend: StorageBackend, ref: StepRef) -> None:
    """Delete the marker of any process. Never raises.

    A marker that stays only delays the removal of remains by some days (``retention.prune``).
    """
    with contextlib.suppress(CkptError):
        backend.delete(ref.claim_marker)


def _release(backend: StorageBackend, ref: StepRef, contents: tuple[bytes, ...]) -> None:
    """Delete the marker if it is one of ``contents``. The process that put it may have ended, and
    another kind may be there since.
    """
    with contextlib.suppress(CkptError):
        if backend.head(ref.claim_marker).size in map(len, contents):
            backend.delete(ref.claim_marker)


def clear_away(backend: StorageBackend, ref: StepRef, fragment: str, data: str) -> bool:
    """Remove the files of one rank from a save that was aborted, or that the rank takes no part in.

    No file is removed that a manifest names, or may name later.

    Returns:
        True if the files are gone. False if another process finishes the save.

    Raises:
        StorageError: The files may still exist.
    """
    try:
        if not claim_for_removal(backend, ref):
            return False
    except OutOfSpace:
        # There is no room even for a marker. Data without a fragment can still be removed.
        if is_there(backend, fragment):
            raise
    backend.delete(fragment)
    backend.delete(data)
    release_removal(backend, ref)
    return True


def _claim(backend: StorageBackend, ref: StepRef, content: bytes) -> bool:
    with contextlib.suppress(ObjectExists):
        backend.put(ref.claim_marker, [content], if_absent=True)
        return True
    try:
        return backend.head(ref.claim_marker).size == len(content)
    except ObjectNotFound:  # The marker was deleted just now, so its owner is done
        return False
