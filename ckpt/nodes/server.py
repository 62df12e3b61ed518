"""The server that gives other nodes files of a few steps from this node's local tiers, over TCP.

The server runs on the lowest rank of each node, during a restore, and during a whole job whose
tiers have replicas. A request has one fixed form: a token that only the job's ranks know, the tier,
a key, an offset and a length. Each connection carries one request. Other nodes can read manifests,
and the files of the steps that are being restored or copied. They cannot write. The reader checks
each chunk, as it does with any store. With ``encryption``, each connection uses TLS, and both ends
present a certificate before the request.
"""

from __future__ import annotations

import hmac
import logging
import secrets
import selectors
import socket
import ssl
import threading
import time
from collections import deque
from collections.abc import Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass, field
from typing import Final

from ckpt.config import job_address
from ckpt.errors import CkptError, ObjectNotFound
from ckpt.model.keys import MANIFEST, StepRef, is_file_name, parse_folder
from ckpt.nodes.wire import (
    ANSWER,
    ANSWER_SECONDS,
    CONNECT_SECONDS,
    FAILURE,
    MAGIC,
    NOT_THERE,
    OK,
    REQUEST,
    TOKEN_BYTES,
)
from ckpt.pipeline.workers import Workers
from ckpt.storage.api import OpensFiles, StorageBackend, aligned_memory, check_key
from ckpt.tls import Encryption, reason_of

_PIECE_BYTES: Final = 8 << 20
_ANSWER_THREADS: Final = 8
"""How many requests are answered at the same time. Each takes a buffer of at most 8 MiB."""
_MAX_CALLERS: Final = 1024
"""The most connections without a complete request that may be open at the same time."""
_MAX_CALLERS_PER_ADDRESS: Final = 128
"""The most connections without a complete request that may come from one address at the same time.
The threads of all ranks of a node connect from the same address.
"""
_MOST_KEY_BYTES: Final = 1024
_MAX_STEPS: Final = 256
"""How many steps of a tier other nodes may read. A restore reads one step. Buddies copy the newest
steps, and a slow buddy may still be copying a step when many later ones are committed.
"""
_MOST_LOGGED_REFUSALS: Final = 64
"""How many refused connections are logged. There is a limit because any process that reaches the
port can cause such log messages.
"""
_PAUSE_SECONDS: Final = 0.1
_REQUEST_SECONDS: Final = 5.0
"""How long a caller may take for the handshake and the request, which fits into one packet."""

_log = logging.getLogger("ckpt")


@dataclass(slots=True)
class _Caller:
    """A connection with an incomplete request.

    Attributes:
        host: The address of the caller.
        deadline: When the request must be complete, by the monotonic clock.
        request: The bytes of the request that have arrived.
    """

    connection: socket.socket
    host: str
    deadline: float
    request: bytearray = field(default_factory=bytearray)

    def missing(self) -> int:
        """Return how many bytes of the request are still missing."""
        if len(self.request) < REQUEST.size:
            return REQUEST.size - len(self.request)
        *_, key_bytes = REQUEST.unpack_from(self.request)
        return REQUEST.size + int(key_bytes) - len(self.request)


class NodeServer:
    """Serves files of this node's local tiers, from its construction until ``close``.

    One thread listens and reads requests, without waiting for any single connection. Other threads
    read files and answer. Only a connection that has sent the token gets one of these threads. A
    *caller* is the other end of a connection whose request is not complete yet.

    ``_callers`` has the callers by their sockets, and ``_open_connections`` are the connections
    that are being answered. ``_workers`` has all threads of the server. A byte at
    ``_wake_receiver`` ends the wait of the listening thread. ``_allowed_folders`` are the steps
    that may be read. ``_condition`` guards the fields that several threads use, and is notified
    when the server closes.

    Args:
        stores: The stores of the tiers, by the index of the tier.
        nice: The number that is added to the niceness of the threads.
        cpus: The cores that the threads may use; None for all.
        encryption: Encrypts all connections. If it is None, no connection is encrypted.

    Attributes:
        addresses: The addresses at which the server listens.
        port: Its port at each of these addresses.
        token: The token that requests must contain.
        served_bytes: How many bytes of files were sent.

    Thread safety: any thread may call ``allow``. The owner calls ``close``, once.
    """

    def __init__(
        self,
        stores: Mapping[int, StorageBackend],
        *,
        nice: int = 0,
        cpus: frozenset[int] | None = None,
        encryption: Encryption | None = None,
    ) -> None:
        self._stores, self._encryption = stores, encryption
        self._allowed_folders = {tier: deque[str](maxlen=_MAX_STEPS) for tier in stores}
        self.token = secrets.token_bytes(TOKEN_BYTES)
        self.served_bytes = 0
        # Guards the fields that several threads use, and tells that a step is allowed or the server
        # closes.
        self._condition = threading.Condition()
        self._open_connections: set[socket.socket] = set()
        # The connections without a complete request, oldest first. Only the listening thread uses
        # them.
        self._callers: dict[socket.socket, _Caller] = {}
        self._is_closed = False
        self._listeners = _listening_sockets(interfaces())
        self.addresses = tuple(str(listener.getsockname()[0]) for listener in self._listeners)
        self.port: int = self._listeners[0].getsockname()[1]
        self._wake_sender, self._wake_receiver = socket.socketpair()
        self._workers = Workers("serve", _ANSWER_THREADS + 1, nice=nice, cpus=cpus)
        self._workers.submit(self._listen)

    def allow(self, ref: StepRef, tier: int | None = None) -> None:
        """Allow other nodes to read the files of ``ref`` from now on.

        At most 256 steps are allowed for each tier. If there are more, the step that was allowed
        first is not readable any more.

        Args:
            ref: The step.
            tier: The index of the tier; None for all tiers.
        """
        with self._condition:
            for folders in (
                self._allowed_folders.values() if tier is None else [self._allowed_folders[tier]]
            ):
                if ref.folder not in folders:
                    folders.append(ref.folder)
            self._condition.notify_all()

    def close(self) -> None:
        """Stop serving, even in the middle of an answer."""
        with self._condition:
            self._is_closed = True
            self._condition.notify_all()
            for connection in self._open_connections:
                with suppress(OSError):
                    # SSLSocket.shutdown would end the encryption first, and a thread that is
                    # answering could then send plain bytes. So the method of socket is called.
                    socket.socket.shutdown(connection, socket.SHUT_RDWR)
        with suppress(OSError):  # The socket may be closed already
            self._wake_sender.send(b"x")
        self._workers.close()
        for sock in (*self._listeners, self._wake_sender, self._wake_receiver):
            sock.close()

    # -- the listening thread ----------------------------------------------------------------------

    def _listen(self) -> None:
        """Accept connections and read their requests, until ``close`` is called."""
        with selectors.DefaultSelector() as selector:
            for sock in (*self._listeners, self._wake_receiver):
                sock.setblocking(False)
                selector.register(sock, selectors.EVENT_READ)
            try:
                while not self._is_closed:
                    oldest = next(iter(self._callers.values()), None)
                    timeout = (
                        None if oldest is None else max(0.0, oldest.deadline - time.monotonic())
                    )
                    for key, _ in selector.select(timeout):
                        self._handle_ready(selector, key.fileobj)
                    self._drop_overdue(selector)
            finally:
                for caller in list(self._callers.values()):
                    self._drop(selector, caller)

    def _handle_ready(self, selector: selectors.BaseSelector, ready: object) -> None:
        """Handle the readiness of a socket: accept a connection, or read from one."""
        if not isinstance(ready, socket.socket):
            return
        if ready in self._listeners:
            try:
                connection, peer_address = self._accept(ready)
            except OSError:
                # The caller has closed the connection again, or too many files are open. The pause
                # keeps the loop from spinning in the second case.
                with self._condition:
                    self._condition.wait_for(lambda: self._is_closed, _PAUSE_SECONDS)
                return
            self._admit(selector, connection, str(peer_address[0]))
        elif (caller := self._callers.get(ready)) is not None:
            self._read_request(selector, caller)

    def _accept(self, listener: socket.socket) -> tuple[socket.socket, tuple[object, ...]]:
        return listener.accept()

    def _admit(
        self, selector: selectors.BaseSelector, connection: socket.socket, host: str
    ) -> None:
        """Add a new connection to those that wait for their requests. If too many from ``host``
        wait, close the oldest of these. If too many wait in all, close the oldest of all.
        """
        connection.setblocking(False)
        callers_of_host = [caller for caller in self._callers.values() if caller.host == host]
        if len(callers_of_host) >= _MAX_CALLERS_PER_ADDRESS:
            self._drop(selector, callers_of_host[0])
        elif len(self._callers) >= _MAX_CALLERS:
            self._drop(selector, next(iter(self._callers.values())))
        try:
            if self._encryption is not None:
                connection = self._encryption.accept(connection)
        except OSError:  # The caller has closed the connection again
            connection.close()
            return
        self._callers[connection] = _Caller(connection, host, time.monotonic() + _REQUEST_SECONDS)
        selector.register(connection, selectors.EVENT_READ)

    def _read_request(self, selector: selectors.BaseSelector, caller: _Caller) -> None:
        """Read from a connection. If the request is complete, let another thread answer it. If the
        connection has failed or has sent a wrong token, close the connection.
        """
        try:
            self._receive_request(caller)
        except (BlockingIOError, ssl.SSLWantReadError):
            selector.modify(caller.connection, selectors.EVENT_READ)
            return
        except ssl.SSLWantWriteError:
            selector.modify(caller.connection, selectors.EVENT_WRITE)
            return
        except OSError as error:
            self._log_refusal(caller, error)
            self._drop(selector, caller)
            return
        if self._encryption is not None:
            self._encryption.note_connection(caller.host)  # The next failure is logged again
        selector.unregister(caller.connection)
        del self._callers[caller.connection]
        with self._condition:
            self._open_connections.add(caller.connection)
        self._workers.submit(self._serve, caller)

    def _receive_request(self, caller: _Caller) -> None:
        """Receive the missing bytes of the request.

        All bytes that have arrived are read in one call, since a selector does not report bytes
        that TLS has decrypted already.

        Raises:
            BlockingIOError, SSLWantReadError, SSLWantWriteError: The request is not complete yet.
                Call this again when the socket is ready.
            OSError: The caller has closed the connection, or does not belong to the job.
        """
        if isinstance(caller.connection, ssl.SSLSocket):
            caller.connection.do_handshake()  # Has no effect after the end of the handshake
        while missing := caller.missing():
            piece = caller.connection.recv(missing)
            caller.request += piece
            prefix = bytes(caller.request[: len(MAGIC)])
            if not piece or not MAGIC.startswith(prefix) or not self._knows_token(caller.request):
                raise ConnectionAbortedError("it does not know the token")

    def _log_refusal(self, caller: _Caller, error: OSError) -> None:
        """Log why TLS has refused the connection of ``caller``, unless the same host was refused
        for the same reason since its last good connection, or ``_MOST_LOGGED_REFUSALS`` were
        logged. Log nothing if the caller has only closed the connection.
        """
        if not isinstance(error, ssl.SSLError) or isinstance(error, ssl.SSLEOFError):
            return
        host, reason = caller.host, reason_of(error)
        if self._encryption is not None and self._encryption.is_new(
            host, reason, limit=_MOST_LOGGED_REFUSALS
        ):
            _log.warning("ckpt: a connection from %s was refused: %s", host, reason)

    def _knows_token(self, request: bytearray) -> bool:
        """Return False if the token in ``request`` is wrong, or the key in the request is too long.

        The answer is True until the fixed part of the request has arrived. The token is then
        compared as a whole, so that its bytes cannot be guessed one after the other.
        """
        if len(request) < REQUEST.size:
            return True
        _, token, *_, key_bytes = REQUEST.unpack_from(request)
        return hmac.compare_digest(token, self.token) and key_bytes <= _MOST_KEY_BYTES

    def _drop(self, selector: selectors.BaseSelector, caller: _Caller) -> None:
        selector.unregister(caller.connection)
        del self._callers[caller.connection]
        caller.connection.close()

    def _drop_overdue(self, selector: selectors.BaseSelector) -> None:
        """Close the connections whose deadline has passed."""
        time_now = time.monotonic()
        for caller in list(self._callers.values()):
            if caller.deadline > time_now:
                return
            self._drop(selector, caller)

    # -- the threads that answer -------------------------------------------------------------------

    def _serve(self, caller: _Caller) -> None:
        """Answer a complete request, and close its connection."""
        try:
            with caller.connection as connection:
                if not self._is_closed:
                    connection.settimeout(ANSWER_SECONDS)
                    self._answer(connection, caller.request)
        except OSError as error:
            # The caller has closed the connection or is too slow. It may connect again.
            _log.debug("ckpt: a request from another node was not answered: %s", error)
        finally:
            with self._condition:
                self._open_connections.discard(caller.connection)

    def _answer(self, connection: socket.socket, request: bytearray) -> None:
        """Send the head of the answer, and then the requested bytes that the object has."""
        _, _, tier_index, offset, length, _ = REQUEST.unpack_from(request)
        try:
            store, key = self._stores[tier_index], check_key(request[REQUEST.size :].decode())
            self._check_allowed(tier_index, key)
            size = store.head(key).size
        except ObjectNotFound:
            connection.sendall(ANSWER.pack(MAGIC, NOT_THERE, 0))
            return
        except (CkptError, KeyError, UnicodeError):
            connection.sendall(ANSWER.pack(MAGIC, FAILURE, 0))
            return
        connection.sendall(ANSWER.pack(MAGIC, OK, size))
        is_plain = not isinstance(connection, ssl.SSLSocket)  # sendfile() cannot encrypt
        if length and offset < size and is_plain and isinstance(store, OpensFiles):
            with suppress(CkptError), store.open_file(key) as file:
                self._count_served(connection.sendfile(file, offset, min(length, size - offset)))
            return  # After an error, the answer is too short, which the caller notices
        memory = aligned_memory(min(length, _PIECE_BYTES)) if length else memoryview(b"")
        for position in range(offset, min(offset + length, size), _PIECE_BYTES):
            piece = memory[: min(_PIECE_BYTES, offset + length - position, size - position)]
            try:
                store.read_into(key, position, piece)
            except CkptError:
                return  # The answer is too short, which the caller notices
            connection.sendall(piece)
            self._count_served(len(piece))

    def _count_served(self, nbytes: int) -> None:
        with self._condition:
            self.served_bytes += nbytes

    def _check_allowed(self, tier: int, key: str) -> None:
        """Raise ``ObjectNotFound`` if other nodes may not read ``key``.

        If the step is not allowed yet, wait for at most ``CONNECT_SECONDS``. Other ranks may learn
        of a step a moment before this rank, and ask for its files.
        """
        folder, _, name = key.partition("/")
        if parse_folder(folder) is None or not is_file_name(name):
            raise ObjectNotFound(key)
        if name == MANIFEST:
            return
        with self._condition:
            folders = self._allowed_folders[tier]
            self._condition.wait_for(lambda: self._is_closed or folder in folders, CONNECT_SECONDS)
            if folder not in folders:
                raise ObjectNotFound(key)


def interfaces() -> tuple[str, ...]:
    """Return the addresses to listen at, so that other nodes of the job can connect.

    If this machine reaches the launcher's rank 0 from an address that is not a loopback address,
    only that address is returned. Otherwise the addresses of the host name are returned, and
    127.0.0.1.
    """
    with suppress(OSError):
        if (leader := job_address()) is not None:
            family, _, _, _, leader_address = socket.getaddrinfo(*leader, type=socket.SOCK_DGRAM)[0]
            with socket.socket(family, socket.SOCK_DGRAM) as probe:
                probe.connect(leader_address)  # A UDP connect sends nothing
                address = str(probe.getsockname()[0])
            if not _is_loopback(address):
                return (address,)
    own_addresses: list[str] = []
    with suppress(OSError):
        addresses = socket.getaddrinfo(socket.gethostname(), None, type=socket.SOCK_STREAM)
        own_addresses = [str(info[4][0]) for info in addresses]
    return tuple(dict.fromkeys([*sorted(own_addresses, key=_is_loopback), "127.0.0.1"]))


def _is_loopback(address: str) -> bool:
    """Return True for a loopback address."""
    return address == "::1" or address.startswith("127.")


def _listening_sockets(hosts: Sequence[str]) -> tuple[socket.socket, ...]:
    """Return listening sockets at the same port of each address in ``hosts``.

    An address that cannot be bound to that port is left out. If no address can be bound, the only
    socket listens at 127.0.0.1.
    """
    listeners: list[socket.socket] = []
    for host in hosts:
        with suppress(OSError):
            port = listeners[0].getsockname()[1] if listeners else 0
            family = socket.AF_INET6 if ":" in host else socket.AF_INET
            listeners.append(socket.create_server((host, port), family=family, backlog=1024))
    return tuple(listeners) or (socket.create_server(("127.0.0.1", 0), backlog=1024),)
