"""The newest step that is whole -> the state, on all ranks the same one.

The leader lists and proposes; every rank matches and reads; only when all have succeeded is anything but tensor memory touched. A rank that meets damage makes all
go to the next best: another tier, then the step before.
"""

from __future__ import annotations

import logging
import time
from collections.abc import Callable, Iterator, MutableMapping, Sequence
from dataclasses import dataclass
from typing import Any, Final

import msgspec

from ckpt.adapters.load import Matched, match
from ckpt.adapters.sink import TensorSink
from ckpt.catalog.index import find, read_manifest
from ckpt.coordination.api import Coordinator
from ckpt.coordination.committer import LEADER
from ckpt.errors import CkptError, CommitTimeout, IntegrityError, NoCheckpoint, RestoreError, StorageError
from ckpt.events import Event, Restored, StepDamaged
from ckpt.model.layout import StepRef, parse_folder
from ckpt.pipeline.reader import read_plan
from ckpt.pipeline.retry import RetryPolicy
from ckpt.pipeline.workers import Workers
from ckpt.plan.restore import plan_restore
from ckpt.storage.tiers import OpenTier

_PATIENCE_SECONDS: Final = 3600.0
"""How long ranks wait for each other in a restore: reading may take that long on slow storage."""

_log = logging.getLogger("ckpt")


@dataclass(frozen=True, slots=True, kw_only=True)
class RestoreReport:
    """What was restored and what it took.

    Attributes:
        tier: URL of the tier that it came from.
        nbytes: Bytes that landed in this rank's state; ``read_bytes`` were fetched for it.
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


class _Proposal(msgspec.Struct, frozen=True):
    tier: int
    folder: str


class _Answer(msgspec.Struct, frozen=True):
    """``ok``, ``damaged`` (try the next) or ``stop`` (the target does not fit)."""

    outcome: str
    reason: str = ""


@dataclass(frozen=True, slots=True)
class _Landed:
    matched: Matched
    nbytes: int
    read_bytes: int
    world_size: int


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
            error, landed = self._attempt(state, tier, ref)
            answer = self._poll(ref, _answer(error))
            if answer.outcome == "ok" and landed is not None:
                landed.matched.apply()
                report = RestoreReport(
                    step=ref.step, attempt=ref.attempt, tier=tier.url, nbytes=landed.nbytes, read_bytes=landed.read_bytes,
                    seconds=time.perf_counter() - began, saved_world_size=landed.world_size, skipped=tuple(skipped),
                )  # fmt: skip
                self._notify(
                    Restored(step=ref.step, tier=tier.url, nbytes=landed.nbytes, seconds=report.seconds)
                )
                return report
            if answer.outcome == "stop":
                raise error if isinstance(error, CkptError) else RestoreError(answer.reason) from error
            _log.warning(
                "ckpt: step %d on %s is damaged, taking the next best: %s", ref.step, tier.url, answer.reason
            )
            self._notify(
                StepDamaged(step=ref.step, tier=tier.url, error=error or IntegrityError(answer.reason))
            )
            skipped.append((ref.step, answer.reason))
        if not skipped and step is None:
            return None
        raise NoCheckpoint(", ".join(tier.url for tier in self._tiers), _told(step, skipped))

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
        for _, index, ref in sorted(
            found, key=lambda item: item[:2]
        ):  # newest first, then nearest; `find` has ordered attempts
            yield _Proposal(index, ref.folder)

    def _agree(self, candidates: Iterator[_Proposal]) -> _Proposal | None:
        """The leader's next proposal, on all ranks."""
        self._round += 1
        subject = f"restore/{self._serial}/{self._round}/proposal"
        if self._coordinator.rank == LEADER:
            try:
                proposal: _Proposal | CkptError | None = next(candidates, None)
            except CkptError as error:
                proposal = error
            told = {"error": str(proposal)} if isinstance(proposal, CkptError) else proposal
            self._coordinator.decide(subject, msgspec.json.encode(told))
            if isinstance(proposal, CkptError):
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

    def _attempt(
        self, state: MutableMapping[str, Any], tier: OpenTier, ref: StepRef
    ) -> tuple[Exception | None, _Landed | None]:
        try:
            manifest = self._retry.call(lambda: read_manifest(tier.backend, ref))
            matched = match(
                state, manifest, rank=self._coordinator.rank, world_size=self._coordinator.world_size
            )
            plan = plan_restore(manifest, matched.wanted)
            files = manifest.file_map()
            read_plan(
                plan,
                TensorSink(matched.wanted, matched.targets),
                backend=tier.backend,
                file_of=lambda rank: (ref.key(files[rank].name), files[rank].size),
                workers=self._workers,
                retry=self._retry,
                on_bytes=lambda _: None,
            )
        except Exception as error:  # noqa: BLE001 - the others must hear of it before it is raised
            return error, None
        return None, _Landed(matched, plan.wanted_bytes, plan.read_bytes, manifest.world_size)

    def _poll(self, ref: StepRef, mine: _Answer) -> _Answer:
        """The worst answer of all ranks, on all ranks."""
        subject = f"restore/{self._serial}/{self._round}/done"
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
                if answer.outcome == "stop" or (answer.outcome == "damaged" and worst.outcome == "ok"):
                    worst = _Answer(
                        answer.outcome,
                        f"rank {rank}: {answer.reason}"
                        if self._coordinator.world_size > 1
                        else answer.reason,
                    )
        return worst


def _ref(proposal: _Proposal) -> StepRef:
    ref = parse_folder(proposal.folder)
    assert ref is not None, proposal.folder
    return ref


def _answer(error: Exception | None) -> _Answer:
    if error is None:
        return _Answer("ok")
    return _Answer(
        "damaged" if isinstance(error, IntegrityError | StorageError) else "stop", str(error) or repr(error)
    )


def _told(step: int | None, skipped: Sequence[tuple[int, str]]) -> str:
    if not skipped:
        return f"step {step} is not there"
    reasons = "; ".join(f"step {number}: {reason}" for number, reason in skipped[:5])
    return f"none is intact ({reasons}). Tensors of the state may have been overwritten in part: do not train on with it"
