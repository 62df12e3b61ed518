"""The group that a root is shared with, as the mode of its folder says.

A folder with the setgid bit that its group may write belongs to a group of people. What is created
in it gets that group by the kernel, and here the same rights for the group, whatever the umask.
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


def is_shared_with_group(root: str) -> bool:
    """Return whether the group of the folder ``root``, which exists, shares what is in it."""
    return os.stat(root).st_mode & _GROUP_BITS == _GROUP_BITS


def share_file(descriptor: int) -> None:
    """Let the group read and write a new file."""
    os.fchmod(descriptor, _GROUP_FILE_MODE)


def share_folder(path: str) -> None:
    """Let the group use a new folder, and all that will be in it get the group."""
    os.chmod(path, _GROUP_FOLDER_MODE)
