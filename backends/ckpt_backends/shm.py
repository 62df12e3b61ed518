"""The memory of this machine as a store: a folder in ``/dev/shm`` that outlives the process, and takes images where they are.

A slot is a file in ``/dev/shm`` already; taking it is one more name for it. Nothing is copied, and the step that lies in it is gone when its slot is wanted
for another image: whoever hands the slot out takes the step off first.
"""

from __future__ import annotations

import os
import re
import secrets
import stat
from collections.abc import Mapping
from contextlib import suppress
from dataclasses import replace
from typing import Final

from ckpt.errors import ConfigError, StorageError
from ckpt.storage.api import Capabilities, ObjectInfo, check_key
from ckpt_backends.oserrors import mapped
from ckpt_backends.posix import PosixBackend

_SHM: Final = "/dev/shm"  # noqa: S108 - shared memory is the point; folders are 0700 and hold the user's id
_NAME: Final = re.compile(r"shm://([A-Za-z0-9][A-Za-z0-9._-]{0,79})/?", re.IGNORECASE)


def open_shm(url: str, options: Mapping[str, object]) -> ShmBackend:
    """The store ``shm://name`` of this user on this machine.

    Raises:
        ConfigError: The name is none, there are options, or the machine has no ``/dev/shm``.
    """
    match = _NAME.fullmatch(url)
    if match is None:
        raise ConfigError(f"{url!r}: a store in memory is shm://NAME, of letters, digits, '.', '_' and '-'")
    if options:
        raise ConfigError(f"{url}: a store in memory takes no options")
    if not os.path.isdir(_SHM):
        raise ConfigError(f"{url}: this system has no {_SHM}")
    return ShmBackend(match.group(1))


def stores() -> list[str]:
    """URLs of the stores of this user that lie on this machine."""
    try:
        with os.scandir(_SHM) as found:
            names = [entry.name for entry in found if entry.is_dir(follow_symlinks=False)]
    except OSError:
        return []
    prefix = _folder("")
    urls = [f"shm://{name.removeprefix(prefix)}" for name in sorted(names) if name.startswith(prefix)]
    return [url for url in urls if _NAME.fullmatch(url)]


def _folder(name: str) -> str:
    return f"ckpt-memory-{os.getuid()}-{name}"


class ShmBackend(PosixBackend):
    """A folder in ``/dev/shm``. Threads: every method from any thread, at once."""

    def __init__(self, name: str) -> None:
        super().__init__(f"{_SHM}/{_folder(name)}", shared=False, direct=False)
        self._name = name
        self._check()
        self._capabilities = replace(self._capabilities, alignment=1)

    @property
    def capabilities(self) -> Capabilities:
        return self._capabilities

    @property
    def url(self) -> str:
        return f"shm://{self._name}"

    def close(self) -> None:
        """Nothing is held; a folder with nothing in it is not left behind."""
        with suppress(OSError):
            os.rmdir(self._root)

    def _check(self) -> None:
        """``/dev/shm`` is everybody's: a folder that another user has put in our place is not used."""
        with suppress(FileNotFoundError):
            found = os.lstat(self._root)
            if not stat.S_ISDIR(found.st_mode) or found.st_uid != os.getuid() or found.st_mode & 0o077:
                raise ConfigError(
                    f"{self._root} is not a folder of this user alone: remove it, or name another"
                )

    def _make_folders(self, folder: str) -> None:
        super()._make_folders(folder)
        self._check()

    def adopt(self, key: str, path: str, size: int) -> ObjectInfo:
        """Make the file at ``path``, cut to ``size`` bytes, the object ``key``, without a copy: it stays what it is under its own name too.

        Raises:
            StorageError: It does not lie in ``/dev/shm``, or is gone.
        """
        target = self._writable(check_key(key))
        with mapped(key, missing=StorageError):
            folder, name = os.path.split(target)
            temporary = os.path.join(folder, f".{name[:100]}.{secrets.token_hex(6)}.tmp")
            os.close(self._create(temporary))  # makes the folders too, against others that remove empty ones
            beside = f"{temporary[:-4]}.link.tmp"
            try:
                os.link(path, beside, follow_symlinks=False)
                descriptor = os.open(beside, os.O_WRONLY | os.O_NOFOLLOW | os.O_CLOEXEC)
                try:
                    os.ftruncate(descriptor, size)
                finally:
                    os.close(descriptor)
                self._publish(beside, target, if_absent=False)
            finally:
                self._discard(
                    beside
                )  # still there if the target was this very file: a rename of one to the other does nothing
                self._discard(temporary)
        return ObjectInfo(key=key, size=size)
