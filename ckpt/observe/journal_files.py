"""The folder and the files of a journal: private, or shared with the group of the root.

If the folder of the root is shared with a group (see ``storage.group``), the journal beside it gets
the same group and rights.
"""

from __future__ import annotations

import contextlib
import errno
import os
import stat

from ckpt.storage.group import FILE_MODE, FOLDER_MODE, is_shared, share_file, share_folder


def make_folder(folder: str, root: str) -> None:
    """Make the folder of the journal of ``root`` if it does not exist, and share it if the root is.

    Raises:
        OSError: It cannot be made.
    """
    os.makedirs(folder, mode=FOLDER_MODE, exist_ok=True)
    with contextlib.suppress(OSError):  # No group can be given there, or the folder is a link
        root_status = os.stat(root)
        if is_shared(root_status) and not is_shared(os.stat(folder)):
            _share_with(folder, root_status.st_gid)


def _share_with(folder: str, group: int) -> None:
    """Share a folder of this user with ``group``. Do nothing if it is another user's."""
    descriptor = os.open(folder, os.O_RDONLY | os.O_DIRECTORY | os.O_NOFOLLOW | os.O_CLOEXEC)
    try:
        if os.fstat(descriptor).st_uid == os.geteuid():
            os.fchown(descriptor, -1, group)
            share_folder(descriptor)
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
    file = os.open(path, flags, FILE_MODE)
    try:
        status = os.fstat(file)
        if not stat.S_ISREG(status.st_mode):
            raise OSError(errno.EINVAL, "it is no regular file", path)
        is_own = status.st_uid == os.geteuid() and status.st_nlink == 1
        folder_status = os.stat(os.path.dirname(path))
        if is_own and is_shared(folder_status):
            with contextlib.suppress(OSError):  # Its user is not in the group: it stays private
                os.fchown(file, -1, folder_status.st_gid)  # It may be older than the sharing
                share_file(file)
    except OSError:
        os.close(file)
        raise
    return file
