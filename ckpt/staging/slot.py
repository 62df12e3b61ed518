"""One buffer: a file in ``/dev/shm``, or anonymous memory."""

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
_STEP_BYTES: Final = 16 << 20
_ROUND: Final = 2 << 20  # A huge page
_log = logging.getLogger("ckpt")


class NotWanted(Exception):
    """The making of a slot was given up: the pool is closing."""


class SlotLost(Exception):
    """The file of a slot was removed from /dev/shm, by logind or a cleaner.

    Its memory is whole, but has no name any more.
    """


class Slot:
    """One buffer.

    Attributes:
        view: Its memory as bytes.
        tensor: The same memory for torch.
        path: Its file in /dev/shm, if it is one.
        laid: What was laid over its memory, by the plan it was made for. It ends with the slot, so
            that no plan keeps the memory mapped.
    """

    def __init__(
        self, nbytes: int, path: str | None, wanted: Callable[[], bool] = lambda: True
    ) -> None:
        """``wanted`` is asked now and then while it is made, which takes a second per GiB: False
        ends that with ``NotWanted``.
        """
        self._wanted = wanted
        self.capacity = capacity_of(nbytes)
        self.path = path
        self._pinned_for: torch.device | None = None
        self._pinning = threading.Lock()
        self._closed = False
        self.pinned = False
        """Whether CUDA has page-locked it."""
        self.laid: weakref.WeakKeyDictionary[Any, Any] = weakref.WeakKeyDictionary()
        self._file: _File | None = None
        if path:
            self._map, self._file = _map_file(path, self.capacity, wanted)
        else:
            self._map = _map_anonymous(self.capacity)
        self.view = memoryview(self._map)
        self.tensor = torch.frombuffer(self._map, dtype=torch.uint8)
        # The file goes even if no caller closes the slot. A fork leaves it to its parent.
        self._remove = weakref.finalize(self, _unlink, self._file, os.getpid())

    @property
    def shared(self) -> bool:
        return self.path is not None

    def regrow(self) -> None:
        """Bring the file back to its full length. It was cut when a store in memory took the image
        in it.

        Raises:
            SlotLost: Its file is gone.
            HostMemoryExhausted: Other processes have taken the memory that was cut off.
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
        # The pin still holds the pages that were cut off, and not those in their place.
        if (device := self._unpin()) is not None:
            self.pin([device])

    def prefault(self) -> None:
        """Touch every page now: a first touch is many times slower than a reuse.

        Raises:
            HostMemoryExhausted: The pages are not there; touching them would have ended the
                process.
        """
        try:
            for start in range(0, self.capacity, _STEP_BYTES):
                _ask(self._wanted)
                self._map.madvise(
                    _MADV_POPULATE_WRITE, start, min(_STEP_BYTES, self.capacity - start)
                )
        except OSError as error:
            if error.errno != errno.EINVAL:
                raise HostMemoryExhausted(
                    self.capacity, os.strerror(error.errno or errno.ENOMEM)
                ) from None
            self.tensor[:: mmap.PAGESIZE] = 0  # Kernels before 5.14 do not know the advice

    def pin(self, devices: Devices) -> None:
        """Page-lock the memory once, so that copies from those of ``devices`` that are CUDA's are
        asynchronous. May be called from any thread.
        """
        device = next((device for device in devices if device.type == "cuda"), None)
        with self._pinning:
            if device is None or self._closed or self._pinned_for is not None:
                return
            self._pinned_for = device
            with background(device):
                code = cuda.register(self.tensor.data_ptr(), self.capacity)
            self.pinned = code == 0
            if not self.pinned:
                _log.warning(
                    "ckpt: could not pin a slot of %d MiB (CUDA error %s): copies from the GPU "
                    "will be slower",
                    self.capacity >> 20,
                    code,
                )

    def close(self) -> None:
        """Remove the file and let go of the memory.

        Views that are still held keep their mapping alive, not the file.
        """
        self._unpin(closed=True)
        self.laid.clear()
        self._remove()

    def _unpin(self, *, closed: bool = False) -> torch.device | None:
        """Returns the device that it was pinned for."""
        with self._pinning:
            device, self._pinned_for, self._closed = self._pinned_for, None, closed
            if device is not None and self.pinned:
                self.pinned = False
                with background(device):
                    cuda.unregister(self.tensor.data_ptr())
            return device


@dataclass(frozen=True, slots=True)
class _File:
    """The file of a slot. The name does not identify it: another file may take the name later."""

    path: str
    device: int
    inode: int

    def is_whole(self, nbytes: int) -> bool:
        """Return True if it is in its place and has at least ``nbytes``."""
        try:
            found = os.lstat(self.path)
        except OSError:
            return False
        return self._is(found) and found.st_size >= nbytes

    def open(self) -> int:
        """Return a descriptor of it. Raises ``SlotLost`` if it is gone."""
        try:
            descriptor = os.open(
                self.path, os.O_RDWR | os.O_NOFOLLOW | os.O_NONBLOCK | os.O_CLOEXEC
            )
        except OSError:
            raise SlotLost from None
        if not self._is(os.fstat(descriptor)):
            os.close(descriptor)
            raise SlotLost
        return descriptor

    def unlink(self) -> None:
        with contextlib.suppress(OSError):
            if self._is(os.lstat(self.path)):
                os.unlink(self.path)

    def _is(self, found: os.stat_result) -> bool:
        return (found.st_dev, found.st_ino) == (self.device, self.inode)


def _unlink(file: _File | None, owner: int) -> None:
    if file is not None and os.getpid() == owner:
        file.unlink()


def capacity_of(nbytes: int) -> int:
    """Return the length of a slot for an image of ``nbytes``."""
    return -(-nbytes // _ROUND) * _ROUND


def _ask(wanted: Callable[[], bool]) -> None:
    if not wanted():
        raise NotWanted


def _map_file(path: str, nbytes: int, wanted: Callable[[], bool]) -> tuple[mmap.mmap, _File]:
    descriptor = os.open(path, os.O_RDWR | os.O_CREAT | os.O_EXCL | os.O_CLOEXEC, 0o600)
    try:
        for start in range(0, nbytes, _STEP_BYTES):
            _ask(wanted)
            os.posix_fallocate(descriptor, start, min(_STEP_BYTES, nbytes - start))
        found = os.fstat(descriptor)
        return mmap.mmap(descriptor, nbytes), _File(path, found.st_dev, found.st_ino)
    except BaseException:
        with contextlib.suppress(OSError):
            os.unlink(path)
        raise
    finally:
        os.close(descriptor)


def _map_anonymous(nbytes: int) -> mmap.mmap:
    try:
        return mmap.mmap(-1, nbytes, flags=mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS)
    except OSError as error:
        raise HostMemoryExhausted(nbytes, os.strerror(error.errno or errno.ENOMEM)) from None
