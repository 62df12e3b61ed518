"""The names of files in a folder that are no objects: unfinished writes, and deleted files."""

from __future__ import annotations

import os
import re
import secrets
from typing import Final

TEMPORARY: Final = re.compile(r"\.(.+)\.[0-9a-f]{12}(?:\.link)?\.tmp", re.DOTALL)
"""The name of an unfinished write. The group is the name of the object."""
_NAME_BYTES: Final = 255


def temporary_beside(target: str) -> str:
    """Return an unused path in the folder of ``target``, of the form that ``TEMPORARY`` matches."""
    folder, name = os.path.split(target)
    token = f".{secrets.token_hex(6)}.tmp"
    kept = name.encode()[: _NAME_BYTES - 1 - len(token)].decode(errors="ignore")
    return os.path.join(folder, f".{kept}{token}")


def is_hidden(name: str) -> bool:
    """Return True if ``name`` is the name of a temporary file, or the name under which NFS or FUSE
    keeps a deleted file while a process has it open.
    """
    return name.startswith((".nfs", ".fuse_hidden")) or (name[0] == "." and name.endswith(".tmp"))
