"""An image in memory -> a file on a tier and its chunk table.

Parts are written and chunks are hashed by the same few threads, turn by turn in file order, so that the disk is busy from the first part on and memory
is read while it is near. Each part is retried by itself; the first lasting error aborts the upload and is raised.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import wait
from functools import partial

from ckpt.model.checksum import checksum
from ckpt.model.manifest import Chunk
from ckpt.pipeline.retry import RetryPolicy
from ckpt.pipeline.workers import Workers
from ckpt.storage.api import StorageBackend, Upload

OnBytes = Callable[[int], None]
"""Called from worker threads with the number of bytes just written."""


def write_image(
    image: memoryview,
    chunks: Sequence[int],
    *,
    backend: StorageBackend,
    key: str,
    workers: Workers,
    retry: RetryPolicy,
    on_bytes: OnBytes,
) -> tuple[Chunk, ...]:
    """Make ``image`` durable under ``key``; returns its chunk table.

    Args:
        image: The whole file. Must not change until this returns.
        chunks: Lengths in bytes that cover it.

    Raises:
        StorageError: Nothing is visible under ``key``.
    """
    upload = retry.call(lambda: backend.upload(key, len(image)))
    table: list[Chunk | None] = [None] * len(chunks)
    try:
        if backend.capabilities.parallel_parts:
            workers.run_all(_jobs(image, chunks, table, upload, retry, on_bytes))
        else:
            hashing = workers.submit(_hash, image, chunks, table, 0, 0, len(chunks))
            try:
                for offset in range(0, len(image), upload.part_bytes):
                    _write(image, upload, offset, retry, on_bytes)
            except BaseException:
                if not hashing.cancel():  # the image is only lent: nobody reads it once this has raised
                    wait([hashing])
                raise
            hashing.result()
        retry.call(upload.finish)
    except BaseException:
        upload.abort()
        raise
    return tuple(chunk for chunk in table if chunk is not None)


def _jobs(
    image: memoryview,
    chunks: Sequence[int],
    table: list[Chunk | None],
    upload: Upload,
    retry: RetryPolicy,
    on_bytes: OnBytes,
) -> Iterator[Callable[[], None]]:
    index = start = 0
    for offset in range(0, len(image), upload.part_bytes):
        yield partial(_write, image, upload, offset, retry, on_bytes)
        last, end = index, start
        while last < len(chunks) and end < offset + upload.part_bytes:
            end += chunks[last]
            last += 1
        if last > index:
            yield partial(_hash, image, chunks, table, start, index, last)
        index, start = last, end


def _write(image: memoryview, upload: Upload, offset: int, retry: RetryPolicy, on_bytes: OnBytes) -> None:
    part = image[offset : offset + upload.part_bytes]
    retry.call(lambda: upload.write(offset, part))
    on_bytes(len(part))


def _hash(
    image: memoryview, chunks: Sequence[int], table: list[Chunk | None], start: int, first: int, last: int
) -> None:
    for index in range(first, last):
        end = start + chunks[index]
        table[index] = Chunk(chunks[index], checksum(image[start:end]))
        start = end
