"""Who writes to a root: one job at a time, and the last to come wins.

``writer.json`` names the attempt and its process. A new attempt takes the root over, unless the owner is alive on this very machine: then it is told so.
An owner that was taken over finds another name there at its next commit and fails that save. Needs no heartbeat: a restarted job never waits for the dead.
"""

from __future__ import annotations

import os
import socket
from typing import Final

import msgspec

from ckpt.errors import ObjectNotFound, RootInUse
from ckpt.model.layout import OWNER
from ckpt.storage.api import StorageBackend

_LIMIT = 64 << 10
_ended: Final[set[str]] = set()
"""Attempts of this process that are over: the disk may have refused to forget them."""


class Owner(msgspec.Struct, frozen=True):
    """``machine`` is this boot of this host and its process namespace; ``started`` in clock ticks since boot: together a pid that is never reused.

    ``run`` is torchrun's name for the run, empty without one; ``restart`` counts how often it has started all ranks anew.
    """

    attempt: str
    host: str
    machine: str
    pid: int
    started: int
    run: str = ""
    restart: int = 0

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


def claim(backend: StorageBackend, me: Owner) -> None:
    """Make the root ours. Raises ``RootInUse`` if its owner is alive on this machine."""
    owner = read_owner(backend)
    if owner is not None and owner.attempt not in {me.attempt, *_ended} and owner.alive:
        raise RootInUse(backend.url, str(owner), here=owner.here_too)
    backend.put(OWNER, [msgspec.json.encode(me)])
    _ended.discard(me.attempt)


def confirm(backend: StorageBackend, me: Owner) -> None:
    """Raises ``RootInUse`` if another attempt has taken the root over since."""
    owner = read_owner(backend)
    if owner is not None and owner.attempt != me.attempt:
        raise RootInUse(backend.url, str(owner), here=owner.here_too)


def release(backend: StorageBackend, me: Owner) -> None:
    """Give the root back, if it is still ours. To later managers of this process it is free also if the store fails now."""
    _ended.add(me.attempt)
    owner = read_owner(backend)
    if owner is not None and owner.attempt == me.attempt:
        backend.delete(OWNER)


def read_owner(backend: StorageBackend) -> Owner | None:
    """None if nobody owns the root, or what is there cannot be read: it guards nothing then."""
    try:
        data = bytearray(size) if (size := backend.head(OWNER).size) <= _LIMIT else bytearray()
        if data:
            backend.read_into(OWNER, 0, memoryview(data))
        return msgspec.json.decode(data, type=Owner)
    except (ObjectNotFound, msgspec.MsgspecError, UnicodeError):
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
