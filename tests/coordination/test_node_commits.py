from __future__ import annotations

import secrets
from collections.abc import Callable
from pathlib import Path

import pytest

from ckpt import CheckpointManager
from ckpt.config import Tier
from ckpt.coordination.coordinator import Coordinator
from ckpt.coordination.long_message import drop, receive, send
from ckpt.coordination.node_commits import agree, on_node
from ckpt.coordination.single import SingleCoordinator
from ckpt.errors import CommitError, CommitTimeout, ConfigError
from ckpt.storage.tiers import Nodes, open_tiers
from tests.coordination.world import World
from tests.kit.stores import Wrapped, wrap_stores


def test_ranks_that_see_the_same_root_share_a_node_however_they_spell_it(tmp_path: Path) -> None:
    (tmp_path / "one").mkdir()
    (tmp_path / "link").symlink_to("one")
    roots = ["one", "two", "link", "two", "three"]

    def nodes(coordinator: Coordinator) -> Nodes | None:
        tiers = open_tiers(
            [Tier(str(tmp_path / roots[coordinator.rank]), local=True), Tier(str(tmp_path / "far"))]
        )
        near, far = agree(tiers, coordinator)
        assert far.nodes is None
        return near.nodes

    found = World(5).run(nodes)
    assert set(found.values()) == {Nodes((0, 1, 0, 1, 2))}
    assert found[0].lowest_ranks == (0, 1, 4)
    assert [found[0].mates(rank) for rank in (2, 1, 4)] == [(0, 2), (1, 3), (4,)]


def test_one_node_and_one_rank_are_told_nothing_of_nodes(tmp_path: Path) -> None:
    tier = Tier(str(tmp_path), local=True)
    assert World(3).run(lambda it: agree(open_tiers([tier]), it)[0].nodes) == dict.fromkeys(
        range(3)
    )
    assert agree(open_tiers([tier]), SingleCoordinator())[0].nodes is None


def test_ranks_with_other_tiers_are_an_error(tmp_path: Path) -> None:
    def nodes(coordinator: Coordinator) -> None:
        tiers = [
            Tier(str(tmp_path / str(index)), local=True) for index in range(coordinator.rank + 1)
        ]
        agree(open_tiers(tiers), coordinator)

    found = World(3, patience=0.3).run(nodes)
    assert {type(error) for error in found.values()} == {ConfigError}
    (text,) = set(map(str, found.values()))
    assert text.startswith("rank(s) 1, 2 were given another number of local tiers than rank 0")


def test_a_store_that_all_see_is_not_local() -> None:
    with pytest.raises(ConfigError, match="seen by all nodes"):
        open_tiers([Tier("s3://bucket/x", local=True)])


def test_the_ranks_of_a_node_talk_among_themselves() -> None:
    nodes = Nodes((0, 1, 0, 1))

    def talk(coordinator: Coordinator) -> tuple[int, int, dict[int, bytes], bytes]:
        mine = on_node(coordinator, nodes)
        mine.post("x", str(coordinator.rank).encode())
        heard: dict[int, bytes] = {}
        while len(heard) < 2:
            heard |= mine.collect("x", {0, 1} - heard.keys(), timeout=5)
        return (
            mine.rank,
            mine.world_size,
            heard,
            mine.set_once("y", str(nodes.of[coordinator.rank]).encode()),
        )

    found = World(4).run(talk)
    assert found[2] == (1, 2, {0: b"0", 1: b"2"}, b"0")
    assert found[3] == (1, 2, {0: b"1", 1: b"3"}, b"1")


@pytest.mark.parametrize("nbytes", [0, 1, 5 << 20, 9 << 20])
def test_a_parcel_arrives_and_leaves_nothing(nbytes: int) -> None:
    world = World(2)
    data = secrets.token_bytes(nbytes)
    sender, receiver = world.coordinator(1), world.coordinator(0)
    pieces = send(sender, "s", data)
    assert pieces == len(world.messages)
    # torch's store takes 8 MiB at once
    assert max(map(len, world.messages.values())) <= (4 << 20) + 10
    assert receive(receiver, "s", 1, limit=nbytes, timeout=1) == data
    with pytest.raises(CommitError, match="more than"):
        receive(receiver, "s", 1, limit=nbytes - 1, timeout=1)
    drop(sender, "s", pieces)
    assert not world.messages
    with pytest.raises(CommitError, match="did not come"):
        receive(receiver, "s", 1, limit=nbytes, timeout=0.1)


@pytest.mark.parametrize(
    "damage", [lambda text: text[:-4], lambda text: text[2:], lambda text: b"x" + text]
)
def test_a_damaged_parcel_is_an_error(damage: Callable[[bytes], bytes]) -> None:
    world = World(2)
    send(world.coordinator(1), "s", b"x" * 1000)
    world.messages["s/0", 1] = damage(world.messages["s/0", 1])
    with pytest.raises(CommitError, match="damaged"):
        receive(world.coordinator(0), "s", 1, limit=1000, timeout=1)


def test_a_manager_whose_ranks_do_not_come_closes_its_backends(tmp_path, monkeypatch):
    closed = []

    class Closing(Wrapped):
        def close(self):
            closed.append(self.inner.url)

    wrap_stores(monkeypatch, lambda url, store: Closing(store))
    monkeypatch.setattr("ckpt.coordination.node_commits._START_SECONDS", 0.1)
    with pytest.raises(CommitTimeout):
        CheckpointManager(Tier(str(tmp_path), local=True), coordinator=World(2).coordinator(0))
    assert closed == [str(tmp_path)]
