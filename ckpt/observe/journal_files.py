"""The folder and the files of a journal: private, or shared with the group of the root.

If the folder of the root is shared with a group (see ``storage.group``), the journal beside it gets
the same group and rights.
"""

from __future__ import annotations

import contextlib
import errno
import os
import stat
from typing import Final

from ckpt.checks import text_of
from ckpt.errors import ConfigError
from ckpt.storage.group import FILE_MODE, FOLDER_MODE, is_shared, share_file, share_folder
from ckpt.storage.urls import is_folder, local_path

LIMIT_BYTES: Final = 4 << 20
"""The size at which a file of a journal is renamed to ``NAME.old``. An older file of this name is
replaced.
"""
BEAT_SECONDS: Final = 15.0
"""How often a job shows that it is alive."""
VERIFY_FILE: Final = "verify.jsonl"
"""The file of the verifications of all jobs."""
OLD_SUFFIX: Final = ".old"
"""The end of the name of a file that was full."""
BEAT_SUFFIX: Final = ".alive"
"""The end of the name of the file of a job that lives. The rest is the id of the job."""
_FILE_SUFFIXES: Final = (".jsonl", ".jsonl" + OLD_SUFFIX, BEAT_SUFFIX)
FOLDER_SUFFIX: Final = ".journal"
"""The end of the name of the folder of a journal. The rest is the root of the run."""


def journal_folder(root: str | os.PathLike[str]) -> str:
    """Return the absolute path of the folder of the journal of ``root``.

    Raises:
        ConfigError: ``root`` is not a folder of this machine.
    """
    place = os.fspath(root)
    if not isinstance(place, str) or not place.strip() or not is_folder(place):
        raise ConfigError(
            f"root={text_of(place)}: a journal is on this machine: give a folder, such as "
            "'runs/gpt'"
        )
    return os.path.abspath(local_path(place)) + FOLDER_SUFFIX


def journal_files(root: str | os.PathLike[str]) -> list[str]:
    """Return the paths of the files of the journal of ``root``; empty if there is no journal.

    Raises:
        ConfigError: ``root`` is not a folder of this machine.
    """
    folder = journal_folder(root)
    try:
        names = os.listdir(folder)
    except OSError:
        return []
    return [os.path.join(folder, name) for name in names if name.endswith(_FILE_SUFFIXES)]


def job_of_beat(name: str) -> str:
    """Return the id of the job that shows by the file ``name`` of a journal that it is alive; empty
    for any other file.
    """
    return name.removesuffix(BEAT_SUFFIX) if name.endswith(BEAT_SUFFIX) else ""


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
