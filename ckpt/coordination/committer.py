"""Carry out the commit protocol of `ckpt.coordination.commit_state_machine`.

Each rank commits on a background thread, once its part of the save is durable or has failed. A
*fragment* describes the part of one rank, and the manifest, which is merged from all fragments,
makes the save a checkpoint.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Collection, Iterable, Iterator
from dataclasses import dataclass, field
from functools import partial
from typing import Protocol, TypeVar, assert_never

import msgspec

from ckpt.coordination.abort_reason import Abort, abort_reason
from ckpt.coordination.commit_state_machine import (
    Action,
    Await,
    Bounds,
    CommitMachine,
    Conclude,
    Event,
    Failure,
    Finish,
    Gather,
    IntentAnswer,
    Look,
    Merge,
    MergeFailure,
    MergeResult,
    Outcome,
    Propose,
    ProposeTurn,
    Put,
    PutResult,
    TurnAnswer,
    Verdict,
    Vote,
    Votes,
    decode_intent,
    decode_turn,
    decode_verdict,
    decode_vote,
)
from ckpt.coordination.coordinator import Coordinator
from ckpt.coordination.exchanges import encode_json
from ckpt.coordination.leaving import who_has_left
from ckpt.coordination.step_files import put_manifest
from ckpt.coordination.tombstone import has_manifest
from ckpt.errors import (
    CkptError,
    CommitError,
    ManifestCorrupt,
    ObjectNotFound,
    TierNotShared,
    TransientStorageError,
    with_root,
)
from ckpt.model.checksum import checksum
from ckpt.model.keys import StepRef
from ckpt.model.manifest import FragmentRef, Packed
from ckpt.model.record_encoding import pack, unpack
from ckpt.plan.merge import MergeCache, merge
from ckpt.storage.api import StorageBackend, read_record

T = TypeVar("T")


class Retry(Protocol):
    """A function that calls ``work``, repeats the call after a transient error of the store, and
    returns the result.
    """

    def __call__(self, work: Callable[[], T], /) -> T: ...


def _call_once(work: Callable[[], T], /) -> T:
    return work()


ReadAll = Callable[[Iterable[Callable[[], Packed]]], Iterator[Packed]]
"""A function that calls the given functions, perhaps on several threads, and yields their results
in order. It calls only a few functions ahead, so that few results are in memory at once.
"""


def in_turn(reads: Iterable[Callable[[], Packed]]) -> Iterator[Packed]:
    """Call the functions in ``reads`` one after the other on this thread, and yield the results."""
    return (read() for read in reads)


class ManifestUnsent(Exception):
    """A put that has failed before it sent the manifest to the store.

    Attributes:
        error: Why it has failed.
    """

    def __init__(self, error: CkptError) -> None:
        super().__init__(str(error))
        self.error = error


class CommitStore(Protocol):
    """The store from which fragments are read, and to which the manifest is put."""

    @property
    def url(self) -> str: ...

    def read(self, ref: StepRef, fragment: FragmentRef) -> bytes:
        """Return the bytes of ``fragment``, which are at most ``fragment.size`` bytes. The caller
        must compare their checksum.
        """
        ...

    def confirm(self) -> None:
        """Raise an error if this job may no longer commit to the store."""
        ...

    def keep(self, bases: Collection[StepRef]) -> None:
        """Keep older steps that a manifest refers to from being removed, until it has been put.

        Raises:
            CkptError: One of them is being removed, or was.
        """
        ...

    def put(self, ref: StepRef, manifest: bytes) -> None:
        """Put the manifest if absent. Raise an error if this job may no longer commit to the store.

        It is no error if the same manifest exists already.

        Raises:
            ManifestUnsent: The manifest was not sent, so this call never makes it appear.
            Exception: Any other one. The manifest may exist.
        """
        ...

    def is_absent(self, ref: StepRef) -> bool:
        """Return True if the manifest is known not to exist."""
        ...

    def offer(self, ref: StepRef, fragment: FragmentRef) -> None:
        """Let other ranks read the fragment of this rank.

        The rank calls this before it votes that its part is durable.
        """
        ...

    def attend(self, ref: StepRef, deadline: float) -> None:
        """Do this rank's part of a commit that another rank carries out, such as to put the
        manifest on this node.

        The call waits for this work until the time ``deadline`` at the latest. Work that has begun
        by then is completed.
        """
        ...

    def forget(self, ref: StepRef) -> None:
        """Remove this rank's messages about a save whose outcome is known. It raises no error."""
        ...


class SharedStore:
    """The `CommitStore` of a store that every rank sees.

    ``retry`` calls its argument, and repeats the call after a transient error of the store.
    ``confirm`` raises an error if this job may no longer commit to the store. ``pins`` keeps older
    steps (see ``keep``).
    """

    def __init__(
        self,
        backend: StorageBackend,
        retry: Retry = _call_once,
        *,
        confirm: Callable[[], object] = lambda: None,
        pins: Callable[[Collection[StepRef]], object] = lambda _: None,
    ) -> None:
        self._backend, self._retry = backend, retry
        self._confirm, self._pins = confirm, pins

    @property
    def url(self) -> str:
        return self._backend.url

    def read(self, ref: StepRef, fragment: FragmentRef) -> bytes:
        key = ref.key(fragment.name)
        decode = partial(_checked_fragment, fragment=fragment, key=key)
        return self._retry(lambda: read_record(self._backend, key, decode, limit=fragment.size))

    def confirm(self) -> None:
        self._retry(self._confirm)

    def keep(self, bases: Collection[StepRef]) -> None:
        self._pins(bases)

    def put(self, ref: StepRef, manifest: bytes) -> None:
        """Put the manifest if absent, with retries.

        Each try checks again that this job owns the root. A first try may put the manifest and get
        no answer. Another job may then take the root over and evict the step before the next try.

        Raises:
            TransientStorageError: A try had no answer. The manifest may exist, even if later tries
                have failed with other errors.
            ManifestUnsent: No try has sent the manifest, such as since another job owns the root.
            CommitError: The manifest exists with other bytes.
            StorageError: The put has failed.
        """
        transient_errors: list[TransientStorageError] = []
        is_sent = False

        def put_confirmed() -> None:
            nonlocal is_sent
            self._confirm()
            is_sent = True
            try:
                put_manifest(self._backend, ref.manifest, manifest)
            except TransientStorageError as error:
                transient_errors.append(error)
                raise

        try:
            self._retry(put_confirmed)
        except Exception as error:
            if not is_sent and isinstance(error, CkptError):
                raise ManifestUnsent(error) from error
            if not transient_errors or isinstance(error, TransientStorageError):
                raise
            raise TransientStorageError(
                ref.manifest, f"{transient_errors[-1].detail}; then {error}"
            ) from error

    def is_absent(self, ref: StepRef) -> bool:
        return not has_manifest(self._backend, ref)

    def offer(self, ref: StepRef, fragment: FragmentRef) -> None:
        """Do nothing, since the other ranks can read the fragment from the tier."""

    def attend(self, ref: StepRef, deadline: float) -> None:
        """Do nothing, since one rank puts the manifest for all ranks."""

    def forget(self, ref: StepRef) -> None:
        """Do nothing, since no messages were sent."""


@dataclass(frozen=True, slots=True)
class Committer:
    """Commits saves of one attempt to one tier.

    Attributes:
        coordinator: The connection to the other ranks.
        store: The store of the fragments and manifests.
        name: The first part of the subjects, which differs between tiers.
        bounds: How long ranks wait for each other.
        merge_cache: The results of the last merge that the next merge can use again.
        read_all: The function that reads the fragments. See `ReadAll`.

    Thread safety: only one thread at a time may call the methods.
    """

    coordinator: Coordinator
    store: CommitStore
    name: str
    bounds: Bounds
    merge_cache: MergeCache = field(default_factory=MergeCache)
    read_all: ReadAll = in_turn

    def commit(self, ref: StepRef, vote: Vote, *, abort: CkptError | None = None) -> Verdict:
        """Post the vote of this rank and return the verdict, which is the same on all ranks. If the
        vote is `Durable`, call ``store.offer`` before.

        Args:
            ref: The step.
            vote: The vote of this rank.
            abort: An error for which the leader aborts the save without regard to the votes; else
                None.

        Raises:
            CommitError: This rank gets no verdict, because the job's store is gone or the rank has
                left the exchanges of the job.
        """
        return _Commit(self, ref).run(vote, abort)


class _Commit:
    """Carries out the actions of the commit machine for one save.

    A *subject* is the name of an exchange between ranks. The methods ``post`` and ``collect`` of
    ``_coordinator`` carry the messages of single ranks on a subject. Its methods ``set_once`` and
    ``verdict`` carry the one value on which all ranks agree. ``_subject`` is the subject of the
    votes and the outcome. ``_manifest`` has the bytes of the manifest once this rank has merged the
    fragments. After ``_bounds.takeover`` seconds, a rank looks again whether another rank acts.
    """

    def __init__(self, committer: Committer, ref: StepRef) -> None:
        self._coordinator, self._store = committer.coordinator, committer.store
        self._bounds, self._merge_cache = committer.bounds, committer.merge_cache
        self._read_all = committer.read_all
        self._ref, self._subject = ref, f"{committer.name}/{ref.folder}"
        self._manifest = b""

    def run(self, vote: Vote, abort: CkptError | None) -> Verdict:
        """Post ``vote``, do what the commit machine says, and return the verdict."""
        self._coordinator.post(self._subject, encode_json(vote))
        current_time = time.monotonic()
        rank, world_size = self._coordinator.rank, self._coordinator.world_size
        machine = CommitMachine(self._ref.step, rank, world_size, self._bounds, current_time)
        action = machine.begin(current_time, None if abort is None else abort_reason(abort))
        while not isinstance(action, Finish):
            event = self._perform(action)
            action = machine.handle(event, time.monotonic())
        self._coordinator.forget(self._subject)
        self._store.forget(self._ref)
        return action.verdict

    def _perform(self, action: Action) -> Event:
        """Carry out ``action``, and return its event."""
        intent_subject, turn_subject = f"{self._subject}/intent", f"{self._subject}/turn"
        match action:
            case Await(deadline):
                return self._outcome(deadline)
            case Look():
                data = self._coordinator.verdict(intent_subject, timeout=0.0)
                return IntentAnswer(None if data is None else decode_intent(data))
            case Gather(ranks, deadline):
                return self._gather(ranks, deadline)
            case Merge(fragments):
                return self._merge(fragments)
            case Propose(proposal):
                return IntentAnswer(
                    decode_intent(self._coordinator.set_once(intent_subject, encode_json(proposal)))
                )
            case ProposeTurn(proposal):
                return TurnAnswer(
                    decode_turn(self._coordinator.set_once(turn_subject, encode_json(proposal)))
                )
            case Put():
                return self._put()
            case Conclude(verdict):
                return Outcome(
                    decode_verdict(self._coordinator.set_once(self._subject, encode_json(verdict)))
                )
            case Finish():
                raise AssertionError(action)
            case _:
                assert_never(action)

    def _outcome(self, deadline: float) -> Outcome:
        """Wait until ``deadline`` for the outcome, and do this rank's part of a commit."""
        self._store.attend(self._ref, deadline)
        data = self._coordinator.verdict(
            self._subject, timeout=max(0.0, deadline - time.monotonic())
        )
        return Outcome(None if data is None else decode_verdict(data))

    def _gather(self, ranks: frozenset[int], deadline: float) -> Event:
        """Wait for votes of ``ranks``, or for the outcome.

        Ranks that have read the outcome remove their votes. So this method also checks whether the
        outcome is set.
        """
        while True:
            seconds = max(0.0, deadline - time.monotonic())
            votes = self._coordinator.collect(
                self._subject, set(ranks), timeout=min(seconds, self._bounds.takeover)
            )
            if votes or seconds == 0.0:
                return Votes({rank: _vote_of(data) for rank, data in votes.items()})
            if (outcome := self._outcome(0.0)).verdict is not None:
                return outcome
            if reasons := who_has_left(self._coordinator, ranks):
                # They post nothing more, but they may have posted votes just before they left.
                late_votes = self._coordinator.collect(self._subject, set(reasons), timeout=0.0)
                failures = {
                    rank: Failure(f"it has ended: {reason}") for rank, reason in reasons.items()
                }
                return Votes(failures | {rank: _vote_of(data) for rank, data in late_votes.items()})

    def _merge(self, fragments: tuple[FragmentRef, ...]) -> Event:
        """Make the manifest. A failure is certain if every rank would meet it."""
        try:
            contents = self._read_all(partial(self._read, fragment) for fragment in fragments)
            manifest = merge(zip(contents, fragments, strict=True), self._merge_cache)
            if manifest.increments:  # They need chunks in files of older steps, the bases
                self._store.keep(manifest.bases)
            self._manifest = pack(manifest)
            self._store.confirm()
        except CkptError as error:
            certain = isinstance(error, CommitError) and not isinstance(error, TierNotShared)
            return MergeFailure(abort_reason(with_root(error, self._store.url)), certain=certain)
        except Exception as error:  # noqa: BLE001
            # The other ranks must learn of any error, or they wait in vain.
            return MergeFailure(
                Abort(f"rank {self._coordinator.rank} failed: {error!r}", {}), certain=False
            )
        return MergeResult(checksum(self._manifest))

    def _read(self, fragment: FragmentRef) -> Packed:
        """Return ``fragment`` after a check of its checksum. The merge checks its contents."""
        key = self._ref.key(fragment.name)
        try:
            data = self._store.read(self._ref, fragment)
        except ObjectNotFound:
            if fragment.rank == self._coordinator.rank:
                raise
            raise TierNotShared(self._store.url, [fragment.rank]) from None
        return unpack(_checked_fragment(data, fragment=fragment, key=key), Packed, key=key)

    def _put(self) -> PutResult:
        """Put the manifest that ``_merge`` has made."""
        try:
            self._store.put(self._ref, self._manifest)
        except ManifestUnsent as unsent:
            cause = with_root(unsent.error, self._store.url)
            return PutResult(_error_text(cause), abort_reason(cause))
        except Exception as error:  # noqa: BLE001 - the manifest may exist in spite of the error
            failure = with_root(error, self._store.url) if isinstance(error, CkptError) else error
            return self._put_failure(failure)
        return PutResult()

    def _put_failure(self, error: Exception) -> PutResult:
        """Return the event for a put that failed with ``error``.

        The event says that the manifest can never appear if the manifest is absent and the error is
        not transient, so that the store has refused the put.
        """
        text = _error_text(error)
        abort = abort_reason(error) if isinstance(error, CkptError) else Abort(repr(error), {})
        try:
            is_final = not isinstance(error, TransientStorageError) and self._store.is_absent(
                self._ref
            )
        except Exception as check_error:  # noqa: BLE001 - it may be there or not
            return PutResult(f"{text}; then {check_error!r}")
        return PutResult(text, abort if is_final else None)


def _error_text(error: Exception) -> str:
    return f"{type(error).__name__}: {error}"


def _checked_fragment(data: bytes, *, fragment: FragmentRef, key: str) -> bytes:
    """Return the bytes of a fragment. Raise ``ManifestCorrupt`` if its rank has put other ones."""
    if checksum(data) != fragment.checksum:
        raise ManifestCorrupt(key, "it is not what its rank has written")
    return data


def _vote_of(data: bytes) -> Vote:
    try:
        return decode_vote(data)
    except msgspec.MsgspecError as error:
        return Failure(f"its vote cannot be read: {error}")
