"""Is every byte of a checkpoint what was written?

1. The manifest proves itself: checksum, sizes that add up, boxes that tile.
2. Every fragment is the one that the manifest was merged from.
3. Every data file has its size, and every chunk of it its checksum. Neighbouring chunks are read
   together, by all workers.

What is found is returned as values, so that one damaged chunk does not hide the next.
"""

from __future__ import annotations

import threading
import time
from collections.abc import Callable, Collection
from dataclasses import dataclass, field, replace
from functools import partial

from ckpt.catalog.fragments import load_fragment
from ckpt.catalog.index import read_packed
from ckpt.errors import (
    AccessDenied,
    ChecksumMismatch,
    FormatUnsupported,
    IntegrityError,
    LinkRefused,
    ManifestCorrupt,
    ObjectNotFound,
    StorageError,
    TransientStorageError,
)
from ckpt.model.encoding import MAX_RECORD_BYTES
from ckpt.model.fill import carried_fragments, fill
from ckpt.model.keys import StepRef
from ckpt.model.manifest import File, Fragment, FragmentRef, Manifest, StoredFile
from ckpt.pipeline.chunk_reader import ChunkReader, runs_of
from ckpt.pipeline.retry import RetryPolicy
from ckpt.pipeline.workers import Workers
from ckpt.plan.coalesce import Run
from ckpt.plan.restore import ChunkRead, chunks_of
from ckpt.storage.api import StorageBackend, read_object

OnProgress = Callable[[int, int], None]
"""Called by the workers with the bytes done and the bytes in all, one call at a time."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Fault:
    """Something that is not as it was written.

    ``offset`` and ``nbytes`` say where in the object, if it is not all of it.
    """

    key: str
    what: str
    offset: int | None = None
    nbytes: int | None = None

    def error(self) -> IntegrityError:
        """Return the fault as an exception."""
        if self.offset is not None and self.nbytes is not None:
            return ChecksumMismatch(self.key, self.offset, self.nbytes)
        return IntegrityError(f"{self.key!r}: {self.what}")


@dataclass(frozen=True, slots=True, kw_only=True)
class VerifyReport:
    """The result of a verification. ``verified_bytes`` of data files had the right checksum."""

    ref: StepRef
    faults: tuple[Fault, ...]
    verified_bytes: int
    seconds: float

    @property
    def intact(self) -> bool:
        return not self.faults


@dataclass(frozen=True, slots=True)
class StepFolder:
    """The folder of a step in one store, and the means to work on it.

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

    def read(self, key: str, limit: int = MAX_RECORD_BYTES) -> bytes:
        """Return a whole object."""
        return self.retry.call(partial(read_object, self.backend, key, limit=limit))

    def require_fragments(self, manifest: Manifest) -> None:
        """Raise ``ObjectNotFound`` if a fragment is missing. Reads none."""
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
    """Read all of a committed step and compare it with its checksums.

    Host memory: 16 MiB per worker, or its largest chunk if that is larger; of an encoded file that,
    and a chunk.

    Args:
        backend: The store.
        ref: The step.
        workers: The threads that read.
        on_progress: Called with the bytes done and the bytes in all.
        retry: How requests are retried.
        ranks: The ranks whose files are to be there, if a node has a folder of its own; None for
            all ranks.

    Raises:
        AccessDenied, TransientStorageError, FormatUnsupported: The store could not be asked, or its
            answer not be read; that says nothing about the checkpoint.
    """
    start = time.perf_counter()
    folder = StepFolder(backend, ref, workers, retry or RetryPolicy())
    verified = 0
    try:
        manifest, _ = read_packed(backend, ref, retry=folder.retry)
    except FormatUnsupported:
        raise
    except (IntegrityError, StorageError) as error:
        faults = [fault_of(error)]
    else:
        manifest, faults = _with_fragments(folder, manifest, ranks)
        files = manifest.stored_files().values()
        data = [file for file in files if ranks is None or file.rank in ranks]
        data_faults, verified = verify_files(folder, data, on_progress=on_progress)
        faults += data_faults
    return VerifyReport(
        ref=ref,
        faults=tuple(faults),
        verified_bytes=verified,
        seconds=time.perf_counter() - start,
    )


def _with_fragments(
    folder: StepFolder, manifest: Manifest, ranks: Collection[int] | None
) -> tuple[Manifest, list[Fault]]:
    """Return the manifest with the fragments of ``ranks`` that are intact, and the faults of the
    others. Of a file without a fragment, only the size can be compared.
    """
    files, key = manifest.file_map(), folder.ref.manifest
    parts = folder.workers.run_all(
        partial(_fragment, folder, manifest, named, files.get(named.rank))
        for named in manifest.fragments
        if ranks is None or named.rank in ranks
    )
    faults = [part for part in parts if isinstance(part, Fault)]
    intact = {part.rank: part for part in parts if isinstance(part, Fragment)}
    try:
        return fill(manifest, {**carried_fragments(manifest, key=key), **intact}, key=key), faults
    except ManifestCorrupt as error:
        return manifest, [*faults, fault_of(error)]


def verify_files(
    folder: StepFolder, files: Collection[StoredFile], *, on_progress: OnProgress | None = None
) -> tuple[list[Fault], int]:
    """Return the faults of data files, and how many bytes of them are right."""
    heads = _heads(folder, files)
    faults = [fault for _, fault in heads if fault]
    chunks: list[ChunkRead] = []
    stored: dict[int, StoredFile] = {}
    for file, (size, _) in zip(files, heads, strict=True):
        every = chunks_of(file)
        chunks += [chunk for chunk in every if chunk.offset + chunk.stored_nbytes <= size]
        stored[file.rank] = replace(file, size=size)
    runs, reader = runs_of(chunks), ChunkReader(folder.backend, folder.retry)
    meter = Meter(sum(run.nbytes for run in runs), on_progress)

    def check(run: Run) -> list[Fault]:
        missed = reader.read(run, stored[run.rank], _Nowhere())
        meter.add(run.nbytes)
        return [fault_of(error, chunk) for chunk, error in missed]

    found = folder.workers.run_all(partial(check, run) for run in runs)
    damaged = list(dict.fromkeys(fault for part in found for fault in part))
    return faults + damaged, meter.total - sum(fault.nbytes or 0 for fault in damaged)


def size_faults(folder: StepFolder, files: Collection[StoredFile]) -> list[Fault]:
    """Return the files that are missing or have another size. Reads no file."""
    return [fault for _, fault in _heads(folder, files) if fault]


def _heads(folder: StepFolder, files: Collection[StoredFile]) -> list[tuple[int, Fault | None]]:
    """Yield the size of each file, and what is wrong with it."""
    return folder.workers.run_all(partial(_size_fault, folder, file) for file in files)


class _Nowhere:
    """A `Sink` for bytes that are only compared with their checksums."""

    def direct(self, read: ChunkRead) -> None:  # noqa: ARG002
        return None

    def place(self, read: ChunkRead, data: memoryview) -> None:
        """Do nothing, since the reader has compared the checksum already."""


class Meter:
    """Counts bytes for ``on_progress``. Any thread may call ``add``."""

    def __init__(self, total: int, on_progress: OnProgress | None) -> None:
        self.total, self.done = total, 0
        self._on_progress, self._lock = on_progress, threading.Lock()

    def add(self, nbytes: int) -> None:
        with self._lock:
            self.done += nbytes
            if self._on_progress:
                self._on_progress(self.done, self.total)


def _fragment(
    folder: StepFolder, manifest: Manifest, named: FragmentRef, file: File | None
) -> Fragment | Fault:
    load = partial(load_fragment, folder.backend, folder.ref, manifest, named, file)
    try:
        return folder.retry.call(load)[0]
    except (IntegrityError, StorageError) as error:
        return fault_of(error)


def _size_fault(folder: StepFolder, file: StoredFile) -> tuple[int, Fault | None]:
    try:
        size = folder.retry.call(partial(folder.backend.head, file.key)).size
    except StorageError as error:
        return 0, fault_of(error)
    if size == file.size:
        return size, None
    how = "cut" if size < file.size else "added to"
    what = f"has {size} bytes, should have {file.size}: it was {how}"
    return size, Fault(key=file.key, what=what, offset=min(size, file.size))


def fault_of(error: Exception, chunk: ChunkRead | None = None) -> Fault:
    """Return what an error says about the checkpoint. An error that says nothing about it is
    raised.
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
        case ManifestCorrupt():
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
