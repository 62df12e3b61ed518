"""One buffer: a file in ``/dev/shm``, or anonymous memory."""

from __future__ import annotations

import contextlib
import errno
import logging
import mmap
import os
import weakref
from collections.abc import Callable
from typing import Any, Final

import torch

from ckpt.errors import HostMemoryExhausted

_MADV_POPULATE_WRITE: Final = 23  # Linux 5.14
_STEP_BYTES: Final = 64 << 20
_ROUND: Final = 2 << 20  # a huge page
_log = logging.getLogger("ckpt")


class NotWanted(Exception):
    """The making of a slot was given up: the pool is closing."""


class Slot:
    """One buffer. ``view`` is its memory as bytes, ``tensor`` the same memory for torch; ``path`` its file in /dev/shm, if it is one."""

    def __init__(self, nbytes: int, path: str | None, wanted: Callable[[], bool] = lambda: True) -> None:
        """``wanted`` is asked now and then while it is made, which takes a second per GiB: False ends that with ``NotWanted``."""
        self._wanted = wanted
        self.capacity = -(-nbytes // _ROUND) * _ROUND
        self.path = path
        self._pinned = False
        self._map = _map_file(path, self.capacity, wanted) if path else _map_anonymous(self.capacity)
        self.view = memoryview(self._map)
        self.tensor = torch.frombuffer(self._map, dtype=torch.uint8)
        # also when nobody closes it; a fork that ends leaves its parent's file alone
        self._remove = weakref.finalize(self, _unlink, path, os.getpid())
        if torch.cuda.is_available():
            self._pin()

    @property
    def shared(self) -> bool:
        return self.path is not None

    def regrow(self) -> None:
        """Back to its full length: it was cut when a store in memory took the image in it.

        Raises:
            HostMemoryExhausted: Others have taken what was cut off.
        """
        if self.path and (size := os.stat(self.path).st_size) < self.capacity:
            descriptor = os.open(self.path, os.O_RDWR | os.O_CLOEXEC)
            try:
                os.posix_fallocate(descriptor, size, self.capacity - size)
            except OSError as error:
                raise HostMemoryExhausted(self.capacity, os.strerror(error.errno or errno.ENOSPC)) from None
            finally:
                os.close(descriptor)
            if (
                self._pinned
            ):  # the pin still holds the pages that were cut off, not those that came in their place
                _cudart().cudaHostUnregister(self.tensor.data_ptr())
                self._pin()

    def prefault(self) -> None:
        """Touch every page now: a first touch is many times slower than a reuse.

        Raises:
            HostMemoryExhausted: The pages are not there; touching them would have ended the process.
        """
        try:
            for start in range(0, self.capacity, _STEP_BYTES):
                _ask(self._wanted)
                self._map.madvise(_MADV_POPULATE_WRITE, start, min(_STEP_BYTES, self.capacity - start))
        except OSError as error:
            if error.errno != errno.EINVAL:
                raise HostMemoryExhausted(self.capacity, os.strerror(error.errno or errno.ENOMEM)) from None
            self.tensor[:: mmap.PAGESIZE] = 0  # a kernel that does not know the word

    def close(self) -> None:
        """Remove the file and let go of the memory. Views that are still held keep their mapping alive, not the file."""
        if self._pinned:
            _cudart().cudaHostUnregister(self.tensor.data_ptr())
        self._remove()

    def _pin(self) -> None:
        code = _cudart().cudaHostRegister(self.tensor.data_ptr(), self.capacity, 0)
        self._pinned = int(code) == 0
        if not self._pinned:
            _log.warning(
                "ckpt: could not pin a slot of %d MiB (CUDA error %s): copies from the GPU will be slower",
                self.capacity >> 20,
                code,
            )


def _unlink(path: str | None, owner: int) -> None:
    if path and os.getpid() == owner:
        with contextlib.suppress(FileNotFoundError):
            os.unlink(path)


def _cudart() -> Any:
    return torch.cuda.cudart()  # type: ignore[no-untyped-call]


def _ask(wanted: Callable[[], bool]) -> None:
    if not wanted():
        raise NotWanted


def _map_file(path: str, nbytes: int, wanted: Callable[[], bool]) -> mmap.mmap:
    descriptor = os.open(path, os.O_RDWR | os.O_CREAT | os.O_EXCL | os.O_CLOEXEC, 0o600)
    try:
        for start in range(0, nbytes, _STEP_BYTES):
            _ask(wanted)
            os.posix_fallocate(descriptor, start, min(_STEP_BYTES, nbytes - start))
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
