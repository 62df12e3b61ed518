"""The ranks that share a tier with a capacity make room together, or fail for the same reason."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from ckpt.config import Tier
from ckpt.coordination.coordinator import LEADER, Coordinator
from ckpt.errors import (
    CkptError,
    CommitError,
    CommitTimeout,
    OutOfSpace,
    RootInUse,
    TransientStorageError,
)
from ckpt.model.keys import StepRef
from ckpt.retention.evictor import Evictor
from ckpt.retention.policy import FixedGuard
from ckpt.retention.quota import Quota
from ckpt.root.claim import Claim
from ckpt.root.owner import Owner
from ckpt.storage.tiers import open_tiers
from tests.coordination.world import World

REF = StepRef(7, "abcxyz")


def agreed(root: Path, world: World, ranks: list[int], *, timeout: float = 5) -> dict[int, Any]:
    """Let ``ranks`` agree on room for one step, and return the error of each, or None."""
    (tier,) = open_tiers((Tier(str(root), capacity=10_000),))

    def agree(coordinator: Coordinator) -> None:
        if coordinator.rank == LEADER:
            with world.changed:  # Until the other rank has posted its size
                assert world.changed.wait_for(lambda: world.messages, 10)
        claim = Claim(tier.backend, Owner.of_this_process(coordinator.attempt))
        quota = Quota(tier, coordinator, claim, FixedGuard(), timeout=timeout)
        quota.agree(REF, 0, 1000, restored_ref=None)

    return world.run(agree, ranks)


@pytest.mark.parametrize(
    "error",
    [
        OutOfSpace(REF.folder, "nothing there can be removed"),
        TransientStorageError(REF.folder, "reset by peer"),
        RootInUse("/runs/gpt", "job 4711"),
    ],
    ids=lambda error: type(error).__name__,
)
def test_all_ranks_raise_the_error_of_the_leader(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, error: CkptError
) -> None:
    def fail(*_: object, **__: object) -> None:
        raise error

    monkeypatch.setattr(Evictor, "evict_to_capacity", fail)
    found = agreed(tmp_path, World(2), [0, 1])
    assert found[0] is error
    assert (type(found[1]), str(found[1])) == (type(error), str(error))


def test_all_ranks_name_the_rank_whose_size_the_leader_has_not_got(tmp_path: Path) -> None:
    found = agreed(tmp_path, World(3), [0, 1], timeout=0.05)
    assert [type(found[rank]) for rank in (0, 1)] == [CommitTimeout] * 2
    assert str(found[0]) == str(found[1])
    assert found[1].missing == (2,)


def test_no_rank_goes_on_if_the_leader_has_failed_in_a_way_of_its_own(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def fail(*_: object, **__: object) -> None:
        raise ValueError("unforeseen")

    monkeypatch.setattr(Evictor, "evict_to_capacity", fail)
    found = agreed(tmp_path, World(2), [0, 1])
    assert isinstance(found[0], ValueError)
    assert isinstance(found[1], CommitError)
    assert "ValueError('unforeseen')" in str(found[1])


def test_an_error_of_the_leader_with_a_name_that_is_not_utf_8_reaches_all(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def fail(*_: object, **__: object) -> None:
        raise OutOfSpace("a name that is not UTF-8: \udcff", "full")

    monkeypatch.setattr(Evictor, "evict_to_capacity", fail)
    found = agreed(tmp_path, World(2), [0, 1])
    assert isinstance(found[0], OutOfSpace)
    assert isinstance(found[1], OutOfSpace)
    assert found[1].key == r"a name that is not UTF-8: \udcff"


def test_ranks_for_which_there_is_room_go_on(tmp_path: Path) -> None:
    assert agreed(tmp_path, World(2), [0, 1]) == {0: None, 1: None}
