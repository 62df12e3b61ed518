"""Whether the tensors that are saved show that training is dead.

Training is dead if the step has advanced and none of the trained tensors has changed since the
save before, or if one of them holds NaN or Inf. A rank sees that of its own part of the image, from
the checksums of its chunks. The alarm is raised if no rank has seen a change. Each rank posts what
it has seen when it commits, and waits for nothing there. A rank that has seen no change waits for
the others on a thread of its own, so neither commits nor slots wait for a rank that has died.
"""

from __future__ import annotations

import logging
import threading
from collections import deque
from collections.abc import Iterable, Sequence
from concurrent.futures import Future, wait
from dataclasses import dataclass, replace
from itertools import chain
from typing import Final

import msgspec

from ckpt.adapters.walk.collect import Collected
from ckpt.config import SaveConfig
from ckpt.coordination.api import LEADER, Coordinator
from ckpt.coordination.gather import Wait, gather, leader_decides
from ckpt.coordination.leaving import Leaving
from ckpt.errors import CkptError, SuspiciousState
from ckpt.model.keys import StepRef
from ckpt.model.manifest import Chunk
from ckpt.pipeline.workers import Workers
from ckpt.save.ledger import SaveLedger
from ckpt.save.rank_files import SaveJob
from ckpt.save.trained import Chunks, ScannedImage, Trained

_log = logging.getLogger("ckpt")
_WAIT_SECONDS: Final = 60.0
"""How long ranks wait for each other. If that is too short, there is no alarm for the step."""
_END_SECONDS: Final = 5.0
"""How long ``close`` waits for the comparisons that are left. They take milliseconds if all ranks
live.
"""
_KEPT_MESSAGES: Final = 2
"""When a further step commits, all ranks have posted for this one, and the leader reads it soon."""
_MOST_NAMES: Final = 8


class _Finding(msgspec.Struct, frozen=True):
    """What a rank has seen of a step, or all ranks together.

    Attributes:
        changed: Whether a trained tensor has changed, or may have; None if this rank writes none.
        since: The step that it was compared with.
        unchanged: Some of the trained tensors.
        not_finite: Tensors that hold NaN or Inf.
    """

    changed: bool | None
    since: int = -1
    unchanged: tuple[str, ...] = ()
    not_finite: tuple[str, ...] = ()


_decoder: Final = msgspec.json.Decoder(_Finding)


@dataclass(frozen=True, slots=True)
class _Seen:
    """The newest save: its chunk table, and where the trained tensors are in it."""

    step: int
    chunks: Chunks
    table: Sequence[Chunk]

    def changed(self, before: _Seen) -> bool | None:
        """Return whether a tensor of the optimizers has changed since ``before``, or may have.

        One that was trained between the saves may not be trained now, as the two models of a GAN.

        None if this rank writes none of those that are trained now and that both saves have.
        """
        mine, other = self.chunks, before.chunks
        if not (mine.whole and other.whole and mine.trained.era == other.trained.era):
            return True
        places, earlier = {**mine.still, **mine.places}, {**other.still, **other.places}
        both = places.keys() & earlier.keys()
        if any(self.of(places[name]) != before.of(earlier[name]) for name in both):
            return True
        return False if both & mine.places.keys() & other.places.keys() else None

    def of(self, places: Sequence[int]) -> list[str]:
        """Return the checksums of some of this rank's chunks."""
        return [self.table[index].checksum for index in places]


class Suspicions:
    """Looks at the saves of one manager, and reports those that show that training is dead.

    Args:
        coordinator: A connection to the other ranks of its own.
        ledger: Where an alarm is reported.
        config: Whether there is an alarm, and whether numbers are looked at.

    Thread safety: ``trained``, ``scanned`` and ``forget`` are for the training thread, ``examine``
    for any, and ``close`` for one thread after the last ``examine``. ``_lock`` guards ``_seen``,
    ``_posted`` and ``_newest``.
    """

    def __init__(self, coordinator: Coordinator, ledger: SaveLedger, config: SaveConfig) -> None:
        self._ended = threading.Event()
        self._coordinator, self._ledger = Leaving(coordinator, self._ended), ledger
        self._on, self._scans = config.on_suspicious != "ignore", config.check_finite
        self._waiter = Workers("alarm", 1, nice=config.nice, cpus=config.cpus)
        self._lock = threading.Lock()
        self._era = 0
        self._seen: _Seen | None = None
        self._posted: deque[str] = deque()
        self._newest: Future[None] | None = None

    def trained(self, collected: Collected) -> Trained | None:
        """Return what is to be looked at when ``collected`` is committed; None for nothing."""
        return Trained.of(collected, self._era) if self._on else None

    def scanned(self, job: SaveJob, trained: Trained | None) -> SaveJob:
        """Return ``job`` so that its numbers are looked at while its image is hashed, if they are
        to be.
        """
        if trained is None or not self._scans:
            return job
        return replace(job, image=ScannedImage.of(job.image, job.plan, trained))

    def forget(self) -> None:
        """Compare later saves with no earlier ones, since a restore has changed the trained
        tensors.
        """
        self._era += 1

    def examine(self, job: SaveJob, trained: Trained | None) -> None:
        """Look at a save that is committed on its first tier. It never raises.

        It waits for no other rank: an alarm that needs their answers comes later.
        """
        if trained is None:
            return
        with self._lock:
            own = self._own(job, trained)
            try:
                if self._coordinator.world_size > 1:
                    self._exchange(job.ref, own)
                    return
            except CkptError as error:
                _not_compared(job.ref, error)
                return
        self._report(job.ref, own)

    def close(self) -> None:
        """Finish the comparisons that are left, and give up those that take more than some seconds,
        since a rank has died.
        """
        if self._newest is not None:
            wait([self._newest], _END_SECONDS)
        self._ended.set()
        self._waiter.close(cancel=True)

    def _exchange(self, ref: StepRef, own: _Finding) -> None:
        """Post what this rank has seen, and compare it on the waiting thread if that is not enough.

        Holds the lock.
        """
        subject = f"trained/{ref.folder}"
        self._coordinator.post(subject, msgspec.json.encode(own))
        self._posted.append(subject)
        if len(self._posted) > _KEPT_MESSAGES:
            self._coordinator.forget(self._posted.popleft())
        if self._scans or not own.changed:
            self._newest = self._waiter.submit(self._compare, ref, subject)

    def _compare(self, ref: StepRef, subject: str) -> None:
        try:
            finding = self._agreed(ref, subject)
        except CkptError as error:
            _not_compared(ref, error)
        else:
            self._report(ref, finding)

    def _report(self, ref: StepRef, finding: _Finding) -> None:
        if finding.not_finite or finding.changed is False:
            found = SuspiciousState(
                ref.step,
                finding.not_finite or finding.unchanged,
                since=None if finding.not_finite else finding.since,
            )
            self._ledger.suspect(found, logs=self._coordinator.rank == LEADER)

    def _own(self, job: SaveJob, trained: Trained) -> _Finding:
        """Return what this rank sees, and remember the save."""
        before, step = self._seen, job.ref.step
        bad = _few([job.image.found]) if isinstance(job.image, ScannedImage) else ()
        same_plan = before is not None and before.chunks.is_of(job.plan, trained)
        chunks = before.chunks if before and same_plan else Chunks.of(job.plan, trained)
        now = _Seen(step, chunks, job.known)
        if before is not None and step <= before.step and trained.era == before.chunks.trained.era:
            # This step came late to its first tier, and a newer one has been compared.
            return _Finding(True, not_finite=bad)
        self._seen = now
        changed = True if before is None else now.changed(before)
        unchanged = () if changed else _few([chunks.places])
        return _Finding(changed, before.step if before else -1, unchanged, bad)

    def _agreed(self, ref: StepRef, subject: str) -> _Finding:
        """Return what all ranks together have seen."""
        coordinator = self._coordinator
        patience = Wait(_WAIT_SECONDS, "the comparison with the last save", ref.step)
        if not self._scans and coordinator.rank != LEADER:
            first = _decoded(gather(coordinator, subject, patience, ranks=[LEADER]).values())
            if first[0].changed:
                return first[0]

        def decide() -> _Finding:
            return _together(_decoded(gather(coordinator, subject, patience).values()))

        return leader_decides(coordinator, subject, decide, patience, _Finding)


def _not_compared(ref: StepRef, error: CkptError) -> None:
    _log.debug("ckpt: step %d is not compared: %s", ref.step, error)


def _decoded(messages: Iterable[bytes]) -> list[_Finding]:
    return [_decoder.decode(message) for message in messages]


def _together(findings: Sequence[_Finding]) -> _Finding:
    known = [finding.changed for finding in findings if finding.changed is not None]
    return _Finding(
        any(known) if known else None,
        max(finding.since for finding in findings),
        _few(finding.unchanged for finding in findings),
        _few(finding.not_finite for finding in findings),
    )


def _few(names: Iterable[Iterable[str]]) -> tuple[str, ...]:
    return tuple(sorted(set(chain.from_iterable(names)))[:_MOST_NAMES])
