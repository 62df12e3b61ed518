"""How many slots, of which memory: decided from the machine's numbers before the first save, and said in one sentence.

Memory is a loan. What may be taken is the least of what the machine has free, what its memory cgroup (v1 or v2) leaves, and, for slots that shall survive the process, what ``/dev/shm`` has free; divided among the ranks
of the node, since all of them ask at the same time.
"""

from __future__ import annotations

import contextlib
import os
from dataclasses import dataclass
from typing import Final

from ckpt.errors import HostMemoryExhausted

_HEADROOM: Final = 0.9
"""What others may need meanwhile is left to them."""
_RING_STEP: Final = 32 << 20
_LEAST_RING: Final = 4 * _RING_STEP
_RING_SHARE: Final = 0.75
"""Of the memory there is: a quarter as much again is for what must be set aside (see ``Snapshot``)."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Room:
    """What one rank may take, in bytes: of memory at all, and of shared memory."""

    memory: int
    shared: int
    ranks: int


@dataclass(frozen=True, slots=True, kw_only=True)
class Budget:
    """``slots`` buffers of ``slot_bytes`` for images of at most ``nbytes``; ``shared`` if they lie in /dev/shm. ``sentence`` says what was chosen and why."""

    slots: int
    nbytes: int
    slot_bytes: int
    shared: bool
    sentence: str


def decide(nbytes: int, *, wanted: int, room: Room) -> Budget:
    """As many of the ``wanted`` slots as fit, in shared memory if one at least fits there. If not even one does, a smaller buffer that images pass through in waves.

    Raises:
        HostMemoryExhausted: There is no room for waves either; the message holds the numbers.
    """
    if nbytes > room.memory:
        return _in_waves(nbytes, room)
    slots = min(wanted, room.memory // max(1, nbytes))
    shared = nbytes <= room.shared
    if shared:
        slots = min(slots, room.shared // max(1, nbytes))
    place = "/dev/shm" if shared else "anonymous memory"  # noqa: S108 - a word in a sentence
    what = f"{slots} slot(s) of {_mib(nbytes)} each in {place}"
    why = f"{_mib(room.memory)} of memory and {_mib(room.shared)} of /dev/shm are free for each of {room.ranks} rank(s)"
    lost = "" if shared else "; images are lost with the process"
    fewer = f"; {wanted} were wanted, so a save may wait for the one before" if slots < wanted else ""
    return Budget(
        slots=slots, nbytes=nbytes, slot_bytes=nbytes, shared=shared, sentence=f"{what}: {why}{lost}{fewer}"
    )


def _in_waves(nbytes: int, room: Room) -> Budget:
    ring = int(room.memory * _RING_SHARE) // _RING_STEP * _RING_STEP
    if ring < _LEAST_RING:
        raise HostMemoryExhausted(
            nbytes,
            f"{room.memory >> 20} MiB may be used by each of the {room.ranks} rank(s) of this node (machine, memory cgroup or staging_bytes), "
            f"and passing it through in waves takes {int(_LEAST_RING / _RING_SHARE) >> 20} MiB",
        )
    return Budget(
        slots=1,
        nbytes=nbytes,
        slot_bytes=ring,
        shared=False,
        sentence=f"images of {_mib(nbytes)} pass through {_mib(ring)} of anonymous memory in waves: only {_mib(room.memory)} may be used by each of {room.ranks} rank(s); "
        "an optimizer's step waits until the last wave has begun, at the speed of the nearest tier",
    )


def measure(shm: str, *, ranks: int, limit: int | None = None) -> Room:
    """The room there is now for each of ``ranks`` on this node, at most ``limit`` for this one."""
    memory = int(min([_meminfo_available(), *_cgroup_rooms()]) * _HEADROOM)
    if limit is not None:
        memory = min(memory, limit * ranks)
    try:
        stat = os.statvfs(shm)
        shared = stat.f_bavail * stat.f_frsize
    except OSError:
        shared = 0
    return Room(memory=memory // ranks, shared=min(shared, memory) // ranks, ranks=ranks)


def _cgroup_rooms() -> list[int]:
    """What each memory cgroup above this process leaves; none where there is no limit."""
    rooms: list[int] = []
    for limit, usage in (
        ("/sys/fs/cgroup/memory.max", "/sys/fs/cgroup/memory.current"),
        ("/sys/fs/cgroup/memory/memory.limit_in_bytes", "/sys/fs/cgroup/memory/memory.usage_in_bytes"),
    ):
        most, used = _number(limit), _number(usage)
        if most is not None and used is not None:
            rooms.append(max(0, most - used))
    return rooms


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
    except (OSError, ValueError):  # no such cgroup, or "max"
        return None


def _mib(nbytes: int) -> str:
    return f"{nbytes / 2**20:,.0f} MiB"
