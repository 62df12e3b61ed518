"""Read the journal of a run: a journal that is cut, damaged or of another version is no error."""

from __future__ import annotations

import contextlib
import os
import stat
from collections.abc import Iterator
from os.path import basename
from typing import Final

import msgspec

from ckpt.observe.journal_files import (
    LIMIT_BYTES,
    VERIFY_FILE,
    job_of_beat,
    journal_files,
    journal_folder,
)
from ckpt.observe.journal_record import Record

_MOST_FILES: Final = 128
_MOST_BYTES: Final = 64 << 20
"""The most bytes that a reader reads from all files together."""


class JournalReader:
    """A reader of the journal of a run. It reads a file again only if the file has changed.

    Args:
        root: The folder of the run.

    Raises:
        ConfigError: ``root`` is neither a path nor a ``file://`` URL.

    Thread safety: one thread at a time.
    """

    def __init__(self, root: str) -> None:
        self._root, self._folder = root, journal_folder(root)
        self._cache: dict[str, tuple[tuple[int, int, int], list[Record]]] = {}

    def read(self) -> list[Record]:
        """Return the records of all files, oldest first. Lines that are no records are left out.

        At most the last 8 MiB of a file are read, and at most 64 MiB of all files together.
        """
        records, budget = list[Record](), _MOST_BYTES
        for name in self._names():
            path = os.path.join(self._folder, name)
            try:
                status = os.stat(path)
                size = min(status.st_size, 2 * LIMIT_BYTES, budget)
                version = (status.st_mtime_ns, status.st_size, size)
                cached_version, file_records = self._cache.get(name, (None, list[Record]()))
                if cached_version != version:
                    file_records = list(_records(path, size))
                    self._cache[name] = (version, file_records)
            except OSError:
                # The file was renamed after it was listed.
                continue
            budget -= size
            records += file_records
        return sorted(records, key=lambda record: record.at)

    def _names(self) -> list[str]:
        """Return the names of at most 128 files: first the files of verifications, and then the
        files of the ranks, lowest rank first. A run has at most two files of verifications.
        """
        names = [
            name for path in journal_files(self._root) if not job_of_beat(name := basename(path))
        ]
        return sorted(names, key=lambda name: (not name.startswith(VERIFY_FILE), name))[
            :_MOST_FILES
        ]

    def beats(self) -> dict[str, float]:
        """Return when each job that has not closed its manager was alive last, by the id of the
        job, in seconds since 1970: the time of a file that the job renews while it lives.
        """
        times: dict[str, float] = {}
        with contextlib.suppress(OSError), os.scandir(self._folder) as entries:
            for entry in entries:
                if job := job_of_beat(entry.name):
                    with contextlib.suppress(OSError):
                        times[job] = entry.stat().st_mtime
        return times


def _records(path: str, size: int) -> Iterator[Record]:
    """Yield the records in the last ``size`` bytes of a regular file; nothing for any other file.

    Raises:
        OSError: The file cannot be read.
    """
    with open(path, "rb", opener=_open_without_waiting) as file:
        status = os.fstat(file.fileno())
        if not stat.S_ISREG(status.st_mode):
            return
        file.seek(max(0, status.st_size - size))
        for line in filter(None, file.read(size).split(b"\n")):
            with contextlib.suppress(msgspec.MsgspecError, UnicodeError, RecursionError):
                yield _decoder.decode(line)


_decoder = msgspec.json.Decoder(Record)


def _open_without_waiting(path: str, flags: int) -> int:
    """Open a file for ``open(..., opener=...)`` without waiting for the writer of a FIFO."""
    return os.open(path, flags | os.O_NONBLOCK)
