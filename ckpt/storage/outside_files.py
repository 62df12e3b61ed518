"""Read the data files that a step has outside of its root, where they are.

The manifest of an adopted step has a *location* for each data file, which is a file of another
program: an absolute path, or a path relative to the root. A store of locations has no method that
writes or deletes, and opens ordinary files only.

The base of an increment may be a step in another root of the same store, which the manifest names
by a relative path. Its files are read by a backend of that root, with the options of the tier. If
the base was adopted, the manifest has the locations of its files too.

These are the only places where a manifest may name a file outside of its root.
"""

from __future__ import annotations

import os
import posixpath
from collections.abc import Sequence
from contextlib import suppress
from typing import Final
from urllib.parse import quote

from ckpt.errors import (
    ChecksumMismatch,
    ConfigError,
    FileDamaged,
    ForeignFileMismatch,
    LinkRefused,
    ObjectNotFound,
    StorageError,
)
from ckpt.model.manifest import AdoptedBase, AdoptedFile, StoredFile
from ckpt.storage.api import Capabilities, ObjectInfo, ReadableStore, ScatterReads, StorageBackend
from ckpt.storage.registry import neighbor, open_backend
from ckpt.storage.urls import is_folder, local_path, url_at

_ALIGNMENT: Final = 4096
_BASE_ADVICE: Final = (
    "put the file back as it was and where it was, or a link to its folder, since runs with this "
    "base read it"
)


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


class AdoptedBaseStore:
    """The files of another program that hold the first chunks of an increment, as one file whose
    bytes are at the positions of an `AdoptedBase`. No read goes over the end of a file. The key is
    not used.

    Each method raises `ForeignFileMismatch`, which names the file, if a file is gone or has another
    size.

    Thread safety: any thread may call any method.

    Args:
        root: The URL of the root that has the base.
        path: The path to this root, which names of files in errors begin with.
        adoption: The files.
    """

    capabilities = LocatedStore.capabilities

    def __init__(self, root: str, path: str, adoption: AdoptedBase) -> None:
        self.url, self._path, self._adoption = root, path, adoption
        self._store = LocatedStore(root)

    def read_into(self, key: str, offset: int, out: memoryview) -> None:
        self.read_parts(key, offset, [out])

    def read_parts(self, key: str, offset: int, outs: Sequence[memoryview]) -> None:  # noqa: ARG002
        file, offset_in_file = self._adoption.file_at(offset)
        try:
            self._store.read_parts(file.path, offset_in_file, outs)
        except StorageError:
            self._modified_at(file)  # Raises an error that says what is wrong with the file
            raise

    def head(self, key: str) -> ObjectInfo:
        return ObjectInfo(key=key, size=self._adoption.end, modified=max(self.times()))

    def times(self) -> tuple[float, ...]:
        """Return when each file was last written to or replaced, in seconds since 1970."""
        return tuple(map(self._modified_at, self._adoption.files))

    def _modified_at(self, file: AdoptedFile) -> float:
        """Return when a file was last written to or replaced, after a look at its size.

        A program that copies a file may give it the time of another one, but not the time of the
        last change of its status.
        """
        place = _shown_location(self._path, file.path)
        try:
            info = self._store.head(file.path)
        except (ObjectNotFound, LinkRefused):
            error = ObjectNotFound(file.path)
            raise as_foreign_mismatch(error, place, advice=_BASE_ADVICE) from None
        if info.size != file.size:
            damage = FileDamaged(place, info.size, file.size)
            raise as_foreign_mismatch(damage, place, advice=_BASE_ADVICE)
        with suppress(OSError):  # It is gone by now, which the next look or read tells
            return max(info.modified or 0.0, os.lstat(path_of(self.url, file.path)).st_ctime)
        return 0.0


def _shown_location(root: str, location: str) -> str:
    """Return a location in the manifest of the root at the path ``root`` as one in a manifest of
    the root that the path starts from.
    """
    return posixpath.normpath(posixpath.join(root, location))


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


def root_at(backend: StorageBackend, path: str) -> StorageBackend:
    """Return the backend of the root at ``path``, relative to the root of ``backend``; ``backend``
    itself if the path is empty.

    Raises:
        StorageError: The path leads out of the store, or to something that is no root.
    """
    if not path:
        return backend
    try:
        return neighbor(backend, lambda url: url_at(url, path))
    except ConfigError as error:
        raise StorageError(path, str(error)) from error


def store_with(backend: StorageBackend, file: StoredFile) -> tuple[ReadableStore, str]:
    """Return the store that has a data file of a step of ``backend``, and the key of the file
    there.

    Raises:
        StorageError: As for ``root_at``.
    """
    if file.location:
        return LocatedStore(backend.url), file.location
    outer_backend = root_at(backend, file.root)
    if file.adoption is not None:
        return AdoptedBaseStore(outer_backend.url, file.root, file.adoption), file.key
    return outer_backend, file.ref.key(file.file.name)


def names_of(file: StoredFile) -> frozenset[str]:
    """Return the names that a data file has in errors: its key; or if it is an adopted base, the
    locations of the files of another program.
    """
    if file.adoption is None:
        return frozenset((file.key,))
    return frozenset(_shown_location(file.root, part.path) for part in file.adoption.files)


def as_fault_of(error: Exception, file: StoredFile) -> Exception:
    """Return the error to raise in the place of ``error``, which the store with ``file`` has
    raised: `ForeignFileMismatch` for a file of another program, and for a file in another root an
    error that names it by its path.
    """
    if file.location:
        return as_foreign_mismatch(error, file.location)
    if not file.root:
        return error
    if file.adoption is not None and isinstance(error, ChecksumMismatch):
        holder, offset = file.adoption.file_at(error.offset)
        error = ChecksumMismatch(holder.path, offset, error.nbytes)
        return as_foreign_mismatch(
            error, _shown_location(file.root, holder.path), advice=_BASE_ADVICE
        )
    match error:
        case ChecksumMismatch():
            return ChecksumMismatch(file.key, error.offset, error.nbytes)
        case FileDamaged():
            return FileDamaged(file.key, error.size, error.wanted)
        case StorageError():
            error.key = file.key
            return error
        case _:
            return error


def as_foreign_mismatch(error: Exception, location: str, *, advice: str = "") -> Exception:
    """Return `ForeignFileMismatch` in the place of an error that tells that the file with this
    location is not the one that was adopted, and else ``error``. ``advice`` says what to do; empty
    for that of an adopted step.
    """
    match error:
        case ChecksumMismatch():
            end = error.offset + error.nbytes
            detail = f"has other bytes from {error.offset} to {end}"
            return ForeignFileMismatch(location, detail, error.offset, way=advice)
        case FileDamaged():
            if error.size is None:
                return ForeignFileMismatch(location, error.detail, way=advice)
            detail = f"has {error.size} bytes now, and had {error.wanted}"
            offset = min(error.size, error.wanted)
            return ForeignFileMismatch(location, detail, offset, way=advice)
        case ObjectNotFound():
            detail = "is gone, or is no ordinary file any more"
            return ForeignFileMismatch(location, detail, way=advice)
        case _:
            return error
