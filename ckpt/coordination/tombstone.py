"""Tombstones: what takes the place of a manifest if a process may still put that manifest.

A rank checks that its job owns the root, and then puts the manifest if it is absent. If the rank
stops in between, another job may take the root over, make the step a checkpoint itself, and remove
it. The put of the rank would then list a step without files. So a job that removes a checkpoint of
a job that may live does not delete the manifest, but replaces it by a tombstone. A put *if absent*
finds the tombstone and fails. The tombstone is removed with the remains of the step: after a day,
or as soon as the job of the step is known to have ended (``retention.policy``).

A process that copies the step to the tier again deletes the tombstone right before it puts the
manifest. All files are there by then, and the *claim marker* of the process, an object in the
folder of the step, keeps removers away. A late put of the rank does no harm then, since it puts the
manifest of the same attempt.
"""

from __future__ import annotations

from typing import Final

from ckpt.errors import LinkRefused, ObjectNotFound
from ckpt.model.keys import StepRef
from ckpt.storage.api import StorageBackend

TOMBSTONE: Final = b"removed\n"
"""The content of a tombstone. No manifest is as short."""


def has_manifest(backend: StorageBackend, ref: StepRef) -> bool:
    """Return True if the store has a manifest for ``ref``, and no tombstone or empty file in its
    place. A store may leave an empty file if it loses power or its disk is full.

    The result is also True for a symbolic link that the store refuses to follow.
    """
    try:
        return is_of_manifest(backend.head(ref.manifest).size)
    except ObjectNotFound:
        return False
    except LinkRefused:
        return True


def has_tombstone(backend: StorageBackend, ref: StepRef) -> bool:
    """Return True if the store has a tombstone for ``ref``: the step was removed."""
    try:
        return is_tombstone(backend.head(ref.manifest).size)
    except (LinkRefused, ObjectNotFound):
        return False


def is_of_manifest(size: int) -> bool:
    """Return True if a ``manifest.json`` of this size may be a manifest: it is neither empty nor a
    tombstone.
    """
    return size not in (0, len(TOMBSTONE))


def is_tombstone(size: int) -> bool:
    """Return True if a ``manifest.json`` of this size is a tombstone."""
    return size == len(TOMBSTONE)


def replace_by_tombstone(backend: StorageBackend, ref: StepRef) -> None:
    """Replace the manifest of a step by a tombstone. From now on, the step is no checkpoint.

    Call this while the step has the claim marker of the removal.
    """
    backend.put(ref.manifest, [TOMBSTONE])


def delete_tombstone(backend: StorageBackend, ref: StepRef) -> None:
    """Delete the tombstone of a step, or the empty file in its place, if there is one.

    Call this while the step has the claim marker of a finisher, after all of its files were found.
    """
    try:
        if not is_of_manifest(backend.head(ref.manifest).size):
            backend.delete(ref.manifest)
    except ObjectNotFound:
        return
