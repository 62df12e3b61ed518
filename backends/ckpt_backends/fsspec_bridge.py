"""Any file system that fsspec knows as a store; the base of the S3 and GCS backends.

What a store gives is what its fsspec file system gives. On object stores (``_OBJECT_STORES``) an
object appears whole or not at all. On a local disk behind ``dir::`` it is renamed into place, but
not forced to the medium. On others, such as SFTP or SMB, a crash during ``put`` may leave a short
object: use them for copies, not as the only tier.
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
from ckpt_backends.foreign_errors import clean, foreign
from ckpt_backends.posix import open_posix

PART_BYTES: Final = 8 << 20
_OBJECT_STORES: Final = frozenset(
    {"s3", "s3a", "gs", "gcs", "abfs", "abfss", "az", "oss", "oci", "tos", "cos"}
)
# Their servers decide which ``pipe_file(mode="create")`` wins.
_CREATES: Final = frozenset({"s3", "s3a", "gs", "gcs"})
_RENAMES: Final = frozenset({"file", "local"})  # A move is one rename
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
    """Open the file system behind any fsspec URL, also a chained one (``dir::``,
    ``simplecache::``).

    Args:
        url: A URL that ``fsspec.core.url_to_fs`` takes.
        options: The storage options of the file system.

    Raises:
        MissingExtra: The package of this scheme is not installed.
        ConfigError: The file system refuses the URL or the options.
    """
    # ``local`` is another name of fsspec for a folder, and our backend is durable.
    if url.startswith("local://"):
        return open_posix("file://" + url.removeprefix("local://"), options)
    from fsspec.core import url_to_fs

    shown, secrets = clean(url), secrets_of(options)
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
    """A prefix of a bucket, and the URL that names it without credentials."""

    bucket: str
    prefix: str
    url: str

    @property
    def root(self) -> str:
        """The path of the prefix in the file system."""
        return f"{self.bucket}/{self.prefix}"


def parse_bucket_url(
    url: str, options: Mapping[str, object], *, scheme: str
) -> tuple[BucketPrefix, dict[str, Any]]:
    """Return what ``scheme://bucket/prefix`` names, and the options with those of its query.

    Raises:
        ConfigError: It names no bucket.
    """
    split, shown = urlsplit(url, allow_fragments=False), clean(url.partition("?")[0])
    bucket = split.netloc.rpartition("@")[2]
    if not bucket:
        raise ConfigError(f"{shown!r} names no bucket: write {scheme}://bucket/prefix")
    place = BucketPrefix(bucket, split.path.strip("/"), shown.rstrip("/"))
    return place, {**dict(parse_qsl(split.query)), **options}


def missing_extra(url: str, error: ImportError) -> MissingExtra:
    """Return the error that names our extra, or the package that fsspec asks for."""
    scheme = url.partition("://")[0].rpartition("::")[2]
    package = {"http": "aiohttp", "https": "aiohttp"}.get(scheme, error.name or "")
    # fsspec writes "Please install adlfs to access ..." or "Install s3fs to access S3".
    if not package:
        words = [word.strip("\"'.,`") for word in str(error).split()]
        lowered = [word.lower() for word in words]
        package = words[lowered.index("install") + 1] if "install" in lowered[:-1] else scheme
    return MissingExtra(url, package, _EXTRAS.get(package) or _EXTRAS.get(scheme))


def secrets_of(options: Mapping[str, object]) -> tuple[str, ...]:
    """Return the option values that must not appear in a message."""
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
    """An fsspec file system as a store.

    Thread safety: any thread may call all methods. Asynchronous file systems share fsspec's one
    loop.

    ``put(if_absent=True)`` on a file system without a conditional put looks first and writes then:
    enough for one leader at a time, not for a race; ``capabilities.put_if_absent`` says which it
    is.
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
        self._object_store = bool(names & _OBJECT_STORES)
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
            # Elsewhere, a file under ``open`` may be visible before it is closed.
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
        """Fill ``out`` from ``offset`` as far as the object goes; returns how many bytes came."""
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
        with self.errors(key), suppress(FileNotFoundError):
            self._fs.rm_file(self.path_of(key))

    def close(self) -> None:
        """Do nothing: the file system is dropped with this object."""

    def path_of(self, key: str) -> str:
        """Return the path of an object in the file system."""
        return f"{self._root}/{check_key(key)}"

    def _key(self, path: str) -> str:
        """Return the key of a path; '' for the root itself and for markers of folders."""
        root, path = self._root.lstrip("/"), path.lstrip("/")
        inside = not root or path.startswith(root + "/")
        return path[len(root) :].lstrip("/") if inside else ""

    def open_for_writing(self, path: str) -> Any:
        """Open a file that takes its bytes in parts."""
        return self._fs.open(path, "wb", block_size=self.capabilities.part_bytes)

    def _make_folder(self, path: str) -> None:
        if not self._object_store:  # It would try to create the bucket of an object store
            with suppress(NotImplementedError, FileExistsError):
                self._fs.makedirs(posixpath.dirname(path), exist_ok=True)

    def _replace(self, path: str, value: bytes) -> None:
        """Write beside the target and rename over it. There is no fsync in fsspec."""
        temporary = f"{posixpath.dirname(path)}/.{entropy.token_hex(8)}{_TEMPORARY}"
        try:
            self._fs.pipe_file(temporary, value)
            self._fs.mv(temporary, path)
        except BaseException:
            with suppress(Exception):
                self._fs.rm_file(temporary)
            raise

    def errors(self, key: str) -> AbstractContextManager[None]:
        """Turn the errors of any client into ours inside of the ``with`` block."""
        return foreign(key, secrets=self._secrets, bucket=self._root.partition("/")[0])


def _protocols(fs: Any) -> set[str]:
    """Return the names of a file system, or of the file system behind a ``dir::``."""
    names = {fs.protocol} if isinstance(fs.protocol, str) else set(fs.protocol)
    return _protocols(fs.fs) if "dir" in names else names


class _StreamUpload:
    """A large object through one writable file of an object store, part after part; it becomes
    visible when that is closed.

    Parts may come in any order: what comes early waits as a reference, no copy. The file's state is
    unknown after an error, so it is
    thrown away then and the next call sends all parts again; their memory is there until
    ``finish``, the contract says so.

    Thread safety: one call at a time.
    """

    def __init__(self, backend: StorageBackendOnFsspec, key: str, size: int) -> None:
        self._backend, self._key, self._size = backend, key, size
        self.part_bytes = backend.capabilities.part_bytes
        self._parts: dict[int, memoryview] = {}
        self._file: Any = None
        self._sent = 0

    def write(self, offset: int, data: memoryview) -> None:
        if offset < self._sent:
            return  # A repeated part that was sent already
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
        """Return True if only the reply of the last request was lost.

        An older object of the same size looks the same. But keys are unique to an attempt, and the
        bytes are checked against the manifest.
        """
        with suppress(StorageError):
            given = sum(part.nbytes for part in self._parts.values())
            return given == self._size and self._backend.head(self._key).size == self._size
        return False


def _throw_away(file: Any) -> None:
    """Discard an unfinished file.

    It must also count as closed, or collecting it would publish what it holds.
    """
    with suppress(Exception):
        file.discard()
    file.closed = True


def _modified(info: Mapping[str, Any]) -> float | None:
    """Return when a file was last changed. File systems use different names and types for this."""
    found = next((info[name] for name in _MODIFIED if info.get(name) is not None), None)
    with suppress(ValueError):
        found = datetime.fromisoformat(found) if isinstance(found, str) else found
    return (
        found.timestamp()
        if isinstance(found, datetime)
        else found
        if isinstance(found, float)
        else None
    )
