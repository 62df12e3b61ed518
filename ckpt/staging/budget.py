"""The memory budget: how many slots of which memory, decided before the first save.

The decision uses the machine's numbers, and one log line states it. The budget is the least of what
the machine has free, what its memory cgroup (v1 or v2) leaves and, for slots that outlive the
process, what ``/dev/shm`` has free. It is divided among the ranks of the node, since all of them
ask at the same time.
"""

from __future__ import annotations

import contextlib
import os
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import PurePosixPath
from typing import Final

from ckpt.errors import HostMemoryExhausted

_HEADROOM: Final = 0.9
"""The part of free memory that a job may use. Other processes may need the rest meanwhile."""
_RING_STEP: Final = 32 << 20
_LEAST_RING: Final = 4 * _RING_STEP
_RING_SHARE: Final = 0.75
"""The part of the memory that a ring gets. The rest is for what must be set aside (see
``Snapshot``).
"""
_OWN_CGROUPS: Final = "/proc/self/cgroup"


@dataclass(frozen=True, slots=True, kw_only=True)
class _Cgroups:
    """A hierarchy of control groups: its mount point, its name in /proc/self/cgroup, and its files.

    The files hold the limit, the usage, and the rows of memory.stat that are page cache.
    """

    mount: str
    controller: str
    limits: tuple[str, ...]
    used: str
    cache: tuple[str, ...]


_V1: Final = _Cgroups(
    mount="/sys/fs/cgroup/memory",
    controller="memory",
    limits=("memory.limit_in_bytes",),
    used="memory.usage_in_bytes",
    cache=("total_inactive_file", "total_active_file"),
)
_V2: Final = _Cgroups(
    mount="/sys/fs/cgroup",
    controller="",
    limits=("memory.max", "memory.high"),
    used="memory.current",
    cache=("inactive_file", "active_file"),
)


@dataclass(frozen=True, slots=True, kw_only=True)
class Room:
    """The bytes that one rank may take: of all memory, and of shared memory."""

    memory: int
    shared: int
    ranks: int


@dataclass(frozen=True, slots=True, kw_only=True)
class Budget:
    """``slots`` buffers of ``slot_bytes`` for images of at most ``nbytes``.

    Attributes:
        shared: Whether the buffers are in /dev/shm.
        sentence: The choice and its reason.
    """

    slots: int
    nbytes: int
    slot_bytes: int
    shared: bool
    sentence: str


def decide(nbytes: int, *, wanted: int, room: Room) -> Budget:
    """Return a budget of as many of the ``wanted`` slots as fit.

    The slots are in shared memory if at least one fits there. If not even one slot fits, the budget
    is a smaller buffer, which images pass through in waves.

    Raises:
        HostMemoryExhausted: There is no room for waves either; the message has the numbers.
    """
    if nbytes > room.memory:
        return _in_waves(nbytes, room)
    slots = min(wanted, room.memory // max(1, nbytes))
    shared = nbytes <= room.shared
    if shared:
        slots = min(slots, room.shared // max(1, nbytes))
    place = "/dev/shm" if shared else "anonymous memory"  # noqa: S108 - a word in a sentence
    what = f"{slots} slot(s) of {_mib(nbytes)} each in {place}"
    why = (
        f"{_mib(room.memory)} of memory and {_mib(room.shared)} of /dev/shm are free for each of "
        f"{room.ranks} rank(s)"
    )
    lost = "" if shared else "; images are lost with the process"
    fewer = (
        f"; {wanted} were wanted, so a save may wait for the one before" if slots < wanted else ""
    )
    return Budget(
        slots=slots,
        nbytes=nbytes,
        slot_bytes=nbytes,
        shared=shared,
        sentence=f"{what}: {why}{lost}{fewer}",
    )


def _in_waves(nbytes: int, room: Room) -> Budget:
    ring = int(room.memory * _RING_SHARE) // _RING_STEP * _RING_STEP
    if ring < _LEAST_RING:
        raise HostMemoryExhausted(
            nbytes,
            f"{room.memory >> 20} MiB may be used by each of the {room.ranks} rank(s) of this "
            "node (machine, memory cgroup or staging_bytes), "
            f"and passing it through in waves takes {-(-int(_LEAST_RING / _RING_SHARE) >> 20)} MiB",
        )
    return Budget(
        slots=1,
        nbytes=nbytes,
        slot_bytes=ring,
        shared=False,
        sentence=f"images of {_mib(nbytes)} pass through {_mib(ring)} of anonymous memory in "
        f"waves: only {_mib(room.memory)} may be used by each of {room.ranks} rank(s); "
        "an optimizer's step waits until the last wave has begun, at the speed of the nearest tier",
    )


def measure(shm: str, *, ranks: int, limit: int | None = None, held: int = 0) -> Room:
    """Return the room that there is now for each of ``ranks`` on this node, at most ``limit`` for
    this one.

    Args:
        held: Bytes in ``shm`` that other ranks have taken of their parts already: the last to ask
            gets as large a part as the first.
    """
    free = int(min([_meminfo_available(), *_cgroup_rooms()]) * _HEADROOM)
    memory = min(free, (free + held) // ranks)
    if limit is not None:
        memory = min(memory, limit)
    try:
        stat = os.statvfs(shm)
        left = stat.f_bavail * stat.f_frsize
    except OSError:
        left = 0
    return Room(memory=memory, shared=min(memory, left, (left + held) // ranks), ranks=ranks)


def _cgroup_rooms() -> list[int]:
    """Return what each memory cgroup of this process leaves, its own and those above it.

    Groups without a limit are left out. Page cache is charged to a cgroup and given back when
    memory is short, so it counts as free, as in ``MemAvailable``.
    """
    rooms: list[int] = []
    for kind in (_V1, _V2):
        path = _own_cgroup(kind.controller)
        # In a container this is often the path on the host, and only its root exists there.
        for group in (path, *path.parents):
            folder = f"{kind.mount}{group}"
            limits = [
                most for name in kind.limits if (most := _number(f"{folder}/{name}")) is not None
            ]
            used = _number(f"{folder}/{kind.used}")
            if limits and used is not None:
                rooms.append(max(0, min(limits) - used + _sum(f"{folder}/memory.stat", kind.cache)))
    return rooms


def _own_cgroup(controller: str) -> PurePosixPath:
    """Return the path of this process in the hierarchy of ``controller``."""
    with contextlib.suppress(OSError), open(_OWN_CGROUPS) as file:
        for line in file:
            controllers, _, path = line.rstrip("\n").partition(":")[2].partition(":")
            if controller in controllers.split(","):
                return PurePosixPath(os.path.normpath(path or "/"))
    return PurePosixPath("/")


def _meminfo_available() -> int:
    with contextlib.suppress(OSError), open("/proc/meminfo") as file:
        for line in file:
            if line.startswith("MemAvailable:"):
                return int(line.split()[1]) << 10
    return os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES")


def _number(path: str) -> int | None:
    try:
        with open(path) as file:
            return int(file.read())
    except (OSError, ValueError):
        # There is no such cgroup, or its limit is "max".
        return None


def _sum(path: str, names: Sequence[str]) -> int:
    """Return the sum of these rows of a file of names and numbers."""
    with contextlib.suppress(OSError), open(path) as file:
        rows = [line.split() for line in file]
        return sum(int(row[1]) for row in rows if row and row[0] in names)
    return 0


def _mib(nbytes: int) -> str:
    return f"{nbytes / 2**20:,.0f} MiB"
