"""Room is made for a copy by the size that it will have on the tier."""

from __future__ import annotations

import shutil
from pathlib import Path
from typing import Any

import pytest
import torch

from ckpt import CheckpointManager, Tier
from ckpt.catalog.inventory import Inventory
from ckpt.catalog.rollbacks import put_rollback
from ckpt.catalog.step_listing import committed
from ckpt.codec import registry
from ckpt.model.keys import data_name
from ckpt.model.rollback import roll_back
from ckpt.pipeline.workers import Workers
from ckpt.retention.evictor import Evictor
from ckpt.retention.policy import FixedGuard
from ckpt.retention.removal import remove
from ckpt.root.claim import Claim
from ckpt.root.claim_marker import claim_committed_for_removal
from ckpt.root.owner import Owner
from ckpt.storage.tiers import open_tiers
from ckpt.upkeep.step_copier import StepCopier

STATE = {"x": torch.zeros(50_000)}


@pytest.mark.parametrize(
    ("source", "codec", "size", "known"),
    [
        ("none", "none", "nbytes", True),
        ("zstd", "none", "staged_bytes", True),
        ("none", "zstd", "nbytes", False),
        ("zstd", "zstd:3", "nbytes", True),
        ("other", "zstd", "staged_bytes", False),
    ],
)
def test_a_copy_that_is_encoded_again_is_checked_when_its_size_is_known(
    near: Path,
    far: Path,
    monkeypatch: pytest.MonkeyPatch,
    source: str,
    codec: str,
    size: str,
    known: bool,
) -> None:
    asked: list[tuple[int, bool]] = []
    settled: list[int] = []

    def evict_to_capacity(
        _: Evictor, ref: object, nbytes: int, *, is_exact: bool, **__: Any
    ) -> None:
        asked.append((nbytes, is_exact))

    monkeypatch.setitem(registry.BUILT_IN, "other", registry.BUILT_IN["zstd"])  # type: ignore[arg-type]
    monkeypatch.setattr(Evictor, "evict_to_capacity", evict_to_capacity)
    monkeypatch.setattr(Evictor, "fit_to_capacity", lambda _, ref, **__: settled.append(ref.step))
    with CheckpointManager(Tier(str(near), codec=source)) as manager:
        manager.save(STATE, 7)
    tiers = open_tiers([Tier(str(near)), Tier(str(far), codec=codec, capacity="1GB")])
    (held,) = Inventory(tiers[0].backend).look()
    claim = Claim(tiers[1].backend, Owner.of_this_process("b" * 12))
    claim.take()
    with Workers("copy", 1) as workers:
        copier = StepCopier(tiers[1], claim, [tiers[0].backend], FixedGuard())
        copier.copy(held, workers)
    assert asked == [(getattr(held, size), known)]
    assert settled == ([] if known else [7])
    assert committed(tiers[1].backend) == [held.ref]


def test_a_step_whose_removal_from_the_tier_was_cut_short_is_not_copied_there(
    near: Path, far: Path
) -> None:
    """A copy would fail for ever, and hold up the copies of the other steps."""
    with CheckpointManager([Tier(str(near)), Tier(str(far))]) as manager:
        for number in (1, 2, 3):
            manager.save(STATE, number)
    tier, store = open_tiers([Tier(str(near)), Tier(str(far))])
    line = Inventory(tier.backend).look()
    for step in line[:2]:
        store.backend.delete(step.ref.manifest)
    claim_committed_for_removal(store.backend, line[0].ref)
    claim = Claim(store.backend, Owner.of_this_process("b" * 12))
    copier = StepCopier(store, claim, [tier.backend], FixedGuard())
    assert copier.missing_steps(line, 1) == [line[1]]
    assert copier.not_being_removed(line) == line[1:]
    remove(store.backend, Inventory(store.backend).look()[0])
    assert copier.missing_steps(line, 4) == line[:2]


def test_abandoned_steps_decide_nothing_and_make_room(near: Path, far: Path) -> None:
    """The farther tier has the abandoned steps 8 and 9, and room for two steps."""
    with CheckpointManager(Tier(str(far))) as manager:
        manager.save(STATE, 8)
        manager.save(STATE, 9)
    with CheckpointManager(Tier(str(near))) as manager:
        manager.save(STATE, 5)
        manager.save(STATE, 7)
    (tier,) = open_tiers([Tier(str(near))])
    line = Inventory(tier.backend).look()
    (store,) = open_tiers([Tier(str(far))])
    steps = Inventory(store.backend).look()
    (full,) = open_tiers([Tier(str(far), keep_last=1, capacity=2 * steps[0].nbytes + 100)])
    rollback = roll_back([], line[1].ref, [steps[0].ref])
    claim = Claim(full.backend, Owner.of_this_process("b" * 12))
    claim.take()
    copier = StepCopier(full, claim, [tier.backend], FixedGuard(), rollback=rollback)
    assert copier.missing_steps(line, 4) == line[:1]
    assert rollback is not None
    put_rollback(full.backend, rollback)
    with Workers("copy", 1) as workers:
        for step in line:
            copier.copy(step, workers)
    assert {ref.step for ref in committed(full.backend)} == {5, 7}


@pytest.mark.parametrize("source", ["none", "zstd"])
def test_what_an_interrupted_copy_left_is_not_counted_twice(
    near: Path, far: Path, source: str
) -> None:
    with CheckpointManager(Tier(str(far))) as manager:
        manager.save(STATE, 1)
    with CheckpointManager(Tier(str(near), codec=source)) as manager:
        manager.save(STATE, 7)
    (tier,) = open_tiers([Tier(str(near))])
    (held,) = Inventory(tier.backend).look()
    (older,) = Inventory(open_tiers([Tier(str(far))])[0].backend).look()
    left = far / held.ref.folder
    left.mkdir()
    data = older.ref.folder if source != "none" else held.ref.folder
    root = near if source == "none" else far
    shutil.copy(root / data / data_name(0), left)
    nbytes = held.nbytes if source == "none" else held.staged_bytes
    (full,) = open_tiers([Tier(str(far), capacity=older.nbytes + nbytes)])
    claim = Claim(full.backend, Owner.of_this_process("b" * 12))
    claim.take()
    with Workers("copy", 1) as workers:
        StepCopier(full, claim, [tier.backend], FixedGuard()).copy(held, workers)
    assert committed(full.backend) == [held.ref, older.ref]
