"""Checks that the files of an adopted step are still there.

An *adopted* step is a checkpoint whose data files are files of another program, outside of its
folder. Its manifest has the *location* of each file, which is a path.
"""

from __future__ import annotations

from collections.abc import Mapping
from functools import partial

from ckpt.errors import (
    FileDamaged,
    ForeignFileMismatch,
    LinkRefused,
    ManifestCorrupt,
    ObjectNotFound,
)
from ckpt.model.keys import StepRef
from ckpt.pipeline.retry import RetryPolicy
from ckpt.storage.api import StorageBackend
from ckpt.storage.outside_files import LocatedStore, as_foreign_mismatch


def check_locations(
    backend: StorageBackend, ref: StepRef, sizes: Mapping[str, int], retry: RetryPolicy
) -> None:
    """Check that the files of an adopted step are there, and not cut. ``sizes`` has the size of
    each by its location.

    Raises:
        ManifestCorrupt: A file is gone or was cut.
        StorageError: A file cannot be examined.
    """
    store = LocatedStore(backend.url)
    for location, expected_size in sizes.items():
        try:
            size = retry.call(partial(store.head, location)).size
            if size >= expected_size:
                continue
            damage = FileDamaged(location, size, expected_size)
            mismatch = as_foreign_mismatch(damage, location)
        except (ObjectNotFound, LinkRefused) as error:
            mismatch = as_foreign_mismatch(error, location)
        text = mismatch.detail if isinstance(mismatch, ForeignFileMismatch) else str(mismatch)
        raise ManifestCorrupt(ref.manifest, f"{location!r} {text}")
