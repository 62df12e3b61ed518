"""A restore plan -> bytes in place, each chunk verified before it counts.

Runs of neighbouring chunks are one request. A chunk whose target is one piece of memory is read straight into it; everything else passes through a
buffer that each thread keeps. Memory beside the target: one buffer of ``RUN_BYTES`` a thread.
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
    key_of: Callable[[int], str],
    workers: Workers,
    retry: RetryPolicy,
    on_bytes: Callable[[int], None],
) -> None:
    """Execute ``plan``. ``key_of`` gives the key of a rank's file.

    Raises:
        ChecksumMismatch: A chunk is not what was saved. Targets may have been overwritten in part.
        StorageError: A file is missing, short or unreadable.
    """
    buffers = _Buffers()
    runs = coalesce(plan.reads, most_bytes=RUN_BYTES, gap_bytes=GAP_BYTES)
    workers.run_all(
        partial(_read_run, run, sink, backend, key_of(run.rank), retry, buffers, on_bytes) for run in runs
    )


class _Buffers(threading.local):
    """A page-aligned buffer per thread, as direct I/O wants it."""

    def __init__(self) -> None:
        self._map: mmap.mmap | None = None

    def get(self, nbytes: int) -> memoryview:
        if self._map is None or len(self._map) < nbytes:
            self._map = mmap.mmap(-1, max(nbytes, RUN_BYTES))
        return memoryview(self._map)[:nbytes]


def _read_run(
    run: Run,
    sink: Sink,
    backend: StorageBackend,
    key: str,
    retry: RetryPolicy,
    buffers: _Buffers,
    on_bytes: Callable[[int], None],
) -> None:
    if len(run.reads) == 1 and (memory := sink.direct(run.reads[0])) is not None:
        read = run.reads[0]
        retry.call(lambda: backend.read_into(key, read.offset, memory))
        verify(memory, read.checksum, key=key, offset=read.offset)
    else:
        buffer = buffers.get(run.nbytes)
        retry.call(lambda: backend.read_into(key, run.offset, buffer))
        for read in run.reads:
            data = buffer[read.offset - run.offset :][: read.nbytes]
            verify(data, read.checksum, key=key, offset=read.offset)
            sink.place(read, data)
    on_bytes(run.nbytes)
