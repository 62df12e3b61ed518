"""Copy a checkpoint, or files of it, to another store, proving every byte on the way.

1. Files that the destination already has, whole and right, are kept: a fetch that was cut short goes on where it was.
2. Data files: workers read spans of whole chunks, each from the nearest source that has it intact, and hand the bytes to uploads. A part of an upload that spans share is
   put together from their pieces. Nothing is visible until all of a file is right.
3. Fragments, then the manifest, byte for byte and last: as always, the step exists if and only if it does. Between the two the mark (``coordination.claim_marker``) and one more look at all of
   them, as for any save that is finished from outside of its job.

Memory: spans and shared parts are fresh memory that is let go as soon as nobody needs it. A store whose uploads keep what they are given until
``finish`` (the contract allows it) holds the files under way; one that does not holds 16 MiB and at most two parts per worker.
"""

from __future__ import annotations

import threading
import time
from collections.abc import Callable, Generator, Mapping, Sequence
from contextlib import AbstractContextManager, contextmanager, nullcontext
from dataclasses import dataclass
from functools import partial

from ckpt.catalog.otherwise import clear_unnamed, encoded_otherwise
from ckpt.catalog.tiered_reader import OnChunk, OnRepair, TieredReader
from ckpt.catalog.verify import (
    Meter,
    OnProgress,
    fault_of,
    size_faults,
    verify_files,
)
from ckpt.coordination.claim_marker import claim_for_finish, release_marker
from ckpt.errors import FormatTooNew, IntegrityError, ObjectExists, ObjectNotFound, StorageError
from ckpt.model.checksum import checksum
from ckpt.model.encoding import MAX_RECORD_BYTES, unpack
from ckpt.model.keys import StepRef
from ckpt.model.manifest import Encoding, File, FragmentRef, Manifest, stored_size
from ckpt.pipeline.reader import BytesSink, runs_of
from ckpt.pipeline.retry import RetryPolicy
from ckpt.pipeline.workers import Workers
from ckpt.plan.coalesce import Run
from ckpt.plan.restore import chunks_of
from ckpt.storage.api import StorageBackend, Upload, fresh_memory, read_object


@dataclass(frozen=True, slots=True, kw_only=True)
class FetchReport:
    """``nbytes`` of data files, as they lie there, are now right at the destination; ``copied_bytes`` of them were not there before."""

    ref: StepRef
    nbytes: int
    copied_bytes: int
    seconds: float


def fetch_step(
    source: StorageBackend,
    ref: StepRef,
    destination: StorageBackend,
    *,
    workers: Workers,
    on_progress: OnProgress | None = None,
    retry: RetryPolicy | None = None,
    others: Sequence[StorageBackend] = (),
    on_repair: OnRepair = lambda _: None,
) -> FetchReport:
    """Make a committed step of ``source`` one of ``destination``.

    On an error, what is finished stays for the next try, and the step is not listed at the destination (unless it was before).
    A destination where the step is encoded otherwise is left alone if it is intact; else it gets the step as it lies at the source.

    Args:
        others: Where to look for what the source has not intact, nearest first.
        on_repair: Told when one of them is.

    Raises:
        ChecksumMismatch, ManifestCorrupt, FormatTooNew: All sources are damaged. Any ``IntegrityError`` is about the sources.
        IntegrityError: They lack a file, or a file cannot be read where it should have bytes.
        ObjectExists: The destination has an intact manifest of this very attempt that differs, and not only in how files are encoded.
    """
    start = time.perf_counter()
    retry = retry or RetryPolicy()
    origin = TieredReader((source, *others), ref, retry=retry, on_repair=on_repair)
    with _about_the_source():
        found = origin.whole(lambda found: origin.filled(found, None))
    manifest, packed = found.manifest, found.packed
    old = encoded_otherwise(destination, ref, manifest, packed, retry)
    if old is None:
        _make_way(destination, ref, packed, retry)
    elif not _wrong(destination, ref, old, workers, retry):
        return FetchReport(
            ref=ref, nbytes=old.stored_bytes, copied_bytes=0, seconds=time.perf_counter() - start
        )
    missing, encodings = _missing(destination, ref, manifest, workers, retry), manifest.encodings()
    if not others:
        for fault in size_faults(source, ref, missing, workers=workers, retry=retry, encodings=encodings):
            raise fault.error()
    copied = sum(stored_size(file, encodings.get(file.rank)) for file in missing)
    meter = Meter(manifest.stored_bytes, on_progress)
    meter.add(manifest.stored_bytes - copied)
    copy_files(origin, missing, destination, encodings=encodings, workers=workers, retry=retry, meter=meter)
    if old is not None:  # not before all of the data is there
        retry.call(partial(destination.delete, ref.manifest))
    copy_fragments(origin, manifest, manifest.fragments, destination, workers=workers, retry=retry)
    look = partial(_look, destination, ref, manifest, workers, retry)
    commit_copy(destination, ref, packed, retry, look=look)
    if old is not None:
        clear_unnamed(destination, ref, manifest, retry)
    return FetchReport(
        ref=ref, nbytes=manifest.stored_bytes, copied_bytes=copied, seconds=time.perf_counter() - start
    )


def copy_files(
    origin: TieredReader,
    files: Sequence[File],
    destination: StorageBackend,
    *,
    encodings: Mapping[int, Encoding],
    workers: Workers,
    retry: RetryPolicy,
    meter: Meter,
    on_chunk: OnChunk = lambda *_: None,
) -> int:
    """Copy data files, all of each or nothing; returns the position of the farthest source that was needed. Raises as ``fetch_step`` does."""
    copies = [
        _FileCopy(origin, destination, file, encodings.get(file.rank), retry, on_chunk) for file in files
    ]
    try:
        found = workers.run_all(partial(copy.take, run, meter) for copy in copies for run in copy.runs)
    finally:
        for copy in copies:
            copy.stop()
    return max(found, default=0)


def copy_fragments(
    origin: TieredReader,
    manifest: Manifest,
    fragments: Sequence[FragmentRef],
    destination: StorageBackend,
    *,
    workers: Workers,
    retry: RetryPolicy,
) -> None:
    """Copy those of ``fragments`` that are not there. Their data files go first: whoever finds all fragments may commit them."""
    files = manifest.file_map()
    workers.run_all(
        partial(_copy_fragment, origin, destination, manifest, named, files.get(named.rank), retry)
        for named in fragments
    )


def commit_copy(
    destination: StorageBackend, ref: StepRef, packed: bytes, retry: RetryPolicy, *, look: Callable[[], None]
) -> None:
    """Put the manifest of a step whose files are all there. ``look`` raises if one of them is not, or not any more: until there is a manifest, who makes room may have taken it for remains.

    Raises:
        ObjectExists: As ``fetch_step``.
        StorageError: It is being cleared away there, or was.
    """
    if _make_way(destination, ref, packed, retry):
        look()
        return
    look()  # without a mark: one that cannot be finished shall not keep its remains from being cleared away
    if not retry.call(partial(claim_for_finish, destination, ref)):
        raise StorageError(ref.folder, f"it is being cleared away on {destination.url}")
    look()
    _commit(destination, ref, packed, retry)
    release_marker(destination, ref)


def _look(
    destination: StorageBackend, ref: StepRef, manifest: Manifest, workers: Workers, retry: RetryPolicy
) -> None:
    """Raises ``StorageError`` if a file or a fragment is not there as it should be."""
    faults = size_faults(
        destination, ref, manifest.files, workers=workers, retry=retry, encodings=manifest.encodings()
    )
    if faults:
        raise StorageError(
            faults[0].key, f"{faults[0].what} on {destination.url}: somebody has cleared it away"
        )
    workers.run_all(
        partial(retry.call, partial(destination.head, ref.key(part.name))) for part in manifest.fragments
    )


def _make_way(destination: StorageBackend, ref: StepRef, packed: bytes, retry: RetryPolicy) -> bool:
    """Return whether the manifest is there. A damaged copy of the manifest is removed first: it would keep the good one out. An intact one that differs, or of a later format, is not ours to judge."""
    try:
        there = retry.call(partial(read_object, destination, ref.manifest, limit=MAX_RECORD_BYTES))
        if there == packed:
            return True
        unpack(there, Manifest, key=ref.manifest)
    except ObjectNotFound:
        return False
    except IntegrityError as error:
        if not isinstance(error, FormatTooNew):
            retry.call(partial(destination.delete, ref.manifest))
            return False
    raise ObjectExists(
        ref.manifest,
        f"{destination.url} has another manifest of the same attempt: remove the folder {ref.folder} there, then copy again",
    )


def _missing(
    destination: StorageBackend, ref: StepRef, manifest: Manifest, workers: Workers, retry: RetryPolicy
) -> list[File]:
    wrong = _wrong(destination, ref, manifest, workers, retry)
    return [file for file in manifest.files if ref.key(file.name) in wrong]


def _wrong(
    destination: StorageBackend, ref: StepRef, manifest: Manifest, workers: Workers, retry: RetryPolicy
) -> set[str]:
    """Keys of data files that are not there as they should be."""
    faults, _ = verify_files(
        destination, ref, manifest.files,
        workers=workers, on_progress=None, retry=retry, encodings=manifest.encodings(),
    )  # fmt: skip
    return {fault.key for fault in faults}


def _copy_fragment(
    origin: TieredReader,
    destination: StorageBackend,
    manifest: Manifest,
    named: FragmentRef,
    file: File | None,
    retry: RetryPolicy,
) -> None:
    with _about_the_source():
        data = origin.fragment(manifest, named, file)
    key = origin.ref.key(named.name)
    try:
        there = retry.call(partial(read_object, destination, key, limit=named.size))
    except StorageError:  # absent, or longer than it should be
        there = b""
    if checksum(there) != named.checksum:
        retry.call(partial(destination.put, key, [data]))


def _commit(destination: StorageBackend, ref: StepRef, packed: bytes, retry: RetryPolicy) -> None:
    try:
        retry.call(partial(destination.put, ref.manifest, [packed], if_absent=True))
    except (
        ObjectExists
    ):  # it was there all along, another fetch was faster, or the reply to a first try was lost
        if retry.call(partial(read_object, destination, ref.manifest, limit=MAX_RECORD_BYTES)) != packed:
            raise


@contextmanager
def _about_the_source() -> Generator[None]:
    """What is missing or unreadable there is damage; the same at the destination is a failure of that store."""
    try:
        yield
    except StorageError as error:
        raise fault_of(error).error() from error


@dataclass(slots=True)
class _Part:
    """A part of an upload that more than one span has bytes of."""

    memory: memoryview
    filled: int = 0


class _FileCopy:
    """One data file on its way. Threads: ``take`` from workers; ``stop`` from the owner, once, also while some still run.

    Whoever brings the last bytes finishes the upload; after ``stop``, whoever leaves last aborts it.
    """

    def __init__(
        self,
        origin: TieredReader,
        destination: StorageBackend,
        file: File,
        encoding: Encoding | None,
        retry: RetryPolicy,
        on_chunk: OnChunk,
    ) -> None:
        key = origin.ref.key(file.name)
        self.runs = runs_of(chunks_of(file, encoding, as_stored=True))
        self._origin, self._destination, self._key = origin, destination, key
        self._size = stored_size(file, encoding)
        self._retry, self._on_chunk = retry, on_chunk
        self._lock = threading.Lock()
        parallel = destination.capabilities.parallel_parts
        self._turn: AbstractContextManager[object] = nullcontext() if parallel else threading.Lock()
        self._upload: Upload | None = None
        self._parts: dict[int, _Part] = {}
        self._left, self._inside, self._over = len(self.runs), 0, False

    def take(self, run: Run, meter: Meter) -> int:
        """Copy one run; returns the position of the source that had it, raises what is wrong with it."""
        upload = self._enter()
        if upload is None:
            return 0
        try:
            data = fresh_memory(run.nbytes)
            with _about_the_source():
                position = self._origin.fetch(run.reads, BytesSink(data, run.offset), self._on_chunk)
            self._hand_over(upload, run.offset, data)
            if self._is_last():
                try:
                    self._retry.call(upload.finish)
                except BaseException:
                    upload.abort()
                    raise
        finally:
            self._leave(upload)
        meter.add(run.nbytes)
        return position

    def stop(self) -> None:
        """No more spans. What is not finished is aborted, by the last one inside if there is any."""
        with self._lock:
            if self._over:
                return
            self._over = True
            abandoned = self._upload if not self._inside else None
        if abandoned:
            abandoned.abort()

    def _enter(self) -> Upload | None:
        with self._lock:
            if self._over:
                return None
            if self._upload is None:
                self._upload = self._retry.call(partial(self._destination.upload, self._key, self._size))
            self._inside += 1
            return self._upload

    def _is_last(self) -> bool:
        """Whether this was the last span; then ``finish`` follows, and there is nothing left to abort."""
        with self._lock:
            self._left -= 1
            if self._left or self._over:
                return False
            self._over, self._upload = True, None
            return True

    def _leave(self, upload: Upload) -> None:
        with self._lock:
            self._inside -= 1
            abandoned = self._over and not self._inside and self._upload is not None
            if abandoned:
                self._upload = None
        if abandoned:
            upload.abort()

    def _hand_over(self, upload: Upload, offset: int, data: memoryview) -> None:
        """Whole parts straight from the span's memory; the bytes at its ragged ends go where the neighbours' go too."""
        size, end = upload.part_bytes, offset + data.nbytes
        for start in range(offset - offset % size, end, size):
            stop = min(start + size, self._size)
            low, high = max(offset, start), min(end, stop)
            piece = data[low - offset : high - offset]
            if (low, high) == (start, stop):
                self._write(upload, start, piece)
            elif part := self._join(start, stop, low, piece):
                self._write(upload, start, part)

    def _join(self, start: int, stop: int, low: int, piece: memoryview) -> memoryview | None:
        """The part, once all pieces of it are there."""
        with self._lock:
            part = self._parts.get(start) or self._parts.setdefault(start, _Part(fresh_memory(stop - start)))
        part.memory[low - start : low - start + piece.nbytes] = piece
        with self._lock:
            part.filled += piece.nbytes
            if part.filled < stop - start:
                return None
            return self._parts.pop(start).memory

    def _write(self, upload: Upload, offset: int, data: memoryview) -> None:
        with self._turn:
            self._retry.call(partial(upload.write, offset, data))
