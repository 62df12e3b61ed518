"""Metrics that arrive after a step was committed: small records beside its manifest.

A manifest never changes, so each addition is an object of its own, named by its content: ranks that
add the same numbers write the same object.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Mapping, Sequence
from functools import partial

import msgspec

from ckpt.catalog.index import find, own_objects, read_packed
from ckpt.errors import (
    AccessDenied,
    ConfigError,
    IntegrityError,
    LinkRefused,
    NoCheckpoint,
    StorageError,
    TransientStorageError,
)
from ckpt.model.checksum import checksum
from ckpt.model.encoding import pack, unpack
from ckpt.model.keys import StepRef, is_late_metrics
from ckpt.model.manifest import FORMAT
from ckpt.model.metrics import METRICS, metrics_of
from ckpt.model.values import parse, to_json
from ckpt.pipeline.retry import RetryPolicy
from ckpt.storage.api import StorageBackend, read_object

_RETRY = RetryPolicy()
_MOST_BYTES = 1 << 16
_MOST_NAMES = 10_000
"""Of one step. They bound what a hostile store can make a reader keep, and take time for."""


class _Late(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """``metadata`` has the form of a manifest's."""

    format: int
    step: int
    attempt: str
    metadata: msgspec.Raw


def put_late(backend: StorageBackend, ref: StepRef, metrics: Mapping[str, float]) -> None:
    """Keep ``metrics`` beside the manifest of ``ref``, which is committed. Once it returns, they
    are durable; before, there is all of them or nothing.

    Raises:
        ConfigError: There are more than a reader takes.
    """
    metadata = to_json("metrics", {METRICS: dict(sorted(metrics.items()))})
    record = _Late(
        format=FORMAT, step=ref.step, attempt=ref.attempt, metadata=msgspec.Raw(metadata)
    )
    data = pack(record)
    if len(data) > _MOST_BYTES or len(metrics) > _MOST_NAMES:
        raise ConfigError(
            f"{len(metrics)} metrics are too many for one step: a record has at most "
            f"{_MOST_BYTES >> 10} KiB and {_MOST_NAMES:,} names"
        )
    _RETRY.call(lambda: backend.put(ref.late_metrics(checksum(data)), [data]))


def late_metrics(backend: StorageBackend, ref: StepRef, keys: Iterable[str]) -> dict[str, float]:
    """Return the metrics in the records among ``keys``, the objects in the folder of ``ref``.

    A record that is damaged, too large, or is being removed, counts as none. No more records are
    read once there are 10,000 names.
    """
    found: dict[str, float] = {}
    for key in sorted(keys):
        if is_late_metrics(key.rpartition("/")[2]) and len(found) < _MOST_NAMES:
            try:
                read = partial(read_object, backend, key, limit=_MOST_BYTES)
                record = unpack(_RETRY.call(read), _Late, key=key)
            except (IntegrityError, LinkRefused):
                continue
            except (AccessDenied, TransientStorageError):
                raise
            except StorageError:
                continue
            if (record.step, record.attempt) == (ref.step, ref.attempt):
                for name, value in metrics_of(record.metadata).items():
                    found.setdefault(name, value)
    return found


def with_late(metadata: msgspec.Raw, late: Mapping[str, float]) -> msgspec.Raw:
    """Return the ``metadata`` of a manifest as if ``late`` had been saved with it."""
    known = parse(metadata, "metadata") if late else None
    if not isinstance(known, dict):
        return metadata
    metrics = {**late, **metrics_of(metadata)}
    known[METRICS] = parse(msgspec.Raw(to_json("metrics", metrics)))
    return msgspec.Raw(msgspec.json.encode(known))


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
