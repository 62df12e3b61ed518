"""Adding metrics to a step that is saved."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence

from ckpt.catalog.index import find, own_objects, read_packed
from ckpt.catalog.late_metrics import late_metrics, put_late
from ckpt.errors import ConfigError, NoCheckpoint
from ckpt.model.keys import StepRef
from ckpt.model.metrics import metrics_of
from ckpt.storage.api import StorageBackend


def add_metrics(
    backends: Sequence[StorageBackend], step: int, metrics: Mapping[str, float], *, own: str
) -> None:
    """Keep ``metrics`` beside ``step`` on each of ``backends`` that has it.

    Args:
        own: The running attempt. Of several attempts at the step its own counts, else the newest.

    Raises:
        ConfigError: None of them has it, or a name has another value there. Nothing was written.
        StorageError: A tier did not answer. A second call writes what is missing.
    """
    holding = [(backend, ref) for backend in backends if (ref := _find(backend, step, own))]
    if not holding:
        raise ConfigError(
            f"add_metrics: step {step} is on no durable tier: it was not saved, its save failed, "
            "or it was removed"
        )
    missing = [_missing(backend, ref, metrics) for backend, ref in holding]
    for (backend, ref), new in zip(holding, missing, strict=True):
        if new:
            put_late(backend, ref, new)


def _find(backend: StorageBackend, step: int, own: str) -> StepRef | None:
    try:
        found = find(backend, step)
    except NoCheckpoint:
        return None
    return next((ref for ref in found if ref.attempt.startswith(own)), found[0])


def _missing(
    backend: StorageBackend, ref: StepRef, metrics: Mapping[str, float]
) -> dict[str, float]:
    """Return those of ``metrics`` that the step does not have yet."""
    keys = [info.key for info in own_objects(backend, ref)]
    known = {
        **late_metrics(backend, ref, keys),
        **metrics_of(read_packed(backend, ref)[0].metadata),
    }
    for name, value in metrics.items():
        there = known.get(name, value)
        if there != value and not (math.isnan(there) and math.isnan(value)):
            raise ConfigError(
                f"add_metrics: step {ref.step} has {name!r} = {there:g}, not {value:g}: a metric "
                "is written once, so take another name"
            )
    return {name: value for name, value in metrics.items() if name not in known}
