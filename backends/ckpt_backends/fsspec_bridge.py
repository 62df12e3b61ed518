"""The backend for any file system that fsspec knows, and the base of the S3 and GCS backends.

The guarantees depend on the file system. On object stores (``OBJECT_STORES``), an object appears
as a whole or not at all. On a local disk behind ``dir::``, an object is written under a temporary
name and renamed, but its bytes are not forced to the medium. On other file systems, such as SFTP or
SMB, a crash during ``put`` may leave a short object. Use a local disk behind ``dir::`` or such a
file system only as an additional tier.
"""

from __future__ import annotations

import posixpath
import secrets as entropy
from collections.abc import Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, suppress
from dataclasses import dataclass
from datetime import datetime
from typing import Any, Final
from urllib.parse import parse_qsl, urlsplit

from ckpt.errors import ConfigError, MissingExtra, ObjectExists, ObjectNotFound, StorageError
from ckpt.storage.api import (
    Buffer,
    Capabilities,
    ObjectInfo,
    PutUpload,
    StorageBackend,
    Upload,
    check_key,
    check_prefix,
    check_read,
    check_written,
    is_there,
)
from ckpt.storage.places import OBJECT_STORES
from ckpt_backends.foreign_errors import clean, foreign
from ckpt_backends.posix import open_posix
from ckpt_backends.store_table import check_tested

PART_BYTES: Final = 8 << 20
# On these stores, the server lets only one of several ``pipe_file(mode="create")`` succeed.
_CREATES: Final = frozenset({"s3", "s3a", "gs", "gcs"})
_RENAMES: Final = frozenset({"file", "local"})  # ``mv`` of these file systems is one rename
_TEMPORARY: Final = ".tmp"
_MODIFIED: Final = ("mtime", "LastModified", "updated", "modified", "last_modified", "created")
_EXTRAS: Final = {
    "s3": "s3",
    "s3a": "s3",
    "s3fs": "s3",
    "obstore": "obstore",
    "gs": "gcs",
    "gcs": "gcs",
    "gcsfs": "gcs",
}
_SECRET_NAMES: Final = ("secret", "token", "password", "key", "credential", "sas", "conn")


def open_fsspec(url: str, options: Mapping[str, object]) -> StorageBackend:
    """Return the backend for a URL of fsspec, which may be a chained one (``dir::``,
    ``simplecache::``).

    Args:
        url: A URL that ``fsspec.core.url_to_fs`` takes.
        options: The storage options of the file system, and ``untested``: whether to open a store
            that ckpt was never run on (see ``store_table``).

    Raises:
        MissingExtra: The package of this scheme is not installed.
        ConfigError: ckpt was never run on such a store, or the file system refuses the URL or the
            options.
    """
    # ``local`` is another name of fsspec for a folder. Use the backend for folders instead of
    # fsspec, since only this backend is durable.
    if url.startswith("local://"):
        return open_posix("file://" + url.removeprefix("local://"), options)
    from fsspec.core import url_to_fs

    shown = clean(url)
    options = check_tested(shown, options)
    secrets = secrets_of(options)
    chained = {} if "::" in url else {"use_listings_cache": False}
    try:
        fs, root = url_to_fs(url, skip_instance_cache=True, **chained, **options)
    except ImportError as error:
        raise missing_extra(shown, error) from error
    except (ValueError, TypeError, OSError) as error:
        raise ConfigError(f"{shown!r} cannot be opened: {clean(str(error), secrets)}") from None
    chained_options = options.get("dir")
    if not root and isinstance(chained_options, Mapping) and "path" in chained_options:
        raise ConfigError(
            f"{shown!r}: before release 2025.12, fsspec opens the folder of the option 'path' "
            "instead of that of the URL: leave the option out, or install a later release"
        )
    return StorageBackendOnFsspec(fs, str(root), shown, secrets=secrets)


@dataclass(frozen=True, slots=True)
class BucketPrefix:
    """A prefix of a bucket: the root of a store.

    Attributes:
        bucket: The name of the bucket.
        prefix: The prefix without slashes at its ends; '' for the whole bucket.
        url: The URL of the root for display, without credentials.
    """

    bucket: str
    prefix: str
    url: str

    @property
    def root(self) -> str:
        """The path of the root in the fsspec file system."""
        return f"{self.bucket}/{self.prefix}"


def parse_bucket_url(
    url: str, options: Mapping[str, object], *, scheme: str
) -> tuple[BucketPrefix, dict[str, Any]]:
    """Return the root that ``url`` names, and ``options`` together with the options in the query
    of ``url``. An option in ``options`` overrides one of the same name in the query.

    Raises:
        ConfigError: ``url`` names no bucket.
    """
    split, shown = urlsplit(url, allow_fragments=False), clean(url.partition("?")[0])
    bucket = split.netloc.rpartition("@")[2]
    if not bucket:
        raise ConfigError(f"{shown!r} names no bucket: write {scheme}://bucket/prefix")
    place = BucketPrefix(bucket, split.path.strip("/"), shown.rstrip("/"))
    return place, {**dict(parse_qsl(split.query)), **options}


def missing_extra(url: str, error: ImportError) -> MissingExtra:
    """Return the error that a package is missing. It names the extra of ckpt that installs the
    package if there is one, and else the package that ``error`` asks for.
    """
    scheme = url.partition("://")[0].rpartition("::")[2]
    package = {"http": "aiohttp", "https": "aiohttp"}.get(scheme, error.name or "")
    # fsspec writes "Please install adlfs to access ..." or "Install s3fs to access S3".
    if not package:
        words = [word.strip("\"'.,`") for word in str(error).split()]
        lowered = [word.lower() for word in words]
        package = words[lowered.index("install") + 1] if "install" in lowered[:-1] else scheme
    return MissingExtra(url, package, _EXTRAS.get(package) or _EXTRAS.get(scheme))


def secrets_of(options: Mapping[str, object]) -> tuple[str, ...]:
    """Return the values of options that may be secrets, so that they can be removed from
    messages.
    """
    found: list[str] = []
    for name, value in options.items():
        if isinstance(value, Mapping):
            found += secrets_of({str(key): item for key, item in value.items()})
        elif (
            isinstance(value, str)
            and len(value) >= 4
            and any(word in name.lower() for word in _SECRET_NAMES)
        ):
            found.append(value)
    return tuple(found)


class StorageBackendOnFsspec:
    """A file system of fsspec as a store.

    If the file system has no conditional put, ``put(if_absent=True)`` first checks that the object
    does not exist, and then writes it. This is enough if only one process writes the key. Two
    processes that write at the same time can both succeed, so ``capabilities.put_if_absent`` is
    False then.

    Thread safety: any thread may call all methods. fsspec runs the requests of all asynchronous
    file systems on one thread, which runs its event loop.

    Args:
        fs: The file system.
        root: The path of the root in the file system.
        url: The URL of the root for display, without credentials.
        secrets: Strings that must not appear in messages.
        capabilities: The capabilities of the store; None to derive them from the file system.
    """

    def __init__(
        self,
        fs: Any,
        root: str,
        url: str,
        *,
        secrets: Sequence[str] = (),
        capabilities: Capabilities | None = None,
    ) -> None:
        self._fs, self._root, self.url, self._secrets = fs, root.rstrip("/"), url, tuple(secrets)
        names = _protocols(fs)
        self._object_store = bool(names & OBJECT_STORES)
        self._creates = bool(names & _CREATES)
        self._renames = bool(names & _RENAMES)
        self.capabilities = capabilities or Capabilities(
            put_if_absent=self._creates,
            shared=not names & {"memory", "file", "local"},
            part_bytes=PART_BYTES,
            parallel_parts=not self._object_store,
        )

    def put(self, key: str, parts: Sequence[Buffer], *, if_absent: bool = False) -> ObjectInfo:
        path, value = self.path_of(key), b"".join(parts)
        if if_absent and not self._creates and is_there(self, key):
            raise ObjectExists(key)
        mode = {"mode": "create"} if if_absent and self._creates else {}
        with self.errors(key):
            self._make_folder(path)
            if self._renames:
                self._replace(path, value)
            else:
                self._fs.pipe_file(path, value, **mode)
        return ObjectInfo(key=key, size=len(value))

    def upload(self, key: str, size: int) -> Upload:
        check_key(key)
        if not self._object_store or size < 2 * self.capabilities.part_bytes:
            # Outside of object stores, a file may be visible while it is still written.
            return PutUpload(self, key, size)
        return _StreamUpload(self, key, size)

    def read_into(self, key: str, offset: int, out: memoryview) -> None:
        if not out.nbytes:
            self.head(key)
            return
        with self.errors(key):
            done = self._receive(key, offset, out.cast("B"))
        check_read(key, offset, done, out.nbytes)

    def _receive(self, key: str, offset: int, out: memoryview) -> int:
        """Fill ``out`` with the bytes of the object from ``offset`` on.

        Return the number of bytes, which is less than the length of ``out`` if the object ends
        before.
        """
        found = self._fs.cat_file(self.path_of(key), start=offset, end=offset + out.nbytes)
        out[: len(found)] = found[: out.nbytes]
        return len(found)

    def head(self, key: str) -> ObjectInfo:
        path = self.path_of(key)
        with self.errors(key):
            self._fs.invalidate_cache()
            found = self._fs.info(path)
        if found["type"] != "file":
            raise ObjectNotFound(key, "not a file")
        return ObjectInfo(key=key, size=int(found["size"]))

    def list(self, prefix: str) -> Iterator[ObjectInfo]:
        folder = posixpath.dirname(check_prefix(prefix))
        with self.errors(prefix):
            self._fs.invalidate_cache()
            try:
                found = self._fs.find(f"{self._root}/{folder}".rstrip("/"), detail=True)
            except (FileNotFoundError, NotADirectoryError):
                found = {}
        for path, info in found.items():
            key = self._key(path)
            if (
                key.startswith(prefix)
                and info["type"] == "file"
                and key
                and not key.endswith(_TEMPORARY)
            ):
                yield ObjectInfo(key=key, size=int(info["size"]), modified=_modified(info))

    def folders(self, prefix: str) -> Iterator[str]:
        folder = check_prefix(prefix).removesuffix("/")
        with self.errors(prefix):
            self._fs.invalidate_cache()
            try:
                found = self._fs.ls(f"{self._root}/{folder}".rstrip("/"), detail=True)
            except (FileNotFoundError, NotADirectoryError):
                found = []
        for info in found:
            key = self._key(info["name"].rstrip("/"))
            if info["type"] == "directory" and key and key != folder:
                yield posixpath.basename(key)

    def delete(self, key: str) -> None:
        with (
            self.errors(key),
            suppress(FileNotFoundError, NotADirectoryError, IsADirectoryError),
        ):
            self._fs.rm_file(self.path_of(key))

    def close(self) -> None:
        """Do nothing. The file system is freed together with this object."""

    def path_of(self, key: str) -> str:
        """Return the path of the object ``key`` in the file system, after a check of the key."""
        return f"{self._root}/{check_key(key)}"

    def _key(self, path: str) -> str:
        """Return the key of a path in the file system, or '' for the root itself and for paths
        outside of the root.
        """
        root, path = self._root.lstrip("/"), path.lstrip("/")
        inside = not root or path.startswith(root + "/")
        return path[len(root) :].lstrip("/") if inside else ""

    def open_for_writing(self, path: str) -> Any:
        """Open a file for writing at ``path`` and return it. The file sends its bytes in parts."""
        return self._fs.open(path, "wb", block_size=self.capabilities.part_bytes)

    def _make_folder(self, path: str) -> None:
        """Create the folder of the object at ``path``, except on object stores."""
        if not self._object_store:  # ``makedirs`` would try to create the bucket there
            with suppress(NotImplementedError, FileExistsError):
                self._fs.makedirs(posixpath.dirname(path), exist_ok=True)

    def _replace(self, path: str, value: bytes) -> None:
        """Write a temporary file in the folder of ``path`` and rename it to ``path``. The bytes are
        not forced to the medium, since fsspec has no fsync.
        """
        temporary = f"{posixpath.dirname(path)}/.{entropy.token_hex(8)}{_TEMPORARY}"
        try:
            self._fs.pipe_file(temporary, value)
            self._fs.mv(temporary, path)
        except BaseException:
            with suppress(Exception):
                self._fs.rm_file(temporary)
            raise

    def errors(self, key: str) -> AbstractContextManager[None]:
        """Return a context manager that turns the errors of client libraries into storage errors
        about ``key``.
        """
        return foreign(key, secrets=self._secrets, bucket=self._root.partition("/")[0])


def _protocols(fs: Any) -> set[str]:
    """Return the protocol names of a file system. For ``dir::``, return those of the file system
    behind it.
    """
    names = {fs.protocol} if isinstance(fs.protocol, str) else set(fs.protocol)
    return _protocols(fs.fs) if "dir" in names else names


class _StreamUpload:
    """The upload of a large object through one writable file of an object store. The object appears
    when the file is closed.

    The file takes the parts in file order. A part that is written early is kept as a reference to
    the caller's memory, without a copy. After an error the state of the file is unknown. The upload
    then discards the file, and the next ``write`` or ``finish`` sends all parts again. Their memory
    is still unchanged, since ``capabilities.takes_parts`` is False.

    Thread safety: only one method may run at a time.
    """

    def __init__(self, backend: StorageBackendOnFsspec, key: str, size: int) -> None:
        self._backend, self._key, self._size = backend, key, size
        self.part_bytes = backend.capabilities.part_bytes
        self._parts: dict[int, memoryview] = {}
        self._file: Any = None
        self._sent = 0

    def write(self, offset: int, data: memoryview) -> None:
        if offset < self._sent:
            return  # The file has already taken this part
        self._parts[offset] = data.cast("B")
        self._send()

    def finish(self, size: int | None = None) -> ObjectInfo:
        try:
            with self._backend.errors(self._key):
                self._send()
                self._size = check_written(self._key, self._sent, self._size, size)
                file, self._file = self._file, None
                try:
                    file.close()
                except BaseException:
                    _throw_away(file)
                    raise
        except StorageError:
            self.abort()
            if not self._complete_anyway():
                raise
        return ObjectInfo(key=self._key, size=self._size)

    def abort(self) -> None:
        file, self._file, self._sent = self._file, None, 0
        if file is not None:
            _throw_away(file)

    def _send(self) -> None:
        """Send all parts that follow the bytes sent so far. Open the file first if none is open."""
        with self._backend.errors(self._key):
            try:
                if self._file is None:
                    self._sent = 0
                    path = self._backend.path_of(self._key)
                    self._file = self._backend.open_for_writing(path)
                while (part := self._parts.get(self._sent)) is not None and part.nbytes:
                    self._file.write(part)
                    self._sent += part.nbytes
            except BaseException:
                self.abort()
                raise

    def _complete_anyway(self) -> bool:
        """Return True if the object is complete although the last request failed, because only its
        reply was lost.

        This is assumed if the object exists and has the size of the upload. An older object of the
        same size would look the same. But each attempt has keys of its own, and every restore
        compares the bytes with the checksums in the manifest.
        """
        with suppress(StorageError):
            given = sum(part.nbytes for part in self._parts.values())
            return given == self._size and self._backend.head(self._key).size == self._size
        return False


def _throw_away(file: Any) -> None:
    """Discard an unfinished file.

    The file is also marked as closed. Otherwise its finalizer would close it, which would make an
    incomplete object visible.
    """
    with suppress(Exception):
        file.discard()
    file.closed = True


def _modified(info: Mapping[str, Any]) -> float | None:
    """Return when a file was last changed, in seconds since 1970, or None if ``info`` does not say.

    ``info`` is an entry of a listing of fsspec, where file systems use different names and types
    for this time.
    """
    found = next((info[name] for name in _MODIFIED if info.get(name) is not None), None)
    with suppress(ValueError):
        found = datetime.fromisoformat(found) if isinstance(found, str) else found
    if isinstance(found, datetime):
        return found.timestamp()
    if isinstance(found, int | float) and not isinstance(found, bool):
        return float(found)
    return None
