"""The journal of a run: the events of the run as JSON lines in a folder beside the root.

A tier shows only which steps it has now. The journal also has how long each save stopped the
training, how long each commit took, which steps were committed and removed later, and which files a
restore took from a farther tier.
"""

from __future__ import annotations

import contextlib
import errno
import logging
import os
import stat
import threading
import time
from collections.abc import Iterator
from typing import Any, Final

import msgspec

from ckpt.checks import text_of
from ckpt.config import rank_of_this_process
from ckpt.errors import ConfigError
from ckpt.events import (
    CommitFinished,
    Event,
    NodeReplicated,
    Repaired,
    Restored,
    RolledBack,
    SaveCommitted,
    SaveFailed,
    SaveStaged,
    SaveSuspicious,
    StepDamaged,
    StepVerified,
    TierMissed,
)
from ckpt.storage.places import is_folder, local_path

_log = logging.getLogger("ckpt")
LIMIT_BYTES: Final = 4 << 20
"""The size at which a file of a journal is renamed to ``NAME.old``. An older file of this name is
replaced.
"""
OPEN_EVENT: Final = "Opened"
"""The ``event`` of the first record of each job."""
VERIFY_EVENT: Final = "Verified"
"""The ``event`` of the record of a step that was compared with its checksums."""
_MOST_TEXT: Final = 500
_MOST_FILES: Final = 128
_MOST_BYTES: Final = 64 << 20
"""The most bytes that a reader reads from all files together."""
_OLD: Final = ".old"
_VERIFY: Final = "verify.jsonl"
"""The file of the verifications of all jobs."""


class Record(msgspec.Struct, frozen=True, kw_only=True, omit_defaults=True):
    """A line of a journal. A field that an event does not have keeps its default.

    Attributes:
        at: When the record was written, in seconds since 1970.
        event: The name of the class of the event, or ``OPEN_EVENT`` or ``VERIFY_EVENT``.
        step: The number of the step; -1 if the record is not about a step.
        tier: The URL of the tier that the event is about.
        tiers: For a save that was staged: the URLs of the tiers that the step goes to, nearest
            first.
        nbytes: The bytes that the event is about, as in the class of the event.
        seconds: For a save that was staged: how long it stopped the training thread. For a commit:
            the time since the call of the save. Otherwise: how long the restore, the copying or the
            verification took.
        error: The name of the class of the error.
        reason: The message of the error, or why ``tier`` could not give the file ``key``, or the
            damage that a verification found (empty if there is none).
        key: The file that a restore took from a farther tier.
        mended: Whether the file ``key`` is intact on ``tier`` again.
    """

    at: float
    event: str
    step: int = -1
    tier: str = ""
    tiers: tuple[str, ...] = ()
    nbytes: int = 0
    seconds: float = 0.0
    error: str = ""
    reason: str = ""
    key: str = ""
    mended: bool = False


class Journal:
    """An observer that writes the events of a run to a folder beside its root.

    Rank 0 writes every event that its manager sends. Other ranks write failures, damage and
    repairs. Each rank that writes has at most two files of about 4 MiB. Make a new `Journal` object
    for each job, since an object records the start of one job only.

    Args:
        root: The folder of the run. The journal is in the folder of the same name with ``.journal``
            at its end. If all tiers of the run are remote, give any local path.
        rank: The rank of this process; None for the rank that the launcher names.

    Raises:
        ConfigError: ``root`` is neither a path nor a ``file://`` URL.

    Thread safety: all methods may be called from any thread. ``_lock`` guards ``_file``,
    ``_has_failed`` and ``_is_open``.
    """

    def __init__(self, root: str | os.PathLike[str], *, rank: int | None = None) -> None:
        self._folder = journal_of(root)
        self._rank = rank_of_this_process() if rank is None else rank
        self._lock = threading.Lock()
        self._file: int | None = None
        self._has_failed = False
        self._is_open = self._rank != 0  # Only rank 0 writes the record ``OPEN_EVENT``

    def __call__(self, event: Event) -> None:
        """Write the record of ``event``.

        If that fails, a warning is logged. Further failures are not logged until a write succeeds.
        """
        record = record_of(event)
        if self._rank and not isinstance(event, SaveFailed | StepDamaged | Repaired):
            return
        with self._lock:
            try:
                self._append(record)
                self._has_failed = False
            except OSError as error:
                if not self._has_failed:
                    _log.warning("ckpt: the journal %s was not written: %s", self._folder, error)
                self._has_failed = True

    def close(self) -> None:
        """Close the file. The next event opens it again, as a part of the same job."""
        with self._lock:
            if self._file is not None:
                os.close(self._file)
                self._file = None

    def _append(self, record: Record) -> None:
        path = os.path.join(self._folder, f"rank-{self._rank:05d}.jsonl")
        if self._file is not None and os.fstat(self._file).st_size >= LIMIT_BYTES:
            os.close(self._file)
            self._file = None
            os.replace(path, path + _OLD)
            self._file = _open(path)
        elif self._file is None:
            os.makedirs(self._folder, exist_ok=True)
            self._file = _open(path)
        if not self._is_open:
            _write(self._file, Record(at=record.at, event=OPEN_EVENT))
            self._is_open = True
        _write(self._file, record)


def journal_of(root: str | os.PathLike[str]) -> str:
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
    return os.path.abspath(local_path(place)) + ".journal"


def journal_files(root: str | os.PathLike[str]) -> list[str]:
    """Return the paths of the files of the journal of ``root``; empty if there is no journal.

    Raises:
        ConfigError: ``root`` is not a folder of this machine.
    """
    folder = journal_of(root)
    try:
        names = os.listdir(folder)
    except OSError:
        return []
    return [
        os.path.join(folder, name) for name in names if name.endswith((".jsonl", ".jsonl" + _OLD))
    ]


def record_of(event: Event) -> Record:
    """Return the record of an event, written now."""
    names = [name for name in Record.__struct_fields__ if hasattr(event, name)]
    line: dict[str, Any] = {"event": type(event).__name__}
    line |= {name: getattr(event, name) for name in names}
    match event:
        case SaveStaged():
            line["seconds"] = event.stall_seconds
        case SaveCommitted():
            line["seconds"] = event.durable_seconds
        case SaveFailed() | SaveSuspicious() | TierMissed() | StepDamaged():
            line |= {"error": type(event.error).__name__, "reason": str(event.error)}
        case StepVerified():
            line |= {"event": VERIFY_EVENT, "reason": event.damage, "mended": False}
        case Repaired() | CommitFinished() | Restored() | RolledBack() | NodeReplicated():
            pass  # All their fields have the same names as in the record
    return Record(at=time.time(), **{**line, "reason": line.get("reason", "")[:_MOST_TEXT]})


def note_verified(root: str, step: int, fault: str, *, journal: str | None = None) -> None:
    """Record in a journal that a step was compared with its checksums.

    Nothing happens if the journal does not exist or cannot be written, or if its root is not a
    folder.

    Args:
        root: The URL of the tier, as events name it.
        step: The number of the step.
        fault: What is damaged; empty if the step is intact.
        journal: The root whose journal gets the record; None for ``root``.
    """
    with contextlib.suppress(ConfigError, OSError):
        if os.path.isdir(folder := journal_of(root if journal is None else journal)):
            path = os.path.join(folder, _VERIFY)
            if os.path.exists(path) and os.path.getsize(path) >= LIMIT_BYTES:
                os.replace(path, path + _OLD)
            file = _open(path)
            record = Record(
                at=time.time(), event=VERIFY_EVENT, step=step, tier=root, reason=fault[:_MOST_TEXT]
            )
            try:
                _write(file, record)
            finally:
                os.close(file)


class JournalReader:
    """A reader of the journal of a run. It reads a file again only if the file has changed.

    Args:
        root: The folder of the run.

    Raises:
        ConfigError: ``root`` is neither a path nor a ``file://`` URL.

    Thread safety: one thread at a time.
    """

    def __init__(self, root: str) -> None:
        self._root, self._folder = root, journal_of(root)
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
                state = (status.st_mtime_ns, status.st_size, size)
                if name not in self._cache or self._cache[name][0] != state:
                    self._cache[name] = (state, list(_records(path, size)))
            except OSError:
                # The file was renamed after it was listed.
                continue
            budget -= size
            records += self._cache[name][1]
        return sorted(records, key=lambda record: record.at)

    def _names(self) -> list[str]:
        """Return the names of at most 128 files: first the files of verifications, and then the
        files of the ranks, lowest rank first. A run has at most two files of verifications.
        """
        names = map(os.path.basename, journal_files(self._root))
        return sorted(names, key=lambda name: (not name.startswith(_VERIFY), name))[:_MOST_FILES]


def _records(path: str, size: int) -> Iterator[Record]:
    """Yield the records in the last ``size`` bytes of a regular file; nothing for any other file.

    Raises:
        OSError: The file cannot be read.
    """
    with open(path, "rb", opener=_open_at_once) as file:
        status = os.fstat(file.fileno())
        if not stat.S_ISREG(status.st_mode):
            return
        file.seek(max(0, status.st_size - size))
        for line in file.read(size).splitlines():
            with contextlib.suppress(msgspec.MsgspecError, UnicodeError, RecursionError):
                yield _decoder.decode(line)


_decoder = msgspec.json.Decoder(Record)


def _open(path: str) -> int:
    """Open a regular file to append to it, and return the descriptor.

    Raise ``OSError`` if the file is not a regular file. If it is a FIFO, do not wait for a reader.
    """
    flags = os.O_WRONLY | os.O_APPEND | os.O_CREAT | os.O_CLOEXEC | os.O_NONBLOCK
    file = os.open(path, flags, 0o644)
    if not stat.S_ISREG(os.fstat(file).st_mode):
        os.close(file)
        raise OSError(errno.EINVAL, "it is no regular file", path)
    return file


def _open_at_once(path: str, flags: int) -> int:
    """Open a file for ``open(..., opener=...)`` without waiting for the writer of a FIFO."""
    return os.open(path, flags | os.O_NONBLOCK)


def _write(file: int, record: Record) -> None:
    """Write a line in a single call, so that the lines of several processes do not mix."""
    os.write(file, msgspec.json.encode(record) + b"\n")
