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

from ckpt.processes import Process, namespace

# Slots must be in shared memory. Their files have the mode 0600, and names with our process id.
SHM: Final = "/dev/shm"  # noqa: S108
PREFIX: Final = "ckpt-slot"


def own_prefix() -> str:
    """Return what the names of this process's slots begin with, but for their number."""
    me = Process.of(os.getpid())
    return f"{PREFIX}-{me.pid}-{me.started}"


def remove_orphans() -> None:
    """Remove the files of processes of this user that are gone. What a tier in memory keeps of
    them stays.
    """
    for name, process in _slot_files():
        if not process.lives:
            with contextlib.suppress(OSError):
                os.unlink(f"{SHM}/{name}")


def _slot_files() -> Iterator[tuple[str, Process]]:
    """Yield the slots of this user, each with its process.

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
                    yield name, Process(int(parts[2]), int(parts[3]))


def held_by_siblings() -> int:
    """Return the bytes in slots of the other ranks of this node. These are living processes that
    the same launcher has started.
    """
    held = 0
    for name, process in _slot_files():
        if process.pid != os.getpid() and process.lives and process.parent == os.getppid():
            with contextlib.suppress(OSError):
                held += os.stat(f"{SHM}/{name}").st_size
    return held
