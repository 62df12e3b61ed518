"""Who writes to a root: one job at a time, and the last to come wins.

``writer.json`` names the attempt and its process. A new attempt takes the root over, unless the owner is alive on this very machine: then it is told so.
An owner that was taken over finds another name there at its next commit and fails that save. Needs no heartbeat: a restarted job never waits for the dead.

An owner on another machine, or in another process namespace, may be alive or dead. What it has written is removed only where it is known to have ended (see ``Owner.has_ended``).
"""

from __future__ import annotations

import os
import socket
from typing import Final

import msgspec

from ckpt.errors import LinkRefused, ObjectNotFound, RootInUse, RootLost
from ckpt.model.keys import OWNER
from ckpt.storage.api import Rooted, StorageBackend

_LIMIT = 64 << 10
_MOST_ENDED: Final = 64
"""How many ended attempts an owner remembers."""
_ended: Final[set[str]] = set()
"""Attempts of this process that are over: the disk may have refused to forget them."""


class Owner(msgspec.Struct, frozen=True):
    """``machine`` is this boot of this host and its process namespace; ``started`` in clock ticks since boot: together a pid that is never reused.

    ``run`` is torchrun's name for the run, empty without one; ``restart`` counts how often it has started all ranks anew.
    ``ended`` names attempts that owned the root before, and whose processes are known to have ended.
    """

    attempt: str
    host: str
    machine: str
    pid: int
    started: int
    run: str = ""
    restart: int = 0
    ended: tuple[str, ...] = ()

    @classmethod
    def here(cls, attempt: str) -> Owner:
        """This process."""
        pid = os.getpid()
        return cls(
            attempt=attempt,
            host=socket.gethostname(),
            machine=_machine(),
            pid=pid,
            started=_started(pid) or 0,
            run=_run(),
            restart=int(os.environ.get("TORCHELASTIC_RESTART_COUNT", "0")),  # noqa: TID251 - torchrun's word to its workers
        )

    @property
    def alive(self) -> bool:
        """Whether the process is known to live. False if it is on another machine: nobody can know."""
        return self.machine == _machine() and _started(self.pid) == self.started

    def went_before(self, other: Owner) -> bool:
        """Whether ``other`` is of a later start of the same run: torchrun has ended all of this one's processes, on every machine, before it starts the next."""
        return self.run == other.run != "" and self.restart < other.restart

    def has_ended(self, other: Owner) -> bool:
        """Whether its processes are known to have ended, to ``other``, which is of this process."""
        return self.attempt in _ended or self.went_before(other) or not (self.alive or self.is_unknown)

    @property
    def here_too(self) -> bool:
        """Whether it is this very process."""
        return self.alive and self.pid == os.getpid()

    @property
    def is_unknown(self) -> bool:
        """Whether nobody here can know if it lives: it is on another machine."""
        return self.machine != _machine()

    def __str__(self) -> str:
        return f"attempt {self.attempt}, process {self.pid} on {self.host}"


def claim(backend: StorageBackend, me: Owner) -> Owner:
    """Make the root ours. Returns the owner as it was written, with the attempts that are known to have ended.

    Raises:
        RootInUse: The root's owner is alive on this machine.
    """
    mine = succeed(backend, me)
    backend.put(OWNER, [msgspec.json.encode(mine)])
    _ended.discard(me.attempt)
    return mine


def succeed(backend: StorageBackend, me: Owner) -> Owner:
    """Return ``me`` as the next owner of the root, with the attempts that are known to have ended. Nothing is written.

    Raises:
        RootInUse: The root's owner is alive on this machine.
    """
    owner = _owner_of(backend)
    ended: tuple[str, ...] = ()
    if owner is not None:
        if owner.attempt not in {me.attempt, *_ended} and owner.alive:
            raise RootInUse(backend.url, str(owner), here=owner.here_too)
        ended = owner.ended
        if owner.attempt != me.attempt and owner.has_ended(me):
            ended = (*ended, owner.attempt)[-_MOST_ENDED:]
    return msgspec.structs.replace(me, ended=ended or me.ended)


def confirm(backend: StorageBackend, me: Owner) -> bool:
    """Return whether ``writer.json`` names this job. There is no such file if a job that took the root over has closed since.

    Raises:
        RootInUse: Another attempt has taken the root over.
    """
    owner = _owner_of(backend)
    if owner is not None and owner.attempt != me.attempt:
        raise RootInUse(backend.url, str(owner), here=owner.here_too)
    return owner is not None


def release(backend: StorageBackend, me: Owner) -> None:
    """Give the root back, if it is still ours. To later managers of this process it is free also if the store fails now."""
    _ended.add(me.attempt)
    owner = read_owner(backend)
    if owner is not None and owner.attempt == me.attempt:
        backend.delete(OWNER)


def _owner_of(backend: StorageBackend) -> Owner | None:
    """As ``read_owner``, for a job that writes here. Raises ``RootLost`` if the root has no owner because it is another folder now."""
    owner = read_owner(backend)
    if owner is None and isinstance(backend, Rooted) and backend.is_replaced():
        raise RootLost("")
    return owner


def read_owner(backend: StorageBackend) -> Owner | None:
    """None if nobody owns the root, or what is there cannot be read: it guards nothing then."""
    try:
        data = bytearray(size) if (size := backend.head(OWNER).size) <= _LIMIT else bytearray()
        if data:
            backend.read_into(OWNER, 0, memoryview(data))
        return msgspec.json.decode(data, type=Owner)
    except (LinkRefused, ObjectNotFound, msgspec.MsgspecError, UnicodeError):
        return None


def _run() -> str:
    name = os.environ.get("TORCHELASTIC_RUN_ID", "")  # noqa: TID251 - torchrun's word to its workers
    return "" if name == "none" else name  # what torchrun calls a run that was given no name


def _machine() -> str:
    try:
        with open("/proc/sys/kernel/random/boot_id") as file:
            return f"{file.read().strip()}/{os.stat('/proc/self/ns/pid').st_ino}"
    except OSError:
        return socket.gethostname()


def _started(pid: int) -> int | None:
    """Start time of a process, None if there is none or it is only waiting to be reaped."""
    try:
        with open(f"/proc/{pid}/stat") as file:
            fields = file.read().rpartition(")")[2].split()
    except OSError:
        return None
    return None if fields[0] in "ZX" else int(fields[19])
