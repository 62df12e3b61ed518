"""The names of files in a folder that are no objects: unfinished writes, and deleted files.

A folder of this machine and one of a file server use the same names.
"""

from __future__ import annotations

import os
import re
import secrets
import time
from typing import Final

TEMPORARY: Final = re.compile(r"\.(?P<name>.+)\.[0-9a-f]{12}(?:\.link)?\.tmp", re.DOTALL)
"""The name of an unfinished write. The group ``name`` is the name of the object."""
_NAME_BYTES: Final = 250  # Leaves room for ".link"
_ABANDONED_SECONDS: Final = 3600.0  # A live upload touches its file with every part


def temporary_beside(target: str) -> str:
    """Return an unused path in the folder of ``target``, of the form that ``TEMPORARY`` matches."""
    folder, name = os.path.split(target)
    token = f".{secrets.token_hex(6)}.tmp"
    stem = name.encode()[: _NAME_BYTES - 1 - len(token)].decode(errors="ignore")
    return os.path.join(folder, f".{stem}{token}")


def is_abandoned(date: float) -> bool:
    """Return True if an unfinished write that last changed at ``date``, in seconds since 1970,
    counts as one of a process that was killed.
    """
    return time.time() - date > _ABANDONED_SECONDS


def is_hidden(name: str) -> bool:
    """Return True if ``name`` is the name of a temporary file, or the name under which NFS or FUSE
    keeps a deleted file while a process has it open.
    """
    return name.startswith((".nfs", ".fuse_hidden")) or (name[0] == "." and name.endswith(".tmp"))
