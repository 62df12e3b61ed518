"""The removal of one step, or of an unfinished write, from a tier.

Retention and eviction delete a step only through ``remove``. Manifests go first, so that nothing
torn is ever listed. Three other modules delete files of steps: ``save.slot_steps`` before a slot
is filled again, ``coordination.claim_marker`` after an aborted save, and ``nodes.replica_fetch``
for copies of the files of other nodes.
"""

from __future__ import annotations

import time
from collections.abc import Iterable
from contextlib import suppress
from typing import Final

from ckpt.catalog.index import attempts, own_objects, unfinished_of
from ckpt.catalog.inventory import StoredStep
from ckpt.catalog.pins import is_pinned
from ckpt.coordination.claim_marker import (
    claim_committed_for_removal,
    claim_for_removal,
    is_removal_marker,
    release_marker,
    release_removal,
)
from ckpt.errors import OutOfSpace
from ckpt.model.keys import StepRef, is_file_name, is_fragment, is_late_metrics, parse_folder
from ckpt.pipeline.retry import RetryPolicy
from ckpt.retention.claim import Claim, job_of
from ckpt.retention.policy import GRACE_SECONDS
from ckpt.storage.api import KeepsUnfinished, Rooted, StorageBackend, Unfinished

_RETRY: Final = RetryPolicy()


def remove(backend: StorageBackend, held: StoredStep, claim: Claim | None = None) -> bool:
    """Remove one attempt, if ``claim`` still holds.

    The claim marker is put first. Then the manifest goes, then the files, and the marker last.

    A step that is pinned, or that another process finishes or copies there, stays. In a store with
    folders, an empty folder goes too, with the unfinished writes of a dead process in it. A removal
    that is cut off leaves a checkpoint, or remains that no process can make one again and that the
    next retention removes.

    Returns:
        Whether it is gone.

    Raises:
        RootInUse: The claim does not hold any more.
    """
    if claim is not None:
        _RETRY.call(claim.confirm_removal)
    marked = False
    if held.objects:
        try:
            if not (marked := _put_marker(backend, held)) or is_pinned(backend, held.ref):
                return False
        except OutOfSpace:
            # With no room for the marker, only checkpoints go, and data that no fragment describes.
            if held.state == "incomplete":
                if any(is_fragment(info.key.rpartition("/")[2]) for info in held.objects):
                    return False
            elif is_pinned(backend, held.ref):
                return False
            else:
                # Without the manifest there is room for the marker.
                backend.delete(held.ref.manifest)
                with suppress(OutOfSpace):
                    marked = claim_committed_for_removal(backend, held.ref)
    backend.delete(held.ref.manifest)
    for key in {*(info.key for info in held.objects), *_added_since(backend, held.ref, marked)}:
        if key != held.ref.claim_marker:
            backend.delete(key)
    discard(backend, _unfinished_in(backend, held))
    if marked:
        release_removal(backend, held.ref)
    return True


def _added_since(backend: StorageBackend, ref: StepRef, marked: bool) -> list[str]:
    """Return the keys of what may have come into a step since it was looked at: metrics, and, if
    the claim marker stands, copies of other nodes' files.
    """
    keys = [info.key for info in own_objects(backend, ref)]
    return [key for key in keys if marked or is_late_metrics(key.rpartition("/")[2])]


def _unfinished_in(backend: StorageBackend, held: StoredStep) -> Iterable[Unfinished]:
    """Return the unfinished writes in the folder of a step that is being removed.

    Those of a checkpoint were not listed with it. They keep a folder from being empty. A store
    without folders shows them to the job that takes the root.
    """
    listed = held.state != "committed" or not isinstance(backend, Rooted)
    return held.unfinished if listed else unfinished_of(backend, held.ref)


def _put_marker(backend: StorageBackend, held: StoredStep) -> bool:
    """Put the claim marker that lets no process finish ``held``. Returns whether it stands."""
    put = (
        claim_for_removal
        if held.state == "incomplete" and not held.is_cut
        else claim_committed_for_removal
    )
    # A finisher may have read the old marker, so the removal waits for a later call.
    if _is_abandoned(held):
        release_marker(backend, held.ref)
        put(backend, held.ref)
        return False
    return put(backend, held.ref)


def discard(backend: StorageBackend, found: Iterable[Unfinished]) -> None:
    """Free what unfinished writes take."""
    if isinstance(backend, KeepsUnfinished):
        for one in found:
            backend.discard(one)


def discard_left(backend: StorageBackend, claim: Claim) -> None:
    """Discard the unfinished writes of jobs that have ended.

    Of other jobs, those are discarded that belong to no folder and that no process can still
    continue.
    """
    if isinstance(backend, KeepsUnfinished):
        shown = attempts(backend)
        # In a store with folders, each write is in the folder of its step; others are not ours.
        prefixes = [f"{ref.folder}/" for ref in shown] if isinstance(backend, Rooted) else [""]
        for one in [one for prefix in prefixes for one in backend.unfinished(prefix)]:
            folder, _, name = one.key.partition("/")
            if (
                (ref := parse_folder(folder)) is None
                or not is_file_name(name)
                or job_of(ref) == claim.own
            ):
                continue
            if claim.is_dead(ref) or (one.abandoned and ref not in shown):
                _RETRY.call(claim.confirm_removal)
                backend.discard(one)


def _is_abandoned(held: StoredStep) -> bool:
    """Return True if the claim marker of a process that is long gone is in the way.

    No process takes a day from putting its marker to putting its manifest.
    """
    # Ranks that clear an aborted save away use empty markers.
    ours = 0 if held.state == "incomplete" else None
    dates = [
        info.modified
        for info in held.objects
        if info.key == held.ref.claim_marker
        and info.size != ours
        and not is_removal_marker(info.size)
    ]
    return any(date is not None and time.time() - date > GRACE_SECONDS for date in dates)
