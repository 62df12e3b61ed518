"""The backend for folders, on a local disk, tmpfs, NFS or Lustre.

An object is a file. The backend writes the file under a temporary name in the folder of the object,
forces its bytes to the medium with fsync, and renames it. Then it forces the folder, and all
folders above it up to the root, to the medium. A crash before the rename leaves a temporary file,
which ``list`` does not show.
"""

from __future__ import annotations

import errno
import os
import stat
from collections.abc import Generator, Iterator, Mapping, Sequence
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from typing import Final, Literal
from urllib.parse import unquote, urlsplit

from ckpt.errors import (
    AccessDenied,
    ConfigError,
    LinkRefused,
    ObjectExists,
    ObjectNotFound,
    RootLost,
    StorageError,
)
from ckpt.errors.storage import storage_errors
from ckpt.storage.api import (
    Buffer,
    Capabilities,
    ObjectInfo,
    UnfinishedWrite,
    Upload,
    check_key,
    check_prefix,
    check_read,
    check_written,
)
from ckpt.storage.group import FILE_MODE, FOLDER_MODE, is_shared, share_file, share_folder
from ckpt_backends.folder.direct_io import (
    ALIGNMENT,
    DirectWriter,
    read_at,
    rename_if_absent,
    reserve,
    write_all,
)
from ckpt_backends.folder.lustre import Striping, stripe_count
from ckpt_backends.folder.mounts import is_fuse, is_network, keeps_inode_numbers, kind_of
from ckpt_backends.folder.places import are_apart, mark_of, place_of
from ckpt_backends.temporary import TEMPORARY, is_abandoned, is_hidden, temporary_beside

_PART_BYTES: Final = 8 << 20
_TRIES: Final = 32
_BOOL_OPTIONS: Final = frozenset({"put_if_absent", "shared", "direct", "reserve"})
_NOWHERE: Final = "nowhere"
"""What stands for the identity of a root that does not exist. No root has it."""


def open_posix(url: str, options: Mapping[str, object]) -> PosixBackend:
    """Return the backend whose root is the folder ``url``. The first write creates the folder.

    Args:
        url: The root, as a path, in which ``~`` is expanded, or as a ``file://`` URL.
        options: ``shared`` (bool; whether all nodes see the same folder; by default true on a
            network file system), ``put_if_absent`` (bool, default true; false for file systems that
            can neither link nor rename without replacing), ``direct`` (bool, default true: whether
            files are written and read with O_DIRECT), ``reserve`` (bool: whether the space of an
            upload is reserved at its start; by default false on btrfs, which does not compress
            reserved space, and true elsewhere), ``stripe_count`` (int: see `Striping`).

    Raises:
        ConfigError: The root is a file, the URL names another host or has a query, the path is
            empty or contains a null character, or an option is unknown or has a wrong value.
    """
    flags = {name: value for name, value in options.items() if name != "stripe_count"}
    for name, value in flags.items():
        if name not in _BOOL_OPTIONS or not isinstance(value, bool):
            raise ConfigError(
                f"a folder takes the options {', '.join(sorted(_BOOL_OPTIONS))} (true or false) "
                f"and stripe_count (a number), not {name} of type {type(value).__name__}"
            )
    count = stripe_count(options["stripe_count"]) if "stripe_count" in options else None
    root = _path_of(url)
    if os.path.lexists(root) and not os.path.isdir(root):
        raise ConfigError(
            f"{root} is not a folder: give the folder of a run, or a path that is free for a new "
            f"one; `ckpt import {root} ROOT --step N` makes a step of a file of another program"
        )
    kind = kind_of(root)
    return PosixBackend(
        root,
        is_shared=bool(flags["shared"]) if "shared" in flags else is_network(kind),
        put_if_absent=bool(flags.get("put_if_absent", True)),
        direct=bool(flags.get("direct", True)),
        reserves=bool(flags.get("reserve", kind != "btrfs")),
        striping=Striping(root, count) if kind == "lustre" and count != 0 else None,
    )


class PosixBackend:
    """A folder as a store.

    The backend remembers the *mark* of the folder, a text that identifies it. So it notices when
    its path names another folder later (see ``is_replaced``). Only unfinished uploads keep
    descriptors open between calls. A thread that reads may keep a buffer of 2 MiB until the thread
    ends.

    Thread safety: several threads may call all methods at the same time.
    """

    def __init__(
        self,
        root: str,
        *,
        is_shared: bool,
        put_if_absent: bool = True,
        direct: bool = True,
        reserves: bool = True,
        striping: Striping | None = None,
    ) -> None:
        self.url = self._root = root
        self._direct, self._reserves = direct, reserves
        self._striping = striping
        self.capabilities = Capabilities(
            put_if_absent=put_if_absent,
            shared=is_shared,
            part_bytes=_PART_BYTES,
            alignment=ALIGNMENT,
            max_concurrency=8,
            takes_parts=True,
        )
        self._root_synced = False
        self._root_mark: str | None = None
        self._is_group_shared = False
        self._remember_root()

    def identity(self) -> str:
        """Create the root if it does not exist, and return its device and inode number.

        The resolved path replaces an inode number that may change.
        """
        with storage_errors("", missing=StorageError):
            self._make_folders(self._root)
            status = os.stat(self._root)
        keeps_inode = keeps_inode_numbers(self._root)
        return f"{status.st_dev}:{status.st_ino if keeps_inode else self._resolved_root()}"

    def place(self) -> str:
        with storage_errors("", missing=StorageError):
            if not os.path.isdir(self._root):  # A job that only reads forces nothing to the medium
                self._make_folders(self._root)
            return place_of(self._root)

    def is_elsewhere(self, place: str) -> bool:
        own_place = self.place()
        return own_place != place and are_apart(own_place, place)

    def mark(self) -> str:
        self.identity()
        self._remember_root()
        return self._root_mark or ""

    def hold(self, mark: str) -> None:
        self._root_mark = mark or mark_of(self._root) or _NOWHERE

    def is_replaced(self) -> bool:
        return self._root_mark is not None and self._root_mark != mark_of(self._root)

    def _remember_root(self) -> None:
        """Remember the identity of the root if it exists and none is remembered yet."""
        if self._root_mark is None:
            self._root_mark = mark_of(self._root)
            with suppress(OSError):
                self._is_group_shared = is_shared(os.stat(self._root))

    def free_bytes(self) -> int:
        """Return the bytes that this user can still write to the file system of the root.

        If the root does not exist yet, the nearest existing folder above it is examined.
        """
        folder = self._resolved_root()
        while not os.path.isdir(folder) and folder != "/":
            folder = os.path.dirname(folder)
        with storage_errors("", missing=StorageError):
            status = os.statvfs(folder)
        return status.f_bavail * status.f_frsize

    @contextmanager
    def report_full_disk(self, nbytes: int) -> Generator[None]:
        """Turn EIO into ENOSPC if a mount by FUSE has less than ``nbytes`` free, which is the size
        of the file that the block writes. sshfs reports a full disk by EIO.
        """
        try:
            yield
        except OSError as error:
            if error.errno == errno.EIO and is_fuse(self._root):
                with suppress(StorageError):
                    if self.free_bytes() < nbytes:
                        raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC)) from error
            raise

    def put(self, key: str, parts: Sequence[Buffer], *, if_absent: bool = False) -> ObjectInfo:
        target = self._path_to_write(check_key(key))
        with storage_errors(key, missing=StorageError):
            # This check only avoids a useless write. The rename below decides which writer wins.
            if if_absent and os.path.lexists(target):
                raise ObjectExists(key)
            temporary = temporary_beside(target)
            fd = self._create(temporary)
            try:
                try:
                    with self.report_full_disk(sum(memoryview(part).nbytes for part in parts)):
                        size = write_all(fd, parts)
                        os.fsync(fd)
                finally:
                    os.close(fd)
                self.publish(
                    temporary, target, if_absent=if_absent and self.capabilities.put_if_absent
                )
            except BaseException:
                self.remove_temporary(temporary)
                raise
        return ObjectInfo(key=key, size=size)

    def upload(self, key: str, size: int) -> Upload:
        target = self._path_to_write(check_key(key))
        with storage_errors(key, missing=StorageError):
            temporary = temporary_beside(target)
            fd = self._create(temporary)
            try:
                if self._reserves:
                    reserve(fd, size)
                writer = DirectWriter(temporary, fd, size, direct=self._direct)
            except BaseException:
                os.close(fd)
                self.remove_temporary(temporary)
                raise
        return _PosixUpload(self, key, _Paths(temporary, target), writer, size)

    def read_into(self, key: str, offset: int, out: memoryview) -> None:
        self.read_parts(key, offset, [out])

    def read_parts(self, key: str, offset: int, outs: Sequence[memoryview]) -> None:
        path = self._path_to_read(check_key(key))
        # Refuse a named pipe, since opening it would wait for a writer.
        self._file_status(key, path)
        parts = [out.cast("B") for out in outs]
        with storage_errors(key):
            count = read_at(path, offset, parts, direct=self._direct)
        check_read(key, offset, count, sum(part.nbytes for part in parts))

    def head(self, key: str) -> ObjectInfo:
        status = self._file_status(key, self._path_to_read(check_key(key)))
        return ObjectInfo(key=key, size=status.st_size, modified=status.st_mtime)

    def list(self, prefix: str) -> Iterator[ObjectInfo]:
        folder = check_prefix(prefix).rpartition("/")[0]
        yield from self._walk(folder, prefix)

    def folders(self, prefix: str) -> Iterator[str]:
        folder = check_prefix(prefix).removesuffix("/")
        for entry in self._entries(folder):
            if _type(entry, folder) == "folder":
                yield entry.name

    def delete(self, key: str) -> None:
        path = self._path_to_write(check_key(key))
        with (
            storage_errors(key),
            suppress(FileNotFoundError, NotADirectoryError, IsADirectoryError),
        ):
            os.unlink(path)
            _sync_folder(os.path.dirname(path))
        _remove_abandoned(os.path.dirname(path))
        self._remove_empty(os.path.dirname(path))

    def unfinished_writes(self, prefix: str) -> Iterator[UnfinishedWrite]:
        folder = check_prefix(prefix).removesuffix("/")
        for entry in self._entries(folder):
            key = f"{folder}/{entry.name}" if folder else entry.name
            if (kind := _type(entry, key)) == "folder":
                yield from self.unfinished_writes(f"{key}/")
            elif (
                kind == "file"
                and (match := TEMPORARY.fullmatch(entry.name))
                and (status := _status(entry, key))  # None if the write has ended meanwhile
            ):
                yield UnfinishedWrite(
                    key=f"{folder}/{match['name']}" if folder else match["name"],
                    name=key,
                    size=status.st_blocks * 512,
                    modified=status.st_mtime,
                    abandoned=is_abandoned(status.st_mtime),
                )

    def discard(self, write: UnfinishedWrite) -> None:
        path = self._path_to_write(write.name)
        with storage_errors(write.key), suppress(FileNotFoundError, NotADirectoryError):
            os.unlink(path)
        self._remove_empty(os.path.dirname(path))

    def close(self) -> None:
        """Do nothing, since nothing stays open between calls."""

    def _file_status(self, key: str, path: str) -> os.stat_result:
        """Return the status of the file at ``path``. Raise ``ObjectNotFound`` if it is no file."""
        with storage_errors(key):
            status = os.stat(path, follow_symlinks=False)
        if not stat.S_ISREG(status.st_mode):
            raise ObjectNotFound(key, "not a file")
        return status

    def _path_to_read(self, key: str) -> str:
        """Return the path to read ``key`` from, with symbolic links resolved.

        Raises:
            AccessDenied: The folder of the object is outside of the root, through a link.
            LinkRefused: The object itself is a link that leads out of the root.
        """
        path = os.path.join(self._root, key)
        self._check_inside(key, os.path.realpath(os.path.dirname(path)))
        try:
            return self._check_inside(key, os.path.realpath(path))
        except AccessDenied:
            raise LinkRefused(key) from None

    def _path_to_write(self, key: str) -> str:
        """Return the path to write ``key`` to, with symbolic links in its folder resolved.

        If the object itself is a link, this link is not resolved, since a rename or an unlink acts
        on the link and not on its target.

        Raises:
            AccessDenied: The folder of the object is outside of the root, through a link.
        """
        folder, name = os.path.split(os.path.join(self._root, key))
        return os.path.join(self._check_inside(key, os.path.realpath(folder)), name)

    def _resolved_root(self) -> str:
        """Return the resolved path of the root, with which all resolved paths of objects begin."""
        return os.path.realpath(self._root)

    def _check_inside(self, key: str, path: str) -> str:
        """Return ``path`` if it is in the root. Otherwise raise ``AccessDenied`` about ``key``."""
        root = self._resolved_root()
        if path != root and not path.startswith(root.rstrip("/") + "/"):
            raise AccessDenied(key, "a symbolic link leads out of the root")
        return path

    def _create(self, path: str) -> int:
        """Create a new file and its folder, and return a descriptor.

        A concurrent ``delete`` may remove the folder before the file is in it. The folder and the
        file are then created again, with up to ``_TRIES`` attempts in total.
        """
        for _ in range(_TRIES - 1):
            with suppress(FileNotFoundError):
                return self._create_once(path)
        return self._create_once(path)

    def _create_once(self, path: str) -> int:
        """Do what ``_create`` does, with one attempt."""
        self._make_folders(os.path.dirname(path))
        flags = os.O_RDWR | os.O_CREAT | os.O_EXCL | os.O_NOFOLLOW | os.O_CLOEXEC
        descriptor = os.open(path, flags, FILE_MODE)
        try:
            if self._is_group_shared:
                share_file(descriptor)
        except OSError:
            os.close(descriptor)
            raise
        return descriptor

    def _make_folders(self, folder: str) -> None:
        """Create ``folder`` and the folders above it that are missing. Force the names of those
        outside of the root to the medium. ``publish`` forces the others, together with the file
        that is the first to need them.

        If ``folder`` is new, also set its striping.

        Raises:
            RootLost: The root existed earlier and is missing now.
            FileNotFoundError: Another thread or process removed a folder meanwhile.
            NotADirectoryError: A file has the path of one of the folders.
        """
        # Read this before the test of the folders, since another thread may create the root after
        # the test.
        mark = self._root_mark
        missing: list[str] = []
        while not os.path.isdir(folder):
            missing.append(folder)
            folder = os.path.dirname(folder)
        # Paths of objects are resolved (``_path_to_write``), and the root itself may be a link.
        if missing and mark is not None and {self._root, self._resolved_root()} & {*missing}:
            raise RootLost("")  # Do not create the root again on the disk below its mount point
        for path in reversed(missing):
            with suppress(FileExistsError):
                os.mkdir(path, FOLDER_MODE)
                if (
                    path.startswith(self._resolved_root().rstrip("/") + "/")
                    and self._is_group_shared
                ):
                    share_folder(path)
                # The caller writes files to the first folder.
                if path == missing[0] and self._striping is not None:
                    self._striping.apply(path)
            # If another thread has removed the folder, FileNotFoundError makes ``_create`` repeat.
            if not stat.S_ISDIR(os.stat(path).st_mode):
                raise NotADirectoryError(errno.ENOTDIR, f"{path} is not a folder")
        prefix = self._resolved_root().rstrip("/") + "/"
        parents = [os.path.dirname(path) for path in missing if not path.startswith(prefix)]
        if not self._root_synced or parents:
            self._sync_root(parents)

    def _sync_root(self, parents: Sequence[str]) -> None:
        """Force the entry of the root in the folder above it, and the entries in ``parents``, to
        the medium. Then remember the identity of the root if none is remembered yet.

        The entry of the root is forced also if another process has created the root, since that
        process may not have forced it yet.
        """
        for folder in {os.path.dirname(self._resolved_root()), *parents}:
            # This process has made no entry in a folder that it may not open.
            with suppress(PermissionError):
                _sync_folder(folder)
        self._root_synced = True
        self._remember_root()

    def publish(self, temporary: str, target: str, *, if_absent: bool) -> None:
        """Rename the file ``temporary`` to ``target``, and make the new name durable.

        Raises:
            FileExistsError: ``if_absent`` is True and ``target`` exists.
        """
        (rename_if_absent if if_absent else os.rename)(temporary, target)
        root = self._resolved_root().rstrip("/") + "/"
        folder = os.path.dirname(target)
        _sync_folder(folder)
        # Another writer may have created these folders without having forced them yet.
        while folder.startswith(root):
            folder = os.path.dirname(folder)
            _sync_folder(folder)

    def remove_temporary(self, temporary: str) -> None:
        """Remove a temporary file, and the folders that this leaves empty. Ignore the errors of
        both operations.
        """
        with suppress(OSError):
            os.unlink(temporary)
        self._remove_empty(os.path.dirname(temporary))

    def _remove_empty(self, folder: str) -> None:
        """Remove ``folder`` and the folders between it and the root, as long as they are empty. The
        root itself is not removed.
        """
        # A folder is not empty, or is already gone, or the store is closed.
        with suppress(OSError, StorageError):
            root = self._resolved_root().rstrip("/") + "/"
            while folder.startswith(root):
                os.rmdir(folder)
                folder = os.path.dirname(folder)

    def _walk(self, folder: str, prefix: str) -> Iterator[ObjectInfo]:
        """Yield the objects in ``folder`` and below it whose key starts with ``prefix``."""
        for entry in self._entries(folder):
            key = f"{folder}/{entry.name}" if folder else entry.name
            if (kind := _type(entry, key)) == "folder":
                if prefix.startswith(f"{key}/") or f"{key}/".startswith(prefix):
                    yield from self._walk(key, prefix)
            elif (
                kind == "file"
                and key.startswith(prefix)
                and not is_hidden(entry.name)
                and (status := _status(entry, key))  # None if the file was deleted meanwhile
            ):
                yield ObjectInfo(key=key, size=status.st_size, modified=status.st_mtime)

    def _entries(self, folder: str) -> Sequence[os.DirEntry[str]]:
        """Return the entries of a folder of the store; none if the folder does not exist."""
        path = self._path_to_read(folder)
        with (
            storage_errors(folder),
            suppress(FileNotFoundError, NotADirectoryError),
            os.scandir(path) as entries,
        ):
            return list(entries)
        return []


def _type(entry: os.DirEntry[str], key: str) -> Literal["folder", "file", ""]:
    """Return the type of an entry of a folder; empty for a link and all other types. Errors name
    ``key``.
    """
    with storage_errors(key):
        if entry.is_dir(follow_symlinks=False):
            return "folder"
        return "file" if entry.is_file(follow_symlinks=False) else ""


def _status(entry: os.DirEntry[str], key: str) -> os.stat_result | None:
    """Return the status of an entry of a folder; None if the entry is gone. Errors name ``key``."""
    with storage_errors(key), suppress(FileNotFoundError):
        return entry.stat(follow_symlinks=False)
    return None


@dataclass(frozen=True, slots=True)
class _Paths:
    """The paths of the file of an upload, before and after ``finish``."""

    temporary: str
    target: str


class _PosixUpload:
    """The upload of a file, which has a temporary name until ``finish``.

    Thread safety: several threads may call ``write`` at the same time. See ``Upload`` for the other
    methods.
    """

    def __init__(
        self, backend: PosixBackend, key: str, paths: _Paths, writer: DirectWriter, size: int
    ) -> None:
        self._backend, self._key, self._size = backend, key, size
        self._paths, self._writer = paths, writer
        self.part_bytes = _PART_BYTES
        self._part_sizes: dict[int, int] = {}
        self._failure: StorageError | None = None

    def write(self, offset: int, data: memoryview) -> None:
        data = data.cast("B")
        if offset < 0 or offset + data.nbytes > self._size:
            raise StorageError(
                self._key, f"bytes {offset} to {offset + data.nbytes} of an upload of {self._size}"
            )
        with (
            storage_errors(self._key, missing=StorageError),
            self._backend.report_full_disk(self._size),
        ):
            self._writer.write(offset, data)
        self._part_sizes[offset] = data.nbytes

    def finish(self, size: int | None = None) -> ObjectInfo:
        """Make the file durable and visible.

        After any error, the temporary file is removed, since its bytes cannot be trusted after a
        failed fsync. After a ``StorageError``, each further call of ``finish`` raises an equal
        error.
        """
        if self._failure is not None:
            raise type(self._failure)(self._key, self._failure.detail)
        try:
            size = check_written(self._key, sum(self._part_sizes.values()), self._size, size)
            with storage_errors(self._key, missing=StorageError):
                with self._backend.report_full_disk(size):
                    self._writer.sync(size)
                    self._writer.close()
                self._backend.publish(self._paths.temporary, self._paths.target, if_absent=False)
        except BaseException as error:
            if isinstance(error, StorageError):
                # Keep a new error, since the traceback of this one would keep many objects alive.
                self._failure = type(error)(self._key, error.detail)
            self.abort()
            raise
        return ObjectInfo(key=self._key, size=size)

    def abort(self) -> None:
        with suppress(OSError):
            self._writer.close()
        self._backend.remove_temporary(self._paths.temporary)


def _path_of(url: str) -> str:
    """Return the absolute path of a plain path or a ``file://`` URL, with ``~`` expanded.

    Raises:
        ConfigError: The URL names another host or has a query, or the path is empty or contains a
            null character.
    """
    if url.lower().startswith("file://"):
        split = urlsplit(url, allow_fragments=False)
        if split.netloc not in ("", "localhost"):
            raise ConfigError(f"{url!r} names a host: write file:///path")
        if split.query:
            raise ConfigError(f"{url!r} has a '?': write %3F, or the path without file://")
        url = unquote(split.path, errors="surrogateescape")
    if not url or "\0" in url:
        raise ConfigError("a folder must be named, without null characters")
    return os.path.abspath(os.path.expanduser(url))


def _remove_abandoned(folder: str) -> None:
    """Remove abandoned temporary files from ``folder`` if it holds nothing but temporary files.

    A crash leaves such files, which may have tens of GiB. ``is_abandoned`` says
    from which age on a file is abandoned.
    """
    with suppress(OSError), os.scandir(folder) as entries:
        files = list(entries)
        if all(TEMPORARY.fullmatch(entry.name) for entry in files):
            for entry in files:
                if is_abandoned(entry.stat(follow_symlinks=False).st_mtime):
                    os.unlink(entry.path)


def _sync_folder(folder: str) -> None:
    """Force the entries of a folder to the medium."""
    fd = os.open(folder, os.O_RDONLY | os.O_DIRECTORY | os.O_CLOEXEC)
    try:
        os.fsync(fd)
    except OSError as error:
        if error.errno != errno.EINVAL:  # Some FUSE file systems have no fsync for folders
            raise
    finally:
        os.close(fd)
