"""What nodes give each other over TLS, and what they refuse."""

from __future__ import annotations

import datetime as dt
import logging
import secrets
import socket
import ssl
import struct
import threading
import time
from collections.abc import Iterator
from contextlib import suppress
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any

import msgspec
import pytest

import ckpt.nodes.server
import ckpt.tls
from ckpt.config import Tls
from ckpt.errors import ObjectNotFound
from ckpt.model.keys import StepRef
from ckpt.nodes.peer_store import NodeStore
from ckpt.nodes.server import NodeServer
from ckpt.nodes.wire import ANSWER, MAGIC, REQUEST, Peer, StepFiles
from ckpt.storage.api import StorageBackend
from ckpt.storage.registry import open_backend
from ckpt.tls import Encryption
from tests.kit.certificates import Authority
from tests.kit.waiting import until

REF = StepRef(5, "abcxyz")
NAME = "rank-00002.safetensors"
KEY = REF.key(NAME)
PATTERN = b"the weights of the model that nobody else may see"
DATA = PATTERN * 60_000


@dataclass
class Job:
    """A store with one file, and the certificates of its job."""

    folder: Path
    backend: StorageBackend
    authority: Authority

    def serve(self, encryption: Encryption | None) -> NodeServer:
        server = NodeServer({1: self.backend}, encryption=encryption)
        server.allow(REF)
        return server


@dataclass
class Node:
    job: Job
    server: NodeServer

    def store(self, encryption: Encryption | None, port: int | None = None) -> NodeStore:
        """Return the node as another one sees it."""
        steps = {REF.folder: StepFiles(True, {NAME: len(DATA)})}
        peer = Peer(
            2,
            ("127.0.0.1",),
            self.server.port if port is None else port,
            self.server.token.hex(),
            {1: steps},
        )
        return NodeStore(1, "tier", [peer], encryption)

    def request(self, offset: int = 0, length: int = 4, key: str = KEY) -> bytes:
        name = key.encode()
        head = REQUEST.pack(MAGIC, self.server.token, 1, offset, length, len(name))
        return head + name

    def connect(self) -> socket.socket:
        connection = socket.create_connection(("127.0.0.1", self.server.port), 10)
        connection.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
        return connection


@pytest.fixture
def job(tmp_path: Path) -> Iterator[Job]:
    backend = open_backend(str(tmp_path / "tier"))
    backend.put(KEY, [DATA])
    yield Job(tmp_path, backend, Authority(tmp_path))
    backend.close()


@pytest.fixture
def node(job: Job) -> Iterator[Node]:
    """Yield a node that encrypts."""
    server = job.serve(Encryption(job.authority.issue("server")))
    yield Node(job, server)
    server.close()


@pytest.fixture
def here(job: Job) -> Encryption:
    """Return what another node encrypts with."""
    return Encryption(job.authority.issue("client"))


def unchecked(tls: Tls) -> Encryption:
    """Return what a node has that has skipped the check of its own files once."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(ckpt.tls._Contexts, "check", lambda *_: None)
        return Encryption(tls)


def read(store: NodeStore, offset: int = 0, nbytes: int = len(DATA)) -> bytes:
    out = bytearray(nbytes)
    store.read_into(KEY, offset, memoryview(out))
    return bytes(out)


def warnings(caplog: pytest.LogCaptureFixture) -> list[str]:
    return [each.getMessage() for each in caplog.records if each.levelno >= logging.WARNING]


def ends(connection: socket.socket) -> bool:
    """Return whether the other end closes the connection."""
    connection.settimeout(10)
    with suppress(ConnectionError):
        while connection.recv(1 << 16):
            pass
    return True


class Proxy:
    """A proxy between two nodes that records all bytes. ``cut`` ends it after that many
    answered.
    """

    def __init__(self, port: int, *, cut: int | None = None) -> None:
        self._port, self._cut = port, cut
        self.seen = bytearray()
        self._listening = socket.create_server(("127.0.0.1", 0))
        self._sockets = [self._listening]
        self.port: int = self._listening.getsockname()[1]
        self._threads = [threading.Thread(target=self._accept)]
        self._threads[0].start()

    def _accept(self) -> None:
        with suppress(OSError):
            while True:
                here = self._listening.accept()[0]
                there = socket.create_connection(("127.0.0.1", self._port))
                self._sockets += here, there
                for each in ((here, there, None), (there, here, self._cut)):
                    self._threads.append(threading.Thread(target=self._pass_on, args=each))
                    self._threads[-1].start()

    def _pass_on(self, source: socket.socket, target: socket.socket, cut: int | None) -> None:
        with suppress(OSError):
            while piece := source.recv(1 << 16):
                self.seen += piece
                if cut is not None:
                    piece, cut = piece[:cut], cut - len(piece)
                target.sendall(piece)
                if cut is not None and cut <= 0:
                    break
        for each in (source, target):
            with suppress(OSError):
                each.shutdown(socket.SHUT_RDWR)

    def close(self) -> None:
        for each in self._sockets:
            with suppress(OSError):
                each.shutdown(socket.SHUT_RDWR)
        for thread in self._threads:
            thread.join()
        for each in self._sockets:
            each.close()


@pytest.mark.parametrize("is_encrypted", [True, False])
def test_the_wire_shows_no_token_no_key_and_no_data(job: Job, *, is_encrypted: bool) -> None:
    """The test shows all of them without TLS, which proves that the recording works."""
    files = [job.authority.issue(name) if is_encrypted else None for name in ("server", "client")]
    there, here = map(ckpt.tls.encryption_of, files)
    node = Node(job, job.serve(there))
    proxy = Proxy(node.server.port)
    try:
        assert read(node.store(here, proxy.port)) == DATA
    finally:
        node.server.close()
        proxy.close()
    assert len(proxy.seen) > len(DATA)
    for secret in (node.server.token, KEY.encode(), PATTERN, PATTERN[7:20], MAGIC):
        assert (secret in proxy.seen) != is_encrypted


@pytest.mark.parametrize("cut", [10, 1000, 3000, 200_000, len(DATA)])
def test_a_connection_that_is_cut_is_an_error(node: Node, here: Encryption, cut: int) -> None:
    proxy = Proxy(node.server.port, cut=cut)
    try:
        with pytest.raises(ObjectNotFound):
            read(node.store(here, proxy.port))
    finally:
        proxy.close()


# -- certificates that are refused -----------------------------------------------------------------


def refused(
    node: Node, other: Encryption, caplog: pytest.LogCaptureFixture
) -> tuple[str, list[str]]:
    """Return the only warning of the node that asks, and those of the node that is asked."""
    for _ in range(2):  # as for two steps, each of which is tried twice
        with pytest.raises(ObjectNotFound):
            read(node.store(other))
    assert node.server.served_bytes == 0

    def heard() -> list[str]:
        return [text for text in warnings(caplog) if "a connection from 127.0.0.1" in text]

    assert until(heard)
    (asking,) = [text for text in warnings(caplog) if "rank 2 does not give its files" in text]
    return asking, heard()


def test_a_node_of_another_authority_gives_and_gets_nothing(
    node: Node, caplog: pytest.LogCaptureFixture
) -> None:
    other = Encryption(Authority(node.job.folder, "other").issue("node"))
    asking, asked = refused(node, other, caplog)
    assert "its certificate is refused: " in asking
    assert asked == [
        "ckpt: a connection from 127.0.0.1 was refused: it refuses the connection: unknown ca"
    ]


@pytest.mark.parametrize("wrong", ["other authority", "expired"])
def test_a_wrong_certificate_of_the_node_that_asks_is_named_on_both_nodes(
    node: Node, caplog: pytest.LogCaptureFixture, wrong: str
) -> None:
    issuer = node.job.authority
    if wrong != "expired":
        issuer = Authority(node.job.folder, "other")
    files = issuer.issue("node", days=-1 if wrong == "expired" else 1)
    tls = Tls(files.certificate, files.key, node.job.authority.path)
    asking, asked = refused(node, unchecked(tls), caplog)
    why = "certificate has expired" if wrong == "expired" else "unable to get local issuer"
    assert len(asked) == 1
    assert f"its certificate is refused: {why}" in asked[0]
    alert = "certificate expired" if wrong == "expired" else "unknown ca"
    assert f"it refuses the connection: {alert}" in asking


def test_a_node_whose_certificate_has_expired_is_not_read_from(
    job: Job, here: Encryption, caplog: pytest.LogCaptureFixture
) -> None:
    node = Node(job, job.serve(unchecked(job.authority.issue("server", days=-1))))
    try:
        asking, asked = refused(node, here, caplog)
    finally:
        node.server.close()
    assert "its certificate is refused: certificate has expired" in asking
    assert asked == [
        "ckpt: a connection from 127.0.0.1 was refused: it refuses the connection: "
        "certificate expired"
    ]


def foreign(node: Node, **settings: Any) -> ssl.SSLContext:
    context = ssl.SSLContext(ssl.PROTOCOL_TLS_CLIENT)
    context.check_hostname = False
    context.load_verify_locations(node.job.authority.path)
    for name, value in settings.items():
        setattr(context, name, value)
    return context


def test_a_caller_without_a_certificate_gets_nothing(
    node: Node, caplog: pytest.LogCaptureFixture
) -> None:
    with foreign(node).wrap_socket(node.connect()) as connection:
        with suppress(ConnectionError, ssl.SSLEOFError):
            connection.sendall(node.request())
        with pytest.raises(ssl.SSLError, match="certificate required"):
            connection.recv(1)
    assert until(lambda: "did not return a certificate" in caplog.text)
    assert node.server.served_bytes == 0


def test_an_earlier_version_of_tls_is_refused(node: Node) -> None:
    context = foreign(node, maximum_version=ssl.TLSVersion.TLSv1_2)
    with pytest.raises(ssl.SSLError, match="protocol version"):
        context.wrap_socket(node.connect())


def test_a_server_that_offers_an_earlier_version_is_refused(job: Job, here: Encryption) -> None:
    context = ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER)
    files = job.authority.issue("server")
    context.load_cert_chain(files.certificate, files.key)
    context.maximum_version = ssl.TLSVersion.TLSv1_2

    def answer(listening: socket.socket) -> None:
        with suppress(OSError), listening.accept()[0] as connection:
            context.wrap_socket(connection, server_side=True)

    with socket.create_server(("127.0.0.1", 0)) as listening:
        thread = threading.Thread(target=answer, args=[listening])
        thread.start()
        with pytest.raises(ConnectionError, match="protocol version"):
            here.connect(socket.create_connection(listening.getsockname(), 10))
        thread.join()


def test_the_token_is_asked_for_all_the_same(node: Node, here: Encryption) -> None:
    wrong = node.request().replace(node.server.token, secrets.token_bytes(32))
    for sent, answered in ((wrong, False), (node.request(), True)):
        with here.connect(node.connect()) as connection:
            connection.sendall(sent)
            assert bool(connection.recv(1)) == answered


# -- TLS on one side only --------------------------------------------------------------------------


@pytest.mark.parametrize(
    "sent", [b"GET / HTTP/1.1\r\n\r\n", MAGIC + bytes(60), b"\x16\x03\x01\0\4junk"]
)
def test_a_caller_without_tls_is_closed_at_once(
    node: Node, caplog: pytest.LogCaptureFixture, monkeypatch: pytest.MonkeyPatch, sent: bytes
) -> None:
    monkeypatch.setattr(ckpt.nodes.server, "_REQUEST_SECONDS", 600.0)
    with node.connect() as connection:
        connection.sendall(sent)
        assert ends(connection)
    assert until(lambda: len(warnings(caplog)) == 1)
    assert "a connection from 127.0.0.1 was refused: " in caplog.text


def test_a_node_without_tls_gets_nothing_from_one_with_it(
    node: Node, caplog: pytest.LogCaptureFixture
) -> None:
    with pytest.raises(ObjectNotFound, match=r"does not answer|no node that answers"):
        read(node.store(None))
    assert until(lambda: "was refused: it does not use TLS" in caplog.text)


def test_a_node_with_tls_gets_nothing_from_one_without_it(
    job: Job, here: Encryption, caplog: pytest.LogCaptureFixture
) -> None:
    node = Node(job, job.serve(None))
    try:
        with pytest.raises(ObjectNotFound):
            read(node.store(here))
    finally:
        node.server.close()
    assert [text.partition(": ")[2] for text in warnings(caplog)] == [
        "the node of rank 2 does not give its files: it has ended the handshake: does it use TLS, "
        "too?"
    ]


# -- slow handshakes -------------------------------------------------------------------------------


class ByHand:
    """A client that sends the bytes of TLS as the test says."""

    def __init__(self, node: Node, encryption: Encryption) -> None:
        self.connection = node.connect()
        self._in, self._out = ssl.MemoryBIO(), ssl.MemoryBIO()
        context = encryption._contexts.client
        self.tls = context.wrap_bio(self._in, self._out)
        with suppress(ssl.SSLWantReadError):
            self.tls.do_handshake()

    def written(self) -> bytes:
        """Return what TLS has to send."""
        return self._out.read()

    def shake(self) -> None:
        """Receive until the handshake is done on this side."""
        while True:
            with suppress(ssl.SSLWantReadError):
                self.tls.do_handshake()
                return
            self._in.write(self.connection.recv(1 << 16))

    def answer(self) -> bytes:
        """Return all that the server sends."""
        got = bytearray()
        while True:
            try:
                piece = self.tls.read(1 << 16)
            except ssl.SSLWantReadError:
                received = self.connection.recv(1 << 16)
                if not received:
                    return bytes(got)
                self._in.write(received)
            else:
                got += piece


@pytest.mark.parametrize("at_once", [True, False])
def test_a_request_counts_however_it_is_cut_on_the_wire(
    node: Node, here: Encryption, monkeypatch: pytest.MonkeyPatch, *, at_once: bool
) -> None:
    """The end of the handshake and the request may come in one packet, so that the server decrypts
    bytes that its selector does not see. They may also come in many packets.
    """
    monkeypatch.setattr(ckpt.nodes.server, "_REQUEST_SECONDS", 600.0)
    client = ByHand(node, here)
    with client.connection as connection:

        def send(data: bytes) -> None:
            for piece in [data] if at_once else [bytes([byte]) for byte in data]:
                connection.sendall(piece)

        send(client.written())
        client.shake()
        client.tls.write(node.request(7, 50_000))
        send(client.written())
        answer = client.answer()
    assert answer[ANSWER.size :] == DATA[7 : 7 + 50_000]


def test_a_request_in_many_records_counts(node: Node, here: Encryption) -> None:
    client = ByHand(node, here)
    with client.connection as connection:
        connection.sendall(client.written())
        client.shake()
        for byte in node.request(7, 9):
            client.tls.write(bytes([byte]))
        connection.sendall(client.written())
        assert client.answer()[ANSWER.size :] == DATA[7:16]


@pytest.mark.parametrize("part", ["nothing", "half a hello", "no certificate yet"])
def test_slow_handshakes_take_no_place_from_a_request(
    node: Node, here: Encryption, monkeypatch: pytest.MonkeyPatch, part: str
) -> None:
    monkeypatch.setattr(ckpt.nodes.server, "_REQUEST_SECONDS", 600.0)
    slow: list[ByHand] = []
    for _ in range(400):
        slow.append(ByHand(node, here))
        hello = slow[-1].written()
        if part != "nothing":
            slow[-1].connection.sendall(hello[: 40 if part == "half a hello" else None])
    for offset in range(20):
        assert read(node.store(here), offset, 5) == DATA[offset : offset + 5]
    assert len(node.server._callers) <= ckpt.nodes.server._MAX_CALLERS_PER_ADDRESS
    assert ends(slow[0].connection)
    for each in slow:
        each.connection.close()


def test_a_handshake_has_the_time_of_a_request(
    node: Node, here: Encryption, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(ckpt.nodes.server, "_REQUEST_SECONDS", 0.5)
    slow = [ByHand(node, here) for _ in range(3)]
    slow[1].connection.sendall(slow[1].written()[:40])
    slow[2].connection.sendall(slow[2].written())
    for each in slow:
        assert ends(each.connection)
        each.connection.close()
    assert not node.server._callers


def test_callers_that_send_anything_leave_the_server_as_it_was(
    node: Node, here: Encryption
) -> None:
    for length in range(200):
        with node.connect() as connection, suppress(OSError):
            if length % 2:  # it is reset, perhaps before the server has accepted it
                reset = struct.pack("ii", 1, 0)
                connection.setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, reset)
            connection.sendall(secrets.token_bytes(length))
    client = ByHand(node, here)
    with client.connection as connection, suppress(OSError):
        connection.sendall(client.written() + secrets.token_bytes(500))
        assert ends(connection)
    assert read(node.store(here), 3, 5) == DATA[3:8]


# -- the end ---------------------------------------------------------------------------------------


def test_handshakes_under_way_do_not_hold_up_the_end(node: Node, here: Encryption) -> None:
    slow = [ByHand(node, here) for _ in range(12)]
    for each in slow[4:]:
        each.connection.sendall(each.written()[: 40 if each in slow[8:] else None])
    assert until(lambda: len(node.server._callers) == len(slow))
    began = time.monotonic()
    node.server.close()
    assert time.monotonic() - began < 5
    for each in slow:
        assert ends(each.connection)
        each.connection.close()
    assert not [thread.name for thread in threading.enumerate() if "serve" in thread.name]


def test_the_end_in_the_middle_of_an_answer_sends_nothing_in_the_clear(
    node: Node, here: Encryption, monkeypatch: pytest.MonkeyPatch
) -> None:
    """``SSLSocket.shutdown`` makes it a plain socket, while a thread may be sending through it."""
    ended: list[object] = []
    shutdown = ssl.SSLSocket.shutdown

    def noted(self: ssl.SSLSocket, how: int) -> None:
        ended.append(self)
        shutdown(self, how)

    monkeypatch.setattr(ssl.SSLSocket, "shutdown", noted)
    long, count = REF.key("rank-00003.safetensors"), 20  # More than the buffers of a socket hold
    node.job.backend.put(long, [DATA] * count)
    client = ByHand(node, here)
    with client.connection as connection:
        connection.sendall(client.written())
        client.shake()
        client.tls.write(node.request(0, count * len(DATA), long))
        connection.sendall(client.written())
        seen = connection.recv(10)
        assert node.server._open_connections
        node.server.close()
        with suppress(ConnectionError):
            while piece := connection.recv(1 << 20):
                seen += piece
    assert ended == []
    assert PATTERN not in seen


# -- files that are renewed ------------------------------------------------------------------------


def test_renewed_files_are_used_by_a_server_that_runs(
    job: Job, caplog: pytest.LogCaptureFixture
) -> None:
    """Certificates live for days, and jobs for weeks."""
    earlier = unchecked(job.authority.issue("node", days=-1))
    node = Node(job, job.serve(earlier))
    try:
        with pytest.raises(ObjectNotFound):
            read(node.store(Encryption(job.authority.issue("client"))))
        # this happens while they are being renewed
        Path(job.authority.issue("node").key).write_bytes(b"")
        with pytest.raises(ObjectNotFound):
            read(node.store(earlier))
        assert "the files of tls have changed and are not used: " in caplog.text
        job.authority.issue("node")
        assert read(node.store(earlier)) == DATA
    finally:
        node.server.close()


def test_files_that_do_not_fit_yet_are_tried_again(
    job: Job, caplog: pytest.LogCaptureFixture
) -> None:
    """The clock of the authority is ahead, or another command gives the job the right to read."""
    caplog.set_level(logging.INFO)
    encryption = Encryption(job.authority.issue("node"))
    node = Node(job, job.serve(encryption))
    try:
        job.authority.issue("node", begins_in=dt.timedelta(seconds=5))

        def are_used() -> bool:
            assert read(node.store(encryption), 0, 5) == DATA[:5]
            return "the files of tls have changed and were read again" in caplog.text

        assert not are_used()
        assert until(are_used)
    finally:
        node.server.close()
    (warning,) = warnings(caplog)
    assert "are not used: " in warning
    assert "certificate is not yet valid" in warning


def test_what_strangers_cause_does_not_fill_the_log(here: Encryption) -> None:
    """The log has room for what this node finds out itself."""
    notes = [here.is_new("10.0.0.9", f"reason {number}", limit=64) for number in range(100)]
    here.note_connection("10.0.0.9")
    notes += [here.is_new("10.0.0.9", f"reason {number}", limit=64) for number in range(100)]
    notes += [here.is_new(f"10.0.0.{number}", "reason", limit=64) for number in range(100)]
    assert notes.count(True) == 64
    assert not here._logged_reasons  # Nothing is remembered of a peer that causes no line
    assert here.is_new("the node of rank 2", "expired")
    assert not here.is_new("the node of rank 2", "expired")


def test_a_certificate_that_expires_again_is_logged_again(
    job: Job, caplog: pytest.LogCaptureFixture
) -> None:
    """It was renewed once, and the job has run on."""
    node = Node(job, job.serve(Encryption(job.authority.issue("server"))))
    other = unchecked(job.authority.issue("client", days=-1))

    def both_sides_have_logged(times: int) -> bool:
        sides = ("rank 2 does not give its files", "connection from 127.0.0.1 was refused")
        return [caplog.text.count(side) for side in sides] == [times, times]

    try:
        for times in (1, 2):
            for _ in range(2):
                with pytest.raises(ObjectNotFound):
                    read(node.store(other))
            assert until(partial(both_sides_have_logged, times))
            job.authority.issue("client")
            assert read(node.store(other)) == DATA
            with pytest.MonkeyPatch.context() as patch:
                patch.setattr(ckpt.tls._Contexts, "check", lambda *_: None)
                job.authority.issue("client", days=-1)
                other._current()
    finally:
        node.server.close()


def test_a_peer_is_not_known_by_its_address(node: Node, here: Encryption) -> None:
    """The certificates of the tests are for 192.0.2.1."""
    peer = msgspec.structs.replace(
        node.store(here)._peers[0], addresses=("127.0.0.2.invalid", "127.0.0.1")
    )
    assert read(NodeStore(1, "tier", [peer], here), 0, 5) == DATA[:5]
