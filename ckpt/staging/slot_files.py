"""The files of slots in /dev/shm: whose they are, and which have lost their process.

A file is named by its process, the process's start time and the process namespace. This module does
not import torch, because the agent uses it too.
"""

from __future__ import annotations

import contextlib
import os
import stat
from collections.abc import Iterator
from typing import Final

# Slots must be in shared memory. Their files have the mode 0600, and names with our process id.
SHM: Final = "/dev/shm"  # noqa: S108
PREFIX: Final = "ckpt-slot"


def own_prefix() -> str:
    """Return what the names of this process's slots begin with, but for their number."""
    return f"{PREFIX}-{os.getpid()}-{_started(os.getpid())}"


def remove_orphans() -> None:
    """Remove the files of processes of this user that are gone. What a tier in memory keeps of
    them stays.
    """
    for name, pid, started in _slot_files():
        if _started(pid) != started:
            with contextlib.suppress(OSError):
                os.unlink(f"{SHM}/{name}")


def _slot_files() -> Iterator[tuple[str, int, int]]:
    """Yield the slots of this user: name, process, and its start.

    What another user calls so is none of ours.
    """
    try:
        with os.scandir(SHM) as entries:
            found = list(entries)
    except OSError:
        return
    for entry in found:
        name, parts = entry.name, entry.name.split("-")
        ours = (
            name.startswith(f"{PREFIX}-")
            and len(parts) == 6
            and parts[2].isdigit()
            and parts[3].isdigit()
        )
        if ours and ("." not in parts[5] or parts[5].partition(".")[0] == namespace()):
            with contextlib.suppress(OSError):  # It may have been removed meanwhile
                status = entry.stat(follow_symlinks=False)
                if stat.S_ISREG(status.st_mode) and status.st_uid == os.getuid():
                    yield name, int(parts[2]), int(parts[3])


def namespace() -> str:
    """Return the process namespace. Containers may share /dev/shm, but a process id has another
    meaning in each.
    """
    try:
        return f"{os.stat('/proc/self/ns/pid').st_ino:x}"
    except OSError:
        return "0"


def held_by_siblings() -> int:
    """Return the bytes in slots of the other ranks of this node. These are living processes that
    the same launcher has started.
    """
    held = 0
    for name, pid, started in _slot_files():
        if pid != os.getpid() and _started(pid) == started and _parent(pid) == os.getppid():
            with contextlib.suppress(OSError):
                held += os.stat(f"{SHM}/{name}").st_size
    return held


def _started(pid: int) -> int:
    """Start time of a process in clock ticks since boot; -1 if there is none."""
    fields = _stat(pid)
    return -1 if not fields or fields[0] in "ZX" else int(fields[19])


def _parent(pid: int) -> int:
    fields = _stat(pid)
    return int(fields[1]) if fields else -1


def _stat(pid: int) -> list[str]:
    """Return what /proc says of a process from its state on; nothing if there is no such
    process.
    """
    try:
        with open(f"/proc/{pid}/stat") as file:
            return file.read().rpartition(")")[2].split()
    except OSError:
        return []
