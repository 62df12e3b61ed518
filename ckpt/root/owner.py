"""The owner of a root: one job at a time writes to it, and the newest job wins.

A *root* is the place of a store where the steps of a run are. An *attempt* is the id of one
incarnation of a job.

The file ``writer.json`` in the root names the owner's attempt and process. A new attempt takes the
root over. If the owner is alive on the same machine, the new attempt gets ``RootInUse`` instead. An
owner that has lost the root finds another attempt in the file at its next commit, and that save
fails. There is no heartbeat, so a restarted job never waits for a dead one.

If the owner is on another machine, or in another process namespace, it may be alive or dead. Other
jobs remove its files only if it is known to have ended (see ``Owner.has_ended``). Only the process
itself shows that. The number of restarts that torchrun gives its workers does not: each launch
agent counts its own, and the workers of a lost node may outlive the start of the next group.

Several managers of one process may use a root in turn, such as in a notebook whose cell is run
again. There the newest manager wins too: one that is garbage collected, or has no save under way,
gives its root up (``attend``), and so does a program that has called ``os.execv``. The newest
manager waits for the saves that an older one has under way.

The record also has the *place* of the root, by which two URLs of one root are recognized. A copy of
the root, which somebody made while the owner was alive, has a copy of the record, and has no owner.

The saves of a manager are its *work*. ``places`` has the URLs of the roots that the saves go to, by
their places. ``wait_kept`` waits until each save that is under way is on one of these roots.
"""

from __future__ import annotations

import logging
import os
import socket
import threading
import weakref
from collections.abc import Collection, Mapping
from typing import Final, Protocol

import msgspec

from ckpt.errors import IntegrityError, LinkRefused, ObjectNotFound, RootInUse, RootLost
from ckpt.model.keys import OWNER
from ckpt.pipeline.workers import THREAD_PREFIX
from ckpt.processes import PROGRAM, Process, boot_identity
from ckpt.storage.api import HasPlace, HasRoot, StorageBackend, read_record
from ckpt.storage.registry import scheme_of
from ckpt.storage.urls import OBJECT_STORES, canonical

_MOST_RECORD_BYTES = 64 << 10
NO_PROCESS: Final = 0
"""The ``pid`` in the record of a job that has closed and has left its root to the agent."""
_SCHEMES_WITHOUT_LINKS: Final = OBJECT_STORES | {"memory"}
"""The URL schemes of stores in which no two paths lead to the same objects."""
_MOST_ENDED: Final = 64
"""The largest number of ended attempts, and of unseen ones, in the record of an owner."""
_ended_attempts: Final[set[str]] = set()
"""The attempts of this process that are over.

If ``release`` could not delete ``writer.json``, the file may still name one of them.
"""
_collected_attempts: Final[set[str]] = set()
"""The attempts of this process whose managers were garbage collected."""
_log = logging.getLogger("ckpt")


class Work(Protocol):
    """The saves of a manager."""

    @property
    def places(self) -> Mapping[str, str]:
        """The URLs of the roots that the saves go to, by ``place_of`` of each."""
        ...

    @property
    def is_idle(self) -> bool:
        """Whether no save is under way."""
        ...

    def wait_kept(self, urls: Collection[str]) -> None:
        """Wait until one of the roots ``urls`` has each save that is under way, or the save is
        over, but at most for the commit timeout.
        """
        ...

    def wait_idle(self) -> None:
        """Wait until no save is under way, but at most for the commit timeout."""
        ...


_work_by_attempt: Final = weakref.WeakValueDictionary[str, Work]()
"""The saves of each manager of this process, by its attempt."""
os.register_at_fork(after_in_child=_work_by_attempt.clear)  # They go on in the parent only


def attend(attempt: str, manager: object, work: Work) -> None:
    """Note that ``manager`` makes the saves ``work``. It gives its roots up to another manager of
    this process if no save is under way, and when it is garbage collected.
    """
    _work_by_attempt[attempt] = work
    # At the exit of the interpreter, the manager does not count as garbage collected.
    weakref.finalize(manager, _collected_attempts.add, attempt).atexit = False


def await_others(attempt: str) -> None:
    """Wait until one of the roots of a manager has the saves that other managers of this process
    have under way there. ``attempt`` is that of the manager that waits.

    A thread of ckpt does not wait, since an observer of a save may restore, and the save waits for
    the observer.
    """
    own_work = _work_by_attempt.get(attempt)
    if own_work is None or threading.current_thread().name.startswith(THREAD_PREFIX):
        return
    # ``valuerefs`` returns a list, since a thread may make a manager meanwhile.
    for reference in _work_by_attempt.valuerefs():
        work = reference()
        if work is None or work is own_work or work.places.keys().isdisjoint(own_work.places):
            continue
        work.wait_kept([work.places[place] for place in work.places.keys() & own_work.places])


class Owner(msgspec.Struct, frozen=True):
    """The job that owns a root.

    Attributes:
        attempt: The id of the attempt.
        host: The name of the host, for messages.
        machine: A text that identifies the boot of the host and the process namespace.
        started: When the process started, in clock ticks since boot. No two processes have the same
            ``machine``, ``pid`` and ``started``.
        pid: The id of the process; ``NO_PROCESS`` if the job has left the root to the agent.
        program: The program that the process ran (``processes.PROGRAM``); empty if it is not known.
        root: Where the root is: its URL, or for a folder what ``HasPlace.place`` returns; empty in
            a record that was not written yet.
        ended: Attempts that owned the root before and whose processes are known to have ended.
        unseen: Attempts that owned the root before and may be alive, on other machines.
    """

    attempt: str
    host: str
    machine: str
    pid: int
    started: int
    program: str = ""
    root: str = ""
    ended: tuple[str, ...] = ()
    unseen: tuple[str, ...] = ()

    @classmethod
    def of_this_process(cls, attempt: str) -> Owner:
        """Return the record of this process as the owner, for ``attempt``."""
        process = Process.of(os.getpid())
        return cls(
            attempt=attempt,
            host=socket.gethostname(),
            machine=boot_identity(),
            pid=process.pid,
            started=process.start_time,
            program=PROGRAM,
        )

    @property
    def alive(self) -> bool:
        """Whether the process is known to be alive. The value is False for another machine, and in
        this process also for a manager that was garbage collected, or whose program was replaced
        (``os.execv``).
        """
        if self.machine != boot_identity() or not Process(self.pid, self.started).lives:
            return False
        return self.pid != os.getpid() or (
            self.program in {"", PROGRAM} and self.attempt not in _collected_attempts
        )

    @property
    def gives_way(self) -> bool:
        """Whether this owner is a manager of this process that has no save under way."""
        return (work := self.work) is not None and work.is_idle

    @property
    def work(self) -> Work | None:
        """The saves of this owner, if it is a manager of this process."""
        return _work_by_attempt.get(self.attempt) if self.is_in_this_process else None

    def is_predecessor(self, job: Owner) -> bool:
        """Return True if the processes of this owner are known to have started before those of
        ``job``, and to have ended.
        """
        is_on_this_machine = self.machine == job.machine == boot_identity()
        return is_on_this_machine and not self.alive and self.started < job.started

    @property
    def has_ended(self) -> bool:
        """Whether the processes of this owner are known to have ended."""
        return self.attempt in _ended_attempts or not (self.alive or self.is_unknown)

    @property
    def is_in_this_process(self) -> bool:
        """Whether this owner is the process that runs this code."""
        return self.alive and self.pid == os.getpid()

    @property
    def is_unknown(self) -> bool:
        """Whether this owner is on another machine, so that it may be alive or dead."""
        return self.machine != boot_identity()

    def __str__(self) -> str:
        return f"attempt {self.attempt}, process {self.pid} on {self.host}"


_owner_decoder: Final = msgspec.json.Decoder(Owner)


def claim(backend: StorageBackend, claimant: Owner) -> Owner:
    """Make ``claimant`` the owner of the root, and return the record that was written.

    Raises:
        RootInUse: The root's owner is alive on this machine.
        RootLost: The root is gone, or another folder has taken its place.
    """
    return put_owner(backend, succeed(backend, claimant))


def put_owner(backend: StorageBackend, claimant: Owner) -> Owner:
    """Write ``claimant``, a record that ``succeed`` has returned, and return what was written."""
    record = msgspec.structs.replace(claimant, root=_place(backend))
    backend.put(OWNER, [msgspec.json.encode(record)])
    _ended_attempts.discard(claimant.attempt)
    return record


def refuses(owner: Owner, claimant: Owner) -> bool:
    """Return True if ``owner``, the owner of a root, makes ``claim`` refuse ``claimant``."""
    return (
        owner.attempt not in {claimant.attempt, *_ended_attempts}
        and owner.alive
        and not owner.gives_way
    )


def succeed(backend: StorageBackend, claimant: Owner) -> Owner:
    """Return the record that ``claim`` would write for ``claimant``, and write nothing.

    This is ``claimant`` with the attempts that have ended, and those that may be alive: the
    attempts in the earlier record, and the attempt of the earlier record itself. If the owner is a
    manager of this process, the call waits for its saves.

    Raises:
        RootInUse: The root's owner is alive on this machine.
        RootLost: The root is gone, or another folder has taken its place.
    """
    owner = _idle_owner_of(backend, claimant)
    if owner is None:
        return claimant
    if refuses(owner, claimant):
        raise RootInUse(backend.url, str(owner), is_same_process=owner.is_in_this_process)
    if owner.attempt not in {claimant.attempt, *_ended_attempts} and owner.gives_way:
        _log.warning(
            "ckpt: %s is taken from another CheckpointManager of this process (%s), which has no "
            "save under way: its next save there fails",
            backend.url,
            owner,
        )
    ended_attempts, unseen_attempts = owner.ended, owner.unseen
    if owner.attempt != claimant.attempt:
        if owner.has_ended:
            ended_attempts = (*ended_attempts, owner.attempt)[-_MOST_ENDED:]
        else:
            unseen_attempts = (*unseen_attempts, owner.attempt)[-_MOST_ENDED:]
    return msgspec.structs.replace(
        claimant, ended=ended_attempts or claimant.ended, unseen=unseen_attempts or claimant.unseen
    )


def _idle_owner_of(backend: StorageBackend, claimant: Owner) -> Owner | None:
    """Return the owner of the root. If that is another manager of this process, wait for its saves
    first. The record is read again after a wait, since another job may have taken the root then.

    Raises:
        RootLost: The root is gone, or another folder has taken its place.
    """
    awaited_attempts = {claimant.attempt}
    while (owner := owner_of(backend)) is not None and owner.attempt not in awaited_attempts:
        awaited_attempts.add(owner.attempt)
        if (work := owner.work) is None or work.is_idle:
            break
        _log.warning(
            "ckpt: %s is written by another CheckpointManager of this process (%s): this save "
            "waits for the saves that it has under way",
            backend.url,
            owner,
        )
        work.wait_idle()
    return owner


def confirm(backend: StorageBackend, claimant: Owner) -> bool:
    """Return True if ``writer.json`` names this job.

    Return False if the root has no owner. This happens after another job has taken the root over
    and has closed since.

    Raises:
        RootInUse: Another attempt has taken the root over.
        RootLost: The root is gone, or another folder has taken its place.
    """
    owner = owner_of(backend)
    if owner is not None and owner.attempt != claimant.attempt:
        raise RootInUse(backend.url, str(owner), is_same_process=owner.is_in_this_process)
    return owner is not None


def detach(backend: StorageBackend, claimant: Owner) -> None:
    """Leave the root to the agent, if this job still owns the root.

    The record then names the job and no process. The next job takes the root over, as after the
    death of its owner.
    """
    if (owner := _end_attempt(backend, claimant)) is not None:
        backend.put(OWNER, [msgspec.json.encode(msgspec.structs.replace(owner, pid=NO_PROCESS))])


def release(backend: StorageBackend, claimant: Owner) -> None:
    """Delete the record of the owner if this job still owns the root.

    Even if the deletion fails, later managers of this process may use the root.
    """
    if _end_attempt(backend, claimant) is not None:
        delete_owner(backend)


def delete_owner(backend: StorageBackend) -> None:
    """Delete the record of the owner of a root, whichever job that is."""
    backend.delete(OWNER)


def _end_attempt(backend: StorageBackend, claimant: Owner) -> Owner | None:
    """Note that the attempt of ``claimant`` is over. Return the owner of the root if that is still
    ``claimant``, else None.
    """
    _ended_attempts.add(claimant.attempt)
    owner = read_owner(backend)
    return owner if owner is not None and owner.attempt == claimant.attempt else None


def owner_of(backend: StorageBackend) -> Owner | None:
    """Return the owner of the root, or None if it has none.

    Raises:
        RootLost: No owner was found, and the root is gone or another folder has taken its place.
    """
    owner = read_owner(backend)
    if owner is None and isinstance(backend, HasRoot) and backend.is_replaced():
        raise RootLost("")
    return owner


def read_owner(backend: StorageBackend) -> Owner | None:
    """Return the owner of the root. Return None if the root has none, if its record is not valid,
    or if the root is a copy of the root of an owner that is alive on this machine.
    """
    try:
        owner = read_record(backend, OWNER, _owner_decoder.decode, limit=_MOST_RECORD_BYTES)
    except (IntegrityError, LinkRefused, ObjectNotFound, msgspec.MsgspecError, UnicodeError):
        return None
    return None if _is_elsewhere(backend, owner.root) and owner.alive else owner


def _place(backend: StorageBackend) -> str:
    return backend.place() if isinstance(backend, HasPlace) else canonical(backend.url)


def _is_elsewhere(backend: StorageBackend, place: str) -> bool:
    """Return True if ``place`` is certainly not the root of ``backend``.

    Two kinds of stores may show the same files, such as a bucket and its mount by FUSE. A host or a
    container may have several names, the names of some servers ignore the case, and a file server
    may have links and shares inside of shares. So only two paths of one bucket are certain.
    """
    if isinstance(backend, HasPlace):
        return backend.is_elsewhere(place)
    if scheme_of(backend.url) not in _SCHEMES_WITHOUT_LINKS:
        return False
    (host, path), (other_host, other_path) = map(_split_host, (canonical(backend.url), place))
    return host == other_host and path.casefold() != other_path.casefold()


def _split_host(url: str) -> tuple[str, str]:
    """Return the part of a URL up to its host or bucket, and the path after it."""
    scheme, separator, place = url.partition("://")
    host, _, path = place.partition("/")
    return f"{scheme}{separator}{host}", path
