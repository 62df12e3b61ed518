"""The backend for stores in the memory of this machine.

Such a store is a folder in ``/dev/shm``, which outlives the process. An *image* is a rank's part of
the state, and a *slot* is a reusable buffer for an image. A slot is already a file in ``/dev/shm``.
To store its image, the backend gives the file a second name, and copies nothing. The next image in
the slot overwrites these bytes, so the slot pool removes the step from the store before it lets a
save use the slot again.

Every user of the machine may write to ``/dev/shm``, and the name of the folder can be guessed. The
backend therefore creates the folder when the store is opened, and keeps it open by a descriptor.
Every path starts at that descriptor, and every call checks that only this user may use the folder.
Another user's folder or file is never read.
"""

from __future__ import annotations

import logging
import os
import re
import stat
import threading
import weakref
from collections.abc import Mapping, Sequence
from contextlib import suppress
from dataclasses import replace
from typing import BinaryIO, Final

from ckpt.errors import AccessDenied, ConfigError, LinkRefused, ObjectNotFound, StorageError
from ckpt.errors.storage import storage_errors
from ckpt.storage.api import ObjectInfo, check_key
from ckpt_backends.folder.posix import PosixBackend
from ckpt_backends.temporary import temporary_beside

# Other users may write to /dev/shm, so the folder of each store has the mode 0700.
_SHM: Final = "/dev/shm"  # noqa: S108
_URL: Final = re.compile(r"shm://([A-Za-z0-9][A-Za-z0-9._-]{0,79})/?", re.IGNORECASE)
_NOT_OWN: Final = "not a folder of this user alone"
_TRIES: Final = 32
_log = logging.getLogger("ckpt")


def open_shm(url: str, options: Mapping[str, object]) -> ShmBackend:
    """Return the backend for the store ``shm://name`` of this user on this machine, and create the
    store if it does not exist.

    Raises:
        ConfigError: The name is invalid, ``options`` is not empty, or the machine has no
            ``/dev/shm``.
    """
    match = _URL.fullmatch(url)
    if match is None:
        raise ConfigError(
            f"{url!r}: a store in memory is shm://NAME, of letters, digits, '.', '_' and '-'"
        )
    if options:
        raise ConfigError(f"{url}: a store in memory takes no options")
    if not os.path.isdir(_SHM):
        raise ConfigError(f"{url}: this system has no {_SHM}")
    return ShmBackend(match.group(1))


def stores() -> list[str]:
    """Return the URLs (``shm://name``) of the stores of this user on this machine.

    A folder with the name of a store that other users own or may use is left out, and logged.
    """
    prefix = _folder_name("")
    try:
        with os.scandir(_SHM) as entries:
            folders = sorted(entries, key=lambda folder: folder.name)
    except OSError:
        return []
    urls: list[str] = []
    for folder in folders:
        url = f"shm://{folder.name.removeprefix(prefix)}"
        if not (
            folder.name.startswith(prefix)
            and _URL.fullmatch(url)
            and folder.is_dir(follow_symlinks=False)
        ):
            continue
        with suppress(FileNotFoundError):  # A job that has ended may have removed its empty folder
            if _is_own(folder.stat(follow_symlinks=False)):
                urls.append(url)
            else:
                _log.warning("ckpt: %s/%s is left out: it is %s", _SHM, folder.name, _NOT_OWN)
    return urls


def _folder_name(name: str) -> str:
    """Return the name of the folder in ``/dev/shm`` for the store ``name`` of this user."""
    return f"ckpt-memory-{os.getuid()}-{name}"


def _is_own(status: os.stat_result) -> bool:
    """Return True if ``status`` is the status of a folder that only this user may use."""
    return (
        stat.S_ISDIR(status.st_mode) and status.st_uid == os.getuid() and not status.st_mode & 0o077
    )


class ShmBackend(PosixBackend):
    """A store in the memory of this machine, as a folder in ``/dev/shm``.

    If another user has taken the name of the folder, or other users may use the folder, the store
    behaves as if it were empty, and every write raises ``AccessDenied``. One log line reports this.
    A job continues without the tier.

    Thread safety: several threads may call all methods at the same time.
    """

    def __init__(self, name: str) -> None:
        super().__init__(f"{_SHM}/{_folder_name(name)}", is_shared=False, direct=False)
        self._name = name
        self.url = f"shm://{name}"
        self.capabilities = replace(self.capabilities, alignment=1)
        self._lock = threading.Lock()
        self._descriptors: list[int] = []
        """The descriptors of the folder and of earlier folders of this name that were removed. The
        last one is in use.

        Another thread may still use a path through an earlier descriptor, so all of them stay open
        until ``close``.
        """
        self._finalizer = weakref.finalize(
            self, _close_folder, self._root, self._descriptors, os.getpid()
        )
        self._has_warned = False
        with suppress(StorageError):  # If the folder cannot be used, later calls report it
            self._resolved_root()

    def identity(self) -> str:
        """Return the device of the file system and the name of the folder.

        The inode number is not a part of the identity. Another job that closes may remove the empty
        folder between the starts of two ranks of this job. The second rank then creates another
        folder, which has another inode number.
        """
        with storage_errors("", missing=StorageError):
            status = os.stat(self._resolved_root())
        return f"{status.st_dev}:{_folder_name(self._name)}"

    def place(self) -> str:
        """Return the place with the name of the folder instead of the inode number, as
        ``identity`` does.
        """
        with storage_errors("", missing=StorageError):
            device = os.stat(self._resolved_root()).st_dev
        return f"{device}::{device}:{_folder_name(self._name)}"

    def free_bytes(self) -> int:
        """Return the free bytes of the file system, or the available memory of the machine if that
        is less.
        """
        with storage_errors("", missing=StorageError), open("/proc/meminfo") as file:
            lines = dict(line.split(":", 1) for line in file)
        available = lines.get("MemAvailable", "").split()  # A number of KiB, and its unit
        return (
            min(super().free_bytes(), int(available[0]) << 10)
            if available
            else super().free_bytes()
        )

    def close(self) -> None:
        """Close the descriptors of the folder, and remove the folder if it is empty."""
        self._finalizer()

    def open_file(self, key: str) -> BinaryIO:
        """Return the file of an object, open for reading. The caller closes it."""
        path = self._path_to_read(check_key(key))
        # Without this check, ``open`` refuses a folder and leaves its descriptor open.
        self._file_status(key, path)
        with storage_errors(key):
            return open(os.open(path, os.O_RDONLY | os.O_NOFOLLOW | os.O_CLOEXEC), "rb", 0)

    def _resolved_root(self) -> str:
        """Return the path of the folder through its descriptor. The path names the same folder even
        if another folder gets its name in ``/dev/shm`` later.

        If the folder was not opened yet, or was removed, create it if it does not exist and open
        it.

        Raises:
            AccessDenied: The folder does not belong to this user alone.
            StorageError: The store is closed, or the folder cannot be created.
        """
        with self._lock, storage_errors("", missing=StorageError):
            if not self._finalizer.alive:
                raise StorageError("", "the store is closed")
            try:
                if (
                    not self._descriptors or os.fstat(self._descriptors[-1]).st_nlink == 0
                ):  # Removed
                    self._descriptors.append(_open_folder(self._root))
                if not _is_own(os.fstat(self._descriptors[-1])):
                    raise AccessDenied("", f"{self._root} is {_NOT_OWN}")
            except AccessDenied as error:
                if not self._has_warned:
                    _log.warning("ckpt: %s is left out: %s", self.url, error.detail)
                self._has_warned = True
                raise
            self._has_warned = False
            return f"/proc/self/fd/{self._descriptors[-1]}"

    def is_replaced(self) -> bool:
        """Return False. Another folder of this name is no sign of a lost store, since a job that
        closes removes an empty folder, and the next job creates the folder again.
        """
        return False

    def _remember_root(self) -> None:
        """Do nothing, since ``is_replaced`` does not need the identity of the root."""

    def _path_to_read(self, key: str) -> str:
        try:
            self._resolved_root()
        except AccessDenied as error:
            # A folder that is not this user's own holds no object of this user.
            raise ObjectNotFound(key, error.detail) from None
        return self._path_below(key)

    def _entries(self, folder: str) -> Sequence[os.DirEntry[str]]:
        with suppress(ObjectNotFound):
            return super()._entries(folder)
        return []

    def _path_to_write(self, key: str) -> str:
        return self._path_below(key)

    def _path_below(self, key: str) -> str:
        """Return the path of ``key``, after a check of each existing folder and file on this path.

        Raises:
            LinkRefused: One of them is a symbolic link.
            AccessDenied: One of them belongs to another user.
        """
        path = self._resolved_root()
        for part in filter(None, key.split("/")):
            path = f"{path}/{part}"
            with storage_errors(key), suppress(FileNotFoundError, NotADirectoryError):
                status = os.lstat(path)
                if stat.S_ISLNK(status.st_mode):
                    raise LinkRefused(key)
                if status.st_uid != os.getuid():
                    raise AccessDenied(key, "it is another user's")
        return path

    def _sync_root(self, parents: Sequence[str]) -> None:
        """Do nothing, since names in memory need not be forced to a medium."""

    def adopt(self, key: str, path: str, size: int) -> ObjectInfo:
        """Truncate the file at ``path`` to ``size`` bytes and make it the object ``key``, without a
        copy.

        The file also keeps its own name.

        Raises:
            StorageError: The file is not in ``/dev/shm``, is gone, or is another user's.
        """
        target = self._path_to_write(check_key(key))
        with storage_errors(key, missing=StorageError):
            temporary = temporary_beside(target)
            # ``_create`` also creates the folders. While the temporary file is in its folder, the
            # folder is not empty, so no other process removes it.
            os.close(self._create(temporary))
            link = f"{temporary.removesuffix('.tmp')}.link.tmp"
            try:
                os.link(path, link, follow_symlinks=False)
                descriptor = os.open(link, os.O_WRONLY | os.O_NOFOLLOW | os.O_CLOEXEC)
                try:
                    if os.fstat(descriptor).st_uid != os.getuid():
                        raise AccessDenied(key, f"{path} is another user's")
                    os.ftruncate(descriptor, size)
                finally:
                    os.close(descriptor)
                self.publish(link, target, if_absent=False)
            finally:
                # If ``target`` already was a name of this file, the rename did nothing, and the
                # name ``link`` still exists.
                self.remove_temporary(link)
                self.remove_temporary(temporary)
        return ObjectInfo(key=key, size=size)


def _open_folder(path: str) -> int:
    """Create the folder at ``path`` if it does not exist, and return a descriptor of the folder.

    Raises:
        AccessDenied: A link or a file is there, or a folder that this user may not open.
        StorageError: Other processes removed the folder after each of many attempts.
        OSError: The folder cannot be created.
    """
    for _ in range(_TRIES):
        with suppress(FileExistsError):
            os.mkdir(path, 0o700)
        try:
            return os.open(path, os.O_RDONLY | os.O_DIRECTORY | os.O_NOFOLLOW | os.O_CLOEXEC)
        except FileNotFoundError:
            # Another process has removed the folder since ``mkdir``, by closing the empty store.
            continue
        except OSError as error:
            # A link, a file, or a folder that this user may not open has this name.
            raise AccessDenied("", f"{path} is {_NOT_OWN} ({error.strerror})") from None
    raise StorageError("", f"{path} is removed as often as it is made")


def _close_folder(path: str, descriptors: list[int], owner_pid: int) -> None:
    """Close ``descriptors``, and remove the folder at ``path`` if it is empty.

    ``owner_pid`` is the id of the process that opened the store. Only this process removes the
    folder.
    """
    if os.getpid() == owner_pid:  # A fork closes its own descriptors only
        with suppress(OSError):
            os.rmdir(path)
    while descriptors:
        os.close(descriptors.pop())
