"""Find the files of slots in /dev/shm, and remove those of processes that have ended.

The name of a file states the process id, the start time, the namespace and the program of its
process. So do the names of the empty files of `NodeMemory`. This module does not import torch,
because the agent uses it too.
"""

from __future__ import annotations

import contextlib
import os
import stat
import time
import weakref
from collections.abc import Callable, Iterator
from typing import Final

from ckpt.processes import PROGRAM, Process, namespace

# A fixed path is safe here: the files have the mode 0600, and are created only if their name, which
# contains the process id, does not exist yet.
SHM: Final = "/dev/shm"  # noqa: S108
PREFIX: Final = "ckpt-slot"
_MEMORY_PREFIX: Final = "ckpt-share"


def new_path(number: int, prefix: str = PREFIX) -> str:
    """Return the path of a new file of this process, whose name contains ``number``.

    The name is PREFIX-PID-START_TIME-NUMBER-NAMESPACE.TIME.PROGRAM, and PREFIX contains one "-".
    """
    process = Process.of(os.getpid())
    name = f"{prefix}-{process.pid}-{process.start_time}-{number}-{namespace()}"
    return f"{SHM}/{name}.{time.monotonic_ns():x}.{PROGRAM}"


class NodeMemory:
    """The free memory of this node, which the ranks of a job on this node divide among them.

    A rank that comes later must not get a smaller share because others use their shares already.
    So all ranks take the figure of the first one. Each has an empty file in /dev/shm with the
    figure in its name. The file is removed when the rank ends.
    """

    def __init__(self) -> None:
        self._remove: Callable[[], object] | None = None

    def first_measurement(self, measure: Callable[[], int]) -> int:
        """Return the bytes that the first rank has measured, or those that ``measure`` returns if
        this rank is the first.
        """
        figures: list[tuple[int, int]] = []  # Each after the time of its file (see ``new_path``)
        for name, process in _files(_MEMORY_PREFIX):
            if process.pid == os.getpid() or _is_sibling(process):
                with contextlib.suppress(ValueError, IndexError):  # Not a file of this class
                    made_at, figure = int(name.split(".")[1], 16), int(name.split("-")[4])
                    figures.append((made_at, figure))
        _, nbytes = min(figures) if figures else (0, measure())
        if self._remove is None:
            path = new_path(nbytes, _MEMORY_PREFIX)
            with contextlib.suppress(OSError):  # Without /dev/shm, each rank measures on its own
                os.close(os.open(path, os.O_WRONLY | os.O_CREAT | os.O_EXCL | os.O_CLOEXEC, 0o600))
                self._remove = weakref.finalize(self, _unlink, path, os.getpid())
        return nbytes

    def close(self) -> None:
        """Remove the file of this rank."""
        if self._remove is not None:
            self._remove()


def _unlink(path: str, owner_pid: int) -> None:
    if os.getpid() == owner_pid:  # In a forked process, the file belongs to the parent
        with contextlib.suppress(OSError):
            os.unlink(path)


def remove_orphans() -> None:
    """Remove the files of this user whose processes have ended, and those that an earlier program
    of this process has left by ``os.execv``.

    Images that a tier in memory keeps are not lost, since the tier has a second name for each file.
    """
    for name, process in (*_files(PREFIX), *_files(_MEMORY_PREFIX)):
        if not process.lives or (process.pid == os.getpid() and _is_of_earlier_program(name)):
            with contextlib.suppress(OSError):
                os.unlink(f"{SHM}/{name}")


def _is_of_earlier_program(name: str) -> bool:
    program = name.split(".")[2:]
    return bool(program) and program != [PROGRAM]


def _files(prefix: str) -> Iterator[tuple[str, Process]]:
    """Yield the name of each file of this user whose name has the prefix, with its process.

    Files of other users and of other PID namespaces are left out, even if they have such a name.
    """
    try:
        with os.scandir(SHM) as entries:
            files = list(entries)
    except OSError:
        return
    for entry in files:
        name, parts = entry.name, entry.name.split("-")  # See ``new_path``
        has_slot_name = (
            name.startswith(f"{prefix}-")
            and len(parts) == 6
            and parts[2].isdigit()
            and parts[3].isdigit()
        )
        if has_slot_name and ("." not in parts[5] or parts[5].partition(".")[0] == namespace()):
            with contextlib.suppress(OSError):  # Another process may have removed the file
                status = entry.stat(follow_symlinks=False)
                if stat.S_ISREG(status.st_mode) and status.st_uid == os.getuid():
                    yield name, Process(int(parts[2]), int(parts[3]))


def sibling_slot_bytes() -> int:
    """Return the bytes of all slot files of the other ranks on this node."""
    nbytes = 0
    for name, process in _files(PREFIX):
        if _is_sibling(process):
            with contextlib.suppress(OSError):
                nbytes += os.stat(f"{SHM}/{name}").st_size
    return nbytes


def _is_sibling(process: Process) -> bool:
    """Return True if a process is another rank on this node: it lives and has the same parent as
    this process, the launcher.
    """
    return process.pid != os.getpid() and process.lives and process.parent == os.getppid()
