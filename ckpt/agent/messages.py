"""The messages between the agent and its callers, and their encoding on the socket.

A frame is a length of four bytes and a msgpack struct. The agent sends the first frame of each
connection: `Welcome`, which names its version. All versions must understand `Welcome` and `Stop`.
So a new version may only add fields with a default to these two, and older versions ignore such
fields. All other messages are exchanged between equal versions only.
"""

from __future__ import annotations

import re
import socket
import struct
from collections.abc import Iterator
from typing import Annotated, Any, Final

import msgspec

from ckpt.config import Tier
from ckpt.coordination.abort_reason import Abort
from ckpt.errors import AgentError
from ckpt.processes import Process
from ckpt.root.owner import Owner
from ckpt.version import __version__

PROTOCOL: Final = 8
"""The number of the message format. It rises when the messages change between two releases."""
VERSION: Final = f"{__version__}-{PROTOCOL}"
MOST_BYTES: Final = 4 << 20
"""The most bytes of a message. A `Job` with its environment has some KiB."""
_LENGTH: Final = struct.Struct(">I")


class Welcome(msgspec.Struct, frozen=True, tag="welcome"):
    """The first frame of the agent on each connection."""

    version: str
    pid: int


class Stop(msgspec.Struct, frozen=True, tag="stop"):
    """Asks the agent to end.

    Attributes:
        at_once: Whether the agent gives up the jobs whose trainers have ended. Otherwise it
            finishes them first.
        keep_memory: Whether the steps of a finished job stay in memory for the configured time, as
            they would without `Stop`. The agent ends after that time. Otherwise the memory is freed
            as soon as durable tiers have the steps.
    """

    at_once: bool = False
    keep_memory: bool = False


class Job(msgspec.Struct, frozen=True, tag="job"):
    """A job, with all that the agent needs to finish its steps. As a request, it registers the job.

    The options of tiers and the environment may hold secrets, so a job is sent over the socket
    only.

    Attributes:
        owner: The job as the owner of its roots.
        processes: The job's processes on this node.
        ranks: How many processes the job has, on all nodes.
        tiers: The fields of each `Tier`, nearest first. The URLs do not depend on the current
            folder.
        backlog: How many steps may wait for a farther tier.
        environment: The environment of the trainer, for the clients of object stores.
        scrub_mb_per_s: The rate in MB/s at which the steps are verified; 0 for not at all.
        before: The attempts that owned the roots of the job when the job started.
        node_ranks: The ranks on this node, if nodes have tiers of their own. Empty if this node's
            agent sees the files of all ranks.
        roots: The locations of the tiers, in the order of ``tiers``, by which the agent compares
            jobs. Symbolic links are resolved, so the agent asks no file system, which may not
            answer. Empty if the URLs are to be compared.
        marks: What recognizes the root of each tier (see ``HoldsRoot.mark``), in the order of
            ``tiers``. A text is empty if the tier has no such mark, or gave none in time.
    """

    owner: Owner
    processes: tuple[Process, ...]
    ranks: int
    tiers: tuple[dict[str, Any], ...]
    backlog: int
    environment: dict[str, str]
    scrub_mb_per_s: float = 0.0
    before: tuple[str, ...] = ()
    node_ranks: tuple[int, ...] = ()
    roots: tuple[str, ...] = ()
    marks: tuple[str, ...] = ()

    def __repr__(self) -> str:
        return f"Job({self.owner})"

    def tier_settings(self) -> tuple[Tier, ...]:
        """Return the tiers of the job, without opening them.

        Raises:
            ConfigError: The fields of a tier are not valid.
        """
        return tuple(_tier_of(fields) for fields in self.tiers)


class Detach(msgspec.Struct, frozen=True, tag="detach"):
    """States that the job ``attempt`` has closed its manager, and that the agent is to finish the
    steps of the job.
    """

    attempt: str


class Forget(msgspec.Struct, frozen=True, tag="forget"):
    """States that the job ``attempt`` has closed its manager, and that no step of the job is to be
    finished.
    """

    attempt: str


class AskStatus(msgspec.Struct, frozen=True, tag="status"):
    """Asks for an `AgentStatus`."""


class AskWorker(msgspec.Struct, frozen=True, tag="worker"):
    """Asks for a worker that copies files for the caller.

    If the agent does not refuse, it passes the connection on to a worker, which answers with
    `Lent`.

    Attributes:
        job: The job of the caller. It names the caller as the only process.
    """

    job: Job


class Lent(msgspec.Struct, frozen=True, tag="lent"):
    """States that the worker ``process`` serves the connection from now on, and copies files until
    the connection ends.
    """

    process: Process


class CopyFile(msgspec.Struct, frozen=True, tag="copy", kw_only=True):
    """Asks a worker to copy the data file of a rank to another tier of the job. The worker sends
    `Progress` several times a second, and `FileCopied` or `FileFailed` at the end.

    Attributes:
        folder: The folder of the step.
        rank: The rank.
        source: The index of the tier that has the file and its fragment.
        target: The index of the tier that gets the file.
        threads: How many threads copy.
        nice: The number that is added to the niceness of these threads.
        cpus: The cores that these threads may use; None for all.
    """

    folder: str
    rank: Annotated[int, msgspec.Meta(ge=0)]
    source: Annotated[int, msgspec.Meta(ge=0)]
    target: Annotated[int, msgspec.Meta(ge=0)]
    threads: Annotated[int, msgspec.Meta(ge=1, le=256)]
    nice: Annotated[int, msgspec.Meta(ge=0, le=19)] = 0
    cpus: frozenset[int] | None = None


class Progress(msgspec.Struct, frozen=True, tag="progress"):
    """The progress of a copy: ``done_bytes`` of the file have been written so far."""

    done_bytes: int


class FileCopied(msgspec.Struct, frozen=True, tag="file_copied"):
    """The end of a copy: the file is durable on the other tier.

    Attributes:
        lengths: The lengths in bytes of the file's encoded chunks on the other tier. Empty if the
            other tier has no codec.
    """

    lengths: tuple[int, ...] = ()


class FileFailed(msgspec.Struct, frozen=True, tag="file_failed"):
    """The end of a copy that has failed for ``reason``. Readers of the other tier see no part of
    the file.
    """

    reason: Abort


class Done(msgspec.Struct, frozen=True, tag="done"):
    """The answer of the agent that the request was carried out."""


class Refused(msgspec.Struct, frozen=True, tag="refused"):
    """The answer of the agent that the request was not carried out, and the reason."""

    reason: str


class ScrubStatus(msgspec.Struct, frozen=True, kw_only=True):
    """The progress and the results of the verification of a job's steps.

    Attributes:
        step: The step that is being verified; -1 if none is.
        tier: The URL of the tier from which the step is read.
        done_bytes: How many bytes of the step were read.
        total_bytes: How many bytes the step has.
        verified: How many steps were verified and are intact, on all tiers together.
        mended: How many damaged files were written again.
        damaged: The steps that no tier can mend, as "STEP URL: what is damaged".
        error: Why the last round could not verify all tiers; empty if it could.
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
    """The state of one job of the agent.

    Attributes:
        attempt: The job's attempt.
        state: "running": the trainer lives. "waiting": the work begins at ``next_at``, or when
            another agent or another job on the same roots has ended. "finishing": a worker finishes
            the job, or frees its memory. "kept": durable tiers have the steps, and the memory is
            freed at ``next_at``. For a job that is over: "done", "closed" by its trainer,
            "superseded" by another job, or "given up" after a day or when the agent was stopped.
        tiers: The URLs of the tiers, nearest first, without credentials.
        in_parts: Whether other nodes have parts of the steps.
        processes: The process ids of the trainer on this node.
        since: When the state began, in seconds since 1970.
        next_at: When the next try begins, in seconds since 1970; 0 if none is planned.
        step: The step that is being copied; -1 if none is.
        to: The URL of the tier that gets the step.
        done_bytes: How many bytes of the step were copied.
        total_bytes: How many bytes the step has.
        copied: The steps that were copied so far, as "STEP URL".
        error: Why the last try to finish the job failed; empty if it did not fail.
        scrub: The verification of the job's steps.
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
    """The state of the agent and of its jobs.

    Attributes:
        version: The version of the agent.
        pid: Its process id.
        started: When the agent started, in seconds since 1970.
        idle_seconds: After how many seconds without a job the agent ends.
        works: Whether the agent may start workers: it has taken ``work.lock``.
        jobs: First the jobs that are over, and then the other jobs. Both are ordered by age, oldest
            first.
    """

    version: str
    pid: int
    started: float
    idle_seconds: float
    works: bool
    jobs: tuple[JobStatus, ...] = ()


class Stopped(msgspec.Struct, frozen=True, tag="stopped"):
    """The last message to a caller that has sent `Stop`.

    Attributes:
        given_up: The jobs whose trainers have ended and whose steps the agent has not finished.
    """

    given_up: tuple[JobStatus, ...] = ()


Request = Job | Detach | Forget | AskStatus | AskWorker | Stop
Answer = Done | Refused | AgentStatus | Lent | Progress | FileCopied | FileFailed


def is_newer(version: str, than: str) -> bool:
    """Return True if ``version`` is newer than ``than``. Of two different versions, exactly one is
    the newer.
    """

    def sort_key(text: str) -> tuple[list[int], str]:
        return [int(number) for number in re.findall(r"[0-9]+", text)], text

    return sort_key(version) > sort_key(than)


def encode(message: msgspec.Struct) -> bytes:
    """Return the frame of a message.

    Raises:
        AgentError: The message is too long, or contains a value that msgpack cannot encode.
    """
    try:
        data = msgspec.msgpack.encode(message)
    except (TypeError, OverflowError, UnicodeEncodeError) as error:
        raise AgentError(
            f"a message to the agent holds a value that is not plain ({error}): give options of "
            "tiers as numbers and as strings of UTF-8"
        ) from None
    _check_length(len(data))
    return _LENGTH.pack(len(data)) + data


def send(connection: socket.socket, message: msgspec.Struct) -> None:
    """Send a message. Raises ``OSError`` if the connection has failed, and ``AgentError`` as
    ``encode`` does.
    """
    connection.sendall(encode(message))


def receive(connection: socket.socket) -> bytes:
    """Return the next message, undecoded.

    Raises:
        EOFError: The other side has closed the connection.
        AgentError: The message is too long.
        OSError: The connection has failed, or its timeout has passed.
    """
    (length,) = _LENGTH.unpack(_receive_exactly(connection, _LENGTH.size))
    _check_length(length)
    return _receive_exactly(connection, length)


def frames(buffer: bytearray) -> Iterator[bytes]:
    """Remove each complete frame from the front of ``buffer``, and yield its message, undecoded.

    Raises:
        AgentError: A message is too long.
    """
    while len(buffer) >= _LENGTH.size:
        (length,) = _LENGTH.unpack_from(buffer)
        _check_length(length)
        end = _LENGTH.size + length
        if len(buffer) < end:
            return
        data = bytes(buffer[_LENGTH.size : end])
        del buffer[:end]
        yield data


def _check_length(length: int) -> None:
    if length > MOST_BYTES:
        raise AgentError(f"a message of {length} bytes is too long: {MOST_BYTES} are allowed")


def _receive_exactly(connection: socket.socket, count: int) -> bytes:
    """Return the next ``count`` bytes. Raises the errors of ``receive``."""
    data = bytearray()
    while len(data) < count:
        piece = connection.recv(count - len(data))
        if not piece:
            raise EOFError
        data += piece
    return bytes(data)


def fields_of(tier: Tier, url: str) -> dict[str, Any]:
    """Return the fields of ``tier`` as a `Job` contains them, with ``url`` as the URL. An agent
    writes no increments, and needs no base for them.
    """
    names = [name for name in Tier.__dataclass_fields__ if name != "base"]
    fields = {name: getattr(tier, name) for name in names}
    return {**fields, "url": url, "options": dict(tier.options)}


def urls_of(job: Job) -> tuple[str, ...]:
    """Return the URLs of the tiers of a job, nearest first."""
    return tuple(str(fields["url"]) for fields in job.tiers)


def roots_of(job: Job) -> tuple[str, ...]:
    """Return the locations of the tiers of a job, by which jobs are compared."""
    return job.roots or urls_of(job)


def _tier_of(fields: dict[str, Any]) -> Tier:
    arguments: dict[str, Any] = {"url": "", **fields}  # Tier() refuses an empty URL
    if isinstance(best := arguments.get("keep_best"), list):
        arguments["keep_best"] = tuple(best)
    return Tier(**arguments)
