"""Find the files of slots in /dev/shm, and remove those of processes that have ended.

The name of a file states the process id, the start time, the namespace and the program of its
process. This module does not import torch, because the agent uses it too.
"""

from __future__ import annotations

import contextlib
import os
import stat
from collections.abc import Iterator
from typing import Final

from ckpt.processes import PROGRAM, Process, namespace

# A fixed path is safe here: the files have the mode 0600, and are created only if their name, which
# contains the process id, does not exist yet.
SHM: Final = "/dev/shm"  # noqa: S108
PREFIX: Final = "ckpt-slot"


def own_prefix() -> str:
    """Return the prefix of the names of this process's slot files.

    The number of the slot, the PID namespace, a time and the program follow in the full name.
    """
    process = Process.of(os.getpid())
    return f"{PREFIX}-{process.pid}-{process.start_time}"


def remove_orphans() -> None:
    """Remove the files of slots of this user whose processes have ended, and those that an earlier
    program of this process has left by ``os.execv``.

    Images that a tier in memory keeps are not lost, since the tier has a second name for each file.
    """
    for name, process in _slot_files():
        if not process.lives or (process.pid == os.getpid() and _is_of_earlier_program(name)):
            with contextlib.suppress(OSError):
                os.unlink(f"{SHM}/{name}")


def _is_of_earlier_program(name: str) -> bool:
    program = name.split(".")[2:]
    return bool(program) and program != [PROGRAM]


def _slot_files() -> Iterator[tuple[str, Process]]:
    """Yield the name of each slot file of this user, with its process.

    Files of other users and of other PID namespaces are left out, even if they have such a name.
    """
    try:
        with os.scandir(SHM) as entries:
            files = list(entries)
    except OSError:
        return
    for entry in files:
        name, parts = entry.name, entry.name.split("-")
        is_own = (
            name.startswith(f"{PREFIX}-")
            and len(parts) == 6
            and parts[2].isdigit()
            and parts[3].isdigit()
        )
        if is_own and ("." not in parts[5] or parts[5].partition(".")[0] == namespace()):
            with contextlib.suppress(OSError):  # Another process may have removed the file
                status = entry.stat(follow_symlinks=False)
                if stat.S_ISREG(status.st_mode) and status.st_uid == os.getuid():
                    yield name, Process(int(parts[2]), int(parts[3]))


def held_by_siblings() -> int:
    """Return the bytes of all slot files of the other ranks on this node.

    A process counts as such a rank if it lives and has the same parent as this process, the
    launcher.
    """
    nbytes = 0
    for name, process in _slot_files():
        if process.pid != os.getpid() and process.lives and process.parent == os.getppid():
            with contextlib.suppress(OSError):
                nbytes += os.stat(f"{SHM}/{name}").st_size
    return nbytes
