"""Reads chunks from a store, verifies them, and delivers them to their targets.

Restore, verify, read-through, copies between tiers and export use this module. A *chunk* is the
unit of checksums in a data file. A *run* is the chunks that one request reads, and a *sink* is the
memory that they go to. An *increment* is a data file that leaves out its first chunks, since
another file, its *base*, has them. An *adopted* file is a file of another program that a manifest
names.

Chunks that are neighbours in the file are read with one request. There are three ways to read them:

* A store with ``ScatterReads`` reads a chunk straight into its target if the whole chunk is wanted
  and its target is contiguous host memory.
* Any other store whose ``Capabilities.alignment`` is 1 reads straight into the targets only if the
  targets of all chunks of the request are adjacent in memory.
* All other chunks are read into a buffer, verified there, and then copied to their targets. These
  are, for example, chunks that are needed in part, and chunks with targets that are strided or on a
  device.

A chunk that must be decoded is read into the buffer, together with all other chunks of its request.
It is decoded into its target if the whole chunk is wanted and the target is contiguous host memory,
and else into a second buffer. Each thread keeps its two buffers. A buffer has ``RUN_BYTES``, or the
size of the largest request or chunk that has passed through it.
"""

from __future__ import annotations

import ctypes
import threading
from collections.abc import Callable, Iterable, Mapping, Sequence
from contextlib import suppress
from dataclasses import replace
from functools import partial
from typing import Final, Protocol, cast

from ckpt.codec.registry import codec_named
from ckpt.errors import ChecksumMismatch, FileDamaged, StorageError
from ckpt.model.checksum import checksum, verify
from ckpt.model.manifest import AdoptedFile, StoredFile
from ckpt.pipeline.retry import RetryPolicy
from ckpt.pipeline.workers import Workers
from ckpt.plan.read_errors import Reach, as_damage, reach_of
from ckpt.plan.restore import ChunkRead, RestorePlan, Run, coalesce
from ckpt.storage.api import ReadableStore, ScatterReads, StorageBackend, aligned_memory
from ckpt.storage.outside_files import LocatedStore, as_fault_of, store_with

RUN_BYTES: Final = 16 << 20
"""The most bytes of one request, unless a single chunk is larger."""
GAP_BYTES: Final = 64 << 10
"""The most unneeded bytes between two chunks that are read so that one request serves both."""

Misses = list[tuple[ChunkRead, Exception]]
"""The chunks that a store does not have intact, each with the error of its read."""

OnProven = Callable[[ChunkRead, memoryview], None]
"""A function that is called with each intact chunk and its raw bytes, from several threads.

The memory is valid only during the call.
"""


class Sink(Protocol):
    """The memory that the bytes of chunks go to.

    Thread safety:
        Several threads call the methods at the same time, for different chunks.
    """

    def direct(self, read: ChunkRead) -> memoryview | None:
        """Return the memory that the chunk is to fill. Return None if the chunk is wanted only in
        part, or its target is not one contiguous piece of host memory.
        """
        ...

    def place(self, read: ChunkRead, data: memoryview) -> None:
        """Copy the needed parts of a verified chunk to the target.

        ``data`` holds all bytes of the chunk: its raw bytes, or its bytes as stored if
        ``ChunkRead.as_stored`` is True. It is valid only during the call.
        """
        ...


class BytesSink:
    """A sink that stores chunks of an image or file (see ``plan.restore.chunks_of``) in one piece
    of memory.

    Args:
        memory: The memory.
        start: The position in the image or file of the first byte of ``memory``.
    """

    def __init__(self, memory: memoryview, start: int) -> None:
        self._memory, self._start = memory, start

    def direct(self, read: ChunkRead) -> memoryview:
        """Return the memory that the chunk is to fill."""
        begin = read.box.offsets[0] - self._start
        return self._memory[begin : begin + read.box.shape[0]]

    def place(self, read: ChunkRead, data: memoryview) -> None:
        """Copy all bytes of the chunk to its memory."""
        self.direct(read)[:] = data


def runs_of(reads: Iterable[ChunkRead]) -> list[Run]:
    """Return the requests for ``reads``, which must be in file order."""
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
    """Read all chunks of ``plan`` and deliver them to ``sink``.

    After an error, some targets may have been overwritten.

    Args:
        plan: The chunks to read.
        sink: The targets of the chunks.
        reader: Reads from the store that has the files.
        files: The file of each rank, by rank.
        workers: The threads that read.
        on_bytes: Called after each request with the number of bytes that it read, from several
            threads.

    Raises:
        ChecksumMismatch: A chunk is not what was saved.
        FileDamaged: A file is missing or short.
        StorageError: A file is unreadable.
    """

    def read(run: Run) -> None:
        for _missed_chunk, error in reader.read(run, files[run.rank], sink):
            raise as_damage(error, files[run.rank])
        on_bytes(run.nbytes)

    workers.run_all(partial(read, run) for run in runs_of(plan.reads))


class ChunkReader:
    """Reads chunks from the files of one store.

    ``_outer_readers`` has a reader for each other root or program whose files were read. The store
    reads best at offsets that are multiples of ``_alignment``. ``_buffers`` and ``_decode_buffers``
    give each thread its buffers.

    Thread safety: any thread may call ``read``.
    """

    def __init__(self, backend: ReadableStore, retry: RetryPolicy) -> None:
        self._backend, self._retry = backend, retry
        # By the path to another root, and the files of an adopted base there
        self._outer_readers: dict[tuple[str, tuple[AdoptedFile, ...]], ChunkReader] = {}
        self._alignment = backend.capabilities.alignment
        self._buffers, self._decode_buffers = _Buffers(), _Buffers()

    def read(
        self, run: Run, file: StoredFile, sink: Sink, on_proven: OnProven = lambda *_: None
    ) -> Misses:
        """Read the chunks of ``run`` from ``file`` into ``sink``, and return those that are not
        intact.

        If the request fails, each chunk is read with a request of its own, since perhaps only one
        chunk is unreadable. If the error concerns the whole file or store, all chunks are returned
        with this error. An error that is not an error of the store is raised (see
        ``plan.read_errors.reach_of``).

        Args:
            run: The request.
            file: The file that the request reads. If it is an increment, and the chunks are in its
                base, the base is read.
            sink: The targets of the chunks.
            on_proven: Called with each chunk that has passed the verification.
        """
        if run.in_base and file.base is not None:
            file = file.base
        if file.root or (file.location and not isinstance(self._backend, LocatedStore)):
            return self._read_outside(run, file, sink, on_proven)
        try:
            return self._read(run, file, sink, on_proven)
        except Exception as error:
            reach = reach_of(error)  # Whether the error concerns one chunk, or the file or store
            if reach is None:
                raise
            if reach is Reach.CHUNK and len(run.reads) > 1:
                single_runs = coalesce(run.reads, most_bytes=0, gap_bytes=0)
                return [
                    miss
                    for single_run in single_runs
                    for miss in self.read(single_run, file, sink, on_proven)
                ]
            cause = self._cause_of(error, file)
            return [(read, cause) for read in run.reads]

    def _read_outside(self, run: Run, file: StoredFile, sink: Sink, on_proven: OnProven) -> Misses:
        """Do what ``read`` does for a file of another program or in another root."""
        reader_key = file.root, file.adoption.files if file.adoption else ()
        if (reader := self._outer_readers.get(reader_key)) is None:
            try:
                store, _ = store_with(cast("StorageBackend", self._backend), file)
            except StorageError as error:  # The path leads to no root of the store
                return [(read, error) for read in run.reads]
            reader = self._outer_readers.setdefault(reader_key, ChunkReader(store, self._retry))
        # For its own reader, the file is not in another root.
        misses = reader.read(run, replace(file, root=""), sink, on_proven)
        return [(read, as_fault_of(error, file)) for read, error in misses]

    def _cause_of(self, error: Exception, file: StoredFile) -> Exception:
        """Return `FileDamaged` in the place of an error of a read beyond the end of ``file``, and
        else ``error``.
        """
        if type(error) is StorageError:
            with suppress(StorageError):
                size = self._retry.call(partial(self._backend.head, file.key)).size
                if size != file.size:
                    return FileDamaged(file.key, size, file.size)
        return error

    def _read(self, run: Run, file: StoredFile, sink: Sink, on_proven: OnProven) -> Misses:
        """Read a run in the way that copies the fewest bytes, and return the chunks whose checksum
        is wrong. Raise the error of the request if it fails.
        """
        # The memory of each chunk that is read straight into its target; None for other chunks.
        places: Sequence[memoryview | None] = [None] * len(run.reads)
        needs_decoding = any(read.needs_decoding for read in run.reads)
        if isinstance(self._backend, ScatterReads) and not needs_decoding:
            places = [sink.direct(read) for read in run.reads]
            parts = self._read_scattered(run, file.key, self._backend, places)
        elif needs_decoding or self._alignment > 1 or not (pieces := _adjacent_targets(run, sink)):
            parts = self._read_buffered(run, file)
        else:
            [whole] = join_adjacent(pieces)
            self._retry.call(partial(self._backend.read_into, file.key, run.offset, whole))
            places = parts = pieces
        misses: Misses = []
        for read, place, data in zip(run.reads, places, parts, strict=True):
            try:
                raw = self._verify(read, data, file, sink)
            except ChecksumMismatch as error:
                misses.append((read, error))
                continue
            on_proven(read, raw)
            if place is None and not read.needs_decoding:
                sink.place(read, data)
        return misses

    def _read_scattered(
        self, run: Run, key: str, backend: ScatterReads, places: Sequence[memoryview | None]
    ) -> list[memoryview]:
        """Read a run with one request, each chunk into its memory in ``places``. Return the memory
        of each chunk.

        Chunks whose place is None, and unneeded bytes between chunks, are read into the thread's
        buffer, at the same offset as they have in the run.
        """
        direct_bytes = sum(place.nbytes for place in places if place is not None)
        phase = run.offset % self._alignment  # The buffer is aligned as the file
        buffer = (
            self._buffers.get(phase + run.nbytes)[phase:]
            if direct_bytes < run.nbytes
            else memoryview(b"")
        )
        outs: list[memoryview] = []
        end = 0  # How many bytes of the run already have memory in ``outs``
        for read, place in zip(run.reads, places, strict=True):
            if place is not None:
                begin = read.offset - run.offset
                outs += [buffer[end:begin], place] if end < begin else [place]
                end = begin + read.stored_nbytes
        outs += [buffer[end : run.nbytes]] if end < run.nbytes else []
        self._retry.call(partial(backend.read_parts, key, run.offset, join_adjacent(outs)))
        return [
            buffer[read.offset - run.offset :][: read.stored_nbytes] if place is None else place
            for read, place in zip(run.reads, places, strict=True)
        ]

    def _read_buffered(self, run: Run, file: StoredFile) -> list[memoryview]:
        """Read a run with one request into the thread's buffer. Return the memory of each chunk."""
        start = run.offset // self._alignment * self._alignment
        end = min(file.size, -(-(run.offset + run.nbytes) // self._alignment) * self._alignment)
        buffer = self._buffers.get(end - start)
        self._retry.call(partial(self._backend.read_into, file.key, start, buffer))
        return [buffer[read.offset - start :][: read.stored_nbytes] for read in run.reads]

    def _verify(
        self, read: ChunkRead, data: memoryview, file: StoredFile, sink: Sink
    ) -> memoryview:
        """Verify a chunk, whose bytes in the file are ``data``, and return its raw bytes.

        An encoded chunk whose raw bytes are needed is also delivered to ``sink``: it is decoded
        straight into its target if ``Sink.direct`` returns memory, and copied there otherwise.

        Raises:
            ChecksumMismatch: The chunk is not what was saved.
        """
        if read.encoded_nbytes is None:
            verify(data, read.checksum, key=file.key, offset=read.offset)
            return data
        assert file.codec is not None
        memory = sink.direct(read) if read.needs_decoding else None
        raw = self._decode_buffers.get(read.nbytes) if memory is None else memory
        try:
            codec_named(file.codec).decode(data, raw)
        except ValueError:
            raise ChecksumMismatch(file.key, read.offset, data.nbytes) from None
        if checksum(raw) != read.checksum:
            raise ChecksumMismatch(file.key, read.offset, data.nbytes)
        if read.needs_decoding and memory is None:
            sink.place(read, raw)
        return raw


def _adjacent_targets(run: Run, sink: Sink) -> list[memoryview]:
    """Return the memory that each chunk of a run is to fill, if these pieces are adjacent and as
    long as the run. Otherwise return an empty list.
    """
    pieces: list[memoryview] = []
    for read in run.reads:
        if (place := sink.direct(read)) is None:
            return []
        pieces.append(place)
    spans = join_adjacent(pieces)
    return pieces if len(spans) == 1 and spans[0].nbytes == run.nbytes else []


def join_adjacent(pieces: Sequence[memoryview]) -> list[memoryview]:
    """Return the same memory in fewer pieces: consecutive pieces that are adjacent in memory become
    one piece.

    A few long pieces are read faster than many short ones. The caller must keep ``pieces`` alive
    while it uses the result.
    """
    spans: list[tuple[int, int]] = []
    for piece in pieces:
        start = ctypes.addressof(ctypes.c_char.from_buffer(piece))
        if spans and sum(spans[-1]) == start:  # The last span ends where this piece begins
            last_start, last_nbytes = spans[-1]
            spans[-1] = last_start, last_nbytes + piece.nbytes
        else:
            spans.append((start, piece.nbytes))
    if len(spans) == len(pieces):
        return list(pieces)
    return [
        memoryview((ctypes.c_char * nbytes).from_address(start)).cast("B")
        for start, nbytes in spans
    ]


class _Buffers(threading.local):
    """One buffer for each thread, aligned for direct reads. The buffer grows on demand."""

    def __init__(self) -> None:
        self._memory = memoryview(b"")

    def get(self, nbytes: int) -> memoryview:
        if self._memory.nbytes < nbytes:
            self._memory = aligned_memory(max(nbytes, RUN_BYTES))
        return self._memory[:nbytes]
