"""An image that lies on a tier, to be written to the next one: its memory may be gone."""

from __future__ import annotations

import mmap

from ckpt.errors import CkptError
from ckpt.pipeline.retry import RetryPolicy
from ckpt.storage.api import StorageBackend


class StoredImage:
    """Bytes read as they are asked for; a `Source`. Whoever writes it compares the chunk table with the one it knows.

    Threads: any.
    """

    path = None

    def __init__(self, backend: StorageBackend, key: str, size: int, retry: RetryPolicy) -> None:
        self._backend, self._key, self._retry = backend, key, retry
        self.size = self.capacity = size

    def view(self, start: int, end: int) -> memoryview:
        memory = memoryview(mmap.mmap(-1, max(1, end - start)))[: end - start]
        self._retry.call(lambda: self._backend.read_into(self._key, start, memory))
        return memory

    def written(self, start: int, end: int) -> None:
        """Each view has memory of its own."""

    def hashed(self, start: int, end: int) -> None:
        """Each view has memory of its own."""

    def lost(self, error: CkptError) -> None:
        """Each view has memory of its own."""
