"""Writes an image in memory to a file on a tier, and makes its chunk table.

An *image* is a rank's part of the state, laid out as the rank's file. The *chunk table* has the
length and the checksum of each chunk of the file.

A write may begin while the state is still being copied to the image. A byte has *landed* when it
was copied, and each part is written as soon as its bytes have landed. If several parts may be
written at a time, the same threads hash the chunks, but only while they write the second half of
the parts, when copying has mostly ended. Copying, hashing and training at the same time would need
three cores on machines that may have two, and would slow training about twice as much as hashing
after copying does (docs/decisions/0009). If the store takes one part at a time, a worker hashes the
chunks while the calling thread writes the parts.

If the image passes through a ring, memory is used again for later bytes once it is written and
hashed. So in a ring, each chunk is hashed soon after its parts are written. The write of each part
is retried separately. The first error that remains after the retries aborts the upload and is
raised.
"""

from __future__ import annotations

import itertools
from collections.abc import Callable, Generator, Iterator, Sequence
from concurrent.futures import Future, wait
from contextlib import contextmanager
from dataclasses import dataclass
from functools import partial
from typing import Any, Protocol

from ckpt.errors import CkptError, StagingError
from ckpt.model.checksum import checksum
from ckpt.model.manifest import Chunk
from ckpt.pipeline.retry import RetryPolicy
from ckpt.pipeline.workers import Workers
from ckpt.storage.api import AdoptsFiles, StorageBackend, Upload

OnBytes = Callable[[int], None]
"""A function that is called from worker threads with the number of bytes just written."""


class Source(Protocol):
    """The bytes of an image. The state may still be being copied to the image.

    Thread safety: any thread may call all methods.
    """

    @property
    def size(self) -> int:
        """The length of the whole image in bytes."""
        ...

    @property
    def path(self) -> str | None:
        """The path of the file in /dev/shm that holds the whole image; None if no file does."""
        ...

    @property
    def capacity(self) -> int:
        """The most bytes of a part or a chunk. If this is less than ``size``, the image passes
        through a ring, which has room for as many bytes beside those that are being copied.
        """
        ...

    @property
    def resident_bytes(self) -> int:
        """The bytes at the begin of the image that take no part of ``capacity``, since they stay in
        other memory.
        """
        ...

    @property
    def rereadable(self) -> bool:
        """Return True if all bytes can be read again. If the image passes through a ring, this is
        so until the first bytes are written and hashed.
        """
        ...

    def view(self, start: int, end: int) -> memoryview:
        """Wait until the bytes from ``start`` to ``end`` have landed, and return them.

        The memory is valid until both ``note_written`` and ``note_hashed`` have been called for
        these bytes.

        Raises:
            CkptError: The copy has failed with this error, so the bytes will never land.
        """
        ...

    def parts(self, start: int, end: int) -> Sequence[memoryview]:
        """Do what ``view`` does, but return bytes that are not together in memory as several parts,
        without a copy.
        """
        ...

    def note_written(self, start: int, end: int) -> None:
        """Note that the bytes from ``start`` to ``end`` are on the tier."""
        ...

    def note_hashed(self, start: int, end: int) -> None:
        """Note that the checksum of the bytes from ``start`` to ``end`` is known."""
        ...

    def note_loss(self, error: CkptError) -> None:
        """Note that some bytes will never be written or hashed, because of ``error``. Threads that
        wait for the memory of these bytes stop waiting.
        """
        ...


@dataclass(frozen=True, slots=True, kw_only=True)
class ImageWrite:
    """An image and the settings for its write to a file on a tier.

    Attributes:
        source: The bytes of the file. Bytes that have landed must not change until they are written
            and hashed.
        chunks: The lengths of the chunks in bytes, in file order. Their sum is the size of the
            image.
        key: The key of the file on the tier.
        workers: The threads that write and hash.
        retry: How each request is retried.
        on_bytes: Called from worker threads with the number of bytes just written.
        hashed_chunks: The chunk table if the same bytes were hashed before, for instance for
            another tier. The chunks are then not hashed again. Empty if the bytes were not hashed
            before.
    """

    source: Source
    chunks: Sequence[int]
    key: str
    workers: Workers
    retry: RetryPolicy
    on_bytes: OnBytes
    hashed_chunks: tuple[Chunk, ...] = ()


def write_image(write: ImageWrite, backend: StorageBackend) -> tuple[Chunk, ...]:
    """Write an image to ``backend`` and make it durable.

    If the call raises, no new object is visible under the key.

    Returns:
        The chunk table.

    Raises:
        StorageError: The store refused or failed.
        StagingError: The ring that the image passes through is too small.
        CkptError: The source has raised this error.
    """
    source, chunks, key, workers = write.source, write.chunks, write.key, write.workers
    hashed_chunks, retry = write.hashed_chunks, write.retry
    upload = retry.call(lambda: backend.upload(key, source.size))
    job = _Job(source, [] if hashed_chunks else chunks, upload, retry, write.on_bytes)
    try:
        check_room(
            source,
            chunks,
            upload.part_bytes,
            takes_parts=backend.capabilities.takes_parts,
            key=key,
        )
        if backend.capabilities.parallel_parts:
            # An image that is larger than its memory passes through a ring.
            workers.run_all(
                job.calls_in_file_order()
                if source.capacity < source.size
                else job.calls_with_late_hashes()
            )
        else:
            job.write_one_by_one(workers, prefetch=bool(hashed_chunks))
        retry.call(upload.finish)
    except BaseException:
        upload.abort()
        raise
    return hashed_chunks or tuple(chunk for chunk in job.table if chunk is not None)


def adopt_image(write: ImageWrite, backend: AdoptsFiles) -> tuple[Chunk, ...]:
    """Make the image an object of a store in memory, without copying it.

    If ``write.hashed_chunks`` is empty, first wait until the whole image has landed, and hash its
    chunks. The file of the image is cut to the size of the image.

    Returns:
        The chunk table.

    Raises:
        StagingError: No file in /dev/shm holds the whole image.
        StorageError: The store refused or failed.
        CkptError: The source has raised this error.
    """
    source, chunks, key, workers = write.source, write.chunks, write.key, write.workers
    hashed_chunks, retry = write.hashed_chunks, write.retry
    if (path := source.path) is None:
        raise StagingError(
            f"{key} cannot be kept in memory: it is not staged in /dev/shm as a whole"
        )
    table: list[Chunk] = list(hashed_chunks)
    if not hashed_chunks:
        offsets = list(itertools.accumulate(chunks, initial=0))
        # Wait until copying has ended before hashing, as the docstring of this module explains.
        source.view(0, source.size)
        table = workers.run_all(
            partial(_hash_chunk, source, start, end) for start, end in itertools.pairwise(offsets)
        )
    retry.call(lambda: backend.adopt(key, path, source.size))
    write.on_bytes(source.size)
    return tuple(table)


def _hash_chunk(source: Source, start: int, end: int) -> Chunk:
    """Hash the bytes of a chunk, report them to ``source`` as hashed, and return the chunk."""
    chunk = Chunk(end - start, checksum(*source.parts(start, end)))
    source.note_hashed(start, end)
    return chunk


def check_room(
    source: Source, chunks: Sequence[int], part_bytes: int, *, takes_parts: bool, key: str
) -> None:
    """Check that an image that is larger than its memory can pass through this memory as a ring.

    In a ring without room for its largest part or chunk beside the bytes that are being copied,
    copying, writing and hashing would wait for each other forever. The first
    ``source.resident_bytes`` bytes stay in other memory, and need no room.

    Raises:
        StagingError: The ring is too small, or the store keeps the memory of parts until the end of
            the upload.
    """
    if source.capacity >= source.size:
        return
    edges = itertools.pairwise(itertools.accumulate(chunks, initial=0))
    chunk_bytes = max((end - max(start, source.resident_bytes) for start, end in edges), default=0)
    if not takes_parts:
        raise StagingError(
            f"{key} of {source.size >> 20} MiB passes through host memory in waves, and this store "
            "takes only images that are all in memory: put a folder or S3 before it as a nearer "
            "tier"
        )
    if (lack := max(part_bytes, chunk_bytes) - source.capacity) > 0:
        raise StagingError(
            f"{key} of {source.size >> 20} MiB passes through host memory in waves, in parts of up "
            f"to {source.capacity >> 20} MiB, which are too small for its tier: give it "
            f"{-(-lack >> 20)} MiB more (host_memory, free memory), or smaller chunk_bytes"
        )


@contextmanager
def report_errors_to(*reports: Callable[[CkptError], None]) -> Generator[None]:
    """Call each function of ``reports`` with the error that ends the ``with`` block, and raise it.

    The functions keep other threads from waiting for the bytes that this block did not process. An
    error that is not a ``CkptError`` is reported as a ``StagingError``.
    """
    try:
        yield
    except BaseException as error:
        loss = (
            error
            if isinstance(error, CkptError)
            else StagingError(f"a part of it was lost: {error!r}")
        )
        for report in reports:
            report(loss)
        raise


class _Job:
    """The write of one image.

    Args:
        source: The bytes of the image.
        chunks: The lengths of the chunks to hash; empty if no chunk needs to be hashed.
        upload: The upload, which the caller finishes or aborts.
        retry: How the write of each part is retried.
        on_bytes: Called with the number of bytes just written.

    Attributes:
        table: The chunks, with None for chunks that are not hashed yet.
    """

    def __init__(
        self,
        source: Source,
        chunks: Sequence[int],
        upload: Upload,
        retry: RetryPolicy,
        on_bytes: OnBytes,
    ) -> None:
        self.table: list[Chunk | None] = [None] * len(chunks)
        self._source, self._chunks, self._upload = source, chunks, upload
        self._retry, self._on_bytes = retry, on_bytes

    def calls_with_late_hashes(self) -> list[partial[None]]:
        """Return the calls that write and hash an image that is in memory as a whole, in the order
        in which they should begin: first one half of the parts, and then the other half alternating
        with the hashing of chunks.
        """
        work = list(self.calls_in_file_order())
        parts = [task for task in work if task.func == self.write]
        chunks = [task for task in work if task.func == self.hash]
        half = len(parts) // 2
        turns = itertools.zip_longest(parts[half:], chunks)
        return parts[:half] + [task for turn in turns for task in turn if task is not None]

    def calls_in_file_order(self) -> Iterator[partial[None]]:
        """Yield the calls that write and hash an image in file order: the write of each part, and
        after it the hashing of the chunks that begin in this part.
        """
        first_index = chunk_start = 0
        for offset in range(0, self._source.size, self._upload.part_bytes):
            yield partial(self.write, offset)
            last_index, chunk_end = first_index, chunk_start
            while last_index < len(self._chunks) and chunk_end < offset + self._upload.part_bytes:
                chunk_end += self._chunks[last_index]
                last_index += 1
            if last_index > first_index:
                yield partial(self.hash, chunk_start, first_index, last_index)
            first_index, chunk_start = last_index, chunk_end

    def write_one_by_one(self, workers: Workers, *, prefetch: bool) -> None:
        """Write the parts one after another in the calling thread, and let a worker hash the chunks
        meanwhile.

        With ``prefetch``, no chunk needs to be hashed. A worker then fetches the bytes of the next
        part while the calling thread writes a part.
        """
        size, part_bytes = self._source.size, self._upload.part_bytes
        futures: list[Future[Any]] = [workers.submit(self.hash, 0, 0, len(self.table))]
        try:
            part: memoryview | None = None
            for offset in range(0, size, part_bytes):
                next_offset = offset + part_bytes
                if prefetch and next_offset < size:
                    futures.append(
                        workers.submit(
                            self._source.view, next_offset, min(size, next_offset + part_bytes)
                        )
                    )
                self.write(offset, part)
                # The first future is the hashing; a second one has the bytes of the next part.
                part = futures.pop().result() if len(futures) > 1 else None
        except BaseException:
            # The memory of the image may be reused soon, so wait for the calls that read from it.
            wait([future for future in futures if not future.cancel()])
            raise
        futures[0].result()

    def write(self, offset: int, part: memoryview | None = None) -> None:
        """Write the part at ``offset``. ``part`` is its bytes if the caller has them. Otherwise the
        source gives them.
        """
        end = min(self._source.size, offset + self._upload.part_bytes)
        with report_errors_to(self._source.note_loss):
            data = self._source.view(offset, end) if part is None else part
            self._retry.call(lambda: self._upload.write(offset, data))
        self._source.note_written(offset, end)
        self._on_bytes(end - offset)

    def hash(self, start: int, first_index: int, last_index: int) -> None:
        """Hash the chunks with the indices ``first_index`` to ``last_index - 1``, and put them into
        ``table``.

        ``start`` is the offset of the chunk ``first_index`` in the image.
        """
        for index in range(first_index, last_index):
            end = start + self._chunks[index]
            with report_errors_to(self._source.note_loss):
                self.table[index] = _hash_chunk(self._source, start, end)
            start = end
