"""Moving aligned memory to a file past the page cache, and any other memory through it.

``O_DIRECT`` costs a tenth of the CPU and does not push the trainer's pages out, but a file system
may refuse it when the file is opened, or only at a certain write. So every file here has a second,
buffered descriptor that can take over at any call.
"""

from __future__ import annotations

import ctypes
import errno
import mmap
import os
from collections.abc import Iterable
from typing import Final

import numpy as np

from ckpt.storage.api import Buffer

# This covers the logical block of every disk in use. A store that wants more refuses, and is
# written through the page cache.
ALIGNMENT: Final = 4096
_REFUSALS: Final = frozenset({errno.EINVAL, errno.EOPNOTSUPP})
_RENAME_NOREPLACE: Final = 1
_AT_FDCWD: Final = -100
_LIBC: Final = ctypes.CDLL(None, use_errno=True)


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
