"""The bytes of chunks, each verified before it counts: under restore, verify, read-through, copies
between tiers and export.

Neighbouring chunks are one request. A store that can read into many places at once fills the
targets' own memory wherever that is in one piece. Any other store does so if the chunks of a
request are neighbours in that memory, too. What is left (a part of a chunk, a target that is
strided or on a device, chunks of several tensors from a store that has one answer for one request)
passes through a buffer, is verified there, and then placed. Memory beside the target: for each
thread a buffer of ``RUN_BYTES``, or of the largest chunk that passes through it.
"""

from __future__ import annotations

import ctypes
import threading
from collections.abc import Callable, Iterable, Mapping, Sequence
from functools import partial
from typing import Final, Protocol

from ckpt.codec.registry import codec_named
from ckpt.errors import ChecksumMismatch
from ckpt.model.checksum import checksum, verify
from ckpt.model.manifest import StoredFile
from ckpt.pipeline.retry import RetryPolicy
from ckpt.pipeline.workers import Workers
from ckpt.plan.coalesce import Run, coalesce
from ckpt.plan.fallback import Reach, reach_of
from ckpt.plan.restore import ChunkRead, RestorePlan
from ckpt.storage.api import ScatterReads, StorageBackend, aligned_memory

RUN_BYTES: Final = 16 << 20
GAP_BYTES: Final = 64 << 10
"""Unwanted bytes worth reading to save a request."""

Missed = list[tuple[ChunkRead, Exception]]
"""Chunks that a store does not have intact, and what is wrong with each."""

OnProven = Callable[[ChunkRead, memoryview], None]
"""Called with each chunk that is intact, and its raw bytes; from several threads.

The memory is only lent for the call.
"""


class Sink(Protocol):
    """The targets of chunks.

    Thread safety:
        Its methods are called from several threads, for different chunks.
    """

    def direct(self, read: ChunkRead) -> memoryview | None:
        """Return the target's own memory for exactly this chunk, or None if it is not one piece
        there.
        """
        ...

    def place(self, read: ChunkRead, data: memoryview) -> None:
        """Copy the wanted parts of a verified chunk to the target.

        ``data`` is only lent for the call.
        """
        ...


class BytesSink:
    """Copies the bytes of an image or a file (see ``plan.restore.chunks_of``) into memory that
    begins at offset ``start``.
    """

    def __init__(self, memory: memoryview, start: int) -> None:
        self._memory, self._start = memory, start

    def direct(self, read: ChunkRead) -> memoryview:
        """Return the place of the chunk."""
        begin = read.box.offsets[0] - self._start
        return self._memory[begin : begin + read.box.shape[0]]

    def place(self, read: ChunkRead, data: memoryview) -> None:
        """Copy it there."""
        self.direct(read)[:] = data


def runs_of(reads: Iterable[ChunkRead]) -> list[Run]:
    """Return the requests for ``reads``, which are in file order."""
    return coalesce(reads, most_bytes=RUN_BYTES, gap_bytes=GAP_BYTES)


def read_plan(
    plan: RestorePlan,
    sink: Sink,
    *,
    reader: ChunkReader,
    files: Mapping[int, StoredFile],
    workers: Workers,
    on_bytes: Callable[[int], None],
) -> None:
    """Execute ``plan``, which reads ``files``: rank -> its file.

    Raises:
        ChecksumMismatch: A chunk is not what was saved. Targets may have been overwritten in part.
        StorageError: A file is missing, short or unreadable.
    """

    def read(run: Run) -> None:
        for _, error in reader.read(run, files[run.rank], sink):
            raise error
        on_bytes(run.nbytes)

    workers.run_all(partial(read, run) for run in runs_of(plan.reads))


class ChunkReader:
    """Reads the files of one store. Any thread may use it."""

    def __init__(self, backend: StorageBackend, retry: RetryPolicy) -> None:
        self._backend, self._retry = backend, retry
        self._alignment = backend.capabilities.alignment
        self._buffers, self._decoded = _Buffers(), _Buffers()

    def read(
        self, run: Run, file: StoredFile, sink: Sink, on_proven: OnProven = lambda *_: None
    ) -> Missed:
        """Read a run of ``file``; returns the chunks that are not intact.

        If the run cannot be read, each chunk is read by itself: the bad sector is in one of them.

        Raises:
            What is not the store's (see ``plan.fallback.reach_of``).
        """
        try:
            return self._read(run, file, sink, on_proven)
        except Exception as error:
            reach = reach_of(error)
            if reach is None:
                raise
            if reach is Reach.CHUNK and len(run.reads) > 1:
                singly = coalesce(run.reads, most_bytes=0, gap_bytes=0)
                return [
                    missed for one in singly for missed in self.read(one, file, sink, on_proven)
                ]
            return [(read, error) for read in run.reads]

    def _read(self, run: Run, file: StoredFile, sink: Sink, on_proven: OnProven) -> Missed:
        """Read a run in the way that copies least.

        A chunk that was read to a ``place`` of its own is where it belongs.
        """
        places: Sequence[memoryview | None] = [None] * len(run.reads)
        decoded = any(read.is_decoded for read in run.reads)
        if isinstance(self._backend, ScatterReads) and not decoded:
            places = [sink.direct(read) for read in run.reads]
            found = self._read_scattered(run, file.key, self._backend, places)
        elif decoded or self._alignment > 1 or not (pieces := _one_piece(run, sink)):
            found = self._read_buffered(run, file)
        else:
            whole = joined(pieces)
            self._retry.call(partial(self._backend.read_into, file.key, run.offset, *whole))
            places = found = pieces
        missed: Missed = []
        for read, place, data in zip(run.reads, places, found, strict=True):
            try:
                raw = self._proven(read, data, file, sink)
            except ChecksumMismatch as error:
                missed.append((read, error))
                continue
            on_proven(read, raw)
            if place is None and not read.is_decoded:
                sink.place(read, data)
        return missed

    def _read_scattered(
        self, run: Run, key: str, backend: ScatterReads, places: Sequence[memoryview | None]
    ) -> list[memoryview]:
        """Read a run with one request into its targets.

        Chunks without a target, and bytes that are not wanted, are read into the buffer, at the
        offsets that they have in the file.
        """
        straight = sum(place.nbytes for place in places if place is not None)
        phase = run.offset % self._alignment
        buffer = (
            self._buffers.get(phase + run.nbytes)[phase:]
            if straight < run.nbytes
            else memoryview(b"")
        )
        outs: list[memoryview] = []
        done = 0
        for read, place in zip(run.reads, places, strict=True):
            if place is not None:
                begin = read.offset - run.offset
                outs += [buffer[done:begin], place] if done < begin else [place]
                done = begin + read.stored_nbytes
        outs += [buffer[done : run.nbytes]] if done < run.nbytes else []
        self._retry.call(partial(backend.read_parts, key, run.offset, joined(outs)))
        return [
            buffer[read.offset - run.offset :][: read.stored_nbytes] if place is None else place
            for read, place in zip(run.reads, places, strict=True)
        ]

    def _read_buffered(self, run: Run, file: StoredFile) -> list[memoryview]:
        start = run.offset // self._alignment * self._alignment
        end = min(file.size, -(-(run.offset + run.nbytes) // self._alignment) * self._alignment)
        buffer = self._buffers.get(end - start)
        self._retry.call(partial(self._backend.read_into, file.key, start, buffer))
        return [buffer[read.offset - start :][: read.stored_nbytes] for read in run.reads]

    def _proven(
        self, read: ChunkRead, data: memoryview, file: StoredFile, sink: Sink
    ) -> memoryview:
        """Return the raw bytes of a chunk, verified.

        An encoded chunk is decoded into the target's own memory, if that is one piece.
        """
        if read.encoded_nbytes is None:
            verify(data, read.checksum, key=file.key, offset=read.offset)
            return data
        assert file.codec is not None
        memory = sink.direct(read) if read.is_decoded else None
        raw = self._decoded.get(read.nbytes) if memory is None else memory
        try:
            codec_named(file.codec).decode(data, raw)
        except ValueError:
            raise ChecksumMismatch(file.key, read.offset, data.nbytes) from None
        if checksum(raw) != read.checksum:
            raise ChecksumMismatch(file.key, read.offset, data.nbytes)
        if read.is_decoded and memory is None:
            sink.place(read, raw)
        return raw


def _one_piece(run: Run, sink: Sink) -> list[memoryview]:
    """Return the targets' memory for each chunk of a run if all of it is one piece, as for the
    chunks of one box. Otherwise the result is empty.
    """
    pieces: list[memoryview] = []
    for read in run.reads:
        if (place := sink.direct(read)) is None:
            return []
        pieces.append(place)
    whole = joined(pieces)
    return pieces if len(whole) == 1 and whole[0].nbytes == run.nbytes else []


def joined(pieces: Sequence[memoryview]) -> list[memoryview]:
    """Join pieces that follow each other in memory.

    A few long pieces are read faster than many short ones. The result is valid as long as
    ``pieces`` live.
    """
    spans: list[tuple[int, int]] = []
    for piece in pieces:
        start = ctypes.addressof(ctypes.c_char.from_buffer(piece))
        if spans and sum(spans[-1]) == start:
            spans[-1] = spans[-1][0], spans[-1][1] + piece.nbytes
        else:
            spans.append((start, piece.nbytes))
    if len(spans) == len(pieces):
        return list(pieces)
    return [
        memoryview((ctypes.c_char * nbytes).from_address(start)).cast("B")
        for start, nbytes in spans
    ]


class _Buffers(threading.local):
    """A buffer per thread, in memory as direct reads like it."""

    def __init__(self) -> None:
        self._memory = memoryview(b"")

    def get(self, nbytes: int) -> memoryview:
        if self._memory.nbytes < nbytes:
            self._memory = aligned_memory(max(nbytes, RUN_BYTES))
        return self._memory[:nbytes]
