"""Is every byte of a checkpoint what was written?

1. The manifest proves itself: checksum, sizes that add up, boxes that tile.
2. Every fragment is the one that the manifest was merged from.
3. Every data file has its size, and every chunk of it its checksum. Neighbouring chunks are read together, by all workers.

What is found is returned as values, so that one damaged chunk does not hide the next.
"""

from __future__ import annotations

import threading
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Final

from ckpt.catalog.fragments import load_fragment
from ckpt.catalog.index import read_packed
from ckpt.codec.byte_planes import decode
from ckpt.errors import (
    AccessDenied,
    ChecksumMismatch,
    CkptError,
    FormatTooNew,
    IntegrityError,
    LinkRefused,
    ManifestCorrupt,
    ObjectNotFound,
    StorageError,
    TransientStorageError,
)
from ckpt.model.checksum import verify as verify_bytes
from ckpt.model.keys import StepRef
from ckpt.model.manifest import (
    Chunk,
    Encoding,
    File,
    Fragment,
    FragmentRef,
    Manifest,
    stored_lengths,
    stored_size,
)
from ckpt.model.reference import fill
from ckpt.pipeline.retry import RetryPolicy
from ckpt.pipeline.workers import Workers
from ckpt.storage.api import StorageBackend, fresh_memory

OnProgress = Callable[[int, int], None]
"""Told ``(bytes done, bytes in all)`` from the workers, one call at a time."""

SPAN_BYTES: Final = 16 << 20


@dataclass(frozen=True, slots=True, kw_only=True)
class Fault:
    """Something that is not as it was written. ``offset`` and ``nbytes`` say where in the object, if it is not all of it."""

    key: str
    what: str
    offset: int | None = None
    nbytes: int | None = None

    def error(self) -> IntegrityError:
        """The same as an exception."""
        if self.offset is not None and self.nbytes is not None:
            return ChecksumMismatch(self.key, self.offset, self.nbytes)
        return IntegrityError(f"{self.key!r}: {self.what}")


@dataclass(frozen=True, slots=True, kw_only=True)
class VerifyReport:
    """``verified_bytes`` of data files had the right checksum."""

    ref: StepRef
    faults: tuple[Fault, ...]
    verified_bytes: int
    seconds: float

    @property
    def intact(self) -> bool:
        return not self.faults


@dataclass(frozen=True, slots=True, kw_only=True)
class Span:
    """Neighbouring chunks of one file, read by one request. ``lengths`` are theirs in the file, where they may be encoded."""

    key: str
    offset: int
    nbytes: int
    chunks: tuple[Chunk, ...]
    lengths: tuple[int, ...]


def verify_step(
    backend: StorageBackend,
    ref: StepRef,
    *,
    workers: Workers,
    on_progress: OnProgress | None = None,
    retry: RetryPolicy | None = None,
) -> VerifyReport:
    """Read all of a committed step and compare it with its checksums.

    Host memory: 16 MiB per worker, or its largest chunk if that is larger; of an encoded file that, and a chunk.

    Raises:
        AccessDenied, TransientStorageError, FormatTooNew: The store could not be asked, or its answer not be read; that says nothing about the checkpoint.
    """
    start = time.perf_counter()
    retry = retry or RetryPolicy()
    try:
        manifest, _ = read_packed(backend, ref, retry=retry)
    except FormatTooNew:
        raise
    except (IntegrityError, StorageError) as error:
        fault = fault_of(error)
        return VerifyReport(ref=ref, faults=(fault,), verified_bytes=0, seconds=time.perf_counter() - start)
    files = manifest.file_map()
    parts = workers.run_all(
        partial(_fragment, backend, ref, manifest, fragment, files.get(fragment.rank), retry)
        for fragment in manifest.fragments
    )
    faults = [part for part in parts if isinstance(part, Fault)]
    try:
        manifest = _filled(manifest, [part for part in parts if isinstance(part, Fragment)], ref.manifest)
    except ManifestCorrupt as error:
        faults.append(fault_of(error))
    data_faults, verified = verify_files(
        backend,
        ref,
        manifest.files,
        workers=workers,
        on_progress=on_progress,
        retry=retry,
        encodings=manifest.encodings(),
    )
    return VerifyReport(
        ref=ref, faults=(*faults, *data_faults), verified_bytes=verified, seconds=time.perf_counter() - start
    )


def verify_files(
    backend: StorageBackend,
    ref: StepRef,
    files: Sequence[File],
    *,
    workers: Workers,
    on_progress: OnProgress | None,
    retry: RetryPolicy,
    encodings: Mapping[int, Encoding],
) -> tuple[list[Fault], int]:
    """The faults of data files, and how many bytes of them are right."""
    heads = _heads(backend, ref, files, workers, retry, encodings)
    faults = [fault for _, fault in heads if fault]
    spans: list[Span] = []
    for file, (size, _) in zip(files, heads, strict=True):
        every = spans_of(ref.key(file.name), file, encodings.get(file.rank))
        spans += [span for span in every if span.offset + span.nbytes <= size]
    meter = Meter(sum(span.nbytes for span in spans), on_progress)
    buffers = _Buffers()
    found = workers.run_all(partial(_check_span, backend, span, buffers, meter, retry) for span in spans)
    damaged = [fault for part in found for fault in part]
    return faults + damaged, meter.total - sum(fault.nbytes or 0 for fault in damaged)


def size_faults(
    backend: StorageBackend,
    ref: StepRef,
    files: Sequence[File],
    *,
    workers: Workers,
    retry: RetryPolicy,
    encodings: Mapping[int, Encoding],
) -> list[Fault]:
    """Files that are missing, cut, or added to. Reads none."""
    return [fault for _, fault in _heads(backend, ref, files, workers, retry, encodings) if fault]


def _heads(
    backend: StorageBackend,
    ref: StepRef,
    files: Sequence[File],
    workers: Workers,
    retry: RetryPolicy,
    encodings: Mapping[int, Encoding],
) -> list[tuple[int, Fault | None]]:
    """The size of each file, and what is wrong with it."""
    return workers.run_all(
        partial(_size_fault, backend, ref.key(file.name), stored_size(file, encodings.get(file.rank)), retry)
        for file in files
    )


def spans_of(key: str, file: File, encoding: Encoding | None = None) -> list[Span]:
    """The chunks of a file as requests of up to 16 MiB; a larger chunk is a request of its own. None for a file of which a manifest by reference tells the size only."""
    if not file.chunks:
        return []
    spans: list[Span] = []
    pending: list[tuple[Chunk, int]] = []
    start = nbytes = 0
    for chunk, length in zip(file.chunks, stored_lengths(file, encoding), strict=True):
        if pending and nbytes + length > SPAN_BYTES:
            spans.append(_span(key, start, pending))
            start, nbytes, pending = start + nbytes, 0, []
        pending.append((chunk, length))
        nbytes += length
    if pending:
        spans.append(_span(key, start, pending))
    return spans


def _span(key: str, offset: int, chunks: Sequence[tuple[Chunk, int]]) -> Span:
    lengths = tuple(length for _, length in chunks)
    return Span(
        key=key,
        offset=offset,
        nbytes=sum(lengths),
        chunks=tuple(chunk for chunk, _ in chunks),
        lengths=lengths,
    )


def check_chunks(span: Span, data: memoryview) -> list[ChecksumMismatch]:
    """The chunks of ``data`` that are not what was staged."""
    found: list[ChecksumMismatch] = []
    begin = 0
    for chunk, length in zip(span.chunks, span.lengths, strict=True):
        piece, offset = data[begin : begin + length], span.offset + begin
        try:
            if length < chunk.nbytes:
                memory = fresh_memory(chunk.nbytes)
                decode(piece, memory, key=span.key, offset=offset, digest=chunk.checksum)
            else:
                verify_bytes(piece, chunk.checksum, key=span.key, offset=offset)
        except ChecksumMismatch as error:
            found.append(error)
        begin += length
    return found


class Meter:
    """Counts bytes for ``on_progress``. Threads: ``add`` from any."""

    def __init__(self, total: int, on_progress: OnProgress | None) -> None:
        self.total, self.done = total, 0
        self._tell, self._lock = on_progress, threading.Lock()

    def add(self, nbytes: int) -> None:
        with self._lock:
            self.done += nbytes
            if self._tell:
                self._tell(self.done, self.total)


class _Buffers:
    """Page-aligned memory for spans, used again and again: as many as workers read at once. Threads: all methods from any."""

    def __init__(self) -> None:
        self._free: list[memoryview] = []  # list.append and list.pop are atomic

    def take(self, nbytes: int) -> memoryview:
        try:
            buffer = self._free.pop()
        except IndexError:
            buffer = fresh_memory(SPAN_BYTES)
        return buffer if buffer.nbytes >= nbytes else fresh_memory(nbytes)

    def give(self, buffer: memoryview) -> None:
        self._free.append(buffer)


def _check_span(
    backend: StorageBackend, span: Span, buffers: _Buffers, meter: Meter, retry: RetryPolicy
) -> list[Fault]:
    buffer = buffers.take(span.nbytes)
    try:
        view = buffer[: span.nbytes]
        retry.call(partial(backend.read_into, span.key, span.offset, view))
        return [fault_of(error) for error in check_chunks(span, view)]
    except LinkRefused as error:
        return [fault_of(error, span)]
    except (AccessDenied, TransientStorageError):
        raise
    except StorageError as error:
        if len(span.chunks) == 1 or isinstance(error, ObjectNotFound):
            return [fault_of(error, span)]
        return [
            fault
            for part in _halves(span)
            for fault in _check_span(backend, part, buffers, Meter(0, None), retry)
        ]
    finally:
        buffers.give(buffer)
        meter.add(span.nbytes)


def _halves(span: Span) -> tuple[Span, Span]:
    """For a span that cannot be read: the bad sector is in one of its chunks, the others may be fine."""
    middle = len(span.chunks) // 2
    pairs = list(zip(span.chunks, span.lengths, strict=True))
    left = _span(span.key, span.offset, pairs[:middle])
    return left, _span(span.key, span.offset + left.nbytes, pairs[middle:])


def _filled(manifest: Manifest, parts: Sequence[Fragment], key: str) -> Manifest:
    """One by reference with the fragments that are intact: of files whose fragment is not, only the size can be compared."""
    if not manifest.by_reference:
        return manifest
    return fill(manifest, {part.rank: part for part in parts}, key=key)


def _fragment(
    backend: StorageBackend,
    ref: StepRef,
    manifest: Manifest,
    named: FragmentRef,
    file: File | None,
    retry: RetryPolicy,
) -> Fragment | Fault:
    try:
        return retry.call(partial(load_fragment, backend, ref, manifest, named, file))[0]
    except (IntegrityError, StorageError) as error:
        return fault_of(error)


def _size_fault(
    backend: StorageBackend, key: str, wanted: int, retry: RetryPolicy
) -> tuple[int, Fault | None]:
    try:
        size = retry.call(partial(backend.head, key)).size
    except StorageError as error:
        return 0, fault_of(error)
    if size == wanted:
        return size, None
    what = f"has {size} bytes, should have {wanted}: it was {'cut' if size < wanted else 'added to'}"
    return size, Fault(key=key, what=what, offset=min(size, wanted))


def fault_of(error: CkptError, span: Span | None = None) -> Fault:
    """What an error says about the checkpoint; one that says nothing about it is raised."""
    match error:
        case LinkRefused():
            return Fault(key=error.key, what=error.what)
        case AccessDenied() | TransientStorageError():
            raise error
        case ChecksumMismatch():
            return Fault(
                key=error.key, what="its bytes were changed", offset=error.offset, nbytes=error.nbytes
            )
        case ManifestCorrupt():
            return Fault(key=error.key, what=error.detail)
        case ObjectNotFound():
            return Fault(key=error.key, what="is missing")
        case StorageError():
            offset, nbytes = (span.offset, span.nbytes) if span else (None, None)
            return Fault(key=error.key, what=f"cannot be read: {error.detail}", offset=offset, nbytes=nbytes)
        case _:
            return Fault(key=getattr(error, "key", ""), what=str(error))
