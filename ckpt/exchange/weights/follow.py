"""Follow the weights of a running job: the implementation of ``ckpt.follow``.

A *candidate* is a committed step that may be read next, and its *ref* names the step and the
attempt at it. After a *rollback*, the run goes on from an older step, on a new *branch*. A read (a
``ChunkRead``) says which chunk of a tensor is read, and where. A *delta* has the differences of the
chunks of a step from those of an earlier step, and a chain of deltas leads from one step to
another. A *leaf* describes a tensor.
"""

from __future__ import annotations

import logging
import os
import threading
import time
from collections.abc import Generator, Iterator, Sequence
from contextlib import ExitStack, contextmanager, suppress
from dataclasses import dataclass, replace
from functools import partial
from math import inf
from typing import Any, Final, Self

from ckpt.catalog.candidates import Candidate, candidates
from ckpt.catalog.delta_chain import DeltaReader
from ckpt.catalog.step_listing import (
    RootContents,
    committed_among,
    is_committed,
    list_root,
    why_missing,
)
from ckpt.catalog.tiered_reader import Repair, SourceManifest, TieredReader
from ckpt.checks import check_int
from ckpt.config import Tier
from ckpt.errors import (
    AccessDenied,
    ConfigError,
    FormatUnsupported,
    IntegrityError,
    LinkRefused,
    NoCheckpoint,
    ObjectNotFound,
    StorageError,
)
from ckpt.errors.storage import with_short_traceback
from ckpt.exchange.weights.part import Names, Part
from ckpt.exchange.weights.version_memory import VersionMemory, layout_of
from ckpt.model.keys import StepId, StepRef
from ckpt.model.rollback import Rollback, current_branch, last_rollback, on_branch
from ckpt.pipeline.retry import RetryPolicy
from ckpt.pipeline.workers import Workers
from ckpt.plan.restore import ChunkRead, plan_restore
from ckpt.root.attempts import step_refs
from ckpt.root.leases import lease_if_allowed
from ckpt.storage.api import StorageBackend
from ckpt.storage.registry import open_backend

POLL_SECONDS: Final = 1.0
_LONGEST_PAUSE_SECONDS: Final = 600.0
_MOST_THREADS: Final = 8
_LEASE_REASON: Final = "ckpt.follow"
_log = logging.getLogger("ckpt")

Root = str | os.PathLike[str] | Tier


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class Version:
    """A version of the weights: a committed step of the current branch.

    Attributes:
        step: The number of the step.
        attempt: The attempt at the step. A job that went back may save a number again, and then it
            is another attempt.
        weights: What ``ckpt.load`` gives of the step, in host memory and contiguous. Do not write
            to these tensors.
        base_step: The step of the version that this one was made from; None if it was read as a
            whole, as the first version is.
        changes: The names of the tensors that may differ from those of the version before, as
            ``weights`` has them. Of a version that was read as a whole, these are all.
        read_bytes: The bytes that were read from the stores, of chunks and of deltas.
        nbytes: The bytes of the tensors.
    """

    step: int
    attempt: str
    weights: Any
    base_step: int | None
    changes: frozenset[str]
    read_bytes: int
    nbytes: int

    def __repr__(self) -> str:
        origin = "as a whole" if self.base_step is None else f"from step {self.base_step}"
        return f"<version {self.step}, read {origin}: {self.read_bytes} of {self.nbytes} bytes>"


@dataclass(frozen=True, slots=True)
class _Damage:
    """A step that could not be read from any store.

    Attributes:
        positions: The stores that were asked. Another one may have the step intact.
        due_at: When the step is read again, by ``time.monotonic``. It may be mended until then, or
            only what came over the wire was damaged.
        pause: The time between the last two reads, which grows.
    """

    positions: frozenset[int]
    due_at: float
    pause: float


class Follower(Iterator[Version]):
    """The iterator that ``ckpt.follow`` returns.

    Close it with ``close`` or a ``with`` block.

    It has the memory of two versions. ``_last_memory`` holds the last version that was returned,
    which is of the step ``_last_ref``. The next version is read into ``_spare_memory``.
    ``_damages`` has the steps that could not be read.

    Args:
        roots: The tiers of the run, nearest first.
        part: The part of the state that is read.
        poll_seconds: The time between two looks for a new step.
        timeout_seconds: How long to wait for a version; None to wait for ever.
        stop: Ends the iteration when it is set.

    Thread safety: one thread at a time may use it. Several followers may follow one root.
    """

    def __init__(
        self,
        roots: Sequence[Tier],
        part: Part,
        *,
        poll_seconds: float,
        timeout_seconds: float | None,
        stop: threading.Event,
    ) -> None:
        self._part, self._poll_seconds, self._timeout_seconds = part, poll_seconds, timeout_seconds
        self._stop = stop
        with ExitStack() as stack:
            self._stores: list[StorageBackend] = []
            for root in roots:
                self._stores.append(open_backend(root.url, root.options))
                stack.callback(self._stores[-1].close)
            threads = max(store.capabilities.max_concurrency for store in self._stores)
            self._list_workers = Workers("follow", len(self._stores))
            self._read_workers = Workers("follow", max(1, min(threads, _MOST_THREADS)))
            self._connections = stack.pop_all()
        self._last_ref: StepRef | None = None
        self._last_version: Version | None = None
        self._last_memory: VersionMemory | None = None
        self._spare_memory: VersionMemory | None = None
        self._deltas = DeltaReader()
        self._damages: dict[StepRef, _Damage] = {}
        self._read_only_stores: list[StorageBackend] = []  # They take no pins
        self._is_first_look = True

    def __next__(self) -> Version:
        """Wait for a version that is not the last one, and return it.

        Raises:
            StopIteration: The event ``stop`` was set.
            NoCheckpoint: No version has come within ``timeout_seconds``.
            EntryMissing: The newest checkpoint has no part of the name.
            ConfigError: The names that were given do not fit the part.
            FormatUnsupported: This ckpt cannot read the newest checkpoint.
            AccessDenied: A store denies a request. The version from before stays as it is.
        """
        version = self._wait(None)
        if version is None:
            raise StopIteration
        return version

    def version_of(self, step: int, attempt: str | None = None) -> Version:
        """Wait for one version, and return it. It may be the last one, or an older one.

        Several processes that must have the same version ask for it by its step. The step has to be
        on the current branch.

        Args:
            step: The number of the step.
            attempt: The attempt at the step; None for the newest one.

        Raises:
            NoCheckpoint: The version has not come within ``timeout_seconds``, or the event ``stop``
                was set.
            ConfigError: ``step`` is no number of a step.
            EntryMissing, FormatUnsupported, AccessDenied: As for ``next``. The version from before
                stays as it is.
        """
        check_int("step", step, 0, 10**18 - 1)
        step_id = step if attempt is None else StepRef(step, attempt)
        version = self._wait(step_id)
        if version is None:
            urls = ", ".join(store.url for store in self._stores)
            raise NoCheckpoint(urls, f"the wait for step {step} was ended")
        return version

    def _wait(self, step_id: StepId | None) -> Version | None:
        """Wait for the version ``step_id`` (None: for one that is not the last one). Return None if
        the event ``stop`` is set.
        """
        deadline = (
            None if self._timeout_seconds is None else time.monotonic() + self._timeout_seconds
        )
        while not self._stop.is_set():
            if (version := self._find_version(step_id)) is not None:
                return version
            if self._is_first_look:
                self._is_first_look = False
                self._warn_if_empty()
            remaining_seconds = inf if deadline is None else deadline - time.monotonic()
            if remaining_seconds <= 0:
                raise self._timeout_error(step_id)
            self._stop.wait(min(remaining_seconds, self._poll_seconds))
        return None

    def close(self) -> None:
        """Stop the threads and close the connections. Weights that were returned stay valid."""
        self._list_workers.close()
        self._read_workers.close()
        self._connections.close()

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    def _timeout_error(self, step_id: StepId | None) -> NoCheckpoint:
        urls = ", ".join(store.url for store in self._stores)
        step = step_id.step if isinstance(step_id, StepRef) else step_id
        subject = "new version" if step is None else f"version of step {step}"
        text = f"no {subject} within {self._timeout_seconds:g} s"
        if self._last_ref is None:
            return NoCheckpoint(urls, f"{text}: {self._why_none(step_id)}")
        reason = "" if step_id is None else f": {self._why_none(step_id)}"
        return NoCheckpoint(urls, f"{text}{reason}; the last one is step {self._last_ref.step}")

    def _why_none(self, step_id: StepId | None) -> str:
        """Return a text that says what the stores have instead of the version ``step_id``."""
        texts: list[str] = []
        listings: list[tuple[StorageBackend, RootContents]] = []
        for store in self._stores:
            try:
                listings.append((store, list_root(store)))
            except StorageError as error:
                texts.append(str(error))
        rollback = last_rollback(listing.rollback for _, listing in listings)
        for store, listing in listings:
            try:
                texts.append(_why_not_read(store, listing.refs, rollback, step_id))
            except StorageError as error:
                texts.append(str(error))
        return "; ".join(texts)

    def _warn_if_empty(self) -> None:
        """Warn if no store has a step, since the root may be mistyped."""
        texts: list[str] = []
        for store in self._stores:
            try:
                if step_refs(store):
                    return
                # The store has no attempts, and no certain step is missing.
                texts.append(str(NoCheckpoint(store.url, why_missing(store, [], None))))
            except StorageError:
                return  # A warning has named it
        _log.warning("ckpt: ckpt.follow waits for the first step: %s", "; ".join(texts))

    def _find_version(self, step_id: StepId | None) -> Version | None:
        """Return the version ``step_id`` (None: the newest, unless it is the last one), or None if
        it is not there.
        """
        try:
            for candidate in candidates(self._stores, step_id, workers=self._list_workers):
                rollback = candidate.rollback
                if (
                    step_id is not None
                    and rollback is not None
                    and not rollback.keeps(candidate.ref)
                ):
                    continue
                if candidate.ref == self._last_ref:
                    return None if step_id is None else self._last_version
                if self._may_be_intact(candidate):
                    version = self._read_candidate(candidate)
                    if version is not None:
                        return version
        except AccessDenied:
            raise
        except StorageError as error:
            _log.warning("ckpt: no new version could be read: %s", error)
        return None

    def _may_be_intact(self, candidate: Candidate) -> bool:
        damage = self._damages.get(candidate.ref)
        return (
            damage is None
            or not damage.positions.issuperset(candidate.reachable)
            or time.monotonic() >= damage.due_at
        )

    def _note_damage(self, candidate: Candidate, error: Exception) -> None:
        """Note that a step was damaged on all stores that answer, and log that once. It is read
        again after a pause, which doubles each time.
        """
        ref, damage = candidate.ref, self._damages.get(candidate.ref)
        pause = self._poll_seconds if damage is None else damage.pause
        pause = min(2 * pause, _LONGEST_PAUSE_SECONDS)
        positions = frozenset(candidate.reachable)
        self._damages[ref] = _Damage(positions, time.monotonic() + pause, pause)
        _log.log(
            logging.WARNING if damage is None else logging.DEBUG,
            "ckpt: step %d is passed over, and %s: %s",
            ref.step,
            "there is no version yet"
            if self._last_ref is None
            else f"the version of step {self._last_ref.step} stays",
            error,
        )

    def _read_candidate(self, candidate: Candidate) -> Version | None:
        """Return the version of a candidate; None if its step is damaged, was removed, or left the
        branch meanwhile.

        A step whose files are behind a link that leads out of the root (``LinkRefused``) counts as
        damaged. An error about the format is raised, since no later read would succeed.
        """
        ref = candidate.ref
        stores = [self._stores[position] for position in candidate.reachable]
        reader = TieredReader(stores, ref, retry=RetryPolicy(), on_repair=partial(_warn, ref))
        try:
            with self._leases(stores, ref):
                # If the manifest of a store is damaged, ``_assemble`` is called with another one.
                memory_and_version = reader.try_manifests(partial(self._assemble, reader, ref))
        except FormatUnsupported:
            raise
        except (IntegrityError, ObjectNotFound, LinkRefused) as error:
            if any(is_committed(store, ref) for store in stores):  # Else it was removed
                self._note_damage(candidate, error)
            return None
        self._damages.pop(ref, None)
        rollback = last_rollback(list_root(store).rollback for store in stores)
        if rollback is not None and rollback != candidate.rollback and not rollback.keeps(ref):
            return None
        return self._replace_version(ref, *memory_and_version)

    def _replace_version(self, ref: StepRef, memory: VersionMemory, version: Version) -> Version:
        self._spare_memory = self._last_memory if version.base_step is not None else None
        self._last_ref, self._last_memory, self._last_version = ref, memory, version
        return version

    def _assemble(
        self, reader: TieredReader, ref: StepRef, source: SourceManifest
    ) -> tuple[VersionMemory, Version]:
        """Fill memory with the version of a step. The memory of the last version stays as it is.

        ``source`` is the step's manifest from the nearest store that has it.
        """
        names = self._part.stored_names(source.manifest)
        stored_tensors = source.manifest.tensor_map()
        tensors = [stored_tensors[name] for name in sorted(names)]
        layout = layout_of(tensors)
        last_memory = (
            self._last_memory if self._last_memory and self._last_memory.layout == layout else None
        )
        if last_memory is None and self._last_memory is not None:
            _log.info("ckpt: step %d has another layout: it is read as a whole", ref.step)
        spare_memory = (
            self._spare_memory
            if self._spare_memory and self._spare_memory.layout == layout
            else None
        )
        memory = spare_memory or VersionMemory(tensors)
        # Read the parts of the manifest that describe these tensors.
        manifest = reader.with_fragments(source, memory.leaves).manifest
        plan = plan_restore(manifest, memory.leaves)
        memory.note_chunks(plan.reads)
        self._deltas.read_bytes = 0
        missing_reads = self._reuse(reader.sources, ref, memory, last_memory, plan.reads)
        missing_plan = replace(plan, reads=tuple(missing_reads))
        reader.read(missing_plan, memory.sink, workers=self._read_workers)
        changes = {
            memory.tensor_name(read)
            for read in plan.reads
            if last_memory is None or last_memory.lacks(read)
        }
        return memory, Version(
            step=ref.step,
            attempt=ref.attempt,
            weights=self._part.build(source.manifest, memory.values),
            base_step=self._last_ref.step
            if last_memory is not None and self._last_ref is not None
            else None,
            changes=self._part.names_of(manifest, changes if last_memory is not None else names),
            read_bytes=missing_plan.read_bytes + self._deltas.read_bytes,
            nbytes=sum(tensor.nbytes for tensor in tensors),
        )

    def _reuse(
        self,
        stores: Sequence[StorageBackend],
        ref: StepRef,
        memory: VersionMemory,
        last_memory: VersionMemory | None,
        reads: Sequence[ChunkRead],
    ) -> list[ChunkRead]:
        """Fill ``memory`` with chunks of the last version, which ``last_memory`` holds, and with
        chunks that deltas make of them. Return the reads of all other chunks.
        """
        if last_memory is None or self._last_ref is None:
            return list(reads)
        changed_bytes_by_rank: dict[int, int] = {}
        for read in reads:
            if last_memory.lacks(read):
                changed_bytes_by_rank[read.rank] = (
                    changed_bytes_by_rank.get(read.rank, 0) + read.stored_nbytes
                )
        chains = self._deltas.chains(
            stores, ref, self._last_ref, changed_bytes_by_rank, self._read_workers
        )
        results = self._read_workers.run_all(
            partial(memory.take_chunk, read, last_memory, chains) for read in reads
        )
        self._deltas.forget(sum(leaf.nbytes for leaf in memory.leaves) // 2)
        return [read for read, is_filled in zip(reads, results, strict=True) if not is_filled]

    @contextmanager
    def _leases(self, stores: Sequence[StorageBackend], ref: StepRef) -> Generator[None]:
        """Pin ``ref`` on the stores that have it, while the block runs. A store that takes no pin,
        since it may only be read, is followed without.
        """
        with ExitStack() as stack:
            for store in stores:
                if store not in self._read_only_stores:
                    with suppress(NoCheckpoint):
                        if not stack.enter_context(lease_if_allowed(store, ref, _LEASE_REASON)):
                            self._read_only_stores.append(store)
            yield


def _why_not_read(
    store: StorageBackend,
    all_refs: Sequence[StepRef],
    rollback: Rollback | None,
    step_id: StepId | None,
) -> str:
    """Return a text that says why the attempts on a store gave no version ``step_id``."""
    refs = [ref for ref in all_refs if step_id in (None, ref.step, ref)]
    committed_refs = committed_among(store, refs)
    if not committed_refs:
        if isinstance(step_id, StepRef):
            return f"attempt {step_id.attempt} at step {step_id.step} is not there"
        return why_missing(store, [*all_refs], step_id)
    choose = current_branch if step_id is None else on_branch
    refs_on_branch = choose(rollback, committed_refs)
    if not refs_on_branch:
        return f"step {max(committed_refs).step} is on an abandoned branch"
    return (
        f"step {max(refs_on_branch).step} was not read: a warning in the log says why, unless it "
        "was committed just now"
    )


def _warn(ref: StepRef, repair: Repair) -> None:
    _log.warning(
        "ckpt: step %d: %s is read from a farther tier: %s", ref.step, repair.key, repair.reason
    )


@with_short_traceback
def follow(
    root: Root | Sequence[Root],
    name: str | None = "model",
    *,
    poll_seconds: float = POLL_SECONDS,
    timeout_seconds: float | None = None,
    stop: threading.Event | None = None,
    names: Names | None = None,
) -> Follower:
    """Return an iterator over the versions of the weights that a job commits, for another process
    that serves or evaluates them.

    A version is a committed step of the current branch. The first one is the newest step there is,
    and each later one is what is newest when it is asked for; versions between them are passed
    over. After a restore of an older step, the newest step of the new branch comes next. A version
    is whole, and every chunk of it is verified, before it is returned. Only chunks are read that
    the last version does not have, and of a job that writes deltas (``deltas="model"``) only the
    differences of these.

    ::

        with ckpt.follow("s3://bucket/run42") as versions:
            for version in versions:
                engine.load_weights(version.weights)

    There are two pieces of memory, which are used in turn: the tensors of a version stay as they
    are until the version after the next one is asked for. While a step is read, a pin keeps it from
    being removed, if the store may be written to.

    A step that is damaged on all stores is passed over with a warning, and the last version stays.
    It is read again after ever longer times, and when a further store answers, since it may be
    mended. A store that does not answer, or fails in another way, is asked again. A root without
    steps is waited for; a warning says so once.

    Args:
        root: The folder or URL of the root, or a `Tier` if its backend needs options; or several
            tiers of one run, nearest first. A chunk comes from the nearest one that has it intact.
        name: The part of the state, as for ``ckpt.load``; None for the whole state.
        poll_seconds: The time between two looks for a new step.
        timeout_seconds: How long to wait for a version before `NoCheckpoint` is raised; None to
            wait for ever. The iteration may go on afterwards.
        stop: Ends the iteration when it is set.
        names: Other names for the tensors of the part, as for ``ckpt.load``.

    Raises:
        ConfigError: No backend serves the URL, or an argument is invalid.
        StorageError: A store cannot be opened.
    """
    roots = [root] if isinstance(root, str | os.PathLike | Tier) else [*root]
    if not roots:
        raise ConfigError("follow: name at least one root")
    part = Part(name, names)
    for setting, value in (("poll_seconds", poll_seconds), ("timeout_seconds", timeout_seconds)):
        if value is not None and not 0 < value < float("inf"):
            raise ConfigError(f"{setting}={value!r}: give a positive number of seconds")
    return Follower(
        [item if isinstance(item, Tier) else Tier(os.fspath(item)) for item in roots],
        part,
        poll_seconds=poll_seconds,
        timeout_seconds=timeout_seconds,
        stop=stop or threading.Event(),
    )
