"""One slot, which is a file in ``/dev/shm`` or anonymous memory."""

from __future__ import annotations

import contextlib
import errno
import logging
import mmap
import os
import threading
import weakref
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, Final

import torch

from ckpt.errors import HostMemoryExhausted
from ckpt.staging import cuda
from ckpt.staging.device import Devices, background

_MADV_POPULATE_WRITE: Final = 23  # Since Linux 5.14
_ALLOCATION_BYTES: Final = 16 << 20
"""The bytes of a slot that are allocated or touched between two calls of ``is_wanted``."""
_HUGE_PAGE_BYTES: Final = 2 << 20
_log = logging.getLogger("ckpt")


class SlotCancelled(Exception):
    """The creation of a slot was cancelled because the pool is closing."""


class SlotLost(Exception):
    """The file of a slot was removed from /dev/shm, for example by logind or a cleaning job.

    The memory of the slot is intact, but no other process can open it any more.
    """


class Slot:
    """One reusable buffer for images.

    To *pin* the memory is to let CUDA page-lock it. ``_pinned_for`` is the device for which that
    was tried; ``is_pinned`` says whether it has succeeded. ``_pin_lock`` guards both. ``_map`` is
    the mapping of the memory, and ``_file`` its file in /dev/shm. A *tier in memory* may cut this
    file to the length of an image.

    Attributes:
        capacity: The size in bytes.
        view: The memory as bytes.
        tensor: The same memory as a 1-D tensor of uint8.
        path: The path of the file in /dev/shm; None for anonymous memory.
        layouts: Prepared save plan -> the views of this slot that were made for the plan. The slot
            has them, and not the plan, so that no plan keeps the memory of a closed slot mapped.
    """

    def __init__(
        self, nbytes: int, path: str | None, is_wanted: Callable[[], bool] = lambda: True
    ) -> None:
        """Create the slot.

        Args:
            nbytes: The least size in bytes.
            path: The path of the file to create; None for anonymous memory.
            is_wanted: A function that is called from time to time while the file is allocated and
                in ``prefault``, which take about a second for each GiB. If it returns False,
                ``SlotCancelled`` is raised.

        Raises:
            OSError: The file cannot be created, or /dev/shm has no room for it.
            HostMemoryExhausted: Anonymous memory cannot be mapped.
            SlotCancelled: ``is_wanted`` has returned False.
        """
        self._is_wanted = is_wanted
        self.capacity = capacity_of(nbytes)
        self.path = path
        self._pinned_for: torch.device | None = None
        self._pin_lock = threading.Lock()
        self._closed = False
        self.is_pinned = False
        """True if CUDA has page-locked the memory."""
        self.layouts: weakref.WeakKeyDictionary[Any, Any] = weakref.WeakKeyDictionary()
        self._file: _File | None = None
        if path:
            self._map, self._file = _map_file(path, self.capacity, is_wanted)
        else:
            self._map = _map_anonymous(self.capacity)
        self.view = memoryview(self._map)
        self.tensor = torch.frombuffer(self._map, dtype=torch.uint8)
        # Remove the file even if the slot is never closed. In a forked process, ``_unlink`` does
        # nothing, since the file belongs to the parent.
        self._remove = weakref.finalize(self, _unlink, self._file, os.getpid())

    @property
    def is_shared(self) -> bool:
        return self.path is not None

    def regrow(self) -> None:
        """Extend the file to its full length again, after a tier in memory has cut the file to the
        length of an image.

        Raises:
            SlotLost: The file was removed.
            HostMemoryExhausted: Other processes use the memory that was cut off.
        """
        if self._file is None or self._file.is_whole(self.capacity):
            return
        descriptor = self._file.open()
        try:
            if (size := os.fstat(descriptor).st_size) >= self.capacity:
                return
            try:
                os.posix_fallocate(descriptor, size, self.capacity - size)
            except OSError as error:
                raise HostMemoryExhausted(
                    self.capacity, os.strerror(error.errno or errno.ENOSPC)
                ) from None
        finally:
            os.close(descriptor)
        # CUDA has page-locked the pages that were cut off, and not the new pages in their place.
        if (device := self._unpin()) is not None:
            self.pin([device])

    def prefault(self) -> None:
        """Touch every page now, since the first write to a page is many times slower than later
        ones.

        Raises:
            HostMemoryExhausted: There is not enough memory. Without this check, the kernel would
                end the process when it writes to the slot.
            SlotCancelled: The function ``is_wanted`` has returned False.
        """
        for start in range(0, self.capacity, _ALLOCATION_BYTES):
            check_wanted(self._is_wanted)
            self.populate(start, min(self.capacity, start + _ALLOCATION_BYTES))

    def populate(self, start: int, end: int) -> None:
        """Touch the pages of a part of the memory.

        Raises:
            HostMemoryExhausted: There is not enough memory.
        """
        try:
            self._map.madvise(_MADV_POPULATE_WRITE, start, end - start)
        except OSError as error:
            if error.errno != errno.EINVAL:
                raise HostMemoryExhausted(
                    self.capacity, os.strerror(error.errno or errno.ENOMEM)
                ) from None
            self._touch(start, end)

    def _touch(self, start: int, end: int) -> None:
        """Touch pages on Linux before 5.14, which lacks MADV_POPULATE_WRITE, without a change of
        their bytes.
        """
        pages = self.tensor[start : end : mmap.PAGESIZE]
        pages.copy_(pages.clone())

    def pin(self, devices: Devices) -> None:
        """Page-lock the memory if one of ``devices`` is a CUDA device, so that copies from it are
        asynchronous. Do nothing if an earlier call has tried to page-lock the memory, or the slot
        is closed. If CUDA refuses, log a warning. Any thread may call this.
        """
        device = next((device for device in devices if device.type == "cuda"), None)
        with self._pin_lock:
            if device is None or self._closed or self._pinned_for is not None:
                return
            self._pinned_for = device
            with background(device):
                code = cuda.register(self.tensor.data_ptr(), self.capacity)
            self.is_pinned = code == 0
            if not self.is_pinned:
                _log.warning(
                    "ckpt: could not pin a slot of %d MiB (CUDA error %s): copies from the GPU "
                    "will be slower",
                    self.capacity >> 20,
                    code,
                )

    def close(self) -> None:
        """Remove the file, undo ``pin``, and drop the views in ``layouts``.

        The memory stays mapped as long as this object or a view of the memory is in use.
        """
        self._unpin(closed=True)
        self.layouts.clear()
        self._remove()

    def _unpin(self, *, closed: bool = False) -> torch.device | None:
        """Undo ``pin``, and return the device that the memory was page-locked for; None if there is
        none. With ``closed``, the memory cannot be page-locked again.
        """
        with self._pin_lock:
            device, self._pinned_for, self._closed = self._pinned_for, None, closed
            if device is not None and self.is_pinned:
                self.is_pinned = False
                with background(device):
                    cuda.unregister(self.tensor.data_ptr())
            return device


@dataclass(frozen=True, slots=True)
class _File:
    """The file of a slot. It is identified by device and inode, since another file may get its name
    later.
    """

    path: str
    device: int
    inode: int

    def is_whole(self, nbytes: int) -> bool:
        """Return True if the file still exists under its name and has at least ``nbytes`` bytes."""
        try:
            status = os.lstat(self.path)
        except OSError:
            return False
        return self._is_same(status) and status.st_size >= nbytes

    def open(self) -> int:
        """Return a descriptor of the file. Raises ``SlotLost`` if the file was removed."""
        try:
            descriptor = os.open(
                self.path, os.O_RDWR | os.O_NOFOLLOW | os.O_NONBLOCK | os.O_CLOEXEC
            )
        except OSError:
            raise SlotLost from None
        if not self._is_same(os.fstat(descriptor)):
            os.close(descriptor)
            raise SlotLost
        return descriptor

    def unlink(self) -> None:
        """Remove the file, unless its name belongs to another file now."""
        with contextlib.suppress(OSError):
            if self._is_same(os.lstat(self.path)):
                os.unlink(self.path)

    def _is_same(self, status: os.stat_result) -> bool:
        return (status.st_dev, status.st_ino) == (self.device, self.inode)


def _unlink(file: _File | None, owner_pid: int) -> None:
    if file is not None and os.getpid() == owner_pid:
        file.unlink()


def capacity_of(nbytes: int) -> int:
    """Return the size of a slot for an image of ``nbytes``, rounded up to a multiple of 2 MiB."""
    return -(-nbytes // _HUGE_PAGE_BYTES) * _HUGE_PAGE_BYTES


def check_wanted(is_wanted: Callable[[], bool]) -> None:
    """Raise ``SlotCancelled`` if ``is_wanted`` returns False."""
    if not is_wanted():
        raise SlotCancelled


def _map_file(path: str, nbytes: int, is_wanted: Callable[[], bool]) -> tuple[mmap.mmap, _File]:
    """Create a file in /dev/shm with all of its pages, and map it."""
    descriptor = os.open(path, os.O_RDWR | os.O_CREAT | os.O_EXCL | os.O_CLOEXEC, 0o600)
    try:
        for start in range(0, nbytes, _ALLOCATION_BYTES):
            check_wanted(is_wanted)
            os.posix_fallocate(descriptor, start, min(_ALLOCATION_BYTES, nbytes - start))
        status = os.fstat(descriptor)
        return mmap.mmap(descriptor, nbytes), _File(path, status.st_dev, status.st_ino)
    except BaseException:
        with contextlib.suppress(OSError):
            os.unlink(path)
        raise
    finally:
        os.close(descriptor)


def _map_anonymous(nbytes: int) -> mmap.mmap:
    """Map anonymous memory, with huge pages if the kernel has them."""
    try:
        memory = mmap.mmap(-1, nbytes, flags=mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS)
    except OSError as error:
        raise HostMemoryExhausted(nbytes, os.strerror(error.errno or errno.ENOMEM)) from None
    with contextlib.suppress(OSError):  # A kernel without huge pages refuses
        memory.madvise(mmap.MADV_HUGEPAGE)
    return memory
