"""Every chunk comes from a node that has it intact, if several nodes have copies of it."""

from __future__ import annotations

import logging
from collections.abc import Iterator
from contextlib import ExitStack
from pathlib import Path

import numpy as np
import pytest

from ckpt.catalog.step_listing import own_objects
from ckpt.catalog.tiered_reader import TieredReader
from ckpt.config import Tier
from ckpt.errors import IntegrityError, ObjectNotFound, TransientStorageError
from ckpt.model.box import Box
from ckpt.model.keys import StepRef
from ckpt.model.manifest import chunk_offsets
from ckpt.nodes.node_survey import NodeSurvey, copy_count
from ckpt.nodes.peer_store import AllNodesStore, NodeStore
from ckpt.nodes.server import NodeServer
from ckpt.nodes.wire import Peer, StepFiles
from ckpt.pipeline.retry import RetryPolicy
from ckpt.pipeline.workers import Workers
from ckpt.plan.leaf import Leaf
from ckpt.plan.restore import plan_restore
from ckpt.storage.api import StorageBackend, read_object
from ckpt.storage.registry import open_backend
from ckpt.storage.testing.faulty import FaultyBackend, Raise, Rule, Verb, flip_byte
from ckpt.storage.tiers import Nodes, OpenTier
from tests.checkpoints import Written, write_checkpoint
from tests.coordination.world import World
from tests.kit.sinks import ArraySink

ARRAY = np.random.default_rng(3).standard_normal((12, 16))  # Six rows of 128 bytes on each rank
WANTED = [Leaf("x", "float64", ARRAY.shape, (Box.whole(ARRAY.shape),))]
IMPATIENT = RetryPolicy(attempts=2, first_seconds=0.001, most_seconds=0.002)


class Buddies:
    """Three nodes that have the same step, and a store through which a fourth one reads it.

    The nodes have the ranks 10, 11 and 12. The files of the step are of the ranks 0 and 1.
    """

    def __init__(self, folder: Path, ends: ExitStack) -> None:
        self.stores: list[StorageBackend] = [
            open_backend(str(folder / str(node))) for node in range(3)
        ]
        for store in self.stores:
            self.done: Written = write_checkpoint(
                store, 7, {"x": ARRAY}, world_size=2, chunk_bytes=128
            )
        self.ends, self.servers = ends, list[NodeServer]()

    @property
    def keys(self) -> list[str]:
        return [self.done.ref.key(file.name) for file in self.done.manifest.files]

    def fail(self, node: int, key: str, verb: Verb = "head") -> FaultyBackend:
        """Let each request for an object fail on a node."""
        rule = Rule(verb=verb, key=key, fault=Raise(TransientStorageError))
        self.stores[node] = found = FaultyBackend(self.stores[node], rules=[rule])
        return found

    def damage(self, node: int, rank: int, chunk: int = 2) -> None:
        place = chunk_offsets(self.done.manifest.files[rank])[chunk]
        flip_byte(self.stores[node], self.keys[rank], place)

    def cut(self, node: int, rank: int) -> None:
        store, key = self.stores[node], self.keys[rank]
        store.put(key, [read_object(store, key, limit=1 << 20)[:-130]])

    def remove(self, node: int, rank: int) -> None:
        self.stores[node].delete(self.keys[rank])

    def union(self) -> NodeStore:
        """Start the servers, and return a store that reads from them."""
        peers: list[Peer] = []
        for node, store in enumerate(self.stores):
            server = NodeServer({0: store})
            self.ends.callback(server.close)
            server.allow(self.done.ref)
            self.servers.append(server)
            whole = store.inner if isinstance(store, FaultyBackend) else store
            files = {
                info.name: info.size
                for info in own_objects(whole, self.done.ref)
                if info.key.endswith(".safetensors")
            }
            steps = {self.done.ref.folder: StepFiles(True, files)}
            peers.append(
                Peer(10 + node, ("127.0.0.1",), server.port, server.token.hex(), {0: steps})
            )
        self.peers = peers
        return NodeStore(0, "tier", peers)

    def copies(self) -> list[NodeStore]:
        return self.union().copies(copy_count(self.peers, 0))

    def read(self) -> tuple[np.ndarray, TieredReader]:
        stores = self.copies()
        origin = TieredReader(
            stores, self.done.ref, retry=IMPATIENT, partial=set(range(len(stores)))
        )
        manifest = origin.with_fragments(origin.manifest(), None).manifest
        sink = ArraySink(WANTED, direct=True)
        with Workers("test", 2) as workers:
            origin.read(plan_restore(manifest, WANTED), sink, workers=workers)
        return sink.arrays[0], origin


@pytest.fixture
def nodes(tmp_path: Path) -> Iterator[Buddies]:
    with ExitStack() as ends:
        yield Buddies(tmp_path, ends)


def test_a_damaged_chunk_comes_from_the_node_that_has_it_intact(nodes: Buddies) -> None:
    nodes.damage(0, 0)
    nodes.damage(1, 0)
    nodes.damage(1, 1)
    array, origin = nodes.read()
    assert np.array_equal(array, ARRAY)
    (repair,) = origin.repairs
    assert repair.key == nodes.keys[0]
    assert "checksum mismatch" in repair.reason
    assert repair.nbytes == 2 * 128  # The chunk was damaged on two nodes


@pytest.mark.parametrize(
    ("verb", "reason"),
    [("head", "a file that another node has"), ("read_into", "its files: the connection ended")],
)
def test_a_file_that_a_node_cannot_read_comes_from_another_one(
    nodes: Buddies, caplog: pytest.LogCaptureFixture, verb: Verb, reason: str
) -> None:
    """The node still gives its other files."""
    faulty = nodes.fail(0, nodes.keys[0], verb)
    with caplog.at_level(logging.WARNING, "ckpt"):
        array, origin = nodes.read()
    assert np.array_equal(array, ARRAY)
    assert origin.repairs == ()
    (said,) = [each.getMessage() for each in caplog.records]
    assert f"the node of rank 10 does not give {reason}" in said
    assert any((call.verb, call.key) == ("read_into", nodes.keys[1]) for call in faulty.calls)


def test_a_file_that_is_short_on_a_node_comes_from_another_one(nodes: Buddies) -> None:
    nodes.cut(0, 1)
    array, _ = nodes.read()
    assert np.array_equal(array, ARRAY)


def test_two_faults_of_different_kinds_leave_the_third_copy(nodes: Buddies) -> None:
    nodes.fail(0, nodes.keys[0])
    nodes.damage(1, 0)
    nodes.cut(0, 1)
    nodes.damage(1, 1)
    array, _ = nodes.read()
    assert np.array_equal(array, ARRAY)


def test_the_second_copy_of_one_file_may_be_on_the_node_with_the_first_of_another(
    nodes: Buddies,
) -> None:
    nodes.remove(0, 1)
    nodes.remove(2, 1)
    nodes.damage(0, 0)
    nodes.damage(1, 0)
    array, _ = nodes.read()
    assert np.array_equal(array, ARRAY)


def test_a_chunk_that_is_damaged_on_all_nodes_is_named(nodes: Buddies) -> None:
    for node in range(3):
        nodes.damage(node, 0)
    with pytest.raises(IntegrityError, match=r"checksum mismatch in '[^']*/rank-00000"):
        nodes.read()


@pytest.mark.parametrize("what", ["manifest", "fragment"])
def test_a_damaged_record_comes_from_another_node(nodes: Buddies, what: str) -> None:
    """Also if each data file is on one node only."""
    nodes.remove(1, 0)
    nodes.remove(2, 0)
    nodes.remove(2, 1)
    if what == "fragment":
        flip_byte(nodes.stores[0], nodes.done.ref.key("rank-00001.json"), 9)
    else:
        nodes.remove(0, 1)
        flip_byte(nodes.stores[0], nodes.done.ref.manifest, 9)
    array, _ = nodes.read()
    assert np.array_equal(array, ARRAY)


def test_another_try_may_succeed_if_one_node_only_fails_for_now(nodes: Buddies) -> None:
    nodes.remove(2, 0)
    nodes.cut(0, 0)
    nodes.fail(1, nodes.keys[0])
    out, size = memoryview(bytearray(130)), nodes.done.manifest.files[0].size
    with pytest.raises(TransientStorageError, match="rank 11 cannot read it"):
        nodes.union().read_into(nodes.keys[0], size - 130, out)


def test_the_copies_share_what_they_know_of_silent_nodes(nodes: Buddies) -> None:
    first, second, third = nodes.copies()
    nodes.servers[1].close()
    assert third.head(nodes.done.ref.manifest).size
    out = memoryview(bytearray(8))
    second.read_into(nodes.keys[0], 0, out)
    assert first._silent_ranks == second._silent_ranks == third._silent_ranks == {11}


def test_a_copy_that_no_node_has_is_asked_of_none(nodes: Buddies) -> None:
    nodes.remove(1, 0)
    nodes.remove(2, 0)
    _, second, _ = nodes.copies()
    with pytest.raises(ObjectNotFound):
        second.read_into(nodes.keys[0], 0, memoryview(bytearray(8)))
    assert not any(server.served_bytes for server in nodes.servers)


# -- the listing of the leader ---------------------------------------------------------------------


def test_what_fails_on_this_node_is_listed_as_the_others_have_it(nodes: Buddies) -> None:
    verbs: tuple[Verb, ...] = ("head", "read_into", "list", "folders")
    fault = Raise(TransientStorageError)
    broken = FaultyBackend(nodes.stores[0], rules=[Rule(verb=verb, fault=fault) for verb in verbs])
    union, ref = AllNodesStore(broken, nodes.union()), nodes.done.ref
    assert list(union.folders("")) == [ref.folder]
    assert {info.key for info in union.list(f"{ref.folder}/")} == set(nodes.keys)
    assert read_object(union, ref.manifest, limit=1 << 20) == read_object(
        nodes.stores[1], ref.manifest, limit=1 << 20
    )
    alone = AllNodesStore(broken, NodeStore(0, "tier", []))
    for work in (
        lambda: union.head("step-00000009/manifest.json"),
        lambda: list(alone.folders("")),
        lambda: list(alone.list("")),
    ):
        with pytest.raises(TransientStorageError):
            work()


# -- the stores of a restore -----------------------------------------------------------------------


def test_all_ranks_have_a_store_for_each_copy(tmp_path: Path) -> None:
    """Ranks tell each other the positions of stores, so also the nodes with a copy have all."""
    files = {"rank-00000.safetensors": 9}
    ref = StepRef(7, "abcxyz")
    peers = [
        Peer(rank, (), 0, "", {0: {ref.folder: StepFiles(True, files if rank < 3 else {})}})
        for rank in range(4)
    ]
    tier = OpenTier(
        0, Tier(str(tmp_path), local=True), open_backend(str(tmp_path)), Nodes((0, 1, 2, 3))
    )
    for coordinator in map(World(4).coordinator, range(4)):
        survey = NodeSurvey([tier], coordinator, subject="restore/0/nodes", step=None)
        sources = survey.sources([tier], ref, peers)
        assert [each.tier.url for each in sources.tiers[1:]] == ["nodes://"] * 3
        assert sources.partial == {0, 1, 2, 3}
    alone = [Peer(rank, (), 0, "", {0: {ref.folder: StepFiles(True, {})}}) for rank in range(4)]
    assert copy_count(alone, 0) == 2  # Two of the manifests
    assert copy_count(alone, 1) == copy_count([], 0) == 1
