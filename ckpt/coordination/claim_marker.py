"""Between those who finish a save from outside of its job, and those of the job who clear its files away: one mark on the tier itself.

Ranks of a job agree through the job's store. `ckpt finalize` and a later job cannot: that store is theirs no more, or gone. So before a finisher puts the manifest it puts the mark *if absent*, and so does a rank
before it removes files that a complete set of fragments may name. Whose mark stands has its way; the other leaves everything as it is.

A rank takes the refusing mark off again once its files are gone: from then on the set is not complete, which a finisher looks for with its own mark in place. A finisher takes its mark off when the manifest is there, which a rank
looks for with its own mark in place. Who removes a checkpoint puts a third mark before the manifest goes, and takes it off last. So at any instruction, in any order, with any process stopped for any time: no manifest names a file that is removed after it.
"""

from __future__ import annotations

import contextlib
from typing import Final

from ckpt.errors import CkptError, ObjectExists, ObjectNotFound, OutOfSpace
from ckpt.model.keys import StepRef
from ckpt.storage.api import StorageBackend, is_there

_REFUSED: Final = b""
"""An empty file: there is room for it on a full disk."""
_REMOVED: Final = b"removed\n"
_FINISHED: Final = b"finished from outside of its job\n"


def claim_for_finish(backend: StorageBackend, ref: StepRef) -> bool:
    """Whether nobody of the job clears its files away from now on. Look for its files after this."""
    return _mark(backend, ref, _FINISHED)


def claim_for_removal(backend: StorageBackend, ref: StepRef) -> bool:
    """Whether it is no checkpoint, and nobody makes it one from now on."""
    if not _mark(backend, ref, _REFUSED):
        return False
    if is_there(backend, ref.manifest):  # its finisher was faster, and has taken its mark off
        release_marker(backend, ref)
        return False
    return True


def claim_committed_for_removal(backend: StorageBackend, ref: StepRef) -> bool:
    """Return whether a checkpoint may be removed: no process finishes it, or copies it here, from now on.

    The mark comes before the manifest goes. A removal that is cut off leaves the mark, and the next one ends what it began.
    """
    return _mark(backend, ref, _REMOVED)


def is_removal_marker(mark_bytes: int) -> bool:
    """Whether a mark of this size is that of a removal."""
    return mark_bytes == len(_REMOVED)


def release_marker(backend: StorageBackend, ref: StepRef) -> None:
    """After what was marked is done. Never raises: a mark that stays keeps remains from being removed for some days, no more (``retention.prune``)."""
    with contextlib.suppress(CkptError):
        backend.delete(ref.claim_marker)


def clear_away(backend: StorageBackend, ref: StepRef, fragment: str, data: str) -> bool:
    """Remove what one rank has written of a save that was refused for good, or that it has no part in; nothing that a manifest names, or will name.

    Returns:
        Whether it is gone. If not, somebody finishes it.

    Raises:
        StorageError: It may be there still.
    """
    try:
        if not claim_for_removal(backend, ref):
            return False
    except OutOfSpace:  # not even for an empty file: what no fragment tells of can go, and makes room
        if is_there(backend, fragment):
            raise
    backend.delete(fragment)
    backend.delete(data)
    release_marker(backend, ref)
    return True


def _mark(backend: StorageBackend, ref: StepRef, content: bytes) -> bool:
    with contextlib.suppress(ObjectExists):
        backend.put(ref.claim_marker, [content], if_absent=True)
        return True
    try:
        return backend.head(ref.claim_marker).size == len(content)
    except ObjectNotFound:  # taken off in this moment: whoever it was is done
        return False
