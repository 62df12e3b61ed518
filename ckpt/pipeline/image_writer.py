"""An image in memory -> a file on a tier and its chunk table.

Parts are written as soon as they have landed, so that the disk is busy from the first one on;
chunks are hashed by the same few threads beside the second half of the parts, when copying is over.
Copying, hashing and training at once would need three cores where there may be two, and cost
training twice as much (docs/decisions/0009). In a ring, each chunk is hashed beside its parts,
since it makes room only then. Each part is retried by itself; the first lasting error aborts the
upload and is raised.
"""

from __future__ import annotations

import itertools
from collections.abc import Callable, Generator, Iterator, Sequence
from concurrent.futures import Future, wait
from contextlib import contextmanager
from dataclasses import dataclass
from functools import partial
from typing import Any, Final, Protocol

from ckpt.errors import CkptError, StagingError
from ckpt.model.checksum import checksum
from ckpt.model.manifest import Chunk
from ckpt.pipeline.retry import RetryPolicy
from ckpt.pipeline.workers import Workers
from ckpt.storage.api import Adopting, StorageBackend, Upload

_COPY_BYTES: Final = 32 << 20
"""How much is copied to a ring at once."""
OnBytes = Callable[[int], None]
"""Called from worker threads with the number of bytes just written."""


class Source(Protocol):
    """The bytes of an image, that may still be coming in."""

    @property
    def size(self) -> int: ...

    @property
    def path(self) -> str | None:
        """The file in /dev/shm that has the whole image; None if there is none."""
        ...

    @property
    def capacity(self) -> int:
        """How many bytes of the image are in memory at a time."""
        ...

    def view(self, start: int, end: int) -> memoryview:
        """Return the bytes as soon as they are there, or raise the reason why they never are.

        The memory is valid until ``written`` and ``hashed`` are called for it.
        """
        ...

    def written(self, start: int, end: int) -> None: ...

    def hashed(self, start: int, end: int) -> None: ...

    def lost(self, error: CkptError) -> None:
        """Note that a part or chunk is never written or hashed, so that no thread waits for its
        memory.
        """
        ...


@dataclass(frozen=True, slots=True, kw_only=True)
class ImageWrite:
    """An image that is to become a file.

    Attributes:
        source: The whole file. Its memory must not change until the write has ended.
        chunks: The lengths of the chunks in bytes. They cover the file.
        key: Where the file is to be.
        workers: The threads that write and hash.
        retry: How each request is retried.
        on_bytes: Called with the number of bytes just written.
        known: The chunk table, if these very bytes were hashed before.
    """

    source: Source
    chunks: Sequence[int]
    key: str
    workers: Workers
    retry: RetryPolicy
    on_bytes: OnBytes
    known: tuple[Chunk, ...] = ()


def write_image(write: ImageWrite, backend: StorageBackend) -> tuple[Chunk, ...]:
    """Make an image durable on ``backend``.

    Returns:
        The chunk table.

    Raises:
        StorageError: Nothing is visible under the key.
        CkptError: The source has raised it. Nothing is visible either.
    """
    source, chunks, key, workers = write.source, write.chunks, write.key, write.workers
    known, retry = write.known, write.retry
    upload = retry.call(lambda: backend.upload(key, source.size))
    job = _Job(source, [] if known else chunks, upload, retry, write.on_bytes)
    try:
        check_room(
            source,
            max(chunks, default=0),
            upload.part_bytes,
            takes_parts=backend.capabilities.takes_parts,
            key=key,
        )
        if backend.capabilities.parallel_parts:
            workers.run_all(job.in_turn() if source.capacity < source.size else job.hashed_late())
        else:
            job.one_by_one(workers, ahead=bool(known))
        retry.call(upload.finish)
    except BaseException:
        upload.abort()
        raise
    return known or tuple(chunk for chunk in job.table if chunk is not None)


def adopt_image(write: ImageWrite, backend: Adopting) -> tuple[Chunk, ...]:
    """Do as ``write_image``, for a store that takes the image where it is. It is only hashed.

    Raises:
        StagingError: The image is not all in /dev/shm.
    """
    source, chunks, key, workers = write.source, write.chunks, write.key, write.workers
    known, retry = write.known, write.retry
    if (path := source.path) is None:
        raise StagingError(
            f"{key} cannot be kept in memory: it is not staged in /dev/shm as a whole"
        )
    table: list[Chunk] = list(known)
    if not known:
        offsets = list(itertools.accumulate(chunks, initial=0))
        # Hash when the copying has ended, as the docstring of this module explains.
        source.view(0, source.size)
        table = workers.run_all(
            partial(_hashed, source, a, b) for a, b in itertools.pairwise(offsets)
        )
    retry.call(lambda: backend.adopt(key, path, source.size))
    write.on_bytes(source.size)
    return tuple(table)


def _hashed(source: Source, start: int, end: int) -> Chunk:
    chunk = Chunk(end - start, checksum(source.view(start, end)))
    source.hashed(start, end)
    return chunk


def check_room(
    source: Source, chunk_bytes: int, part_bytes: int, *, takes_parts: bool, key: str
) -> None:
    """Check that a ring holds what is copied, written and hashed at the same time.

    In a smaller ring each of the three would wait for the others without end.

    Raises:
        StagingError: The ring is too small.
    """
    needed = _COPY_BYTES + part_bytes + chunk_bytes
    if source.capacity >= source.size:
        return
    if not takes_parts:
        raise StagingError(
            f"{key} of {source.size >> 20} MiB passes through {source.capacity >> 20} MiB of "
            "staging memory, and this store takes only "
            "images that are all in memory: put a folder or S3 before it as a nearer tier"
        )
    if source.capacity < needed:
        raise StagingError(
            f"{source.capacity >> 20} MiB of staging memory are too few to pass an image of "
            f"{source.size >> 20} MiB through in parts of "
            f"{(part_bytes or chunk_bytes) >> 20} MiB: give it {needed >> 20} MiB or more "
            "(staging_bytes, free memory), or smaller chunk_bytes"
        )


@contextmanager
def losing(*report: Callable[[CkptError], None]) -> Generator[None]:
    """Report any error of the body, so that no thread waits for the part that is lost."""
    try:
        yield
    except BaseException as error:
        lost = (
            error
            if isinstance(error, CkptError)
            else StagingError(f"a part of it was lost: {error!r}")
        )
        for each in report:
            each(lost)
        raise


class _Job:
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

    def hashed_late(self) -> list[partial[None]]:
        """Return the work in order: half of the parts, then the rest and the chunks in turns."""
        work = list(self.in_turn())
        parts = [one for one in work if one.func == self.write]
        chunks = [one for one in work if one.func == self.hash]
        half = len(parts) // 2
        turns = itertools.zip_longest(parts[half:], chunks)
        return parts[:half] + [one for turn in turns for one in turn if one is not None]

    def in_turn(self) -> Iterator[partial[None]]:
        """Yield each part, and the chunks that begin in it, in file order."""
        index = start = 0
        for offset in range(0, self._source.size, self._upload.part_bytes):
            yield partial(self.write, offset)
            last, end = index, start
            while last < len(self._chunks) and end < offset + self._upload.part_bytes:
                end += self._chunks[last]
                last += 1
            if last > index:
                yield partial(self.hash, start, index, last)
            index, start = last, end

    def one_by_one(self, workers: Workers, *, ahead: bool) -> None:
        """Write the parts in file order, while a worker hashes the chunks.

        ``ahead``: there are none to hash, and a worker gets the next part while one is written.
        """
        size, step = self._source.size, self._upload.part_bytes
        beside: list[Future[Any]] = [workers.submit(self.hash, 0, 0, len(self.table))]
        try:
            part: memoryview | None = None
            for offset in range(0, size, step):
                after = offset + step
                if ahead and after < size:
                    beside.append(workers.submit(self._source.view, after, min(size, after + step)))
                self.write(offset, part)
                part = beside.pop().result() if len(beside) > 1 else None
        except BaseException:
            # The caller takes the image back, so nothing may read it any more.
            wait([each for each in beside if not each.cancel()])
            raise
        beside[0].result()

    def write(self, offset: int, part: memoryview | None = None) -> None:
        """Write a part. ``part`` is its bytes, if the caller has them."""
        end = min(self._source.size, offset + self._upload.part_bytes)
        with losing(self._source.lost):
            data = self._source.view(offset, end) if part is None else part
            self._retry.call(lambda: self._upload.write(offset, data))
        self._source.written(offset, end)
        self._on_bytes(end - offset)

    def hash(self, start: int, first: int, last: int) -> None:
        """Hash the chunks ``first`` to ``last``; the first one begins at ``start``."""
        for index in range(first, last):
            end = start + self._chunks[index]
            with losing(self._source.lost):
                self.table[index] = _hashed(self._source, start, end)
            start = end
