"""Read one step from several stores: each chunk from the nearest store that has it intact.

The stores have files of the same attempt, and a chunk has the same checksum on all stores, however
it is encoded. So a file or a chunk may also come from a store whose manifest is missing or damaged.
The files of such a store are assumed to have the encoding that the manifest of another store
describes. A store is asked for a chunk only if no nearer store has it intact. Failures are
remembered: a store that does not answer is not asked again, and a store that lacks a file is not
asked for this file again.
"""

from __future__ import annotations

import threading
from collections.abc import Callable, Collection, Generator, Iterable, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, replace
from functools import partial
from typing import TypeVar

from ckpt.catalog.fragments import Parts, filled, load_fragment
from ckpt.catalog.index import read_packed
from ckpt.errors import IntegrityError, ObjectNotFound, StorageError, TransientStorageError
from ckpt.model.keys import StepRef
from ckpt.model.manifest import File, Fragment, FragmentRef, Manifest, StoredFile
from ckpt.pipeline.chunk_reader import ChunkReader, Misses, Sink, runs_of
from ckpt.pipeline.retry import RetryPolicy
from ckpt.pipeline.workers import Workers
from ckpt.plan.coalesce import Run
from ckpt.plan.fallback import Reach, as_damage, reach_of, verdict
from ckpt.plan.leaf import Leaf
from ckpt.plan.rebase import rebase
from ckpt.plan.restore import ChunkId, ChunkRead, RestorePlan
from ckpt.storage.api import StorageBackend

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
class Found:
    """A manifest, the bytes it was decoded from, and the position of the source that has it."""

    position: int
    manifest: Manifest
    packed: bytes


OnRepair = Callable[[Repair], None]
"""A function that is called with the first repair of each file on each store. The calls come from
any thread, one at a time.
"""


class TieredReader:
    """Reads a checkpoint from several stores: each chunk from the nearest that has it intact.

    Methods name a store by its position in ``sources``.

    Thread safety: only the owner's thread calls ``manifest``, ``whole``, ``filled``, ``read`` and
    ``unnoted``. Any thread may call the other methods.

    Args:
        sources: The stores, nearest first.
        ref: The step.
        retry: How requests are retried.
        on_repair: See `OnRepair`.
        partial: The positions of sources that have only a part of each step, such as a tier that is
            local to a node. A file that is missing there is not damage.
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
        self.listing: set[int] = set()
        """The positions of the sources that count as having a manifest of the step: the manifest
        was read there, or the method ``manifest`` got another error than ``ObjectNotFound``. If
        such a source lacks a file and is not in ``partial``, the file was lost. If another source
        lacks a file, it never had the file.
        """
        self.lost: set[int] = set()
        """The ranks whose files ``fetch`` could not read, since no source provided some chunk."""
        self._retry, self._on_repair = retry, on_repair
        self._lock = threading.Lock()
        self._manifests: dict[int, Manifest] = {}
        self._stored: dict[int, tuple[Manifest, Mapping[int, StoredFile]]] = {}
        self._readers = [ChunkReader(source, retry) for source in sources]
        self._found: Found | None = None
        self._parts: Parts | None = None
        # For a position and a key, the error after which the source is not asked for the key any
        # more. An empty key stands for the whole source.
        self._gone: dict[tuple[int, str], Exception] = {}
        self._repairs: dict[tuple[str, str], Repair] = {}
        self._noting = True

    @property
    def repairs(self) -> tuple[Repair, ...]:
        """Return the repairs so far."""
        with self._lock:
            return tuple(self._repairs.values())

    def manifest(self) -> Found:
        """Return the manifest of the nearest source that has it intact.

        The ``PerRank`` values of the manifest are read on access. No other part of a fragment is
        filled in.

        Raises:
            FormatUnsupported: The nearest source with a manifest has it in a format that this ckpt
                cannot read.
            IntegrityError, StorageError: No source has an intact manifest.
        """

        def found(position: int) -> tuple[Manifest, bytes]:
            try:
                packed = read_packed(self.sources[position], self.ref, retry=self._retry)
            except ObjectNotFound:
                raise
            except Exception:
                self.listing.add(position)
                raise
            self.listing.add(position)
            return packed

        position, (manifest, packed) = self._nearest(self.ref.manifest, found)
        self._manifests[position] = manifest
        self._found = Found(position, manifest, packed)
        self._parts = Parts(manifest, lambda *of: self._fragment(*of, first=position)[0])
        return Found(position, self._parts.outline, packed)

    def whole(self, work: Callable[[Found], T]) -> T:
        """Call ``work`` with the manifest of the nearest source, and return its result.

        If ``work`` raises ``IntegrityError`` or ``StorageError``, as for a fragment that is intact
        on no source, it is called again with the manifest of the next source, whose fragments may
        differ. The source of the first manifest is not asked for anything any more.

        Raises:
            IntegrityError, StorageError: ``work`` has failed with each manifest. This is the error
                of the first call.
        """
        found = self.manifest()
        try:
            return work(found)
        except (IntegrityError, StorageError) as error:
            with self._lock:
                self._gone[found.position, ""] = error
                self._manifests, self._stored = {}, {}
            try:
                return self.whole(work)
            except (IntegrityError, StorageError):
                raise error from None

    def filled(self, found: Found, wanted: Sequence[Leaf] | None) -> Found:
        """Return ``found`` with the fragments filled in that hold a part of ``wanted`` (None: with
        all fragments).

        Call it before data is read. It may be called again with other leaves. The result then has
        only the fragments for these leaves. Fragments that were read before are not read again.

        Raises:
            IntegrityError, StorageError: A fragment is intact on no source.
        """
        if self._parts is None or self._here.is_filled:
            return found
        manifest = self._parts.filled(wanted, key=self.ref.manifest)
        self._manifests[found.position] = manifest
        self._found = replace(found, manifest=manifest)
        return self._found

    @property
    def _here(self) -> Manifest:
        """Return the manifest that ``manifest`` has found, with the fragments filled in so far."""
        assert self._found is not None
        return self._found.manifest

    def layout(self, position: int) -> Manifest:
        """Return the manifest that describes how the files are stored on a source.

        This is the manifest of that source. If it cannot be read, it is the manifest that
        ``manifest`` has found. The manifest of a source is read when it is first needed.
        """
        with self._lock:
            known = self._manifests.get(position)
        if known is None:
            known = self._here
            if self.gone(position, self.ref.manifest) is None:
                try:
                    known = self._read_layout(position)
                    self.listing.add(position)
                except (IntegrityError, StorageError) as error:
                    if reach_of(error) is Reach.STORE:
                        self.failed(position, "", error, 0)
            with self._lock:
                self._manifests[position] = known
        return known

    def _read_layout(self, position: int) -> Manifest:
        """Read the manifest of a source, and fill in the same fragments that ``filled`` has filled
        in.
        """
        manifest, packed = read_packed(self.sources[position], self.ref, retry=self._retry)
        assert self._found is not None
        if packed == self._found.packed:
            return self._found.manifest

        def read(named: FragmentRef, file: File | None) -> Fragment:
            return self._load(position, manifest, named, file)[0]

        return filled(
            manifest, read, self._parts.ranks if self._parts else None, key=self.ref.manifest
        )

    def fragment(self, manifest: Manifest, named: FragmentRef, file: File | None) -> bytes:
        """Return the bytes of a fragment that ``manifest`` was merged from.

        ``named`` is the reference to the fragment in the manifest, and ``file`` is the data file of
        the rank, or None if the rank has none. Raises the errors of the method ``manifest``.
        """
        return self._fragment(manifest, named, file)[1]

    def _fragment(
        self, manifest: Manifest, named: FragmentRef, file: File | None, *, first: int = 0
    ) -> tuple[Fragment, bytes]:
        load = partial(self._load, manifest=manifest, named=named, file=file)
        return self._nearest(self.ref.key(named.name), load, first=first)[1]

    def _load(
        self, position: int, manifest: Manifest, named: FragmentRef, file: File | None
    ) -> tuple[Fragment, bytes]:
        source = self.sources[position]
        return self._retry.call(partial(load_fragment, source, self.ref, manifest, named, file))

    def is_identical_on(self, position: int) -> bool:
        """Return True if the source ``position`` stores the files of the step with the same bytes
        as the source whose manifest the last call of ``manifest()`` returned. This is so if both
        manifests describe the same encoding, or if the manifest of ``position`` cannot be read.
        """
        there = self.layout(position)
        return there is self._here or there.encoded == self._here.encoded

    def read(self, plan: RestorePlan, sink: Sink, *, workers: Workers) -> list[RestorePlan]:
        """Read all chunks of ``plan``, which was made from the manifest that ``filled`` returned.

        Returns:
            For each source, ``plan`` with only the chunks that this source has provided.

        Raises:
            IntegrityError, StorageError: Some chunk is intact on no source. Targets may have been
                overwritten in part.
        """
        given = self._read(plan.reads, sink, lambda *_: None, workers.run_all)
        return [replace(plan, reads=tuple(reads)) for reads in given]

    def fetch(
        self, reads: Sequence[ChunkRead], sink: Sink, on_chunk: OnChunk = lambda *_: None
    ) -> int:
        """Read chunks of one file on the calling thread.

        Returns the position of the farthest source that was needed. Raises the errors of ``read``.
        """
        try:
            given = self._read(reads, sink, on_chunk, lambda work: [each() for each in work])
        except (IntegrityError, StorageError):
            self.lost.add(reads[0].rank)
            raise
        return max((position for position, part in enumerate(given) if part), default=0)

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
        given: list[Sequence[ChunkRead]] = []

        def ask(position: int, run: Run) -> list[ChunkId]:
            missed = self._ask(position, run, sink, on_chunk)
            for read, error in missed:
                said = failures.setdefault(read.chunk_id, [])
                said.append((self.sources[position].url, error))
                if position + 1 == len(self.sources):
                    file = self._files(position)[run.rank]
                    raise as_damage(verdict(said, file.key), file) from error
            return [read.chunk_id for read, _ in missed]

        for position in range(len(self.sources)):
            if not reads:
                given.append(())
                continue
            there = self._reads_there(position, reads)
            parts = run_all(partial(ask, position, run) for run in runs_of(there))
            lacking = {place for part in parts for place in part}
            if len(there) < len(reads):
                lacking |= {read.chunk_id for read in reads} - {read.chunk_id for read in there}
            given.append(
                [read for read in reads if read.chunk_id not in lacking] if lacking else reads
            )
            reads = [read for read in reads if read.chunk_id in lacking] if lacking else ()
        if reads:
            if said := failures.get(reads[0].chunk_id, []):
                raise verdict(said, self.ref.folder)
            raise IntegrityError(f"no tier has all of {self.ref.folder!r}")
        return given

    def _ask(self, position: int, run: Run, sink: Sink, on_chunk: OnChunk) -> Misses:
        """Read a run from one source, and return the chunks that the source could not provide."""
        file = self._files(position)[run.rank]
        if (error := self.gone(position, file.key)) is None:
            missed = self._readers[position].read(run, file, sink, partial(on_chunk, position))
        else:
            missed = [(read, error) for read in run.reads]
        for read, what in missed:
            self.failed(position, file.key, what, read.stored_nbytes)
        return missed

    def _reads_there(self, position: int, reads: Sequence[ChunkRead]) -> Sequence[ChunkRead]:
        """Return reads of the same chunks as ``reads`` from the files of a source.

        ``reads`` were made from the manifest that ``manifest`` has found. Chunks that the source
        does not have, or not in the wanted encoding, are left out.
        """
        assert self._found is not None
        if self.layout(position) is self._found.manifest:
            return reads
        return rebase(reads, self._files(self._found.position), self._files(position))

    def _files(self, position: int) -> Mapping[int, StoredFile]:
        """Return the data file of each rank as a source stores it.

        The result is remembered, since there may be thousands of files.
        """
        there = self.layout(position)
        known = self._stored.get(position)
        if known is None or known[0] is not there:
            known = self._stored[position] = there, there.stored_files()
        return known[1]

    def fault(self, position: int, file: StoredFile | FragmentRef) -> Exception | None:
        """Return an error if a file is missing on a source, has another size or cannot be examined.

        Return None if the file is present with the right size. The file is not read.
        """
        if dead := self.gone(position, ""):
            return dead
        if isinstance(file, StoredFile):
            if (there := self._files(position).get(file.rank)) is None:
                return ObjectNotFound(file.key)
            key, wanted = there.key, there.size
        else:
            key, wanted = self.ref.key(file.name), file.size
        try:
            size = self._retry.call(partial(self.sources[position].head, key)).size
        except TransientStorageError as error:
            self.failed(position, key, error, 0)
            return error
        except (IntegrityError, StorageError) as error:
            return error
        return (
            None if size == wanted else StorageError(key, f"has {size} bytes, should have {wanted}")
        )

    # -- failures ----------------------------------------------------------------------------------

    def gone(self, position: int, key: str) -> Exception | None:
        """Return the error after which a source is not asked for the file ``key`` any more; None if
        the source can be asked. An empty ``key`` stands for the whole source.
        """
        with self._lock:
            return self._gone.get((position, "")) or self._gone.get((position, key))

    def failed(self, position: int, key: str, error: Exception, nbytes: int) -> None:
        """Remember that a source could not provide ``nbytes`` of a file, because of ``error``.

        Record a `Repair` if the source should have had the file and is not the last source. Raise
        ``error`` if no other source can help (see ``plan.fallback.reach_of``).
        """
        reach = reach_of(error)
        if reach is None:
            raise error
        what = "" if reach is Reach.STORE else key
        with self._lock:
            if reach is not Reach.CHUNK:
                self._gone[position, what] = error
            whole = position in self.listing and position not in self._partial
            never = isinstance(error, ObjectNotFound) and not whole
            if self._noting and not never and position + 1 < len(self.sources):
                self._note(self.sources[position].url, what, error, nbytes)

    def mended(self, position: int, key: str) -> None:
        """Note that a source has an intact copy of a file now."""
        with self._lock:
            self._gone.pop((position, key), None)
            if known := self._repairs.get(place := (self.sources[position].url, key)):
                self._repairs[place] = replace(known, mended=True)

    def is_damaged(self, position: int, key: str) -> bool:
        """Return True if reads have found damaged chunks in a file on a source, and the file was
        not replaced since.
        """
        with self._lock:
            known = self._repairs.get((self.sources[position].url, key))
            return known is not None and not known.mended and (position, key) not in self._gone

    @contextmanager
    def unnoted(self) -> Generator[None]:
        """Do not record failures inside of the block as repairs."""
        self._noting = False
        try:
            yield
        finally:
            self._noting = True

    def _note(self, url: str, key: str, error: Exception, nbytes: int) -> None:
        """Record a repair, or add ``nbytes`` to the recorded one. The caller holds the lock."""
        known = self._repairs.get((url, key))
        if known is None:
            self._repairs[url, key] = repair = Repair(
                tier=url, key=key, reason=str(error), nbytes=nbytes
            )
            self._on_repair(repair)
        else:
            self._repairs[url, key] = replace(known, nbytes=known.nbytes + nbytes)

    def _nearest(self, key: str, work: Callable[[int], T], *, first: int = 0) -> tuple[int, T]:
        """Call ``work`` with the positions of sources, nearest first, until it succeeds.

        The first call is for the position ``first``. The sources before it come last.

        Returns:
            The position of the source for which ``work`` succeeded, and its result.
        """
        failures: list[tuple[str, Exception]] = []
        for position in (*range(first, len(self.sources)), *range(first)):
            error = self.gone(position, key)
            if error is None:
                try:
                    return position, work(position)
                except Exception as raised:  # noqa: BLE001 - ``failed`` raises it if needed
                    error = raised
            self.failed(position, key, error, 0)
            failures.append((self.sources[position].url, error))
        raise verdict(failures, key)
