"""The writes that decide whether a step is a checkpoint: putting its manifest, and deleting its
files. Every process that does one of them calls this module.

A *tombstone* takes the place of the manifest of a step that was removed. A *claim marker* is an
object in the folder of a step. It decides whether a process may finish the commit of the step, or
another one may remove the step.
"""

from __future__ import annotations

from collections.abc import Iterable

from ckpt.coordination.tombstone import TOMBSTONE
from ckpt.errors import CommitError, IntegrityError, ManifestCorrupt, ObjectExists, StorageError
from ckpt.model.keys import MANIFEST, is_fragment
from ckpt.storage.api import StorageBackend, read_record


def put_manifest(
    backend: StorageBackend, key: str, data: bytes, *, replaces_damaged: bool = False
) -> None:
    """Put the manifest ``key``, which makes a step a checkpoint, if it is absent.

    It is no error if the manifest exists with the same bytes. The reply to an earlier put may have
    been lost, or two ranks may have merged the same fragments.

    Args:
        backend: The store.
        key: The key of the manifest.
        data: The bytes of the manifest.
        replaces_damaged: Whether the manifest takes the place of a damaged one. The caller must
            then have put the claim marker of a finisher.

    Raises:
        CommitError: The manifest exists with other bytes, or as a tombstone.
        StorageError: The put has failed, and the manifest cannot be read.
    """

    def check_present(present_bytes: bytes) -> None:
        if present_bytes == TOMBSTONE:
            raise CommitError(f"{key!r} was removed by another job, which has taken the root over")
        if present_bytes != data:
            raise ManifestCorrupt(key, "it has other content")

    try:
        backend.put(key, [data], if_absent=not replaces_damaged)
    except StorageError as error:
        if replaces_damaged:
            raise
        try:
            read_record(backend, key, check_present, limit=len(data))
        except StorageError:
            raise error from None
        except IntegrityError:
            raise CommitError(f"{key!r} was already there with other content") from (
                None if isinstance(error, ObjectExists) else error
            )


def delete_files(backend: StorageBackend, keys: Iterable[str]) -> None:
    """Delete files of one step: first its manifest, then fragments, then other files.

    Without its manifest the step is no checkpoint any more. A fragment says that its data file is
    durable, so it does not outlive the data file. If the call is interrupted, what is left obeys
    both rules.

    Raises:
        StorageError: The store has failed. Some files may have been deleted.
    """
    for key in sorted(keys, key=_deletion_order):
        backend.delete(key)


def _deletion_order(key: str) -> int:
    name = key.rpartition("/")[2]
    return 0 if name == MANIFEST else 1 if is_fragment(name) else 2
