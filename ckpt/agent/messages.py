"""What the agent and its callers say to each other, and how it travels over the socket.

A frame is a length of four bytes and a msgpack struct. The agent speaks first: `Welcome` names its
version. Agents of all versions must understand `Welcome` and `Stop`, so these two only ever get
further fields with a default, which older agents pass over. All other messages are exchanged
between equal versions only.
"""

from __future__ import annotations

import re
import socket
import struct
from collections.abc import Iterator
from typing import Annotated, Any, Final

import msgspec

from ckpt.config import Tier
from ckpt.coordination.abort_reason import Aborted
from ckpt.coordination.owner import Owner
from ckpt.errors import AgentError
from ckpt.processes import Process
from ckpt.version import __version__

PROTOCOL: Final = 5
"""Counts the changes of the messages between two releases."""
VERSION: Final = f"{__version__}-{PROTOCOL}"
MOST_BYTES: Final = 4 << 20
"""The most bytes of a message. A job with its environment has some KiB."""
_LENGTH: Final = struct.Struct(">I")


class Welcome(msgspec.Struct, frozen=True, tag="welcome"):
    """The first frame of the agent on each connection."""

    version: str
    pid: int


class Stop(msgspec.Struct, frozen=True, tag="stop"):
    """Asks the agent to end: ``at_once``, or after the work for jobs that have ended.

    With ``keep_memory``, steps stay in memory as long as they would have, and the agent with them.
    """

    at_once: bool = False
    keep_memory: bool = False


class Job(msgspec.Struct, frozen=True, tag="job"):
    """What the agent must know about a job to finish its steps. It travels over the socket only,
    since options and environment may hold secrets.

    Attributes:
        owner: The job as the owner of its roots.
        processes: The job's processes on this node.
        ranks: How many processes the job has, on all nodes.
        tiers: The fields of each `Tier`, nearest first, with absolute places.
        backlog: How many steps a farther tier may lack.
        before: The attempts that owned its roots when it started.
        here: The ranks on this node, if nodes have tiers of their own. Empty if this node's agent
            sees the files of all ranks.
        environment: The environment of the trainer, for the clients of object stores.
        scrub_mb_per_s: At which rate its steps are verified; 0 for not at all.
    """

    owner: Owner
    processes: tuple[Process, ...]
    ranks: int
    tiers: tuple[dict[str, Any], ...]
    backlog: int
    environment: dict[str, str]
    scrub_mb_per_s: float = 0.0
    before: tuple[str, ...] = ()
    here: tuple[int, ...] = ()

    def __repr__(self) -> str:
        return f"Job({self.owner})"

    def open_as(self) -> tuple[Tier, ...]:
        """Return the tiers of the job. Raises ``ConfigError`` if one of them is none."""
        return tuple(_tier(fields) for fields in self.tiers)


class Detach(msgspec.Struct, frozen=True, tag="detach"):
    """The job ``attempt`` has closed its manager, and leaves the rest to the agent."""

    attempt: str


class Forget(msgspec.Struct, frozen=True, tag="forget"):
    """The job ``attempt`` has closed its manager, and nothing is left to do."""

    attempt: str


class AskStatus(msgspec.Struct, frozen=True, tag="status"):
    """Asks for an `AgentStatus`."""


class AskWorker(msgspec.Struct, frozen=True, tag="worker"):
    """Asks for a worker that copies files for the caller, the only process of ``job``. If the agent
    does not refuse, the worker answers with `Lent`, and has the connection from then on.
    """

    job: Job


class Lent(msgspec.Struct, frozen=True, tag="lent"):
    """The worker ``process`` copies files until the connection ends."""

    process: Process


class CopyFile(msgspec.Struct, frozen=True, tag="copy", kw_only=True):
    """Asks a worker to copy the data file of a rank to another tier of the job. It answers with
    `FileCopied` or `FileFailed`, and with `Progress` until then.

    Attributes:
        folder: The folder of the step.
        rank: The rank.
        source: The index of the tier that has the file and its fragment.
        target: The index of the tier that lacks both.
        threads: How many threads copy.
        nice: Added to the niceness of these threads.
        cpus: The cores that they may use; None for all.
    """

    folder: str
    rank: Annotated[int, msgspec.Meta(ge=0)]
    source: Annotated[int, msgspec.Meta(ge=0)]
    target: Annotated[int, msgspec.Meta(ge=0)]
    threads: Annotated[int, msgspec.Meta(ge=1, le=256)]
    nice: Annotated[int, msgspec.Meta(ge=0, le=19)] = 0
    cpus: frozenset[int] | None = None


class Progress(msgspec.Struct, frozen=True, tag="progress"):
    """A file is being copied, and so many bytes of it are there."""

    done_bytes: int


class FileCopied(msgspec.Struct, frozen=True, tag="file_copied"):
    """A file is durable on the other tier.

    ``lengths`` are those of its chunks there, if they are encoded.
    """

    lengths: tuple[int, ...] = ()


class FileFailed(msgspec.Struct, frozen=True, tag="file_failed"):
    """A file was not copied. Nothing of it is visible."""

    reason: Aborted


class Done(msgspec.Struct, frozen=True, tag="done"):
    """The agent has done what it was asked."""


class Refused(msgspec.Struct, frozen=True, tag="refused"):
    """The agent does not do what it was asked."""

    reason: str


class ScrubStatus(msgspec.Struct, frozen=True, kw_only=True):
    """How far the verification of a job's steps is.

    Attributes:
        step: The step that is verified; -1 if none is.
        tier: The tier that it is read from.
        done_bytes: How many bytes of it were read.
        total_bytes: How many bytes it has.
        verified: How many steps were verified and are intact, on all tiers together.
        mended: How many files were written again.
        damaged: The steps that no tier can mend, as "STEP URL: what is damaged".
        error: Why the last round did not see all tiers; empty if it did.
    """

    step: int = -1
    tier: str = ""
    done_bytes: int = 0
    total_bytes: int = 0
    verified: int = 0
    mended: int = 0
    damaged: tuple[str, ...] = ()
    error: str = ""


class JobStatus(msgspec.Struct, frozen=True, kw_only=True):
    """What the agent knows about one job.

    Attributes:
        attempt: The job's attempt.
        state: "running": the trainer lives. "waiting": the work begins at ``next_at``, or when
            another agent or another job on the same roots has ended. "finishing": a worker copies.
            "kept": durable tiers have the steps, and the memory is freed at ``next_at``. For a job
            that is over: "done", "closed" by its trainer, "superseded" by another job, or "given
            up" after a day or when the agent was stopped.
        tiers: The URLs of the tiers, nearest first, without credentials.
        in_parts: Whether other nodes have parts of the steps.
        processes: The process ids of the trainer on this node.
        since: When the state began, in seconds since 1970.
        next_at: When the next try begins, in seconds since 1970; 0 if none is planned.
        step: The step that is copied; -1 if none is.
        to: The tier that it is copied to.
        done_bytes: How many bytes of it are there.
        total_bytes: How many bytes it has.
        copied: The steps that were copied so far, as "STEP URL".
        error: Why the last try did not finish; empty if it did.
        scrub: The verification of its steps.
    """

    attempt: str
    state: str
    tiers: tuple[str, ...]
    processes: tuple[int, ...]
    since: float
    in_parts: bool = False
    next_at: float = 0.0
    step: int = -1
    to: str = ""
    done_bytes: int = 0
    total_bytes: int = 0
    copied: tuple[str, ...] = ()
    error: str = ""
    scrub: ScrubStatus = ScrubStatus()


class AgentStatus(msgspec.Struct, frozen=True, kw_only=True, tag="agent_status"):
    """What the agent does.

    Attributes:
        version: The version of the agent.
        pid: Its process id.
        started: When it started, in seconds since 1970.
        idle_seconds: It ends by itself after so many seconds without a job.
        works: Whether it may work. It may not while an agent that it has replaced still does.
        jobs: The jobs that it knows, the oldest first.
    """

    version: str
    pid: int
    started: float
    idle_seconds: float
    works: bool
    jobs: tuple[JobStatus, ...] = ()


class Stopped(msgspec.Struct, frozen=True, tag="stopped"):
    """The last message to a caller that has sent `Stop`.

    ``given_up`` are the jobs that have ended and are not finished.
    """

    given_up: tuple[JobStatus, ...] = ()


Request = Job | Detach | Forget | AskStatus | AskWorker | Stop
Answer = Done | Refused | AgentStatus | Lent | Progress | FileCopied | FileFailed


def is_newer(version: str, than: str) -> bool:
    """Return whether one version is newer than another. Of two that differ, one is the newer."""

    def order(text: str) -> tuple[list[int], str]:
        return [int(number) for number in re.findall(r"[0-9]+", text)], text

    return order(version) > order(than)


def encode(message: msgspec.Struct) -> bytes:
    """Return the frame of a message.

    Raises:
        AgentError: It is too long, or a value of it cannot travel.
    """
    try:
        data = msgspec.msgpack.encode(message)
    except (TypeError, OverflowError, UnicodeEncodeError) as error:
        raise AgentError(
            f"a message to the agent holds a value that is not plain ({error}): give options of "
            "tiers as numbers and as strings of UTF-8"
        ) from None
    _check(len(data))
    return _LENGTH.pack(len(data)) + data


def send(connection: socket.socket, message: msgspec.Struct) -> None:
    """Send a message. Raises ``OSError``, and what ``encode`` raises."""
    connection.sendall(encode(message))


def receive(connection: socket.socket) -> bytes:
    """Return the next message, undecoded.

    Raises:
        EOFError: The other side has closed the connection.
        AgentError: The message is too long.
        OSError: The connection has failed, or its timeout is over.
    """
    (length,) = _LENGTH.unpack(_exactly(connection, _LENGTH.size))
    _check(length)
    return _exactly(connection, length)


def frames(buffer: bytearray) -> Iterator[bytes]:
    """Take each whole message off the front of ``buffer``. Raises ``AgentError`` for one that is
    too long.
    """
    while len(buffer) >= _LENGTH.size:
        (length,) = _LENGTH.unpack_from(buffer)
        _check(length)
        end = _LENGTH.size + length
        if len(buffer) < end:
            return
        data = bytes(buffer[_LENGTH.size : end])
        del buffer[:end]
        yield data


def _check(length: int) -> None:
    if length > MOST_BYTES:
        raise AgentError(f"a message of {length} bytes is too long: {MOST_BYTES} are allowed")


def _exactly(connection: socket.socket, count: int) -> bytes:
    data = bytearray()
    while len(data) < count:
        piece = connection.recv(count - len(data))
        if not piece:
            raise EOFError
        data += piece
    return bytes(data)


def fields_of(tier: Tier, url: str) -> dict[str, Any]:
    """Return the fields of ``tier`` at the place ``url``, to be sent."""
    fields = {name: getattr(tier, name) for name in Tier.__dataclass_fields__}
    return {**fields, "url": url, "options": dict(tier.options)}


def urls_of(job: Job) -> tuple[str, ...]:
    """Return the URLs of the tiers of a job, nearest first."""
    return tuple(str(fields["url"]) for fields in job.tiers)


def _tier(fields: dict[str, Any]) -> Tier:
    found: dict[str, Any] = {"url": "", **fields}  # a tier without a URL is refused
    if isinstance(best := found.get("keep_best"), list):
        found["keep_best"] = tuple(best)
    return Tier(**found)
