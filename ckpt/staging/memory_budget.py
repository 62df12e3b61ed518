"""Decide the memory budget: the number of slots of a rank, their size, and their kind of memory.

The decision is made before the first save, and one log line states it. Slots may use the free
memory of the machine, or the memory that the cgroups (v1 or v2) of the process still allow if that
is less. Slots in ``/dev/shm`` are also limited by its free space. This memory is divided among the
ranks of the node, since all of them make slots at the same time.

A slot holds an *image*, which is a rank's part of the state. If memory is short, the slot is a
*ring*, which is smaller than the image. The image then passes through it *in waves*, divided into
pieces, each in a *frame*. Where an optimizer would wait for the store, the ring borrows frames of
the *spill*. A *part* is a unit of an upload.
"""

from __future__ import annotations

import contextlib
import os
from collections.abc import Sequence
from dataclasses import dataclass, replace
from pathlib import PurePosixPath
from typing import Final

from ckpt.errors import HostMemoryExhausted
from ckpt.staging.copies import PIECE_BYTES

_USABLE_SHARE: Final = 0.9
"""The part of the free memory that a job may use. Other processes may need more memory later."""
_LEAST_PIECE_BYTES: Final = 8 << 20
"""The least size of a piece, and so of a frame."""
_LEAST_PIECES: Final = 32
"""The least pieces of an image. The pieces of a small image are therefore smaller."""
_LEAST_FRAMES: Final = 4
_USUAL_FRAMES: Final = 6
"""The usual frames of a ring, which is a slot that is smaller than its image.

With it, a save is durable as soon as with the whole image in memory, if the store is the limit.
"""
_LEAST_RINGS: Final = 2
"""The least rings that an image must be as large as to pass through one.

Two rings, and the frames for tensors that are copied at the call, take as much as two images of
less than that, and each copy to a ring costs more.
"""
_MOST_S3_PARTS: Final = 10_000
"""The most parts of an upload to S3. The parts of a very large image are therefore larger."""
_RING_SHARE: Final = 0.75
"""The part of the memory that rings and their spill may use. The remaining memory is for copies of
eager sources (see ``Snapshot._copy_later``), and for what the training takes later.
"""
_OWN_CGROUPS: Final = "/proc/self/cgroup"


@dataclass(frozen=True, slots=True, kw_only=True)
class _Cgroups:
    """The names that one version of cgroups uses for memory.

    Attributes:
        mount: The mount point of the hierarchy.
        controller: The name of the hierarchy in /proc/self/cgroup.
        limits: The names of the files with limits.
        usage: The name of the file with the memory in use.
        cache: The names of the rows of ``memory.stat`` that count page cache.
    """

    mount: str
    controller: str
    limits: tuple[str, ...]
    usage: str
    cache: tuple[str, ...]


_V1: Final = _Cgroups(
    mount="/sys/fs/cgroup/memory",
    controller="memory",
    limits=("memory.limit_in_bytes",),
    usage="memory.usage_in_bytes",
    cache=("total_inactive_file", "total_active_file"),
)
_V2: Final = _Cgroups(
    mount="/sys/fs/cgroup",
    controller="",
    limits=("memory.max", "memory.high"),
    usage="memory.current",
    cache=("inactive_file", "active_file"),
)


@dataclass(slots=True)
class Reservation:
    """The host memory that saves keep outside of slots: the bytes of the last step, for deltas. A
    delta stores the differences to that step.

    Attributes:
        last_step_bytes: The bytes of the last step, which this rank keeps from its first save on.
        used_bytes: The bytes that it has taken so far.
        plan: The save plan from which ``last_step_bytes`` follows.

    Thread safety: the training thread sets ``last_step_bytes``, and the thread that streams sets
    ``used_bytes``.
    """

    last_step_bytes: int = 0
    used_bytes: int = 0
    plan: object = None

    def reduce(self, room: Room) -> Room:
        """Return ``room`` without the bytes of the last step, as the slots may use it."""
        # What is taken already is no part of the memory that was measured.
        untaken_bytes = max(0, self.last_step_bytes - self.used_bytes)
        limit = None if room.limit is None else max(0, room.limit - self.last_step_bytes)
        memory = max(0, room.memory - untaken_bytes)
        if limit is not None:
            memory = min(memory, limit)
        shared_bytes = min(room.shared_bytes, memory)
        return replace(
            room,
            memory=memory,
            shared_bytes=shared_bytes,
            limit=limit,
            delta_bytes=self.last_step_bytes,
        )


@dataclass(frozen=True, slots=True, kw_only=True)
class Room:
    """The memory that one rank may use.

    Attributes:
        memory: The bytes that the rank may use in total.
        shared_bytes: The bytes of ``memory`` that may be in ``/dev/shm``.
        ranks: The number of ranks that the memory of the node was divided among.
        limit: The bytes that the settings allow the rank; None for no limit.
        delta_bytes: The bytes that the rank keeps for deltas, which ``memory`` and ``limit`` do not
            have any more.
    """

    memory: int
    shared_bytes: int
    ranks: int
    limit: int | None = None
    delta_bytes: int = 0

    @property
    def is_short(self) -> bool:
        """Return True if the settings allow more memory than there is."""
        return self.limit is not None and self.limit > self.memory

    @property
    def is_at_limit(self) -> bool:
        """Return True if the machine has as much memory as the settings allow, so that only the
        settings limit the slots.
        """
        return self.limit is not None and self.limit <= self.memory


@dataclass(frozen=True, slots=True, kw_only=True)
class Siblings:
    """What a rank knows of the other ranks on its node.

    Attributes:
        node_memory: The bytes that all ranks of the node divide among them.
        shm_bytes: The bytes in ``/dev/shm`` that the other ranks already use. They are added to
            those that are free before these are divided.
    """

    node_memory: int
    shm_bytes: int


@dataclass(frozen=True, slots=True, kw_only=True)
class Budget:
    """The slots that one rank may have.

    Attributes:
        slots: The number of slots.
        nbytes: The most bytes of an image.
        slot_bytes: The bytes of each slot. If this is less than ``nbytes``, a larger image passes
            through the slot in waves.
        frame_bytes: The bytes of each frame of such a slot and of the spill.
        spill_bytes: The most bytes of the spill, which images in waves may use beside the slots.
        reserve_bytes: The bytes that must stay free when the spill grows.
        is_shared: Whether the slots are files in /dev/shm.
        sentence: The decision and its reason, for the log.
    """

    slots: int
    nbytes: int
    slot_bytes: int
    frame_bytes: int = PIECE_BYTES
    spill_bytes: int = 0
    reserve_bytes: int = 0
    is_shared: bool
    sentence: str


def decide(
    nbytes: int, *, most_slots: int, room: Room, elastic: bool = False, part_bytes: int = 0
) -> Budget:
    """Return the budget for images of ``nbytes``: as many of the ``most_slots`` slots as ``room``
    allows.

    The slots are in shared memory if at least one fits into it. If ``room`` does not allow a single
    slot, or if ``elastic`` is True and an image is as large as ``_LEAST_RINGS`` rings, the slots
    are rings, through which images pass in waves.

    Args:
        nbytes: The most bytes of an image.
        most_slots: The most slots.
        room: The memory that the rank may use.
        elastic: Whether images may pass in waves even if whole ones have room.
        part_bytes: The largest part or chunk, which a ring must hold together with copies.

    Raises:
        HostMemoryExhausted: There is not enough memory even for waves. The message has the numbers.
    """
    frame_bytes = _frame_bytes(nbytes)
    largest_part = max(part_bytes, -(-nbytes // _MOST_S3_PARTS))
    # Beside the frames of the largest part, a ring needs two more (see ``RingWindow.capacity``).
    least_frames = max(_LEAST_FRAMES, 2 + -(-largest_part // frame_bytes))
    sizes = _RingSizes(
        usual=max(_USUAL_FRAMES, least_frames) * frame_bytes,
        least=least_frames * frame_bytes,
        frame=frame_bytes,
    )
    is_ring_better = (
        _LEAST_RINGS * sizes.usual <= nbytes and sizes.usual < room.memory * _RING_SHARE
    )
    if nbytes > room.memory or (elastic and is_ring_better):
        return _ring_budget(nbytes, most_slots, room, sizes)
    slots = min(most_slots, room.memory // max(1, nbytes))
    is_shared = nbytes <= room.shared_bytes
    if is_shared:
        slots = min(slots, room.shared_bytes // max(1, nbytes))
    place = "/dev/shm" if is_shared else "anonymous memory"  # noqa: S108 - a word in a sentence
    decision = f"{slots} slot(s) of {_mib(nbytes)} each in {place}"
    reason = (
        f"{_mib(room.memory)} of memory and {_mib(room.shared_bytes)} of /dev/shm are free for "
        f"each of {room.ranks} rank(s)"
    )
    loss_note = "" if is_shared else "; images are lost with the process"
    shortage = (
        f"; {most_slots} were wanted, so a save may wait for the previous one"
        if slots < most_slots
        else ""
    )
    return Budget(
        slots=slots,
        nbytes=nbytes,
        slot_bytes=nbytes,
        is_shared=is_shared,
        sentence=f"{decision}: {reason}{loss_note}{shortage}{_limit_notes(room)}",
    )


def _frame_bytes(nbytes: int) -> int:
    """Return the size of a frame for images of ``nbytes``: from 256 MiB on, a ring has at most a
    fifth of the image.
    """
    frame = PIECE_BYTES
    while frame > _LEAST_PIECE_BYTES and frame * _LEAST_PIECES > nbytes:
        frame //= 2
    return frame


@dataclass(frozen=True, slots=True, kw_only=True)
class _RingSizes:
    """The usual and the least size of a ring, and the size of one of its frames, in bytes."""

    usual: int
    least: int
    frame: int


def _ring_budget(nbytes: int, most_slots: int, room: Room, sizes: _RingSizes) -> Budget:
    """Return the budget for images of ``nbytes`` that pass through rings in waves.

    Raises:
        HostMemoryExhausted: ``room`` is too small even for the least ring.
    """
    limit = int(room.memory * _RING_SHARE) // sizes.frame * sizes.frame
    ring_bytes = min(limit, sizes.usual)
    if ring_bytes < sizes.least:
        deltas = _delta_note(room) if room.delta_bytes else ""
        raise HostMemoryExhausted(
            nbytes,
            f"{room.memory >> 20} MiB may be used by each of the {room.ranks} rank(s) of this "
            f"node (machine, memory cgroup or host_memory){deltas}, "
            f"and the least is {_describe_least(nbytes, sizes.least)}",
        )
    slots = max(1, min(most_slots, limit // nbytes)) if nbytes <= limit else 1
    spill_bytes = max(0, min(limit, most_slots * nbytes) - slots * ring_bytes)
    return Budget(
        slots=slots,
        nbytes=nbytes,
        slot_bytes=ring_bytes,
        frame_bytes=sizes.frame,
        spill_bytes=spill_bytes,
        reserve_bytes=room.memory - limit,
        is_shared=False,
        sentence=f"images of {_mib(nbytes)} pass through {_mib(ring_bytes)} of anonymous memory in "
        f"waves, and through up to {_mib(spill_bytes)} more if an optimizer's step comes before "
        f"they are written: {_mib(room.memory)} may be used by each of {room.ranks} rank(s)"
        f"{_limit_notes(room)}",
    )


def _delta_note(room: Room) -> str:
    """Say how much memory deltas take; nothing if they take none."""
    return (
        f"; {_mib(room.delta_bytes)} more keep the last step for deltas" if room.delta_bytes else ""
    )


def _describe_least(nbytes: int, ring_bytes: int) -> str:
    """Say how little memory an image of ``nbytes`` can do with, and what it is for.

    ``ring_bytes`` is the least size of a ring.
    """
    spare_bytes = int(ring_bytes * (1 / _RING_SHARE - 1))
    if nbytes <= ring_bytes + spare_bytes:
        return f"{-(-nbytes >> 20)} MiB, for the whole image"
    return (
        f"{-(-(ring_bytes + spare_bytes) >> 20)} MiB: {_mib(ring_bytes)} that the image passes "
        f"through in waves, and {-(-spare_bytes >> 20)} MiB for copies of tensors that no "
        "optimizer owns"
    )


def _limit_notes(room: Room) -> str:
    """Say what else the decision depends on."""
    text = _delta_note(room) if room.delta_bytes else ""
    if room.limit is None or not room.is_short:
        return text
    return (
        f"{text}; host_memory allows {_mib(room.limit)}, but this machine or its memory cgroup has "
        f"only {_mib(room.memory)} for each of {room.ranks} rank(s)"
    )


def measure(
    shm: str,
    *,
    ranks: int,
    limit: int | None = None,
    siblings: Siblings | None = None,
    reclaimable: int = 0,
    reclaimable_in_shm: int = 0,
) -> Room:
    """Return the memory that this rank may use now.

    Args:
        shm: The folder of shared memory.
        ranks: The number of ranks on this node, which share its memory.
        limit: The most bytes that this rank may use; None for no limit.
        siblings: What is known of the other ranks; None if they use no memory yet. With it, the
            parts of all ranks are equal, in whatever order the ranks call this.
        reclaimable: The bytes of slots of this rank that count as free.
        reclaimable_in_shm: The bytes of these slots that are in ``shm``.
    """
    free = max(0, free_memory() + reclaimable)
    siblings = siblings or Siblings(node_memory=free, shm_bytes=0)
    memory = min(free, siblings.node_memory // ranks)
    if limit is not None:
        memory = min(memory, limit)
    try:
        stat = os.statvfs(shm)
        shm_bytes = stat.f_bavail * stat.f_frsize + reclaimable_in_shm
    except OSError:
        shm_bytes = 0
    shared_bytes = min(memory, shm_bytes, (shm_bytes + siblings.shm_bytes) // ranks)
    return Room(memory=memory, shared_bytes=shared_bytes, ranks=ranks, limit=limit)


def free_memory() -> int:
    """Return the bytes that the machine and the cgroups of this process have free now, less a
    reserve for other processes.
    """
    return int(min([_meminfo_available(), *_cgroup_rooms()]) * _USABLE_SHARE)


def _cgroup_rooms() -> list[int]:
    """Return the bytes that the cgroup of this process, and each cgroup above it, still allow.

    Cgroups without a limit are left out. The kernel charges page cache to a cgroup, but reclaims
    the page cache when memory is short. So page cache counts as free here, as in ``MemAvailable``.
    """
    rooms: list[int] = []
    for version in (_V1, _V2):
        path = _own_cgroup(version.controller)
        # In a container, ``path`` is often a path of the host. Then only the root of the hierarchy
        # exists in the container.
        for group in (path, *path.parents):
            folder = f"{version.mount}{group}"
            limits = [
                limit
                for name in version.limits
                if (limit := _read_number(f"{folder}/{name}")) is not None
            ]
            usage = _read_number(f"{folder}/{version.usage}")
            if limits and usage is not None:
                rooms.append(
                    max(0, min(limits) - usage + _read_sum(f"{folder}/memory.stat", version.cache))
                )
    return rooms


def _own_cgroup(controller: str) -> PurePosixPath:
    """Return the path of this process's cgroup in the hierarchy of ``controller``; '/' if it is not
    known.
    """
    with contextlib.suppress(OSError), open(_OWN_CGROUPS) as file:
        for line in file:  # "ID:CONTROLLERS:PATH"; of cgroups v2, no controllers
            controllers, _, path = line.rstrip("\n").partition(":")[2].partition(":")
            if controller in controllers.split(","):
                return PurePosixPath(os.path.normpath(path or "/"))
    return PurePosixPath("/")


def _meminfo_available() -> int:
    """Return the bytes that the machine has available; all of its memory if that is unknown."""
    with contextlib.suppress(OSError), open("/proc/meminfo") as file:
        for line in file:
            if line.startswith("MemAvailable:"):
                return int(line.split()[1]) << 10
    return os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES")


def _read_number(path: str) -> int | None:
    """Return the number in a file of a cgroup; None if there is none."""
    try:
        with open(path) as file:
            return int(file.read())
    except (OSError, ValueError):
        # The file does not exist, or its limit is "max".
        return None


def _read_sum(path: str, names: Sequence[str]) -> int:
    """Return the sum of the rows with these names in a file of names and numbers; 0 if the file
    cannot be read.
    """
    with contextlib.suppress(OSError), open(path) as file:
        rows = [line.split() for line in file]
        return sum(int(row[1]) for row in rows if row and row[0] in names)
    return 0


def _mib(nbytes: int) -> str:
    if 0 < nbytes < 2**20:
        return f"{-(-nbytes >> 10)} KiB"
    return f"{nbytes / 2**20:,.0f} MiB"
