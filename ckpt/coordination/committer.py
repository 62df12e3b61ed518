"""The commit protocol, driven: one call per rank, from a background thread, once its part is durable (or lost)."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterable, Iterator
from functools import partial
from typing import Final, Protocol, TypeVar

from ckpt.coordination.api import Coordinator
from ckpt.coordination.commit import (
    CommitMachine,
    Committed,
    Heard,
    Merge,
    Refuse,
    Refused,
    TimedOut,
    Unknown,
    Verdict,
    Word,
    decode_verdict,
    decode_word,
    encode,
)
from ckpt.errors import (
    CkptError,
    CommitError,
    CommitTimeout,
    HistoryHidden,
    ManifestCorrupt,
    ObjectExists,
    ObjectNotFound,
    PeerFailed,
    ReplicasDiverged,
    RootInUse,
    StepExists,
    StorageError,
    TensorIncomplete,
    placed,
)
from ckpt.model.checksum import checksum
from ckpt.model.encoding import pack
from ckpt.model.layout import StepRef
from ckpt.model.manifest import FragmentRef
from ckpt.model.packed import Packed, Part, read_part
from ckpt.model.validate import check_fragment
from ckpt.plan.merge import Known, merge
from ckpt.storage.api import StorageBackend, read_object

T = TypeVar("T")

LEADER: Final = 0
VERDICT_GRACE_SECONDS: Final = 30.0
"""How much longer than the leader the others wait: the leader's own time-out must reach them as a verdict."""


class Retry(Protocol):
    """Calls ``work``, again where the store only stumbled."""

    def __call__(self, work: Callable[[], T], /) -> T: ...


def _at_once(work: Callable[[], T], /) -> T:
    return work()


ReadAll = Callable[[Iterable[Callable[[], Part]]], Iterator[Part]]
"""Calls all of it, perhaps on several threads; results come in order, and few of them wait."""


def in_turn(reads: Iterable[Callable[[], Part]]) -> Iterator[Part]:
    """On this thread, one after the other."""
    return (read() for read in reads)


class Committer:
    """Commits saves of one attempt to one tier.

    Threads: one background thread at a time.

    Args:
        name: Tells this tier's subjects from those of others.
        timeout: Seconds the leader waits for the last rank's word.
        retry: Calls what it is given, again where the store only stumbled.
        read_all: See `ReadAll`.
    """

    def __init__(
        self,
        coordinator: Coordinator,
        backend: StorageBackend,
        *,
        name: str,
        timeout: float,
        retry: Retry = _at_once,
        known: Known | None = None,
        before_put: Callable[[], None] = lambda: None,
        read_all: ReadAll = in_turn,
    ) -> None:
        self._coordinator, self._backend, self._name, self._timeout = coordinator, backend, name, timeout
        self._read_all = read_all
        self._retry, self._known, self._before_put = retry, known or Known(), before_put

    def commit(self, ref: StepRef, word: Word, *, veto: CkptError | None = None) -> Verdict:
        """Say this rank's word and return the verdict.

        Args:
            veto: On the leader, a reason to refuse whatever the words are.

        Raises:
            CommitTimeout: No verdict in time.
            CommitError: The verdict cannot be had: the store is gone.
        """
        subject = f"{self._name}/{ref.folder}"
        self._coordinator.tell(subject, encode(word))
        if self._coordinator.rank == LEADER:
            verdict = decode_verdict(
                self._coordinator.decide(subject, encode(self._lead(subject, ref, veto)))
            )
        else:
            wait = self._timeout + VERDICT_GRACE_SECONDS
            heard = self._coordinator.verdict(subject, timeout=wait)
            if heard is None:
                raise CommitTimeout(ref.step, [LEADER], wait, "the verdict")
            verdict = decode_verdict(heard)
        self._coordinator.forget(subject)
        return verdict

    def _lead(self, subject: str, ref: StepRef, veto: CkptError | None) -> Verdict:
        if veto is not None:
            return refusal(veto)
        try:
            action = self._listen(subject)
            if isinstance(action, Refuse):
                if action.failures:
                    raise PeerFailed(ref.step, action.failures)
                raise CommitTimeout(ref.step, action.missing, self._timeout, "the part")
            data = self._merged(ref, action.fragments)
            self._before_put()
        except CkptError as error:
            return refusal(placed(error, self._backend.url))
        except Exception as error:  # noqa: BLE001 - the others must hear of it, or they wait in vain
            return Refused(reason=f"the leader failed: {error!r}", failures={})
        try:
            self._retry(lambda: put_once(self._backend, ref.manifest, data))
        except Exception as error:  # noqa: BLE001 - it may have arrived all the same
            return self._outcome(ref, placed(error, self._backend.url))
        return Committed(checksum(data))

    def _outcome(self, ref: StepRef, error: Exception) -> Verdict:
        """After a put that failed: refused only if the manifest is seen not to be there."""
        try:
            self._backend.head(ref.manifest)
        except ObjectNotFound:
            return (
                refusal(error) if isinstance(error, CkptError) else Refused(reason=repr(error), failures={})
            )
        except Exception as blind:  # noqa: BLE001 - not even that can be seen
            return Unknown(f"{type(error).__name__}: {error}; then {blind!r}")
        return Unknown(f"{type(error).__name__}: {error}")

    def _listen(self, subject: str) -> Merge | Refuse:
        machine = CommitMachine(range(self._coordinator.world_size))
        deadline = time.monotonic() + self._timeout
        while True:
            left = deadline - time.monotonic()
            words = self._coordinator.hear(subject, set(machine.missing), timeout=max(0.0, left))
            for rank, data in sorted(words.items()):
                if action := machine.handle(Heard(rank, decode_word(data))):
                    return action
            if left <= 0 and (action := machine.handle(TimedOut())):
                return action

    def _merged(self, ref: StepRef, fragments: tuple[FragmentRef, ...]) -> bytes:
        reads = (partial(self._read, ref, fragment) for fragment in fragments)
        return pack(merge(zip(self._read_all(reads), fragments, strict=True), self._known))

    def _read(self, ref: StepRef, fragment: FragmentRef) -> Part:
        key = ref.key(fragment.name)
        data = self._retry(lambda: read_object(self._backend, key, limit=fragment.size))
        if checksum(data) != fragment.checksum:
            raise ManifestCorrupt(key, "it is not what its rank has written")
        part = read_part(data, key=key)
        if isinstance(part, Packed):  # checked as it is merged
            return part
        return check_fragment(part, key=key, known=self._known.parts.get(fragment.rank))


def put_once(backend: StorageBackend, key: str, data: bytes) -> None:
    """Put if absent, and be content if what is there is the same: a reply may be lost, and two may merge the same fragments.

    Raises:
        CommitError: Something else is there.
    """
    try:
        backend.put(key, [data], if_absent=True)
    except StorageError as error:
        try:
            same = backend.head(key).size == len(data) and read_object(backend, key, limit=len(data)) == data
        except StorageError:
            raise error from None
        if not same:
            raise CommitError(f"{key!r} was already there with other content") from (
                None if isinstance(error, ObjectExists) else error
            )


def refusal(error: CkptError) -> Refused:
    """A verdict that carries ``error`` to the other ranks."""
    kind = type(error).__name__
    match error:
        case PeerFailed():
            return Refused(reason=str(error), failures=error.failures, kind=kind)
        case CommitTimeout():
            return Refused(reason=str(error.seconds), failures={}, kind=kind, ranks=error.missing)
        case ReplicasDiverged():
            return Refused(reason="", failures={}, kind=kind, names=(error.name,), ranks=error.ranks)
        case TensorIncomplete():
            return Refused(reason=error.detail, failures={}, kind=kind, names=(error.name,))
        case StepExists():
            return Refused(reason=error.root, failures={}, kind=kind)
        case HistoryHidden():
            return Refused(reason=error.root, failures={}, kind=kind, ranks=(error.newest,))
        case RootInUse():
            return Refused(reason=error.owner, failures={}, kind=kind, names=(error.root,))
        case _:
            return Refused(reason=f"{kind}: {error}", failures={})


def rebuild(verdict: Refused, step: int) -> CommitError:
    """The error that a refusal carries."""
    match verdict.kind:
        case "PeerFailed":
            return PeerFailed(step, verdict.failures)
        case "CommitTimeout":
            return CommitTimeout(step, verdict.ranks, float(verdict.reason), "the part")
        case "ReplicasDiverged":
            return ReplicasDiverged(verdict.names[0], verdict.ranks)
        case "TensorIncomplete":
            return TensorIncomplete(verdict.names[0], verdict.reason)
        case "StepExists":
            return StepExists(step, verdict.reason)
        case "HistoryHidden":
            return HistoryHidden(step, verdict.ranks[0], verdict.reason)
        case "RootInUse":
            return RootInUse(verdict.names[0], verdict.reason)
        case _:
            return CommitError(f"step {step} was not committed: {verdict.reason}")
