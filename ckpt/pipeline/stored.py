"""An image that lies on a tier, to be written to the next one: its memory may be gone."""

from __future__ import annotations

import mmap
import threading
from bisect import bisect_right
from collections.abc import Sequence
from itertools import accumulate
from typing import Final

from ckpt.errors import CkptError
from ckpt.pipeline.codec import decode
from ckpt.pipeline.retry import RetryPolicy
from ckpt.storage.api import StorageBackend

_KEPT_CHUNKS: Final = 4


class StoredImage:
    """Bytes read as they are asked for; a `Source`. Whoever writes it compares the chunk table with the one it knows.

    Threads: any.
    """

    path = None

    def __init__(self, backend: StorageBackend, key: str, size: int, retry: RetryPolicy) -> None:
        self._backend, self._key, self._retry = backend, key, retry
        self.size = self.capacity = size

    def view(self, start: int, end: int) -> memoryview:
        return self._read(start, end)

    def _read(self, start: int, end: int) -> memoryview:
        memory = memoryview(mmap.mmap(-1, max(1, end - start)))[: end - start]
        self._retry.call(lambda: self._backend.read_into(self._key, start, memory))
        return memory

    def written(self, start: int, end: int) -> None:
        """Each view has memory of its own."""

    def hashed(self, start: int, end: int) -> None:
        """Each view has memory of its own."""

    def lost(self, error: CkptError) -> None:
        """Each view has memory of its own."""


class EncodedImage(StoredImage):
    """As ``StoredImage``, of a file whose chunks lie there encoded. The last few chunks stay decoded: parts that are written need not begin where chunks do.

    Args:
        chunks: Bytes of each chunk, as it was staged.
        lengths: Bytes of each chunk, as it lies there.
    """

    def __init__(
        self,
        backend: StorageBackend,
        key: str,
        chunks: Sequence[int],
        lengths: Sequence[int],
        retry: RetryPolicy,
    ) -> None:
        super().__init__(backend, key, sum(chunks), retry)
        self._starts = list(accumulate(chunks, initial=0))
        self._places = list(accumulate(lengths, initial=0))
        self._lock = threading.Lock()
        self._one_of_them = [threading.Lock() for _ in range(_KEPT_CHUNKS)]
        self._decoded: dict[int, memoryview] = {}

    def view(self, start: int, end: int) -> memoryview:
        first = bisect_right(self._starts, start) - 1
        if (self._starts[first], self._starts[first + 1]) == (start, end):
            return self._chunk(first)
        memory = memoryview(mmap.mmap(-1, max(1, end - start)))[: end - start]
        done, index = start, first
        while done < end:
            begin, stop = self._starts[index], min(end, self._starts[index + 1])
            memory[done - start : stop - start] = self._chunk(index)[done - begin : stop - begin]
            done, index = stop, index + 1
        return memory

    def _chunk(self, index: int) -> memoryview:
        with self._one_of_them[index % len(self._one_of_them)]:  # two parts of a chunk are asked for at once
            found = self._decoded.get(index)
            if found is None:
                found = self._decode(index)
                with self._lock:
                    self._decoded[index] = found
                    while len(self._decoded) > _KEPT_CHUNKS:
                        del self._decoded[next(iter(self._decoded))]
            return found

    def _decode(self, index: int) -> memoryview:
        size = self._starts[index + 1] - self._starts[index]
        place, length = self._places[index], self._places[index + 1] - self._places[index]
        data = self._read(place, place + length)
        if length == size:
            return data
        chunk = memoryview(mmap.mmap(-1, size))
        decode(data, chunk, key=self._key, offset=place)
        return chunk
