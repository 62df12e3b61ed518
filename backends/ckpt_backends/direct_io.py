"""Direct I/O: reads and writes of a file past the page cache, in any memory.

``O_DIRECT`` costs a tenth of the CPU and does not push the trainer's pages out. It needs offsets,
lengths and addresses that are multiples of a block. A file system may refuse it when the file is
opened, or only at a certain request, so the page cache can take over at any call.

A write is direct if its memory is aligned. Of a read, whole blocks go straight to their place where
the memory of a tensor and its bytes in the file fit each other. The same request reads the ragged
ends, whose blocks hold other bytes too, through two pages. Everything else passes through a buffer
that each thread keeps. The buffer consists of huge pages, since a disk serves few long pieces of
memory up to twice as fast as many short ones. It is small enough to be copied out of the CPU's
cache. What the page cache already holds is read from it.
"""

from __future__ import annotations

import ctypes
import errno
import fcntl
import mmap
import os
import struct
import threading
from collections.abc import Iterable, Sequence
from itertools import accumulate, groupby
from typing import Final

import numpy as np

from ckpt.storage.api import Buffer, aligned_memory

# This covers the logical block of every disk in use. A store that wants more refuses, and is
# written through the page cache.
ALIGNMENT: Final = 4096
_REFUSALS: Final = frozenset({errno.EINVAL, errno.EOPNOTSUPP})
# Direct reads into the memory of a device fail with EFAULT.
_READ_REFUSALS: Final = _REFUSALS | {errno.EFAULT}
_RENAME_NOREPLACE: Final = 1
_AT_FDCWD: Final = -100
_LIBC: Final = ctypes.CDLL(None, use_errno=True)
BUFFER_BYTES: Final = 2 << 20
STRAIGHT_BYTES: Final = 1 << 20
"""Fewer bytes are better read together with their neighbours."""
_DIRECT_BYTES: Final = 4096
_DROP_CACHE_BYTES: Final = 8 << 20
_SHORT_COPY_BYTES: Final = 64 << 10
_MOST_PARTS: Final = 1024  # The most parts of one request to the kernel
_AT_EMPTY_PATH: Final = 0x1000
_STATX_DIOALIGN: Final = 0x2000
_SYS_CACHESTAT: Final = 451  # The number on every architecture but alpha


def address(memory: memoryview) -> int:
    """Return the address of the first byte of ``memory``."""
    return int(np.frombuffer(memory, dtype=np.uint8).ctypes.data) if memory.nbytes else 0


def is_aligned(offset: int, memory: memoryview) -> bool:
    """Return True if ``O_DIRECT`` takes this memory and offset as they are."""
    return not (offset % ALIGNMENT or memory.nbytes % ALIGNMENT or address(memory) % ALIGNMENT)


def open_direct(path: str, flags: int) -> int | None:
    """Return a second descriptor that bypasses the page cache, or None if the file system has
    none.
    """
    try:
        return os.open(path, flags | os.O_DIRECT | os.O_NOFOLLOW | os.O_CLOEXEC)
    except OSError as error:
        if error.errno in _REFUSALS:
            return None
        raise


def write_all(fd: int, parts: Iterable[Buffer]) -> int:
    """Append all of ``parts`` at the descriptor's position; returns how many bytes that were."""
    total = 0
    for part in parts:
        left = memoryview(part).cast("B")
        total += left.nbytes
        while left.nbytes:
            left = left[os.write(fd, left) :]
    return total


def pwrite_all(fd: int, offset: int, data: memoryview) -> None:
    """Write all of ``data`` at ``offset``. A short write is continued."""
    while data.nbytes:
        done = os.pwrite(fd, data, offset)
        offset, data = offset + done, data[done:]


class DirectWriter:
    """Writes to one file, past the page cache where memory and file system allow it.

    Thread safety: several threads may call ``write`` at the same time, on disjoint ranges. One
    thread calls ``sync`` and ``close``, when no ``write`` runs.
    """

    def __init__(self, path: str, fd: int, size: int, *, direct: bool = True) -> None:
        self.fd, self._size = fd, size
        self._direct = open_direct(path, os.O_WRONLY) if direct and size >= ALIGNMENT else None
        self._refused = self._direct is None

    def write(self, offset: int, data: memoryview) -> None:
        """Write ``data`` at ``offset``. The call may be repeated."""
        whole = data.nbytes - data.nbytes % ALIGNMENT
        if offset + data.nbytes != self._size:
            # Only the end of the file may be padded. An odd run elsewhere is buffered as a whole.
            whole = data.nbytes
        done = self._write_direct(offset, data[:whole]) if whole else 0
        offset, data = offset + done, data[done:]
        if 0 < data.nbytes < ALIGNMENT and done == whole and self._write_padded(offset, data):
            return
        pwrite_all(self.fd, offset, data)

    def sync(self, size: int) -> None:
        """Cut the padding off, and what was reserved beyond ``size``, and wait until the bytes
        are on the medium.
        """
        os.ftruncate(self.fd, size)
        os.fsync(self.fd)

    def close(self) -> None:
        """Close both descriptors; raises ``OSError`` if the file system reports a late failure
        (NFS).
        """
        direct, self._direct, self._refused = self._direct, None, True
        fd, self.fd = self.fd, -1
        try:
            if direct is not None:
                os.close(direct)
        finally:
            if fd >= 0:
                os.close(fd)

    def _write_direct(self, offset: int, data: memoryview) -> int:
        """Return how many bytes the direct descriptor took. The rest must be written through the
        page cache.
        """
        done = 0
        while done < data.nbytes and not self._refused and is_aligned(offset + done, data[done:]):
            assert self._direct is not None
            try:
                done += os.pwrite(self._direct, data[done:], offset + done)
            except OSError as error:
                if error.errno not in _REFUSALS:
                    raise
                # The descriptor stays open, since another thread may be writing to it.
                self._refused = True
        return done

    def _write_padded(self, offset: int, tail: memoryview) -> bool:
        """Write the file's unaligned end as a whole block that ``sync`` cuts again.

        False if it must go buffered.
        """
        if self._refused:
            return False
        # A mapping begins at a page. An error's traceback may still refer to it, so it stays open.
        page = mmap.mmap(-1, ALIGNMENT)
        page[: tail.nbytes] = bytes(tail)
        return self._write_direct(offset, memoryview(page)) == ALIGNMENT


def reserve(fd: int, size: int) -> None:
    """Reserve ``size`` bytes, where the file system can; raises ``OSError`` (ENOSPC) if they are
    not there.

    Not ``os.posix_fallocate``: where the file system cannot, glibc would write one byte into every
    block, for minutes on NFSv3.
    """
    if size and _LIBC.fallocate(fd, 0, ctypes.c_int64(0), ctypes.c_int64(size)):
        code = ctypes.get_errno()
        if code not in (errno.EOPNOTSUPP, errno.ENOSYS, errno.EINVAL):
            raise OSError(code, os.strerror(code))


def rename_if_absent(source: str, target: str) -> None:
    """Rename, but never over something.

    Raises ``FileExistsError``; EOPNOTSUPP if the file system has no way to do it.
    """
    if _rename_noreplace(source, target):
        return
    try:
        os.link(source, target, follow_symlinks=False)
    except FileExistsError:
        # An NFS client asks again if a reply is lost, so the link may be the one made here.
        if not os.path.samefile(source, target):
            raise
    except OSError as error:
        if error.errno in (errno.EPERM, errno.EOPNOTSUPP, errno.ENOSYS, errno.EMLINK):
            text = (
                "it can neither link nor rename without replacing; with one leader, open it with "
                "the option put_if_absent=false"
            )
            raise OSError(errno.EOPNOTSUPP, text) from error
        raise
    os.unlink(source)


def _rename_noreplace(source: str, target: str) -> bool:
    """Rename unless the target exists. Return False if the kernel or the file system does not know
    the flag (NFS, most of FUSE).
    """
    renameat2 = getattr(_LIBC, "renameat2", None)
    if renameat2 is None:
        return False
    if not renameat2(
        _AT_FDCWD, os.fsencode(source), _AT_FDCWD, os.fsencode(target), _RENAME_NOREPLACE
    ):
        return True
    code = ctypes.get_errno()
    if code in (errno.EINVAL, errno.ENOSYS, errno.EOPNOTSUPP):
        return False
    raise OSError(code, os.strerror(code), target)


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
        if error.errno not in _READ_REFUSALS:
            raise
        return 0
