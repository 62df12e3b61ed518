"""The place and the mark of a folder, which tell it from its copies and from what replaces it.

A *kind* is the type of a file system.
"""

from __future__ import annotations

import hashlib
import os
from contextlib import suppress
from functools import lru_cache
from typing import Final

from ckpt_backends.folder.mounts import is_network, kind_keeps_inode_numbers, kind_of, path_in_mount

_OWN_INODE_NUMBERS: Final = frozenset({"cifs", "smb3"})
"""Network file systems whose clients may number the folders by themselves, each mount anew."""
_MOST_REMEMBERED: Final = 16


def place_of(path: str) -> str:
    """Return a text that describes where the existing folder ``path`` is (see `are_apart`).

    The text is ``DEVICE:INODE:MOUNT_DEVICE:PATH_HASH``. ``PATH_HASH`` is the hash of the path
    inside of the file system, which is the same for all mounts. ``MOUNT_DEVICE`` is the device that
    this path belongs to. A part that does not identify the folder is empty. ``DEVICE`` is empty on
    a network file system, which may be mounted twice. ``INODE`` is empty where inode numbers do not
    last. ``MOUNT_DEVICE`` and ``PATH_HASH`` are empty where the numbers last, since the folder may
    be renamed.
    """
    path = os.path.realpath(path)
    status = os.stat(path)
    return _place_of(path, status.st_dev, status.st_ino)


@lru_cache(_MOST_REMEMBERED)
def _place_of(path: str, device_number: int, inode: int) -> str:
    """Return what ``place_of`` returns for the resolved ``path``, which is the folder ``inode`` on
    the device. The table of mounts, which may be long, is read once for each folder.
    """
    kind = kind_of(path)
    device = "" if is_network(kind) else str(device_number)
    if kind_keeps_inode_numbers(kind) and kind not in _OWN_INODE_NUMBERS:
        return f"{device}:{inode}::"
    inner = path_in_mount(path)
    digest = hashlib.sha256(os.fsencode(inner)).hexdigest() if inner else ""
    return f"{device}::{device_number if digest else ''}:{digest}"


def mark_of(path: str) -> str | None:
    """Return a text that tells the folder at ``path`` from another one that takes its place later;
    None if there is no folder.

    It is the device and the inode number. Without an inode number that lasts, it is the device. On
    a network file system it is only the type of the file system, since the device changes when the
    file system is mounted again.
    """
    with suppress(OSError):
        status, kind = os.stat(path), kind_of(path)
        if is_network(kind):
            return kind
        return f"{status.st_dev}:{status.st_ino if kind_keeps_inode_numbers(kind) else ''}"
    return None


def are_apart(place: str, other_place: str) -> bool:
    """Return True if two texts of `place_of`, which processes of one machine got at the same time,
    certainly describe two folders.
    """
    parts, other_parts = place.split(":"), other_place.split(":")
    # ``other_place`` may be the URL of a store, or a text of another release.
    if len(parts) != len(other_parts) or "/" in other_place:
        return False
    (
        (device, inode, mount_device, path_hash),
        (other_device, other_inode, other_mount_device, other_path_hash),
    ) = parts, other_parts
    return (
        _differ(device, other_device)
        or _differ(inode, other_inode)
        or ("" != mount_device == other_mount_device and _differ(path_hash, other_path_hash))
    )


def _differ(text_a: str, text_b: str) -> bool:
    """Return True if two parts of places differ. An empty part identifies no folder."""
    return "" not in (text_a, text_b) and text_a != text_b
