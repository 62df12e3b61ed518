"""Connections to the agent of this user. A missing agent is started, and an agent of an older
version is replaced.
"""

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

from ckpt.agent.folder import AgentFolder, check_peer
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
from ckpt.agent.worker_messages import Verified
from ckpt.config import AGENT_FOLDER_VARIABLE, agent_folder, environment_for_agent
from ckpt.errors import AgentError

_ANSWER_SECONDS: Final = 10.0
_START_SECONDS: Final = 20.0
_PAUSE_SECONDS: Final = 0.05
_ANSWER_DECODER: Final[msgspec.msgpack.Decoder[Answer]] = msgspec.msgpack.Decoder(Answer)
_WELCOME_DECODER: Final = msgspec.msgpack.Decoder(Welcome)
_VERIFICATION_DECODER: Final = msgspec.msgpack.Decoder(Verified)
_STOP_DECODER: Final = msgspec.msgpack.Decoder(Stopped)
_PACKAGE_PARENT: Final = os.path.dirname(
    os.path.dirname(os.path.dirname(os.path.abspath(__file__)))
)
"""The folder that contains the package ckpt."""


class Connection:
    """A connection to an agent. After an `AskWorker` request, a worker of the agent has the other
    end. One request is under way at a time.

    Attributes:
        welcome: The message with the version and the process id of the agent.

    Thread safety: one thread at a time.
    """

    def __init__(self, connection: socket.socket) -> None:
        """Receive the agent's `Welcome`. If this fails, the caller closes ``connection``.

        Raises:
            AgentError: The process at the other end belongs to another user, or sends another
                message.
            EOFError: The process at the other end closes the connection.
            OSError: No message arrives within 10 seconds, or the connection breaks.
        """
        self._socket = connection
        connection.settimeout(_ANSWER_SECONDS)
        check_peer(connection, "the agent's socket")
        try:
            self.welcome = _WELCOME_DECODER.decode(receive(connection))
        except msgspec.MsgspecError:
            raise AgentError("the agent's socket is served by another program") from None

    def ask(self, request: Request, timeout: float = _ANSWER_SECONDS) -> Answer:
        """Send ``request``, and return the agent's answer.

        Raises:
            AgentError: The request is too long, the connection has failed, the agent refuses the
                request, or no answer arrives for ``timeout`` seconds.
        """
        self.send(request)
        return self.next_answer(timeout)

    def send(self, request: Request | CopyFile) -> None:
        """Send a request without waiting for an answer.

        Raises:
            AgentError: The connection has failed, or the request is too long.
        """
        try:
            send(self._socket, request)
        except OSError as error:
            raise AgentError(f"the agent cannot be asked: {error!r}") from None

    def next_answer(self, timeout: float) -> Answer:
        """Return the next answer of the agent, or of the worker that has the other end.

        Raises:
            AgentError: The answer is a refusal or cannot be read, the connection has ended, or no
                answer arrives for ``timeout`` seconds.
        """
        self._socket.settimeout(timeout)
        try:
            answer = _ANSWER_DECODER.decode(receive(self._socket))
        except (OSError, EOFError) as error:
            raise AgentError(f"the agent does not answer: {error!r}") from None
        except msgspec.MsgspecError as error:
            raise AgentError(f"the agent's answer cannot be read: {error}") from None
        if isinstance(answer, Refused):
            raise AgentError(f"the agent refuses: {answer.reason}")
        return answer

    def next_news(self) -> Verified | None:
        """Wait until the agent has verified a step of the job that was registered on this
        connection, and return the result. Return None if the connection has ended, or if the
        message cannot be read.
        """
        self._socket.settimeout(None)
        try:
            return _VERIFICATION_DECODER.decode(receive(self._socket))
        except (OSError, EOFError, AgentError, msgspec.MsgspecError):
            return None

    def receive_stop(self) -> Stopped:
        """Wait until the agent, which was asked to stop, has ended. Return its last message, or an
        empty `Stopped` if the agent was killed or has another version.
        """
        self._socket.settimeout(None)
        with suppress(OSError, EOFError, AgentError, msgspec.MsgspecError):
            return _STOP_DECODER.decode(receive(self._socket))
        return Stopped()

    def has_ended(self, seconds: float) -> bool:
        """Return True if the other end closes the connection within ``seconds``. Data that arrives
        meanwhile is dropped.
        """
        deadline, poll = time.monotonic() + seconds, select.poll()
        poll.register(self._socket, select.POLLIN)
        with suppress(OSError):
            while poll.poll(1e3 * max(0.0, deadline - time.monotonic())):  # In milliseconds
                if not self._socket.recv(1 << 16):
                    return True
            return False
        return True

    def end_requests(self) -> None:
        """Close this side of the connection for sending, so that the other end sees that no request
        follows. Answers can still be received.
        """
        with suppress(OSError):
            self._socket.shutdown(socket.SHUT_WR)

    def interrupt(self) -> None:
        """Shut the connection down, so that a ``next_news`` that waits in another thread
        returns.
        """
        with suppress(OSError):
            self._socket.shutdown(socket.SHUT_RDWR)

    def close(self) -> None:
        self._socket.close()


def connect(folder: AgentFolder) -> Connection | None:
    """Return a connection to the agent in the folder ``folder``, or None if no agent listens there.

    Raises:
        AgentError: The socket belongs to another user or another program, or cannot be used.
    """
    connection = socket.socket(socket.AF_UNIX, socket.SOCK_STREAM)
    connection.settimeout(_ANSWER_SECONDS)
    try:
        connection.connect(folder.socket)
        return Connection(connection)
    except (FileNotFoundError, ConnectionRefusedError, ConnectionResetError, EOFError):
        connection.close()  # No agent listens, or the agent is just ending
        return None
    except OSError as error:
        connection.close()
        raise AgentError(
            f"the agent's socket {folder.socket} cannot be used: {error.strerror or error}"
        ) from None
    except BaseException:
        connection.close()
        raise


def reach(folder: AgentFolder) -> Connection:
    """Return a connection to an agent of this version. An agent is started if there is none.

    An agent of an older version is asked to end, and is replaced. An agent of a newer version is
    not replaced, because two versions on one node would then replace each other again and again.

    Raises:
        AgentError: No agent could be started, the socket cannot be used, an agent of a newer
            version runs, or no agent of this version answers within 20 seconds.
    """
    deadline = time.monotonic() + _START_SECONDS
    while True:
        connection = connect(folder)
        if connection is None:
            start(folder, max(1.0, deadline - time.monotonic()))
        elif connection.welcome.version == VERSION:
            return connection
        elif is_newer(connection.welcome.version, VERSION):
            connection.close()
            raise _version_error(
                connection.welcome, "set CKPT_AGENT_FOLDER to a folder for this one"
            )
        else:
            with suppress(AgentError):  # The older agent may be ending already
                connection.ask(Stop(keep_memory=True))
            connection.close()
        if time.monotonic() > deadline:
            raise AgentError(
                f"no agent of version {VERSION} answers after {_START_SECONDS:.0f} s: its log is "
                f"{folder.log}"
            )
        time.sleep(_PAUSE_SECONDS if connection is not None else 0.0)


def reach_and_ask(request: Request, timeout: float = _ANSWER_SECONDS) -> tuple[Connection, Answer]:
    """Return a connection to the agent of this user, and its answer to ``request``. An agent is
    started if there is none.

    Raises:
        AgentError: No agent could be started, an agent of a newer version runs, or the agent
            refuses the request or does not answer within ``timeout`` seconds.
    """
    connection = reach(AgentFolder.of_this_user())
    try:
        return connection, connection.ask(request, timeout)
    except BaseException:
        connection.close()
        raise


def start(folder: AgentFolder, timeout: float) -> None:
    """Start an agent, and return once this agent or another one listens.

    The agent runs in a process session of its own, and inherits no open file except its log.

    Args:
        folder: The folder of the agent.
        timeout: How many seconds the start may take.

    Raises:
        AgentError: The agent could not be started.
    """
    try:
        log = folder.open_log()
    except OSError as error:
        raise AgentError(
            f"the agent's log {folder.log} cannot be opened ({error.strerror}): remove it, or set "
            "CKPT_AGENT_FOLDER to another folder"
        ) from None
    try:
        result = subprocess.run(
            [sys.executable, "-P", "-m", "ckpt.agent", "start"],
            stdin=subprocess.DEVNULL,
            stdout=log,
            stderr=log,
            cwd="/",
            env=process_environment(folder),
            start_new_session=True,
            timeout=timeout,
            check=False,
        )
    except (OSError, subprocess.SubprocessError) as error:
        raise AgentError(f"the agent could not be started: {error}") from None
    finally:
        os.close(log)
    if result.returncode:
        raise AgentError(
            f"the agent could not be started (exit code {result.returncode}): its log is "
            f"{folder.log}"
        )


def process_environment(folder: AgentFolder) -> dict[str, str]:
    """Return the environment variables for an agent or a worker.

    They are the variables that the clients of object stores need, the variable with the agent's
    folder, and a ``PYTHONPATH`` with which Python finds the running copy of ckpt.
    """
    variables = environment_for_agent()
    paths = [os.path.abspath(path) for path in variables.get("PYTHONPATH", "").split(":") if path]
    if not _PACKAGE_PARENT.endswith(("site-packages", "dist-packages")):
        paths.append(_PACKAGE_PARENT)
    return {**variables, "PYTHONPATH": ":".join(paths), AGENT_FOLDER_VARIABLE: folder.path}


def status(folder: AgentFolder) -> AgentStatus | None:
    """Return the status of the agent in ``folder``, or None if no agent runs.

    Raises:
        AgentError: The agent has another version, or does not answer.
    """
    connection = connect(folder)
    if connection is None:
        return None
    with closing(connection):
        if connection.welcome.version != VERSION:
            raise _version_error(connection.welcome, "ckpt agent stop ends it")
        answer = connection.ask(AskStatus())
    if not isinstance(answer, AgentStatus):
        raise AgentError("the agent has answered something else")
    return answer


def known_jobs() -> tuple[JobStatus, ...]:
    """Return the jobs that the agent of this user knows. The tuple is empty if no agent of this
    version answers.
    """
    if not os.path.isdir(agent_folder()):
        return ()
    try:
        agent_status = status(AgentFolder.of_this_user())
    except AgentError:
        return ()
    return agent_status.jobs if agent_status is not None else ()


def _version_error(agent: Welcome, way_out: str) -> AgentError:
    return AgentError(
        f"the agent (process {agent.pid}) has version {agent.version}, and this is {VERSION}: "
        f"{way_out}"
    )
