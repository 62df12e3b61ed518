"""Detects, from the tensors that are saved, that training is dead.

Training counts as dead if the step has advanced and no trained tensor has changed since the
previous save, or if a trained tensor holds NaN or Inf. Each rank checks its own image: it compares
the checksums of its chunks with those of the previous save. A step without changes is reported if
no rank has seen a change. Each rank posts its finding when it commits, and does not wait for other
ranks in the commit. A rank that has seen no change waits for the findings of other ranks on a
separate thread, so that neither commits nor slots wait for a rank that has died.
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

from ckpt.config import SaveConfig
from ckpt.coordination.api import LEADER, Coordinator
from ckpt.coordination.gather import Wait, gather, leader_decides
from ckpt.coordination.leaving import DepartingCoordinator
from ckpt.errors import CkptError, SuspiciousState
from ckpt.model.keys import StepRef
from ckpt.model.manifest import Chunk
from ckpt.pipeline.workers import Workers
from ckpt.save.ledger import SaveLedger
from ckpt.save.save_request import SaveRequest
from ckpt.save.trained import Chunks, ScannedImage, Trainable
from ckpt.state.walk.collect import WalkResult

_log = logging.getLogger("ckpt")
_WAIT_SECONDS: Final = 60.0
"""How long ranks wait for each other's findings. After that they give up the check of the step."""
_END_SECONDS: Final = 5.0
"""How long ``close`` waits for comparisons under way. They take milliseconds if all ranks are
alive.
"""
_KEPT_MESSAGES: Final = 2
"""The number of steps for which this rank keeps its message. When a step commits, all ranks have
posted for the previous step, and the leader reads their messages soon.
"""
_MOST_NAMES: Final = 8


class _Finding(msgspec.Struct, frozen=True):
    """The result of the check of a step, by one rank or by all ranks together.

    Attributes:
        changed: True if a trained tensor has changed, or may have; False if none has; None if the
            rank writes no trained tensor.
        since: The step of the previous save; -1 if there is none.
        unchanged: The names of some of the trained tensors, if none has changed.
        not_finite: The names of some of the tensors that hold NaN or Inf.
    """

    changed: bool | None
    since: int = -1
    unchanged: tuple[str, ...] = ()
    not_finite: tuple[str, ...] = ()


_decoder: Final = msgspec.json.Decoder(_Finding)


@dataclass(frozen=True, slots=True)
class _Observation:
    """The chunk table of the newest save, and the indices of its trained tensors in that table."""

    step: int
    chunks: Chunks
    table: Sequence[Chunk]

    def has_changed(self, previous: _Observation) -> bool | None:
        """Return True if a tensor of the optimizers has changed since ``previous``, or may have;
        False if none has; None if none has and this rank writes no tensor that was trained at both
        saves.

        Tensors that are not trained now are compared too. They may have been trained between the
        saves, as with the two models of a GAN.
        """
        own_chunks, old_chunks = self.chunks, previous.chunks
        if not (
            own_chunks.whole
            and old_chunks.whole
            and own_chunks.trainable.era == old_chunks.trainable.era
        ):
            return True
        places = {**own_chunks.still_places, **own_chunks.places}
        old_places = {**old_chunks.still_places, **old_chunks.places}
        common = places.keys() & old_places.keys()
        if any(
            self.checksums(places[name]) != previous.checksums(old_places[name]) for name in common
        ):
            return True
        return False if common & own_chunks.places.keys() & old_chunks.places.keys() else None

    def checksums(self, places: Sequence[int]) -> list[str]:
        """Return the checksums of the chunks with the indices ``places``."""
        return [self.table[index].checksum for index in places]


class Suspicions:
    """Checks the saves of one manager, and reports those that show that training is dead.

    Args:
        coordinator: The connection to the other ranks, used by this object alone.
        ledger: Gets the reports.
        config: Says whether saves are checked (``on_suspicious``), and whether their tensors are
            scanned for NaN and Inf (``check_finite``).

    Thread safety: the training thread may call ``trainable``, ``scan`` and ``forget``, any thread
    ``examine``, and one thread ``close``, after the last ``examine``. ``_lock`` guards
    ``_previous_save``, ``_kept_subjects`` and ``_last_comparison``.
    """

    def __init__(self, coordinator: Coordinator, ledger: SaveLedger, config: SaveConfig) -> None:
        self._end_event = threading.Event()
        self._coordinator, self._ledger = DepartingCoordinator(coordinator, self._end_event), ledger
        self._is_enabled, self._scans = config.on_suspicious != "ignore", config.check_finite
        self._waiter = Workers("alarm", 1, nice=config.nice, cpus=config.cpus)
        self._lock = threading.Lock()
        self._era = 0
        self._previous_save: _Observation | None = None
        self._kept_subjects: deque[str] = deque()
        self._last_comparison: Future[None] | None = None

    def trainable(self, collection: WalkResult) -> Trainable | None:
        """Return the tensors that ``examine`` is to check; None if saves are not checked."""
        return Trainable.of(collection, self._era) if self._is_enabled else None

    def scan(self, job: SaveRequest, trainable: Trainable | None) -> SaveRequest:
        """Return ``job`` with an image that is scanned for NaN and Inf while it is hashed. Return
        ``job`` itself if ``check_finite`` is not set or ``trainable`` is None.
        """
        if trainable is None or not self._scans:
            return job
        return replace(job, image=ScannedImage.of(job.image, job.plan, trainable))

    def forget(self) -> None:
        """Do not compare later saves with earlier ones, since a restore has changed the trained
        tensors.
        """
        self._era += 1

    def examine(self, job: SaveRequest, trainable: Trainable | None) -> None:
        """Check a save that is committed on its first tier, and report it if it is suspicious.

        The call never raises, and does not wait for other ranks. A report that needs their findings
        comes later, from another thread.
        """
        if trainable is None:
            return
        with self._lock:
            own_finding = self._own_finding(job, trainable)
            try:
                if self._coordinator.world_size > 1:
                    self._exchange(job.ref, own_finding)
                    return
            except CkptError as error:
                _log_no_comparison(job.ref, error)
                return
        self._report(job.ref, own_finding)

    def close(self) -> None:
        """Wait until the comparisons under way have ended, and stop the waiting thread. Comparisons
        that have not ended after some seconds are given up, since some rank has probably died.
        """
        if self._last_comparison is not None:
            wait([self._last_comparison], _END_SECONDS)
        self._end_event.set()
        self._waiter.close(cancel=True)

    def _exchange(self, ref: StepRef, own_finding: _Finding) -> None:
        """Post the finding of this rank. If it shows no change, or ``check_finite`` is set, let the
        waiting thread compare it with the findings of other ranks.

        The caller holds ``_lock``.
        """
        subject = f"trained/{ref.folder}"
        self._coordinator.post(subject, msgspec.json.encode(own_finding))
        self._kept_subjects.append(subject)
        if len(self._kept_subjects) > _KEPT_MESSAGES:
            self._coordinator.forget(self._kept_subjects.popleft())
        if self._scans or not own_finding.changed:
            self._last_comparison = self._waiter.submit(self._compare, ref, subject)

    def _compare(self, ref: StepRef, subject: str) -> None:
        """Report the finding of all ranks. The waiting thread calls this."""
        try:
            finding = self._joint_finding(ref, subject)
        except CkptError as error:
            _log_no_comparison(ref, error)
        else:
            self._report(ref, finding)

    def _report(self, ref: StepRef, finding: _Finding) -> None:
        """Report the step to the ledger if ``finding`` is suspicious."""
        if finding.not_finite or finding.changed is False:
            suspicion = SuspiciousState(
                ref.step,
                finding.not_finite or finding.unchanged,
                since_step=None if finding.not_finite else finding.since,
            )
            self._ledger.suspect(suspicion, logs=self._coordinator.rank == LEADER)

    def _own_finding(self, job: SaveRequest, trainable: Trainable) -> _Finding:
        """Return the finding of this rank, and remember the save for the next comparison."""
        previous, step = self._previous_save, job.ref.step
        not_finite_names = (
            _first_names([job.image.not_finite]) if isinstance(job.image, ScannedImage) else ()
        )
        is_same_plan = previous is not None and previous.chunks.is_of(job.plan, trainable)
        chunks = previous.chunks if previous and is_same_plan else Chunks.of(job.plan, trainable)
        observation = _Observation(step, chunks, job.known_chunks)
        if (
            previous is not None
            and step <= previous.step
            and trainable.era == previous.chunks.trainable.era
        ):
            # This step was committed late on its first tier, and a newer step was compared before.
            return _Finding(True, not_finite=not_finite_names)
        self._previous_save = observation
        has_changed = True if previous is None else observation.has_changed(previous)
        unchanged_names = () if has_changed else _first_names([chunks.places])
        return _Finding(
            has_changed, previous.step if previous else -1, unchanged_names, not_finite_names
        )

    def _joint_finding(self, ref: StepRef, subject: str) -> _Finding:
        """Return the finding of all ranks together.

        If ``check_finite`` is not set and the leader has seen a change, return the finding of the
        leader, since the findings of the other ranks then make no difference.
        """
        coordinator = self._coordinator
        patience = Wait(_WAIT_SECONDS, "the comparison with the last save", ref.step)
        if not self._scans and coordinator.rank != LEADER:
            findings = _decode(gather(coordinator, subject, patience, ranks=[LEADER]).values())
            if findings[0].changed:
                return findings[0]

        def decide() -> _Finding:
            return _combine(_decode(gather(coordinator, subject, patience).values()))

        return leader_decides(coordinator, subject, decide, patience, _Finding)


def _log_no_comparison(ref: StepRef, error: CkptError) -> None:
    _log.debug("ckpt: step %d is not compared: %s", ref.step, error)


def _decode(messages: Iterable[bytes]) -> list[_Finding]:
    return [_decoder.decode(message) for message in messages]


def _combine(findings: Sequence[_Finding]) -> _Finding:
    """Return the finding of all ranks together."""
    verdicts = [finding.changed for finding in findings if finding.changed is not None]
    return _Finding(
        any(verdicts) if verdicts else None,
        max(finding.since for finding in findings),
        _first_names(finding.unchanged for finding in findings),
        _first_names(finding.not_finite for finding in findings),
    )


def _first_names(names: Iterable[Iterable[str]]) -> tuple[str, ...]:
    return tuple(sorted(set(chain.from_iterable(names)))[:_MOST_NAMES])
