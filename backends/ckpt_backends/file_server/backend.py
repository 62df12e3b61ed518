"""The backend for a file server that is reached by connections: SFTP, SMB, FTP and WebDAV.

The clients of these servers are not safe for threads, so each connection serves one request at a
time. The backend opens a few connections, and a request waits for a free one. Each wait ends after
some time with ``TransientStorageError``.

An object is written under a temporary name in its folder and then renamed, so no reader sees a part
of it. A crash leaves only the temporary file, which then counts as *abandoned*. The protocols have
no rename that only one of two clients can win, so ``capabilities.put_if_absent`` is False. This is
enough if only one process writes the key.
"""

from __future__ import annotations

import pkgutil
import posixpath
import threading
from collections import Counter
from collections.abc import Callable, Generator, Iterator, Mapping, Sequence
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from functools import partial
from inspect import Parameter, signature
from pathlib import PurePosixPath
from typing import Any, ClassVar, Final, Protocol, cast

from ckpt.errors import (
    ConfigError,
    ObjectExists,
    ObjectNotFound,
    OutOfSpace,
    StorageError,
    TransientStorageError,
)
from ckpt.storage.api import (
    Buffer,
    Capabilities,
    ObjectInfo,
    PutUpload,
    Upload,
    check_key,
    check_prefix,
    check_read,
    is_there,
)
from ckpt_backends.client_options import missing_extra, secrets_of
from ckpt_backends.foreign_errors import clean, translate_errors
from ckpt_backends.temporary import TEMPORARY, is_abandoned, is_hidden, temporary_beside

WAIT_SECONDS: Final = 60
"""How long a connection waits for the server unless the option ``timeout`` says otherwise, and how
long a request waits for a free connection.
"""
_MOST_CONNECTIONS: Final = 4
_PART_BYTES: Final = 1 << 20
_PROBE_BYTES: Final = 64 << 10
_TRIES: Final = 3  # A folder may be removed between its creation and the creation of a file in it


FILE_SERVERS: Final[Mapping[str, str]] = {
    "sftp": "ckpt_backends.file_server.sftp:SftpConnection",
    "ssh": "ckpt_backends.file_server.sftp:SftpConnection",
    "smb": "ckpt_backends.file_server.smb:SmbConnection",
    "ftp": "ckpt_backends.file_server.ftp:FtpConnection",
    "webdav": "ckpt_backends.file_server.webdav:WebdavConnection",
}
"""The class of the connections for each URL scheme."""


@dataclass(frozen=True, slots=True)
class Entry:
    """A file or a folder in the listing of a folder.

    Attributes:
        name: Its name in the folder.
        size: The size of a file in bytes; None for a folder.
        modified: When it was last changed, in seconds since 1970; None if the server does not say.
    """

    name: str
    size: int | None
    modified: float | None


class Connection(Protocol):
    """A connection to a file server. Only one thread at a time uses it.

    Paths are absolute. Methods raise the errors of the client, which ``foreign_errors`` translates,
    or storage errors. A missing file or folder is ``ObjectNotFound`` after the translation.

    Attributes:
        DEFAULTS: Options of the file system of fsspec that hold unless the user gives others. They
            limit each wait of the client.
        PASSES_OPTIONS: Whether the file system passes unknown options to the client, which refuses
            them. Otherwise it ignores them.

    Args:
        fs: The file system of fsspec for the server, which makes the connection.
    """

    DEFAULTS: ClassVar[Mapping[str, object]]
    PASSES_OPTIONS: ClassVar[bool]

    def __init__(self, fs: Any) -> None: ...

    def write(self, path: str, parts: Sequence[memoryview]) -> None:
        """Write a new file, and force its bytes to the disk of the server if the protocol can."""
        ...

    def replace(self, source: str, target: str) -> None:
        """Rename a file. An existing file of the name ``target`` is replaced."""
        ...

    def read(self, path: str, offset: int, out: memoryview) -> int:
        """Fill ``out`` from the byte ``offset`` of a file on. Return the number of bytes, which is
        less than the length of ``out`` if the file ends before.
        """
        ...

    def stat(self, path: str) -> Entry:
        """Return the size and the date of a file. A folder counts as missing."""
        ...

    def entries(self, path: str) -> list[Entry]:
        """Return the files and folders in a folder."""
        ...

    def make_folder(self, path: str) -> None:
        """Create a folder. An existing folder is no error."""
        ...

    def remove(self, path: str) -> None:
        """Remove a file. A folder counts as missing."""
        ...

    def remove_folder(self, path: str) -> None:
        """Remove a folder. Raise an error if it is not empty."""
        ...

    def close(self) -> None: ...


class _Folders:
    """The folders that threads of this process put files into, or remove.

    A protocol may have no request that removes an empty folder alone. A file that is put while its
    folder is removed would then be missing for a moment.

    Thread safety: any thread may call all methods.
    """

    def __init__(self) -> None:
        self._condition = threading.Condition()
        self._uses = Counter[str]()
        self._removals: set[str] = set()

    @contextmanager
    def use(self, path: str) -> Generator[None]:
        """Keep the folders above ``path`` from being removed inside of the block."""
        folders = {str(folder) for folder in PurePosixPath(path).parents}
        with self._condition:
            self._condition.wait_for(lambda: not folders & self._removals)
            self._uses.update(folders)
        try:
            yield
        finally:
            with self._condition:
                self._uses -= Counter(folders)

    @contextmanager
    def removal(self, folder: str) -> Generator[bool]:
        """Yield whether no file is put into ``folder``. If so, puts wait for the end of the
        block.
        """
        with self._condition:
            is_alone = not self._uses[folder] and folder not in self._removals
            if is_alone:
                self._removals.add(folder)
        try:
            yield is_alone
        finally:
            if is_alone:
                with self._condition:
                    self._removals.remove(folder)
                    self._condition.notify_all()


class _Connections:
    """The connections to one server, at most ``_MOST_CONNECTIONS`` of them.

    Thread safety: any thread may call all methods.
    """

    def __init__(self, connect: Callable[[], Connection]) -> None:
        self._connect = connect
        self._slots = threading.BoundedSemaphore(_MOST_CONNECTIONS)
        self._lock = threading.Lock()
        self._idle: list[Connection] = []

    @contextmanager
    def borrow(self, key: str) -> Generator[Connection]:
        """Yield a connection that no other thread uses.

        If the block raises another error than ``ObjectNotFound`` or ``ObjectExists``, the state of
        the connection is unknown, and it is closed. The idle connections are then closed too, since
        a server that was restarted has dropped all of them.
        """
        if not self._slots.acquire(timeout=WAIT_SECONDS):
            raise TransientStorageError(
                key, f"all connections were busy for {WAIT_SECONDS} seconds"
            )
        try:
            connection = self._take() or self._connect()
            try:
                yield connection
            except (ObjectNotFound, ObjectExists):
                self._put_back(connection)
                raise
            except BaseException:
                _close_quietly(connection)
                self.close()
                raise
            self._put_back(connection)
        finally:
            self._slots.release()

    def close(self) -> None:
        """Close the connections that are idle."""
        with self._lock:
            idle, self._idle = self._idle, []
        for connection in idle:
            _close_quietly(connection)

    def _take(self) -> Connection | None:
        with self._lock:
            return self._idle.pop() if self._idle else None

    def _put_back(self, connection: Connection) -> None:
        with self._lock:
            self._idle.append(connection)


def _close_quietly(connection: Connection) -> None:
    with suppress(Exception):  # A failed close needs no further action
        connection.close()


def open_file_server(url: str, options: Mapping[str, object]) -> FileServerBackend:
    """Return the backend for a folder of a file server. The server is not contacted yet.

    Args:
        url: ``sftp://``, ``smb://`` or ``ftp://user@host:port/path``, or ``webdav://path``.
        options: The options of the file system of fsspec for this scheme, such as ``username`` and
            ``password``; for WebDAV ``base_url`` and ``auth``. ``timeout`` is how many seconds a
            connection waits for the server.

    Raises:
        MissingExtra: The package of this scheme is not installed.
        ConfigError: The URL or an option is invalid.
    """
    from fsspec import get_filesystem_class

    scheme, clean_url = url.partition("://")[0].lower(), clean(url)
    try:
        fs_class: Any = get_filesystem_class(scheme)
        connection_class = cast(type[Connection], pkgutil.resolve_name(FILE_SERVERS[scheme]))
        settings = {**connection_class.DEFAULTS, **fs_class._get_kwargs_from_urls(url), **options}
        root = str(fs_class._strip_protocol(url))
    except ImportError as error:
        raise missing_extra(clean_url, error) from error
    except ValueError as error:
        raise ConfigError(f"{clean_url!r} cannot be opened: {clean(str(error))}") from None
    secrets = secrets_of(settings)
    parameters = dict(list(signature(fs_class.__init__).parameters.items())[1:])  # Without ``self``
    if (unknown := settings.keys() - parameters.keys()) and not connection_class.PASSES_OPTIONS:
        raise ConfigError(f"{clean_url!r} does not take the option {min(unknown)!r}")
    required = {
        parameter.name
        for parameter in parameters.values()
        if parameter.default is parameter.empty and not _is_variadic(parameter)
    }
    if missing := required - settings.keys():
        name = min(missing)
        raise ConfigError(
            f"{clean_url!r} needs the option {name!r}: give Tier({clean_url!r}, options="
            f"{{{name!r}: ...}}), or `options = {{ {name} = ... }}` to this tier in ckpt.toml"
        )

    def connect() -> Connection:
        try:
            return connection_class(fs_class(skip_instance_cache=True, **settings))
        except (TypeError, ValueError) as error:  # An option that the client does not take
            if isinstance(error.__cause__, OSError):
                raise  # The client of SMB says so that the server does not answer
            raise ConfigError(f"{clean_url!r}: {clean(str(error), secrets)}") from None

    return FileServerBackend(connect, f"/{root.strip('/')}", clean_url, secrets=secrets)


def _is_variadic(parameter: Parameter) -> bool:
    return parameter.kind in (Parameter.VAR_POSITIONAL, Parameter.VAR_KEYWORD)


class FileServerBackend:
    """A folder of a file server as a store.

    Thread safety: any thread may call all methods.

    Args:
        connect: Returns a new connection to the server.
        root: The path of the root on the server.
        url: The URL of the root for display, without credentials.
        secrets: Strings that must not appear in messages.
    """

    def __init__(
        self,
        connect: Callable[[], Connection],
        root: str,
        url: str,
        *,
        secrets: Sequence[str] = (),
    ) -> None:
        self._root, self.url, self._secrets = root.rstrip("/"), url, tuple(secrets)
        self._connections = _Connections(connect)
        self._folders = _Folders()
        self.capabilities = Capabilities(
            put_if_absent=False,
            shared=True,
            part_bytes=_PART_BYTES,
            max_concurrency=_MOST_CONNECTIONS,
        )

    def put(self, key: str, parts: Sequence[Buffer], *, if_absent: bool = False) -> ObjectInfo:
        path, views = self._path(key), [memoryview(part).cast("B") for part in parts]
        if if_absent and is_there(self, key):
            raise ObjectExists(key)
        with self._connection(key) as connection, self._folders.use(path):
            _write_and_rename(connection, path, views)
        return ObjectInfo(key=key, size=sum(view.nbytes for view in views))

    def upload(self, key: str, size: int) -> Upload:
        return PutUpload(self, check_key(key), size)

    def read_into(self, key: str, offset: int, out: memoryview) -> None:
        if not out.nbytes:
            self.head(key)
            return
        path = self._path(key)
        with self._connection(key) as connection:
            count = connection.read(path, offset, out.cast("B"))
        check_read(key, offset, count, out.nbytes)

    def head(self, key: str) -> ObjectInfo:
        path = self._path(key)
        with self._connection(key) as connection:
            file = connection.stat(path)
        return ObjectInfo(key=key, size=file.size or 0, modified=file.modified)

    def list(self, prefix: str) -> Iterator[ObjectInfo]:
        start = posixpath.dirname(check_prefix(prefix))
        folders = [start]
        while folders:
            folder = folders.pop()
            for entry in self._entries(folder, prefix):
                key = f"{folder}/{entry.name}".lstrip("/")
                if entry.size is None:
                    if f"{key}/".startswith(prefix):
                        folders.append(key)
                elif key.startswith(prefix):
                    yield ObjectInfo(key=key, size=entry.size, modified=entry.modified)

    def folders(self, prefix: str) -> Iterator[str]:
        for entry in self._entries(check_prefix(prefix).removesuffix("/"), prefix):
            if entry.size is None:
                yield entry.name

    def delete(self, key: str) -> None:
        path = self._path(key)
        folder = posixpath.dirname(path)
        with self._connection(key) as connection:
            try:
                with translate_errors(path):
                    connection.remove(path)
            except ObjectNotFound:
                with suppress(StorageError), translate_errors(folder):
                    _remove_abandoned(connection, folder)
            self._remove_empty(connection, folder)

    def close(self) -> None:
        self._connections.close()

    def _entries(self, folder: str, prefix: str) -> Sequence[Entry]:
        """Return the entries of a folder without temporary ones. ``prefix`` is for errors."""
        # An empty path stands for the folder in which the server puts its users.
        path = f"{self._root}/{folder}".rstrip("/") or "/"
        try:
            with self._connection(prefix) as connection:
                entries = connection.entries(path)
        except ObjectNotFound:
            return []
        return [entry for entry in entries if not is_hidden(entry.name)]

    def _remove_empty(self, connection: Connection, folder: str) -> None:
        """Remove ``folder`` and its parents inside of the root, up to the first one in use."""
        while folder.startswith(f"{self._root}/") and folder != "/":
            with (
                suppress(StorageError),
                translate_errors(folder),
                self._folders.removal(folder) as is_alone,
            ):
                if is_alone:
                    connection.remove_folder(folder)
                    folder = posixpath.dirname(folder)
                    continue
            return  # The folder is in use or is not empty, or the server has refused

    def _path(self, key: str) -> str:
        return f"{self._root}/{check_key(key)}"

    @contextmanager
    def _connection(self, key: str) -> Generator[Connection]:
        """Yield a connection. Errors are raised as storage errors about ``key``."""
        translate = partial(translate_errors, key, secrets=self._secrets)
        try:
            # The inner translation tells the connections what happened, and the outer one is for
            # the attempt to connect.
            with translate(), self._connections.borrow(key) as connection, translate():
                yield connection
        except StorageError as error:
            if error.key == key:
                raise
            # An error about a path on the server becomes one about ``key``.
            raise type(error)(key, clean(error.detail, self._secrets)) from None


def _write_and_rename(connection: Connection, path: str, parts: Sequence[memoryview]) -> None:
    """Write a temporary file in the folder of ``path``, and rename it to ``path``. The folder and
    its parents are created if the server says that they are missing.
    """
    folder = posixpath.dirname(path)
    temporary = temporary_beside(path)
    try:
        for _ in range(_TRIES):
            try:
                with translate_errors(path):
                    connection.write(temporary, parts)
                    connection.replace(temporary, path)
                return
            except ObjectNotFound:
                _make_folders(connection, folder)
            except TransientStorageError as error:
                if _is_full(connection, temporary):
                    raise OutOfSpace(path, error.detail) from None
                raise
        raise TransientStorageError(path, f"its folder {folder!r} is removed again and again")
    except BaseException:
        with suppress(Exception):
            connection.remove(temporary)
        raise


def _remove_abandoned(connection: Connection, folder: str) -> None:
    """Remove the temporary files from ``folder`` that were last written to more than an hour ago,
    if nothing else is in it.
    """
    entries = connection.entries(folder)
    if all(entry.size is not None and TEMPORARY.fullmatch(entry.name) for entry in entries):
        for entry in entries:
            if entry.modified and is_abandoned(entry.modified):
                connection.remove(f"{folder}/{entry.name}")


def _is_full(connection: Connection, temporary: str) -> bool:
    """Return True if the server answers and takes an empty file, but does not take a small file
    either, after it did not take all bytes of ``temporary``.

    Some servers and protocols have no code for a full disk: they say "failure", or only close the
    connection of the transfer.
    """
    probe = temporary_beside(temporary)
    try:
        with suppress(ObjectNotFound), translate_errors(temporary):
            connection.stat(temporary)  # Fails if the server does not answer
        with translate_errors(probe):
            connection.write(probe, [])  # Fails too if the disk fails for another reason
    except StorageError:
        return False
    try:
        with translate_errors(probe):
            connection.write(probe, [memoryview(bytes(_PROBE_BYTES))])
    except StorageError:
        return True
    finally:
        with suppress(Exception):
            connection.remove(probe)
    return False


def _make_folders(connection: Connection, folder: str) -> None:
    """Create ``folder``, and before it its parents if the server says that they are missing."""
    for _ in range(_TRIES):
        try:
            with translate_errors(folder):
                connection.make_folder(folder)
            return
        except ObjectNotFound:
            parent = posixpath.dirname(folder)
            if parent in ("", "/", folder):
                raise
            _make_folders(connection, parent)
