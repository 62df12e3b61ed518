"""Cut the files of another program into chunks around the tensors in them, and hash the chunks.

The parts of tensors are cut by the rule of all shards. The bytes between them, such as headers and
pickles, are chunks too, which belong to no tensor. So every byte of a file has a checksum. A `Span`
is the place of a tensor's elements in a file.
"""

from __future__ import annotations

import os
from collections.abc import Collection, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Final

from ckpt.catalog.verify import Meter, OnProgress
from ckpt.errors import ConfigError, IntegrityError
from ckpt.exchange.inert.inert_torch import Span
from ckpt.exchange.inert.input_limits import open_file
from ckpt.model.box import Box
from ckpt.model.checksum import checksum
from ckpt.model.chunks import split_box
from ckpt.model.dtype import DTYPES
from ckpt.model.manifest import Chunk
from ckpt.pipeline.workers import Workers

_READ_BYTES: Final = 16 << 20
_THREADS: Final = 8


@dataclass(frozen=True, slots=True)
class ForeignFile:
    """A file of another program, cut into chunks.

    Attributes:
        path: The path of the file.
        size: Its size in bytes.
        mtime_ns: When it was last written to, in nanoseconds since 1970.
        chunk_lengths: The length of each chunk in bytes. The chunks cover the file.
    """

    path: str
    size: int
    mtime_ns: int
    chunk_lengths: tuple[int, ...]


def usable_in_place(spans: Collection[Span]) -> list[Span]:
    """Return those of ``spans`` whose bytes a shard can use where they are: they are in row-major
    order, and share no byte with another of the result.
    """
    result: list[Span] = []
    end_by_path: dict[str, int] = {}
    for span in sorted(spans, key=lambda span: (span.path, span.offset, -span.nbytes)):
        if span.nbytes and span.is_row_major and span.offset >= end_by_path.get(span.path, 0):
            result.append(span)
            end_by_path[span.path] = span.offset + span.nbytes
    return result


def cut_file(path: str, spans: Sequence[Span], chunk_bytes: int) -> ForeignFile:
    """Cut the file ``path`` into chunks of at most ``chunk_bytes``.

    Args:
        spans: What ``usable_in_place`` has returned for this file.

    Raises:
        IntegrityError: The file ends before a span does, or is missing.
        ConfigError: The file cannot be read.
    """
    with open_file(path) as file:
        status = os.fstat(file.fileno())
    chunk_lengths: list[int] = []
    end = 0
    for span in spans:
        chunk_lengths += _gap_chunk_lengths(span.offset - end, chunk_bytes)
        itemsize = DTYPES[span.dtype].itemsize
        boxes = split_box(Box.whole(span.shape), itemsize, chunk_bytes)
        chunk_lengths += [box.numel * itemsize for box in boxes]
        end = span.offset + span.nbytes
    if end > status.st_size:
        raise IntegrityError(f"{path} is cut: it ends at byte {status.st_size}, before its tensors")
    chunk_lengths += _gap_chunk_lengths(status.st_size - end, chunk_bytes)
    return ForeignFile(path, status.st_size, status.st_mtime_ns, tuple(chunk_lengths))


def _gap_chunk_lengths(nbytes: int, limit: int) -> list[int]:
    """Return the lengths of the chunks of ``nbytes`` that belong to no tensor."""
    count, rest = divmod(nbytes, limit)
    return [limit] * count + ([rest] if rest else [])


def hash_files(
    files: Sequence[ForeignFile], on_progress: OnProgress | None = None
) -> list[tuple[Chunk, ...]]:
    """Read each file once from its begin to its end, and return the chunk table of each.

    Args:
        files: The files.
        on_progress: Called as bytes are read.

    Raises:
        IntegrityError: A file was changed meanwhile, or is gone.
        ConfigError: A file cannot be read.
    """
    meter = Meter(sum(file.size for file in files), on_progress)
    with Workers("adopt", max(1, min(_THREADS, os.cpu_count() or 1))) as workers:
        tables = [
            workers.run_all(
                partial(_read_and_hash, file, start, chunk_lengths, meter)
                for start, chunk_lengths in _read_requests(file.chunk_lengths)
            )
            for file in files
        ]
    for file in files:
        with open_file(file.path) as handle:
            status = os.fstat(handle.fileno())
        if (status.st_size, status.st_mtime_ns) != (file.size, file.mtime_ns):
            raise IntegrityError(_change_text(file))
    return [tuple(chunk for part in table for chunk in part) for table in tables]


def _change_text(file: ForeignFile) -> str:
    return (
        f"{file.path} was written to while it was read: wait until the program that writes it has "
        "ended, and adopt the folder again"
    )


def _read_requests(chunk_lengths: Sequence[int]) -> list[tuple[int, list[int]]]:
    """Return the position and the chunks of each read, which has about ``_READ_BYTES``."""
    requests: list[tuple[int, list[int]]] = []
    position = 0
    pending: list[int] = []
    for length in chunk_lengths:
        if pending and sum(pending) + length > _READ_BYTES:
            requests.append((position, pending))
            position, pending = position + sum(pending), []
        pending.append(length)
    return [*requests, (position, pending)] if pending else requests


def _read_and_hash(
    file: ForeignFile, start: int, chunk_lengths: Sequence[int], meter: Meter
) -> list[Chunk]:
    """Read the chunks from the byte ``start`` on, and return them with their checksums."""
    memory = memoryview(bytearray(sum(chunk_lengths)))
    with open_file(file.path) as handle:
        end = 0
        while end < memory.nbytes:
            read_bytes = os.preadv(handle.fileno(), [memory[end:]], start + end)
            if not read_bytes:
                raise IntegrityError(_change_text(file))
            end += read_bytes
    chunks: list[Chunk] = []
    position = 0
    for length in chunk_lengths:
        part = memory[position : position + length]
        chunks.append(Chunk(length, checksum(part)))
        position += length
    meter.add(memory.nbytes)
    return chunks


def real_path(path: str) -> str:
    """Return the path of a file with symbolic links resolved. Raises ``ConfigError`` if a manifest
    cannot have the path.
    """
    real = os.path.realpath(path)
    try:
        real.encode()
    except UnicodeEncodeError:
        raise ConfigError(f"{path!r} is no UTF-8, which a manifest needs: rename it") from None
    return real
