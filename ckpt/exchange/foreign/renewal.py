"""Adopt a folder again that was changed or moved since its step was adopted.

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

    It is on the current branch, it was adopted from ``source`` or from what is gone now, and a file
    of it is not the one any more that was adopted. All of its bytes are read.

    Raises:
        StepExists: There is no such attempt.
        StorageError: The root cannot be read.
    """
    ref = find(backend, number)[0]
    if ref not in list_root(backend).on_branch or not _is_from(backend, ref, source):
        raise StepExists(number, backend.url, way=NEW_NUMBER)
    with Workers("adopt", max(1, backend.capabilities.max_concurrency)) as workers:
        report = verify_step(backend, ref, workers=workers)
    if report.intact:
        raise StepExists(
            number, backend.url, way=f"and its files are as they were adopted; {NEW_NUMBER}"
        )
    return ref


def _is_from(backend: StorageBackend, ref: StepRef, source: str) -> bool:
    try:
        manifest = read_manifest(backend, ref)
    except IntegrityError:
        return False
    origin = json.loads(bytes(manifest.metadata)).get("imported_from")
    if not manifest.locations or not isinstance(origin, str):
        return False
    return origin == os.path.abspath(source) or not os.path.lexists(origin)


def remove_attempt(backend: StorageBackend, ref: StepRef) -> bool:
    """Remove the records of an attempt that another one has replaced. Return False if they stay,
    since it is pinned, another step refers to it, or the store fails.
    """
    with suppress(StorageError):
        steps = Inventory(backend).look()
        if ref not in heirs_of(step for step in steps if step.ref != ref):
            return all(remove(backend, step) for step in steps if step.ref == ref)
    return False
