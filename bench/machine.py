"""Where and when a run was made: what a figure is worth nothing without."""

from __future__ import annotations

import contextlib
import datetime as dt
import importlib.metadata
import os
import platform
import subprocess
import sys
from typing import Any

import psutil


def conditions(folder: str) -> dict[str, Any]:
    """The machine, the disk that ``folder`` is on, the software, and how busy it all is now."""
    return {
        "date": dt.datetime.now(dt.UTC).strftime("%Y-%m-%d %H:%M UTC"),
        "cpu": _cpu(),
        "cores": len(os.sched_getaffinity(0)),
        "memory_bytes": psutil.virtual_memory().total,
        "disk": disk_of(folder),
        "kernel": platform.release(),
        "python": platform.python_version(),
        "torch": importlib.metadata.version("torch"),
        "commit": commit_of(os.path.dirname(os.path.abspath(__file__))),
        "command": "python -m bench " + " ".join(sys.argv[1:]),
        "load_begin": load(),
    }


def load() -> float:
    """The load average over the last minute."""
    return round(os.getloadavg()[0], 2)


def disk_of(folder: str) -> str:
    """File system and device below ``folder``, as ``df`` says."""
    done = subprocess.run(
        ["df", "--output=fstype,source", os.path.realpath(folder)],
        capture_output=True,
        text=True,
        check=True,
    )
    kind, device = done.stdout.splitlines()[-1].split(maxsplit=1)
    return f"{kind} on {device.strip()}"


def free_memory_bytes() -> int:
    """What this process and its children may still take: of the machine, of its memory cgroup,
    of ``/dev/shm``.
    """
    free: list[int] = [psutil.virtual_memory().available]
    for limit, used in (
        ("/sys/fs/cgroup/memory.max", "/sys/fs/cgroup/memory.current"),
        (
            "/sys/fs/cgroup/memory/memory.limit_in_bytes",
            "/sys/fs/cgroup/memory/memory.usage_in_bytes",
        ),
    ):
        with contextlib.suppress(OSError, ValueError), open(limit) as most, open(used) as now:
            free.append(int(most.read()) - int(now.read()))
    return min(free)


def _cpu() -> str:
    with contextlib.suppress(OSError, StopIteration), open("/proc/cpuinfo") as info:
        return next(
            line.partition(":")[2].strip() for line in info if line.startswith("model name")
        )
    return platform.processor() or platform.machine()


def commit_of(tree: str) -> str:
    """Return the commit of a working tree, with "-dirty" if a tracked file differs from it.

    Reports below ``bench/results`` do not count: one run writes them while it goes on.
    """
    commit = _git(tree, "rev-parse", "--short=10", "HEAD")
    changed = _git(tree, "status", "--porcelain", "-uno", "--", ":/", ":(top,exclude)bench/results")
    return f"{commit or 'unknown'}{'-dirty' if changed else ''}"


def _git(tree: str, *words: str) -> str:
    done = subprocess.run(["git", "-C", tree, *words], capture_output=True, text=True, check=False)
    return done.stdout.strip()


def evict(path: str) -> None:
    """Let the page cache forget a file, or all files below a folder; of a root and a step, those
    of the root. What is kept in memory stays there.
    """
    if "://" in path:
        return
    while not os.path.exists(path):
        path = os.path.dirname(path)
    files = (
        [path]
        if os.path.isfile(path)
        else [os.path.join(at, n) for at, _, names in os.walk(path) for n in names]
    )
    for each in files:
        descriptor = os.open(each, os.O_RDONLY | os.O_CLOEXEC)
        try:
            os.fsync(descriptor)  # what is not written yet cannot be forgotten
            os.posix_fadvise(descriptor, 0, 0, os.POSIX_FADV_DONTNEED)
        finally:
            os.close(descriptor)
    with contextlib.suppress(OSError), open("/proc/sys/vm/drop_caches", "w") as drop:
        drop.write("1")
