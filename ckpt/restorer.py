"""The newest step that is whole -> the state, on all ranks the same one.

The leader lists and proposes; every rank matches; when all fit, every rank reads, each chunk from the nearest tier that has it intact; only when all have
read is anything but tensor memory touched. A rank that finds some chunk intact nowhere makes all
go to the step before. What comes from far is put into the nearest folder on the way.
"""

from __future__ import annotations

import gc
import logging
import time
from collections import Counter
from collections.abc import Callable, Generator, Iterator, MutableMapping, Sequence
from contextlib import contextmanager
from dataclasses import asdict, dataclass
from typing import Any, Final

import msgspec

from ckpt.adapters.load import Matched, match
from ckpt.adapters.selection import ALL, Selection
from ckpt.adapters.sink import TensorSink
from ckpt.catalog.cache import ReadThrough
from ckpt.catalog.candidates import candidates
from ckpt.catalog.found import Found, Repair
from ckpt.catalog.origin import Origin
from ckpt.coordination.api import Coordinator
from ckpt.coordination.committer import LEADER
from ckpt.coordination.together import Damaged, Together
from ckpt.errors import (
    CkptError,
    ConfigError,
    EntryUnexpected,
    NoCheckpoint,
    RestoreError,
)
from ckpt.events import Event, Repaired, Restored, StepDamaged
from ckpt.model.layout import StepRef, parse_folder
from ckpt.pipeline.retry import RetryPolicy
from ckpt.pipeline.workers import Workers
from ckpt.plan.restore import RestorePlan, plan_restore
from ckpt.report import RestoreReport
from ckpt.storage.tiers import OpenTier

_PATIENCE_SECONDS: Final = 3600.0
"""How long ranks wait for each other in a restore: reading may take that long on slow storage."""

_PATTERN: Final = "\0"
"""Before what is no name, but a pattern that fits none."""

_log = logging.getLogger("ckpt")


class _Proposal(msgspec.Struct, frozen=True):
    """``nearest`` lists the step; ``answering`` are the tiers that may be asked for it. Indices."""

    folder: str
    nearest: int
    answering: tuple[int, ...]


@dataclass(frozen=True, slots=True)
class _Landed:
    matched: Matched
    plan: RestorePlan
    tier: str
    world_size: int
    repaired: tuple[Repair, ...]
    cached_bytes: int
    unexpected: tuple[str, ...]


@dataclass(frozen=True, slots=True)
class _Fit:
    found: Found
    matched: Matched
    plan: RestorePlan
    cache: ReadThrough


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
        listers: Workers,
        read_through: bool = True,
        selection: Selection = ALL,
        waiting: Callable[[], frozenset[StepRef]] = frozenset,
    ) -> None:
        """``serial`` tells this restore from the manager's others: subjects are used once. ``listers`` may be waiting for a tier still when the restore has ended. ``waiting``: steps that saves under way read from nearer tiers."""
        self._tiers, self._coordinator, self._workers, self._notify = tiers, coordinator, workers, notify
        self._retry, self._listers = RetryPolicy(), listers
        self._read_through, self._selection, self._waiting = read_through, selection, waiting
        self._together = Together(coordinator, subject=f"restore/{serial}", patience=_PATIENCE_SECONDS)
        self._overwritten = False

    def restore(self, state: MutableMapping[str, Any], step: int | None) -> RestoreReport | None:
        """Fill ``state``. None if there is no checkpoint and none was asked for by number.

        Raises:
            RestoreError: It does not fit, or no step is intact; tensors may have been overwritten in the latter case, and the message says so.
            StorageError: The tiers cannot be listed.
        """
        began = time.perf_counter()
        skipped: list[tuple[int, str]] = []
        proposals = self._proposals(step) if self._coordinator.rank == LEADER else iter(())
        while (proposal := self._together.next(proposals, _Proposal)) is not None:
            url, ref = self._tiers[proposal.nearest].url, _ref(proposal)
            try:
                landed = self._land(state, [self._tiers[index] for index in proposal.answering], ref)
            except RestoreError as misfit:
                if skipped and self._overwritten:
                    raise RestoreError(f"{misfit} ({_told(step, skipped, self._overwritten)})") from misfit
                raise
            except Damaged as damage:
                _log.warning(
                    "ckpt: step %d on %s is damaged, looking for the next best: %s", ref.step, url, damage
                )
                self._notify(StepDamaged(step=ref.step, tier=url, error=damage.__cause__ or damage))
                skipped.append((ref.step, str(damage)))
                continue
            _apply(landed.matched, ref)
            return self._report(ref, landed, time.perf_counter() - began, skipped)
        if not skipped and step is None:
            return None
        raise NoCheckpoint(
            ", ".join(tier.url for tier in self._tiers), _told(step, skipped, self._overwritten)
        )

    def _report(
        self, ref: StepRef, landed: _Landed, seconds: float, skipped: Sequence[tuple[int, str]]
    ) -> RestoreReport:
        report = RestoreReport(
            step=ref.step, attempt=ref.attempt, tier=landed.tier, nbytes=landed.plan.wanted_bytes,
            read_bytes=landed.plan.read_bytes, seconds=seconds, saved_world_size=landed.world_size,
            skipped=tuple(skipped), repaired=landed.repaired, cached_bytes=landed.cached_bytes,
            missing=landed.matched.missing, unexpected=landed.unexpected,
        )  # fmt: skip
        _log.info("ckpt: restored %s", report)
        for repair in report.repaired:
            self._notify(Repaired(step=ref.step, **asdict(repair)))
        self._notify(Restored(step=ref.step, tier=report.tier, nbytes=report.nbytes, seconds=seconds))
        return report

    # -- the leader's choice ------------------------------------------------------------------------------------------------

    def _proposals(self, step: int | None) -> Iterator[_Proposal]:
        """Listed once more when none would do: another job may have pruned what there was, and saved newer ones."""
        stores = [tier.backend for tier in self._tiers]
        seen: set[StepRef] = set()
        for again in (False, True):
            if again and not seen:
                return
            for found in candidates(stores, step, workers=self._listers):
                if found.ref not in seen:
                    seen.add(found.ref)
                    yield _Proposal(found.ref.folder, found.nearest, found.answering)

    # -- every rank's part --------------------------------------------------------------------------------------------------

    def _land(self, state: MutableMapping[str, Any], tiers: Sequence[OpenTier], ref: StepRef) -> _Landed:
        """Match on all ranks, and only then read on all.

        Raises:
            Damaged: Some rank met damage that no tier mends; all shall take the next best.
            RestoreError: It does not fit somewhere. Nothing was changed anywhere, if it was found while matching.
        """
        origin = Origin([tier.backend for tier in tiers], ref, retry=self._retry, on_repair=_warn(ref))
        fit, nowhere = self._together.do(
            "match",
            ref.step,
            lambda: self._fit(state, tiers, origin),
            lambda fit: (*fit.matched.unexpected, *(_PATTERN + each for each in fit.matched.unused)),
        )
        unexpected = tuple(name for name in nowhere if not name.startswith(_PATTERN))
        if unused := [name for name in nowhere if name.startswith(_PATTERN)]:
            patterns = ", ".join(repr(name.removeprefix(_PATTERN)) for name in unused)
            raise ConfigError(
                f"no name of the state fits {patterns}: `ckpt show` prints those of the checkpoint"
            )
        if unexpected and self._selection.strict:
            raise EntryUnexpected(unexpected, ref.step)
        self._overwritten = True
        tier, _ = self._together.do("read", ref.step, lambda: self._read(fit, origin), lambda _: ())
        world = fit.found.manifest.world_size
        return _Landed(fit.matched, fit.plan, tier, world, origin.repairs, fit.cache.cached_bytes, unexpected)

    def _fit(self, state: MutableMapping[str, Any], tiers: Sequence[OpenTier], origin: Origin) -> _Fit:
        with _uncollected():
            found = origin.manifest()
            rank, world = self._coordinator.rank, self._coordinator.world_size
            matched = match(state, found.manifest, rank=rank, world_size=world, selection=self._selection)
            found = origin.filled(found, [(leaf.name, leaf.boxes) for leaf in matched.wanted])
            plan = plan_restore(found.manifest, matched.wanted)
        cache = ReadThrough(
            tiers if self._read_through and self._selection.only is None else (), origin, found,
            coordinator=self._coordinator, subject=f"{self._together.subject}/fetch",
            patience=_PATIENCE_SECONDS, workers=self._workers, retry=self._retry, waiting=self._waiting,
        )  # fmt: skip
        cache.look(plan)
        return _Fit(found, matched, plan, cache)

    def _read(self, fit: _Fit, origin: Origin) -> str:
        """Returns where most of it came from."""
        sink = TensorSink(fit.matched.wanted, fit.matched.targets)
        left = fit.cache.fill(fit.plan, sink)
        given = origin.read(left, sink, workers=self._workers)
        fit.cache.mend()
        nbytes = Counter({fit.found.position: 0, **fit.cache.taken})
        for position, part in enumerate(given):
            for read in part.reads:
                nbytes[max(position, fit.cache.fetched.get(read.rank, 0))] += read.nbytes
        return origin.sources[max(nbytes, key=lambda position: (nbytes[position], -position))].url


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


def _warn(ref: StepRef) -> Callable[[Repair], None]:
    def warn(repair: Repair) -> None:
        _log.warning(
            "ckpt: step %d: %s does not have it intact, the next tier is asked: %s",
            ref.step, repair.tier, repair.reason,
        )  # fmt: skip

    return warn


def _told(step: int | None, skipped: Sequence[tuple[int, str]], overwritten: bool) -> str:
    if not skipped:
        return f"step {step} is not there"
    reasons = "; ".join(f"step {number}: {reason}" for number, reason in skipped[:5])
    torn = ". Tensors of the state may have been overwritten in part: do not train on with it"
    return f"none is intact ({reasons}){torn if overwritten else '; nothing in the state was changed'}"
