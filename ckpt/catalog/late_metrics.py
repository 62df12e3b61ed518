"""Metrics that arrive after a step was committed: small records beside its manifest.

A manifest never changes, so each addition is an object of its own, named by its content: ranks that
add the same numbers write the same object.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from functools import partial

import msgspec

from ckpt.errors import (
    AccessDenied,
    IntegrityError,
    LinkRefused,
    StorageError,
    TransientStorageError,
)
from ckpt.model.checksum import checksum
from ckpt.model.encoding import pack, unpack
from ckpt.model.keys import StepRef, is_late_metrics
from ckpt.model.manifest import FORMAT, Manifest
from ckpt.model.metrics import METRICS, metrics_of
from ckpt.model.values import parse, to_json
from ckpt.pipeline.retry import RetryPolicy
from ckpt.storage.api import StorageBackend, read_object

_RETRY = RetryPolicy()
_MOST_BYTES = 1 << 20


class _Late(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """``metadata`` has the form of a manifest's."""

    format: int
    step: int
    attempt: str
    metadata: msgspec.Raw


def put_late(backend: StorageBackend, ref: StepRef, metrics: Mapping[str, float]) -> None:
    """Keep ``metrics`` beside the manifest of ``ref``, which is committed. Once it returns, they
    are durable; before, there is all of them or nothing.
    """
    metadata = to_json("metrics", {METRICS: dict(sorted(metrics.items()))})
    record = _Late(
        format=FORMAT, step=ref.step, attempt=ref.attempt, metadata=msgspec.Raw(metadata)
    )
    data = pack(record)
    _RETRY.call(lambda: backend.put(ref.late_metrics(checksum(data)), [data]))


def late_metrics(backend: StorageBackend, ref: StepRef, keys: Iterable[str]) -> dict[str, float]:
    """Return the metrics in the records among ``keys``, the objects in the folder of ``ref``.

    A record that is damaged, or is being removed, counts as none.
    """
    found: dict[str, float] = {}
    for key in sorted(keys):
        if is_late_metrics(key.rpartition("/")[2]):
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
                found = {**metrics_of(record.metadata), **found}
    return found


def with_late(manifest: Manifest, late: Mapping[str, float]) -> Manifest:
    """Return ``manifest`` as if ``late`` had been saved with it."""
    metadata = parse(manifest.metadata, "metadata") if late else None
    if not isinstance(metadata, dict):
        return manifest
    known = metadata.get(METRICS)
    added = parse(msgspec.Raw(to_json("metrics", dict(late))))
    metadata[METRICS] = {**added, **(known if isinstance(known, dict) else {})}
    return msgspec.structs.replace(manifest, metadata=msgspec.Raw(msgspec.json.encode(metadata)))
