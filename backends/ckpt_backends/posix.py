"""A folder as a store: local disk, tmpfs, NFS, Lustre.

How an object appears: it is written under a temporary name in its own folder, forced to the medium,
renamed, and the folder and all folders above it up to the root are forced too. A crash before the
rename leaves a temporary file, which no listing shows.
"""

from __future__ import annotations

import errno
import os
import re
import secrets
import stat
import time
from collections.abc import Iterator, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass
from typing import Final
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
from ckpt.storage.api import (
    Buffer,
    Capabilities,
    ObjectInfo,
    Unfinished,
    Upload,
    check_key,
    check_prefix,
    check_read,
    check_written,
)
from ckpt_backends.direct_io import (
    ALIGNMENT,
    DirectWriter,
    read_at,
    rename_if_absent,
    reserve,
    write_all,
)
from ckpt_backends.lustre import Striping, stripe_count
from ckpt_backends.mounts import kind_of, on_network
from ckpt_backends.oserrors import mapped

_PART_BYTES: Final = 8 << 20
_ABANDONED_SECONDS: Final = 3600.0  # A live upload touches its file with every part
_NAME_BYTES: Final = 255
_TRIES: Final = 32
_OURS: Final = re.compile(r"\.(.+)\.[0-9a-f]{12}(?:\.link)?\.tmp", re.DOTALL)
_FLAGS: Final = frozenset({"put_if_absent", "shared", "direct"})


def open_posix(url: str, options: Mapping[str, object]) -> PosixBackend:
    """Open the folder ``url`` (a path, ``~`` expanded, or ``file://``). The first write creates it.

    Args:
        url: The root.
        options: ``shared`` (bool; by default whether the folder is on a network file system),
            ``put_if_absent`` (bool, default true; false for file systems that can neither link nor
            rename without replacing), ``direct`` (bool, default true: use O_DIRECT),
            ``stripe_count`` (int: see `Striping`).

    Raises:
        ConfigError: The root is a file, or an option is unknown or has a wrong value.
    """
    flags = {name: value for name, value in options.items() if name != "stripe_count"}
    for name, value in flags.items():
        if name not in _FLAGS or not isinstance(value, bool):
            raise ConfigError(
                f"a folder takes the options {', '.join(sorted(_FLAGS))} (true or false) and "
                f"stripe_count (a number), not {name} of type {type(value).__name__}"
            )
    count = stripe_count(options["stripe_count"]) if "stripe_count" in options else None
    root = _path_of(url)
    if os.path.lexists(root) and not os.path.isdir(root):
        raise ConfigError(f"{root} is not a folder: name a folder, or a path that is free")
    return PosixBackend(
        root,
        shared=bool(flags["shared"]) if "shared" in flags else on_network(root),
        put_if_absent=bool(flags.get("put_if_absent", True)),
        direct=bool(flags.get("direct", True)),
        striping=Striping(root, count),
    )


class PosixBackend:
    """A folder as a store.

    It remembers which folder that was when it was opened, or when it was made.

    Thread safety: several threads may call all methods at the same time. No
    descriptor stays open between calls. A thread that reads keeps a buffer of 2 MiB until it ends.
    """

    def __init__(
        self,
        root: str,
        *,
        shared: bool,
        put_if_absent: bool = True,
        direct: bool = True,
        striping: Striping | None = None,
    ) -> None:
        self.url = self._root = root
        self._direct = direct
        self._striping = striping or Striping(root, 0)
        self.capabilities = Capabilities(
            put_if_absent=put_if_absent,
            shared=shared,
            part_bytes=_PART_BYTES,
            alignment=ALIGNMENT,
            max_concurrency=8,
            takes_parts=True,
        )
        self._root_synced = False
        self._first: str | None = None
        self._remember_root()

    def identity(self) -> str:
        """Return the device and the inode of the root, which is made if it does not exist."""
        with mapped("", missing=StorageError):
            self._make_folders(self._root)
            found = os.stat(self._root)
        return f"{found.st_dev}:{found.st_ino}"

    def is_replaced(self) -> bool:
        return self._first is not None and self._first != self._seen()

    def _remember_root(self) -> None:
        if self._first is None:
            self._first = self._seen()

    def _seen(self) -> str | None:
        """Return what identifies the root among the folders that have had its path.

        Numbers of network and user-space file systems may change while the folder stays, so they
        are left out.
        """
        with suppress(OSError):
            found = os.stat(self._root)
            return (
                kind_of(self._root) if on_network(self._root) else f"{found.st_dev}:{found.st_ino}"
            )
        return None

    def free_bytes(self) -> int:
        """Return what the file system leaves. A root that is not made yet is asked for above."""
        place = self._top()
        while not os.path.isdir(place) and place != "/":
            place = os.path.dirname(place)
        with mapped("", missing=StorageError):
            found = os.statvfs(place)
        return found.f_bavail * found.f_frsize

    def put(self, key: str, parts: Sequence[Buffer], *, if_absent: bool = False) -> ObjectInfo:
        target = self._writable(check_key(key))
        with mapped(key, missing=StorageError):
            # This spares the write in the common case. The rename below decides.
            if if_absent and os.path.lexists(target):
                raise ObjectExists(key)
            temporary = _temporary_beside(target)
            fd = self._create(temporary)
            try:
                try:
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
        target = self._writable(check_key(key))
        with mapped(key, missing=StorageError):
            temporary = _temporary_beside(target)
            fd = self._create(temporary)
            try:
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
        path = self._readable(check_key(key))
        self._file(key, path)  # Look first: opening a pipe would wait for a writer
        parts = [out.cast("B") for out in outs]
        with mapped(key):
            done = read_at(path, offset, parts, direct=self._direct)
        check_read(key, offset, done, sum(part.nbytes for part in parts))

    def head(self, key: str) -> ObjectInfo:
        return ObjectInfo(key=key, size=self._file(key, self._readable(check_key(key))).st_size)

    def list(self, prefix: str) -> Iterator[ObjectInfo]:
        folder = check_prefix(prefix).rpartition("/")[0]
        yield from self._walk(folder, prefix)

    def folders(self, prefix: str) -> Iterator[str]:
        folder = check_prefix(prefix).removesuffix("/")
        for entry in self._entries(folder):
            if entry.is_dir(follow_symlinks=False):
                yield entry.name

    def delete(self, key: str) -> None:
        path = self._writable(check_key(key))
        with mapped(key), suppress(FileNotFoundError, NotADirectoryError):
            os.unlink(path)
            _sync_folder(os.path.dirname(path))
        _remove_abandoned(os.path.dirname(path))
        self._remove_empty(os.path.dirname(path))

    def unfinished(self, prefix: str) -> Iterator[Unfinished]:
        folder = check_prefix(prefix).removesuffix("/")
        for entry in self._entries(folder):
            key = f"{folder}/{entry.name}" if folder else entry.name
            if entry.is_dir(follow_symlinks=False):
                yield from self.unfinished(f"{key}/")
            elif (ours := _OURS.fullmatch(entry.name)) and entry.is_file(follow_symlinks=False):
                with suppress(FileNotFoundError):  # The write may have ended meanwhile
                    found = entry.stat(follow_symlinks=False)
                    yield Unfinished(
                        key=f"{folder}/{ours[1]}" if folder else ours[1],
                        name=key,
                        size=found.st_blocks * 512,
                        modified=found.st_mtime,
                        abandoned=time.time() - found.st_mtime > _ABANDONED_SECONDS,
                    )

    def discard(self, found: Unfinished) -> None:
        path = self._writable(found.name)
        with mapped(found.key), suppress(FileNotFoundError, NotADirectoryError):
            os.unlink(path)
        self._remove_empty(os.path.dirname(path))

    def close(self) -> None:
        """Do nothing: nothing is held."""

    def _file(self, key: str, path: str) -> os.stat_result:
        with mapped(key):
            found = os.stat(path, follow_symlinks=False)
        if not stat.S_ISREG(found.st_mode):
            raise ObjectNotFound(key, "not a file")
        return found

    def _readable(self, key: str) -> str:
        path = os.path.join(self._root, key)
        self._inside(key, os.path.realpath(os.path.dirname(path)))
        try:
            return self._inside(key, os.path.realpath(path))
        except AccessDenied:
            raise LinkRefused(key) from None

    def _writable(self, key: str) -> str:
        """Return the path to write to. Its last name is not followed, since a rename or an unlink
        acts on the link itself.
        """
        folder, name = os.path.split(os.path.join(self._root, key))
        return os.path.join(self._inside(key, os.path.realpath(folder)), name)

    def _top(self) -> str:
        """Return the root as the paths below it are spelled."""
        return os.path.realpath(self._root)

    def _inside(self, key: str, path: str) -> str:
        root = self._top()
        if path != root and not path.startswith(root.rstrip("/") + "/"):
            raise AccessDenied(key, "a symbolic link leads out of the root")
        return path

    def _create(self, path: str) -> int:
        """Create a new file in a folder that a concurrent ``delete`` may just be removing."""
        for _ in range(_TRIES - 1):
            with suppress(FileNotFoundError):
                return self._create_once(path)
        return self._create_once(path)

    def _create_once(self, path: str) -> int:
        self._make_folders(os.path.dirname(path))
        return os.open(
            path, os.O_RDWR | os.O_CREAT | os.O_EXCL | os.O_NOFOLLOW | os.O_CLOEXEC, 0o600
        )

    def _make_folders(self, folder: str) -> None:
        first = self._first  # Before the look, since another thread may make the root after it
        missing: list[str] = []
        while not os.path.isdir(folder):
            missing.append(folder)
            folder = os.path.dirname(folder)
        if self._root in missing and first is not None:
            raise RootLost("")  # Never write below a mount point whose disk is gone
        for path in reversed(missing):
            with suppress(FileExistsError):
                os.mkdir(path, 0o700)
                if path == missing[0]:  # Its files are written next
                    self._striping.apply(path)
            # If another thread has removed it, FileNotFoundError makes the caller try again.
            if not stat.S_ISDIR(os.stat(path).st_mode):
                raise NotADirectoryError(errno.ENOTDIR, f"{path} is not a folder")
        if not self._root_synced or missing:
            self._sync_root([os.path.dirname(path) for path in missing])

    def _sync_root(self, parents: Sequence[str]) -> None:
        """Force the entry of the root, also if another process has just made it and not forced
        it yet.
        """
        for folder in {os.path.dirname(self._top()), *parents}:
            # This process did not make a parent that it may not open.
            with suppress(PermissionError):
                _sync_folder(folder)
        self._root_synced = True
        self._remember_root()

    def publish(self, temporary: str, target: str, *, if_absent: bool) -> None:
        """Give the file ``temporary`` its name ``target``, durably."""
        (rename_if_absent if if_absent else os.rename)(temporary, target)
        above = self._top().rstrip("/") + "/"
        folder = os.path.dirname(target)
        _sync_folder(folder)
        # Another writer may have made these folders, and not have synced them yet.
        while folder.startswith(above):
            folder = os.path.dirname(folder)
            _sync_folder(folder)

    def remove_temporary(self, temporary: str) -> None:
        """Remove a temporary file, and the folder that it leaves empty."""
        with suppress(OSError):
            os.unlink(temporary)
        self._remove_empty(os.path.dirname(temporary))

    def _remove_empty(self, folder: str) -> None:
        above = self._top().rstrip("/") + "/"
        with suppress(OSError):  # It is not empty, or is gone already
            while folder.startswith(above):
                os.rmdir(folder)
                folder = os.path.dirname(folder)

    def _walk(self, folder: str, prefix: str) -> Iterator[ObjectInfo]:
        for entry in self._entries(folder):
            key = f"{folder}/{entry.name}" if folder else entry.name
            if entry.is_dir(follow_symlinks=False):
                if prefix.startswith(f"{key}/") or f"{key}/".startswith(prefix):
                    yield from self._walk(key, prefix)
            elif (
                key.startswith(prefix)
                and entry.is_file(follow_symlinks=False)
                and not _is_hidden(entry.name)
            ):
                with suppress(FileNotFoundError):  # It may have been deleted meanwhile
                    found = entry.stat(follow_symlinks=False)
                    yield ObjectInfo(key=key, size=found.st_size, modified=found.st_mtime)

    def _entries(self, folder: str) -> Sequence[os.DirEntry[str]]:
        path = self._readable(folder)
        with (
            mapped(folder),
            suppress(FileNotFoundError, NotADirectoryError),
            os.scandir(path) as entries,
        ):
            return list(entries)
        return []


@dataclass(frozen=True, slots=True)
class _Paths:
    temporary: str
    target: str


class _PosixUpload:
    """One file on its way, under its temporary name.

    Thread safety: several threads may call ``write`` at the same time. See ``Upload`` for the rest.
    """

    def __init__(
        self, backend: PosixBackend, key: str, paths: _Paths, writer: DirectWriter, size: int
    ) -> None:
        self._backend, self._key, self._size = backend, key, size
        self._paths, self._writer = paths, writer
        self.part_bytes = _PART_BYTES
        self._written: dict[int, int] = {}
        self._failed: StorageError | None = None

    def write(self, offset: int, data: memoryview) -> None:
        data = data.cast("B")
        if offset < 0 or offset + data.nbytes > self._size:
            raise StorageError(
                self._key, f"bytes {offset} to {offset + data.nbytes} of an upload of {self._size}"
            )
        with mapped(self._key, missing=StorageError):
            self._writer.write(offset, data)
        self._written[offset] = data.nbytes

    def finish(self, size: int | None = None) -> ObjectInfo:
        """Make the file durable and visible. A failure is final: the temporary file is removed,
        since after a failed fsync its bytes cannot be trusted. Another call raises the same error.
        """
        if self._failed is not None:
            raise type(self._failed)(self._key, self._failed.detail)
        try:
            size = check_written(self._key, sum(self._written.values()), self._size, size)
            with mapped(self._key, missing=StorageError):
                self._writer.sync(size)
                self._writer.close()
                self._backend.publish(self._paths.temporary, self._paths.target, if_absent=False)
        except BaseException as error:
            if isinstance(error, StorageError):
                # A new error does not keep alive what the traceback refers to.
                self._failed = type(error)(self._key, error.detail)
            self.abort()
            raise
        return ObjectInfo(key=self._key, size=size)

    def abort(self) -> None:
        with suppress(OSError):
            self._writer.close()
        self._backend.remove_temporary(self._paths.temporary)


def _path_of(url: str) -> str:
    if url.lower().startswith("file://"):
        split = urlsplit(url, allow_fragments=False)
        if split.netloc not in ("", "localhost"):
            raise ConfigError(f"{url!r} names a host: write file:///path")
        if split.query:
            raise ConfigError(f"{url!r} has a '?': write %3F, or the path without file://")
        url = unquote(split.path)
    if not url or "\0" in url:
        raise ConfigError("a folder must be named, without null characters")
    return os.path.abspath(os.path.expanduser(url))


def _temporary_beside(target: str) -> str:
    folder, name = os.path.split(target)
    token = f".{secrets.token_hex(6)}.tmp"
    kept = name.encode()[: _NAME_BYTES - 1 - len(token)].decode(errors="ignore")
    return os.path.join(folder, f".{kept}{token}")


def _is_hidden(name: str) -> bool:
    """Return True for a temporary file, and for a deleted file that NFS keeps while it is open."""
    return (name.startswith(".") and name.endswith(".tmp")) or name.startswith(".nfs")


def _remove_abandoned(folder: str) -> None:
    """Remove the temporary files that a crash left in a folder that holds no other files. A shard
    may be tens of GiB.
    """
    with suppress(OSError), os.scandir(folder) as entries:
        left = list(entries)
        if all(_OURS.fullmatch(entry.name) for entry in left):
            for entry in left:
                if time.time() - entry.stat(follow_symlinks=False).st_mtime > _ABANDONED_SECONDS:
                    os.unlink(entry.path)


def _sync_folder(folder: str) -> None:
    fd = os.open(folder, os.O_RDONLY | os.O_DIRECTORY | os.O_CLOEXEC)
    try:
        os.fsync(fd)
    except OSError as error:
        if error.errno != errno.EINVAL:  # Some FUSE file systems have no fsync for folders
            raise
    finally:
        os.close(fd)
