"""Adopt a folder again that was changed since its step was adopted.

The new attempt at the step takes the place of the old one, which no reader can read any more.
"""

from __future__ import annotations

import json
import os
from contextlib import suppress

from ckpt.catalog.index import find, list_root, read_manifest
from ckpt.catalog.inventory import Inventory, heirs_of
from ckpt.catalog.verify import verify_step
from ckpt.errors import IntegrityError, StepExists, StorageError
from ckpt.exchange.foreign.imports import NEW_NUMBER
from ckpt.model.keys import StepRef
from ckpt.pipeline.workers import Workers
from ckpt.retention.removal import remove
from ckpt.storage.api import StorageBackend


def changed_attempt(backend: StorageBackend, number: int, source: str) -> StepRef:
    """Return the attempt at the step ``number`` that an adoption of ``source`` may replace.

    It is on the current branch, it was adopted from the path of ``source``, and a file of it is not
    the one any more that was adopted. All of its bytes are read. A step of another path stays: its
    folder may be on a disk that is not mounted now.

    Raises:
        StepExists: There is no such attempt.
        StorageError: The root cannot be read.
    """
    ref = find(backend, number)[0]
    origin = _origin(backend, ref) if ref in list_root(backend).on_branch else None
    if origin is None:
        raise StepExists(number, backend.url, way=NEW_NUMBER)
    if origin != os.path.abspath(source):
        raise StepExists(
            number,
            backend.url,
            way=f"and this one was adopted from {origin!r}: mount or move that back if it is away, "
            f"or {NEW_NUMBER}",
        )
    with Workers("adopt", max(1, backend.capabilities.max_concurrency)) as workers:
        report = verify_step(backend, ref, workers=workers)
    if report.intact:
        raise StepExists(
            number, backend.url, way=f"and its files are as they were adopted; {NEW_NUMBER}"
        )
    return ref


def _origin(backend: StorageBackend, ref: StepRef) -> str | None:
    """Return the absolute path that a step was adopted from; None if it is no adopted step."""
    try:
        manifest = read_manifest(backend, ref)
    except IntegrityError:
        return None
    origin = json.loads(bytes(manifest.metadata)).get("imported_from")
    return origin if manifest.locations and isinstance(origin, str) else None


def remove_attempt(backend: StorageBackend, ref: StepRef) -> bool:
    """Remove the records of an attempt that another one has replaced. Return False if they stay,
    since it is pinned, another step refers to it, or the store fails.
    """
    with suppress(StorageError):
        steps = Inventory(backend).look()
        if ref not in heirs_of(step for step in steps if step.ref != ref):
            return all(remove(backend, step) for step in steps if step.ref == ref)
    return False
