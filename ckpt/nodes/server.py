"""Files of a few steps from the local tiers of other nodes, over TCP, while a restore lasts or
buddies copy them.

The lowest rank of each node serves. A request has one fixed form: a token that only the job's ranks
know, the tier, a key, an offset and a length. Each connection carries one request. Other nodes can
read manifests, and the files of the steps that are being restored or copied. They can write
nothing. What arrives is checked chunk by chunk, as from any store. With ``encryption`` each
connection is TLS, and both ends show a certificate before the request.
"""

from __future__ import annotations

import hmac
import logging
import secrets
import selectors
import socket
import ssl
import struct
import threading
import time
from collections import deque
from collections.abc import Iterator, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass, field
from typing import Final, NoReturn

import msgspec

from ckpt.config import job_address
from ckpt.errors import CkptError, ObjectNotFound, StorageError, TransientStorageError
from ckpt.model.keys import MANIFEST, StepRef, is_file_name, parse_folder
from ckpt.pipeline.workers import Workers
from ckpt.storage.api import (
    Buffer,
    Capabilities,
    ObjectInfo,
    OpensFiles,
    StorageBackend,
    Upload,
    aligned_memory,
    check_key,
)
from ckpt.tls import Encryption, reason_of

_MAGIC: Final = b"ckp1"
_TOKEN_BYTES: Final = 32
# Magic, token, tier, offset, length, bytes of the key.
_REQUEST: Final = struct.Struct(f">4s{_TOKEN_BYTES}sHQQH")
_ANSWER: Final = struct.Struct(">4sBQ")  # Magic, outcome, size of the object
_OK, _NOT_THERE, _FAILED = 0, 1, 2
_PIECE_BYTES: Final = 8 << 20
_SERVING: Final = 8
"""Requests that are answered at once; each takes a buffer of 8 MiB at most."""
_WAITING: Final = 1024
"""Connections that have not shown the token yet."""
_WAITING_PER_ADDRESS: Final = 128
"""The most of them from one address, for all of its ranks and their threads."""
_KEY_BYTES: Final = 1024
_ALLOWED: Final = 256
"""Steps of a tier that may be read at once. A restore reads one. Buddies copy the last ones, and a
slow one may be many steps behind.
"""
_NOTES: Final = 64  # Any process that reaches the port can cause one
_PAUSE_SECONDS: Final = 0.1
_CONNECT_SECONDS: Final = 5.0
_REQUEST_SECONDS: Final = 5.0
"""How long a caller may take for the handshake and a request, which fits into one packet."""
_ANSWER_SECONDS: Final = 60.0
"""How long either side waits for the other's next bytes."""

_log = logging.getLogger("ckpt")


class Step(msgspec.Struct, frozen=True):
    """The contents of one step's folder on one node: whether it has the manifest, and each file's
    size.
    """

    listed: bool
    files: dict[str, int]


class Peer(msgspec.Struct, frozen=True):
    """What one node offers: its addresses, and its steps by tier and folder.

    A node without addresses does not serve.
    """

    rank: int
    addresses: tuple[str, ...]
    port: int
    token: str
    tiers: dict[int, dict[str, Step]]


@dataclass(slots=True)
class _Caller:
    """A connection that has not shown the token yet, and what it has sent so far."""

    connection: socket.socket
    host: str
    deadline: float
    sent: bytearray = field(default_factory=bytearray)

    def missing(self) -> int:
        """Return how many bytes of the request are still missing."""
        if len(self.sent) < _REQUEST.size:
            return _REQUEST.size - len(self.sent)
        return _REQUEST.size + int(_REQUEST.unpack_from(self.sent)[-1]) - len(self.sent)


class NodeServer:
    """Serves this node's local tiers, by their index, at ``addresses`` and ``port``.

    One thread listens and reads requests, without waiting for any single connection. Only a
    connection that has shown the token takes one of the threads that read files and answer.

    Args:
        encryption: Encrypts all connections; None: none is encrypted.

    Thread safety: the owner calls ``allow`` and ``close``.
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
        self._allowed = {tier: deque[str](maxlen=_ALLOWED) for tier in stores}
        self.token = secrets.token_bytes(_TOKEN_BYTES)
        self.served_bytes = 0
        self._changed = threading.Condition()
        self._open: set[socket.socket] = set()
        # Only the listening thread uses these. The oldest come first.
        self._waiting: dict[socket.socket, _Caller] = {}
        self._closing = False
        self._listening = _listen(interfaces())
        self.addresses = tuple(str(each.getsockname()[0]) for each in self._listening)
        self.port: int = self._listening[0].getsockname()[1]
        self._wake, self._woken = socket.socketpair()
        self._workers = Workers("serve", _SERVING + 1, nice=nice, cpus=cpus)
        self._workers.submit(self._listen)

    def allow(self, ref: StepRef, tier: int | None = None) -> None:
        """Let the files of ``ref`` be read from now on, from ``tier`` or from all tiers.

        So may those of the last steps that were allowed before, and no others.
        """
        with self._changed:
            for folders in self._allowed.values() if tier is None else [self._allowed[tier]]:
                if ref.folder not in folders:
                    folders.append(ref.folder)
            self._changed.notify_all()

    def close(self) -> None:
        """Stop serving, even in the middle of an answer."""
        with self._changed:
            self._closing = True
            self._changed.notify_all()
            for connection in self._open:
                with suppress(OSError):
                    # The same method of SSLSocket would end the encryption first, and a thread that
                    # answers could then send plain bytes.
                    socket.socket.shutdown(connection, socket.SHUT_RDWR)
        with suppress(OSError):  # It may be closed already
            self._wake.send(b"x")
        self._workers.close()
        for each in (*self._listening, self._wake, self._woken):
            each.close()

    # -- the listening thread ----------------------------------------------------------------------

    def _listen(self) -> None:
        with selectors.DefaultSelector() as selector:
            for each in (*self._listening, self._woken):
                each.setblocking(False)
                selector.register(each, selectors.EVENT_READ)
            try:
                while not self._closing:
                    first = next(iter(self._waiting.values()), None)
                    left = None if first is None else max(0.0, first.deadline - time.monotonic())
                    for key, _ in selector.select(left):
                        self._ready(selector, key.fileobj)
                    self._drop_late(selector)
            finally:
                for caller in list(self._waiting.values()):
                    self._drop(selector, caller)

    def _ready(self, selector: selectors.BaseSelector, which: object) -> None:
        if not isinstance(which, socket.socket):
            return
        if which in self._listening:
            try:
                connection, place = self._accept(which)
            except OSError:
                # The connection has gone again, or too many files are open.
                with self._changed:
                    self._changed.wait_for(lambda: self._closing, _PAUSE_SECONDS)
                return
            self._admit(selector, connection, str(place[0]))
        elif (caller := self._waiting.get(which)) is not None:
            self._hear(selector, caller)

    def _accept(self, listening: socket.socket) -> tuple[socket.socket, tuple[object, ...]]:
        return listening.accept()

    def _admit(
        self, selector: selectors.BaseSelector, connection: socket.socket, host: str
    ) -> None:
        """Close the oldest connections that have not sent the token, first those from the same
        address, to make room.
        """
        connection.setblocking(False)
        from_there = [caller for caller in self._waiting.values() if caller.host == host]
        if len(from_there) >= _WAITING_PER_ADDRESS:
            self._drop(selector, from_there[0])
        elif len(self._waiting) >= _WAITING:
            self._drop(selector, next(iter(self._waiting.values())))
        try:
            if self._encryption is not None:
                connection = self._encryption.accept(connection)
        except OSError:  # The connection has gone again
            connection.close()
            return
        self._waiting[connection] = _Caller(connection, host, time.monotonic() + _REQUEST_SECONDS)
        selector.register(connection, selectors.EVENT_READ)

    def _hear(self, selector: selectors.BaseSelector, caller: _Caller) -> None:
        try:
            self._hear_all(caller)
        except (BlockingIOError, ssl.SSLWantReadError):
            selector.modify(caller.connection, selectors.EVENT_READ)
            return
        except ssl.SSLWantWriteError:
            selector.modify(caller.connection, selectors.EVENT_WRITE)
            return
        except OSError as error:
            self._note(caller, error)
            self._drop(selector, caller)
            return
        selector.unregister(caller.connection)
        del self._waiting[caller.connection]
        with self._changed:
            self._open.add(caller.connection)
        self._workers.submit(self._serve, caller)

    def _hear_all(self, caller: _Caller) -> None:
        """Receive the rest of the request.

        It reads until nothing is left, since no selector sees bytes that are decrypted already.

        Raises:
            BlockingIOError, SSLWantReadError, SSLWantWriteError: Call it again when there is more.
            OSError: The caller has gone, or is none of the job's.
        """
        if isinstance(caller.connection, ssl.SSLSocket):
            caller.connection.do_handshake()  # Does nothing if it is done
        while missing := caller.missing():
            piece = caller.connection.recv(missing)
            caller.sent += piece
            head = bytes(caller.sent[: len(_MAGIC)])
            if not piece or not _MAGIC.startswith(head) or not self._knows_token(caller.sent):
                raise ConnectionAbortedError("it does not know the token")

    def _note(self, caller: _Caller, error: OSError) -> None:
        """Log once why a node cannot connect. Connections that only end are no news."""
        if not isinstance(error, ssl.SSLError) or isinstance(error, ssl.SSLEOFError):
            return
        text = f"a connection from {caller.host} was refused: {reason_of(error)}"
        if self._encryption is not None and self._encryption.is_new(text, most=_NOTES):
            _log.warning("ckpt: %s", text)

    def _knows_token(self, sent: bytearray) -> bool:
        """Return False once the token is certainly wrong.

        The token is compared as a whole, so a guess of its first bytes reveals nothing.
        """
        if len(sent) < _REQUEST.size:
            return True
        _, token, *_, key_bytes = _REQUEST.unpack_from(sent)
        return hmac.compare_digest(token, self.token) and key_bytes <= _KEY_BYTES

    def _drop(self, selector: selectors.BaseSelector, caller: _Caller) -> None:
        selector.unregister(caller.connection)
        del self._waiting[caller.connection]
        caller.connection.close()

    def _drop_late(self, selector: selectors.BaseSelector) -> None:
        now = time.monotonic()
        for caller in list(self._waiting.values()):
            if caller.deadline > now:
                return
            self._drop(selector, caller)

    # -- the threads that answer -------------------------------------------------------------------

    def _serve(self, caller: _Caller) -> None:
        try:
            with caller.connection as connection:
                if not self._closing:
                    connection.settimeout(_ANSWER_SECONDS)
                    self._answer(connection, caller.sent)
        except OSError as error:
            # The caller has gone or is too slow. It may ask again.
            _log.debug("ckpt: a request from another node was not answered: %s", error)
        finally:
            with self._changed:
                self._open.discard(caller.connection)

    def _answer(self, connection: socket.socket, request: bytearray) -> None:
        _, _, tier, offset, length, _ = _REQUEST.unpack_from(request)
        try:
            store, key = self._stores[tier], check_key(request[_REQUEST.size :].decode())
            self._check(tier, key)
            size = store.head(key).size
        except ObjectNotFound:
            connection.sendall(_ANSWER.pack(_MAGIC, _NOT_THERE, 0))
            return
        except (CkptError, KeyError, UnicodeError):
            connection.sendall(_ANSWER.pack(_MAGIC, _FAILED, 0))
            return
        connection.sendall(_ANSWER.pack(_MAGIC, _OK, size))
        is_plain = not isinstance(connection, ssl.SSLSocket)  # The kernel does not encrypt
        if length and offset < size and is_plain and isinstance(store, OpensFiles):
            with suppress(CkptError), store.open_file(key) as file:
                self.served_bytes += connection.sendfile(file, offset, min(length, size - offset))
            return  # The other side notices an answer that ends too soon
        memory = aligned_memory(min(length, _PIECE_BYTES)) if length else memoryview(b"")
        for at in range(offset, min(offset + length, size), _PIECE_BYTES):
            piece = memory[: min(_PIECE_BYTES, offset + length - at, size - at)]
            try:
                store.read_into(key, at, piece)
            except CkptError:
                return  # The other side notices that the answer ends too soon
            connection.sendall(piece)
            self.served_bytes += len(piece)

    def _check(self, tier: int, key: str) -> None:
        """Raise ``ObjectNotFound`` for a key that may not be read.

        A rank may learn of the step a moment before this one.
        """
        folder, _, name = key.partition("/")
        if parse_folder(folder) is None or not is_file_name(name):
            raise ObjectNotFound(key)
        if name == MANIFEST:
            return
        with self._changed:
            allowed = self._allowed[tier]
            self._changed.wait_for(lambda: self._closing or folder in allowed, _CONNECT_SECONDS)
            if folder not in allowed:
                raise ObjectNotFound(key)


class NodeStore:
    """One tier as the other nodes have it, to be read only.

    Several threads may use it at the same time.

    A node that does not answer is asked once more, and then not again: its files are not there.

    Args:
        encryption: Encrypts the connections; None: they are not encrypted.
    """

    def __init__(
        self, tier: int, url: str, peers: Sequence[Peer], encryption: Encryption | None = None
    ) -> None:
        self._tier, self._peers, self._encryption = tier, peers, encryption
        self.url = f"{url} of other nodes"
        self.capabilities = Capabilities(put_if_absent=False, shared=True)
        self._dead: set[int] = set()
        self._reached: dict[int, str] = {}

    def folders(self, prefix: str) -> Iterator[str]:
        """Return the steps that the nodes have announced."""
        return iter(
            {name for peer in self._peers for name in peer.tiers.get(self._tier, {})}
            if not prefix
            else ()
        )

    def list(self, prefix: str) -> Iterator[ObjectInfo]:
        """Return the data files that the nodes have announced."""
        for peer in self._peers:
            for folder, step in peer.tiers.get(self._tier, {}).items():
                for name, size in step.files.items():
                    if (key := f"{folder}/{name}").startswith(prefix):
                        yield ObjectInfo(key=key, size=size)

    def head(self, key: str) -> ObjectInfo:
        for peer in self._holders(key):
            folder, _, name = key.partition("/")
            if (size := peer.tiers[self._tier][folder].files.get(name)) is not None:
                return ObjectInfo(key=key, size=size)
            with suppress(ObjectNotFound):
                return ObjectInfo(key=key, size=self._ask(peer, key, 0, memoryview(b"")))
        raise ObjectNotFound(key)

    def read_into(self, key: str, offset: int, out: memoryview) -> None:
        for peer in self._holders(key):
            with suppress(ObjectNotFound):
                self._ask(peer, key, offset, out.cast("B"))
                return
        raise ObjectNotFound(key, "no node that answers has it")

    def put(self, key: str, parts: Sequence[Buffer], *, if_absent: bool = False) -> ObjectInfo:  # noqa: ARG002
        self._abort_all(key)

    def upload(self, key: str, size: int) -> Upload:  # noqa: ARG002
        self._abort_all(key)

    def delete(self, key: str) -> None:
        self._abort_all(key)

    def close(self) -> None:
        """Do nothing, since nothing is held."""

    def _abort_all(self, key: str) -> NoReturn:
        raise StorageError(key, "other nodes' tiers are only read")

    def _holders(self, key: str) -> Sequence[Peer]:
        """Return the nodes that have announced the file. A fragment is where its rank's file is."""
        folder, _, name = key.partition("/")
        stem = name.partition(".")[0]
        found = deque[Peer]()
        for peer in self._peers:
            step = peer.tiers.get(self._tier, {}).get(folder)
            if step is None or peer.rank in self._dead:
                continue
            if (
                step.listed
                if name == MANIFEST
                else any(file.partition(".")[0] == stem for file in step.files)
            ):
                found.append(peer)
        return found

    def _ask(self, peer: Peer, key: str, offset: int, out: memoryview) -> int:
        for again in (False, True):
            try:
                return self._request(peer, key, offset, out)
            except OSError as error:
                if again:
                    self._dead.add(peer.rank)
                    self._warn(peer, error)
        raise ObjectNotFound(key, f"the node of rank {peer.rank} does not answer")

    def _warn(self, peer: Peer, error: OSError) -> None:
        text = f"the node of rank {peer.rank} does not give its files: {reason_of(error)}"
        # Copies are tried for each step, and the reason stays until someone corrects the files.
        if self._encryption is None or self._encryption.is_new(text):
            _log.warning("ckpt: %s", text)

    def _request(self, peer: Peer, key: str, offset: int, out: memoryview) -> int:
        name = key.encode()
        request = _REQUEST.pack(
            _MAGIC, bytes.fromhex(peer.token), self._tier, offset, len(out), len(name)
        )
        head = memoryview(bytearray(_ANSWER.size))
        with self._connect(peer) as connection:
            with suppress(ConnectionError, ssl.SSLEOFError):  # What was received has the reason
                connection.sendall(request + name)
            _fill(connection, head)
            magic, outcome, size = _ANSWER.unpack(head)
            if magic != _MAGIC:
                raise ConnectionError("the process that answers is not of this job")
            if outcome == _NOT_THERE:
                raise ObjectNotFound(key)
            if outcome != _OK:
                raise TransientStorageError(key, f"the node of rank {peer.rank} cannot read it")
            if out and offset + len(out) > size:
                raise StorageError(key, f"has {size} bytes, {offset + len(out)} were wanted")
            _fill(connection, out)
            return int(size)

    def _connect(self, peer: Peer) -> socket.socket:
        known = self._reached.get(peer.rank)
        failure: OSError = ConnectionError("it has given no address")
        for address in (known,) if known else peer.addresses:
            try:
                connection = socket.create_connection((address, peer.port), _CONNECT_SECONDS)
            except OSError as error:
                failure = error
            else:
                self._reached[peer.rank] = address
                if self._encryption is not None:
                    connection = self._encryption.connect(connection)
                connection.settimeout(_ANSWER_SECONDS)
                return connection
        raise failure


class Union:
    """A local tier as all nodes hold it together, for listings of steps; this node's part comes
    first.

    Thread safety:
        Any thread may use it.
    """

    def __init__(self, own: StorageBackend, others: NodeStore) -> None:
        self._own, self._others = own, others
        self.url, self.capabilities = own.url, others.capabilities
        self.put, self.upload, self.delete = others.put, others.upload, others.delete

    def folders(self, prefix: str) -> Iterator[str]:
        return iter({*self._own.folders(prefix), *self._others.folders(prefix)})

    def list(self, prefix: str) -> Iterator[ObjectInfo]:
        found = {
            info.key: info for store in (self._others, self._own) for info in store.list(prefix)
        }
        return iter(found.values())

    def head(self, key: str) -> ObjectInfo:
        try:
            return self._own.head(key)
        except ObjectNotFound:
            return self._others.head(key)

    def read_into(self, key: str, offset: int, out: memoryview) -> None:
        try:
            self._own.read_into(key, offset, out)
        except ObjectNotFound:
            self._others.read_into(key, offset, out)

    def close(self) -> None:
        """Do nothing, since other code closes the parts."""


def interfaces() -> tuple[str, ...]:
    """Return the addresses to listen at.

    It is the address of the interface that leads to the launcher's rank 0, if that is on another
    machine or other machines know this one by that address. Otherwise it is the addresses that the
    host's name stands for, and this machine's own.
    """
    with suppress(OSError):
        if (leader := job_address()) is not None:
            kind, _, _, _, place = socket.getaddrinfo(*leader, type=socket.SOCK_DGRAM)[0]
            with socket.socket(kind, socket.SOCK_DGRAM) as probe:
                probe.connect(place)  # A UDP connect sends nothing
                found = str(probe.getsockname()[0])
            if not _is_near(found):
                return (found,)
    named: list[str] = []
    with suppress(OSError):
        addresses = socket.getaddrinfo(socket.gethostname(), None, type=socket.SOCK_STREAM)
        named = [str(info[4][0]) for info in addresses]
    return tuple(dict.fromkeys([*sorted(named, key=_is_near), "127.0.0.1"]))


def _is_near(address: str) -> bool:
    return address == "::1" or address.startswith("127.")


def _listen(hosts: Sequence[str]) -> tuple[socket.socket, ...]:
    """Return sockets at one port of each of ``hosts`` that has it.

    If none of them can be bound, listen at this machine's own address.
    """
    found: list[socket.socket] = []
    for host in hosts:
        with suppress(OSError):
            port = found[0].getsockname()[1] if found else 0
            family = socket.AF_INET6 if ":" in host else socket.AF_INET
            found.append(socket.create_server((host, port), family=family, backlog=1024))
    return tuple(found) or (socket.create_server(("127.0.0.1", 0), backlog=1024),)


def _fill(connection: socket.socket, out: memoryview) -> None:
    """Receive bytes. Each part may take as long as the connection's time limit."""
    while out:
        got = connection.recv_into(out)
        if not got:
            raise ConnectionError("the connection ended too soon")
        out = out[got:]
