"""Metrics that are added to a step after its commit: small records beside the manifest.

A manifest never changes, so each addition is an object of its own. Its name is a checksum of its
content, so ranks that add the same metrics write the same object. Each try of a job at a step is an
*attempt*. It has a folder of its own, which a `StepRef` names.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Mapping, Sequence
from functools import partial

import msgspec

from ckpt.catalog.step_listing import creation_time, find, own_objects, read_packed
from ckpt.errors import (
    AccessDenied,
    ConfigError,
    IntegrityError,
    LinkRefused,
    NoCheckpoint,
    StorageError,
    TransientStorageError,
)
from ckpt.errors.storage import with_short_traceback
from ckpt.model.checksum import checksum
from ckpt.model.keys import StepRef, is_late_metrics
from ckpt.model.manifest import FORMAT
from ckpt.model.metrics import METRICS, metrics_of
from ckpt.model.record_encoding import pack, unpack
from ckpt.model.values import parse, to_json
from ckpt.pipeline.retry import RetryPolicy
from ckpt.storage.api import StorageBackend, read_record

_RETRY = RetryPolicy()
_MOST_BYTES = 1 << 16
_MOST_NAMES = 10_000
"""The most metrics of one step that are added after its commit.

``_MOST_BYTES`` is the most bytes of one record. The two limits bound the memory and the time that a
reader spends on the records of a hostile store.
"""


class _LateRecord(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """A record of added metrics. ``metadata`` has the same form as that of a manifest."""

    format: int
    step: int
    attempt: str
    metadata: msgspec.Raw


def put_late(backend: StorageBackend, ref: StepRef, metrics: Mapping[str, float]) -> None:
    """Write ``metrics`` beside the manifest of ``ref``, a committed step.

    The metrics are durable on return. Either all of them are written or none.

    Raises:
        ConfigError: There are more metrics than a reader accepts.
    """
    metadata = to_json("metrics", {METRICS: dict(sorted(metrics.items()))})
    record = _LateRecord(
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
    """Return the metrics that were added to ``ref`` after its commit, by name.

    A record that is damaged, too large or gone is ignored. No further record is read once 10,000
    names are known.

    Args:
        keys: The keys of all objects in the folder of ``ref``.

    Raises:
        AccessDenied, TransientStorageError: The store denies access or does not answer.
    """
    metrics: dict[str, float] = {}
    for key in sorted(keys):
        if is_late_metrics(key.rpartition("/")[2]) and len(metrics) < _MOST_NAMES:
            try:
                decode = partial(unpack, kind=_LateRecord, key=key)
                read = partial(read_record, backend, key, decode, limit=_MOST_BYTES)
                record = _RETRY.call(read)
            except (IntegrityError, LinkRefused):
                continue
            except (AccessDenied, TransientStorageError):
                raise
            except StorageError:
                continue
            if (record.step, record.attempt) == (ref.step, ref.attempt):
                for name, value in metrics_of(record.metadata).items():
                    metrics.setdefault(name, value)
    return metrics


def with_late(metadata: msgspec.Raw, new_metrics: Mapping[str, float]) -> msgspec.Raw:
    """Return the ``metadata`` of a manifest with the added metrics ``new_metrics`` among its
    metrics.

    If both have a metric of the same name, the value in ``metadata`` stays.
    """
    fields = parse(metadata, "metadata") if new_metrics else None
    if not isinstance(fields, dict):
        return metadata
    metrics = {**new_metrics, **metrics_of(metadata)}
    fields[METRICS] = parse(msgspec.Raw(to_json("metrics", metrics)))
    return msgspec.Raw(msgspec.json.encode(fields))


@with_short_traceback
def add_metrics(
    backends: Sequence[StorageBackend], step: int, metrics: Mapping[str, float], *, own: str
) -> None:
    """Add ``metrics`` to a committed step on each of ``backends`` that has it.

    Args:
        own: The running attempt. If the stores have several attempts at the step, the metrics are
            added to the one of this attempt, or else to the one with the youngest manifest. Stores
            that lack the chosen attempt get no metrics.

    Raises:
        ConfigError: No store has the step, or the step has another value for one of the names, and
            nothing was written. Or there are more metrics than ``put_late`` accepts.
        IntegrityError: The manifest of the step is damaged. Nothing was written.
        StorageError: A store has failed. Some stores may have the metrics. A second call writes the
            metrics that are missing.
    """
    places = [(backend, ref) for backend in backends for ref in _attempts_at(backend, step)]
    if not places:
        raise ConfigError(
            f"add_metrics: step {step} is on no durable tier: it was not saved, its save failed, "
            "or it was removed"
        )
    ref = _choose_attempt(places, own)
    holders = [backend for backend, place_ref in places if place_ref == ref]
    missing = [_missing_metrics(backend, ref, metrics) for backend in holders]
    for backend, new in zip(holders, missing, strict=True):
        if new:
            put_late(backend, ref, new)


def metrics_at(backend: StorageBackend, ref: StepRef) -> dict[str, float]:
    """Return the metrics of ``ref``, a committed step, with those that were added to it.

    Raises:
        IntegrityError: The manifest of the step is damaged.
        StorageError: The store has failed.
    """
    keys = [info.key for info in own_objects(backend, ref)]
    additions = late_metrics(backend, ref, keys)
    return additions | metrics_of(read_packed(backend, ref)[0].metadata)


def _attempts_at(backend: StorageBackend, step: int) -> list[StepRef]:
    try:
        return find(backend, step)
    except NoCheckpoint:
        return []


def _choose_attempt(places: Sequence[tuple[StorageBackend, StepRef]], own: str) -> StepRef:
    """Return the attempt of ``places`` that gets the metrics: that of the job ``own``, or else the
    one with the youngest manifest.
    """
    rivals = [place for place in places if place[1].attempt.startswith(own)] or places
    if len({ref for _, ref in rivals}) < 2:
        return rivals[0][1]
    return max((creation_time(backend, ref), ref) for backend, ref in rivals)[1]


def _missing_metrics(
    backend: StorageBackend, ref: StepRef, metrics: Mapping[str, float]
) -> dict[str, float]:
    """Return the entries of ``metrics`` whose names the step does not have yet.

    Raises:
        ConfigError: The step has another value for a name.
    """
    present = metrics_at(backend, ref)
    for name, value in metrics.items():
        old = present.get(name, value)
        if old != value and not (math.isnan(old) and math.isnan(value)):
            raise ConfigError(
                f"add_metrics: step {ref.step} has {name!r} = {old:g}, not {value:g}: a metric "
                "is written once, so take another name"
            )
    return {name: value for name, value in metrics.items() if name not in present}
