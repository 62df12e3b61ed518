"""The socket of the agent, and the processes that are connected to it."""

from __future__ import annotations

import logging
import os
import selectors
import socket
from collections.abc import Callable, Iterator
from contextlib import suppress
from dataclasses import dataclass, field
from functools import partial
from typing import Final

import msgspec

from ckpt.agent.folder import AgentFolder, Lock, check_peer, identity
from ckpt.agent.messages import VERSION, Answer, Request, Welcome, encode, frames
from ckpt.errors import AgentError

_log = logging.getLogger("ckpt")
_REQUEST_DECODER: Final = msgspec.msgpack.Decoder(Request)
_READ_BYTES: Final = 1 << 16
_MOST_PENDING_CONNECTIONS: Final = 256
_SEND_SECONDS: Final = 1.0
"""How long a caller may take to receive an answer."""


@dataclass(slots=True, eq=False)
class Caller:
    """A process that is connected to the agent.

    Attributes:
        attempt: The attempt of the job that the process has registered on this connection; empty if
            it has registered none.
        buffer: The bytes that were received and are not decoded yet.
    """

    connection: socket.socket
    pid: int
    attempt: str = ""
    buffer: bytearray = field(default_factory=bytearray)


class Callers:
    """Accepts callers at the socket of the agent, and passes their requests on.

    The lock ``listen.lock`` belongs to the agent that has the socket.

    ``_listener`` is None if this agent does not listen. ``_socket_identity`` tells whether the file
    at the path of the socket is still the agent's own. If no descriptor is free, ``_pause`` stops
    accepting until ``accept_again``.

    Args:
        folder: The folder of the agent, in which the socket is.
        selector: The selector of the agent's loop. Its loop calls the data of each ready key.
        answer: Called with each request and its caller. It returns the answer, or None if the
            connection was passed on to a process that answers instead.

    Thread safety: one thread.
    """

    def __init__(
        self,
        folder: AgentFolder,
        selector: selectors.BaseSelector,
        answer: Callable[[Request, Caller], Answer | None],
    ) -> None:
        self._folder, self._selector, self._answer = folder, selector, answer
        self._lock = Lock(folder, "listen")
        self._listener: socket.socket | None = None
        self._socket_identity = (0, 0)  # As ``identity`` returns it for no file
        self._lacks_descriptors = False  # Whether the log says so already
        self._callers: list[Caller] = []

    def __iter__(self) -> Iterator[Caller]:
        return iter(list(self._callers))

    @property
    def is_listening(self) -> bool:
        """Whether this agent has the socket."""
        return self._listener is not None

    @property
    def has_lost_socket(self) -> bool:
        """Whether the file of the socket was removed or replaced while this agent listens."""
        return self.is_listening and identity(self._folder.socket) != self._socket_identity

    @property
    def is_lock_in_place(self) -> bool:
        """Whether the file of ``listen.lock`` is the one that this agent has locked."""
        return self._lock.is_in_place()

    def listen(self) -> bool:
        """Open the socket, and return True. Return False if another agent has it."""
        if not self._lock.take():
            return False
        self.bind()
        return True

    def bind(self) -> None:
        """Make the socket, in place of an old one, and accept callers there. Raises ``OSError`` if
        that fails.
        """
        with suppress(FileNotFoundError):
            os.unlink(self._folder.socket)
        listener = socket.socket(socket.AF_UNIX, socket.SOCK_STREAM | socket.SOCK_NONBLOCK)
        old_umask = os.umask(0o177)
        try:
            listener.bind(self._folder.socket)
        except OSError:
            listener.close()
            raise
        finally:
            os.umask(old_umask)
        if self._listener is not None:
            self._pause(self._listener)
            self._listener.close()
        self._listener, self._socket_identity = listener, identity(self._folder.socket)
        listener.listen(_MOST_PENDING_CONNECTIONS)
        self.accept_again()

    def accept_again(self) -> None:
        """Accept callers from now on, also if that was paused because no descriptor was free."""
        if self._listener is not None and self._listener not in self._selector.get_map():
            self._selector.register(self._listener, selectors.EVENT_READ, self._accept)

    def _pause(self, listener: socket.socket) -> None:
        with suppress(KeyError):  # The agent had no free descriptor, and accepts no caller already
            self._selector.unregister(listener)

    def _accept(self) -> None:
        """Accept a caller, and tell it the version of this agent."""
        assert self._listener is not None
        try:
            connection, _ = self._listener.accept()
        except (BlockingIOError, ConnectionError):  # The caller has closed the connection again
            return
        except OSError as error:  # This process has no free descriptor
            self._pause(self._listener)
            if not self._lacks_descriptors:
                self._lacks_descriptors = True
                _log.warning("ckpt: the agent can hear no more callers for now: %s", error)
            return
        self._lacks_descriptors = False
        try:
            pid = check_peer(connection, "a caller of the agent")
            connection.settimeout(_SEND_SECONDS)
            connection.sendall(encode(Welcome(VERSION, os.getpid())))
        except (OSError, AgentError) as error:
            _log.warning("ckpt: %s", error)
            connection.close()
            return
        caller = Caller(connection, pid)
        self._callers.append(caller)
        self._selector.register(
            connection, selectors.EVENT_READ, partial(self._read_requests, caller)
        )

    def _read_requests(self, caller: Caller) -> None:
        """Answer the requests that have arrived from a caller. At the end of its connection, or if
        a request cannot be read, close the connection.
        """
        try:
            caller.buffer += (data := caller.connection.recv(_READ_BYTES))
            for frame in frames(caller.buffer):
                if (answer := self._answer(_REQUEST_DECODER.decode(frame), caller)) is None:
                    return  # Another process has the connection now
                caller.connection.sendall(encode(answer))
        except (OSError, AgentError, msgspec.MsgspecError) as error:
            _log.warning("ckpt: a connection to the agent is closed: %s", error)
            data = b""
        if not data:  # The caller has ended, or the connection was of no use any more
            self.disconnect(caller)

    def disconnect(self, caller: Caller) -> None:
        """Close the connection of ``caller``."""
        self._callers.remove(caller)
        self._selector.unregister(caller.connection)
        caller.connection.close()

    def stop_listening(self) -> None:
        """Close the socket, so that another agent can listen. Connections stay open."""
        if self._listener is not None:
            self._pause(self._listener)
            if identity(self._folder.socket) == self._socket_identity:
                os.unlink(self._folder.socket)
            self._listener.close()
            self._listener = None
            self._lock.close()
