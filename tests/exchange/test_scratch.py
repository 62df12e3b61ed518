"""Temporary folders, and what a process that was killed leaves of them."""

from __future__ import annotations

import errno
import fcntl
import os
from pathlib import Path

import pytest

from ckpt.exchange.scratch import remove_leftovers, scratch_folder


def test_a_folder_is_locked_and_removed_where_locks_are_those_of_nfs(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """NFS gives an exclusive lock only to a descriptor that is open for writing."""
    lock = fcntl.flock

    def lock_as_nfs(file: int, operation: int) -> None:
        if fcntl.fcntl(file, fcntl.F_GETFL) & os.O_ACCMODE == os.O_RDONLY:
            raise OSError(errno.EBADF, os.strerror(errno.EBADF))
        lock(file, operation)

    monkeypatch.setattr(fcntl, "flock", lock_as_nfs)
    leftover = tmp_path / ".part-killed"
    leftover.mkdir()
    (leftover / ".lock").touch()
    with scratch_folder(str(tmp_path), ".part-") as room:
        assert os.listdir(tmp_path) == [os.path.basename(room)]
        remove_leftovers(str(tmp_path), ".part-")
        assert os.listdir(room) == [".lock"]
    assert not os.listdir(tmp_path)
