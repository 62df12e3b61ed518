"""Remove one step, or an unfinished write, from a tier.

Retention and eviction remove a step only through ``remove``. Other modules also delete files of
steps, all of them by ``coordination.step_files.delete_files``, which deletes a manifest first. So a
step that lacks files is never listed as a checkpoint.

* ``save.slot_steps`` deletes the files of a step in memory before its slot is filled again.
* ``save.tier_writer`` deletes the fragment of a rank whose job has lost the root.
* ``root.claim_marker`` deletes the files of a rank, mostly after an aborted save.
* ``nodes.step_copies`` deletes copies of the files of other nodes.
* ``restore.read_through`` deletes files that a restore has just put into a cache that is full.
* ``catalog.transfer`` deletes damaged manifests, and files in an encoding that was replaced.

A *finisher* is a process that completes the commit of a step. A *claim marker* is an object in the
folder of a step that lets either a remover or a finisher go on. A *tombstone* is an object that
takes the place of the manifest. The *claim* of a job decides which steps of a root it may remove.
Its ``listing`` has the attempts that were there when the job took the root. A *fragment* is the
record of what one rank has written, and *remains* are what is left of a save that was not
committed. *Orphans* are unfinished writes of jobs that have ended.
"""

from __future__ import annotations

import time
from collections.abc import Iterable, Sequence
from contextlib import suppress
from typing import Final

from ckpt.catalog.inventory import StoredStep
from ckpt.catalog.step_listing import own_objects, unfinished_of
from ckpt.coordination.step_files import delete_files
from ckpt.coordination.tombstone import replace_by_tombstone
from ckpt.errors import OutOfSpace
from ckpt.model.checksum import checksum
from ckpt.model.keys import StepRef, is_file_name, is_fragment, is_late_metrics, parse_folder
from ckpt.pipeline.retry import RetryPolicy
from ckpt.retention.policy import GRACE_SECONDS
from ckpt.root.claim import Claim
from ckpt.root.claim_marker import (
    claim_committed_for_removal,
    claim_for_removal,
    is_removal_marker,
    release_marker,
    release_removal,
)
from ckpt.root.pins import is_pinned
from ckpt.storage.api import HasRoot, KeepsUnfinishedWrites, StorageBackend, UnfinishedWrite

_RETRY: Final = RetryPolicy()


def remove(backend: StorageBackend, step: StoredStep, claim: Claim | None = None) -> bool:
    """Remove one attempt at a step, unless another job has taken the root over.

    The claim marker is put first. Then the manifest is deleted, or replaced by a tombstone if a
    process of another job may still put it. The files follow, and the marker comes last. A step
    that is pinned stays, and so does one that another process finishes or copies. In a store with
    folders, the unfinished writes in the folder and the folder itself are removed too.

    If the attempt has no files, no marker is put. Then only its unfinished writes and its empty
    folder are removed.

    If a full store has no room for the marker, a checkpoint is removed without it, and so is a save
    without fragments. A save that has a fragment but no manifest then stays.

    A removal that is interrupted leaves either a checkpoint, or remains that the next pruning
    removes and that no process can make a checkpoint again.

    Args:
        backend: The store.
        step: The attempt as an inventory describes it.
        claim: The claim of the job on the root; None if a person decides.

    Returns:
        True if the attempt was removed, and False if it stays.

    Raises:
        RootInUse: Another job has taken the root over.
        StorageError: The store has failed. The step may have been removed in part.
    """
    if claim is not None:
        _RETRY.call(claim.confirm_removal)
    if step.state == "incomplete" and not step.objects:
        _remove_folder(backend, step)
        return True
    has_marker = False
    try:
        if not (has_marker := _put_marker(backend, step)) or is_pinned(backend, step.ref):
            return False
    except OutOfSpace:
        # There is no room for the marker. Without a marker, remove only checkpoints, and saves
        # without fragments, which no process can finish.
        if step.state == "incomplete":
            if any(is_fragment(info.name) for info in step.objects):
                return False
        elif is_pinned(backend, step.ref):
            return False
        else:
            # Deleting the manifest makes room for the marker.
            delete_files(backend, [step.ref.manifest])
            with suppress(OutOfSpace):
                has_marker = claim_committed_for_removal(backend, step.ref)
    kept_keys = {step.ref.claim_marker, *_remove_manifest(backend, step, claim)}
    keys = {info.key for info in step.objects}
    if has_marker:  # The listing below would have a manifest that another process has put since
        keys.discard(step.ref.manifest)
    keys.update(_keys_added_since(backend, step.ref, has_marker))
    delete_files(backend, keys - kept_keys)
    discard(backend, _unfinished_in(backend, step))
    if has_marker:
        release_removal(backend, step.ref)
    return True


def _remove_manifest(
    backend: StorageBackend, step: StoredStep, claim: Claim | None
) -> tuple[str, ...]:
    """Delete the manifest of a step, or put a tombstone in its place if a process of another job
    may still put the manifest. Return the keys of the files that must stay.

    If a full store has no room for the tombstone, the manifest is deleted.
    """
    is_remains = step.state == "incomplete" and not step.has_removal_begun
    if claim is not None and claim.may_be_committed(step.ref) and not is_remains:
        with suppress(OutOfSpace):
            replace_by_tombstone(backend, step.ref)
            return (step.ref.manifest,)
    delete_files(backend, [step.ref.manifest])
    return ()


def _remove_folder(backend: StorageBackend, step: StoredStep) -> None:
    """Discard the unfinished writes of a step without files, and remove its folder if it is empty.

    There is no claim marker, so another process may put files and the manifest of the step now.
    These stay.
    """
    discard(backend, step.unfinished_writes)
    # In a store with folders, this also removes an empty folder. No process puts this object.
    delete_files(backend, [step.ref.late_metrics(checksum(b""))])


def _keys_added_since(backend: StorageBackend, ref: StepRef, has_marker: bool) -> list[str]:
    """Return the keys of objects that may have been added to a step since it was listed.

    If this process has put the claim marker (``has_marker``), the result has all objects of the
    step, since another process may have added metrics or copies of files of other nodes. Otherwise
    it has only the added metrics.
    """
    keys = [info.key for info in own_objects(backend, ref)]
    return [key for key in keys if has_marker or is_late_metrics(key.rpartition("/")[2])]


def _unfinished_in(backend: StorageBackend, step: StoredStep) -> Iterable[UnfinishedWrite]:
    """Return the unfinished writes to discard with a step that is being removed.

    An inventory does not list the unfinished writes of a checkpoint. In a store with folders, they
    are listed here, since they would keep the folder from being removed. In other stores,
    ``discard_orphans`` discards them when a job takes the root.
    """
    is_listed = step.state != "committed" or not isinstance(backend, HasRoot)
    return step.unfinished_writes if is_listed else unfinished_of(backend, step.ref)


def _put_marker(backend: StorageBackend, step: StoredStep) -> bool:
    """Put the claim marker that keeps other processes from finishing ``step``.

    Return True if the removal may go on now. Return False if the step has a marker of another kind,
    such as that of a finisher, or if this call has replaced such a marker because it was old. For
    an incomplete step, also return False if the step has a manifest by now.
    """
    put_marker = (
        claim_for_removal
        if step.state == "incomplete" and not step.has_removal_begun
        else claim_committed_for_removal
    )
    # A finisher may have seen its old marker just now. So replace the marker, and leave the removal
    # to a later call.
    if _has_abandoned_marker(step):
        release_marker(backend, step.ref)
        put_marker(backend, step.ref)
        return False
    return put_marker(backend, step.ref)


def discard(backend: StorageBackend, writes: Iterable[UnfinishedWrite]) -> None:
    """Discard the unfinished ``writes``, which frees the space that they take."""
    if isinstance(backend, KeepsUnfinishedWrites):
        for write in writes:
            backend.discard(write)


def discard_orphans(backend: StorageBackend, claim: Claim, refs: Sequence[StepRef]) -> None:
    """Discard the unfinished writes of jobs that are known to have ended.

    In a store with folders, an unfinished write is in the folder of its step. There only those to
    ``refs`` are discarded.

    An unfinished write of any other job is discarded only if its step has no folder and the write
    is so old that no process can still continue it. Unfinished writes of this job stay.

    Raises:
        RootInUse: Another job has taken the root over.
    """
    if isinstance(backend, KeepsUnfinishedWrites):
        prefixes = [f"{ref.folder}/" for ref in refs] if isinstance(backend, HasRoot) else [""]
        for write in [write for prefix in prefixes for write in backend.unfinished_writes(prefix)]:
            folder, _, name = write.key.partition("/")
            if (
                (ref := parse_folder(folder)) is None
                or not is_file_name(name)
                or ref.job == claim.own_job
            ):
                continue
            if claim.is_dead(ref) or (write.abandoned and ref not in claim.listing):
                _RETRY.call(claim.confirm_removal)
                backend.discard(write)


def _has_abandoned_marker(step: StoredStep) -> bool:
    """Return True if a claim marker that blocks the removal of the step is more than a day old.

    The process that put the marker has ended, since no process takes a day from its marker to its
    manifest.
    """
    # For an incomplete step, ``claim_for_removal`` puts an empty marker. So an empty marker there
    # does not block the removal.
    harmless_size = 0 if step.state == "incomplete" else None
    dates = [
        info.modified
        for info in step.objects
        if info.key == step.ref.claim_marker
        and info.size != harmless_size
        and not is_removal_marker(info.size)
    ]
    return any(date is not None and time.time() - date > GRACE_SECONDS for date in dates)
