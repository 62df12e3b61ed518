"""The identity of a process: its process id and the time of its start.

The kernel reuses process ids, but no two processes of one boot have the same id and the same start
time. A process that calls ``os.execv`` keeps both, and runs another program. This module does not
import torch, because the agent uses it too.
"""

from __future__ import annotations

import getpass
import os
import socket
from typing import Annotated, Final, Self

import msgspec

PROGRAM: Final = os.urandom(4).hex()
"""A text that identifies the program that this process runs. It is another one after
``os.execv``.
"""
_PARENT_FIELD: Final = 1
_START_FIELD: Final = 19
"""Positions in the list of `_stat_fields`: of the parent's process id, and of the start time."""


class Process(msgspec.Struct, frozen=True):
    """A process of this machine.

    Attributes:
        pid: The process id.
        start_time: The time of its start, in clock ticks since boot; 0 if the process did not
            exist.
    """

    pid: Annotated[int, msgspec.Meta(ge=1, lt=1 << 31)]
    start_time: int

    @classmethod
    def of(cls, pid: int) -> Self:
        """Return the process that has the process id ``pid`` now."""
        fields = _stat_fields(pid)
        return cls(pid, int(fields[_START_FIELD]) if fields else 0)

    @property
    def lives(self) -> bool:
        """True if the process runs; False if it has ended, even if it is still a zombie."""
        fields = _stat_fields(self.pid)
        return bool(fields) and int(fields[_START_FIELD]) == self.start_time

    @property
    def parent(self) -> int:
        """The process id of the parent of this process; -1 if this process has ended."""
        fields = _stat_fields(self.pid)
        return int(fields[_PARENT_FIELD]) if fields else -1


def boot_identity() -> str:
    """Return a text that identifies the current boot of this host and the PID namespace.

    Together with this text, a `Process` is unique among all machines. Without ``/proc`` the text is
    the name of the host.
    """
    try:
        with open("/proc/sys/kernel/random/boot_id") as file:
            return f"{file.read().strip()}/{_namespace_number()}"
    except OSError:
        return socket.gethostname()


def namespace() -> str:
    """Return the number of this process' PID namespace in hexadecimal; "0" if it is not known.

    Containers may share ``/dev/shm``, but the same process id means another process in each
    container. So the names of files there include the namespace.
    """
    try:
        return f"{_namespace_number():x}"
    except OSError:
        return "0"


def _namespace_number() -> int:
    return os.stat("/proc/self/ns/pid").st_ino


def _stat_fields(pid: int) -> list[str]:
    """Return the fields of ``/proc/PID/stat`` that follow the name, from the process state on.

    The list is empty if the process does not exist, or has ended and is a zombie.
    """
    try:
        with open(f"/proc/{pid}/stat") as file:
            fields = file.read().rpartition(")")[2].split()
    except OSError:
        return []
    return [] if fields[0] in "ZX" else fields  # The states of a zombie and of a dead process


def user_at_host() -> str:
    """Return the user and the machine of this process, for people, such as "ana@node7"."""
    try:
        user = getpass.getuser()
    except (KeyError, OSError):  # The user id has no name
        user = "?"
    return f"{user}@{socket.gethostname()}"
