"""Writes an image in memory to an encoded file on a tier.

An *image* is a rank's part of the state, laid out as the rank's file. If it is larger than its
memory, the memory is a *ring*, through which the image passes.

Workers take the chunks in file order. Several workers hash and encode chunks at the same time. They
append the encoded chunks to the file in file order, since the position of a chunk is known only
when all earlier chunks are encoded. The appended bytes fill the parts of the upload, and the worker
that fills a part writes it. Each worker needs memory for an encoded chunk, for the codec's own
buffer, and for a part.
"""

from __future__ import annotations

import threading
from collections.abc import Generator, Sequence
from contextlib import AbstractContextManager, contextmanager, nullcontext
from functools import partial
from itertools import accumulate

from ckpt.codec.registry import Encoder
from ckpt.errors import CkptError
from ckpt.model.checksum import checksum
from ckpt.model.dtype import float_width
from ckpt.model.manifest import Chunk, Tensor
from ckpt.pipeline.image_writer import ImageWrite, check_room, report_errors_to
from ckpt.pipeline.retry import RetryPolicy
from ckpt.storage.api import StorageBackend, Upload, aligned_memory


def widths_of(chunks: Sequence[int], tensors: Sequence[Tensor]) -> list[int]:
    """Return, for each chunk of a file, the size in bytes of one floating point number of its
    tensor; 1 for chunks without floating point numbers.

    Args:
        chunks: The lengths of the chunks in bytes, in file order.
        tensors: The tensors whose shards the file holds.
    """
    width_by_start = {
        shard.offset: float_width(tensor.dtype)
        for tensor in tensors
        for shard in tensor.shards
        if shard.box.numel
    }
    widths: list[int] = []
    offset, width = 0, 1
    for nbytes in chunks:
        width = width_by_start.get(offset, width)
        widths.append(width)
        offset += nbytes
    return widths


def write_encoded(
    write: ImageWrite, backend: StorageBackend, encoder: Encoder, widths: Sequence[int]
) -> tuple[tuple[Chunk, ...], tuple[int, ...]]:
    """Encode an image and make the encoded file durable on ``backend``.

    If the call raises, no new object is visible under the key.

    Args:
        write: The image and the key of the file.
        backend: The store.
        encoder: Encodes the chunks.
        widths: For each chunk, the size in bytes of one of its numbers (see `widths_of`).

    Returns:
        The chunk table, which describes the raw bytes, and the length in bytes of each encoded
        chunk.

    Raises:
        StorageError: The store refused or failed.
        StagingError: The ring that the image passes through is too small.
        CkptError: The source has raised this error.
    """
    source, retry = write.source, write.retry
    upload = retry.call(lambda: backend.upload(write.key, source.size))
    capabilities = backend.capabilities
    file = _File(
        upload, retry, parallel=capabilities.parallel_parts, reuse=capabilities.takes_parts
    )
    job = _Job(write, encoder, widths, file)
    try:
        # Encoded bytes are copied into parts, so only chunks need room in the memory of the image.
        check_room(
            source,
            write.chunks,
            part_bytes=0,
            takes_parts=capabilities.takes_parts,
            key=write.key,
        )
        write.workers.run_all(
            partial(job.encode_chunk, index) for index in range(len(write.chunks))
        )
        file.flush()
        retry.call(lambda: upload.finish(file.size))
    except BaseException:
        upload.abort()
        raise
    return tuple(job.table), tuple(job.lengths)


class _Job:
    """The encoding of one image.

    ``_chunk_starts`` are the offsets of the chunks in the image, followed by the size of the image.
    ``_hashed_chunks`` has the checksums of the chunks if they are known already. ``_on_bytes`` is
    called with the raw size of each chunk that was appended.

    Args:
        write: The image and the key of the file.
        encoder: Encodes the chunks.
        widths: For each chunk, the size in bytes of one of its numbers.
        file: The file that gets the encoded chunks.

    Attributes:
        table: The raw length and checksum of each chunk that was appended, in file order.
        lengths: The encoded length in bytes of each of these chunks.

    Thread safety: several workers may call ``encode_chunk`` at the same time. Only the thread that
    has the turn (see ``_File.turn``) changes ``table`` and ``lengths``.
    """

    def __init__(
        self, write: ImageWrite, encoder: Encoder, widths: Sequence[int], file: _File
    ) -> None:
        self._source, self._hashed_chunks, self._on_bytes = (
            write.source,
            write.hashed_chunks,
            write.on_bytes,
        )
        self._encoder, self._widths, self._file = encoder, widths, file
        self._chunk_starts = list(accumulate(write.chunks, initial=0))
        self.table: list[Chunk] = []
        self.lengths: list[int] = []

    def encode_chunk(self, index: int) -> None:
        """Hash and encode the chunk ``index``, append it to the file, and write the parts that it
        fills.

        The workers begin chunks in file order, so a chunk waits only for chunks that other workers
        have begun.
        """
        start, end = self._chunk_starts[index : index + 2]
        with report_errors_to(self._file.fail, self._source.note_loss):
            view = self._source.view(start, end)
            chunk = (
                self._hashed_chunks[index]
                if self._hashed_chunks
                else Chunk(end - start, checksum(view))
            )
            pieces = self._encoder.encode(view, self._widths[index])
            with self._file.turn(index):
                full_parts = self._file.append(pieces)
                self.table.append(chunk)
                self.lengths.append(sum(piece.nbytes for piece in pieces))
            self._source.note_written(start, end)
            self._source.note_hashed(start, end)
            for offset, part in full_parts:
                self._file.write(offset, part)
            self._on_bytes(end - start)


class _File:
    """The encoded file: it collects the encoded bytes in parts and writes these to an upload.

    A thread has the *turn* while it appends a chunk. Chunks are appended in the order of their
    indices, and ``_next_index`` is the index of the next one. ``_turn_end`` is notified when a turn
    has ended. ``_part`` is the memory of the part that is being filled, and ``_free_parts`` is the
    memory of parts that were written.

    Args:
        upload: The upload, which the caller finishes or aborts.
        retry: How the write of each part is retried.
        parallel: True if several parts may be written at the same time.
        reuse: True if the memory of a part can be used again once the part is written.

    Attributes:
        size: The number of bytes appended so far.

    Thread safety:
        Any thread may call ``turn``, ``write`` and ``fail``. Only the thread that has the turn
        calls ``append``. The owner calls ``flush`` after all bytes are appended.
    """

    def __init__(self, upload: Upload, retry: RetryPolicy, *, parallel: bool, reuse: bool) -> None:
        self.size = 0
        self._upload, self._retry, self._reuses_memory = upload, retry, reuse
        self._write_lock: AbstractContextManager[object] = (
            nullcontext() if parallel else threading.Lock()
        )
        self._turn_end = threading.Condition()
        self._next_index = 0
        self._error: CkptError | None = None
        self._part = memoryview(b"")
        self._free_parts: list[memoryview] = []  # Without a lock: append and pop are atomic

    @contextmanager
    def turn(self, index: int) -> Generator[None]:
        """Wait until all chunks before ``index`` are appended. The thread then has the turn, and is
        the only one that appends, until the ``with`` block ends.

        Raises:
            CkptError: Another chunk failed with this error, so the file cannot become whole.
        """
        with self._turn_end:
            self._turn_end.wait_for(lambda: self._error or self._next_index == index)
            if self._error:
                raise self._error
        yield
        with self._turn_end:
            self._next_index += 1
            self._turn_end.notify_all()

    def fail(self, error: CkptError) -> None:
        """Make ``turn`` raise ``error`` in all threads that wait for their turn, now or later."""
        with self._turn_end:
            self._error = self._error or error
            self._turn_end.notify_all()

    def append(self, pieces: Sequence[memoryview]) -> list[tuple[int, memoryview]]:
        """Copy ``pieces`` to the end of the file. Return the parts that are full now, each with its
        offset in the file.
        """
        full_parts: list[tuple[int, memoryview]] = []
        for piece in pieces:
            rest = piece
            while rest.nbytes:
                part_offset = self.size % self._upload.part_bytes
                if not part_offset:
                    self._part = self._part_memory()
                head = rest[: self._part.nbytes - part_offset]
                self._part[part_offset : part_offset + head.nbytes] = head
                self.size, rest = self.size + head.nbytes, rest[head.nbytes :]
                if part_offset + head.nbytes == self._part.nbytes:
                    full_parts.append((self.size - self._part.nbytes, self._part))
        return full_parts

    def write(self, offset: int, part: memoryview) -> None:
        """Write a part to the upload, with retries."""
        with self._write_lock:
            self._retry.call(lambda: self._upload.write(offset, part))
        if self._reuses_memory:
            self._free_parts.append(part)

    def flush(self) -> None:
        """Write the last part if it is only partly filled."""
        if rest := self.size % self._upload.part_bytes:
            self.write(self.size - rest, self._part[:rest])

    def _part_memory(self) -> memoryview:
        """Return memory for a part: new memory, or that of an earlier part that is written."""
        try:
            return self._free_parts.pop()
        except IndexError:
            return aligned_memory(self._upload.part_bytes)
