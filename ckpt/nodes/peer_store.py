"""Stores through which this node reads the files on other nodes' local tiers.

A ``Peer`` is a node, with the addresses and the token of its server, and with its steps.
"""

from __future__ import annotations

import copy
import logging
import socket
import ssl
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import suppress
from typing import Final, NoReturn, Self, TypeVar

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
"""While a node waits for bytes of another node, it checks at this interval if it still needs them.
"""
_LEAST_BYTES_PER_SECOND: Final = 256 << 10
"""The lowest rate at which an answer may arrive."""

_log = logging.getLogger("ckpt")

T = TypeVar("T")


class _CutShort(ConnectionError):
    """The connection has ended in the middle of the bytes of an object."""


class NodeStore:
    """A store that reads the files of one local tier from other nodes. It cannot write.

    Several nodes may have the same object. If the first of them does not give the object, for any
    reason, the next one is asked. A store does not notice that the bytes of an object are damaged,
    so a reader that finds damage asks the store of the next copy (see ``copies``).

    If a node does not answer, or if its whole answer takes too long, the request is sent once more.
    If that fails too, the store sends no more requests to the silent node, and the files of the
    silent node count as missing. If the second answer begins but ends too soon, only this file
    counts as missing, since perhaps the node cannot read it.

    A node is named by its lowest rank. ``_silent_ranks`` are the nodes that get no more requests,
    and ``_logged_failures`` says what was already logged about each node.

    Args:
        tier: The index of the tier.
        url: The URL of the tier.
        peers: The other nodes, with the steps and files that each has announced.
        encryption: Encrypts the connections. If it is None, they are not encrypted.
        is_over: Returns True if no files are needed any more. Requests under way then fail.

    Attributes:
        first_copy: The number of the copy that is asked for first, counted from 0.

    Thread safety: any thread may use it.
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
        # The stores that ``copies`` returns share these three objects.
        self._silent_ranks: set[int] = set()
        self._addresses: dict[int, str] = {}
        self._logged_failures: set[tuple[int, str]] = set()
        self.first_copy = 0

    def copies(self, number: int) -> list[Self]:
        """Return ``number`` stores, one for each copy that a file may have. The first of them is
        this store. The stores need not be closed.

        Count the nodes that have an object from 0. Store N asks node N first, and then the other
        nodes. An object that N nodes or fewer have does not exist in store N.
        """
        stores = [copy.copy(self) for _ in range(1, number)]
        for index, store in enumerate(stores, 1):
            store.first_copy = index
        return [self, *stores]

    def folders(self, prefix: str) -> Iterator[str]:
        """Return the folders of the steps that the nodes have announced if ``prefix`` is empty.
        Otherwise return none, since the folder of a step contains no folders.
        """
        return iter(
            {name for peer in self._peers for name in peer.tiers.get(self._tier, {})}
            if not prefix
            else ()
        )

    def list(self, prefix: str) -> Iterator[ObjectInfo]:
        """Yield the data files that the nodes have announced and whose keys begin with ``prefix``.

        A file that several nodes have is yielded once for each of them. Manifests and fragments are
        left out.
        """
        for peer in self._peers:
            for folder, step in peer.tiers.get(self._tier, {}).items():
                for name, size in step.files.items():
                    if (key := f"{folder}/{name}").startswith(prefix):
                        yield ObjectInfo(key=key, size=size)

    def head(self, key: str) -> ObjectInfo:
        folder, _, name = key.partition("/")

        def size_on(peer: Peer) -> int:
            size = peer.tiers[self._tier][folder].files.get(name)
            return self._ask(peer, key, 0, memoryview(b"")) if size is None else size

        return ObjectInfo(key=key, size=self._first_answer(key, size_on))

    def read_into(self, key: str, offset: int, out: memoryview) -> None:
        self._first_answer(key, lambda peer: self._ask(peer, key, offset, out.cast("B")))

    def put(self, key: str, parts: Sequence[Buffer], *, if_absent: bool = False) -> ObjectInfo:  # noqa: ARG002
        self._refuse_write(key)

    def upload(self, key: str, size: int) -> Upload:  # noqa: ARG002
        self._refuse_write(key)

    def delete(self, key: str) -> None:
        self._refuse_write(key)

    def close(self) -> None:
        """Do nothing, since the store keeps no connection open."""

    def _refuse_write(self, key: str) -> NoReturn:
        raise StorageError(key, "other nodes' tiers are only read")

    def _first_answer(self, key: str, work: Callable[[Peer], int]) -> int:
        """Call ``work`` with the nodes that have the object ``key``, one after the other, until a
        call succeeds. Return its result.

        Raises:
            StorageError: ``work`` has failed for each node. If it has raised a
                ``TransientStorageError`` for one of them, it is this error, since another try may
                succeed. It is an ``ObjectNotFound`` only if no node that answers has the object.
        """
        failures: dict[int, StorageError] = {}
        for peer in self._holders(key):
            try:
                answer = work(peer)
            except ObjectNotFound:
                continue
            except StorageError as error:
                if self._is_over():
                    raise
                failures[peer.rank] = error
            else:
                self._log_failures(key, failures)
                return answer
        raise min(
            failures.values(),
            key=lambda error: not isinstance(error, TransientStorageError),
            default=ObjectNotFound(key, "no node that answers has it"),
        )

    def _holders(self, key: str) -> Sequence[Peer]:
        """Return the nodes that have announced the object ``key`` and still answer, in the order in
        which they are asked. Fragments are not announced: a node with a rank's data file has its
        fragment, too.
        """
        folder, _, name = key.partition("/")
        stem = name.partition(".")[0]
        holders: list[Peer] = []
        for peer in self._peers:
            step = peer.tiers.get(self._tier, {}).get(folder)
            if step is not None and (
                step.has_manifest
                if name == MANIFEST
                else any(file.partition(".")[0] == stem for file in step.files)
            ):
                holders.append(peer)
        if self.first_copy >= len(holders):
            return []
        rotation = holders[self.first_copy :] + holders[: self.first_copy]
        return [peer for peer in rotation if peer.rank not in self._silent_ranks]

    def _ask(self, peer: Peer, key: str, offset: int, out: memoryview) -> int:
        """Fill ``out`` from an object of another node, and return the size of the object.

        Raises:
            ObjectNotFound: The node does not have the object, or does not answer.
            StorageError: The node cannot read the object.
        """
        for is_repeat in (False, True):
            try:
                return self._request(peer, key, offset, out)
            except OSError as error:
                if not is_repeat:
                    continue
                # An answer that was cut concerns this file, and any other failure the whole node.
                if not isinstance(error, _CutShort):
                    self._silent_ranks.add(peer.rank)
                elif (peer.rank, key) in self._logged_failures:
                    continue  # The log has this failure already
                self._logged_failures.add((peer.rank, key))
                self._warn(peer, error)
        raise ObjectNotFound(key, f"{_node_name(peer.rank)} does not answer")

    def _log_failures(self, key: str, failures: Mapping[int, StorageError]) -> None:
        """Log once for each rank in ``failures`` that its node does not give an object which
        another node has given.
        """
        for rank, error in failures.items():
            if (rank, key) not in self._logged_failures:
                self._logged_failures.add((rank, key))
                _log.warning(
                    "ckpt: %s does not give a file that another node has: %s",
                    _node_name(rank),
                    error,
                )

    def _warn(self, peer: Peer, error: OSError) -> None:
        node, reason = _node_name(peer.rank), reason_of(error)
        # With a wrong certificate, the copies of every step fail. The reason is logged only once.
        if self._encryption is None or self._encryption.is_new(node, reason):
            _log.warning("ckpt: %s does not give its files: %s", node, reason)

    def _request(self, peer: Peer, key: str, offset: int, out: memoryview) -> int:
        """Send one request. Return and raise as ``_ask`` does, and raise ``OSError`` if the node
        does not answer.
        """
        encoded_key = key.encode()
        request = REQUEST.pack(
            MAGIC, bytes.fromhex(peer.token), self._tier, offset, len(out), len(encoded_key)
        )
        answer_head = memoryview(bytearray(ANSWER.size))
        deadline = time.monotonic() + ANSWER_SECONDS + len(out) / _LEAST_BYTES_PER_SECOND
        with self._connect(peer) as connection:
            # If the node has refused the connection, receiving below raises the reason.
            with suppress(ConnectionError, ssl.SSLEOFError):
                connection.sendall(request + encoded_key)
            connection.settimeout(_LOOK_SECONDS)
            self._fill(connection, answer_head, deadline)
            magic, outcome, size = ANSWER.unpack(answer_head)
            if magic != MAGIC:
                raise ConnectionError("the process that answers is not of this job")
            if self._encryption is not None:  # The next failure is logged again
                self._encryption.note_connection(_node_name(peer.rank))
            if outcome == NOT_THERE:
                raise ObjectNotFound(key)
            if outcome != OK:
                raise TransientStorageError(key, f"{_node_name(peer.rank)} cannot read it")
            if out and offset + len(out) > size:
                raise StorageError(key, f"has {size} bytes, {offset + len(out)} were wanted")
            try:
                self._fill(connection, out, deadline)
            except ConnectionError as error:
                raise _CutShort(str(error)) from error
            return int(size)

    def _fill(self, connection: socket.socket, out: memoryview, deadline: float) -> None:
        """Receive bytes until ``out`` is full.

        Args:
            deadline: When the whole answer must have arrived, by the monotonic clock.

        Raises:
            StorageError: The bytes are not needed any more.
            OSError: The answer takes too long, or the connection has ended.
        """
        silence_deadline = time.monotonic() + ANSWER_SECONDS
        while out:
            if self._is_over():
                raise StorageError(self.url, "its files are not wanted any more")
            if time.monotonic() > min(deadline, silence_deadline):
                raise TimeoutError("its answer takes too long")
            with suppress(TimeoutError):
                received_bytes = connection.recv_into(out)
                if not received_bytes:
                    raise ConnectionError("the connection ended too soon")
                out, silence_deadline = out[received_bytes:], time.monotonic() + ANSWER_SECONDS

    def _connect(self, peer: Peer) -> socket.socket:
        """Return a new connection to the server of a node. Use the address that was reached before,
        or else the first address that can be reached. Raises ``OSError`` if no address can be
        reached.
        """
        address_before = self._addresses.get(peer.rank)
        failure: OSError = ConnectionError("it has given no address")
        for address in (address_before,) if address_before else peer.addresses:
            try:
                connection = socket.create_connection((address, peer.port), CONNECT_SECONDS)
            except OSError as error:
                failure = error
            else:
                self._addresses[peer.rank] = address
                if self._encryption is not None:
                    connection = self._encryption.connect(connection)
                connection.settimeout(ANSWER_SECONDS)
                return connection
        raise failure


class AllNodesStore:
    """A store for a local tier with the files of all nodes, for listings of steps. It cannot write.

    If a call fails for this node's part of the tier, the other nodes' parts give the result. The
    error is raised only if the other nodes do not have the object either.

    Args:
        own: The store of this node's part of the tier.
        other_nodes: The store of the other nodes' parts.

    Thread safety:
        Any thread may use it.
    """

    def __init__(self, own: StorageBackend, other_nodes: NodeStore) -> None:
        self._own, self._other_nodes = own, other_nodes
        self.url, self.capabilities = own.url, other_nodes.capabilities
        self.put, self.upload, self.delete = other_nodes.put, other_nodes.upload, other_nodes.delete

    def folders(self, prefix: str) -> Iterator[str]:
        folders = set(self._other_nodes.folders(prefix))
        try:
            folders.update(self._own.folders(prefix))
        except StorageError:
            if not folders:
                raise
        return iter(folders)

    def list(self, prefix: str) -> Iterator[ObjectInfo]:
        infos = {info.key: info for info in self._other_nodes.list(prefix)}
        try:
            infos.update((info.key, info) for info in self._own.list(prefix))
        except StorageError:
            if not infos:
                raise
        return iter(infos.values())

    def head(self, key: str) -> ObjectInfo:
        return self._nearest(lambda store: store.head(key))

    def read_into(self, key: str, offset: int, out: memoryview) -> None:
        self._nearest(lambda store: store.read_into(key, offset, out))

    def _nearest(self, work: Callable[[StorageBackend], T]) -> T:
        """Return the result of ``work(own)``, or of ``work(other_nodes)`` if the first call
        fails.
        """
        try:
            return work(self._own)
        except StorageError as error:
            try:
                return work(self._other_nodes)
            except ObjectNotFound:
                raise error from None

    def close(self) -> None:
        """Do nothing, since ``own`` and ``other_nodes`` are not closed here."""


def _node_name(rank: int) -> str:
    return f"the node of rank {rank}"
