"""A restore plan -> bytes in place, each chunk verified before it counts.

Neighbouring chunks are one request. A store that can read into many places at once fills the targets' own memory wherever that is in one piece, and so does any store with a request whose chunks are
neighbours there too. What is left (a part of a chunk, a target that is strided or on a device, chunks of several tensors from a store that has one answer for one request) passes through a buffer, is verified there, and then placed. Memory
beside the target: for each thread a buffer of ``RUN_BYTES``, or of the largest chunk that passes through it.
"""

from __future__ import annotations

import ctypes
import threading
from collections.abc import Callable, Sequence
from functools import partial
from typing import Final, Protocol

from ckpt.codec.byte_planes import decode
from ckpt.model.checksum import verify
from ckpt.pipeline.retry import RetryPolicy
from ckpt.pipeline.workers import Workers
from ckpt.plan.coalesce import Run, coalesce
from ckpt.plan.restore import ChunkRead, RestorePlan
from ckpt.storage.api import ScatterReads, StorageBackend, aligned_memory

RUN_BYTES: Final = 16 << 20
GAP_BYTES: Final = 64 << 10
"""Unwanted bytes worth reading to save a request."""

Guard = Callable[[Run, Callable[[Run], None]], None]
"""Runs the second on the first, and says what becomes of a failure: it may be kept back, and runs of fewer chunks be read instead. Called from several threads."""


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
    guard: Guard = lambda run, read: read(run),
) -> None:
    """Execute ``plan``. ``file_of`` gives the key and the size of a rank's file.

    Raises (unless ``guard`` keeps it back):
        ChecksumMismatch: A chunk is not what was saved. Targets may have been overwritten in part.
        StorageError: A file is missing, short or unreadable.
    """
    runs = coalesce(plan.reads, most_bytes=RUN_BYTES, gap_bytes=GAP_BYTES)
    job = _Job(sink, backend, retry, on_bytes)

    def read(run: Run) -> None:
        job.read(run, *file_of(run.rank))

    workers.run_all(partial(guard, run, read) for run in runs)


class _Job:
    def __init__(
        self, sink: Sink, backend: StorageBackend, retry: RetryPolicy, on_bytes: Callable[[int], None]
    ) -> None:
        self._sink, self._backend, self._retry, self._on_bytes = sink, backend, retry, on_bytes
        self._alignment = backend.capabilities.alignment
        self._buffers, self._decoded = _Buffers(), _Buffers()

    def read(self, run: Run, key: str, size: int) -> None:
        if any(read.encoded_nbytes for read in run.reads):
            self._read_buffered(run, key, size)
        elif isinstance(self._backend, ScatterReads):
            self._read_scattered(run, key, self._backend)
        elif self._alignment > 1 or not self._read_straight(run, key):
            self._read_buffered(run, key, size)
        self._on_bytes(run.nbytes)

    def _read_scattered(self, run: Run, key: str, backend: ScatterReads) -> None:
        """What has no place of its own, and what nobody wants, goes to the buffer, where it lies as in the file."""
        places = [self._sink.direct(read) for read in run.reads]
        straight = sum(place.nbytes for place in places if place is not None)
        phase = run.offset % self._alignment
        buffer = self._buffers.get(phase + run.nbytes)[phase:] if straight < run.nbytes else memoryview(b"")
        outs: list[memoryview] = []
        done = 0
        for read, place in zip(run.reads, places, strict=True):
            if place is not None:
                begin = read.offset - run.offset
                outs += [buffer[done:begin], place] if done < begin else [place]
                done = begin + read.nbytes
        outs += [buffer[done : run.nbytes]] if done < run.nbytes else []
        self._retry.call(partial(backend.read_parts, key, run.offset, joined(outs)))
        for read, place in zip(run.reads, places, strict=True):
            data = buffer[read.offset - run.offset :][: read.nbytes] if place is None else place
            verify(data, read.checksum, key=key, offset=read.offset)
            if place is None:
                self._sink.place(read, data)

    def _read_straight(self, run: Run, key: str) -> bool:
        """If all of it goes to one piece of memory, as chunks of one box do."""
        places: list[memoryview] = []
        for read in run.reads:
            if (place := self._sink.direct(read)) is None:
                return False
            places.append(place)
        memory = joined(places)
        if len(memory) > 1 or memory[0].nbytes < run.nbytes:
            return False
        self._retry.call(partial(self._backend.read_into, key, run.offset, memory[0]))
        for read, place in zip(run.reads, places, strict=True):
            verify(place, read.checksum, key=key, offset=read.offset)
        return True

    def _read_buffered(self, run: Run, key: str, size: int) -> None:
        start = run.offset // self._alignment * self._alignment
        end = min(size, -(-(run.offset + run.nbytes) // self._alignment) * self._alignment)
        buffer = self._buffers.get(end - start)
        self._retry.call(partial(self._backend.read_into, key, start, buffer))
        for read in run.reads:
            data = buffer[read.offset - start :][: read.stored_nbytes]
            if read.encoded_nbytes:
                self._decode(read, key, data)
                continue
            verify(data, read.checksum, key=key, offset=read.offset)
            self._sink.place(read, data)

    def _decode(self, read: ChunkRead, key: str, data: memoryview) -> None:
        """To the target's own memory if that is in one piece there."""
        memory = self._sink.direct(read)
        out = self._decoded.get(read.nbytes) if memory is None else memory
        decode(data, out, key=key, offset=read.offset, digest=read.checksum)
        if memory is None:
            self._sink.place(read, out)


def joined(pieces: Sequence[memoryview]) -> list[memoryview]:
    """Those that follow each other in memory as one: few long pieces are read faster than many short ones. Good as long as ``pieces`` live."""
    spans: list[tuple[int, int]] = []
    for piece in pieces:
        start = ctypes.addressof(ctypes.c_char.from_buffer(piece))
        if spans and sum(spans[-1]) == start:
            spans[-1] = spans[-1][0], spans[-1][1] + piece.nbytes
        else:
            spans.append((start, piece.nbytes))
    if len(spans) == len(pieces):
        return list(pieces)
    return [memoryview((ctypes.c_char * nbytes).from_address(start)).cast("B") for start, nbytes in spans]


class _Buffers(threading.local):
    """A buffer per thread, in memory as direct reads like it."""

    def __init__(self) -> None:
        self._memory = memoryview(b"")

    def get(self, nbytes: int) -> memoryview:
        if self._memory.nbytes < nbytes:
            self._memory = aligned_memory(max(nbytes, RUN_BYTES))
        return self._memory[:nbytes]
