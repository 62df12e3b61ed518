"""The folder and the files of a journal: private, or shared with the group of the root.

A root whose folder has the setgid bit, and that its group may write, belongs to a group of people.
The journal beside it then gets the same group and rights, whatever the umask.
"""

from __future__ import annotations

import contextlib
import errno
import os
import stat
from typing import Final

_FILE_MODE: Final = 0o600
_FOLDER_MODE: Final = 0o700
_GROUP_FILE_MODE: Final = 0o660
_GROUP_FOLDER_MODE: Final = 0o2770
_GROUP_BITS: Final = stat.S_ISGID | stat.S_IWGRP


def make_folder(folder: str, root: str) -> None:
    """Make the folder of the journal of ``root`` if it does not exist, and share it if the root is.

    Raises:
        OSError: It cannot be made.
    """
    os.makedirs(folder, mode=_FOLDER_MODE, exist_ok=True)
    with contextlib.suppress(OSError):  # No group can be given there, or the folder is a link
        root_status = os.stat(root)
        if _is_shared(root_status) and not _is_shared(os.stat(folder)):
            _share_folder(folder, root_status.st_gid)


def _share_folder(folder: str, group: int) -> None:
    """Share a folder of this user with ``group``. Do nothing if it is another user's."""
    descriptor = os.open(folder, os.O_RDONLY | os.O_DIRECTORY | os.O_NOFOLLOW | os.O_CLOEXEC)
    try:
        if os.fstat(descriptor).st_uid == os.geteuid():
            os.fchown(descriptor, -1, group)
            os.fchmod(descriptor, _GROUP_FOLDER_MODE)
    finally:
        os.close(descriptor)


def open_file(path: str) -> int:
    """Open a regular file of a journal to append to it, and return the descriptor.

    Raises:
        OSError: It cannot be opened, or is not a regular file. If it is a FIFO, this does not wait
            for a reader. A symbolic link is not followed, since another member of the group may
            have made it.
    """
    flags = os.O_WRONLY | os.O_APPEND | os.O_CREAT | os.O_CLOEXEC | os.O_NONBLOCK | os.O_NOFOLLOW
    file = os.open(path, flags, _FILE_MODE)
    try:
        status = os.fstat(file)
        if not stat.S_ISREG(status.st_mode):
            raise OSError(errno.EINVAL, "it is no regular file", path)
        is_own = status.st_uid == os.geteuid() and status.st_nlink == 1
        folder_status = os.stat(os.path.dirname(path))
        if is_own and _is_shared(folder_status):
            with contextlib.suppress(OSError):  # Its user is not in the group: it stays private
                os.fchown(file, -1, folder_status.st_gid)  # It may be older than the sharing
                os.fchmod(file, _GROUP_FILE_MODE)
    except OSError:
        os.close(file)
        raise
    return file


def _is_shared(status: os.stat_result) -> bool:
    return status.st_mode & _GROUP_BITS == _GROUP_BITS
