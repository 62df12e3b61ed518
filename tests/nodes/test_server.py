"""What a node gives to others, and what it does not give."""

from __future__ import annotations

import errno
import secrets
import socket
import ssl
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import msgspec
import pytest

import ckpt.nodes.peer_store
import ckpt.nodes.server
from ckpt.config import Tier
from ckpt.errors import CommitError, ObjectNotFound, StorageError
from ckpt.model.keys import StepRef
from ckpt.nodes.node_survey import NodeSurvey
from ckpt.nodes.peer_store import NodeStore
from ckpt.nodes.server import NodeServer
from ckpt.nodes.step_copies import peer_store
from ckpt.nodes.wire import ANSWER, ANSWER_SECONDS, MAGIC, OK, REQUEST, Peer, StepFiles
from ckpt.pipeline.rate_limit import Pace
from ckpt.pipeline.workers import Workers
from ckpt.storage.api import ObjectInfo
from ckpt.storage.registry import open_backend
from ckpt.storage.tiers import Nodes, OpenTier
from ckpt.tls import Encryption, encryption_of
from tests.coordination.world import World
from tests.kit.certificates import Authority
from tests.kit.waiting import until

REF, OTHER = StepRef(5, "abcxyz"), StepRef(6, "abcxyz")
DATA = secrets.token_bytes((9 << 20) + 5)
KEY = REF.key("rank-00002.safetensors")


@dataclass
class Node:
    server: NodeServer
    peer: Peer
    store: NodeStore
    encryption: Encryption | None


@pytest.fixture(params=["folder", "memory", "folder and TLS", "memory and TLS"])
def node(request: pytest.FixtureRequest, tmp_path: Path) -> Iterator[Node]:
    is_folder = request.param.startswith("folder")
    tls = Authority(tmp_path).issue("node") if "TLS" in request.param else None
    encryption = encryption_of(tls)
    root = str(tmp_path / "tier") if is_folder else f"shm://test-{secrets.token_hex(6)}"
    backend = open_backend(root)
    for ref in (REF, OTHER):
        backend.put(ref.key("rank-00002.safetensors"), [DATA])
        backend.put(ref.key("rank-00002.json"), [b"{}"])
        backend.put(ref.manifest, [b"truth"])
        backend.put(f"{ref.folder}/notes.txt", [b"secret"])
    backend.put("writer.json", [b"secret"])
    (tmp_path / "beside").write_text("secret")
    server = NodeServer({1: backend}, encryption=encryption)
    steps = {
        ref.folder: StepFiles(True, {"rank-00002.safetensors": len(DATA)}) for ref in (REF, OTHER)
    }
    peer = Peer(2, ("127.0.0.1",), server.port, server.token.hex(), {1: steps})
    server.allow(REF)
    yield Node(server, peer, NodeStore(1, root, [peer], encryption), encryption)
    server.close()
    for info in list(backend.list("")):
        backend.delete(info.key)
    backend.close()


def read(store: NodeStore, key: str, offset: int, nbytes: int) -> bytes:
    out = bytearray(nbytes)
    store.read_into(key, offset, memoryview(out))
    return bytes(out)


def asked(
    node: Node, key: str, token: bytes | None = None, *, tier: int = 1, magic: bytes = MAGIC
) -> bytes:
    """Return what comes back for a request from any client."""
    name = key.encode()
    with connect(node) as connection:
        connection.sendall(
            REQUEST.pack(magic, token or node.server.token, tier, 0, 4, len(name)) + name
        )
        got = b""
        # the server discards what it did not read, and the connection with it
        with suppress(OSError):
            if node.encryption is None:  # Python would read on without TLS
                connection.shutdown(socket.SHUT_WR)
            while piece := connection.recv(1 << 16):
                got += piece
    return got


def test_any_range_of_the_chosen_step_is_read_and_its_size_is_told(node: Node) -> None:
    for offset, nbytes in ((0, len(DATA)), (len(DATA) - 7, 7), (8 << 20, 12), (17, 4096)):
        assert read(node.store, KEY, offset, nbytes) == DATA[offset : offset + nbytes]
    assert node.store.head(KEY).size == len(DATA)
    assert node.store.head(REF.key("rank-00002.json")).size == 2
    assert read(node.store, REF.manifest, 0, 5) == b"truth"
    assert read(node.store, OTHER.manifest, 0, 5) == b"truth"
    assert sorted(node.store.folders("")) == [REF.folder, OTHER.folder]


def test_a_file_in_memory_is_sent_without_a_copy(
    node: Node, monkeypatch: pytest.MonkeyPatch
) -> None:
    sent: list[int] = []
    sendfile = socket.socket.sendfile

    def counted(self: socket.socket, *args: Any) -> int:
        sent.append(args[-1])  # before the caller has read all of it
        return sendfile(self, *args)

    monkeypatch.setattr(socket.socket, "sendfile", counted)
    assert read(node.store, KEY, 5, len(DATA) - 6) == DATA[5:-1]
    is_plain_memory = node.store.url.startswith("shm:") and node.encryption is None
    assert sent == ([len(DATA) - 6] if is_plain_memory else [])


def test_bytes_that_are_sent_at_once_are_all_counted(
    node: Node, monkeypatch: pytest.MonkeyPatch
) -> None:
    both = threading.Barrier(2, timeout=20)

    def together(send: Callable[..., Any]) -> Callable[..., Any]:
        def sent(connection: socket.socket, *args: Any) -> Any:
            if len(args) == 3 or len(args[0]) == 1000:  # The bytes of a file
                both.wait()
            return send(connection, *args)

        return sent

    for kind in (socket.socket, ssl.SSLSocket):
        monkeypatch.setattr(kind, "sendall", together(kind.sendall))
    monkeypatch.setattr(socket.socket, "sendfile", together(socket.socket.sendfile))
    with Workers("test", 2) as workers:
        for given in [workers.submit(read, node.store, KEY, 0, 1000) for _ in range(2)]:
            assert given.result() == DATA[:1000]
    assert until(lambda: node.server.served_bytes == 2000)


def test_a_file_that_is_cut_while_it_is_sent_is_an_error(
    node: Node, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(NodeServer, "_check_allowed", lambda self, _tier, key: cut(self, key))

    def cut(server: NodeServer, key: str) -> None:
        """Make the file shorter when its size is known."""
        store = server._stores[1]
        size = store.head(key).size
        store.put(key, [DATA[:100]])
        monkeypatch.setattr(store, "head", lambda key: ObjectInfo(key=key, size=size))

    with pytest.raises(ObjectNotFound, match="no node that answers"):
        read(node.store, KEY, 50, 1000)
    monkeypatch.undo()
    assert read(node.store, REF.manifest, 0, 5) == b"truth"  # The node is asked for other files


def test_beyond_the_end_is_an_error_not_less(node: Node) -> None:
    with pytest.raises(StorageError, match="were wanted"):
        read(node.store, KEY, len(DATA) - 2, 3)


@pytest.mark.parametrize(
    "key",
    [
        OTHER.key("rank-00002.safetensors"),
        "writer.json",
        "../beside",
        f"{REF.folder}/../writer.json",
        f"{REF.folder}/../../beside",
        f"{REF.folder}/notes.txt",
        "/etc/passwd",
        f"{REF.folder}/rank-00002.safetensors/x",
        "",
        "\0",
    ],
)
def test_nothing_else_is_read(node: Node, key: str, monkeypatch: pytest.MonkeyPatch) -> None:
    # the time that it waits for news of the step
    monkeypatch.setattr("ckpt.nodes.server.CONNECT_SECONDS", 0.2)
    answer = asked(node, key)
    assert len(answer) == ANSWER.size
    assert ANSWER.unpack(answer)[1] != 0
    assert node.server.served_bytes == 0


def test_who_knows_no_token_gets_no_answer(node: Node) -> None:
    assert asked(node, KEY, secrets.token_bytes(32)) == b""
    assert asked(node, KEY, magic=b"GET ") == b""
    assert asked(node, KEY) != b""
    assert len(asked(node, KEY, tier=7)) == ANSWER.size  # a tier that it does not serve


def test_those_who_connect_and_say_nothing_do_not_hold_up_the_end(node: Node) -> None:
    silent = [socket.create_connection(("127.0.0.1", node.server.port), 5) for _ in range(12)]
    began = time.monotonic()
    node.server.close()
    assert time.monotonic() - began < 5
    for connection in silent:
        connection.close()


def test_those_who_connect_and_say_little_do_not_keep_others_waiting(
    node: Node, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(ckpt.nodes.server, "_REQUEST_SECONDS", 0.5)
    slow = [socket.create_connection(("127.0.0.1", node.server.port), 5) for _ in range(12)]
    for connection in slow:
        connection.sendall(MAGIC)
    began = time.monotonic()
    assert read(node.store, KEY, 3, 5) == DATA[3:8]
    assert time.monotonic() - began < 10
    assert all(is_closed(connection) for connection in slow)
    for connection in slow:
        connection.close()


def test_a_node_that_is_gone_is_asked_twice_and_not_again(
    node: Node, monkeypatch: pytest.MonkeyPatch
) -> None:
    node.server.close()
    asked: list[int] = []
    request = node.store._request

    def counted(peer: Peer, key: str, offset: int, out: memoryview) -> int:
        asked.append(peer.rank)
        return request(peer, key, offset, out)

    monkeypatch.setattr(node.store, "_request", counted)
    with pytest.raises(ObjectNotFound, match=r"does not answer|no node that answers"):
        read(node.store, KEY, 0, 4)
    with pytest.raises(ObjectNotFound):
        read(node.store, KEY, 0, 4)
    assert asked == [node.peer.rank] * 2


def test_the_next_address_and_the_next_node_are_tried(node: Node) -> None:
    dead = msgspec.structs.replace(node.peer, rank=0, port=1)
    other = msgspec.structs.replace(node.peer, addresses=("127.0.0.1.invalid", "127.0.0.1"))
    store = NodeStore(1, "here", [dead, other], node.encryption)
    assert read(store, KEY, 3, 5) == DATA[3:8]


class Clock:
    """A clock that a test sets."""

    def __init__(self) -> None:
        self.now = 0.0

    def monotonic(self) -> float:
        return self.now


class Slow:
    """A connection whose answer arrives byte by byte, one every 50 s."""

    def __init__(self, clock: Clock, answer: bytes) -> None:
        self._clock, self._answer, self.received = clock, answer, 0

    def __enter__(self) -> Slow:
        return self

    def __exit__(self, *_: object) -> None: ...

    def sendall(self, data: bytes) -> None: ...

    def settimeout(self, seconds: float) -> None: ...

    def recv_into(self, out: memoryview) -> int:
        self._clock.now += 50
        return self.take(out[:1])

    def take(self, out: memoryview) -> int:
        """Give the next bytes of the answer, and return how many they are."""
        part = self._answer[self.received :][: len(out)]
        out[: len(part)] = part
        self.received += len(part)
        return len(part)


@pytest.mark.parametrize("nbytes", [5, 1 << 20])
def test_an_answer_as_a_whole_has_a_time_limit(
    node: Node, monkeypatch: pytest.MonkeyPatch, nbytes: int
) -> None:
    """Each single byte comes within the time that a byte may take."""
    clock = Clock()
    slow = Slow(clock, ANSWER.pack(MAGIC, OK, len(DATA)) + DATA)
    monkeypatch.setattr(ckpt.nodes.peer_store, "time", clock)
    monkeypatch.setattr(node.store, "_connect", lambda _: slow)
    with pytest.raises(ObjectNotFound, match="no node that answers"):
        read(node.store, KEY, 0, nbytes)
    assert slow.received <= 2 * 3  # It is asked twice


class Silent(Slow):
    """A connection that gives the head of an answer, and then nothing."""

    def recv_into(self, out: memoryview) -> int:
        if self.received < ANSWER.size:
            return self.take(out)
        self._clock.now += 1
        raise TimeoutError


@pytest.mark.parametrize("nbytes", [5, 8 << 20])
def test_a_silence_has_the_same_time_limit_in_a_long_answer(
    node: Node, monkeypatch: pytest.MonkeyPatch, nbytes: int
) -> None:
    """The limit of the whole answer grows with its length."""
    clock = Clock()
    monkeypatch.setattr(ckpt.nodes.peer_store, "time", clock)
    head = ANSWER.pack(MAGIC, OK, len(DATA))
    monkeypatch.setattr(node.store, "_connect", lambda _: Silent(clock, head))
    with pytest.raises(ObjectNotFound, match="no node that answers"):
        read(node.store, KEY, 0, nbytes)
    assert clock.now == pytest.approx(2 * ANSWER_SECONDS, abs=2)  # It is asked twice


def test_the_end_of_the_copying_ends_a_request_under_way(tmp_path: Path) -> None:
    """A buddy that sends single bytes holds up no ``close``."""
    pace, sent = Pace(None), list[int]()

    def drip(listening: socket.socket) -> None:
        with listening.accept()[0] as connection, suppress(OSError):
            connection.sendall(ANSWER.pack(MAGIC, OK, len(DATA)))
            while True:
                connection.sendall(b"x")
                sent.append(1)
                time.sleep(0.01)

    with socket.create_server(("127.0.0.1", 0)) as listening, Workers("test", 2) as workers:
        workers.submit(drip, listening)
        peer = Peer(2, ("127.0.0.1",), listening.getsockname()[1], "00" * 32, {})
        tier = OpenTier(1, Tier(str(tmp_path)), open_backend(str(tmp_path)))
        found = peer_store(tier, peer, REF, {"rank-00002.safetensors": len(DATA)}, pace)
        copying = workers.submit(read, found, KEY, 0, len(DATA))
        assert until(lambda: len(sent) > 3)
        pace.end(at_once=True)
        with pytest.raises(StorageError, match="not wanted any more"):
            copying.result()


def test_nothing_is_written_through_it(node: Node) -> None:
    for attempt in (
        lambda: node.store.put(KEY, [b"x"]),
        lambda: node.store.upload(KEY, 1),
        lambda: node.store.delete(KEY),
    ):
        with pytest.raises(StorageError, match="only read"):
            attempt()


def test_a_node_that_cannot_tell_the_others_serves_nobody(tmp_path: Path) -> None:
    """A thread that waits for requests would keep the process from ending."""
    coordinator = World(2).coordinator(0)

    def gone(subject: str, message: bytes) -> None:
        raise CommitError("the job's store is gone")

    coordinator.post = gone  # type: ignore[method-assign]
    tier = OpenTier(0, Tier(str(tmp_path), local=True), open_backend(str(tmp_path)), Nodes((0, 1)))
    with (
        pytest.raises(CommitError),
        NodeSurvey([tier], coordinator, subject="restore/0/nodes", step=None),
    ):
        raise AssertionError("not told")
    assert not [thread.name for thread in threading.enumerate() if "serve" in thread.name]


class Full:
    """A server whose accept() says, at once and again, that too many files are open."""

    asked = 0

    def __call__(self, listening: socket.socket) -> None:
        self.asked += 1
        raise OSError(errno.EMFILE, "too many open files")


def test_a_process_with_too_many_files_open_does_not_spin(
    node: Node, monkeypatch: pytest.MonkeyPatch
) -> None:
    full = Full()
    with monkeypatch.context() as patch:
        patch.setattr(node.server, "_accept", full)
        socket.create_connection(("127.0.0.1", node.server.port), 5).close()
        assert until(lambda: full.asked)
        time.sleep(0.5)
    assert 1 <= full.asked <= 10
    assert read(node.store, KEY, 0, 5) == DATA[:5]


# -- foreign callers -------------------------------------------------------------------------------


def connect(node: Node) -> socket.socket:
    connection = socket.create_connection(("127.0.0.1", node.server.port), 5)
    if node.encryption is not None:
        connection = node.encryption.connect(connection)
    connection.settimeout(10)
    return connection


def is_closed(connection: socket.socket, seconds: float = 5) -> bool:
    connection.settimeout(seconds)
    try:
        return connection.recv(1) == b""
    except TimeoutError:
        return False
    except OSError:
        return True


def test_four_hundred_silent_connections_shut_nobody_out(
    node: Node, monkeypatch: pytest.MonkeyPatch
) -> None:
    """They once waited in line for eight places of five seconds each."""
    monkeypatch.setattr(ckpt.nodes.server, "_REQUEST_SECONDS", 600.0)
    silent = [connect(node) for _ in range(400)]
    began = time.monotonic()
    for offset in range(20):
        assert read(node.store, KEY, offset, 5) == DATA[offset : offset + 5]
    assert time.monotonic() - began < 10
    assert len(node.server._callers) <= ckpt.nodes.server._MAX_CALLERS_PER_ADDRESS
    assert is_closed(silent[0])
    assert not is_closed(silent[-1], 0.2)
    for connection in silent:
        connection.close()


@pytest.mark.parametrize("sent", [b"G", b"ckp2", b"c\0", MAGIC + bytes(REQUEST.size - 4)])
def test_a_wrong_byte_ends_the_connection(
    node: Node, monkeypatch: pytest.MonkeyPatch, sent: bytes
) -> None:
    monkeypatch.setattr(ckpt.nodes.server, "_REQUEST_SECONDS", 600.0)
    with connect(node) as connection:
        connection.sendall(sent)
        assert is_closed(connection)


def test_a_part_of_the_token_tells_nothing(node: Node) -> None:
    """The connection stays until the whole token is there, whether its first bytes are right or
    wrong.
    """
    for token in (node.server.token, bytes(32)):
        with connect(node) as connection:
            connection.sendall(MAGIC + token[:31])
            assert not is_closed(connection, 0.2)


def test_a_request_in_single_bytes_is_answered(node: Node) -> None:
    name = KEY.encode()
    with connect(node) as connection:
        for byte in REQUEST.pack(MAGIC, node.server.token, 1, 7, 4, len(name)) + name:
            connection.sendall(bytes([byte]))
        got = b""
        while piece := connection.recv(1 << 16):
            got += piece
    assert got[ANSWER.size :] == DATA[7:11]


def test_a_key_that_is_too_long_is_not_waited_for(node: Node) -> None:
    with connect(node) as connection:
        connection.sendall(REQUEST.pack(MAGIC, node.server.token, 1, 0, 4, 65_535))
        assert is_closed(connection, 4)


@pytest.mark.parametrize("leader", [None, ("127.0.0.1", 29500), ("192.0.2.1", 29500)])
def test_it_listens_only_where_it_was_told(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, leader: tuple[str, int] | None
) -> None:
    """It does not listen at every interface of the machine."""
    monkeypatch.setattr(ckpt.nodes.server, "job_address", lambda: leader)
    server = NodeServer({0: open_backend(str(tmp_path))})
    try:
        assert server.addresses
        assert not {"", "0.0.0.0", "::"} & set(server.addresses)
        assert set(server.addresses) <= set(ckpt.nodes.server.interfaces())
        for address in server.addresses:
            socket.create_connection((address, server.port), 5).close()
        if "127.0.0.1" not in server.addresses:
            with pytest.raises(OSError, match="refused"):
                socket.create_connection(("127.0.0.1", server.port), 5)
    finally:
        server.close()
