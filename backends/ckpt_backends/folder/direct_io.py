"""Direct I/O: reads and writes of a file that bypass the page cache, for memory of any alignment.

``O_DIRECT`` takes a tenth of the CPU time of buffered I/O, and does not displace the trainer's
pages from memory. It needs offsets, lengths and addresses that are multiples of a block. A file
system may refuse ``O_DIRECT`` when the file is opened, or only at a later request. So every call
can fall back to the page cache. btrfs refuses nothing: it takes any alignment, and copies data that
it compresses or keeps checksums of.

A write is direct if its offset and its memory are aligned. The end of the file is padded to a whole
block for this. A read is direct in one of two ways:

* If a target has at least ``STRAIGHT_BYTES``, and its memory has the same alignment as its bytes in
  the file, whole blocks are read straight into the target. The first and the last block may hold
  other bytes, too. The same request reads these two blocks into separate pages.
* Otherwise, blocks are read into a buffer of the thread, and copied from there to the target. The
  buffer consists of huge pages, since a disk serves few long pieces of memory up to twice as fast
  as many short ones. It is small enough to stay in the cache of the CPU until the copy.

A range of a file is read from the page cache if all of it is already there.
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

# Common disks have logical blocks of 512 or 4096 bytes. A file system that needs a larger block
# refuses direct writes, which then go through the page cache.
ALIGNMENT: Final = 4096
_REFUSALS: Final = frozenset({errno.EINVAL, errno.EOPNOTSUPP})
# Direct reads into the memory of a device fail with EFAULT.
_READ_REFUSALS: Final = _REFUSALS | {errno.EFAULT}
_RENAME_NOREPLACE: Final = 1
_AT_FDCWD: Final = -100
_LIBC: Final = ctypes.CDLL(None, use_errno=True)
BUFFER_BYTES: Final = 2 << 20
STRAIGHT_BYTES: Final = 1 << 20
"""The fewest bytes of a target that are read straight into the target. Smaller targets are read
through the buffer, together with their neighbours.
"""
_DIRECT_BYTES: Final = 4096
_DROP_CACHE_BYTES: Final = 8 << 20
_SHORT_COPY_BYTES: Final = 64 << 10
_MOST_PARTS: Final = 1024  # The most parts of one request to the kernel
_AT_EMPTY_PATH: Final = 0x1000
_STATX_DIOALIGN: Final = 0x2000
_SYS_CACHESTAT: Final = 451  # The number on every architecture but alpha


def address(memory: memoryview) -> int:
    """Return the address of the first byte of ``memory``; 0 if it has no bytes."""
    return int(np.frombuffer(memory, dtype=np.uint8).ctypes.data) if memory.nbytes else 0


def is_aligned(offset: int, memory: memoryview) -> bool:
    """Return True if ``offset``, and the address and the length of ``memory``, are multiples of
    ``ALIGNMENT``, as ``O_DIRECT`` needs.
    """
    return not (offset % ALIGNMENT or memory.nbytes % ALIGNMENT or address(memory) % ALIGNMENT)


def open_direct(path: str, flags: int) -> int | None:
    """Open the file at ``path`` with ``O_DIRECT`` and return the descriptor, or None if the file
    system does not support it.
    """
    try:
        return os.open(path, flags | os.O_DIRECT | os.O_NOFOLLOW | os.O_CLOEXEC)
    except OSError as error:
        if error.errno in _REFUSALS:
            return None
        raise


def write_all(fd: int, parts: Iterable[Buffer]) -> int:
    """Write all of ``parts`` at the current position of ``fd``, and return the number of bytes."""
    total = 0
    for part in parts:
        rest = memoryview(part).cast("B")
        total += rest.nbytes
        while rest.nbytes:
            rest = rest[os.write(fd, rest) :]
    return total


def pwrite_all(fd: int, offset: int, data: memoryview) -> None:
    """Write all of ``data`` at ``offset``, with several system calls if needed."""
    while data.nbytes:
        count = os.pwrite(fd, data, offset)
        offset, data = offset + count, data[count:]


class DirectWriter:
    """Writes to one file, with ``O_DIRECT`` where the memory and the file system allow it.

    Args:
        path: The path of the file.
        fd: A descriptor of the file for writes through the page cache. ``close`` closes it.
        size: The most bytes of the file.
        direct: False if ``O_DIRECT`` is never to be used.

    Thread safety: several threads may call ``write`` at the same time, on disjoint ranges. One
    thread calls ``sync`` and ``close``, when no ``write`` runs.
    """

    def __init__(self, path: str, fd: int, size: int, *, direct: bool = True) -> None:
        self.fd, self._size = fd, size
        self._direct_fd = open_direct(path, os.O_WRONLY) if direct and size >= ALIGNMENT else None
        self._is_refused = self._direct_fd is None

    def write(self, offset: int, data: memoryview) -> None:
        """Write ``data`` at ``offset``. The call may be repeated after an error."""
        direct_bytes = data.nbytes - data.nbytes % ALIGNMENT
        if offset + data.nbytes != self._size:
            # Only the end of the file may be padded. Data of odd length before the end is not
            # aligned, so ``_write_direct`` writes none of it.
            direct_bytes = data.nbytes
        count = self._write_direct(offset, data[:direct_bytes]) if direct_bytes else 0
        offset, data = offset + count, data[count:]
        if (
            0 < data.nbytes < ALIGNMENT
            and count == direct_bytes
            and self._write_padded(offset, data)
        ):
            return
        pwrite_all(self.fd, offset, data)

    def sync(self, size: int) -> None:
        """Truncate the file to ``size`` bytes, which removes padding and reserved space, and force
        it to the medium.
        """
        os.ftruncate(self.fd, size)
        os.fsync(self.fd)

    def close(self) -> None:
        """Close both descriptors.

        Raises:
            OSError: The file system reports the failure of an earlier write, as NFS may do.
        """
        direct_fd, self._direct_fd, self._is_refused = self._direct_fd, None, True
        fd, self.fd = self.fd, -1
        try:
            if direct_fd is not None:
                os.close(direct_fd)
        finally:
            if fd >= 0:
                os.close(fd)

    def _write_direct(self, offset: int, data: memoryview) -> int:
        """Write ``data`` with ``O_DIRECT`` as far as that is possible, and return the number of
        bytes written. The caller writes the other bytes through the page cache.
        """
        count = 0
        while (
            count < data.nbytes
            and not self._is_refused
            and is_aligned(offset + count, data[count:])
        ):
            assert self._direct_fd is not None
            try:
                count += os.pwrite(self._direct_fd, data[count:], offset + count)
            except OSError as error:
                if error.errno not in _REFUSALS:
                    raise
                # Leave the descriptor open, since another thread may be writing to it.
                self._is_refused = True
        return count

    def _write_padded(self, offset: int, tail: memoryview) -> bool:
        """Write the last bytes of the file, padded to a whole block, with ``O_DIRECT``. ``sync``
        removes the padding.

        Return False if the file system refuses that. The caller then writes ``tail`` through the
        page cache.
        """
        if self._is_refused:
            return False
        # A mapping begins at the boundary of a page. It is not closed here, since the traceback of
        # an error may still refer to it.
        page = mmap.mmap(-1, ALIGNMENT)
        page[: tail.nbytes] = bytes(tail)
        return self._write_direct(offset, memoryview(page)) == ALIGNMENT


def reserve(fd: int, size: int) -> None:
    """Reserve ``size`` bytes for a file. Do nothing if the file system cannot reserve space.

    ``os.posix_fallocate`` is not used: if the file system cannot reserve space, glibc writes one
    byte into every block instead, which takes minutes on NFSv3.

    Raises:
        OSError: The space is not free (ENOSPC), or the call fails for another reason.
    """
    if size and _LIBC.fallocate(fd, 0, ctypes.c_int64(0), ctypes.c_int64(size)):
        code = ctypes.get_errno()
        if code not in (errno.EOPNOTSUPP, errno.ENOSYS, errno.EINVAL):
            raise OSError(code, os.strerror(code))


def rename_if_absent(source: str, target: str) -> None:
    """Rename the file ``source`` to ``target`` if ``target`` does not exist.

    Raises:
        FileExistsError: ``target`` exists.
        OSError: With EOPNOTSUPP if the file system cannot do this.
    """
    if _rename_noreplace(source, target):
        return
    try:
        os.link(source, target, follow_symlinks=False)
    except FileExistsError:
        # An NFS client repeats the request if the reply is lost, so an existing link may be the one
        # that this call made.
        if not os.path.samefile(source, target):
            raise
    except OSError as error:
        if error.errno in (errno.EPERM, errno.EOPNOTSUPP, errno.ENOSYS, errno.EMLINK):
            # sshfs reports EPERM if another client has made ``target`` since its own last look.
            if os.path.lexists(target):
                raise FileExistsError(errno.EEXIST, os.strerror(errno.EEXIST), target) from error
            text = (
                "it can neither link nor rename without replacing; with one leader, open it with "
                "the option put_if_absent=false"
            )
            raise OSError(errno.EOPNOTSUPP, text) from error
        raise
    os.unlink(source)


def _rename_noreplace(source: str, target: str) -> bool:
    """Rename the file with the flag RENAME_NOREPLACE, and return True.

    Return False if the kernel or the file system does not know the flag. NFS and most file systems
    of FUSE do not know it.

    Raises:
        FileExistsError: ``target`` exists.
        OSError: The call fails for another reason.
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
    """Fill ``outs``, one after another, with the bytes of the file from ``offset`` on.

    The memory may have any alignment. With ``direct``, the bytes are read with ``O_DIRECT`` if the
    file system allows that, unless all of them are in the page cache or ``outs`` has fewer than
    ``_DIRECT_BYTES`` in total. If ``_DROP_CACHE_BYTES`` or more are read through the page cache,
    they are dropped from it afterwards, unless all of the range was there before.

    Return the number of bytes read, which is less than the total size of ``outs`` if the file ends
    before.
    """
    nbytes = sum(out.nbytes for out in outs)
    fd = os.open(path, os.O_RDONLY | os.O_NOFOLLOW | os.O_CLOEXEC)
    try:
        if is_cached(fd, offset, nbytes):
            return _read_buffered(fd, offset, outs)
        count = _read_direct(fd, offset, outs) if direct and nbytes >= _DIRECT_BYTES else 0
        buffered_count = _read_buffered(fd, offset + count, _without_first(outs, count))
        if buffered_count >= _DROP_CACHE_BYTES:
            os.posix_fadvise(fd, offset + count, buffered_count, os.POSIX_FADV_DONTNEED)
        return count + buffered_count
    finally:
        os.close(fd)


def is_cached(fd: int, offset: int, nbytes: int) -> bool:
    """Return True if all of this range of the file is in the page cache. Files on a tmpfs always
    are.

    Return False if ``nbytes`` is 0, or if the system call ``cachestat`` fails. A kernel older than
    6.5 does not have this system call.
    """
    span = (ctypes.c_uint64 * 2)(offset, nbytes)
    counts = (ctypes.c_uint64 * 5)()
    if not nbytes or _LIBC.syscall(ctypes.c_long(_SYS_CACHESTAT), fd, span, counts, 0):
        return False
    # The first of ``counts`` is the number of pages of the range that are cached.
    pages = (offset + nbytes - 1) // mmap.PAGESIZE - offset // mmap.PAGESIZE + 1
    return counts[0] >= pages


def blocks_of(fd: int) -> tuple[int, int]:
    """Return two numbers for direct I/O on a file: addresses in memory must be multiples of the
    first, and offsets and lengths of the second. Both are ``ALIGNMENT`` if the kernel or the file
    system does not report them.
    """
    status = ctypes.create_string_buffer(256)
    statx = getattr(_LIBC, "statx", None)
    if statx is not None and not statx(fd, b"", _AT_EMPTY_PATH, _STATX_DIOALIGN, status):
        # The fields stx_mask, stx_dio_mem_align and stx_dio_offset_align of the struct statx
        mask, memory, offset = struct.unpack_from("=I148xII", status)
        if mask & _STATX_DIOALIGN and memory and offset:
            return memory, offset
    return ALIGNMENT, ALIGNMENT


class _Buffer(threading.local):
    """One buffer for each thread, which is made at the first use and kept until the thread ends."""

    def __init__(self) -> None:
        self._memory: memoryview | None = None

    def get(self) -> memoryview:
        if self._memory is None:
            self._memory = aligned_memory(BUFFER_BYTES)
        return self._memory


_buffer: Final = _Buffer()


def _without_first(outs: Sequence[memoryview], count: int) -> list[memoryview]:
    """Return ``outs`` without their first ``count`` bytes."""
    rest: list[memoryview] = []
    for out in outs:
        if count < out.nbytes:
            rest.append(out[count:])
        count = max(0, count - out.nbytes)
    return rest


def _read_buffered(fd: int, offset: int, outs: Sequence[memoryview]) -> int:
    """Read as ``read_at`` does, but only through the page cache."""
    rest, total = _without_first(outs, 0), 0  # Without empty targets
    while rest and (count := os.preadv(fd, rest[:_MOST_PARTS], offset + total)):
        rest, total = _without_first(rest, count), total + count
    return total


def _read_direct(fd: int, offset: int, outs: Sequence[memoryview]) -> int:
    """Read as ``read_at`` does, but only with ``O_DIRECT``.

    If the returned number is less than the total size of ``outs``, either the file ends there, or
    the file system has refused to read the next bytes directly. The caller then reads these bytes
    through the page cache.
    """
    # Addresses must be multiples of the first number, and offsets in the file of the second one.
    address_block_bytes, block_bytes = blocks_of(fd)

    def is_straight(part: tuple[memoryview, int]) -> bool:
        """Return True if bytes can be read straight into a target: it is large, and the memory for
        its first whole block of the file is aligned.
        """
        out, start = part
        return (
            out.nbytes >= STRAIGHT_BYTES
            and not (address(out) + -start % block_bytes) % address_block_bytes
        )

    starts = accumulate((out.nbytes for out in outs), initial=offset)
    end = offset
    # ``starts`` has one item more than ``outs``: the end of the last target.
    for straight, group in groupby(zip(outs, starts, strict=False), is_straight):
        parts = [out for out, _ in group]
        read = _read_straight if straight else _read_by_buffer
        for targets in [[part] for part in parts] if straight else [parts]:
            count = read(fd, end, targets, block_bytes)
            end += count
            if count < sum(out.nbytes for out in targets):
                return end - offset
    return end - offset


def _read_straight(fd: int, offset: int, outs: Sequence[memoryview], block_bytes: int) -> int:
    """Fill the one target in ``outs`` with one request that reads whole blocks straight into it.

    Return the number of bytes of the target that were filled.
    """
    [out] = outs
    # ``lead`` bytes of the first block come before ``out``. ``head`` bytes of this block are part
    # of ``out``.
    lead, head = offset % block_bytes, -offset % block_bytes
    body = (out.nbytes - head) // block_bytes * block_bytes
    tail = out.nbytes - head - body
    ends = memoryview(mmap.mmap(-1, 2 * block_bytes, mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS))
    head_block, tail_block = (
        ends[: block_bytes if head else 0],
        ends[block_bytes : 2 * block_bytes if tail else block_bytes],
    )
    count = _pread_direct(fd, [head_block, out[head:][:body], tail_block], offset - lead)
    out[:head] = head_block[lead:]
    out[head + body :] = tail_block[:tail]
    return min(max(count - lead, 0), out.nbytes)


def _read_by_buffer(fd: int, offset: int, outs: Sequence[memoryview], block_bytes: int) -> int:
    """Fill ``outs`` through the buffer of the thread. Return the number of bytes filled."""
    buffer = _buffer.get()
    rest, total, nbytes = list(outs), 0, sum(out.nbytes for out in outs)
    while total < nbytes:
        lead = (offset + total) % block_bytes
        # The rest, rounded up to whole blocks, as far as the buffer holds it
        request_bytes = min(buffer.nbytes, -(-(lead + nbytes - total) // block_bytes) * block_bytes)
        count = _pread_direct(fd, [buffer[:request_bytes]], offset + total - lead)
        target_bytes = min(max(count - lead, 0), nbytes - total)
        rest = _pour(buffer[lead : lead + target_bytes], rest)
        total += target_bytes
        if count < request_bytes:
            break
    return total


def _pour(source: memoryview, outs: list[memoryview]) -> list[memoryview]:
    """Copy ``source`` into ``outs``, one after another, and return the parts of ``outs`` that are
    not filled yet.
    """
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
        # Unlike the assignment to a slice, this call releases the GIL.
        ctypes.memmove(address(out), address(source), out.nbytes)


def _pread_direct(fd: int, parts: Sequence[memoryview], offset: int) -> int:
    """Read into ``parts``, one after another, with ``O_DIRECT``, and return the number of bytes.

    Return 0 at the end of the file, and if the file system or the memory of ``parts`` does not
    allow direct reads.
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
