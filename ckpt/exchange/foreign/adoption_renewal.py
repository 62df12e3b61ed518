"""Adopt a folder again that was changed or moved since its step was adopted.

The new attempt at the step takes the place of the old one, which no reader can read any more. The
current *branch* consists of the steps that no rollback has abandoned. A *ref* names a step and the
attempt at it. A *location* in a manifest is the path of a file that was adopted.
"""

from __future__ import annotations

import json
import os
from collections import Counter
from collections.abc import Iterable
from contextlib import suppress
from dataclasses import dataclass

from msgspec.structs import replace

from ckpt.catalog.inventory import Inventory, heirs_of
from ckpt.catalog.step_listing import find, list_root, read_manifest
from ckpt.catalog.verify import verify_step
from ckpt.errors import IntegrityError, StepExists, StorageError
from ckpt.exchange.foreign.imports import NEW_NUMBER
from ckpt.model.keys import StepRef
from ckpt.model.manifest import Chunk, File, Manifest
from ckpt.pipeline.workers import Workers
from ckpt.retention.removal import remove
from ckpt.storage.api import StorageBackend
from ckpt.storage.outside_files import path_of


@dataclass(frozen=True, slots=True)
class OldAttempt:
    """An attempt at a step that an adoption may replace.

    Attributes:
        root: The URL of the root.
        ref: The attempt.
        missing_origin: The path that it was adopted from, if nothing is there any more; else empty.
        files: Its files: the name, the size and the chunks of each.
    """

    root: str
    ref: StepRef
    missing_origin: str
    files: Counter[tuple[str, int, tuple[Chunk, ...]]]

    def check_files(self, files: Iterable[File]) -> None:
        """Check that ``files`` may take the place of those of the attempt. If its folder is not
        where it was, they must be the same files: another disk may be away that has the folder.

        Raises:
            StepExists: They are others.
        """
        if self.missing_origin and _contents(files) != self.files:
            raise _other_source_error(self.ref.step, self.root, self.missing_origin)


def replaceable_attempt(backend: StorageBackend, number: int, source: str) -> OldAttempt:
    """Return the attempt at the step ``number`` that an adoption of ``source`` may replace.

    It is on the current branch, and a file of it is not the one any more that was adopted. All of
    its bytes are read. It was adopted from the path of ``source``, or from a path at which nothing
    is any more.

    Raises:
        StepExists: There is no such attempt.
        StorageError: The root cannot be read.
    """
    ref = find(backend, number)[0]
    manifest = _adopted_manifest(backend, ref) if ref in list_root(backend).on_branch else None
    if manifest is None:
        raise StepExists(number, backend.url, way=NEW_NUMBER)
    origin = "" if _was_adopted_from(manifest, backend.url, source) else _origin(manifest)
    if origin and os.path.exists(origin):
        raise _other_source_error(number, backend.url, origin)
    with Workers("adopt", max(1, backend.capabilities.max_concurrency)) as workers:
        report = verify_step(backend, ref, workers=workers)
    if report.intact:
        raise StepExists(
            number, backend.url, way=f"and its files are as they were adopted; {NEW_NUMBER}"
        )
    names = {location.rank: location.path for location in manifest.locations}
    files = (replace(file, name=names[file.rank]) for file in manifest.files if file.rank in names)
    return OldAttempt(backend.url, ref, origin, _contents(files))


def _other_source_error(number: int, root: str, origin: str) -> StepExists:
    way = f"and this one was adopted from {origin!r}: mount or move that back if it is away, or "
    return StepExists(number, root, way=way + NEW_NUMBER)


def _contents(files: Iterable[File]) -> Counter[tuple[str, int, tuple[Chunk, ...]]]:
    return Counter((os.path.basename(file.name), file.size, file.chunks) for file in files)


def _adopted_manifest(backend: StorageBackend, ref: StepRef) -> Manifest | None:
    """Return the manifest of a step that was adopted; None if it is damaged, or of another step."""
    try:
        manifest = read_manifest(backend, ref)
    except IntegrityError:
        return None
    return manifest if manifest.locations and _origin(manifest) else None


def _origin(manifest: Manifest) -> str:
    """Return the absolute path that a step was adopted from; empty if it is not known."""
    origin = json.loads(bytes(manifest.metadata)).get("imported_from")
    return origin if isinstance(origin, str) else ""


def _was_adopted_from(manifest: Manifest, root: str, source: str) -> bool:
    """Return True if a step was adopted from the path of ``source``, or if its files are all there,
    since it was moved together with the root.
    """
    folder = os.path.join(os.path.realpath(source), "")
    paths = [path_of(root, location.path) for location in manifest.locations]
    return _origin(manifest) == os.path.abspath(source) or all(
        f"{path}/".startswith(folder) for path in paths
    )


def remove_attempt(backend: StorageBackend, ref: StepRef) -> bool:
    """Remove the records of an attempt that another one has replaced. Return False if they stay,
    since it is pinned, another step refers to it, or the store fails.
    """
    with suppress(StorageError):
        steps = Inventory(backend).look()
        if ref not in heirs_of(step for step in steps if step.ref != ref):
            return all(remove(backend, step) for step in steps if step.ref == ref)
    return False
