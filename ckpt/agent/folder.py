"""The private folder of this user's agent, with its socket, its locks and its log.

Only the user can access the folder, so another user can neither make nor reach the socket. In
addition, both sides of a connection ask the kernel which user is at the other end.
"""

from __future__ import annotations

import fcntl
import os
import socket
import stat
import struct
from contextlib import suppress
from dataclasses import dataclass
from typing import Final

from ckpt.config import agent_folder
from ckpt.errors import AgentError

_MOST_PATH_BYTES: Final = 107
"""The longest path of a Unix socket in bytes, without the terminating zero byte."""
_CREDENTIALS: Final = struct.Struct("3i")
"""What the kernel tells about the other end: the ids of the process, the user and the group."""
_MOST_LOG_BYTES: Final = 1 << 20


@dataclass(frozen=True, slots=True)
class AgentFolder:
    """The private folder of one user's agent."""

    path: str

    @property
    def socket(self) -> str:
        return f"{self.path}/socket"

    @property
    def log(self) -> str:
        return f"{self.path}/agent.log"

    @classmethod
    def of_this_user(cls) -> AgentFolder:
        """Return the folder of this user's agent. The folder is made if it does not exist.

        Raises:
            AgentError: The folder belongs to another user, is open to other users or cannot be
                made, or its path is too long.
        """
        path = os.path.abspath(agent_folder())
        folder = cls(path)
        if (length := len(os.fsencode(folder.socket))) > _MOST_PATH_BYTES:
            raise AgentError(
                f"the path of the agent's socket has {length} bytes, and {_MOST_PATH_BYTES} are "
                f"allowed: set CKPT_AGENT_FOLDER to a shorter folder than {path}"
            )
        try:
            with suppress(FileExistsError):
                os.mkdir(path, 0o700)
            status = os.lstat(path)
        except OSError as error:
            raise AgentError(
                f"the agent's folder {path} cannot be used ({error.strerror}): set "
                "CKPT_AGENT_FOLDER to a folder on this machine"
            ) from None
        if not stat.S_ISDIR(status.st_mode) or status.st_uid != os.geteuid():
            raise AgentError(
                f"{path} is not a folder of this user: set CKPT_AGENT_FOLDER to another one"
            )
        if status.st_mode & 0o077:
            raise AgentError(
                f"the agent's folder {path} is open to other users: chmod 700, or set "
                "CKPT_AGENT_FOLDER to another one"
            )
        return folder

    def open_log(self) -> int:
        """Open the log file for appending, and return its descriptor. A file of more than 1 MiB is
        emptied first.
        """
        flags = os.O_WRONLY | os.O_CREAT | os.O_APPEND | os.O_CLOEXEC | os.O_NOFOLLOW
        descriptor = os.open(self.log, flags, 0o600)
        if os.fstat(descriptor).st_size > _MOST_LOG_BYTES:
            os.ftruncate(descriptor, 0)
        return descriptor


class Lock:
    """A lock on a file. The kernel releases it when all processes with the descriptor have ended.

    Args:
        folder: The folder of the file.
        name: "listen" for the lock of the agent that has the socket, "work" for the lock of the
            agent that may start workers.

    Attributes:
        descriptor: The descriptor of the file. A process that inherits it has the lock, too.
    """

    def __init__(self, folder: AgentFolder, name: str) -> None:
        flags = os.O_RDWR | os.O_CREAT | os.O_CLOEXEC | os.O_NOFOLLOW
        self._path = f"{folder.path}/{name}.lock"
        self.descriptor = os.open(self._path, flags, 0o600)

    def take(self) -> bool:
        """Try to take the lock, without waiting. Return True if this process has it now."""
        try:
            fcntl.flock(self.descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            return False
        return True

    def release(self) -> None:
        """Release the lock. Afterwards, any process may take it, this one included."""
        fcntl.flock(self.descriptor, fcntl.LOCK_UN)

    def is_in_place(self) -> bool:
        """Return True if the path of the lock file still leads to the file that this object has
        opened. Otherwise another process can take a lock of the same name while this process has
        this one.
        """
        return identity(self._path) == identity(self.descriptor)

    def close(self) -> None:
        """Close the descriptor. A process that has inherited it still has the lock."""
        os.close(self.descriptor)


def identity(file: str | int) -> tuple[int, int]:
    """Return the device and the inode of ``file``, a path or a descriptor. Return two zeros if the
    system cannot give them, for example because the file does not exist.
    """
    try:
        status = os.lstat(file) if isinstance(file, str) else os.fstat(file)
    except OSError:
        return 0, 0
    return status.st_dev, status.st_ino


def check_peer(connection: socket.socket, what: str) -> int:
    """Return the id of the process at the other end of ``connection``.

    Args:
        connection: A Unix socket.
        what: The name of the other end for the error message.

    Raises:
        AgentError: The process belongs to another user.
    """
    data = connection.getsockopt(socket.SOL_SOCKET, socket.SO_PEERCRED, _CREDENTIALS.size)
    pid, user, _ = _CREDENTIALS.unpack(data)
    if user != os.geteuid():
        raise AgentError(f"{what} belongs to user {user}, not to this user: it is refused")
    return int(pid)
