"""Verify that every byte of a checkpoint is the byte that was written.

1. The manifest must have the right checksum. Its sizes must add up, and its boxes must tile the
   tensors.
2. Every fragment must be the one that the manifest was merged from.
3. Every data file must have the right size, and every chunk the right checksum. Neighbouring chunks
   are read in one request, and all workers read.

Faults are returned and not raised, so that all of them are reported. Each read of a restore or a
copy also verifies its chunks (see `ckpt.pipeline.chunk_reader`).

A *fragment* is the record of what one rank has written. A stored manifest refers to the fragments,
or *carries* copies of all of them, and to *fill in* a fragment is to add its contents. An
*increment* is a data file that leaves out the chunks that the file of an older step, its *base*,
also has. Its ``lead`` is the number of bytes before its own chunks. A *run* is one request for
neighbouring chunks, and its *misses* are the chunks that could not be read.
"""

from __future__ import annotations

import threading
import time
from collections.abc import Callable, Collection
from contextlib import suppress
from dataclasses import dataclass, field, replace
from functools import partial
from typing import TypeVar

from ckpt.catalog.fragments import check_bytes, load_fragment
from ckpt.catalog.step_listing import read_packed
from ckpt.errors import (
    AccessDenied,
    ChecksumMismatch,
    FileDamaged,
    ForeignFileMismatch,
    FormatUnsupported,
    IntegrityError,
    LinkRefused,
    ManifestCorrupt,
    ObjectNotFound,
    StorageError,
    TransientStorageError,
)
from ckpt.model.checksum import checksum
from ckpt.model.fill_manifest import carried_fragments, fill_manifest
from ckpt.model.fragment_columns import read_fragment
from ckpt.model.keys import StepRef, fragment_name
from ckpt.model.manifest import File, Fragment, FragmentRef, Manifest, StoredFile
from ckpt.model.record_encoding import MAX_RECORD_BYTES
from ckpt.pipeline.chunk_reader import ChunkReader, runs_of
from ckpt.pipeline.retry import RetryPolicy
from ckpt.pipeline.workers import Workers
from ckpt.plan.restore import ChunkRead, Run, chunks_of
from ckpt.storage.api import StorageBackend, read_record
from ckpt.storage.outside_files import as_fault_of, store_with

T = TypeVar("T")

OnProgress = Callable[[int, int], None]
"""A function that is called with the number of bytes that are done and the number of all bytes.

The calls come from worker threads, one at a time.
"""


@dataclass(frozen=True, slots=True, kw_only=True)
class Fault:
    """A difference between a stored object and the object that was written.

    Attributes:
        key: The key of the object.
        what: A description of the fault.
        offset: The byte of the object at which the fault begins; None if the fault concerns the
            whole object.
        nbytes: The length of the damaged chunk in bytes; None if the fault concerns no chunk.
        way: What to do about it, if that is not to mend the tier from another one.
    """

    key: str
    what: str
    offset: int | None = None
    nbytes: int | None = None
    way: str = ""

    def error(self) -> IntegrityError:
        """Return the fault as an exception: a `ChecksumMismatch` if the fault concerns a chunk,
        else an `IntegrityError`.
        """
        if self.offset is not None and self.nbytes is not None:
            return ChecksumMismatch(self.key, self.offset, self.nbytes)
        return IntegrityError(f"{self.key!r}: {self.what}")


@dataclass(frozen=True, slots=True, kw_only=True)
class VerifyReport:
    """The result of a verification.

    Attributes:
        verified_bytes: The number of bytes of data files that have the right checksum.
        seconds: The duration of the verification.
    """

    ref: StepRef
    faults: tuple[Fault, ...]
    verified_bytes: int
    seconds: float

    @property
    def intact(self) -> bool:
        return not self.faults


@dataclass(frozen=True, slots=True)
class StepFolder:
    """The folder of a step on one store, with the threads and the retry policy to work on it.

    Attributes:
        backend: The store.
        ref: The step.
        workers: The threads that send requests.
        retry: How requests are retried.
    """

    backend: StorageBackend
    ref: StepRef
    workers: Workers
    retry: RetryPolicy = field(default_factory=RetryPolicy)

    def read(self, key: str, decode: Callable[[bytes], T], *, limit: int = MAX_RECORD_BYTES) -> T:
        """Return what ``decode`` makes of a record (see ``read_record``)."""
        return self.retry.call(partial(read_record, self.backend, key, decode, limit=limit))

    def fragment(self, rank: int) -> tuple[Fragment, bytes]:
        """Return the fragment of a rank, and the bytes of its record.

        Raises:
            ObjectNotFound: There is no fragment of the rank.
            IntegrityError: The fragment is damaged.
        """
        key = self.ref.key(fragment_name(rank))
        return self.read(key, lambda data: (read_fragment(data, key=key), data))

    def intact_fragment(self, fragment_ref: FragmentRef) -> bytes | None:
        """Return the bytes of a fragment of a manifest; None if the fragment is missing, is another
        one, or cannot be read.
        """
        key = self.ref.key(fragment_ref.name)
        decode = partial(check_bytes, fragment_ref=fragment_ref, key=key)
        data: bytes | None = None
        with suppress(IntegrityError, StorageError):
            data = self.read(key, decode, limit=fragment_ref.size)
        return data

    def require_fragments(self, manifest: Manifest) -> None:
        """Raise ``ObjectNotFound`` if a fragment of ``manifest`` is missing. Reads no fragment."""
        head = self.backend.head
        self.workers.run_all(
            partial(self.retry.call, partial(head, self.ref.key(part.name)))
            for part in manifest.fragments
        )


def verify_step(
    backend: StorageBackend,
    ref: StepRef,
    *,
    workers: Workers,
    on_progress: OnProgress | None = None,
    retry: RetryPolicy | None = None,
    ranks: Collection[int] | None = None,
) -> VerifyReport:
    """Read all bytes of a committed step, and compare them with the checksums in its records.

    If the manifest is missing or damaged, the report has only this fault, and no other file is
    read.

    Each worker needs 16 MiB of host memory, or the size of the largest chunk if that is more. For
    encoded files, each worker needs memory for one decoded chunk in addition.

    Args:
        backend: The store.
        ref: The step.
        workers: The threads that read.
        on_progress: Called with the number of bytes that are done and the number of all bytes.
        retry: How requests are retried.
        ranks: The ranks whose files the store must have, if it is local to a node; None for all
            ranks.

    Raises:
        AccessDenied, TransientStorageError: The store denies access or does not answer. The
            checkpoint may be intact.
        FormatUnsupported: This ckpt cannot read the format of the checkpoint, which may be intact.
    """
    start = time.perf_counter()
    folder = StepFolder(backend, ref, workers, retry or RetryPolicy())
    verified_bytes = 0
    try:
        manifest, _ = read_packed(backend, ref, retry=folder.retry)
    except FormatUnsupported:
        raise
    except (IntegrityError, StorageError) as error:
        faults = [fault_of(error)]
    else:
        manifest, faults = _with_fragments(folder, manifest, ranks)
        files = manifest.stored_files().values()
        data_files = [file for file in files if ranks is None or file.rank in ranks]
        data_faults, verified_bytes = verify_files(folder, data_files, on_progress=on_progress)
        faults += data_faults
    return VerifyReport(
        ref=ref,
        faults=tuple(faults),
        verified_bytes=verified_bytes,
        seconds=time.perf_counter() - start,
    )


def _with_fragments(
    folder: StepFolder, manifest: Manifest, ranks: Collection[int] | None
) -> tuple[Manifest, list[Fault]]:
    """Read the fragments of ``ranks`` (None: of all ranks).

    Returns:
        The manifest with the intact fragments filled in, and the faults of the damaged fragments.
        If the fragment of a rank is damaged and the manifest carries no copy of it, only the size
        of the rank's data file can be compared. If the fragments contradict the manifest, the
        manifest is returned without them, and this is one more fault.
    """
    files, key = manifest.file_map(), folder.ref.manifest
    parts = folder.workers.run_all(
        partial(_fragment_or_fault, folder, manifest, fragment_ref, files.get(fragment_ref.rank))
        for fragment_ref in manifest.fragments
        if ranks is None or fragment_ref.rank in ranks
    )
    faults = [part for part in parts if isinstance(part, Fault)]
    intact = {part.rank: part for part in parts if isinstance(part, Fragment)}
    try:
        return fill_manifest(
            manifest, {**carried_fragments(manifest, key=key), **intact}, key=key
        ), faults
    except ManifestCorrupt as error:
        return manifest, [*faults, fault_of(error)]


def verify_files(
    folder: StepFolder, files: Collection[StoredFile], *, on_progress: OnProgress | None = None
) -> tuple[list[Fault], int]:
    """Read data files and compare each chunk with its checksum.

    Returns:
        The faults, and the number of bytes that have the right checksum.

    Raises:
        AccessDenied, TransientStorageError: As for ``verify_step``.
    """
    sized_files = _examine_sizes(folder, files)
    faults = [fault for _, _, fault in sized_files if fault]
    chunks: list[ChunkRead] = []
    # The files with their sizes on the store, by rank. Those of older steps have the key True.
    files_by_rank: dict[tuple[int, bool], StoredFile] = {}
    for file, size, _ in sized_files:
        # A second file of a rank is the base of its increment, since bases come last.
        in_base = (file.rank, False) in files_by_rank
        files_by_rank[file.rank, in_base] = replace(file, size=size)
    for file in files:
        chunks += [
            chunk
            for chunk in chunks_of(file)
            if chunk.offset + chunk.stored_nbytes <= files_by_rank[file.rank, chunk.in_base].size
        ]
    runs, reader = runs_of(chunks), ChunkReader(folder.backend, folder.retry)
    meter = Meter(sum(run.nbytes for run in runs), on_progress)

    def check(run: Run) -> list[Fault]:
        misses = reader.read(run, files_by_rank[run.rank, run.in_base], _NullSink())
        meter.add(run.nbytes)
        return [fault_of(error, chunk) for chunk, error in misses]

    results = folder.workers.run_all(partial(check, run) for run in runs)
    results += folder.workers.run_all(
        partial(_header_faults, folder, file) for file in files if file.increment is not None
    )
    data_faults = list(dict.fromkeys(fault for run_faults in results for fault in run_faults))
    return faults + data_faults, meter.total - sum(fault.nbytes or 0 for fault in data_faults)


def size_faults(folder: StepFolder, files: Collection[StoredFile]) -> list[Fault]:
    """Return a fault for each file that is missing or has another size. Reads no file."""
    return [fault for _, _, fault in _examine_sizes(folder, files) if fault]


def _examine_sizes(
    folder: StepFolder, files: Collection[StoredFile]
) -> list[tuple[StoredFile, int, Fault | None]]:
    """Return each file, its size on the store (0 if unknown), and its fault, if any. The files of
    older steps that increments refer to come last.
    """
    bases = [file.base for file in files if file.base is not None]
    return folder.workers.run_all(partial(_examine_size, folder, file) for file in [*files, *bases])


def _header_faults(folder: StepFolder, file: StoredFile) -> list[Fault]:
    """Return the fault of the header of an increment, which is no chunk, in a list; an empty list
    if there is none. An encoded file has no header.
    """
    assert file.increment is not None
    if not file.increment.checksum:
        return []
    header_bytes = file.increment.lead
    header = memoryview(bytearray(header_bytes))
    try:
        folder.retry.call(partial(folder.backend.read_into, file.key, 0, header))
    except StorageError as error:
        return [fault_of(error)]
    if checksum(header) == file.increment.checksum:
        return []
    return [Fault(key=file.key, what="its bytes were changed", offset=0, nbytes=header_bytes)]


class _NullSink:
    """A `Sink` that stores nothing, for chunks that are only compared with their checksums."""

    def direct(self, read: ChunkRead) -> None:  # noqa: ARG002
        return None

    def place(self, read: ChunkRead, data: memoryview) -> None:
        """Do nothing, since the reader has already compared the checksum."""


class Meter:
    """Counts the bytes that are done, and reports them. Any thread may call ``add``.

    Args:
        total: The number of all bytes.
        on_progress: See `OnProgress`.
    """

    def __init__(self, total: int, on_progress: OnProgress | None) -> None:
        self.total, self.count = total, 0
        self._on_progress, self._lock = on_progress, threading.Lock()

    def add(self, nbytes: int) -> None:
        with self._lock:
            self.count += nbytes
            if self._on_progress:
                self._on_progress(self.count, self.total)


def _fragment_or_fault(
    folder: StepFolder, manifest: Manifest, fragment_ref: FragmentRef, file: File | None
) -> Fragment | Fault:
    """Return a fragment of ``manifest``, or the fault if it is not intact."""
    load = partial(load_fragment, folder.backend, folder.ref, manifest, fragment_ref, file)
    try:
        fragment, _ = folder.retry.call(load)
    except (IntegrityError, StorageError) as error:
        return fault_of(error)
    return fragment


def _examine_size(folder: StepFolder, file: StoredFile) -> tuple[StoredFile, int, Fault | None]:
    """Return ``file``, its size on the store (0 if unknown), and its fault; None if it has none."""
    try:
        store, key = store_with(folder.backend, file)
        size = folder.retry.call(partial(store.head, key)).size
    except (StorageError, ForeignFileMismatch) as error:
        return file, 0, fault_of(as_fault_of(error, file))
    if size == file.size:
        return file, size, None
    damage = FileDamaged(file.key, size, file.size)
    if file.location:
        return file, size, fault_of(as_fault_of(damage, file))
    return file, size, Fault(key=file.key, what=damage.detail, offset=min(size, file.size))


def fault_of(error: Exception, chunk: ChunkRead | None = None) -> Fault:
    """Return the fault of the checkpoint that an error reveals.

    If the store denies access or does not answer, ``error`` is raised, since the checkpoint may be
    intact. A `LinkRefused` is a fault, since it concerns a single object.

    Args:
        error: The error.
        chunk: The chunk that could not be read; None if the error concerns no chunk.
    """
    match error:
        case LinkRefused():
            return Fault(key=error.key, what=error.what)
        case AccessDenied() | TransientStorageError():
            raise error
        case ChecksumMismatch():
            return Fault(
                key=error.key,
                what="its bytes were changed",
                offset=error.offset,
                nbytes=error.nbytes,
            )
        case ForeignFileMismatch():
            return Fault(
                key=error.key,
                what=error.detail,
                offset=error.offset,
                nbytes=chunk.stored_nbytes if chunk else None,
                way=error.way,
            )
        case ManifestCorrupt() | FileDamaged():
            return Fault(key=error.key, what=error.detail)
        case ObjectNotFound():
            return Fault(key=error.key, what="is missing")
        case StorageError():
            offset, nbytes = (chunk.offset, chunk.stored_nbytes) if chunk else (None, None)
            return Fault(
                key=error.key, what=f"cannot be read: {error.detail}", offset=offset, nbytes=nbytes
            )
        case _:
            return Fault(key=getattr(error, "key", ""), what=str(error))
