"""A memory cgroup of its own for a process, if this machine allows one."""

from __future__ import annotations

import os
from collections.abc import Generator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Final

MOUNTS: Final = (
    (
        "/sys/fs/cgroup/memory",
        "memory.limit_in_bytes",
        "memory.usage_in_bytes",
        "memory.oom_control",
        "memory.max_usage_in_bytes",
    ),
    ("/sys/fs/cgroup", "memory.max", "memory.current", "memory.events", "memory.peak"),
)
"""For version 1 and 2 of cgroups: the mount point, and the files with the limit, with the memory in
use, with the number of processes that were killed, and with the most memory that was in use.
"""


@dataclass(frozen=True)
class MemoryCgroup:
    """A cgroup, whose folder is ``folder``."""

    folder: Path
    limit_file: str
    usage_file: str
    event_file: str
    peak_file: str

    def enter(self) -> None:
        """Put this process into the cgroup. Only memory that it takes from now on is counted."""
        (self.folder / "cgroup.procs").write_text(str(os.getpid()))

    def set_limit(self, nbytes: int) -> None:
        (self.folder / self.limit_file).write_text(str(nbytes))

    @property
    def usage(self) -> int:
        return int((self.folder / self.usage_file).read_text())

    @property
    def peak(self) -> int:
        return int((self.folder / self.peak_file).read_text())

    @property
    def kill_count(self) -> int:
        rows = (self.folder / self.event_file).read_text().split("\n")
        return next(int(row.split()[1]) for row in rows if row.startswith("oom_kill "))


@contextmanager
def memory_cgroup() -> Generator[MemoryCgroup | None]:
    """Create a cgroup, and remove it at the end; None if this process may not."""
    for mount, *files in MOUNTS:
        folder = Path(mount, f"ckpt-test-{os.getpid()}")
        try:
            folder.mkdir()
        except OSError:
            continue
        try:
            if (folder / files[0]).exists():
                yield MemoryCgroup(folder, *files)
                return
        finally:
            folder.rmdir()
    yield None
