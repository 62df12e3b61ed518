"""A commit where no rank sees all files.

Three ranks are on two nodes, each of which has a store of its own.
"""

from __future__ import annotations

import threading
import uuid
from collections.abc import Iterator

import pytest

import ckpt.coordination.node_commits
from ckpt.coordination.abort_reason import Abort
from ckpt.coordination.commit_state_machine import (
    Bounds,
    Committed,
    Durable,
    Failure,
    Unknown,
    Verdict,
    Vote,
)
from ckpt.coordination.committer import Committer, SharedStore
from ckpt.coordination.coordinator import Coordinator
from ckpt.coordination.exchanges import encode_json
from ckpt.coordination.node_commits import NodeLocalStore
from ckpt.errors import OutOfSpace, RootInUse
from ckpt.model.checksum import checksum
from ckpt.model.keys import fragment_name
from ckpt.model.manifest import Manifest
from ckpt.model.record_encoding import unpack
from ckpt.storage.api import StorageBackend, read_object
from ckpt.storage.testing import FaultyBackend, Raise, Rule
from ckpt.storage.tiers import Nodes
from ckpt_backends.memory import forget_memory, open_memory
from tests.coordination.durable import REF, make_durable
from tests.coordination.world import World, WorldCoordinator

NODES = Nodes((0, 0, 1))
Stores = list[FaultyBackend]


@pytest.fixture
def stores() -> Iterator[Stores]:
    names = [uuid.uuid4().hex for _ in range(2)]
    yield [FaultyBackend(open_memory(f"memory://{name}", {})) for name in names]
    for name in names:
        forget_memory(name)


def commit(
    world: World, stores: Stores, messages: dict[int, Vote], ranks: set[int] | None = None
) -> dict[int, Verdict]:
    def work(coordinator: Coordinator) -> Verdict:
        check = checks.get(coordinator.rank, lambda: None)
        store = SharedStore(stores[NODES.of[coordinator.rank]], confirm=check)
        place = NodeLocalStore(store, coordinator, NODES, name="tier0")
        committer = Committer(coordinator, place, name="tier0", bounds=Bounds(5, 0.3))
        message = messages[coordinator.rank]
        if isinstance(message, Durable):
            committer.store.offer(REF, message.fragment)
        return committer.commit(REF, message)

    checks = getattr(world, "checks", {})
    return world.run(work, ranks)


def all_durable(stores: Stores) -> dict[int, Vote]:
    return {rank: make_durable(stores[NODES.of[rank]], rank, 3) for rank in range(3)}


def manifests(stores: Stores) -> list[bytes]:
    found: list[StorageBackend] = [
        store for store in stores if any(info.key == REF.manifest for info in store.list(""))
    ]
    return [read_object(store, REF.manifest, limit=1 << 20) for store in found]


def test_every_node_has_the_same_manifest_and_nothing_is_left_in_the_job_s_store(
    stores: Stores,
) -> None:
    world = World(3, patience=5)
    heard = commit(world, stores, all_durable(stores))
    one, two = manifests(stores)
    assert one == two
    assert heard == dict.fromkeys(range(3), Committed(checksum(one)))
    manifest = unpack(one, Manifest, key=REF.manifest)
    assert [fragment.rank for fragment in manifest.fragments] == [0, 1, 2]
    left = {key for key, _ in world.messages}
    assert not left - {f"tier0/{REF.folder}/put"}, left  # the committer may have had to wait for it
    assert max(map(len, world.verdicts.values())) < 200  # verdicts are not deleted


def test_a_rank_that_has_failed_is_heard_of_on_all_nodes_and_no_node_has_a_manifest(
    stores: Stores,
) -> None:
    heard = commit(World(3, patience=5), stores, {**all_durable(stores), 2: Failure("disk full")})
    assert all(
        isinstance(verdict, Abort) and verdict.failures == {2: "disk full"}
        for verdict in heard.values()
    )
    assert manifests(stores) == []


def test_a_node_that_cannot_put_it_fails_the_save_and_nothing_may_be_removed(
    stores: Stores,
) -> None:
    messages = all_durable(stores)
    stores[1] = FaultyBackend(
        stores[1], [Rule(verb="put", key="manifest", fault=Raise(OutOfSpace))]
    )
    heard = commit(World(3, patience=5), stores, messages)
    for verdict in heard.values():
        assert isinstance(verdict, Unknown), verdict
        assert "on the node of rank 2" in verdict.reason
        assert "no space left" in verdict.reason
    assert len(manifests(stores)) == 1


def test_a_node_whose_root_was_taken_over_puts_nothing(stores: Stores) -> None:
    def taken() -> None:
        raise RootInUse("here", "another")

    world = World(3, patience=5)
    world.checks = {2: taken}  # type: ignore[attr-defined]
    heard = commit(world, stores, all_durable(stores))
    assert all(
        isinstance(verdict, Unknown) and "written by another" in verdict.reason
        for verdict in heard.values()
    )
    assert len(manifests(stores)) == 1


def test_if_the_committer_s_own_node_cannot_put_it_no_node_does(stores: Stores) -> None:
    messages = all_durable(stores)
    stores[0] = FaultyBackend(
        stores[0], [Rule(verb="put", key="manifest", fault=Raise(OutOfSpace))]
    )
    heard = commit(World(3, patience=5), stores, messages)
    assert all(isinstance(verdict, Abort) for verdict in heard.values()), heard
    assert manifests(stores) == []


def test_without_the_leader_a_survivor_puts_it_where_it_can(
    stores: Stores, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Rank 1 shares the leader's node; the other node's lowest rank is alive."""
    monkeypatch.setattr(ckpt.coordination.node_commits, "_PUT_SECONDS", 3.0)
    messages = all_durable(stores)
    world = World(3, patience=5)
    silent = world.coordinator(0)
    place = NodeLocalStore(SharedStore(stores[0]), silent, NODES, name="tier0")
    place.offer(REF, messages[0].fragment)  # type: ignore[union-attr]
    silent.post(f"tier0/{REF.folder}", encode_json(messages[0]))  # type: ignore[attr-defined]
    heard = commit(world, stores, messages, {1, 2})
    one, two = manifests(stores)
    assert one == two
    assert heard == dict.fromkeys((1, 2), Committed(checksum(one)))


def test_a_fragment_that_is_not_what_was_told_is_no_part_of_a_checkpoint(stores: Stores) -> None:
    messages = all_durable(stores)
    world = World(3, patience=5)
    other = make_durable(stores[1], 2, 3, created_at=7.0)  # put again, with other content
    assert isinstance(messages[2], Durable)
    assert other.fragment.name == fragment_name(2)
    heard = commit(world, stores, messages)
    assert not any(isinstance(verdict, Committed) for verdict in heard.values())
    assert manifests(stores) == []


def test_what_a_leader_has_put_on_its_node_counts_when_it_dies_after_that(
    stores: Stores, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The whole node dies, but its disk does not. The other node's rank learns that it need not put
    anything there.
    """

    class Dies(WorldCoordinator):
        def set_once(self, subject: str, verdict: bytes) -> bytes:
            if subject == f"tier0/{REF.folder}":  # the outcome
                raise EOFError
            return super().set_once(subject, verdict)

    monkeypatch.setattr(ckpt.coordination.node_commits, "_PUT_SECONDS", 1.0)
    messages, world = all_durable(stores), World(3, patience=5)
    places = [
        NodeLocalStore(SharedStore(stores[0]), Dies(world, rank), NODES, name="tier0")
        for rank in range(2)
    ]
    committers = [
        Committer(Dies(world, rank), place, name="tier0", bounds=Bounds(5, 0.3))
        for rank, place in enumerate(places)
    ]
    for rank, committer in enumerate(committers):
        committer.store.offer(REF, messages[rank].fragment)  # type: ignore[union-attr]
    Dies(world, 1).post(f"tier0/{REF.folder}", encode_json(messages[1]))

    def die() -> None:
        with pytest.raises(EOFError):
            committers[0].commit(REF, messages[0])

    dying = threading.Thread(target=die)
    dying.start()
    heard = commit(world, stores, messages, {2})
    dying.join()
    one, two = manifests(stores)
    assert one == two
    assert heard == {2: Committed(checksum(one))}
