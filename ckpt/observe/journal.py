"""The journal of a run: the events of the run as JSON lines in a folder beside the root.

A tier shows only which steps it has now. The journal also has how long each save stopped the
training, how long each commit took, the metrics of steps that were removed later, which files a
restore took from a farther tier, and whether the job lives.

A thread of the journal writes it, so that a file system that does not answer delays no save.
Nothing depends on the journal, and an error of it is only logged. While a job lives, rank 0 renews
the time of a small file in the folder, its *beat*, every few seconds.
"""

from __future__ import annotations

import contextlib
import logging
import os
import secrets
import socket
import threading
import time
import weakref
from collections import deque
from collections.abc import Callable, Iterable, Sequence
from concurrent.futures import Future, wait
from math import isfinite
from queue import Empty, SimpleQueue
from typing import Any, Final

import msgspec

from ckpt.config import Best, rank_of_this_process
from ckpt.errors import ConfigError, ThreadLimit
from ckpt.events import (
    CommitFinished,
    Event,
    MetricsAdded,
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
from ckpt.observe.history import history_of
from ckpt.observe.job_life import lives_of
from ckpt.observe.journal_files import (
    BEAT_SECONDS,
    BEAT_SUFFIX,
    FOLDER_SUFFIX,
    LIMIT_BYTES,
    OLD_SUFFIX,
    VERIFY_FILE,
    job_of_beat,
    journal_folder,
    make_folder,
    open_file,
)
from ckpt.observe.journal_reader import JournalReader
from ckpt.observe.journal_record import (
    CLOSE_EVENT,
    OPEN_EVENT,
    PLANNED_STOP,
    VERIFY_EVENT,
    Record,
)
from ckpt.pipeline.workers import Workers, has_script_ended
from ckpt.processes import Process, boot_identity
from ckpt.storage.tiers import OpenTier
from ckpt.storage.urls import is_folder

_log = logging.getLogger("ckpt")
_MOST_TEXT_CHARS: Final = 500
_MOST_QUEUED_RECORDS: Final = 10_000
"""The most records that wait for the thread. Further ones are lost."""
_MOST_EARLY_RECORDS: Final = 100
"""The most records that wait until the folder of the journal is there."""
_END_SECONDS: Final = 2.0
"""How long ``close`` waits until the records are written."""
_STALE_BEAT_SECONDS: Final = 24 * 3600.0
"""The age at which the file of a job that was killed is removed."""
_SAVE_EVENTS: Final = frozenset({"SaveStaged", "SaveCommitted", "SaveFailed"})
"""The events that make the folder of a journal."""


class Journal:
    """An observer that writes the events of a run to a folder beside its root.

    A manager makes one by itself (``SaveConfig.journal``). Give one to a manager whose tiers are
    all remote.

    Rank 0 writes every event that its manager sends. Other ranks write failures, damage, repairs
    and metrics. Each rank that writes has at most two files of about 4 MiB. The folder is made at
    the first save, so that a job that only restores leaves no journal where there was none. Make a
    new `Journal` object for each job, since an object records the start of one job only.

    ``_file`` is the descriptor of the open file, and None if no file is open. ``_has_warned`` is
    True if the log already says that the journal cannot be written.

    Args:
        root: The folder of the run. The journal is in the folder of the same name with ``.journal``
            at its end. If all tiers of the run are remote, give any local path.
        rank: The rank of this process; None for the rank that the launcher names.
        best_rules: The rules of ``Tier(keep_best=...)`` of the job, at most one for a metric.
        needs_root: Whether the folder is made only beside a root that exists. If the disk of a run
            is not mounted, nothing is written below its mount point.

    Raises:
        ConfigError: ``root`` is neither a path nor a ``file://`` URL.

    The thread runs ``_task`` and takes the records from ``_queue``. ``_early_records`` has the
    records from before there was a folder. ``_has_open_record`` is True once the file has the first
    record of the job. ``_has_begun`` is True once the job has saved, or goes on from a step.

    Thread safety: all methods may be called from any thread. ``_lock`` guards ``_task``. Only the
    thread of the journal uses the attributes from ``_file`` on.
    """

    def __init__(
        self,
        root: str | os.PathLike[str],
        *,
        rank: int | None = None,
        best_rules: Iterable[Best] = (),
        needs_root: bool = False,
    ) -> None:
        self._folder, self._needs_root = journal_folder(root), needs_root
        self._rank = rank_of_this_process() if rank is None else rank
        self._best_rules = tuple(best_rules)
        self._job = secrets.token_hex(6)
        self._queue: SimpleQueue[Record | None] = SimpleQueue()
        self._lock = threading.Lock()
        self._task: Future[None] | None = None
        self._file: int | None = None
        self._early_records: deque[Record] = deque(maxlen=_MOST_EARLY_RECORDS)
        self._has_warned = False
        self._has_open_record = self._rank != 0  # Only rank 0 writes the record ``OPEN_EVENT``
        self._has_begun = False

    def __call__(self, event: Event) -> None:
        """Let the thread of the journal write the record of ``event``.

        If that fails, a warning is logged. Further failures are not logged until a write succeeds.
        """
        if self._rank and not isinstance(event, SaveFailed | StepDamaged | Repaired | MetricsAdded):
            return
        if self._queue.qsize() < _MOST_QUEUED_RECORDS:
            self._queue.put(record_of(event, self._job))
        if self._task is None:
            self._start()

    def end(self, *, error: BaseException | None = None, reason: str = "") -> None:
        """Record that the job has closed its manager, if the journal has a record of the job. Then
        close the journal.

        Args:
            error: The error that ends the job; None if there is none.
            reason: ``PLANNED_STOP``, or empty.
        """
        if self._rank == 0 and self._task is not None:
            error_name, text = (type(error).__name__, str(error)) if error else ("", reason)
            self._queue.put(
                Record(
                    at=time.time(),
                    event=CLOSE_EVENT,
                    error=error_name,
                    reason=text[:_MOST_TEXT_CHARS],
                    job=self._job,
                )
            )
        self.close()

    def close(self) -> None:
        """Write what waits, and close the file. The next event opens it again, as a part of the
        same job. If the file system does not answer, the call returns after two seconds.
        """
        with self._lock:
            task, self._task = self._task, None
        if task is not None:
            self._queue.put(None)
            if not wait([task], _END_SECONDS).done:
                _log.warning("ckpt: the journal %s cannot be written: no answer", self._folder)

    def _start(self) -> None:
        """Start the thread of the journal, unless it runs."""
        with self._lock:
            if self._task is not None:
                return
            if has_script_ended():  # ``submit`` may run the call on this thread, so let it end
                self._queue.put(None)
            try:
                self._task = Workers("journal", 1).submit(self._run)
            except ThreadLimit as error:
                _log.warning("ckpt: the journal %s is not written: %s", self._folder, error)

    def _run(self) -> None:
        """Write the records of the queue until None arrives: the body of the thread."""
        while True:
            try:
                record = self._queue.get(timeout=BEAT_SECONDS)
            except Empty:
                self._beat()
                continue
            if record is None:
                break
            self._write(record)
        self._beat(is_last=True)
        if self._file is not None:
            os.close(self._file)
            self._file = None

    def _write(self, record: Record) -> None:
        """Write a record, after those that came before the folder of the journal was there."""
        is_save = record.event in _SAVE_EVENTS
        try:
            if self._file is None or os.fstat(self._file).st_size >= LIMIT_BYTES:
                self._open(creates=is_save)
            if self._file is None:  # A job that only restores makes no folder
                self._early_records.append(record)
                return
            records = [*self._early_records, record]
            self._early_records.clear()
            if record.event == CLOSE_EVENT and not self._has_open_record:
                return  # The journal has nothing of this job, and needs no record of its end
            if not self._has_open_record:
                records.insert(0, self._first_record(records[0].at))
                self._has_open_record = True
            lines = [msgspec.json.encode(record) + b"\n" for record in records]
            os.write(self._file, b"".join(lines))  # One call, so that processes do not mix lines
            self._has_warned = False
            resumes = record.event == "Restored" and not record.evaluates
            is_first_resume = resumes and not self._has_begun
            self._has_begun |= is_save or resumes
            if is_first_resume:
                _warn_of_other_jobs(self._folder.removesuffix(FOLDER_SUFFIX))
        except OSError as error:
            if not self._has_warned and is_save:
                _log.warning(
                    "ckpt: the journal %s was not written: %s (journal=False turns it off)",
                    self._folder,
                    error,
                )
            self._has_warned = self._has_warned or is_save

    def _open(self, *, creates: bool) -> None:
        """Open the file, or begin a new one if it is full.

        Nothing happens if there is no folder yet, and it is not to be created.
        """
        path = os.path.join(self._folder, f"rank-{self._rank:05d}.jsonl")
        if self._file is not None:
            file, self._file = self._file, None
            # Another job that writes to the same file may have begun a new one.
            is_current = os.path.exists(path) and os.path.samestat(os.fstat(file), os.stat(path))
            os.close(file)
            if is_current:
                os.replace(path, path + OLD_SUFFIX)
                self._has_open_record = self._rank != 0  # The new file must name the job, too
        else:
            root = self._folder.removesuffix(FOLDER_SUFFIX)
            if not os.path.isdir(self._folder) and (
                not creates or (self._needs_root and not os.path.isdir(root))
            ):
                return
            make_folder(self._folder, root)
        self._file = open_file(path)
        self._beat()

    def _first_record(self, moment: float) -> Record:
        """Return the first record of this job, and remove the old beats of others."""
        for name in filter(job_of_beat, os.listdir(self._folder)):  # Beats of jobs that were killed
            path = os.path.join(self._folder, name)
            with contextlib.suppress(OSError):
                if time.time() - os.stat(path).st_mtime > _STALE_BEAT_SECONDS:
                    os.unlink(path)
        process = Process.of(os.getpid())
        named_root = os.path.abspath(self._folder.removesuffix(FOLDER_SUFFIX))
        root = os.path.realpath(named_root)
        return Record(
            at=moment,
            event=OPEN_EVENT,
            job=self._job,
            modes={rule.metric: rule.mode for rule in self._best_rules},
            counts={rule.metric: rule.count for rule in self._best_rules if rule.count > 1},
            root=root,
            named_root="" if named_root == root else named_root,
            host=socket.gethostname(),
            machine=boot_identity(),
            pid=process.pid,
            start_time=process.start_time,
        )

    def _beat(self, *, is_last: bool = False) -> None:
        """Show by the time of a file that the job is alive; remove the file at the end."""
        if self._file is None or self._rank:
            return
        path = os.path.join(self._folder, self._job + BEAT_SUFFIX)
        with contextlib.suppress(OSError):
            if is_last:
                os.unlink(path)
            else:
                os.close(open_file(path))
                os.utime(path)


def _warn_of_other_jobs(root: str) -> None:
    """Log a warning about each job of another process of this machine that lives and has not saved
    to ``root`` yet, so that it is not the owner of the root yet. Evaluations do not count.

    A job on another machine may have died some seconds ago, so nothing is said about it.
    """
    reader = JournalReader(root)
    history = history_of(reader.read())
    if not history.is_of(os.path.realpath(root)):
        return
    for name, life in lives_of(history, reader.beats(), time.time()).items():
        is_on_machine = history.jobs[name].start.machine == boot_identity()
        if life.state == "begins" and is_on_machine and life.pid != os.getpid():
            _log.warning(
                "ckpt: %s: another job lives, and has not saved yet (%s, process %d). One job "
                "writes to a root at a time: once one of the two has saved, the saves of the other "
                "fail. End one of them, or give it a root of its own",
                root,
                life.host,
                life.pid,
            )


def default_journal(tiers: Sequence[OpenTier], rank: int) -> Journal | None:
    """Return a journal for the job of ``rank``, beside its nearest tier that is a folder which all
    nodes see, or else beside its nearest folder. Return None if no tier is a folder.
    """
    folders = [tier for tier in tiers if is_folder(tier.url)]
    place = next((tier for tier in folders if not tier.local), next(iter(folders), None))
    if place is None:
        return None
    rules = sorted(
        (rule for tier in tiers if (rule := tier.tier.best)), key=lambda rule: rule.count
    )
    best_rules = {rule.metric: rule for rule in rules}.values()  # The largest count of a metric
    return Journal(place.url, rank=rank, best_rules=best_rules, needs_root=True)


def journals_of(
    owner: object, observers: Iterable[object], make: Callable[[], Journal | None] | None
) -> list[Journal]:
    """Return the journals among ``observers``, or else the one that ``make`` returns. They end when
    ``owner``, the manager, is garbage collected.
    """
    journals = [observer for observer in observers if isinstance(observer, Journal)]
    if not journals and make is not None and (journal := make()) is not None:
        journals = [journal]
    for journal in journals:
        weakref.finalize(owner, journal.end).atexit = False
    return journals


def end_journals(
    journals: Iterable[Journal], error: BaseException | None, *, is_planned: bool
) -> None:
    """Record in each journal that the manager is closed.

    Args:
        journals: The journals.
        error: The error that ends the job; None if there is none.
        is_planned: Whether the job was stopped as planned.
    """
    for journal in journals:
        journal.end(error=error, reason=PLANNED_STOP if is_planned else "")


def record_of(event: Event, job: str = "") -> Record:
    """Return the record of an event of ``job``, written now."""
    names = [name for name in Record.__struct_fields__ if hasattr(event, name)]
    fields: dict[str, Any] = {"event": type(event).__name__}
    fields |= {name: getattr(event, name) for name in names}
    match event:
        case SaveStaged():
            fields["seconds"] = event.stall_seconds
        case SaveCommitted():
            fields["seconds"] = event.durable_seconds
        case SaveFailed() | SaveSuspicious() | TierMissed() | StepDamaged():
            fields |= {"error": type(event.error).__name__, "reason": str(event.error)}
        case StepVerified():
            # The record is like that of ``ckpt verify``. Its ``mended`` is a bool, about one file.
            fields |= {"event": VERIFY_EVENT, "reason": event.damage, "mended": False}
        case CommitFinished() | Restored() | RolledBack() | NodeReplicated():
            pass  # All their fields have the same names as in the record
        case Repaired() | MetricsAdded():
            pass
    metrics = fields.get("metrics", {})
    fields |= {
        "reason": fields.get("reason", "")[:_MOST_TEXT_CHARS],
        "job": job,
        "metrics": {name: value if isfinite(value) else None for name, value in metrics.items()},
    }
    return Record(at=time.time(), **fields)


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
        if os.path.isdir(folder := journal_folder(root if journal is None else journal)):
            path = os.path.join(folder, VERIFY_FILE)
            if os.path.exists(path) and os.path.getsize(path) >= LIMIT_BYTES:
                os.replace(path, path + OLD_SUFFIX)
            file = open_file(path)
            record = Record(
                at=time.time(),
                event=VERIFY_EVENT,
                step=step,
                tier=root,
                reason=fault[:_MOST_TEXT_CHARS],
            )
            try:
                _write(file, record)
            finally:
                os.close(file)


def _write(file: int, record: Record) -> None:
    """Write a line in a single call, so that the lines of several processes do not mix."""
    os.write(file, msgspec.json.encode(record) + b"\n")
