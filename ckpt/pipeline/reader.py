"""A restore plan -> bytes in place, each chunk verified before it counts.

Runs of neighbouring chunks are one request. On a store that asks for no alignment, a chunk whose target is one piece of memory is read straight into it. Everything else passes through
an aligned buffer that each thread keeps: on a local disk that is faster than it sounds, since direct reads need aligned memory and offsets, which tensors do not have, and the copy out of a
warm buffer costs a tenth of the page cache. Memory beside the target: a buffer of ``RUN_BYTES`` a thread.
"""

from __future__ import annotations

import mmap
import threading
from collections.abc import Callable
from functools import partial
from typing import Final, Protocol

from ckpt.model.checksum import verify
from ckpt.pipeline.retry import RetryPolicy
from ckpt.pipeline.workers import Workers
from ckpt.plan.coalesce import Run, coalesce
from ckpt.plan.restore import ChunkRead, RestorePlan
from ckpt.storage.api import StorageBackend

RUN_BYTES: Final = 16 << 20
GAP_BYTES: Final = 64 << 10
"""Unwanted bytes worth reading to save a request."""
_SLACK_BYTES: Final = 1 << 20


class Sink(Protocol):
    """Where chunks go. Called from several threads, for different chunks."""

    def direct(self, read: ChunkRead) -> memoryview | None:
        """The target's own memory for exactly this chunk, or None if it is not one piece there."""
        ...

    def place(self, read: ChunkRead, data: memoryview) -> None:
        """Copy the wanted parts of a verified chunk to the target. ``data`` is only lent for the call."""
        ...


def read_plan(
    plan: RestorePlan,
    sink: Sink,
    *,
    backend: StorageBackend,
    file_of: Callable[[int], tuple[str, int]],
    workers: Workers,
    retry: RetryPolicy,
    on_bytes: Callable[[int], None],
) -> None:
    """Execute ``plan``. ``file_of`` gives the key and the size of a rank's file.

    Raises:
        ChecksumMismatch: A chunk is not what was saved. Targets may have been overwritten in part.
        StorageError: A file is missing, short or unreadable.
    """
    runs = coalesce(plan.reads, most_bytes=RUN_BYTES, gap_bytes=GAP_BYTES)
    job = _Job(sink, backend, retry, on_bytes)
    workers.run_all(partial(job.read, run, *file_of(run.rank)) for run in runs)


class _Job:
    def __init__(
        self, sink: Sink, backend: StorageBackend, retry: RetryPolicy, on_bytes: Callable[[int], None]
    ) -> None:
        self._sink, self._backend, self._retry, self._on_bytes = sink, backend, retry, on_bytes
        self._alignment = backend.capabilities.alignment
        self._buffers = _Buffers()

    def read(self, run: Run, key: str, size: int) -> None:
        if self._alignment > 1 or not self._read_direct(run, key):
            self._read_buffered(run, key, size)
        self._on_bytes(run.nbytes)

    def _read_direct(self, run: Run, key: str) -> bool:
        read = run.reads[0]
        memory = self._sink.direct(read) if len(run.reads) == 1 else None
        if memory is None:
            return False
        self._retry.call(lambda: self._backend.read_into(key, read.offset, memory))
        verify(memory, read.checksum, key=key, offset=read.offset)
        return True

    def _read_buffered(self, run: Run, key: str, size: int) -> None:
        start = run.offset // self._alignment * self._alignment
        end = min(size, -(-(run.offset + run.nbytes) // self._alignment) * self._alignment)
        buffer = self._buffers.get(end - start)
        self._retry.call(lambda: self._backend.read_into(key, start, buffer))
        for read in run.reads:
            data = buffer[read.offset - start :][: read.nbytes]
            verify(data, read.checksum, key=key, offset=read.offset)
            self._sink.place(read, data)


class _Buffers(threading.local):
    """A page-aligned buffer per thread, as direct I/O wants it."""

    def __init__(self) -> None:
        self._map: mmap.mmap | None = None

    def get(self, nbytes: int) -> memoryview:
        if self._map is None or len(self._map) < nbytes:
            self._map = mmap.mmap(-1, max(nbytes, RUN_BYTES + _SLACK_BYTES))
        return memoryview(self._map)[:nbytes]
