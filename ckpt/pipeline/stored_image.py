"""An image that is read from a file on a tier, for a copy to another tier. The copy does not need
the buffer that held the image during the save.

An *image* is the bytes of a rank's file as they were before any encoding. A *sink* is the memory
that chunks are read into.
"""

from __future__ import annotations

import threading
from bisect import bisect_right
from collections.abc import Callable, Sequence
from itertools import accumulate
from typing import Final, Self

from ckpt.errors import CkptError
from ckpt.model.manifest import StoredFile
from ckpt.pipeline.chunk_reader import BytesSink, ChunkReader, Sink, runs_of
from ckpt.pipeline.retry import RetryPolicy
from ckpt.plan.restore import ChunkRead, chunks_of
from ckpt.storage.api import StorageBackend, fresh_memory

_LOCK_COUNT: Final = 16  # Chunks with the same index modulo this number share a lock

Read = Callable[[Sequence[ChunkRead], Sink], object]
"""A function that reads consecutive chunks into a sink, and raises if one of them is not intact.

Any thread may call the function.
"""


class StoredImage:
    """A `Source` that reads and verifies each chunk of a file when ``view`` is first called for
    bytes of the chunk.

    The parts of an upload need not begin where chunks begin. So if ``view`` returns only a part of
    a chunk, the whole chunk stays in memory until ``view`` has returned all its bytes.

    ``_starts`` are the offsets of the chunks in the image, followed by its size. ``_cache`` has the
    chunks that ``view`` has returned only in part. ``_locks`` keep two threads from reading the
    same chunk.

    Thread safety: any thread may call all methods.

    Args:
        chunks: All chunks of the file (see ``plan.restore.chunks_of``).
        read: Reads and verifies chunks of the file.
    """

    path = None
    rereadable = True
    resident_bytes = 0

    def __init__(self, chunks: Sequence[ChunkRead], read: Read) -> None:
        self._chunks, self._read = chunks, read
        self.lengths = [chunk.box.shape[0] for chunk in chunks]
        self._starts = list(accumulate(self.lengths, initial=0))
        # Each chunk has memory of its own, so a part of an upload may be as large as the image.
        self.size = self.capacity = self._starts[-1]
        self._locks = [threading.Lock() for _ in range(_LOCK_COUNT)]
        self._cache: dict[int, tuple[memoryview, int]] = {}
        """The chunks in memory, by index: the bytes of the chunk, and how many of them ``view`` has
        not returned yet.
        """

    @classmethod
    def of(cls, backend: StorageBackend, file: StoredFile, retry: RetryPolicy) -> Self:
        """Return the image that ``file`` on the store of ``backend`` holds."""
        reader = ChunkReader(backend, retry)

        def read(reads: Sequence[ChunkRead], sink: Sink) -> None:
            for run in runs_of(reads):
                for _missed_chunk, error in reader.read(run, file, sink):
                    raise error

        return cls(chunks_of(file), read)

    def view(self, start: int, end: int) -> memoryview:
        """Return the bytes of the image from ``start`` to ``end``.

        Raises:
            ChecksumMismatch: A chunk in that range is not what was saved.
            StorageError: A chunk in that range cannot be read.
        """
        starts = self._starts
        first_index, last_index = bisect_right(starts, start) - 1, bisect_right(starts, end) - 1
        if end <= starts[first_index + 1]:
            return self._part(first_index, start, end)
        memory = fresh_memory(end - start)
        if start > starts[first_index]:
            memory[: starts[first_index + 1] - start] = self._part(
                first_index, start, starts[first_index + 1]
            )
            first_index += 1
        if first_index < last_index:
            whole = memory[starts[first_index] - start : starts[last_index] - start]
            self._read(self._chunks[first_index:last_index], BytesSink(whole, starts[first_index]))
        if end > starts[last_index]:
            memory[starts[last_index] - start :] = self._part(last_index, starts[last_index], end)
        return memory

    def parts(self, start: int, end: int) -> Sequence[memoryview]:
        """Return the bytes as one part. Raises the same errors as ``view``."""
        return [self.view(start, end)]

    def note_written(self, start: int, end: int) -> None:
        """Do nothing, since each chunk has separate memory that nothing overwrites."""

    def note_hashed(self, start: int, end: int) -> None:
        """Do nothing, since each chunk has separate memory that nothing overwrites."""

    def note_loss(self, error: CkptError) -> None:
        """Do nothing, since each chunk has separate memory that nothing overwrites."""

    def _part(self, index: int, start: int, end: int) -> memoryview:
        """Return the bytes from ``start`` to ``end``, which belong to the chunk ``index``."""
        chunk_start = self._starts[index]
        # Two threads may ask for parts of one chunk at once.
        with self._locks[index % _LOCK_COUNT]:
            memory, unread_bytes = self._cache.pop(index, (None, self.lengths[index]))
            if memory is None:
                memory = fresh_memory(self.lengths[index])
                self._read(self._chunks[index : index + 1], BytesSink(memory, chunk_start))
            if (unread_bytes := unread_bytes - (end - start)) > 0:
                self._cache[index] = memory, unread_bytes
        return memory[start - chunk_start : end - chunk_start]
