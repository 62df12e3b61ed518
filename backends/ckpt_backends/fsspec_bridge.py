"""The backend for file systems of fsspec, and the base of the S3 and GCS backends.

``store_table`` lists the stores that are served. The guarantees depend on the file system. On
object stores (``OBJECT_STORES``), an object appears as a whole or not at all. On a local disk
behind ``dir::``, an object is written under a temporary name and renamed, but its bytes are not
forced to the medium. On a store that is not in the table, a crash during ``put`` may leave a short
object.
"""

from __future__ import annotations

import posixpath
import threading
from collections.abc import Generator, Iterator, Mapping, Sequence
from contextlib import contextmanager, suppress
from datetime import datetime
from typing import Any, Final, cast

from ckpt.errors import (
    ConfigError,
    ObjectExists,
    ObjectNotFound,
    StorageError,
    TransientStorageError,
)
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
from ckpt.storage.registry import scheme_of
from ckpt.storage.urls import OBJECT_STORES
from ckpt_backends.client_options import missing_extra, secrets_of
from ckpt_backends.file_server.backend import FILE_SERVERS, open_file_server
from ckpt_backends.folder.posix import open_posix
from ckpt_backends.foreign_errors import clean, translate_errors
from ckpt_backends.store_table import DIR_SCHEME, check_tested
from ckpt_backends.temporary import is_hidden, temporary_beside

PART_BYTES: Final = 8 << 20
# On these stores, the server lets only one of several ``pipe_file(mode="create")`` succeed.
_CONDITIONAL_PROTOCOLS: Final = frozenset({"s3", "s3a", "gs", "gcs", "abfs", "abfss", "az"})
# ``mv`` of these file systems is one rename.
_RENAME_PROTOCOLS: Final = frozenset({"file", "local"})
_LOCAL_PROTOCOLS: Final = frozenset({"memory", "file", "local"})
_TURN_SECONDS: Final = 60.0
_DATE_FIELDS: Final = ("mtime", "LastModified", "updated", "modified", "last_modified", "created")


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

    clean_url = clean(url)
    options = check_tested(clean_url, options)
    target = url.removeprefix("dir::")
    if (scheme := scheme_of(target)) in FILE_SERVERS:
        settings = {name: value for name, value in options.items() if name not in ("dir", scheme)}
        scheme_options = cast(Mapping[str, object], options.get(scheme, {}))
        return open_file_server(target, {**settings, **scheme_options})
    secrets = secrets_of(options)
    try:
        fs, root = url_to_fs(url, skip_instance_cache=True, **options)
    except ImportError as error:
        raise missing_extra(clean_url, error) from error
    except (ValueError, TypeError, OSError) as error:
        raise ConfigError(f"{clean_url!r} cannot be opened: {clean(str(error), secrets)}") from None
    chained_options = options.get("dir")
    if not root and isinstance(chained_options, Mapping) and "path" in chained_options:
        raise ConfigError(
            f"{clean_url!r}: before release 2025.12, fsspec opens the folder of the option 'path' "
            "instead of that of the URL: leave the option out, or install a later release"
        )
    _disable_listings_cache(fs)
    return StorageBackendOnFsspec(fs, str(root), clean_url, secrets=secrets)


def _disable_listings_cache(fs: Any) -> None:
    """Switch off the memory for listings of a file system and of those behind it.

    The option ``use_listings_cache`` cannot be given to each file system: some pass all options on
    to their client, which refuses it.
    """
    for layer in _chain_of(fs):
        listings: Any = getattr(layer, "dircache", None)
        if hasattr(listings, "use_listings_cache"):
            listings.use_listings_cache = False


class StorageBackendOnFsspec:
    """A file system of fsspec as a store.

    If the file system has no conditional put, ``put(if_absent=True)`` first checks that the object
    does not exist, and then writes it. This is enough if only one process writes the key. Two
    processes that write at the same time can both succeed, so ``capabilities.put_if_absent`` is
    False then.

    If ``_has_conditional_put`` is True, the file system itself can put an object only if it is
    absent. If ``_puts_by_rename`` is True, an object is written under another name and then
    renamed. ``_turn`` is the lock of a file system that serves one request at a time, and None for
    others.

    Thread safety: any thread may call all methods. fsspec runs the requests of all asynchronous
    file systems on one thread, which runs its event loop. A synchronous file system, except for
    those of this machine, serves one request at a time.

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
        *wrappers, target = _chain_of(fs)
        protocols = _protocols(target)
        is_local = bool(protocols & _LOCAL_PROTOCOLS)
        self._turn = threading.RLock() if not (is_local or _is_async(target)) else None
        self._is_object_store = bool(protocols & OBJECT_STORES)
        # Only a file system that adds a folder to each path is known to pass the mode on.
        # A cache may drop the mode of a put (``findings/simplecache-create.sh``).
        passes_mode = all(DIR_SCHEME in _protocols(layer) for layer in wrappers)
        self._has_conditional_put = passes_mode and bool(protocols & _CONDITIONAL_PROTOCOLS)
        self._puts_by_rename = bool(protocols & _RENAME_PROTOCOLS)
        self.capabilities = capabilities or Capabilities(
            put_if_absent=self._has_conditional_put,
            shared=not is_local,
            part_bytes=PART_BYTES,
            parallel_parts=not self._is_object_store,
        )

    def put(self, key: str, parts: Sequence[Buffer], *, if_absent: bool = False) -> ObjectInfo:
        path, value = self.path_of(key), b"".join(parts)
        if if_absent and not self._has_conditional_put and is_there(self, key):
            raise ObjectExists(key)
        mode = {"mode": "create"} if if_absent and self._has_conditional_put else {}
        with self.translate_errors(key):
            self._make_folder(path)
            if self._puts_by_rename:
                self._replace(path, value)
            else:
                self._fs.pipe_file(path, value, **mode)
        return ObjectInfo(key=key, size=len(value))

    def upload(self, key: str, size: int) -> Upload:
        check_key(key)
        if not self._is_object_store or size < 2 * self.capabilities.part_bytes:
            # Outside of object stores, a file may be visible while it is still written.
            return PutUpload(self, key, size)
        return _StreamUpload(self, key, size)

    def read_into(self, key: str, offset: int, out: memoryview) -> None:
        if not out.nbytes:
            self.head(key)
            return
        with self.translate_errors(key):
            count = self._receive(key, offset, out.cast("B"))
        check_read(key, offset, count, out.nbytes)

    def _receive(self, key: str, offset: int, out: memoryview) -> int:
        """Fill ``out`` with the bytes of the object from ``offset`` on.

        Return the number of bytes, which is less than the length of ``out`` if the object ends
        before.
        """
        data = self._fs.cat_file(self.path_of(key), start=offset, end=offset + out.nbytes)
        out[: len(data)] = data[: out.nbytes]
        return len(data)

    def head(self, key: str) -> ObjectInfo:
        path = self.path_of(key)
        with self.translate_errors(key):
            self._fs.invalidate_cache()
            info = self._fs.info(path)
        if info["type"] != "file":
            raise ObjectNotFound(key, "not a file")
        return ObjectInfo(key=key, size=int(info["size"]), modified=modified_of(info))

    def list(self, prefix: str) -> Iterator[ObjectInfo]:
        folder = posixpath.dirname(check_prefix(prefix))
        infos: Mapping[str, Any] = {}
        with suppress(ObjectNotFound), self.translate_errors(prefix):
            self._fs.invalidate_cache()
            infos = self._fs.find(f"{self._root}/{folder}".rstrip("/"), detail=True)
        for path, info in infos.items():
            key = self._key_of(path)
            if (
                key.startswith(prefix)
                and info["type"] == "file"
                and key
                and not is_hidden(posixpath.basename(key))
            ):
                yield ObjectInfo(key=key, size=int(info["size"]), modified=modified_of(info))

    def folders(self, prefix: str) -> Iterator[str]:
        folder = check_prefix(prefix).removesuffix("/")
        infos: Sequence[Mapping[str, Any]] = ()
        with suppress(ObjectNotFound), self.translate_errors(prefix):
            self._fs.invalidate_cache()
            infos = self._fs.ls(f"{self._root}/{folder}".rstrip("/"), detail=True)
        for info in infos:
            key = self._key_of(info["name"].rstrip("/"))
            if info["type"] == "directory" and key and key != folder:
                yield posixpath.basename(key)

    def delete(self, key: str) -> None:
        path = self.path_of(key)
        with suppress(ObjectNotFound), self.translate_errors(key):
            self._fs.rm_file(path)

    def close(self) -> None:
        """Do nothing. The file system is freed together with this object."""

    def path_of(self, key: str) -> str:
        """Return the path of the object ``key`` in the file system, after a check of the key."""
        return f"{self._root}/{check_key(key)}"

    def _key_of(self, path: str) -> str:
        """Return the key of a path in the file system, or '' for the root itself and for paths
        outside of the root.
        """
        root, path = self._root.lstrip("/"), path.lstrip("/")
        is_inside = not root or path.startswith(root + "/")
        return path[len(root) :].lstrip("/") if is_inside else ""

    def open_for_writing(self, path: str) -> Any:
        """Open a file for writing at ``path`` and return it. The file sends its bytes in parts."""
        return self._fs.open(path, "wb", block_size=self.capabilities.part_bytes)

    def _make_folder(self, path: str) -> None:
        """Create the folder of the object at ``path``, except on object stores."""
        if not self._is_object_store:  # ``makedirs`` would try to create the bucket there
            with suppress(NotImplementedError, FileExistsError):
                self._fs.makedirs(posixpath.dirname(path), exist_ok=True)

    def _replace(self, path: str, value: bytes) -> None:
        """Write a temporary file in the folder of ``path`` and rename it to ``path``. The bytes are
        not forced to the medium, since fsspec has no fsync.
        """
        temporary = temporary_beside(path)
        try:
            self._fs.pipe_file(temporary, value)
            self._fs.mv(temporary, path)
        except BaseException:
            with suppress(Exception):
                self._fs.rm_file(temporary)
            raise

    @contextmanager
    def translate_errors(self, key: str) -> Generator[None]:
        """Return a context manager that turns the errors of client libraries into storage errors
        about ``key``. If the file system serves one request at a time, it waits for the turn.

        Raises:
            TransientStorageError: The turn did not come in time.
        """
        if self._turn is not None and not self._turn.acquire(timeout=_TURN_SECONDS):
            raise TransientStorageError(key, f"the client was busy for {_TURN_SECONDS:.0f} seconds")
        try:
            bucket = self._root.partition("/")[0]
            with translate_errors(key, secrets=self._secrets, bucket=bucket):
                yield
        finally:
            if self._turn is not None:
                self._turn.release()


def _chain_of(fs: Any) -> list[Any]:
    """Return ``fs``, the file system that it stands before, such as after ``dir::``, and so on."""
    chain = [fs]
    while (fs := getattr(fs, "fs", None)) is not None:
        chain.append(fs)
    return chain


def _protocols(fs: Any) -> set[str]:
    """Return the protocol names of a file system."""
    return {fs.protocol} if isinstance(fs.protocol, str) else set(fs.protocol)


def _is_async(fs: Any) -> bool:
    return bool(getattr(fs, "async_impl", False))


class _StreamUpload:
    """The upload of a large object through one writable file of an object store. The object appears
    when the file is closed.

    The file takes the parts in file order. A part that is written early is kept as a reference to
    the caller's memory, without a copy. After an error the state of the file is unknown. The upload
    then discards the file, and the next ``write`` or ``finish`` sends all parts again. Their memory
    is still unchanged, since ``capabilities.takes_parts`` is False.

    ``_file`` has taken the first ``_offset`` bytes of the object. ``_parts`` maps the offset of
    each part to the part.

    Thread safety: only one method may run at a time.
    """

    def __init__(self, backend: StorageBackendOnFsspec, key: str, size: int) -> None:
        self._backend, self._key, self._size = backend, key, size
        self.part_bytes = backend.capabilities.part_bytes
        self._parts: dict[int, memoryview] = {}
        self._file: Any = None
        self._offset = 0

    def write(self, offset: int, data: memoryview) -> None:
        if offset < self._offset:
            return  # The file has already taken this part
        self._parts[offset] = data.cast("B")
        self._send()

    def finish(self, size: int | None = None) -> ObjectInfo:
        try:
            with self._backend.translate_errors(self._key):
                self._send()
                self._size = check_written(self._key, self._offset, self._size, size)
                file, self._file = self._file, None
                try:
                    file.close()
                except BaseException:
                    _throw_away(file)
                    raise
        except StorageError:
            self.abort()
            if not self._is_complete():
                raise
        return ObjectInfo(key=self._key, size=self._size)

    def abort(self) -> None:
        file, self._file, self._offset = self._file, None, 0
        if file is not None:
            _throw_away(file)

    def _send(self) -> None:
        """Send all parts that follow the bytes sent so far. Open the file first if none is open."""
        with self._backend.translate_errors(self._key):
            try:
                if self._file is None:
                    self._offset = 0
                    path = self._backend.path_of(self._key)
                    self._file = self._backend.open_for_writing(path)
                while (part := self._parts.get(self._offset)) is not None and part.nbytes:
                    self._file.write(part)
                    self._offset += part.nbytes
            except BaseException:
                self.abort()
                raise

    def _is_complete(self) -> bool:
        """Return True if the object is complete although the last request failed, because only its
        reply was lost. The bytes are compared, since an older object may have the same size.
        """
        offset = 0
        with suppress(StorageError):
            if self._backend.head(self._key).size != self._size:
                return False
            while (part := self._parts.get(offset)) is not None and part.nbytes:
                stored = bytearray(part.nbytes)
                self._backend.read_into(self._key, offset, memoryview(stored))
                if stored != bytearray(part):
                    return False
                offset += part.nbytes
        return offset == self._size


def _throw_away(file: Any) -> None:
    """Discard an unfinished file.

    The file is also marked as closed. Otherwise its finalizer would close it, which would make an
    incomplete object visible.
    """
    with suppress(Exception):
        file.discard()
    file.closed = True


def modified_of(info: Mapping[str, Any]) -> float | None:
    """Return when a file was last changed, in seconds since 1970, or None if ``info`` does not say.

    ``info`` is an entry of a listing of fsspec, where file systems use different names and types
    for this time.
    """
    value = next((info[name] for name in _DATE_FIELDS if info.get(name) is not None), None)
    with suppress(ValueError):
        value = datetime.fromisoformat(value) if isinstance(value, str) else value
    if isinstance(value, datetime):
        return value.timestamp()
    if isinstance(value, int | float) and not isinstance(value, bool):
        return float(value)
    return None
