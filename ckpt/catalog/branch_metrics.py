"""The metrics of the checkpoints of the current branch, and the step that a selector names.

A *selector* names a step by its place in the history, such as the latest or the best one. Each try
of a job at a step is an *attempt*. A *rollback* is the record that the run goes on from an older
step: it begins the current *branch*, and the later steps do not count any more. The metrics of a
step are in its manifest. *Late* metrics were added after the commit, and are in files beside the
manifest.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from functools import partial
from typing import Final

from ckpt.catalog.branches import find_branch
from ckpt.catalog.late_metrics import late_metrics
from ckpt.catalog.step_listing import (
    committed_among,
    list_root,
    objects_by_one_listing,
    own_objects,
    read_packed,
    why_missing,
)
from ckpt.config import Mode
from ckpt.errors import (
    AccessDenied,
    IntegrityError,
    LinkRefused,
    NoCheckpoint,
    StorageError,
    TransientStorageError,
)
from ckpt.model.keys import StepId, StepRef
from ckpt.model.metrics import metrics_of
from ckpt.model.rollback import Rollback, current_branch, last_rollback
from ckpt.model.selector import BestStep, BranchStep, LatestStep, NamedStep, resolve, why_none
from ckpt.pipeline.workers import Workers
from ckpt.storage.api import ObjectInfo, StorageBackend

_READER_THREADS: Final = 8


@dataclass(frozen=True, slots=True)
class Measurement:
    """The metrics of a checkpoint, and when its manifest was made, in seconds since 1970."""

    created_at: float = 0.0
    metrics: Mapping[str, float] = field(default_factory=dict[str, float])


@dataclass(frozen=True, slots=True)
class MeasuredRoot:
    """The checkpoints of a store.

    Attributes:
        url: The URL of the store.
        checkpoints: The metrics of each checkpoint.
        rollback: The rollback that counts; None if there is none.
        absence: What the store has instead of checkpoints; empty if it has any.
    """

    url: str
    checkpoints: Mapping[StepRef, Measurement]
    rollback: Rollback | None = None
    absence: str = ""


class MetricsReader:
    """Reads the metrics of the checkpoints in a store. Each manifest is read once.

    ``_measurements`` has the metrics of the manifests that were read, by their attempt.

    Thread safety:
        One thread at a time.
    """

    def __init__(self, backend: StorageBackend) -> None:
        self._backend = backend
        self._measurements: dict[StepRef, Measurement] = {}

    def read(self, selector: LatestStep | BestStep) -> MeasuredRoot:
        """Return the checkpoints of the store. They have metrics if ``selector`` asks for them. A
        checkpoint whose manifest cannot be read has none.

        Raises:
            StorageError: The store denies access or does not answer.
        """
        listing, backend = list_root(self._backend), self._backend
        refs = committed_among(backend, listing.refs)
        if isinstance(selector, LatestStep) or not refs:
            absence = "" if refs else why_missing(backend, listing.refs, None)
            checkpoints = dict.fromkeys(refs, Measurement())
            return MeasuredRoot(backend.url, checkpoints, listing.rollback, absence)
        for ref in self._measurements.keys() - refs:
            del self._measurements[ref]
        objects = objects_by_one_listing(backend, refs)
        with Workers(
            "metrics", min(_READER_THREADS, backend.capabilities.max_concurrency)
        ) as workers:
            measurements = workers.run_all(
                partial(self._measure, ref, objects.get(ref)) for ref in refs
            )
        checkpoints = dict(zip(refs, measurements, strict=True))
        return MeasuredRoot(backend.url, checkpoints, listing.rollback)

    def _measure(self, ref: StepRef, objects: Sequence[ObjectInfo] | None) -> Measurement:
        """Return the metrics of a checkpoint, also those that were added later; none if they cannot
        be read. ``objects`` are the files of the step; None if they are not known.
        """
        try:
            if ref not in self._measurements:
                manifest, _ = read_packed(self._backend, ref)
                metrics = metrics_of(manifest.metadata)
                self._measurements[ref] = Measurement(manifest.created_at, metrics)
            measurement = self._measurements[ref]
            infos = own_objects(self._backend, ref) if objects is None else objects
            additions = late_metrics(self._backend, ref, [info.key for info in infos])
        except LinkRefused:  # An ``AccessDenied`` that is about this object alone
            return Measurement()
        except (AccessDenied, TransientStorageError):
            raise
        except (IntegrityError, StorageError):  # The reader of the step raises the error
            return Measurement()
        # What the save itself has stored counts more than a metric that was added later.
        return Measurement(measurement.created_at, {**additions, **measurement.metrics})


def branch_metrics(roots: Iterable[MeasuredRoot]) -> dict[int, Mapping[str, float]]:
    """Return the metrics of each step of the current branch, by its number.

    If the branch has no checkpoint any more, all checkpoints count. Of several attempts at a step,
    the one with the youngest manifest counts.

    Args:
        roots: The stores of a run. If several of them have a metric of an attempt, the value on the
            first of them counts.
    """
    rollbacks: list[Rollback | None] = []
    measurements: dict[StepRef, Measurement] = {}
    for root in roots:
        rollbacks.append(root.rollback)
        for ref, measurement in root.checkpoints.items():
            nearer = measurements.get(ref, Measurement())
            measurements[ref] = Measurement(
                nearer.created_at or measurement.created_at,
                {**measurement.metrics, **nearer.metrics},
            )
    refs = current_branch(last_rollback(rollbacks), measurements.keys())
    refs.sort(key=lambda ref: (measurements[ref].created_at, ref))
    return {ref.step: measurements[ref].metrics for ref in refs}


def chosen_step(
    selector: LatestStep | BestStep, roots: Sequence[MeasuredRoot], modes: Mapping[str, Mode]
) -> int:
    """Return the step of a run that ``selector`` names.

    Args:
        selector: The selector.
        roots: The stores of the run, nearest first. The ``absence`` of a store says what it has
            instead of checkpoints.
        modes: Which values of a metric are the best, by its name, as ``keep_best`` says.

    Raises:
        NoCheckpoint: There is no such checkpoint.
        ConfigError: No step has the metric, or it is not known which of its values are the best.
    """
    steps = branch_metrics(roots)
    number = resolve(selector, steps, modes)
    if number is None:
        detail = why_none(selector, steps) if steps else roots[-1].absence
        raise NoCheckpoint(", ".join(root.url for root in roots), detail)
    return number


def step_on(
    stores: Sequence[StorageBackend],
    selector: NamedStep,
    modes: Callable[[], Mapping[str, Mode]],
) -> StepId:
    """Return the step that ``selector`` names on the stores of a run. The name of a branch stands
    for one attempt.

    All stores are asked, since any of them may have the best step. ``modes`` is called for a best
    step, and returns which values of a metric are the best, by its name.

    Raises:
        StorageError: A store denies access or does not answer.
        NoCheckpoint, ConfigError: As for ``chosen_step``.
    """
    if isinstance(selector, BranchStep):
        return find_branch(stores, selector)
    roots = [MetricsReader(store).read(selector) for store in stores]
    return chosen_step(selector, roots, modes() if isinstance(selector, BestStep) else {})
