"""A step at a place where its files are encoded otherwise than at the source of a copy."""

from __future__ import annotations

from functools import partial

from ckpt.catalog.index import own_objects, read_manifest
from ckpt.errors import IntegrityError, ObjectNotFound
from ckpt.model.encoding import MAX_RECORD_BYTES
from ckpt.model.keys import StepRef
from ckpt.model.manifest import Manifest
from ckpt.pipeline.retry import RetryPolicy
from ckpt.plan.rebase import same_chunks
from ckpt.storage.api import StorageBackend, read_object


def encoded_otherwise(
    destination: StorageBackend, ref: StepRef, manifest: Manifest, packed: bytes, retry: RetryPolicy
) -> Manifest | None:
    """The manifest of a destination that has the same chunks, encoded otherwise; None if it has not."""
    try:
        there = retry.call(partial(read_object, destination, ref.manifest, limit=MAX_RECORD_BYTES))
        old = None if there == packed else read_manifest(destination, ref, retry=retry)
    except (ObjectNotFound, IntegrityError):
        return None
    return old if old is not None and old.encoded != manifest.encoded and same_chunks(old, manifest) else None


def clear_unnamed(destination: StorageBackend, ref: StepRef, manifest: Manifest, retry: RetryPolicy) -> None:
    """Remove what lies beside the files of a step that was just committed: those of another encoding."""
    names = [*(file.name for file in manifest.files), *(part.name for part in manifest.fragments)]
    named = {ref.manifest, *map(ref.key, names)}
    for info in own_objects(destination, ref):
        if info.key not in named:
            retry.call(partial(destination.delete, info.key))
