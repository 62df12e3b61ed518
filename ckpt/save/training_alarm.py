"""Detects, from the tensors that are saved, that training is dead.

Training counts as dead if the step has advanced and no trained tensor has changed since the
previous save, or if a trained tensor holds NaN or Inf. Each rank checks its own image: it compares
the checksums of its chunks with those of the previous save. A step without changes is reported if
no rank has seen a change. Each rank posts its finding when it commits, and does not wait for other
ranks in the commit. A rank that has seen no change waits for the findings of other ranks on a
separate thread, so that neither commits nor slots wait for a rank that has died. The message with a
finding is posted under a *subject*, by which the other ranks read it.
"""

from __future__ import annotations

import logging
import threading
from collections import deque
from collections.abc import Iterable, Mapping, Sequence
from concurrent.futures import Future, wait
from dataclasses import dataclass, field, replace
from itertools import accumulate, chain, compress, pairwise
from operator import attrgetter, not_
from typing import Any, Final, NamedTuple

import msgspec
import numpy as np

from ckpt.config import SaveConfig
from ckpt.coordination.coordinator import LEADER, Coordinator
from ckpt.coordination.exchanges import Wait, gather, leader_decides
from ckpt.coordination.leaving import DepartingCoordinator
from ckpt.errors import CkptError, SuspiciousState
from ckpt.model.keys import StepRef
from ckpt.model.manifest import Chunk
from ckpt.pipeline.image_wrapper import ImageWrapper
from ckpt.pipeline.image_writer import Source
from ckpt.pipeline.workers import Workers
from ckpt.plan.save import SavePlan
from ckpt.save.job_steps import JobSteps
from ckpt.save.ledger import SaveLedger
from ckpt.save.save_request import SaveRequest
from ckpt.state.walk.collect import WalkResult
from ckpt.state.walk.segments import Segment
from ckpt.state.walk.stand_in import OptimizerStandIn

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
_EXPONENTS: Final[Mapping[str, np.unsignedinteger[Any]]] = {
    "float64": np.uint64(0x7FF0_0000_0000_0000),
    "float32": np.uint32(0x7F80_0000),
    "float16": np.uint16(0x7C00),
    "bfloat16": np.uint16(0x7F80),
    "complex128": np.uint64(0x7FF0_0000_0000_0000),
    "complex64": np.uint32(0x7F80_0000),
}
"""The bits of the exponent, by dtype. Only NaN and Inf have all of them set."""
_BLOCK_BYTES: Final = 256 << 10
"""How many bytes of a chunk are scanned at a time, so that they stay in the cache of a core."""


@dataclass(frozen=True, slots=True)
class Trainable:
    """The tensors in the parameter groups of a state's optimizers. The object has only their ids,
    and keeps no tensor alive.

    Attributes:
        restore_count: The number of restores before the save.
        untrained_ids: The ``id`` of each tensor that is not trained now, because its group has a
            learning rate of zero or it needs no gradient.
        trained_ids: The ``id`` of each tensor that is trained now, and of each `OptimizerStandIn`.
            The ids of stand-ins are not in ``name_maps``.
        name_maps: One mapping for each `Segment` of the state, and one for all tensors outside of
            segments: ``id`` of a tensor -> the name under which its bytes are stored.
    """

    restore_count: int
    untrained_ids: tuple[int, ...]
    trained_ids: tuple[int, ...]
    name_maps: tuple[Mapping[int, str], ...]

    @classmethod
    def of(cls, collection: WalkResult, restore_count: int) -> Trainable:
        """Return the tensors of the optimizers of a save. Call it on the training thread."""
        untrained_ids: list[int] = []
        trained_ids: list[int] = []
        for optimizer in collection.optimizers:
            # The tensors of a stand-in are not known. Its own id has no name in ``name_maps``, so
            # ``Chunks.has_all_trained`` becomes False.
            if isinstance(optimizer, OptimizerStandIn):
                trained_ids.append(id(optimizer))
                continue
            for group in optimizer.param_groups:
                parameters = group["params"]
                if not _has_learning_rate(group):
                    untrained_ids += map(id, parameters)
                elif all(map(_needs_gradient, parameters)):
                    trained_ids += map(id, parameters)
                else:
                    trains = list(map(_needs_gradient, parameters))
                    trained_ids += map(id, compress(parameters, trains))
                    untrained_ids += map(id, compress(parameters, map(not_, trains)))
        name_maps: list[Mapping[int, str]] = []
        single_names: dict[int, str] = {}
        for part in collection.parts:
            if isinstance(part, Segment):
                name_maps.append(part.names_by_id)
            else:
                single_names[id(part.tensor)] = part.name
        return cls(
            restore_count, tuple(untrained_ids), tuple(trained_ids), (*name_maps, single_names)
        )

    def names(self, identities: Sequence[int]) -> set[str]:
        """Return the names of the saved tensors whose ``id`` is among ``identities``."""
        return {
            names[identity]
            for identity in identities
            for names in self.name_maps
            if identity in names
        }


_needs_gradient: Final = attrgetter("requires_grad")


def _has_learning_rate(group: Mapping[str, Any]) -> bool:
    """Return False if the learning rate of a parameter group is zero."""
    try:
        rate = group["lr"]
        detach = getattr(rate, "detach", None)  # A rate that is learned requires a gradient
        return float(detach() if detach else rate) != 0.0
    except (KeyError, TypeError, ValueError):
        # The optimizer has no single learning rate: assume that it trains.
        return True


class _ChunkTensor(NamedTuple):
    """The tensor that a chunk belongs to. The header of the file has an empty name."""

    name: str
    dtype: str


def _chunk_tensors(plan: SavePlan) -> list[_ChunkTensor]:
    """Return the tensor of each chunk of the file, in order."""
    # By its offset in the file, the tensor of each box; ``leaf`` is the index of the tensor.
    starts = {
        item.offset: _ChunkTensor(plan.tensors[item.leaf].name, plan.tensors[item.leaf].dtype)
        for item in plan.items
        if item.nbytes
    }
    tensors: list[_ChunkTensor] = []
    tensor = _ChunkTensor("", "uint8")
    for offset in list(accumulate(plan.chunks, initial=0))[:-1]:
        tensor = starts.get(offset, tensor)
        tensors.append(tensor)
    return tensors


@dataclass(frozen=True, slots=True)
class Chunks:
    """The chunks of this rank's file that belong to tensors of optimizers.

    Attributes:
        plan: The save plan of the file.
        trainable: The tensors of the optimizers.
        trained_indices: Name of a tensor that is trained now -> the indices of its chunks.
        untrained_indices: Name of a tensor that is not trained now -> the indices of its chunks.
        has_all_trained: Whether all tensors that are trained now are saved.
    """

    plan: SavePlan
    trainable: Trainable
    trained_indices: Mapping[str, Sequence[int]]
    untrained_indices: Mapping[str, Sequence[int]]
    has_all_trained: bool

    @classmethod
    def of(cls, plan: SavePlan, trainable: Trainable) -> Chunks:
        """Return the chunks of the tensors of ``trainable`` in the file of ``plan``."""
        trained_names, untrained_names = (
            trainable.names(trainable.trained_ids),
            trainable.names(trainable.untrained_ids),
        )
        trained_indices: dict[str, list[int]] = {}
        untrained_indices: dict[str, list[int]] = {}
        for index, tensor in enumerate(_chunk_tensors(plan)):
            if tensor.name in trained_names:
                trained_indices.setdefault(tensor.name, []).append(index)
            elif tensor.name in untrained_names:
                untrained_indices.setdefault(tensor.name, []).append(index)
        has_all_trained = all(
            any(identity in names for names in trainable.name_maps)
            for identity in trainable.trained_ids
        )
        return cls(plan, trainable, trained_indices, untrained_indices, has_all_trained)

    def is_of(self, plan: SavePlan, trainable: Trainable) -> bool:
        """Return True if ``of`` would return an equal object for these arguments."""
        return self.plan is plan and self.trainable == trainable


@dataclass(frozen=True, slots=True)
class ScannedImage(ImageWrapper):
    """An image that is scanned for NaN and Inf while its chunks are hashed.

    Attributes:
        image: The image itself.
        masks: Offset of a chunk in the image -> the name of its tensor, and the bits of the
            exponent of its dtype. Only these chunks are scanned.
        not_finite: The names of the tensors that hold NaN or Inf. The set is complete when the
            image has been written once.

    Thread safety: the threads that may use ``image`` may use this object in the same way.
    """

    masks: Mapping[int, tuple[str, np.unsignedinteger[Any]]]
    not_finite: set[str] = field(default_factory=set[str])

    @classmethod
    def of(cls, image: Source, plan: SavePlan, trainable: Trainable) -> ScannedImage:
        """Return ``image`` with a scan of the tensors of ``trainable``."""
        names = trainable.names((*trainable.untrained_ids, *trainable.trained_ids))
        edges = pairwise(accumulate(plan.chunks, initial=0))
        masks = {
            start: (tensor.name, mask)
            for (start, _), tensor in zip(edges, _chunk_tensors(plan), strict=True)
            if tensor.name in names and (mask := _EXPONENTS.get(tensor.dtype)) is not None
        }
        return cls(image, masks)

    def note_hashed(self, start: int, end: int) -> None:
        """Scan the chunk, and then let the image use the memory of the chunk again."""
        if (entry := self.masks.get(start)) is not None:
            name, mask = entry
            if not all_finite(self.image.view(start, end), mask):
                self.not_finite.add(name)
        self.image.note_hashed(start, end)


def all_finite(data: memoryview, mask: np.unsignedinteger[Any]) -> bool:
    """Return False if some number in ``data`` is NaN or Inf: it has all bits of ``mask`` set."""
    words = np.frombuffer(data, mask.dtype)
    block_length = _BLOCK_BYTES // mask.itemsize
    block = np.empty(min(block_length, len(words)), mask.dtype)
    for start in range(0, len(words), block_length):
        part = words[start : start + block_length]
        if np.bitwise_and(part, mask, out=block[: len(part)]).max() == mask:
            return False
    return True


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
            own_chunks.has_all_trained
            and old_chunks.has_all_trained
            and own_chunks.trainable.restore_count == old_chunks.trainable.restore_count
        ):
            return True
        own_indices = {**own_chunks.untrained_indices, **own_chunks.trained_indices}
        old_indices = {**old_chunks.untrained_indices, **old_chunks.trained_indices}
        common_names = own_indices.keys() & old_indices.keys()
        if any(
            self.checksums(own_indices[name]) != previous.checksums(old_indices[name])
            for name in common_names
        ):
            return True
        trained_names = own_chunks.trained_indices.keys() & old_chunks.trained_indices.keys()
        return False if common_names & trained_names else None

    def checksums(self, indices: Sequence[int]) -> list[str]:
        """Return the checksums of the chunks with ``indices``."""
        return [self.table[index].checksum for index in indices]


class Suspicions:
    """Checks the saves of one manager, and reports those that show that training is dead: its
    tensors do not change any more, or are not finite.

    Args:
        coordinator: The connection to the other ranks, used by this object alone.
        ledger: Gets the reports.
        config: Says whether saves are checked (``on_suspicious``), and whether their tensors are
            scanned for NaN and Inf (``check_finite``).
        steps: The steps of the job.

    Thread safety: the training thread may call ``trainable`` and ``scan``, any thread ``examine``,
    and one thread ``close``, after the last ``examine``. ``_lock`` guards
    ``_previous_save``, ``_kept_subjects`` and ``_last_comparison``.

    The thread ``_waiter`` compares findings, and ``_last_comparison`` is its newest task.
    ``_previous_save`` has the chunk table with which the next save is compared. ``_kept_subjects``
    are the subjects of the messages that this rank still keeps for the others. ``_scans`` is True
    if the tensors are scanned for NaN and Inf.
    """

    def __init__(
        self, coordinator: Coordinator, ledger: SaveLedger, config: SaveConfig, steps: JobSteps
    ) -> None:
        self._end_event = threading.Event()
        self._coordinator, self._ledger = DepartingCoordinator(coordinator, self._end_event), ledger
        self._is_enabled, self._scans = config.on_suspicious != "ignore", config.check_finite
        self._waiter = Workers("alarm", 1, nice=config.nice, cpus=config.cpus)
        self._lock = threading.Lock()
        self._steps = steps
        self._previous_save: _Observation | None = None
        self._kept_subjects: deque[str] = deque()
        self._last_comparison: Future[None] | None = None

    def trainable(self, collection: WalkResult) -> Trainable | None:
        """Return the tensors that ``examine`` is to check; None if saves are not checked.

        No save is compared with one before a restore, which has changed the trained tensors.
        """
        return Trainable.of(collection, self._steps.restores) if self._is_enabled else None

    def scan(self, request: SaveRequest, trainable: Trainable | None) -> SaveRequest:
        """Return ``request`` with an image that is scanned for NaN and Inf while it is hashed.
        Return ``request`` itself if ``check_finite`` is not set or ``trainable`` is None.
        """
        if trainable is None or not self._scans:
            return request
        return replace(request, image=ScannedImage.of(request.image, request.plan, trainable))

    def examine(self, request: SaveRequest, trainable: Trainable | None) -> None:
        """Check a save that is committed on its first tier, and report it if it is suspicious.

        The call never raises, and does not wait for other ranks. A report that needs their findings
        comes later, from another thread.
        """
        if trainable is None:
            return
        with self._lock:
            own_finding = self._own_finding(request, trainable)
            try:
                if self._coordinator.world_size > 1:
                    self._exchange(request.ref, own_finding)
                    return
            except CkptError as error:
                _log_no_comparison(request.ref, error)
                return
        self._report(request.ref, own_finding)

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

    def _own_finding(self, request: SaveRequest, trainable: Trainable) -> _Finding:
        """Return the finding of this rank, and remember the save for the next comparison."""
        previous, step = self._previous_save, request.ref.step
        not_finite_names = (
            _first_names([request.image.not_finite])
            if isinstance(request.image, ScannedImage)
            else ()
        )
        is_same_plan = previous is not None and previous.chunks.is_of(request.plan, trainable)
        chunks = (
            previous.chunks if previous and is_same_plan else Chunks.of(request.plan, trainable)
        )
        observation = _Observation(step, chunks, request.hashed_chunks)
        if (
            previous is not None
            and step <= previous.step
            and trainable.restore_count == previous.chunks.trainable.restore_count
        ):
            # This step was committed late on its first tier, and a newer step was compared before.
            return _Finding(True, not_finite=not_finite_names)
        self._previous_save = observation
        has_changed = True if previous is None else observation.has_changed(previous)
        unchanged_names = () if has_changed else _first_names([chunks.trained_indices])
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
    changes = [finding.changed for finding in findings if finding.changed is not None]
    return _Finding(
        any(changes) if changes else None,
        max(finding.since for finding in findings),
        _first_names(finding.unchanged for finding in findings),
        _first_names(finding.not_finite for finding in findings),
    )


def _first_names(names: Iterable[Iterable[str]]) -> tuple[str, ...]:
    return tuple(sorted(set(chain.from_iterable(names)))[:_MOST_NAMES])
