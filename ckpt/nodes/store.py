"""The files of other nodes' local tiers, as this node reads them."""

from __future__ import annotations

import logging
import socket
import ssl
import time
from collections import deque
from collections.abc import Callable, Iterator, Sequence
from contextlib import suppress
from typing import Final, NoReturn

from ckpt.errors import ObjectNotFound, StorageError, TransientStorageError
from ckpt.model.keys import MANIFEST
from ckpt.nodes.wire import (
    ANSWER,
    ANSWER_SECONDS,
    CONNECT_SECONDS,
    MAGIC,
    NOT_THERE,
    OK,
    REQUEST,
    Peer,
)
from ckpt.storage.api import Buffer, Capabilities, ObjectInfo, StorageBackend, Upload
from ckpt.tls import Encryption, reason_of

_LOOK_SECONDS: Final = 1.0
"""How often a node that waits for bytes looks whether it still wants them."""
_LEAST_BYTES_PER_SECOND: Final = 256 << 10
"""The lowest rate at which an answer may arrive."""

_log = logging.getLogger("ckpt")


class NodeStore:
    """One tier as the other nodes have it, to be read only.

    Several threads may use it at the same time.

    A node that does not answer is asked once more, and then not again: its files are not there. So
    is one whose answer as a whole takes too long, however regularly its bytes arrive.

    Args:
        encryption: Encrypts the connections; None: they are not encrypted.
        is_over: Whether no files are wanted any more. Requests that are under way end, too.
    """

    def __init__(
        self,
        tier: int,
        url: str,
        peers: Sequence[Peer],
        encryption: Encryption | None = None,
        is_over: Callable[[], bool] = lambda: False,
    ) -> None:
        self._tier, self._peers, self._encryption = tier, peers, encryption
        self._is_over = is_over
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
        raise ObjectNotFound(key, f"{_name(peer)} does not answer")

    def _warn(self, peer: Peer, error: OSError) -> None:
        node, why = _name(peer), reason_of(error)
        # Copies are tried for each step, and the reason stays until someone corrects the files.
        if self._encryption is None or self._encryption.is_new(node, why):
            _log.warning("ckpt: %s does not give its files: %s", node, why)

    def _request(self, peer: Peer, key: str, offset: int, out: memoryview) -> int:
        name = key.encode()
        request = REQUEST.pack(
            MAGIC, bytes.fromhex(peer.token), self._tier, offset, len(out), len(name)
        )
        head = memoryview(bytearray(ANSWER.size))
        deadline = time.monotonic() + ANSWER_SECONDS + len(out) / _LEAST_BYTES_PER_SECOND
        with self._connect(peer) as connection:
            with suppress(ConnectionError, ssl.SSLEOFError):  # What was received has the reason
                connection.sendall(request + name)
            connection.settimeout(_LOOK_SECONDS)
            self._fill(connection, head, deadline)
            magic, outcome, size = ANSWER.unpack(head)
            if magic != MAGIC:
                raise ConnectionError("the process that answers is not of this job")
            if self._encryption is not None:
                self._encryption.connected(_name(peer))
            if outcome == NOT_THERE:
                raise ObjectNotFound(key)
            if outcome != OK:
                raise TransientStorageError(key, f"{_name(peer)} cannot read it")
            if out and offset + len(out) > size:
                raise StorageError(key, f"has {size} bytes, {offset + len(out)} were wanted")
            self._fill(connection, out, deadline)
            return int(size)

    def _fill(self, connection: socket.socket, out: memoryview, deadline: float) -> None:
        """Receive bytes until ``deadline``, which is that of the whole answer."""
        silent_until = time.monotonic() + ANSWER_SECONDS
        while out:
            if self._is_over():
                raise StorageError(self.url, "its files are not wanted any more")
            if time.monotonic() > min(deadline, silent_until):
                raise TimeoutError("its answer takes too long")
            with suppress(TimeoutError):
                got = connection.recv_into(out)
                if not got:
                    raise ConnectionError("the connection ended too soon")
                out, silent_until = out[got:], time.monotonic() + ANSWER_SECONDS

    def _connect(self, peer: Peer) -> socket.socket:
        known = self._reached.get(peer.rank)
        failure: OSError = ConnectionError("it has given no address")
        for address in (known,) if known else peer.addresses:
            try:
                connection = socket.create_connection((address, peer.port), CONNECT_SECONDS)
            except OSError as error:
                failure = error
            else:
                self._reached[peer.rank] = address
                if self._encryption is not None:
                    connection = self._encryption.connect(connection)
                connection.settimeout(ANSWER_SECONDS)
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


def _name(peer: Peer) -> str:
    return f"the node of rank {peer.rank}"
