"""Functions that find the mount and the type of the file system that holds a path."""

from __future__ import annotations

import os
import re
from contextlib import suppress
from typing import Final

MOUNTS: Final = "/proc/self/mounts"
_MOUNT_ROOTS: Final = "/proc/self/mountinfo"
_MOUNTS_POINT: Final = 1
_MOUNT_ROOTS_POINT: Final = 4
"""The columns of the mount points in ``MOUNTS`` and ``_MOUNT_ROOTS``, counted from 0."""
_NETWORK_KINDS: Final = frozenset(
    [
        "nfs",
        "nfs4",
        "lustre",
        "gpfs",
        "ceph",
        "cifs",
        "smb3",
        "beegfs",
        "wekafs",
        "panfs",
        "9p",
        "afs",
        "orangefs",
        "gfs2",
        "ocfs2",
        "virtiofs",
    ]
)
_ESCAPE: Final = re.compile(r"\\([0-7]{3})")
"""The octal escape that the kernel writes in the table of mounts for a space, a tab, a line feed, a
backslash or a number sign.
"""


def is_network(kind: str) -> bool:
    """Return True for the type of a network file system, which other machines may see too. File
    systems of FUSE count as network file systems.
    """
    return kind in _NETWORK_KINDS or _is_fuse_kind(kind)


def keeps_inode_numbers(path: str) -> bool:
    """Return True if the inode number of the folder ``path`` stays the same while it exists.

    An overlay whose layers are on different file systems gives a folder another number after the
    kernel has evicted it from its cache. So do most file systems of FUSE.
    """
    return kind_keeps_inode_numbers(kind_of(path))


def kind_keeps_inode_numbers(kind: str) -> bool:
    """Return True for the type of a file system with lasting numbers. See
    ``keeps_inode_numbers``.
    """
    return kind != "overlay" and not _is_fuse_kind(kind)


def is_fuse(path: str) -> bool:
    """Return True if a program provides the file system that holds ``path``, or would hold it.

    The type "fuseblk" does not count, since it is that of a local disk, such as one of ntfs-3g.
    """
    return _is_fuse_kind(kind_of(path))


def _is_fuse_kind(kind: str) -> bool:
    # A program may name the type of its file system, as sshfs does, or not, as bindfs does.
    return kind == "fuse" or kind.startswith("fuse.")


def kind_of(path: str, mounts: str = MOUNTS) -> str:
    """Return the type of the file system that holds ``path``, such as "ext4", or '' if the table of
    mounts does not give it.
    """
    _point, _device, kind = _mount_of(os.path.realpath(path), mounts, _MOUNTS_POINT)
    return kind


def path_in_mount(path: str) -> str:
    """Return the resolved ``path`` as seen from the root of its file system, which is the same for
    all mounts of the file system, or '' if the table of mounts does not give it.
    """
    point, root, _options = _mount_of(path, _MOUNT_ROOTS, _MOUNT_ROOTS_POINT)
    return os.path.normpath(os.path.join(root, os.path.relpath(path, point))) if point else ""


def _mount_of(path: str, mounts: str, column: int) -> tuple[str, str, str]:
    """Return three columns of the line about the mount that holds the resolved ``path``, in a table
    of mounts: its point, and those before and after it. They are empty if there is no such line.

    ``column`` is the position of the point.
    """
    mount = "", "", ""
    with suppress(OSError), open(mounts, encoding="utf-8", errors="surrogateescape") as table:
        for line in table:
            word_before, point, word_after = map(_unescape, line.split()[column - 1 : column + 2])
            is_inside = path == point or path.startswith(point.rstrip("/") + "/")
            # Of two mounts on one point, the later one hides the earlier one.
            if is_inside and len(point) >= len(mount[0]):
                mount = point, word_before, word_after
    return mount


def _unescape(word: str) -> str:
    return _ESCAPE.sub(lambda match: chr(int(match[1], 8)), word)
