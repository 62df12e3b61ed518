"""Reads from a file into any memory: past the page cache, or out of it for what it already holds.

A direct read needs an offset and an address that are multiples of a block. A tensor's memory and
its bytes in a file rarely are. Where the two fit each other, whole blocks go straight to their
place. The same request reads the ragged ends, whose blocks hold other bytes too, through two pages.
Everything else passes through a buffer that each thread keeps. The buffer consists of huge pages,
since a disk serves few long pieces of memory up to twice as fast as many short ones. It is small
enough to be copied out of the CPU's cache.
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
from itertools import accumulate, groupby
from typing import Final

from ckpt.storage.api import aligned_memory
from ckpt_backends.direct_io import ALIGNMENT, address

BUFFER_BYTES: Final = 2 << 20
STRAIGHT_BYTES: Final = 1 << 20
"""Fewer bytes are better read together with their neighbours."""
_DIRECT_BYTES: Final = 4096
_DROP_CACHE_BYTES: Final = 8 << 20
_SHORT_COPY_BYTES: Final = 64 << 10
_MOST_PARTS: Final = 1024  # The most parts of one request to the kernel
# Direct reads into the memory of a device fail with EFAULT.
_REFUSALS: Final = frozenset({errno.EINVAL, errno.EOPNOTSUPP, errno.EFAULT})
_AT_EMPTY_PATH: Final = 0x1000
_STATX_DIOALIGN: Final = 0x2000
_SYS_CACHESTAT: Final = 451  # The number on every architecture but alpha
_LIBC: Final = ctypes.CDLL(None, use_errno=True)


def read_at(path: str, offset: int, outs: Sequence[memoryview], *, direct: bool = True) -> int:
    """Fill ``outs``, one after another, from ``offset`` of the file as far as the file goes;
    returns how many bytes that was.
    """
    asked = sum(out.nbytes for out in outs)
    fd = os.open(path, os.O_RDONLY | os.O_NOFOLLOW | os.O_CLOEXEC)
    try:
        if is_cached(fd, offset, asked):
            return _read_buffered(fd, offset, outs)
        done = _read_direct(fd, offset, outs) if direct and asked >= _DIRECT_BYTES else 0
        more = _read_buffered(fd, offset + done, _after(outs, done))
        if more >= _DROP_CACHE_BYTES:
            os.posix_fadvise(fd, offset + done, more, os.POSIX_FADV_DONTNEED)
        return done + more
    finally:
        os.close(fd)


def is_cached(fd: int, offset: int, nbytes: int) -> bool:
    """Return True if all of it is in the page cache, as everything on a tmpfs is.

    Returns False if the kernel (before 6.5) cannot tell.
    """
    asked = (ctypes.c_uint64 * 2)(offset, nbytes)
    counts = (ctypes.c_uint64 * 5)()
    if not nbytes or _LIBC.syscall(ctypes.c_long(_SYS_CACHESTAT), fd, asked, counts, 0):
        return False
    pages = (offset + nbytes - 1) // mmap.PAGESIZE - offset // mmap.PAGESIZE + 1
    return counts[0] >= pages


def blocks_of(fd: int) -> tuple[int, int]:
    """Return the multiples that addresses, and that offsets and lengths, must have."""
    status = ctypes.create_string_buffer(256)
    statx = getattr(_LIBC, "statx", None)
    if statx is not None and not statx(fd, b"", _AT_EMPTY_PATH, _STATX_DIOALIGN, status):
        mask, memory, offset = struct.unpack_from("=I148xII", status)
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


def _after(outs: Sequence[memoryview], done: int) -> list[memoryview]:
    """Return what is left of ``outs`` after the first ``done`` bytes."""
    left: list[memoryview] = []
    for out in outs:
        if done < out.nbytes:
            left.append(out[done:])
        done = max(0, done - out.nbytes)
    return left


def _read_buffered(fd: int, offset: int, outs: Sequence[memoryview]) -> int:
    left, done = _after(outs, 0), 0
    while left and (count := os.preadv(fd, left[:_MOST_PARTS], offset + done)):
        left, done = _after(left, count), done + count
    return done


def _read_direct(fd: int, offset: int, outs: Sequence[memoryview]) -> int:
    """Return how many bytes were read.

    The rest is behind the end of the file, or must be read through the page cache.
    """
    memory_block, block = blocks_of(fd)

    def fits(part: tuple[memoryview, int]) -> bool:
        out, start = part
        return out.nbytes >= STRAIGHT_BYTES and not (address(out) + -start % block) % memory_block

    starts = accumulate((out.nbytes for out in outs), initial=offset)
    end = offset
    for straight, group in groupby(zip(outs, starts, strict=False), fits):
        parts = [out for out, _ in group]
        for some in [[part] for part in parts] if straight else [parts]:
            count = (_read_straight if straight else _read_through)(fd, end, some, block)
            end += count
            if count < sum(out.nbytes for out in some):
                return end - offset
    return end - offset


def _read_straight(fd: int, offset: int, outs: Sequence[memoryview], block: int) -> int:
    [out] = outs
    # The bytes before ``out`` in its first block, and those of ``out`` in that block.
    lead, head = offset % block, -offset % block
    body = (out.nbytes - head) // block * block
    tail = out.nbytes - head - body
    ends = memoryview(mmap.mmap(-1, 2 * block, mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS))
    first, last = ends[: block if head else 0], ends[block : 2 * block if tail else block]
    count = _pread_direct(fd, [first, out[head:][:body], last], offset - lead)
    out[:head] = first[lead:]
    out[head + body :] = last[:tail]
    return min(max(count - lead, 0), out.nbytes)


def _read_through(fd: int, offset: int, outs: Sequence[memoryview], block: int) -> int:
    buffer = _buffer.get()
    left, done, asked = list(outs), 0, sum(out.nbytes for out in outs)
    while done < asked:
        lead = (offset + done) % block
        room = min(buffer.nbytes, -(-(lead + asked - done) // block) * block)
        count = _pread_direct(fd, [buffer[:room]], offset + done - lead)
        useful = min(max(count - lead, 0), asked - done)
        left = _pour(buffer[lead : lead + useful], left)
        done += useful
        if count < room:
            break
    return done


def _pour(source: memoryview, outs: list[memoryview]) -> list[memoryview]:
    """Fill the first of ``outs`` with ``source``; returns what is left of them."""
    for index, out in enumerate(outs):
        if out.nbytes > source.nbytes:
            _copy(out[: source.nbytes], source)
            return [out[source.nbytes :], *outs[index + 1 :]]
        _copy(out, source[: out.nbytes])
        source = source[out.nbytes :]
    return []


def _copy(out: memoryview, source: memoryview) -> None:
    if out.nbytes < _SHORT_COPY_BYTES:
        out[:] = source
    else:
        # Unlike a slice, this lets other threads run meanwhile.
        ctypes.memmove(address(out), address(source), out.nbytes)


def _pread_direct(fd: int, parts: Sequence[memoryview], offset: int) -> int:
    """Read without the page cache. Return 0 if that is refused, at the first read or at a later
    one.
    """
    try:
        fcntl.fcntl(fd, fcntl.F_SETFL, os.O_DIRECT)
        try:
            return os.preadv(fd, [part for part in parts if part.nbytes], offset)
        finally:
            fcntl.fcntl(fd, fcntl.F_SETFL, 0)
    except OSError as error:
        if error.errno not in _REFUSALS:
            raise
        return 0
