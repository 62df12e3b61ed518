"""An image that lies on a tier, to be written to the next one: its memory may be gone."""

from __future__ import annotations

import threading
from bisect import bisect_right
from collections.abc import Sequence
from itertools import accumulate
from typing import Final

from ckpt.codec.byte_planes import decode
from ckpt.errors import CkptError
from ckpt.model.checksum import verify
from ckpt.model.manifest import Chunk
from ckpt.pipeline.retry import RetryPolicy
from ckpt.storage.api import StorageBackend, fresh_memory

_KEPT_CHUNKS: Final = 4
_RUN_BYTES: Final = 16 << 20


class StoredImage:
    """A `Source` whose chunks are read when they are asked for, and verified before anybody sees a byte of them. The last few stay in memory: parts that are written need not
    begin where chunks do.

    Threads: any.

    Args:
        chunks: The chunk table of the image.
        lengths: Bytes of each chunk, as it lies there: one that is shorter than it was is encoded.
    """

    path = None

    def __init__(
        self,
        backend: StorageBackend,
        key: str,
        chunks: Sequence[Chunk],
        lengths: Sequence[int],
        retry: RetryPolicy,
    ) -> None:
        self._backend, self._key, self._retry, self._chunks = backend, key, retry, chunks
        self._starts = list(accumulate((chunk.nbytes for chunk in chunks), initial=0))
        self._places = list(accumulate(lengths, initial=0))
        self.size = self.capacity = self._starts[-1]
        self._lock = threading.Lock()
        self._one_of_them = [threading.Lock() for _ in range(_KEPT_CHUNKS)]
        self._kept: dict[int, memoryview] = {}

    def view(self, start: int, end: int) -> memoryview:
        """Those bytes. Raises ``ChecksumMismatch`` if they are not what was staged."""
        first = bisect_right(self._starts, start) - 1
        if self._starts[first + 1] >= end:
            return self._chunk(first)[start - self._starts[first] : end - self._starts[first]]
        memory = fresh_memory(end - start)
        done, index = start, first
        while done < end:
            begin, after = self._starts[index], index + 1
            if done == begin:  # chunks that are wanted whole come by requests as large as ever
                far = min(end, begin + _RUN_BYTES)
                after = max(after, bisect_right(self._starts, far) - 1)
            stop = min(end, self._starts[after])
            if after - index > 1:
                self._read_run(index, after, memory[done - start : stop - start])
            else:
                memory[done - start : stop - start] = self._chunk(index)[done - begin : stop - begin]
            done, index = stop, after
        return memory

    def written(self, start: int, end: int) -> None:
        """Each chunk has memory of its own."""

    def hashed(self, start: int, end: int) -> None:
        """Each chunk has memory of its own."""

    def lost(self, error: CkptError) -> None:
        """Each chunk has memory of its own."""

    def _chunk(self, index: int) -> memoryview:
        with self._one_of_them[index % len(self._one_of_them)]:  # two parts of a chunk are asked for at once
            found = self._kept.get(index)
            if found is None:
                found = self._read(index)
                with self._lock:
                    self._kept[index] = found
                    while len(self._kept) > _KEPT_CHUNKS:
                        del self._kept[next(iter(self._kept))]
            return found

    def _read(self, index: int) -> memoryview:
        raw = fresh_memory(self._chunks[index].nbytes)
        self._read_run(index, index + 1, raw)
        return raw

    def _read_run(self, first: int, end: int, out: memoryview) -> None:
        """Chunks ``first`` to ``end`` by one request, to ``out``, which is of their size."""
        place = self._places[first]
        nbytes = self._places[end] - place
        data = out if nbytes == out.nbytes else fresh_memory(nbytes)
        self._retry.call(lambda: self._backend.read_into(self._key, place, data))
        for index in range(first, end):
            chunk, offset = self._chunks[index], self._places[index]
            piece = data[offset - place : self._places[index + 1] - place]
            memory = out[self._starts[index] - self._starts[first] :][: chunk.nbytes]
            if piece.nbytes < chunk.nbytes:
                decode(piece, memory, key=self._key, offset=offset, digest=chunk.checksum)
                continue
            verify(piece, chunk.checksum, key=self._key, offset=offset)
            if data is not out:
                memory[:] = piece
