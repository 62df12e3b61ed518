"""What a node that keeps copies remembers of the steps, and leaves in the job's store."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import ExitStack
from pathlib import Path

import pytest

from ckpt.config import SaveConfig, Tier
from ckpt.events import NodeReplicated, Observers
from ckpt.model.keys import StepRef
from ckpt.nodes.buddy_tier import BuddyTier
from ckpt.nodes.replication import NodeReplicas
from ckpt.storage.registry import open_backend
from ckpt.storage.tiers import Nodes, OpenTier
from tests.coordination.world import World
from tests.kit.waiting import until

OLD, NEW, NEXT = (StepRef(step, "abcxyz") for step in (1, 2, 3))


class Pair:
    """Two nodes of one rank each, and what they have copied."""

    def __init__(self, folder: Path) -> None:
        self.world = World(2)
        self.copied: list[int] = []
        self.tiers = [
            OpenTier(
                0, Tier(str(root), local=True, buddies=1), open_backend(str(root)), Nodes((0, 1))
            )
            for root in (folder / "0", folder / "1")
        ]
        found = self.world.run(
            lambda it: NodeReplicas.of(
                [self.tiers[it.rank]], it, SaveConfig(), Observers([self._notice])
            )
        )
        self.nodes: list[NodeReplicas] = [found[0], found[1]]

    def _notice(self, event: object) -> None:
        if isinstance(event, NodeReplicated):
            self.copied.append(event.step)

    def commit(self, ref: StepRef) -> None:
        """Let each node copy a step."""
        before = len(self.copied)
        for node, tier in zip(self.nodes, self.tiers, strict=True):
            node.committed(tier, ref, lambda: None)
        assert until(lambda: len(self.copied) == before + 2)

    def kept(self) -> list[frozenset[StepRef]]:
        return [node.copied_refs(tier) for node, tier in zip(self.nodes, self.tiers, strict=True)]


@pytest.fixture
def pair(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Pair]:
    monkeypatch.setattr(BuddyTier, "copy", lambda *_: 1)
    with ExitStack() as ends:
        found = Pair(tmp_path)
        ends.callback(found.world.run, lambda it: found.nodes[it.rank].close(wait=False))
        yield found


def test_a_job_that_goes_back_keeps_the_step_that_it_goes_on_from(pair: Pair) -> None:
    pair.commit(OLD)
    pair.commit(NEW)
    assert pair.kept() == [{NEW}, {NEW}]
    for node in pair.nodes:
        node.set_restored(OLD)
    assert pair.kept() == [{OLD}, {OLD}]
    pair.commit(NEXT)
    assert pair.kept() == [{NEXT}, {NEXT}]


def test_a_copy_that_ends_after_the_job_went_back_protects_nothing(
    pair: Pair, monkeypatch: pytest.MonkeyPatch
) -> None:
    def copy(*_: object) -> int:
        for node in pair.nodes:
            node.set_restored(OLD)
        return 1

    monkeypatch.setattr(BuddyTier, "copy", copy)
    pair.commit(NEW)
    assert pair.kept() == [{OLD}, {OLD}]


def test_the_messages_of_a_restored_step_are_removed(pair: Pair) -> None:
    """But for the last ones, which another node may not have read."""
    for number in range(1, 5):
        for node in pair.nodes:
            node.set_restored(OLD)
        subject = f"replicas/restored0/{number}"

        def are_left(subject: str = subject) -> bool:
            found = {name for name, _ in pair.world.messages if "/restored" in name}
            return found == {subject}

        assert until(are_left)
