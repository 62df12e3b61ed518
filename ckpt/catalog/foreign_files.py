"""Looks whether the files of other programs that a step consists of, or refers to, are there."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from functools import partial

from ckpt.errors import (
    FileDamaged,
    ForeignFileMismatch,
    LinkRefused,
    ManifestCorrupt,
    ObjectNotFound,
)
from ckpt.model.keys import StepRef, parse_base
from ckpt.model.manifest import Increment
from ckpt.pipeline.retry import RetryPolicy
from ckpt.storage.api import StorageBackend
from ckpt.storage.locations import (
    AdoptedBaseStore,
    LocatedStore,
    as_foreign_mismatch,
    root_at,
)


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
            change = as_foreign_mismatch(damage, location)
        except (ObjectNotFound, LinkRefused) as error:
            change = as_foreign_mismatch(error, location)
        text = change.detail if isinstance(change, ForeignFileMismatch) else str(change)
        raise ManifestCorrupt(ref.manifest, f"{location!r} {text}")


def fault_of_bases(
    backend: StorageBackend, increments: Iterable[Increment], retry: RetryPolicy
) -> str:
    """Return what is wrong with the files of other programs that increments refer to; empty if they
    are there. Raises ``StorageError`` if a file cannot be examined.
    """
    for increment in increments:
        base = parse_base(increment.base)
        if base is None or increment.adoption is None:
            continue
        url = root_at(backend, base.root).url
        store = AdoptedBaseStore(url, base.root, increment.adoption)
        try:
            retry.call(partial(store.head, increment.base))
        except ForeignFileMismatch as error:
            return f"{error.key!r} {error.detail}"
    return ""
