"""The metrics of the steps of a run, from its journal and its manifests, for ``ckpt prove``."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from math import isfinite, isnan

from ckpt.catalog.step_listing import read_manifest
from ckpt.model.keys import StepRef
from ckpt.model.metrics import metrics_of
from ckpt.observe.history import history_of
from ckpt.observe.journal_reader import JournalReader
from ckpt.storage.api import StorageBackend
from ckpt.storage.urls import is_folder

StepMetrics = Mapping[int, Mapping[str, float]]
"""The metrics of steps, by the number of the step."""


@dataclass(frozen=True, slots=True)
class MetricDifference:
    """A metric that a step of the run and the same step of a replay have with other values."""

    step: int
    name: str
    value: float
    replay_value: float


def metrics_after(start: int, urls: Iterable[str]) -> StepMetrics:
    """Return the metrics of the steps that a run has saved after the step ``start``, in ascending
    order, as the journals beside ``urls`` have them. A step without metrics has an entry, too.

    Abandoned steps are left out, and so are steps that were saved before the last save of
    ``start``, since these are of another history. A step that no tier has committed counts, since
    its metrics are known.
    """
    records = [record for url in filter(is_folder, urls) for record in JournalReader(url).read()]
    saves = history_of(sorted(records, key=lambda record: record.at)).saves
    begin = saves[start].at if start in saves else 0.0
    return {
        step: dict(save.metrics)
        for step, save in sorted(saves.items())
        if step > start and not save.is_abandoned and save.at >= begin
    }


def metrics_of_steps(store: StorageBackend, refs: Iterable[StepRef]) -> StepMetrics:
    """Return the metrics in the manifests of ``refs``."""
    return {ref.step: metrics_of(read_manifest(store, ref).metadata) for ref in refs}


def metric_differences(run: StepMetrics, replay: StepMetrics) -> list[MetricDifference]:
    """Return the metrics that both have with other values, those of the first step first.

    NaN is equal to every value that is not finite, since a journal has NaN for all of them.
    """
    return [
        MetricDifference(step, name, run[step][name], replay[step][name])
        for step in sorted(run.keys() & replay.keys())
        for name in sorted(run[step].keys() & replay[step].keys())
        if _differ(run[step][name], replay[step][name])
    ]


def _differ(value: float, replay_value: float) -> bool:
    if isnan(value) or isnan(replay_value):
        return isfinite(value) or isfinite(replay_value)
    return value != replay_value


def common_count(run: StepMetrics, replay: StepMetrics) -> int:
    """Return how many steps both have with a common metric."""
    return sum(bool(run[step].keys() & replay[step].keys()) for step in run.keys() & replay.keys())
