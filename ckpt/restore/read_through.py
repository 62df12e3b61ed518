"""Read-through: a restore copies the files that it needs from a farther tier into the nearest
folder, so that the next restore reads local files.

A cache is a tier that is a folder and is nearer than the farthest tier. The ranks that see a cache
fill it together. The coordinator assigns each file to the first rank that asks for it. That rank
fetches the file, and the other ranks wait for the outcome. So each file is fetched only once into a
cache, and a rank need not know which other ranks see the cache. A rank that fetches a file copies
the chunks that it wants to its targets meanwhile, so it does not read them again.

A failure to fill a cache does not make the restore fail: the data is then read from the farther
tier. If the cache has all files of the step afterwards, the step is committed on the cache. (If
nodes have tiers of their own, each node commits the step with the files that it has.) Otherwise the
files are a partial copy. A later restore reads from a partial copy, and retention removes it like
the remains of a save.

The *sources* are the stores of all tiers, each named by its position. The attribute ``origin``
reads from them, and knows the ``fault`` of a file on a source: that it is missing or has another
size. A *claim* is what this job knows about a root and its owner, and says what the job may remove
there. Ranks agree by messages, each on a *subject*, which is the name of an exchange.
"""

from __future__ import annotations

import logging
import time
from collections import Counter
from collections.abc import Callable, Sequence
from contextlib import suppress
from dataclasses import dataclass
from functools import cached_property, partial
from typing import Final

from ckpt.catalog.step_listing import is_committed
from ckpt.catalog.tiered_reader import WHOLE_SOURCE, SourceManifest, TieredReader
from ckpt.catalog.transfer import commit_copy, copy_files, copy_fragments
from ckpt.catalog.verify import Fault, StepFolder, verify_files
from ckpt.config import ranks_on_this_node
from ckpt.coordination.coordinator import Coordinator
from ckpt.coordination.step_files import delete_files
from ckpt.errors import CkptError, IntegrityError, OutOfSpace, RootInUse, StorageError
from ckpt.model import readable
from ckpt.model.checksum import checksum
from ckpt.model.fragment_columns import read_fragment
from ckpt.model.keys import StepRef, fragment_name
from ckpt.model.manifest import FragmentRef, StoredFile
from ckpt.pipeline.chunk_reader import Sink
from ckpt.pipeline.retry import RetryPolicy
from ckpt.pipeline.workers import Workers
from ckpt.plan.read_errors import plan_without
from ckpt.plan.restore import ChunkId, ChunkRead, RestorePlan
from ckpt.retention.evictor import Evictor
from ckpt.retention.policy import StepGuard
from ckpt.root.claim import Claim
from ckpt.root.claim_marker import discard_part
from ckpt.root.owner import Owner
from ckpt.storage.tiers import OpenTier
from ckpt.storage.urls import is_folder

_SUCCESS: Final = b"done"
_SMALL_PART: Final = 16
"""If nodes have tiers of their own, a rank fetches a file only if it wants more than the fraction
1 / ``_SMALL_PART`` of the file.
"""
_LOSS: Final = b"lost"
_REFUSAL: Final = b"refused"

_log = logging.getLogger("ckpt")


def no_claim(_url: str) -> Claim | None:
    """Return None: no job that saves runs in this process, or it has not taken the root."""
    return None


@dataclass(frozen=True, slots=True)
class _CacheGuard(StepGuard):
    """The steps that must stay when room is made on a cache (see `StepGuard`).

    Attributes:
        tiers: The tiers whose stores are the sources of ``origin``, in the same order.
        position: The position of the cache in ``tiers``.
        origin: Reads the chunks of the step that is restored.
        context: The connection, the threads and the limits of the restore.
    """

    tiers: Sequence[OpenTier]
    position: int
    origin: TieredReader
    context: CacheContext

    def awaited_refs(self) -> frozenset[StepRef]:
        return self.context.steps_in_use()

    def is_elsewhere(self, ref: StepRef) -> bool:
        """Return True if the step ``ref`` is committed on another tier that is not in memory."""
        for other_position, tier in enumerate(self.tiers):
            if (
                other_position != self.position
                and not tier.in_memory
                and not self.origin.failure_of(other_position, WHOLE_SOURCE)
            ):
                with suppress(IntegrityError, StorageError):
                    if is_committed(tier.backend, ref):
                        return True
        return False


@dataclass(frozen=True, slots=True, kw_only=True)
class CacheContext:
    """The connection, the threads and the limits of a restore that fills caches.

    Attributes:
        coordinator: The connection to the other ranks.
        subject: The prefix of the subjects of the messages, which no other restore uses.
        patience: How many seconds to wait for other ranks, in all.
        workers: The threads that copy.
        retry: How requests are retried.
        steps_in_use: Returns the steps that saves under way still read from nearer tiers. They are
            not removed to make room on a cache.
        claim_of: Returns the claim of the running job on the root of a cache, by the URL of the
            cache; None if the job has not taken the root.
    """

    coordinator: Coordinator
    subject: str
    patience: float
    workers: Workers
    retry: RetryPolicy
    steps_in_use: Callable[[], frozenset[StepRef]] = frozenset
    claim_of: Callable[[str], Claim | None] = no_claim


class ReadThrough:
    """Fills the caches in one restore.

    A cache is named by its position in ``tiers``.

    ``_cache_positions`` are the caches, nearest first, and ``_missing`` the files that
    ``find_missing`` has remembered. ``_placed_files`` has the position of the cache and the rank of
    each file that this or another rank has put into a cache in this restore. ``_wins`` gives each
    work to the first rank that asks for it, and ``_await_outcome`` waits for that rank, at most
    until ``_deadline``.

    Thread safety: only the owner's thread may use it.

    Args:
        tiers: The tiers whose stores are the sources of ``origin``, in the same order. Empty for a
            restore without caches.
        origin: Reads the chunks of the step.
        stored_step: The manifest of the step, and the position of its source.
        context: The connection, the threads and the limits of the restore.

    Attributes:
        source_by_rank: For each data file that this or another rank has put into a cache in this
            restore, by the rank of the file: the position of the farthest source that was needed
            for the file. Files that were removed again, because the cache was full, count too.
        nbytes_by_source: For each source, by its position, how many of its bytes ``fill`` has put
            into targets.
        cached_bytes: The number of bytes of data files that this rank has put into caches.
    """

    def __init__(
        self,
        tiers: Sequence[OpenTier],
        origin: TieredReader,
        stored_step: SourceManifest,
        context: CacheContext,
    ) -> None:
        self._tiers, self.origin, self._stored_step = tiers, origin, stored_step
        self._context, self._coordinator = context, context.coordinator
        self._deadline = time.monotonic() + context.patience
        self._files_by_rank = stored_step.manifest.stored_files()
        # The files of an adopted step, which other programs wrote, stay where they are. A cache has
        # no older steps that increments could refer to.
        has_copies = not (stored_step.manifest.locations or stored_step.manifest.increments)
        self._cache_positions = [
            position for position, tier in enumerate(tiers[:-1]) if has_copies and _is_folder(tier)
        ]
        self._missing: list[StoredFile] = []
        self.source_by_rank: dict[int, int] = {}
        self._placed_files: set[tuple[int, int]] = set()
        self.nbytes_by_source: Counter[int] = Counter()
        self.cached_bytes = 0

    @cached_property
    def _owner(self) -> Owner:
        return Owner.of_this_process(self._coordinator.attempt)

    def find_missing(self, plan: RestorePlan) -> None:
        """Remember the files for ``plan`` that neither the nearest cache nor a nearer tier has.

        A file of the right size counts as present. Call this on all ranks before ``fill`` is called
        on any rank, since a rank that fetches files changes the cache.
        """
        if not self._cache_positions:
            return
        near_positions = range(self._cache_positions[0] + 1)
        nbytes_by_rank: Counter[int] = Counter()
        for read in plan.reads:
            nbytes_by_rank[read.rank] += read.nbytes
        wanted_files = [
            file
            for rank, file in sorted(self._files_by_rank.items())
            if self._wants_enough(file, nbytes_by_rank[rank])
        ]
        self._missing = [
            file
            for file in wanted_files
            if all(self.origin.fault(position, file) for position in near_positions)
        ]

    def _wants_enough(self, file: StoredFile, nbytes: int) -> bool:
        """Return True if this rank wants enough bytes (``nbytes``) of a file to fetch the file.

        If nodes have tiers of their own, a rank does not fetch a file for a small part of the file,
        such as some buffers.
        """
        least = file.file.size // _SMALL_PART if self._tiers[self._cache_positions[0]].nodes else 0
        return nbytes > least

    def fill(self, plan: RestorePlan, sink: Sink) -> RestorePlan:
        """Put the files that ``find_missing`` has remembered into the nearest cache that takes
        them.

        This may also remove steps from a cache with a capacity to make room, and commits the step
        on each cache that then has all of its files. It waits for files that other ranks fetch.

        Returns:
            ``plan`` without the chunks that this call has copied to their targets in ``sink``.

        Raises:
            CommitError: The other ranks cannot be reached.
        """
        if not self._cache_positions:
            return plan
        self._deadline = time.monotonic() + self._context.patience
        chunks = _WantedChunks(plan, sink)
        missing = self._missing
        for position in self._cache_positions:
            # Leave out a cache that does not answer, or that has the step in another encoding.
            if not self.origin.failure_of(position, WHOLE_SOURCE) and self.origin.is_identical_on(
                position
            ):
                if position > self._cache_positions[0]:
                    missing = [file for file in missing if self.origin.fault(position, file)]
                missing = self._fill_cache(position, missing, chunks)
                if position < self._stored_step.position:
                    self._commit_on(position)
            if not missing:
                break
        for read, source in chunks.copies.values():
            self.nbytes_by_source[source] += read.nbytes
        return plan_without(plan, [read for read, _ in chunks.copies.values()])

    def _fill_cache(
        self, position: int, files: Sequence[StoredFile], chunks: _WantedChunks
    ) -> list[StoredFile]:
        """Put ``files`` into a cache, together with the other ranks that see the cache.

        Returns the files that the cache does not take, for example because it is full.
        """
        if files and not self._has_room(position, files):
            return list(files)
        subject_of = partial(self._subject, position)
        own_files: list[StoredFile] = []
        peer_files: list[StoredFile] = []
        refused_files: list[StoredFile] = []
        # Each rank begins with another file, so that the ranks seldom ask for the same one.
        file_count = max(1, len(self._files_by_rank))
        for file in sorted(
            files, key=lambda file: (file.rank - self._coordinator.rank) % file_count
        ):
            if refused_files:
                refused_files.append(file)
            elif not self._wins(subject_of(file.rank)):
                peer_files.append(file)
            elif self._fetch(position, file, chunks, f"{subject_of(file.rank)}/end") == _REFUSAL:
                has_file = (position, file.rank) in self._placed_files
                self._withdraw(position, [*own_files, file] if has_file else own_files)
                refused_files += [*own_files, file]
            elif (position, file.rank) in self._placed_files:
                # It is not there if no source has the file intact.
                own_files.append(file)
        for file in peer_files:
            outcome = self._await_outcome(f"{subject_of(file.rank)}/end")
            if outcome is None or not outcome.isdigit():
                refused_files += [file] if outcome == _REFUSAL else []
            else:
                self.source_by_rank[file.rank] = int(outcome)
                self._placed_files.add((position, file.rank))
        return refused_files

    def _fetch(self, position: int, file: StoredFile, chunks: _WantedChunks, subject: str) -> bytes:
        """Fetch a file into a cache, post the outcome on ``subject``, and return it.

        The outcome is the position of the farthest source that was needed, in decimal digits;
        ``_LOSS`` if no source has the file intact; or ``_REFUSAL`` if the cache does not take it.
        """
        cache, began = self._tiers[position], time.perf_counter()
        outcome = _LOSS
        try:
            fetch = partial(self.origin.fetch, on_chunk=chunks.copy)
            (file_copy,) = copy_files(fetch, [file], self._folder(position))
            self.origin.note_repair(position, file.key)  # The cache has an intact copy now
            source = file_copy.position
            self.source_by_rank[file.rank], self.cached_bytes = (
                source,
                self.cached_bytes + file.size,
            )
            self._placed_files.add((position, file.rank))
            outcome = str(source).encode()
            self._copy_fragment(position, file)
            seconds = time.perf_counter() - began
            _log.info(
                "ckpt: %s was put into %s from %s: %s in %.2f s",
                file.key,
                cache.url,
                self._tiers[source].url,
                readable.size(file.size),
                seconds,
            )
        except (IntegrityError, StorageError) as error:
            if file.rank not in self.origin.lost_ranks:  # A source has the file intact
                outcome = _REFUSAL
                _log.warning(
                    "ckpt: %s does not take files of farther tiers, which are read there "
                    "directly: %s",
                    cache.url,
                    error,
                )
        finally:
            self._coordinator.set_once(subject, outcome)
        return outcome

    def _copy_fragment(self, position: int, file: StoredFile) -> None:
        """Copy the fragment of a data file into a cache.

        An ``IntegrityError`` is ignored: without the fragment the step is not listed on the cache,
        but its data can be read from the cache.
        """
        manifest = self._stored_step.manifest
        fragments = [fragment for fragment in manifest.fragments if fragment.rank == file.rank]
        with suppress(IntegrityError):
            copy_fragments(self.origin, manifest, fragments, self._folder(position))

    def _withdraw(self, position: int, files: Sequence[StoredFile]) -> None:
        """Remove from a full cache the ``files`` that this rank has put there.

        The next save needs the room. If the step is committed on the cache, only the data files are
        removed, since the cache had the fragments before.
        """
        backend, ref = self._tiers[position].backend, self.origin.ref
        for file in files:
            is_removed = False
            with suppress(StorageError):
                # If the step is committed there, the cache had the fragment, and lacked only data.
                if position in self.origin.positions_with_manifest:
                    delete_files(backend, [file.key])
                    is_removed = True
                else:
                    is_removed = discard_part(
                        backend, ref, ref.key(fragment_name(file.rank)), file.key
                    )
            self.cached_bytes -= file.size if is_removed else 0

    def _has_room(self, position: int, files: Sequence[StoredFile]) -> bool:
        """Make room for ``files`` in a cache that has a capacity, and return True if there is room.

        The first rank that calls this makes room for all ranks that see the cache. This rank
        assumes that each of the other ranks needs as many bytes as it needs itself.
        """
        cache = self._tiers[position]
        if cache.tier.capacity is None:
            return True
        subject, outcome = self._subject(position, "room"), _REFUSAL
        if not self._wins(subject):
            return self._await_outcome(f"{subject}/end") == _SUCCESS
        is_shared = cache.backend.capabilities.shared
        ranks = self._coordinator.world_size if is_shared else ranks_on_this_node()
        if cache.nodes:
            ranks = len(cache.nodes.mates(self._coordinator.rank))
        own_bytes = sum(file.size for file in files)
        try:
            # A fresh claim would allow the removal of steps that other jobs have saved since this
            # job took the root.
            claim = self._context.claim_of(cache.url) or Claim(cache.backend, self._owner)
            evictor = Evictor(
                cache,
                claim,
                _CacheGuard(self._tiers, position, self.origin, self._context),
            )
            nbytes = min(own_bytes * ranks, self._stored_step.manifest.stored_bytes)
            evictor.evict_to_capacity(self.origin.ref, nbytes, restored_ref=None, is_exact=True)
            outcome = _SUCCESS
        except RootInUse as error:
            _log.warning(
                "ckpt: no room is made on %s, which belongs to another job: %s", cache.url, error
            )
        except (OutOfSpace, StorageError) as error:
            _log.warning(
                "ckpt: %s cannot store data of farther tiers, which is read there directly: %s",
                cache.url,
                error,
            )
        finally:
            self._coordinator.set_once(f"{subject}/end", outcome)
        return outcome == _SUCCESS

    def _may_change(self, position: int) -> bool:
        """Return True if no other job that may be alive owns the root of a cache.

        Return False also if the owner cannot be read. If the result is False, the reason is logged.
        """
        cache = self._tiers[position]
        try:
            self._context.retry.call(Claim(cache.backend, self._owner).use)
        except (RootInUse, StorageError) as error:
            is_unreadable = isinstance(error, StorageError)
            reason = "its owner cannot be read" if is_unreadable else "it belongs to another job"
            _log.warning("ckpt: %s is left as it is, since %s: %s", cache.url, reason, error)
            return False
        return True

    def mend(self) -> None:
        """Replace the cached files in which reads have found damaged chunks. Call this after all
        data was read.

        Each file is replaced atomically by one rank, after every byte of the new file was verified.
        A cache stays as it is if it does not answer, if it has the step in another encoding, or if
        its root belongs to another job that may be alive.
        """
        for position in self._cache_positions:
            damaged_files = [
                file
                for file in self._files_by_rank.values()
                if self.origin.is_damaged(position, file.key)
            ]
            if (
                not damaged_files
                or self.origin.failure_of(position, WHOLE_SOURCE)
                or not self.origin.is_identical_on(position)
                or not self._may_change(position)
            ):
                continue
            for file in damaged_files:
                subject = f"{self._subject(position, file.rank)}/mend"
                if self._wins(subject):
                    self._mend_file(position, file, f"{subject}/end")
                elif self._await_outcome(f"{subject}/end") == _SUCCESS:
                    self.origin.note_repair(position, file.key)

    def _mend_file(self, position: int, file: StoredFile, subject: str) -> None:
        """Replace one damaged file in a cache, and post the outcome on ``subject``."""
        cache, outcome = self._tiers[position], _LOSS
        try:
            # The copy also reads the cache, and must not record its known damage as new repairs.
            with self.origin.without_notes():
                copy_files(self.origin.fetch, [file], self._folder(position))
            self.origin.note_repair(position, file.key)
            outcome = _SUCCESS
            _log.info("ckpt: %s was repaired on %s", file.key, cache.url)
        except (IntegrityError, StorageError) as error:
            _log.warning("ckpt: %s stays damaged on %s: %s", file.key, cache.url, error)
        finally:
            self._coordinator.set_once(subject, outcome)

    def _commit_on(self, position: int) -> None:
        """Commit the step on a cache if the cache has all of its files.

        If nodes have tiers of their own, each node commits the step with the files that it has.
        Files that this restore has not put into this cache are verified, since their sizes alone do
        not show that they are intact.
        """
        parts: list[StoredFile | FragmentRef] = [
            *self._stored_step.manifest.fragments,
            *self._files_by_rank.values(),
        ]
        cache = self._tiers[position]
        if not cache.nodes and any(self.origin.fault(position, part) for part in parts):
            return
        if not self._wins(self._subject(position, "list")):
            return
        unverified_files = [
            file
            for file in self._files_by_rank.values()
            if (position, file.rank) not in self._placed_files
        ]
        if cache.nodes:
            unverified_files = [
                file for file in unverified_files if self.origin.fault(position, file) is None
            ]
        try:
            faults = [fault for file in unverified_files for fault in self._faults(position, file)]
            reasons = [f"{fault.key} {fault.what}" for fault in faults]
            if not reasons:
                cached_parts = [part for part in parts if self.origin.fault(position, part) is None]
                check = partial(self._check_parts, position, cached_parts)
                commit_copy(self._folder(position), self._stored_step.data, check=check)
        except CkptError as error:
            reasons = [str(error)]
        for reason in reasons:
            _log.warning(
                "ckpt: step %d is not listed on %s: %s", self.origin.ref.step, cache.url, reason
            )

    def _faults(self, position: int, file: StoredFile) -> Sequence[Fault]:
        """Read every byte of a data file on a cache, and return its faults.

        The checksums are in the fragment of the file, which is read first if this rank has not
        read it before.
        """
        if not file.chunks:
            fragment_ref = next(
                fragment_ref
                for fragment_ref in self._stored_step.manifest.fragments
                if fragment_ref.rank == file.rank
            )
            data = self.origin.fragment(self._stored_step.manifest, fragment_ref, file.file)
            fragment = read_fragment(data, key=self.origin.ref.key(fragment_ref.name))
            encoding = next(iter(fragment.encoded), None)
            file = StoredFile.of(file.ref, fragment.file or file.file, encoding)
        return verify_files(self._folder(position), [file])[0]

    def _folder(self, position: int) -> StepFolder:
        """Return the folder of the step on a cache."""
        backend, context = self._tiers[position].backend, self._context
        return StepFolder(backend, self.origin.ref, context.workers, context.retry)

    def _check_parts(self, position: int, parts: Sequence[StoredFile | FragmentRef]) -> None:
        """Raise ``StorageError`` if one of ``parts`` is missing on a cache or has another size."""
        for part in parts:
            if fault := self.origin.fault(position, part):
                raise (
                    fault
                    if isinstance(fault, StorageError)
                    else StorageError(self.origin.ref.folder, str(fault))
                )

    def _wins(self, subject: str) -> bool:
        """Return True if this rank is the first one to ask for the work that ``subject`` names."""
        own_rank = str(self._coordinator.rank).encode()
        return self._coordinator.set_once(subject, own_rank) == own_rank

    def _await_outcome(self, subject: str) -> bytes | None:
        """Wait for the outcome that another rank posts on ``subject``, and return it.

        Return None if there is no outcome at the deadline.
        """
        return self._coordinator.verdict(
            subject, timeout=max(0.0, self._deadline - time.monotonic())
        )

    def _subject(self, position: int, suffix: object) -> str:
        """Return the subject (the name of an exchange between ranks) that ends in ``suffix``. The
        subjects differ for each cache and for each group of ranks that sees it.
        """
        return f"{self._context.subject}/{position}/{self._scope(position)}/{suffix}"

    def _scope(self, position: int) -> str:
        """Return a name for the group of ranks that see a cache.

        These are the ranks of this node if the tier is local to nodes, all ranks if the store is
        shared, and otherwise the ranks of this machine.
        """
        if nodes := self._tiers[position].nodes:
            return f"node{nodes.of[self._coordinator.rank]}"
        if self._tiers[position].backend.capabilities.shared:
            return "all"
        place = f"{self._owner.machine} {self._tiers[position].url}"
        return checksum(place.encode(errors="surrogateescape"))[:12]


def _is_folder(tier: OpenTier) -> bool:
    return is_folder(tier.tier.url) and not tier.in_memory  # The URL "memory" looks like a path


class _WantedChunks:
    """Copies the chunks that a rank wants to their targets while the rank fetches whole files.

    Thread safety: any thread may call ``copy``.

    Attributes:
        copies: For each chunk that was copied to its targets, the read and the position of the
            source. The key is `ChunkId`, the identity of the chunk.
    """

    def __init__(self, plan: RestorePlan, sink: Sink) -> None:
        self._reads = {read.chunk_id: read for read in plan.reads}
        self._sink = sink
        self.copies: dict[ChunkId, tuple[ChunkRead, int]] = {}

    def copy(self, position: int, read: ChunkRead, raw: memoryview) -> None:
        """Copy a chunk to its targets, if the plan wants it. This is an `OnChunk` callback.

        A second call for the same chunk has no effect. It happens if a file is fetched once more,
        because a cache has refused the file or a store has failed.
        """
        if (own_read := self._reads.get(read.chunk_id)) and read.chunk_id not in self.copies:
            self._sink.place(own_read, raw)
            self.copies[read.chunk_id] = (own_read, position)
