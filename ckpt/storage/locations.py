"""Read the files of other programs that an adopted step consists of, where they are.

The manifest of an adopted step has a *location* for each data file: an absolute path, or a path
relative to the root. This is the only place where a manifest may name a file outside of its root.
So a store of locations has no method that writes or deletes, and opens ordinary files only.
"""

from __future__ import annotations

import os
from collections.abc import Sequence
from typing import Final
from urllib.parse import quote

from ckpt.errors import (
    ChecksumMismatch,
    FileDamaged,
    ForeignFileMismatch,
    ObjectNotFound,
    StorageError,
)
from ckpt.storage.api import Capabilities, ObjectInfo, ReadableStore, ScatterReads, StorageBackend
from ckpt.storage.places import is_folder, local_path
from ckpt.storage.registry import open_backend

_ALIGNMENT: Final = 4096


class LocatedStore:
    """The files that the manifests of one root name by their locations.

    The key of a file is its location.

    Thread safety: any thread may call any method.

    Args:
        root: The URL of the root.
    """

    capabilities = Capabilities(put_if_absent=False, shared=False, alignment=_ALIGNMENT)

    def __init__(self, root: str) -> None:
        self.url = root
        self._stores: dict[str, StorageBackend] = {}

    def read_into(self, key: str, offset: int, out: memoryview) -> None:
        store, name = self._find_file(key)
        store.read_into(name, offset, out)

    def read_parts(self, key: str, offset: int, outs: Sequence[memoryview]) -> None:
        store, name = self._find_file(key)
        assert isinstance(store, ScatterReads)
        store.read_parts(name, offset, outs)

    def head(self, key: str) -> ObjectInfo:
        store, name = self._find_file(key)
        return store.head(name)

    def _find_file(self, location: str) -> tuple[StorageBackend, str]:
        """Return the store of the folder that a file is in, and the name of the file."""
        folder, name = os.path.split(path_of(self.url, location))
        if folder not in self._stores:
            self._stores[folder] = open_backend(f"file://{quote(folder)}")
        return self._stores[folder], name


def path_of(root: str, location: str) -> str:
    """Return the absolute path of the file with this location in a manifest of ``root``.

    Raises:
        StorageError: The location is relative, and the root is no folder.
    """
    if os.path.isabs(location):
        return location
    if not is_folder(root):
        raise StorageError(location, f"a relative location is no file, since {root} is no folder")
    return os.path.normpath(os.path.join(os.path.realpath(local_path(root)), location))


def location_of(root: str, path: str) -> str:
    """Return the location for the file at ``path`` in a manifest of ``root``.

    It is relative if the folder that holds the root holds the file too, so that it stays true if
    this folder is moved. Else it is absolute, so that it stays true if the root is moved.
    """
    path = os.path.realpath(path)
    if not is_folder(root):
        return path
    root_path = os.path.realpath(local_path(root))
    parent = os.path.dirname(root_path)
    is_near = parent != "/" and path.startswith(f"{parent}/")
    return os.path.relpath(path, root_path) if is_near else path


def store_with(backend: StorageBackend, location: str) -> ReadableStore:
    """Return the store that has a data file of a step of ``backend``.

    ``location`` is the location of the file; empty if it is in the folder of the step.
    """
    return LocatedStore(backend.url) if location else backend


def as_foreign_mismatch(error: Exception, location: str) -> Exception:
    """Return `ForeignFileMismatch` in the place of an error that tells that the file with this
    location is not the one that was adopted, and else ``error``.
    """
    match error:
        case ChecksumMismatch():
            end = error.offset + error.nbytes
            return ForeignFileMismatch(
                location, f"has other bytes from {error.offset} to {end}", error.offset
            )
        case FileDamaged():
            if error.size is None:
                return ForeignFileMismatch(location, error.detail)
            detail = f"has {error.size} bytes now, and had {error.wanted}"
            return ForeignFileMismatch(location, detail, min(error.size, error.wanted))
        case ObjectNotFound():
            return ForeignFileMismatch(location, "is gone, or is no ordinary file any more")
        case _:
            return error
