"""A restore plan -> bytes in place, each chunk verified before it counts.

A chunk whose target is one piece of memory is read straight into it, if it is worth a request of its own. Small chunks that are neighbours in their file are one request into a buffer, and so is a
chunk of which only parts are wanted or whose target lies elsewhere: they are verified there and then placed. Memory beside the target: a buffer of ``RUN_BYTES`` a thread, or of the largest
chunk that cannot go straight.
"""

from __future__ import annotations

import threading
from collections.abc import Callable
from functools import partial
from typing import Final, Protocol

from ckpt.model.checksum import verify
from ckpt.pipeline.retry import RetryPolicy
from ckpt.pipeline.workers import Workers
from ckpt.plan.coalesce import Run, coalesce
from ckpt.plan.restore import ChunkRead, RestorePlan
from ckpt.storage.api import StorageBackend, aligned_memory

RUN_BYTES: Final = 2 << 20
"""What small chunks are joined to on a disk; larger requests gain nothing there, and the first touch of their buffer costs as much as reading."""
ALONE_BYTES: Final = 512 << 10
"""A chunk of this size is a request of its own on a disk."""
FAR_RUN_BYTES: Final = 16 << 20
"""Both, for a store that asks for no alignment: there each request is a round trip."""
GAP_BYTES: Final = 64 << 10
"""Unwanted bytes worth reading to save a request."""


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
    near = backend.capabilities.alignment > 1
    runs = coalesce(
        plan.reads,
        most_bytes=RUN_BYTES if near else FAR_RUN_BYTES,
        gap_bytes=GAP_BYTES,
        alone_bytes=ALONE_BYTES if near else FAR_RUN_BYTES,
    )
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
        if not self._read_straight(run, key):
            self._read_buffered(run, key, size)
        self._on_bytes(run.nbytes)

    def _read_straight(self, run: Run, key: str) -> bool:
        if len(run.reads) != 1 or (self._alignment > 1 and run.nbytes < ALONE_BYTES):
            return False
        read = run.reads[0]
        memory = self._sink.direct(read)
        if memory is None:
            return False
        self._retry.call(partial(self._backend.read_into, key, read.offset, memory))
        verify(memory, read.checksum, key=key, offset=read.offset)
        return True

    def _read_buffered(self, run: Run, key: str, size: int) -> None:
        start = run.offset // self._alignment * self._alignment
        end = min(size, -(-(run.offset + run.nbytes) // self._alignment) * self._alignment)
        buffer = self._buffers.get(end - start)
        self._retry.call(partial(self._backend.read_into, key, start, buffer))
        for read in run.reads:
            data = buffer[read.offset - start :][: read.nbytes]
            verify(data, read.checksum, key=key, offset=read.offset)
            self._sink.place(read, data)


class _Buffers(threading.local):
    """A buffer per thread, in memory as direct reads like it."""

    def __init__(self) -> None:
        self._memory = memoryview(b"")

    def get(self, nbytes: int) -> memoryview:
        if self._memory.nbytes < nbytes:
            self._memory = aligned_memory(max(nbytes, RUN_BYTES))
        return self._memory[:nbytes]
