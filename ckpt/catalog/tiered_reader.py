"""Read one step from several stores: each chunk from the nearest store that has it intact.

The stores have files of the same attempt, and a chunk has the same checksum on all stores, however
it is encoded. So a file or a chunk may also come from a store whose manifest is missing or damaged.
The files of such a store are assumed to have the encoding that the manifest of another store
describes. A store is asked for a chunk only if no nearer store has it intact. Failures are
remembered: a store that does not answer is not asked again, and a store that lacks a file is not
asked for this file again. The *reach* of an error is the part of a store that is not read again
after it: a chunk, a file or the store. A *verdict* is the error that is raised if all stores have
failed. A file that is missing is *damage* of the checkpoint.

A *fragment* is the record of what one rank has written. A stored, or *packed*, manifest refers to
the fragments, and to *fill in* a fragment is to add its contents. The *layout* of a store is the
manifest that describes how the store encodes the files. An *increment* is a data file that leaves
out the chunks that the file of an older step, its *base*, also has. A *run* is one request for
neighbouring chunks of a file, and its *misses* are the chunks that the store could not provide.
"""

from __future__ import annotations

import threading
from collections.abc import Callable, Collection, Generator, Iterable, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, replace
from functools import partial
from typing import Final, TypeVar

from ckpt.catalog.fragments import Parts, fill_from, load_fragment
from ckpt.catalog.step_listing import read_packed
from ckpt.errors import (
    ForeignFileMismatch,
    IntegrityError,
    ObjectNotFound,
    StorageError,
    TransientStorageError,
)
from ckpt.model.keys import StepRef
from ckpt.model.manifest import File, Fragment, FragmentRef, Manifest, StoredFile
from ckpt.pipeline.chunk_reader import ChunkReader, Misses, Sink, runs_of
from ckpt.pipeline.retry import RetryPolicy
from ckpt.pipeline.workers import Workers
from ckpt.plan.leaf import Leaf
from ckpt.plan.read_errors import Reach, as_damage, combined_error, reach_of
from ckpt.plan.reads_on_other_tier import rebase
from ckpt.plan.restore import ChunkId, ChunkRead, RestorePlan, Run
from ckpt.storage.api import StorageBackend
from ckpt.storage.outside_files import store_with

WHOLE_SOURCE: Final = ""
"""What takes the place of a key for all files of a source."""

T = TypeVar("T")

OnChunk = Callable[[int, ChunkRead, memoryview], None]
"""A function that is called with each intact chunk: the position of its source, the read of the
chunk, and its raw bytes.

Several threads call the function. The memory is valid only during the call.
"""


@dataclass(frozen=True, slots=True, kw_only=True)
class Repair:
    """A file that a store should have had intact and did not, so that the next store was asked.

    Attributes:
        tier: The URL of the store.
        key: The key of the file; empty if the store did not answer at all.
        reason: The first error.
        nbytes: How many bytes of the file the next store was asked for; 0 for a manifest or a
            fragment.
        mended: Whether the store has an intact copy of the file again.
    """

    tier: str
    key: str
    reason: str
    nbytes: int
    mended: bool = False


@dataclass(frozen=True, slots=True)
class SourceManifest:
    """A manifest, the bytes it was decoded from, and the position of the source that has it."""

    position: int
    manifest: Manifest
    data: bytes


OnRepair = Callable[[Repair], None]
"""A function that is called with the first repair of each file on each store. The calls come from
any thread, one at a time.
"""


class TieredReader:
    """Reads a checkpoint from several stores: each chunk from the nearest that has it intact.

    Methods name a store by its position in ``sources``.

    ``_source`` is the manifest that ``manifest`` has found, with its position. ``_manifests`` has
    the layouts that were asked for, and ``_stored_files`` the data files of each layout by rank.
    ``_parts`` reads fragments when they are needed, and ``_parts.ranks`` are the ranks whose
    fragments are filled in. ``_failures`` says what is not asked for again, and ``_repairs`` what a
    source should have had intact. ``_lock`` guards these two and ``_manifests``. While
    ``_notes_repairs`` is False, a failure is not recorded as a repair.

    Thread safety: only the owner's thread calls ``manifest``, ``try_manifests``,
    ``with_fragments``, ``read`` and ``without_notes``. Any thread may call the other methods.

    Args:
        sources: The stores, nearest first.
        ref: The step.
        retry: How requests are retried.
        on_repair: See `OnRepair`.
        partial: The positions of sources that have only a part of each step, such as a tier that is
            local to a node. A file that is missing there is not damage.

    Attributes:
        positions_with_manifest: The positions of the sources that count as having a manifest of the
            step: the manifest was read there, or the method ``manifest`` got another error than
            ``ObjectNotFound``. If such a source lacks a file and is not in ``partial``, the file
            was lost. If another source lacks a file, it never had the file.
        lost_ranks: The ranks whose files ``fetch`` could not read, since no source provided some
            chunk.
    """

    def __init__(
        self,
        sources: Sequence[StorageBackend],
        ref: StepRef,
        *,
        retry: RetryPolicy,
        on_repair: OnRepair = lambda _: None,
        partial: Collection[int] = (),
    ) -> None:
        self.sources, self.ref, self._partial = sources, ref, partial
        self.positions_with_manifest: set[int] = set()
        self.lost_ranks: set[int] = set()
        self._retry, self._on_repair = retry, on_repair
        self._lock = threading.Lock()
        self._manifests: dict[int, Manifest] = {}
        self._stored_files: dict[int, tuple[Manifest, Mapping[int, StoredFile]]] = {}
        self._readers = [ChunkReader(source, retry) for source in sources]
        self._source: SourceManifest | None = None
        self._parts: Parts | None = None
        # For a position and a key, the error after which the source is not asked for the key any
        # more. An empty key stands for the whole source.
        self._failures: dict[tuple[int, str], Exception] = {}
        self._repairs: dict[tuple[str, str], Repair] = {}
        self._notes_repairs = True

    @property
    def repairs(self) -> tuple[Repair, ...]:
        """Return the repairs so far."""
        with self._lock:
            return tuple(self._repairs.values())

    def manifest(self) -> SourceManifest:
        """Return the manifest of the nearest source that has it intact.

        The ``PerRank`` values of the manifest are read on access. No other part of a fragment is
        filled in.

        Raises:
            FormatUnsupported: The nearest source with a manifest has it in a format that this ckpt
                cannot read.
            IntegrityError, StorageError: No source has an intact manifest.
        """

        def read(position: int) -> tuple[Manifest, bytes]:
            try:
                packed = read_packed(self.sources[position], self.ref, retry=self._retry)
            except ObjectNotFound:
                raise
            except Exception:
                self.positions_with_manifest.add(position)
                raise
            self.positions_with_manifest.add(position)
            return packed

        position, (manifest, data) = self._nearest(self.ref.manifest, read)
        self._manifests[position] = manifest
        self._source = SourceManifest(position, manifest, data)
        self._parts = Parts(manifest, lambda *args: self._fragment(*args, start=position)[0])
        return SourceManifest(position, self._parts.outline, data)

    def try_manifests(self, work: Callable[[SourceManifest], T]) -> T:
        """Call ``work`` with the manifest of the nearest source, and return its result.

        If ``work`` raises ``IntegrityError`` or ``StorageError``, as for a fragment that is intact
        on no source, it is called again with the manifest of the next source, whose fragments may
        differ. The source of the first manifest is not asked for anything any more.

        Raises:
            IntegrityError, StorageError: ``work`` has failed with each manifest. This is the error
                of the first call.
        """
        source = self.manifest()
        try:
            return work(source)
        except (IntegrityError, StorageError) as error:
            with self._lock:
                self._failures[source.position, ""] = error
                self._manifests, self._stored_files = {}, {}
            try:
                return self.try_manifests(work)
            except (IntegrityError, StorageError):
                raise error from None

    def with_fragments(
        self, source: SourceManifest, leaves: Sequence[Leaf] | None
    ) -> SourceManifest:
        """Return ``source`` with the fragments filled in that hold a part of ``leaves`` (None: with
        all fragments).

        Call it before data is read. It may be called again with other leaves. The result then has
        only the fragments for these leaves. Fragments that were read before are not read again.

        Raises:
            IntegrityError, StorageError: A fragment is intact on no source.
        """
        if self._parts is None or self._manifest.is_filled:
            return source
        manifest = self._parts.fill_for(leaves, key=self.ref.manifest)
        self._manifests[source.position] = manifest
        self._source = replace(source, manifest=manifest)
        return self._source

    @property
    def _manifest(self) -> Manifest:
        """Return the manifest that ``manifest`` has found, with the fragments filled in so far."""
        assert self._source is not None
        return self._source.manifest

    def layout(self, position: int) -> Manifest:
        """Return the manifest that describes how the files are stored on a source.

        This is the manifest of that source. If it cannot be read, it is the manifest that
        ``manifest`` has found. The manifest of a source is read when it is first needed.
        """
        with self._lock:
            manifest = self._manifests.get(position)
        if manifest is None:
            manifest = self._manifest
            if self.failure_of(position, self.ref.manifest) is None:
                try:
                    manifest = self._read_layout(position)
                    self.positions_with_manifest.add(position)
                except (IntegrityError, StorageError) as error:
                    if reach_of(error) is Reach.STORE:
                        self.note_failure(position, "", error, 0)
            with self._lock:
                self._manifests[position] = manifest
        return manifest

    def _read_layout(self, position: int) -> Manifest:
        """Read the manifest of a source, and fill in the same fragments that ``with_fragments`` has
        filled in.
        """
        manifest, data = read_packed(self.sources[position], self.ref, retry=self._retry)
        assert self._source is not None
        if data == self._source.data:
            return self._source.manifest

        def read(fragment_ref: FragmentRef, file: File | None) -> Fragment:
            fragment, _ = self._load(position, manifest, fragment_ref, file)
            return fragment

        return fill_from(
            manifest, read, self._parts.ranks if self._parts else None, key=self.ref.manifest
        )

    def fragment(self, manifest: Manifest, fragment_ref: FragmentRef, file: File | None) -> bytes:
        """Return the bytes of a fragment that ``manifest`` was merged from.

        ``fragment_ref`` is the reference to the fragment in the manifest, and ``file`` is the data
        file of the rank, or None if the rank has none. Raises the errors of the method
        ``manifest``.
        """
        _, record = self._fragment(manifest, fragment_ref, file)
        return record

    def _fragment(
        self, manifest: Manifest, fragment_ref: FragmentRef, file: File | None, *, start: int = 0
    ) -> tuple[Fragment, bytes]:
        """Return a fragment of ``manifest`` from the nearest source that has it intact, and the
        bytes of its record. The source ``start`` is asked first.
        """
        load = partial(self._load, manifest=manifest, fragment_ref=fragment_ref, file=file)
        _, fragment_and_record = self._nearest(self.ref.key(fragment_ref.name), load, start=start)
        return fragment_and_record

    def _load(
        self, position: int, manifest: Manifest, fragment_ref: FragmentRef, file: File | None
    ) -> tuple[Fragment, bytes]:
        """Return a fragment of ``manifest`` from one source, and the bytes of its record."""
        source = self.sources[position]
        return self._retry.call(
            partial(load_fragment, source, self.ref, manifest, fragment_ref, file)
        )

    def is_identical_on(self, position: int) -> bool:
        """Return True if the source ``position`` stores the files of the step with the same bytes
        as the source whose manifest the last call of ``manifest()`` returned. This is so if both
        manifests describe the same encoding and the same increments, or if the manifest of
        ``position`` cannot be read.
        """
        layout, manifest = self.layout(position), self._manifest
        return layout is manifest or (layout.encoded, layout.increments) == (
            manifest.encoded,
            manifest.increments,
        )

    def read(self, plan: RestorePlan, sink: Sink, *, workers: Workers) -> list[RestorePlan]:
        """Read all chunks of ``plan``, which was made from the manifest that ``with_fragments`` has
        returned.

        Returns:
            For each source, ``plan`` with only the chunks that this source has provided.

        Raises:
            IntegrityError, StorageError: Some chunk is intact on no source. Targets may have been
                overwritten in part.
        """
        reads_by_source = self._read(plan.reads, sink, lambda *_: None, workers.run_all)
        return [replace(plan, reads=tuple(reads)) for reads in reads_by_source]

    def fetch(
        self, reads: Sequence[ChunkRead], sink: Sink, on_chunk: OnChunk = lambda *_: None
    ) -> int:
        """Read chunks of one file on the calling thread.

        Returns the position of the farthest source that was needed. Raises the errors of ``read``.
        """
        try:
            reads_by_source = self._read(
                reads, sink, on_chunk, lambda work: [call() for call in work]
            )
        except (IntegrityError, StorageError):
            self.lost_ranks.add(reads[0].rank)
            raise
        return max((position for position, part in enumerate(reads_by_source) if part), default=0)

    def _read(
        self,
        reads: Sequence[ChunkRead],
        sink: Sink,
        on_chunk: OnChunk,
        run_all: Callable[[Iterable[Callable[[], list[ChunkId]]]], list[list[ChunkId]]],
    ) -> list[Sequence[ChunkRead]]:
        """Read chunks into ``sink``. Return a list with the entries of ``reads`` that each source
        has provided, in the order of the sources.

        Each source is asked for the chunks that no nearer source could provide.
        """
        failures: dict[ChunkId, list[tuple[str, Exception]]] = {}
        reads_by_source: list[Sequence[ChunkRead]] = []

        def ask(position: int, run: Run) -> list[ChunkId]:
            misses = self._ask(position, run, sink, on_chunk)
            for read, error in misses:
                errors = failures.setdefault(read.chunk_id, [])
                errors.append((self.sources[position].url, error))
                if position + 1 == len(self.sources):
                    file = self._files(position)[run.rank]
                    raise as_damage(combined_error(errors, file.key), file) from error
            return [read.chunk_id for read, _ in misses]

        for position in range(len(self.sources)):
            if not reads:
                reads_by_source.append(())
                continue
            source_reads = self._reads_from(position, reads)
            parts = run_all(partial(ask, position, run) for run in runs_of(source_reads))
            missing = {chunk_id for part in parts for chunk_id in part}
            if len(source_reads) < len(reads):
                missing |= {read.chunk_id for read in reads} - {
                    read.chunk_id for read in source_reads
                }
            reads_by_source.append(
                [read for read in reads if read.chunk_id not in missing] if missing else reads
            )
            reads = [read for read in reads if read.chunk_id in missing] if missing else ()
        if reads:
            if errors := failures.get(reads[0].chunk_id, []):
                raise combined_error(errors, self.ref.folder)
            raise IntegrityError(f"no tier has all of {self.ref.folder!r}")
        return reads_by_source

    def _ask(self, position: int, run: Run, sink: Sink, on_chunk: OnChunk) -> Misses:
        """Read a run from one source, and return the chunks that the source could not provide."""
        file = self._files(position)[run.rank]
        if run.in_base and file.base is not None:
            file = file.base
        if (error := self.failure_of(position, file.key)) is None:
            misses = self._readers[position].read(run, file, sink, partial(on_chunk, position))
        else:
            misses = [(read, error) for read in run.reads]
        for read, cause in misses:
            self.note_failure(position, file.key, cause, read.stored_nbytes)
        return misses

    def _reads_from(self, position: int, reads: Sequence[ChunkRead]) -> Sequence[ChunkRead]:
        """Return reads of the same chunks as ``reads`` from the files of a source.

        ``reads`` were made from the manifest that ``manifest`` has found. Chunks that the source
        does not have, or not in the wanted encoding, are left out.
        """
        assert self._source is not None
        if self.layout(position) is self._source.manifest:
            return reads
        return rebase(reads, self._files(self._source.position), self._files(position))

    def _files(self, position: int) -> Mapping[int, StoredFile]:
        """Return the data file of each rank as a source stores it.

        The result is remembered, since there may be thousands of files.
        """
        layout = self.layout(position)
        known_layout, files = self._stored_files.get(position, (None, {}))
        if known_layout is not layout:
            files = layout.stored_files()
            self._stored_files[position] = layout, files
        return files

    def fault(self, position: int, file: StoredFile | FragmentRef) -> Exception | None:
        """Return an error if a file is missing on a source, has another size or cannot be examined.

        Return None if the file is present with the right size. The file is not read.
        """
        if store_failure := self.failure_of(position, WHOLE_SOURCE):
            return store_failure
        if isinstance(file, StoredFile):
            if (stored_file := self._files(position).get(file.rank)) is None:
                return ObjectNotFound(file.key)
            key, expected_size = stored_file.key, stored_file.size
            store, _ = store_with(self.sources[position], stored_file)
        else:
            key, expected_size = self.ref.key(file.name), file.size
            store = self.sources[position]
        try:
            size = self._retry.call(partial(store.head, key)).size
        except TransientStorageError as error:
            self.note_failure(position, key, error, 0)
            return error
        except (IntegrityError, StorageError) as error:
            return error
        return (
            None
            if size == expected_size
            else StorageError(key, f"has {size} bytes, should have {expected_size}")
        )

    # -- failures ----------------------------------------------------------------------------------

    def failure_of(self, position: int, key: str) -> Exception | None:
        """Return the error after which a source is not asked for the file ``key`` any more; None if
        the source can be asked. ``WHOLE_SOURCE`` as ``key`` stands for all files.
        """
        with self._lock:
            return self._failures.get((position, WHOLE_SOURCE)) or self._failures.get(
                (position, key)
            )

    def note_failure(self, position: int, key: str, error: Exception, nbytes: int) -> None:
        """Remember that a source could not provide ``nbytes`` of a file, because of ``error``.

        Record a `Repair` if the source should have had the file and is not the last source. Raise
        ``error`` if no other source can help (see ``plan.read_errors.reach_of``).
        """
        reach = reach_of(error)
        if reach is None:
            raise error
        scope_key = WHOLE_SOURCE if reach is Reach.STORE else key
        with self._lock:
            if reach is not Reach.CHUNK:
                self._failures[position, scope_key] = error
            should_have_all = (
                position in self.positions_with_manifest and position not in self._partial
            )
            is_absent = isinstance(error, ObjectNotFound | ForeignFileMismatch)
            never_had_it = is_absent and not should_have_all
            if self._notes_repairs and not never_had_it and position + 1 < len(self.sources):
                self._record_repair(self.sources[position].url, scope_key, error, nbytes)

    def note_repair(self, position: int, key: str) -> None:
        """Note that a source has an intact copy of a file now."""
        with self._lock:
            self._failures.pop((position, key), None)
            if repair := self._repairs.get(repair_key := (self.sources[position].url, key)):
                self._repairs[repair_key] = replace(repair, mended=True)

    def is_damaged(self, position: int, key: str) -> bool:
        """Return True if reads have found damaged chunks in a file on a source, and the file was
        not replaced since.
        """
        with self._lock:
            repair = self._repairs.get((self.sources[position].url, key))
            # Damage of single chunks is the only failure that is a repair, but no entry of
            # ``_failures``: the file is still asked for its other chunks.
            return (
                repair is not None and not repair.mended and (position, key) not in self._failures
            )

    @contextmanager
    def without_notes(self) -> Generator[None]:
        """Do not record failures inside of the block as repairs."""
        self._notes_repairs = False
        try:
            yield
        finally:
            self._notes_repairs = True

    def _record_repair(self, url: str, key: str, error: Exception, nbytes: int) -> None:
        """Record a repair, or add ``nbytes`` to the recorded one. The caller holds the lock."""
        entry = self._repairs.get((url, key))
        if entry is None:
            self._repairs[url, key] = repair = Repair(
                tier=url, key=key, reason=str(error), nbytes=nbytes
            )
            self._on_repair(repair)
        else:
            self._repairs[url, key] = replace(entry, nbytes=entry.nbytes + nbytes)

    def _nearest(self, key: str, work: Callable[[int], T], *, start: int = 0) -> tuple[int, T]:
        """Call ``work`` with the positions of sources, nearest first, until it succeeds.

        The first call is for the position ``start``. The sources before it come last.

        Returns:
            The position of the source for which ``work`` succeeded, and its result.
        """
        failures: list[tuple[str, Exception]] = []
        for position in (*range(start, len(self.sources)), *range(start)):
            error = self.failure_of(position, key)
            if error is None:
                try:
                    return position, work(position)
                except Exception as cause:  # noqa: BLE001 - ``note_failure`` raises it if needed
                    error = cause
            self.note_failure(position, key, error, 0)
            failures.append((self.sources[position].url, error))
        raise combined_error(failures, key)
