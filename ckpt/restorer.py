"""The newest step that is whole -> the state, on all ranks the same one.

The leader lists and proposes; every rank matches; when all fit, every rank reads; only when all have
read is anything but tensor memory touched. A rank that meets damage makes all
go to the next best: another tier, then the step before.
"""

from __future__ import annotations

import gc
import logging
import time
from collections.abc import Callable, Generator, Iterator, MutableMapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any, Final, TypeVar

import msgspec

from ckpt.adapters.load import Matched, match
from ckpt.adapters.sink import TensorSink
from ckpt.catalog.index import born, find, read_manifest
from ckpt.coordination.api import Coordinator
from ckpt.coordination.committer import LEADER
from ckpt.errors import (
    CkptError,
    CommitTimeout,
    EntryUnexpected,
    FormatTooNew,
    IntegrityError,
    NoCheckpoint,
    ObjectNotFound,
    RestoreError,
    StorageError,
)
from ckpt.events import Event, Restored, StepDamaged
from ckpt.model.layout import StepRef, parse_folder
from ckpt.model.manifest import Manifest, stored_size
from ckpt.pipeline.reader import read_plan
from ckpt.pipeline.retry import RetryPolicy
from ckpt.pipeline.workers import Workers
from ckpt.plan.restore import RestorePlan, plan_restore
from ckpt.storage.tiers import OpenTier

_PATIENCE_SECONDS: Final = 3600.0
"""How long ranks wait for each other in a restore: reading may take that long on slow storage."""

T = TypeVar("T")

_log = logging.getLogger("ckpt")


@dataclass(frozen=True, slots=True, kw_only=True)
class RestoreReport:
    """What was restored and what it took.

    Attributes:
        tier: URL of the tier that it came from.
        nbytes: Bytes that landed in this rank's state; ``read_bytes`` were fetched for it.
        seconds: The whole call: finding, matching, reading, verifying, and the waiting for other ranks.
        skipped: Newer (step, reason) that were damaged.
    """

    step: int
    attempt: str
    tier: str
    nbytes: int
    read_bytes: int
    seconds: float
    saved_world_size: int
    skipped: tuple[tuple[int, str], ...]

    @property
    def gigabytes_per_second(self) -> float:
        """10^9 bytes that landed, per second of the whole call."""
        return self.nbytes / max(self.seconds, 1e-9) / 1e9

    def __str__(self) -> str:
        return (
            f"step {self.step} from {self.tier}: {self.nbytes / 1e9:.2f} GB in {self.seconds:.2f} s, "
            f"{self.gigabytes_per_second:.2f} GB/s, checksums verified"
        )


class _Proposal(msgspec.Struct, frozen=True):
    tier: int
    folder: str


class _Answer(msgspec.Struct, frozen=True):
    """``ok``, ``damaged`` (try the next) or ``stop`` (the target does not fit). ``names`` of the checkpoint that have no place on the rank."""

    outcome: str
    reason: str = ""
    names: tuple[str, ...] = ()


@dataclass(frozen=True, slots=True)
class _Landed:
    matched: Matched
    nbytes: int
    read_bytes: int
    world_size: int


class _Damaged(Exception):
    """Some rank could not use this candidate."""


class Restorer:
    """Threads: the training thread. All ranks call ``restore`` alike."""

    def __init__(
        self,
        tiers: Sequence[OpenTier],
        coordinator: Coordinator,
        workers: Workers,
        notify: Callable[[Event], None],
        *,
        serial: int,
    ) -> None:
        """``serial`` tells this restore from the manager's others: subjects are used once."""
        self._tiers, self._coordinator, self._workers, self._notify = tiers, coordinator, workers, notify
        self._retry = RetryPolicy()
        self._serial, self._round = serial, 0
        self._overwritten = False

    def restore(self, state: MutableMapping[str, Any], step: int | None) -> RestoreReport | None:
        """Fill ``state``. None if there is no checkpoint and none was asked for by number.

        Raises:
            RestoreError: It does not fit, or no step is intact; tensors may have been overwritten in the latter case, and the message says so.
            StorageError: The tiers cannot be listed.
        """
        began = time.perf_counter()
        skipped: list[tuple[int, str]] = []
        candidates = self._candidates(step) if self._coordinator.rank == LEADER else iter(())
        while (proposal := self._agree(candidates)) is not None:
            tier, ref = self._tiers[proposal.tier], _ref(proposal)
            try:
                landed = self._land(state, tier, ref)
            except RestoreError as misfit:
                if skipped and self._overwritten:
                    raise RestoreError(f"{misfit} ({_told(step, skipped, self._overwritten)})") from misfit
                raise
            except _Damaged as damage:
                _log.warning(
                    "ckpt: step %d on %s is damaged, looking for the next best: %s",
                    ref.step,
                    tier.url,
                    damage,
                )
                self._notify(StepDamaged(step=ref.step, tier=tier.url, error=damage.__cause__ or damage))
                skipped.append((ref.step, str(damage)))
                continue
            _apply(landed.matched, ref)
            report = RestoreReport(
                step=ref.step, attempt=ref.attempt, tier=tier.url, nbytes=landed.nbytes, read_bytes=landed.read_bytes,
                seconds=time.perf_counter() - began, saved_world_size=landed.world_size, skipped=tuple(skipped),
            )  # fmt: skip
            _log.info("ckpt: restored %s", report)
            self._notify(Restored(step=ref.step, tier=tier.url, nbytes=landed.nbytes, seconds=report.seconds))
            return report
        if not skipped and step is None:
            return None
        raise NoCheckpoint(
            ", ".join(tier.url for tier in self._tiers), _told(step, skipped, self._overwritten)
        )

    # -- the leader's list --------------------------------------------------------------------------------------------------

    def _candidates(self, step: int | None) -> Iterator[_Proposal]:
        found: list[tuple[int, int, StepRef]] = []
        failure: StorageError | None = None
        for tier in self._tiers:
            try:
                refs = find(tier.backend, step)
            except NoCheckpoint:
                continue
            except StorageError as error:
                _log.warning("ckpt: the tier %s cannot be listed: %s", tier.url, error)
                failure = error
                continue
            found += [(-ref.step, tier.index, ref) for ref in refs]
        if not found and failure is not None:
            raise failure
        yield from self._ordered(found)

    def _ordered(self, found: list[tuple[int, int, StepRef]]) -> Iterator[_Proposal]:
        """Newest step first; of attempts at one step the youngest; of tiers that hold it the nearest."""
        tried: dict[int, set[str]] = {}
        for _, _, ref in found:
            tried.setdefault(ref.step, set()).add(ref.attempt)
        age = {
            ref: -born(self._tiers[index].backend, ref) if len(tried[ref.step]) > 1 else 0.0
            for _, index, ref in found
        }
        for _, index, ref in sorted(found, key=lambda item: (item[0], age[item[2]], item[1])):
            yield _Proposal(index, ref.folder)

    def _agree(self, candidates: Iterator[_Proposal]) -> _Proposal | None:
        """The leader's next proposal, on all ranks."""
        self._round += 1
        subject = f"restore/{self._serial}/{self._round}/proposal"
        if self._coordinator.rank == LEADER:
            try:
                proposal: _Proposal | Exception | None = next(candidates, None)
            except Exception as error:  # noqa: BLE001 - the others wait for it
                proposal = error
            told = {"error": str(proposal)} if isinstance(proposal, Exception) else proposal
            self._coordinator.decide(subject, msgspec.json.encode(told))
            if isinstance(proposal, Exception):
                raise proposal
            return proposal
        heard = self._coordinator.verdict(subject, timeout=_PATIENCE_SECONDS)
        if heard is None:
            raise CommitTimeout(-1, [LEADER], _PATIENCE_SECONDS, "the choice of a step")
        node = msgspec.json.decode(heard)
        if node and "error" in node:
            raise StorageError("", f"rank {LEADER} cannot list the tiers: {node['error']}")
        return msgspec.convert(node, _Proposal) if node else None

    # -- every rank's part --------------------------------------------------------------------------------------------------

    def _land(self, state: MutableMapping[str, Any], tier: OpenTier, ref: StepRef) -> _Landed:
        """Match on all ranks, and only then read on all.

        Raises:
            _Damaged: Some rank met damage; all shall take the next best.
            RestoreError: It does not fit somewhere. Nothing was changed anywhere, if it was found while matching.
        """
        rank, world = self._coordinator.rank, self._coordinator.world_size

        def fit() -> tuple[Manifest, Matched, RestorePlan]:
            with _uncollected():
                manifest = self._retry.call(lambda: read_manifest(tier.backend, ref))
                matched = match(state, manifest, rank=rank, world_size=world)
                return manifest, matched, plan_restore(manifest, matched.wanted)

        (manifest, matched, plan), unexpected = self._together(
            "match", ref, fit, lambda found: found[1].unexpected
        )
        if unexpected:
            raise EntryUnexpected(unexpected, ref.step)
        self._overwritten = True
        self._together("read", ref, lambda: self._read(tier, ref, manifest, matched, plan), lambda _: ())
        return _Landed(matched, plan.wanted_bytes, plan.read_bytes, manifest.world_size)

    def _read(
        self, tier: OpenTier, ref: StepRef, manifest: Manifest, matched: Matched, plan: RestorePlan
    ) -> bool:
        files, encodings = manifest.file_map(), manifest.encodings()
        read_plan(
            plan,
            TensorSink(matched.wanted, matched.targets),
            backend=tier.backend,
            file_of=lambda rank: (
                ref.key(files[rank].name),
                stored_size(files[rank], encodings.get(rank)),
            ),
            workers=self._workers,
            retry=self._retry,
            on_bytes=lambda _: None,
        )
        return True

    def _together(
        self, what: str, ref: StepRef, work: Callable[[], T], names: Callable[[T], tuple[str, ...]]
    ) -> tuple[T, tuple[str, ...]]:
        """Do ``work`` on all ranks; returns its result and the ``names`` that all ranks gave, or raises on all what failed on one."""
        result: T | None = None
        error: Exception | None = None
        try:
            result = work()
            mine = _Answer("ok", names=names(result))
        except Exception as failed:  # noqa: BLE001 - the others must hear of it before it is raised
            error = failed
            outcome = "damaged" if _is_damage(failed) else "stop"
            mine = _Answer(outcome, str(failed) or repr(failed))
        answer = self._poll(f"restore/{self._serial}/{self._round}/{what}", ref, mine)
        if answer.outcome == "damaged":
            raise _Damaged(answer.reason) from error
        if answer.outcome == "stop" or result is None:
            raise error if isinstance(error, CkptError) else RestoreError(answer.reason) from error
        return result, answer.names

    def _poll(self, subject: str, ref: StepRef, mine: _Answer) -> _Answer:
        """The worst answer of all ranks, on all ranks."""
        self._coordinator.tell(subject, msgspec.json.encode(mine))
        if self._coordinator.rank == LEADER:
            worst = self._worst(subject, ref)
            self._coordinator.decide(subject, msgspec.json.encode(worst))
            return worst
        heard = self._coordinator.verdict(subject, timeout=_PATIENCE_SECONDS + 60)
        if heard is None:
            raise CommitTimeout(ref.step, [LEADER], _PATIENCE_SECONDS + 60, "the end of the restore")
        return msgspec.json.decode(heard, type=_Answer)

    def _worst(self, subject: str, ref: StepRef) -> _Answer:
        missing = set(range(self._coordinator.world_size))
        deadline = time.monotonic() + _PATIENCE_SECONDS
        worst = _Answer("ok")
        shared: set[str] | None = None
        while missing:
            words = self._coordinator.hear(subject, missing, timeout=max(0.0, deadline - time.monotonic()))
            if not words:
                names = ", ".join(map(str, sorted(missing)[:16]))
                return _Answer(
                    "stop",
                    f"step {ref.step}: rank(s) {names} did not finish the restore in {_PATIENCE_SECONDS:.0f} s",
                )
            for rank, data in words.items():
                missing.discard(rank)
                answer = msgspec.json.decode(data, type=_Answer)
                shared = set(answer.names) if shared is None else shared & set(answer.names)
                if answer.outcome == "stop" or (answer.outcome == "damaged" and worst.outcome == "ok"):
                    where = f"rank {rank}: " if self._coordinator.world_size > 1 else ""
                    worst = _Answer(answer.outcome, where + answer.reason)
        return worst if worst.outcome != "ok" else _Answer("ok", names=tuple(sorted(shared or ())))


@contextmanager
def _uncollected() -> Generator[None]:
    """No garbage collection meanwhile: a plan is thousands of objects that live, and to look through a process with torch in it costs as long as reading half a GiB."""
    wanted = gc.isenabled()
    gc.disable()
    try:
        yield
    finally:
        if wanted:
            gc.enable()


def _apply(matched: Matched, ref: StepRef) -> None:
    try:
        matched.apply()
    except CkptError:
        raise
    except Exception as error:
        raise RestoreError(
            f"step {ref.step} was read, but an object of the state did not take its part: {error!r}"
        ) from error


def _ref(proposal: _Proposal) -> StepRef:
    ref = parse_folder(proposal.folder)
    assert ref is not None, proposal.folder
    return ref


def _is_damage(error: Exception) -> bool:
    """Whether the data is bad or gone. A store that forbids or does not answer, or a later format, says nothing about the data: going back in history would hide it."""
    if isinstance(error, IntegrityError):
        return not isinstance(error, FormatTooNew)
    return isinstance(error, ObjectNotFound) or type(error) is StorageError


def _told(step: int | None, skipped: Sequence[tuple[int, str]], overwritten: bool) -> str:
    if not skipped:
        return f"step {step} is not there"
    reasons = "; ".join(f"step {number}: {reason}" for number, reason in skipped[:5])
    torn = ". Tensors of the state may have been overwritten in part: do not train on with it"
    return f"none is intact ({reasons}){torn if overwritten else '; nothing in the state was changed'}"
