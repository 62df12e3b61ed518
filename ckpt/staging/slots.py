"""The reusable buffers that images live in.

A slot is a file in ``/dev/shm``: it survives the trainer, can be mapped by another process, and is the source of direct writes. Its pages are reserved
with ``posix_fallocate`` before use, so that a full ``/dev/shm`` is an error here and never a SIGBUS later. Where it does not fit, a slot is
anonymous memory: the same speed, but gone with the process.

Files are named by process and start time; those of processes that are gone are removed when the next pool is built.
"""

from __future__ import annotations

import contextlib
import errno
import logging
import mmap
import os
import threading
import time
from collections.abc import Iterator
from typing import Any, Final

import torch

from ckpt.errors import HostMemoryExhausted

_SHM: Final = "/dev/shm"  # noqa: S108 - shared memory is the point; files are 0600 and their names hold our pid
_PREFIX: Final = "ckpt-slot"
_ROUND: Final = 2 << 20  # a huge page; also leaves room for the padded last block of a direct write
_log = logging.getLogger("ckpt")


class Slot:
    """One buffer. ``view`` is its memory as bytes, ``tensor`` the same memory for torch.

    Attributes:
        shared: Whether it is a file in /dev/shm.
        generation: Counts the images it has held; a plan's views belong to the slot, not to a generation.
    """

    def __init__(self, nbytes: int, path: str | None) -> None:
        self.capacity = -(-nbytes // _ROUND) * _ROUND
        self.path = path
        self.generation = 0
        self._pinned = False
        self._map = _map_file(path, self.capacity) if path else _map_anonymous(self.capacity)
        self.view = memoryview(self._map)
        self.tensor = torch.frombuffer(self._map, dtype=torch.uint8)
        if torch.cuda.is_available():
            self._pin()

    @property
    def shared(self) -> bool:
        return self.path is not None

    def prefault(self) -> None:
        """Touch every page now: a first touch is many times slower than a reuse."""
        with contextlib.suppress(OSError, AttributeError, ValueError):
            self._map.madvise(23)  # MADV_POPULATE_WRITE, Linux 5.14
            return
        self.tensor[:: mmap.PAGESIZE] = 0

    def close(self) -> None:
        """Remove the file and let go of the memory. Views that are still held keep their mapping alive, not the file."""
        if self._pinned:
            _cudart().cudaHostUnregister(self.tensor.data_ptr())
        if self.path:
            with contextlib.suppress(FileNotFoundError):
                os.unlink(self.path)

    def _pin(self) -> None:
        code = _cudart().cudaHostRegister(self.tensor.data_ptr(), self.capacity, 0)
        self._pinned = int(code) == 0
        if not self._pinned:
            _log.warning(
                "ckpt: could not pin a slot of %d MiB (CUDA error %s): copies from the GPU will be slower",
                self.capacity >> 20,
                code,
            )


def _cudart() -> Any:
    return torch.cuda.cudart()  # type: ignore[no-untyped-call]


def _map_file(path: str, nbytes: int) -> mmap.mmap:
    descriptor = os.open(path, os.O_RDWR | os.O_CREAT | os.O_EXCL | os.O_CLOEXEC, 0o600)
    try:
        os.posix_fallocate(descriptor, 0, nbytes)
        return mmap.mmap(descriptor, nbytes)
    except BaseException:
        os.unlink(path)
        raise
    finally:
        os.close(descriptor)


def _map_anonymous(nbytes: int) -> mmap.mmap:
    try:
        return mmap.mmap(-1, nbytes, flags=mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS)
    except OSError as error:
        raise HostMemoryExhausted(nbytes, os.strerror(error.errno or errno.ENOMEM)) from None


class SlotPool:
    """Up to ``count`` slots of one size, made when first needed and kept.

    Threads: ``acquire`` from the training thread, ``release`` from the one that has streamed the image, ``close`` from the owner, once.
    """

    def __init__(self, count: int) -> None:
        self._count = count
        self._free: list[Slot] = []
        self._made: list[Slot] = []
        self._changed = threading.Condition()
        self._serial = 0
        _remove_orphans()

    def acquire(self, nbytes: int, *, wait: bool) -> Slot | None:
        """A free slot of at least ``nbytes``; with ``wait`` until one is free, else None if none is.

        Raises:
            HostMemoryExhausted: There is no memory for it.
        """
        with self._changed:
            while True:
                for slot in self._free:
                    if slot.capacity >= nbytes:
                        self._free.remove(slot)
                        slot.generation += 1
                        return slot
                self._drop_small(nbytes)
                if len(self._made) < self._count:
                    slot = self._make(nbytes)
                    slot.generation += 1
                    return slot
                if not wait:
                    return None
                self._changed.wait()

    def release(self, slot: Slot) -> None:
        """The image in it is no longer needed."""
        with self._changed:
            self._free.append(slot)
            self._changed.notify_all()

    def close(self) -> None:
        """Free all slots. No image may be in use."""
        with self._changed:
            for slot in self._made:
                slot.close()
            self._made.clear()
            self._free.clear()

    def _drop_small(self, nbytes: int) -> None:
        for slot in [slot for slot in self._free if slot.capacity < nbytes]:
            self._free.remove(slot)
            self._made.remove(slot)
            slot.close()

    def _make(self, nbytes: int) -> Slot:
        room = available_bytes()
        if nbytes > room:
            raise HostMemoryExhausted(
                nbytes, f"{room >> 20} MiB are free on this machine (or in its memory cgroup)"
            )
        self._serial += 1
        path = (
            f"{_SHM}/{_PREFIX}-{os.getpid()}-{_started(os.getpid())}-{self._serial}-{time.monotonic_ns():x}"
        )
        try:
            slot = Slot(nbytes, path)
        except OSError as error:
            _log.warning(
                "ckpt: %s for a slot of %d MiB in %s; using anonymous memory: as fast, but the image is lost with the process",
                os.strerror(error.errno or 0), nbytes >> 20, _SHM,
            )  # fmt: skip
            slot = Slot(nbytes, None)
        slot.prefault()
        self._made.append(slot)
        return slot


def available_bytes() -> int:
    """Memory that can still be taken: the least of the machine's and the cgroup's (v1 and v2)."""
    rooms = [_meminfo_available()]
    for limit, usage in (
        ("/sys/fs/cgroup/memory.max", "/sys/fs/cgroup/memory.current"),
        ("/sys/fs/cgroup/memory/memory.limit_in_bytes", "/sys/fs/cgroup/memory/memory.usage_in_bytes"),
    ):
        most, used = _number(limit), _number(usage)
        if most is not None and used is not None:
            rooms.append(max(0, most - used))
    return min(rooms)


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


def _remove_orphans() -> None:
    for name, pid, started in _slot_files():
        if _started(pid) != started:
            with contextlib.suppress(OSError):
                os.unlink(f"{_SHM}/{name}")


def _slot_files() -> Iterator[tuple[str, int, int]]:
    try:
        names = os.listdir(_SHM)
    except OSError:
        return
    for name in names:
        parts = name.split("-")
        if name.startswith(f"{_PREFIX}-") and len(parts) == 6 and parts[2].isdigit() and parts[3].isdigit():
            yield name, int(parts[2]), int(parts[3])


def _started(pid: int) -> int:
    """Start time of a process in clock ticks since boot; -1 if there is none."""
    try:
        with open(f"/proc/{pid}/stat") as file:
            fields = file.read().rpartition(")")[2].split()
    except OSError:
        return -1
    return -1 if fields[0] in "ZX" else int(fields[19])
