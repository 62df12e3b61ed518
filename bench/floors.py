"""The machine's own speed, without any contender: a warm copy, a plain direct write, a plain direct
read (buffered where there is no direct I/O).

Buffers are warm and at most ``WINDOW_BYTES``, more than any cache holds, so that floors fit beside
states of several GiB; at most ``FILE_BYTES`` are written or read. Times of more bytes than that are
those of the window or file, in proportion.
"""

from __future__ import annotations

import contextlib
import ctypes
import errno
import mmap
import os
import time
from collections.abc import Callable, Generator
from concurrent.futures import ThreadPoolExecutor
from typing import Final

WINDOW_BYTES: Final = 256 << 20
FILE_BYTES: Final = 1 << 30
_BLOCK: Final = 4096
_REQUEST_BYTES: Final = 8 << 20
_THREADS: Final = 4


class Floors:
    """Warm buffers, and the three clocks.

    ``nbytes``: the size of the state that is compared with.
    """

    def __init__(self, nbytes: int) -> None:
        self._nbytes = nbytes
        self._window = min(_rounded(nbytes), WINDOW_BYTES)
        self._file = min(_rounded(nbytes), FILE_BYTES)
        self._source, self._target = (mmap.mmap(-1, self._window) for _ in range(2))
        for buffer in (self._source, self._target):
            noise = os.urandom(_BLOCK)
            for start in range(0, self._window, _BLOCK):  # touched, and not zeros
                buffer[start : start + _BLOCK] = noise

    def copy(self) -> float:
        """Seconds of a warm copy by one thread (``memmove``)."""
        source, target = _address(self._source), _address(self._target)
        began = time.perf_counter()
        ctypes.memmove(target, source, self._window)
        return (time.perf_counter() - began) * self._nbytes / self._window

    def write(self, folder: str) -> float:
        """Seconds of ``O_DIRECT`` writes of 8 MiB by 4 threads into a new preallocated file,
        fsynced with its folder.
        """
        path = os.path.join(folder, "floor")
        began = time.perf_counter()
        with _opened(path, os.O_WRONLY | os.O_CREAT | os.O_EXCL) as descriptor:
            os.posix_fallocate(descriptor, 0, self._file)
            self._each(lambda view, offset: os.pwrite(descriptor, view, offset), self._source)
            os.fsync(descriptor)
        with _opened(folder, os.O_RDONLY, direct=False) as descriptor:
            os.fsync(descriptor)
        seconds = time.perf_counter() - began
        os.unlink(path)
        # no other program has to write what that leaves
        with _opened(folder, os.O_RDONLY, direct=False) as descriptor:
            os.fsync(descriptor)
        return seconds * self._nbytes / self._file

    def read(self, folder: str) -> float:
        """Seconds of ``O_DIRECT`` reads of 8 MiB by 4 threads, of a file written off the clock,
        into warm memory.
        """
        path = os.path.join(folder, f"floor-read-{self._file}")  # one per size of a run
        if not os.path.exists(path):
            with _opened(path, os.O_WRONLY | os.O_CREAT | os.O_EXCL) as descriptor:
                os.posix_fallocate(descriptor, 0, self._file)
                self._each(lambda view, offset: os.pwrite(descriptor, view, offset), self._source)
                os.fsync(descriptor)
        began = time.perf_counter()
        with _opened(path, os.O_RDONLY) as descriptor:
            self._each(lambda view, offset: os.preadv(descriptor, [view], offset), self._target)
        return (time.perf_counter() - began) * self._nbytes / self._file

    def _each(self, move: Callable[[memoryview, int], int], buffer: mmap.mmap) -> None:
        memory = memoryview(buffer)

        def request(offset: int) -> None:
            start = offset % self._window
            left = memory[
                start : start + min(_REQUEST_BYTES, self._file - offset, self._window - start)
            ]
            while left.nbytes:
                count = move(left, offset)
                assert count > 0
                left, offset = left[count:], offset + count

        with ThreadPoolExecutor(_THREADS) as pool:
            list(pool.map(request, range(0, self._file, _REQUEST_BYTES)))


def _rounded(nbytes: int) -> int:
    return -(-nbytes // _BLOCK) * _BLOCK


def _address(buffer: mmap.mmap) -> int:
    return ctypes.addressof(ctypes.c_char.from_buffer(buffer))


@contextlib.contextmanager
def _opened(path: str, flags: int, *, direct: bool = True) -> Generator[int]:
    try:
        descriptor = os.open(path, flags | os.O_CLOEXEC | (os.O_DIRECT if direct else 0), 0o600)
    except OSError as error:
        if not direct or error.errno != errno.EINVAL:
            raise
        descriptor = os.open(
            path, (flags | os.O_CLOEXEC) & ~os.O_EXCL, 0o600
        )  # a file system that has no direct I/O
    try:
        yield descriptor
    finally:
        os.close(descriptor)
