"""The memory of this machine as a store: a folder in ``/dev/shm`` that outlives the process.

A slot is already a file in ``/dev/shm``. To store its image, the backend gives the file a second
name. Nothing is copied. The step is gone when the slot is needed for another image, so the slot
pool removes the step before it hands the slot out.

Every user of the machine may write to ``/dev/shm``, and the name of the folder can be guessed. The
folder is therefore created when the store is opened, and held by a descriptor. Every path goes
through that descriptor, and every call checks that the folder still belongs to this user alone.
Another user's folder or file is never read.
"""

from __future__ import annotations

import logging
import os
import re
import secrets
import stat
import threading
import weakref
from collections.abc import Mapping, Sequence
from contextlib import suppress
from dataclasses import replace
from typing import BinaryIO, Final

from ckpt.errors import AccessDenied, ConfigError, LinkRefused, ObjectNotFound, StorageError
from ckpt.storage.api import ObjectInfo, check_key
from ckpt_backends.oserrors import mapped
from ckpt_backends.posix import PosixBackend

# The store must be in shared memory. Its folders have the mode 0700, and names with the user's id.
_SHM: Final = "/dev/shm"  # noqa: S108
_NAME: Final = re.compile(r"shm://([A-Za-z0-9][A-Za-z0-9._-]{0,79})/?", re.IGNORECASE)
_NOT_OWN: Final = "not a folder of this user alone"
_TRIES: Final = 32
_log = logging.getLogger("ckpt")


def open_shm(url: str, options: Mapping[str, object]) -> ShmBackend:
    """Open the store ``shm://name`` of this user on this machine.

    Raises:
        ConfigError: The name is invalid, there are options, or the machine has no ``/dev/shm``.
    """
    match = _NAME.fullmatch(url)
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
    """Return the URLs of the stores of this user on this machine.

    A folder of another user that has such a name is left out, with a log line.
    """
    prefix = _folder("")
    try:
        with os.scandir(_SHM) as entries:
            found = sorted(entries, key=lambda entry: entry.name)
    except OSError:
        return []
    urls: list[str] = []
    for entry in found:
        url = f"shm://{entry.name.removeprefix(prefix)}"
        if (
            entry.name.startswith(prefix)
            and _NAME.fullmatch(url)
            and entry.is_dir(follow_symlinks=False)
        ):
            if _is_own(entry.stat(follow_symlinks=False)):
                urls.append(url)
            else:
                _log.warning("ckpt: %s/%s is left out: it is %s", _SHM, entry.name, _NOT_OWN)
    return urls


def _folder(name: str) -> str:
    return f"ckpt-memory-{os.getuid()}-{name}"


def _is_own(found: os.stat_result) -> bool:
    """Return True if it is a folder that only this user can use."""
    return stat.S_ISDIR(found.st_mode) and found.st_uid == os.getuid() and not found.st_mode & 0o077


class ShmBackend(PosixBackend):
    """A folder in ``/dev/shm``.

    Where another user has taken the folder's name, or the folder is open to others, the store is
    empty: it lists nothing, has no object, and raises ``AccessDenied`` for what is written. A job
    goes on without it; one log line says so.

    Thread safety: several threads may call all methods at the same time.
    """

    def __init__(self, name: str) -> None:
        super().__init__(f"{_SHM}/{_folder(name)}", shared=False, direct=False)
        self._name = name
        self.url = f"shm://{name}"
        self.capabilities = replace(self.capabilities, alignment=1)
        self._lock = threading.Lock()
        self._held: list[int] = []
        """The folder, and those of its name that were removed since.

        A path through one may still be in use, so all stay open.
        """
        self._let_go = weakref.finalize(self, _let_go, self._root, self._held, os.getpid())
        self._warned = False
        with suppress(StorageError):  # Later calls report what is wrong with it
            self._top()

    def identity(self) -> str:
        """Return the file system and the name, since a job that closes may remove the folder
        between the start of two ranks.
        """
        with mapped("", missing=StorageError):
            found = os.stat(self._top())
        return f"{found.st_dev}:{_folder(self._name)}"

    def free_bytes(self) -> int:
        """Return what the file system leaves, or the machine's memory if that is less."""
        with mapped("", missing=StorageError), open("/proc/meminfo") as file:
            lines = dict(line.split(":", 1) for line in file)
        kib = lines.get("MemAvailable", "").split()
        return min(super().free_bytes(), int(kib[0]) << 10) if kib else super().free_bytes()

    def close(self) -> None:
        """Let go of the folder. One with nothing in it is not left behind."""
        self._let_go()

    def open_file(self, key: str) -> BinaryIO:
        """Return the file of an object, open for reading. The caller closes it."""
        path = self._readable(check_key(key))
        with mapped(key):
            return open(os.open(path, os.O_RDONLY | os.O_NOFOLLOW | os.O_CLOEXEC), "rb", 0)

    def _top(self) -> str:
        """Return the path of the folder through its descriptor, so that no other folder can replace
        it.
        """
        with self._lock, mapped("", missing=StorageError):
            if not self._let_go.alive:
                raise StorageError("", "the store is closed")
            try:
                if not self._held or os.fstat(self._held[-1]).st_nlink == 0:  # It was removed
                    self._held.append(_hold(self._root))
                if not _is_own(os.fstat(self._held[-1])):
                    raise AccessDenied("", f"{self._root} is {_NOT_OWN}")
            except AccessDenied as error:
                if not self._warned:
                    _log.warning("ckpt: %s is left out: %s", self.url, error.detail)
                self._warned = True
                raise
            self._warned = False
            return f"/proc/self/fd/{self._held[-1]}"

    def is_replaced(self) -> bool:
        """Return False. A job that closes removes the folder if it is empty, and the next job makes
        it again.
        """
        return False

    def _remember_root(self) -> None:
        """See ``is_replaced``."""

    def _readable(self, key: str) -> str:
        try:
            self._top()
        except AccessDenied as error:
            # This user has nothing there.
            raise ObjectNotFound(key, error.detail) from None
        return self._below(key)

    def _entries(self, folder: str) -> Sequence[os.DirEntry[str]]:
        with suppress(ObjectNotFound):
            return super()._entries(folder)
        return []

    def _writable(self, key: str) -> str:
        return self._below(key)

    def _below(self, key: str) -> str:
        """Return the path of ``key``. No link is followed, and nothing on the way is another
        user's.
        """
        path = self._top()
        for part in filter(None, key.split("/")):
            path = f"{path}/{part}"
            with mapped(key), suppress(FileNotFoundError, NotADirectoryError):
                found = os.lstat(path)
                if stat.S_ISLNK(found.st_mode):
                    raise LinkRefused(key)
                if found.st_uid != os.getuid():
                    raise AccessDenied(key, "it is another user's")
        return path

    def _sync_root(self, parents: Sequence[str]) -> None:
        """Do nothing, since memory has no medium to force a name to."""

    def adopt(self, key: str, path: str, size: int) -> ObjectInfo:
        """Make the file at ``path``, cut to ``size`` bytes, the object ``key``, without a copy.

        The file keeps its own name too.

        Raises:
            StorageError: The file is not in ``/dev/shm``, is gone, or is another user's.
        """
        target = self._writable(check_key(key))
        with mapped(key, missing=StorageError):
            folder, name = os.path.split(target)
            temporary = os.path.join(folder, f".{name[:100]}.{secrets.token_hex(6)}.tmp")
            # This makes the folders too, and keeps other processes from removing them as empty.
            os.close(self._create(temporary))
            beside = f"{temporary[:-4]}.link.tmp"
            try:
                os.link(path, beside, follow_symlinks=False)
                descriptor = os.open(beside, os.O_WRONLY | os.O_NOFOLLOW | os.O_CLOEXEC)
                try:
                    if os.fstat(descriptor).st_uid != os.getuid():
                        raise AccessDenied(key, f"{path} is another user's")
                    os.ftruncate(descriptor, size)
                finally:
                    os.close(descriptor)
                self.publish(beside, target, if_absent=False)
            finally:
                # The link is still there if the target was this very file, since such a rename does
                # nothing.
                self.remove_temporary(beside)
                self.remove_temporary(temporary)
        return ObjectInfo(key=key, size=size)


def _hold(path: str) -> int:
    """Return a descriptor of the folder, which is made if there is none."""
    for _ in range(_TRIES):
        with suppress(FileExistsError):
            os.mkdir(path, 0o700)
        try:
            return os.open(path, os.O_RDONLY | os.O_DIRECTORY | os.O_NOFOLLOW | os.O_CLOEXEC)
        except FileNotFoundError:
            # Another process has closed an empty store in between.
            continue
        except OSError as error:
            # It is a link, a file, or a folder that may not be entered.
            raise AccessDenied("", f"{path} is {_NOT_OWN} ({error.strerror})") from None
    raise StorageError("", f"{path} is removed as often as it is made")


def _let_go(path: str, descriptors: list[int], owner: int) -> None:
    if os.getpid() == owner:  # A fork has its own descriptors, and leaves the folder to its parent
        with suppress(OSError):
            os.rmdir(path)
    while descriptors:
        os.close(descriptors.pop())
