"""The group that a folder is shared with, as its mode says.

A folder with the setgid bit that its group may write belongs to a group of people. What is created
in it gets that group by the kernel, and here the same rights for the group, whatever the umask.
Everything else belongs to its user alone.
"""

from __future__ import annotations

import os
import stat
from typing import Final

FILE_MODE: Final = 0o600
FOLDER_MODE: Final = 0o700
_GROUP_FILE_MODE: Final = 0o660
_GROUP_FOLDER_MODE: Final = 0o2770
_GROUP_BITS: Final = stat.S_ISGID | stat.S_IWGRP


def is_shared(status: os.stat_result) -> bool:
    """Return True if the group of a folder with this status shares what is in it."""
    return status.st_mode & _GROUP_BITS == _GROUP_BITS


def share_file(descriptor: int) -> None:
    """Let the group of a file read and write it."""
    os.fchmod(descriptor, _GROUP_FILE_MODE)


def share_folder(folder: str | int) -> None:
    """Let the group of a folder use it, and let all that will be in it get the group.

    ``folder`` is a path or a descriptor.
    """
    os.chmod(folder, _GROUP_FOLDER_MODE)
