"""The identity of a process: a number, and the time of its start.

The kernel gives a process id to another process later. No two processes of one boot have the same
id and the same start time. This module does not import torch, because the agent uses it too.
"""

from __future__ import annotations

import os
import socket
from typing import Annotated, Final, Self

import msgspec

_PARENT: Final = 1
_STARTED: Final = 19
"""Positions in ``/proc/PID/stat``, counted from the state of the process on."""


class Process(msgspec.Struct, frozen=True):
    """A process of this machine.

    Attributes:
        started: Its start, in clock ticks since boot; 0 if it was not found.
    """

    pid: Annotated[int, msgspec.Meta(ge=1, lt=1 << 31)]
    started: int

    @classmethod
    def of(cls, pid: int) -> Self:
        """Return the process that has the number ``pid`` now."""
        fields = _stat(pid)
        return cls(pid, int(fields[_STARTED]) if fields else 0)

    @property
    def lives(self) -> bool:
        """Whether it exists and has not ended."""
        fields = _stat(self.pid)
        return bool(fields) and int(fields[_STARTED]) == self.started

    @property
    def parent(self) -> int:
        """The process id of its parent; -1 if it has ended."""
        fields = _stat(self.pid)
        return int(fields[_PARENT]) if fields else -1


def machine() -> str:
    """Return what identifies the boot of this host and the process namespace.

    With it, a `Process` is unique among all machines.
    """
    try:
        with open("/proc/sys/kernel/random/boot_id") as file:
            return f"{file.read().strip()}/{_namespace()}"
    except OSError:
        return socket.gethostname()


def namespace() -> str:
    """Return the process namespace. Containers may share /dev/shm, but a process id has another
    meaning in each.
    """
    try:
        return f"{_namespace():x}"
    except OSError:
        return "0"


def _namespace() -> int:
    return os.stat("/proc/self/ns/pid").st_ino


def _stat(pid: int) -> list[str]:
    """Return what /proc says of a process from its state on. Returns nothing for a process that
    does not exist, or has ended and waits for its parent.
    """
    try:
        with open(f"/proc/{pid}/stat") as file:
            fields = file.read().rpartition(")")[2].split()
    except OSError:
        return []
    return [] if fields[0] in "ZX" else fields
