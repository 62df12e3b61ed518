"""Reach the agent of this user, start it if there is none, and replace one of an older version."""

from __future__ import annotations

import os
import select
import socket
import subprocess
import sys
import time
from contextlib import closing, suppress
from typing import Final

import msgspec

from ckpt.agent.messages import (
    VERSION,
    AgentStatus,
    Answer,
    AskStatus,
    CopyFile,
    JobStatus,
    Refused,
    Request,
    Stop,
    Stopped,
    Welcome,
    is_newer,
    receive,
    send,
)
from ckpt.agent.place import Place, check_peer
from ckpt.agent.reports import Verified
from ckpt.config import AGENT_FOLDER_VARIABLE, agent_folder, environment_for_agent
from ckpt.errors import AgentError

_ANSWER_SECONDS: Final = 10.0
_START_SECONDS: Final = 20.0
_PAUSE_SECONDS: Final = 0.05
_ANSWERS: Final[msgspec.msgpack.Decoder[Answer]] = msgspec.msgpack.Decoder(Answer)
_WELCOME: Final = msgspec.msgpack.Decoder(Welcome)
_VERIFIED: Final = msgspec.msgpack.Decoder(Verified)
_STOPPED: Final = msgspec.msgpack.Decoder(Stopped)
_PARENT: Final = os.path.dirname(os.path.dirname(os.path.dirname(os.path.abspath(__file__))))
"""The folder that ckpt is imported from."""


class Connection:
    """A connection to an agent. One request is under way at a time.

    Attributes:
        welcome: The version and the process of the agent.

    Thread safety: one thread at a time.
    """

    def __init__(self, connected: socket.socket) -> None:
        """Raises ``AgentError`` if the other end is another user's, or is no agent."""
        self._socket = connected
        connected.settimeout(_ANSWER_SECONDS)
        check_peer(connected, "the agent's socket")
        try:
            self.welcome = _WELCOME.decode(receive(connected))
        except msgspec.MsgspecError:
            raise AgentError("the agent's socket is served by another program") from None

    def ask(self, request: Request, timeout: float = _ANSWER_SECONDS) -> Answer:
        """Return the agent's answer.

        Raises:
            AgentError: The agent refuses, or does not answer.
        """
        self.send(request)
        return self.next_answer(timeout)

    def send(self, request: Request | CopyFile) -> None:
        """Send a request without waiting for an answer. Raises ``AgentError``."""
        try:
            send(self._socket, request)
        except OSError as error:
            raise AgentError(f"the agent cannot be asked: {error!r}") from None

    def next_answer(self, timeout: float) -> Answer:
        """Return the next answer of the agent, or of the worker that it has lent.

        Raises:
            AgentError: It refuses, has ended, or is silent for ``timeout`` seconds.
        """
        self._socket.settimeout(timeout)
        try:
            answer = _ANSWERS.decode(receive(self._socket))
        except (OSError, EOFError) as error:
            raise AgentError(f"the agent does not answer: {error!r}") from None
        except msgspec.MsgspecError as error:
            raise AgentError(f"the agent's answer cannot be read: {error}") from None
        if isinstance(answer, Refused):
            raise AgentError(f"the agent refuses: {answer.reason}")
        return answer

    def next_news(self) -> Verified | None:
        """Wait for what the agent has found out about the registered job. None if the agent has
        ended, or has closed the connection.
        """
        self._socket.settimeout(None)
        try:
            return _VERIFIED.decode(receive(self._socket))
        except (OSError, EOFError, AgentError, msgspec.MsgspecError):
            return None

    def stopped(self) -> Stopped:
        """Wait until the agent, which was asked to stop, has ended. Return its last message, which
        is empty if it was killed or is of another version.
        """
        self._socket.settimeout(None)
        with suppress(OSError, EOFError, AgentError, msgspec.MsgspecError):
            return _STOPPED.decode(receive(self._socket))
        return Stopped()

    def has_ended(self, seconds: float) -> bool:
        """Return whether the other end closes the connection within so many seconds. What it still
        sends is dropped.
        """
        deadline, comes = time.monotonic() + seconds, select.poll()
        comes.register(self._socket, select.POLLIN)
        with suppress(OSError):
            while comes.poll(1e3 * max(0.0, deadline - time.monotonic())):
                if not self._socket.recv(1 << 16):
                    return True
            return False
        return True

    def end_requests(self) -> None:
        """Let the other end see that no request follows. What it sends can still be read."""
        with suppress(OSError):
            self._socket.shutdown(socket.SHUT_WR)

    def interrupt(self) -> None:
        """Let ``next_news`` return in another thread."""
        with suppress(OSError):
            self._socket.shutdown(socket.SHUT_RDWR)

    def close(self) -> None:
        self._socket.close()


def connect(place: Place) -> Connection | None:
    """Return a connection to the agent, or None if no agent listens.

    Raises:
        AgentError: The socket is another user's, or something else is wrong with it.
    """
    connected = socket.socket(socket.AF_UNIX, socket.SOCK_STREAM)
    connected.settimeout(_ANSWER_SECONDS)
    try:
        connected.connect(place.socket)
        return Connection(connected)
    except (FileNotFoundError, ConnectionRefusedError, ConnectionResetError, EOFError):
        connected.close()  # none listens, or it is just ending
        return None
    except OSError as error:
        connected.close()
        raise AgentError(
            f"the agent's socket {place.socket} cannot be used: {error.strerror or error}"
        ) from None
    except BaseException:
        connected.close()
        raise


def reach(place: Place) -> Connection:
    """Return a connection to an agent of this version, which is started if there is none.

    An agent of an older version is asked to end, and is replaced. A newer agent is not replaced.
    Otherwise two versions on one node would replace each other again and again.

    Raises:
        AgentError: None could be started, or one of a newer version runs.
    """
    deadline = time.monotonic() + _START_SECONDS
    while True:
        found = connect(place)
        if found is None:
            start(place, max(1.0, deadline - time.monotonic()))
        elif found.welcome.version == VERSION:
            return found
        elif is_newer(found.welcome.version, VERSION):
            found.close()
            raise _other_version(found.welcome, "set CKPT_AGENT_FOLDER to a folder for this one")
        else:
            with suppress(AgentError):  # it may be ending already
                found.ask(Stop(keep_memory=True))
            found.close()
        if time.monotonic() > deadline:
            raise AgentError(
                f"no agent of version {VERSION} answers after {_START_SECONDS:.0f} s: its log is "
                f"{place.log}"
            )
        time.sleep(_PAUSE_SECONDS if found is not None else 0.0)


def reach_and_ask(request: Request, timeout: float = _ANSWER_SECONDS) -> tuple[Connection, Answer]:
    """Return a connection to the agent of this user, and its answer to ``request``. The agent is
    started if there is none.

    Raises:
        AgentError: None could be started, or one of a newer version runs, or it refuses.
    """
    connection = reach(Place.of_this_user())
    try:
        return connection, connection.ask(request, timeout)
    except BaseException:
        connection.close()
        raise


def start(place: Place, timeout: float) -> None:
    """Start an agent in a session of its own. It shares no descriptor with this process, except
    for its log file.

    Returns when it listens, or when another agent does.

    Raises:
        AgentError: It could not be started.
    """
    try:
        log = place.open_log()
    except OSError as error:
        raise AgentError(
            f"the agent's log {place.log} cannot be opened ({error.strerror}): remove it, or set "
            "CKPT_AGENT_FOLDER to another folder"
        ) from None
    try:
        done = subprocess.run(
            [sys.executable, "-P", "-m", "ckpt.agent", "start"],
            stdin=subprocess.DEVNULL,
            stdout=log,
            stderr=log,
            cwd="/",
            env=surroundings(place),
            start_new_session=True,
            timeout=timeout,
            check=False,
        )
    except (OSError, subprocess.SubprocessError) as error:
        raise AgentError(f"the agent could not be started: {error}") from None
    finally:
        os.close(log)
    if done.returncode:
        raise AgentError(
            f"the agent could not be started (exit code {done.returncode}): its log is {place.log}"
        )


def surroundings(place: Place) -> dict[str, str]:
    """Return the environment of an agent, or of a worker, that finds this very package."""
    found = environment_for_agent()
    paths = [os.path.abspath(path) for path in found.get("PYTHONPATH", "").split(":") if path]
    if not _PARENT.endswith(("site-packages", "dist-packages")):
        paths.append(_PARENT)
    return {**found, "PYTHONPATH": ":".join(paths), AGENT_FOLDER_VARIABLE: place.folder}


def status(place: Place) -> AgentStatus | None:
    """Return what the agent of this user does, or None if none runs.

    Raises:
        AgentError: It is of another version, or does not answer.
    """
    found = connect(place)
    if found is None:
        return None
    with closing(found):
        if found.welcome.version != VERSION:
            raise _other_version(found.welcome, "ckpt agent stop ends it")
        answer = found.ask(AskStatus())
    if not isinstance(answer, AgentStatus):
        raise AgentError("the agent has answered something else")
    return answer


def known_jobs() -> tuple[JobStatus, ...]:
    """Return the jobs that the agent of this user knows; none if there is no agent to ask."""
    if not os.path.isdir(agent_folder()):
        return ()
    try:
        found = status(Place.of_this_user())
    except AgentError:
        return ()
    return found.jobs if found is not None else ()


def _other_version(agent: Welcome, way_out: str) -> AgentError:
    return AgentError(
        f"the agent (process {agent.pid}) has version {agent.version}, and this is {VERSION}: "
        f"{way_out}"
    )
