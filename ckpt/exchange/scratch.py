"""Temporary room on a disk: tensors that are mapped into memory from a file, and folders.

Memory may not hold all tensors. A file has no name, so nothing of it is left after a kill. What is
left of a folder is removed later.
"""

from __future__ import annotations

import fcntl
import mmap
import os
import shutil
import stat
import tempfile
from collections.abc import Generator, Iterable
from contextlib import contextmanager, suppress
from math import prod
from typing import Final

import torch

from ckpt.model.dtype import DTYPES

_ALIGNMENT: Final = 64
_LOCK_FILE: Final = ".lock"
"""The file in a folder that its process keeps locked."""


class Scratch:
    """Create tensors in a temporary file without a name, which is mapped into memory.

    The values of the tensors are not set. The system frees the file when no tensor and no entry of
    ``memory`` uses it any more.

    Attributes:
        memory: The bytes of each tensor by name.
        tensors: The tensors by name.
    """

    def __init__(
        self, folder: str | None, kinds: Iterable[tuple[str, str, tuple[int, ...]]]
    ) -> None:
        """Create the file and the tensors.

        Args:
            folder: A folder with room for all tensors; None for the system's temporary folder.
            kinds: The name, the dtype and the shape of each tensor.
        """
        self.memory: dict[str, memoryview] = {}
        self.tensors: dict[str, torch.Tensor] = {}
        places: list[tuple[str, str, tuple[int, ...], int, int]] = []
        end = 0
        for name, dtype, shape in kinds:
            nbytes = prod(shape) * DTYPES[dtype].itemsize
            places.append((name, dtype, shape, end, nbytes))
            end = -(-(end + nbytes) // _ALIGNMENT) * _ALIGNMENT  # Rounded up
        with tempfile.TemporaryFile(dir=folder) as file:
            if end:
                # Allocate the file now. On a full disk, this raises an error, while a later write
                # to the mapped memory would end the process with SIGBUS.
                os.posix_fallocate(file.fileno(), 0, end)
            memory = memoryview(mmap.mmap(file.fileno(), max(end, 1)) if end else bytearray(1))
        for name, dtype, shape, start, nbytes in places:
            torch_dtype = getattr(torch, dtype)
            self.memory[name] = memory[start : start + nbytes]
            if nbytes:
                # Give each tensor its own storage. Otherwise ``torch.save`` would write all tensors
                # as views of one storage.
                raw = torch.frombuffer(self.memory[name], dtype=torch.uint8)
                self.tensors[name] = raw.view(torch_dtype).view(shape)
            else:
                self.tensors[name] = torch.empty(shape, dtype=torch_dtype, device="cpu")


@contextmanager
def scratch_folder(folder: str, prefix: str) -> Generator[str]:
    """Return a context manager that yields the path of a new folder in ``folder``, which only this
    user can enter, and removes it at the end.

    Those that processes that were killed have left, with the same prefix, are removed first.
    """
    remove_leftovers(folder, prefix)
    with tempfile.TemporaryDirectory(prefix=prefix, dir=folder, ignore_cleanup_errors=True) as path:
        unlocked_path = os.path.join(path, f"{_LOCK_FILE}.new")
        # The file gets its name after it is locked, so no other process sees it unlocked. NFS
        # locks only a file that is open for writing.
        lock = os.open(unlocked_path, os.O_RDWR | os.O_CREAT | os.O_EXCL, 0o600)
        try:
            with suppress(OSError):  # Without locks, what a kill leaves stays
                fcntl.flock(lock, fcntl.LOCK_EX)
                os.rename(unlocked_path, os.path.join(path, _LOCK_FILE))
            yield path
        finally:
            os.close(lock)


def remove_leftovers(folder: str, prefix: str) -> None:
    """Remove the scratch folders of this user in ``folder`` whose names begin with ``prefix``, and
    whose processes have ended. One that cannot be removed stays.
    """
    with os.scandir(folder) as entries:
        paths = [entry.path for entry in entries if entry.name.startswith(prefix)]
    for path in paths:
        with suppress(OSError):
            status = os.lstat(path)
            if stat.S_ISDIR(status.st_mode) and status.st_uid == os.geteuid():
                _remove_unless_locked(path)


def _remove_unless_locked(path: str) -> None:
    """Remove a scratch folder. Raises ``OSError`` if its process lives, which has the lock."""
    with open(os.path.join(path, _LOCK_FILE), "r+b") as lock:
        fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
        with os.scandir(path) as entries:
            for entry in entries:
                if entry.is_dir(follow_symlinks=False):
                    shutil.rmtree(entry.path)
                elif entry.name != _LOCK_FILE:  # It goes last: this process may be killed too
                    os.remove(entry.path)
        shutil.rmtree(path)
