"""Filling any memory from a file: past the page cache, but out of it for what lies there already.

A direct read wants offset and address at multiples of a block; a tensor's memory and its bytes in a file are rarely both. Where they fit each other, whole blocks go straight to their place, and the
ragged ends, whose blocks hold other bytes too, come by the same request through a few pages. Otherwise all of it passes through a buffer that each thread keeps: of huge pages, since a disk serves few
long pieces of memory up to twice as fast as many short ones, and small enough to be copied out of the CPU's cache.
"""

from __future__ import annotations

import ctypes
import errno
import fcntl
import mmap
import os
import struct
import threading
from collections.abc import Sequence
from typing import Final

from ckpt.storage.api import aligned_memory
from ckpt_backends.direct_io import ALIGNMENT, address

BUFFER_BYTES: Final = 2 << 20
_DIRECT_BYTES: Final = 64 << 10
"""Fewer are not worth a request past the cache."""
_DROP_CACHE_BYTES: Final = 8 << 20
_REFUSALS: Final = frozenset({errno.EINVAL, errno.EOPNOTSUPP, errno.EFAULT})  # EFAULT: a device's memory
_AT_EMPTY_PATH: Final = 0x1000
_STATX_DIOALIGN: Final = 0x2000
_SYS_CACHESTAT: Final = 451  # on every architecture but alpha
_LIBC: Final = ctypes.CDLL(None, use_errno=True)


def read_at(path: str, offset: int, out: memoryview, *, direct: bool = True) -> int:
    """Fill ``out`` from ``offset`` of the file as far as the file goes; returns how many bytes that was."""
    fd = os.open(path, os.O_RDONLY | os.O_NOFOLLOW | os.O_CLOEXEC)
    try:
        if is_cached(fd, offset, out.nbytes):
            return _read_buffered(fd, offset, out)
        done = _read_direct(fd, offset, out) if direct and out.nbytes >= _DIRECT_BYTES else 0
        more = _read_buffered(fd, offset + done, out[done:])
        if more >= _DROP_CACHE_BYTES:
            os.posix_fadvise(fd, offset + done, more, os.POSIX_FADV_DONTNEED)
        return done + more
    finally:
        os.close(fd)


def is_cached(fd: int, offset: int, nbytes: int) -> bool:
    """Whether all of it lies in the page cache, as everything on a tmpfs does. False if the kernel (before 6.5) cannot tell."""
    asked = (ctypes.c_uint64 * 2)(offset, nbytes)
    told = (ctypes.c_uint64 * 5)()
    if not nbytes or _LIBC.syscall(ctypes.c_long(_SYS_CACHESTAT), fd, asked, told, 0):
        return False
    pages = (offset + nbytes - 1) // mmap.PAGESIZE - offset // mmap.PAGESIZE + 1
    return told[0] >= pages


def blocks_of(fd: int) -> tuple[int, int]:
    """What addresses, and what offsets and lengths, must be multiples of."""
    told = ctypes.create_string_buffer(256)
    statx = getattr(_LIBC, "statx", None)
    if statx is not None and not statx(fd, b"", _AT_EMPTY_PATH, _STATX_DIOALIGN, told):
        mask, memory, offset = struct.unpack_from("=I148xII", told)
        if mask & _STATX_DIOALIGN and memory and offset:
            return memory, offset
    return ALIGNMENT, ALIGNMENT


class _Buffer(threading.local):
    """One for each thread that needs it, until the thread ends."""

    def __init__(self) -> None:
        self._memory: memoryview | None = None

    def get(self) -> memoryview:
        if self._memory is None:
            self._memory = aligned_memory(BUFFER_BYTES)
        return self._memory


_buffer: Final = _Buffer()


def _read_buffered(fd: int, offset: int, out: memoryview) -> int:
    done = 0
    while done < out.nbytes and (count := os.preadv(fd, [out[done:]], offset + done)):
        done += count
    return done


def _read_direct(fd: int, offset: int, out: memoryview) -> int:
    """How many bytes were read; what is left lies behind the end of the file, or must be read buffered."""
    memory_block, block = blocks_of(fd)
    fits = not (address(out) + -offset % block) % memory_block  # the first whole block's place
    return (_read_straight if fits else _read_through)(fd, offset, out, block)


def _read_straight(fd: int, offset: int, out: memoryview, block: int) -> int:
    lead, head = (
        offset % block,
        -offset % block,
    )  # bytes before out in its first block, and of out in that block
    body = (out.nbytes - head) // block * block
    tail = out.nbytes - head - body
    ends = memoryview(mmap.mmap(-1, 2 * block, mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS))
    first, last = ends[: block if head else 0], ends[block : 2 * block if tail else block]
    count = _pread_direct(fd, [first, out[head:][:body], last], offset - lead)
    out[:head] = first[lead:]
    out[head + body :] = last[:tail]
    return min(max(count - lead, 0), out.nbytes)


def _read_through(fd: int, offset: int, out: memoryview, block: int) -> int:
    buffer, place, done = _buffer.get(), address(out), 0
    while done < out.nbytes:
        lead = (offset + done) % block
        asked = min(buffer.nbytes, -(-(lead + out.nbytes - done) // block) * block)
        count = _pread_direct(fd, [buffer[:asked]], offset + done - lead)
        useful = min(max(count - lead, 0), out.nbytes - done)
        ctypes.memmove(
            place + done, address(buffer) + lead, useful
        )  # lets other threads run, as a slice does not
        done += useful
        if count < asked:
            break
    return done


def _pread_direct(fd: int, parts: Sequence[memoryview], offset: int) -> int:
    """0 also if it is refused, at the first read or at a later one."""
    try:
        flags = fcntl.fcntl(fd, fcntl.F_GETFL)
        fcntl.fcntl(fd, fcntl.F_SETFL, flags | os.O_DIRECT)
        try:
            return os.preadv(fd, [part for part in parts if part.nbytes], offset)
        finally:
            fcntl.fcntl(fd, fcntl.F_SETFL, flags)
    except OSError as error:
        if error.errno not in _REFUSALS:
            raise
        return 0
