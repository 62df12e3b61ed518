"""The bytes that the steps of a tier take. No manifest is read."""

from __future__ import annotations

from ckpt.catalog.step_listing import list_root, objects_by_one_listing, own_objects, unfinished_of
from ckpt.model.keys import StepRef
from ckpt.storage.api import StorageBackend


class TierUsage:
    """The bytes that the steps of a tier take.

    Steps with a manifest are remembered from one call to the next, since they hardly change. A call
    costs a listing of the root and one of each other step, or on an object store one of all objects
    if many steps are new.

    Thread safety: one thread at a time.
    """

    def __init__(self, backend: StorageBackend) -> None:
        self._backend = backend
        self._nbytes: dict[StepRef, int] = {}

    def total(self) -> int:
        """Return the size of all files of all attempts at steps, with unfinished writes to those
        that have no manifest.

        Raises:
            StorageError: The tier cannot be listed.
        """
        refs = list_root(self._backend).refs
        listing = objects_by_one_listing(
            self._backend, [ref for ref in refs if ref not in self._nbytes]
        )
        sizes: dict[StepRef, int] = {}
        begun_bytes = 0  # Of the steps without a manifest
        for ref in refs:
            if ref in self._nbytes:
                sizes[ref] = self._nbytes[ref]
                continue
            objects = listing.get(ref) or own_objects(self._backend, ref)
            nbytes = sum(info.size for info in objects)
            if any(info.key == ref.manifest for info in objects):
                sizes[ref] = nbytes
            else:
                writes = unfinished_of(self._backend, ref)
                begun_bytes += nbytes + sum(write.size for write in writes)
        self._nbytes = sizes
        return sum(sizes.values()) + begun_bytes
