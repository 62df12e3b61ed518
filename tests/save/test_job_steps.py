"""What the threads of one job know about its steps."""

from __future__ import annotations

import threading
from pathlib import Path

import pytest

from ckpt.config import Tier
from ckpt.errors import AccessDenied
from ckpt.model.keys import StepRef, data_name, fragment_name
from ckpt.model.rollback import roll_back
from ckpt.save.job_steps import IMAGE, EarlierSteps, JobSteps, TierSteps
from ckpt.save.slot_steps import SlotSteps
from ckpt.storage.registry import open_backend
from ckpt.storage.testing import FaultyBackend, Raise, Rule
from ckpt.storage.tiers import OpenTier, open_tiers

ONE, TWO, THREE = (StepRef(step, "a" * 12) for step in (1, 2, 3))


@pytest.fixture
def tiers(tmp_path: Path) -> tuple[OpenTier, ...]:
    return open_tiers([Tier(str(tmp_path / name)) for name in ("near", "far")])


def test_a_step_waits_until_every_tier_and_its_image_are_done_with_it(tiers) -> None:
    steps = JobSteps(tiers)
    steps.begin_waiting(ONE, IMAGE)
    steps.begin_waiting(ONE, "far")
    steps.begin_waiting(TWO, "far")
    assert steps.awaited_refs() == {ONE, TWO}
    assert steps.end_waiting(ONE, IMAGE)
    assert not steps.end_waiting(ONE, IMAGE), "a slot is released once"
    assert steps.awaited_refs() == {ONE, TWO}
    assert steps.end_waiting(ONE, "far")
    assert steps.awaited_refs() == {TWO}


def test_who_waits_for_an_idle_tier_goes_on_when_it_is_idle_or_when_told_to_stop(tiers) -> None:
    steps, stop, through = JobSteps(tiers), threading.Event(), list[str]()
    steps.begin_waiting(ONE, "far")

    def wait(name: str) -> threading.Thread:
        thread = threading.Thread(
            target=lambda: (steps.wait_idle("far", stop), through.append(name))
        )
        thread.start()
        return thread

    first = wait("idle")
    steps.end_waiting(ONE, "far")
    first.join(30)
    steps.begin_waiting(TWO, "far")
    second = wait("stopped")
    stop.set()
    steps.wake()
    second.join(30)
    assert through == ["idle", "stopped"]


def test_what_the_job_restored_bounds_what_counts_as_durable(tiers) -> None:
    near, _ = tiers
    steps = JobSteps(tiers)
    assert (steps.restored, steps.durable_step) == (None, -1)
    steps.set_committed(near, THREE)
    steps.set_committed(near, TWO)
    assert steps.durable_step == 3
    steps.set_restored(ONE)
    assert (steps.restored, steps.durable_step) == (ONE, 1)


def test_an_abandoned_step_that_is_committed_late_does_not_count(tiers) -> None:
    """The step of the new branch is in memory alone, and must stay there."""
    near, far = tiers
    abandoned, branched = THREE, TWO.retry(1)
    steps = JobSteps(tiers)
    slots = SlotSteps(0, steps)
    steps.rollback = roll_back([], ONE, [THREE], trials={ONE.job: 1})
    steps.set_restored(ONE)
    slots.set_restored(ONE)
    slots.keep("slot", near, branched)
    slots.set_committed(branched)
    far.backend.put(abandoned.manifest, [b"{}"])
    steps.set_committed(far, abandoned)
    slots.set_committed(abandoned)
    assert steps.durable_step == -1
    assert slots.is_needed("slot")
    assert not TierSteps(steps, near).is_elsewhere(branched)


def test_a_step_is_elsewhere_while_another_tier_has_it_or_a_newer_one_of_this_job(tiers) -> None:
    near, far = tiers
    steps = JobSteps(tiers)
    guard = TierSteps(steps, near)
    assert not guard.is_elsewhere(ONE)
    far.backend.put(ONE.manifest, [b"{}"])
    assert guard.is_elsewhere(ONE)
    assert not guard.is_elsewhere(TWO)
    far.backend.put(TWO.manifest, [b"{}"])
    steps.set_committed(far, TWO)
    far.backend.delete(ONE.manifest)
    assert guard.is_elsewhere(ONE), "the newer one does too"
    assert guard.is_elsewhere(TWO)
    assert not guard.is_elsewhere(THREE)
    assert not TierSteps(steps, far).is_elsewhere(TWO), "its own steps are not elsewhere"


def test_a_step_that_was_evicted_from_another_tier_is_not_elsewhere(tiers) -> None:
    near, far = tiers
    steps = JobSteps(tiers)
    near.backend.put(TWO.manifest, [b"{}"])
    steps.set_committed(near, TWO)
    assert TierSteps(steps, far).is_elsewhere(TWO)
    near.backend.delete(TWO.manifest)
    assert not TierSteps(steps, far).is_elsewhere(TWO)


def test_a_step_on_a_tier_that_does_not_answer_is_not_elsewhere(tiers, tmp_path: Path) -> None:
    near, _ = tiers
    backend = FaultyBackend(
        open_backend(str(tmp_path / "far")),
        [Rule(verb="head", fault=Raise(lambda key: AccessDenied(key, "down")))],
    )
    far = OpenTier(1, Tier(str(tmp_path / "far")), backend)
    steps = JobSteps((near, far))
    backend.put(TWO.manifest, [b"{}"])
    steps.set_committed(far, TWO)
    assert not TierSteps(steps, near).is_elsewhere(TWO), "an eviction may have removed it"


def test_a_store_is_not_asked_while_this_job_has_committed_only_older_steps_there(
    tiers, tmp_path: Path
) -> None:
    near, _ = tiers
    backend = FaultyBackend(open_backend(str(tmp_path / "far")), [])
    far = OpenTier(1, Tier(str(tmp_path / "far")), backend)
    steps = JobSteps((near, far))
    steps.set_committed(far, ONE)
    assert not TierSteps(steps, near).is_elsewhere(TWO)
    assert backend.calls == []


def test_steps_of_the_job_before_stay_until_the_backfill_is_done_with_them(tiers) -> None:
    near = tiers[0].backend
    for ref in (ONE, StepRef(2, "b" * 12)):
        near.put(ref.manifest, [b"{}"])
    earlier = EarlierSteps(tiers, "b" * 12, 30)
    steps = JobSteps(tiers, earlier)
    assert steps.protected_refs(tiers[0]) == frozenset(), "nothing was restored"
    steps.set_restored(ONE)
    assert steps.protected_refs(tiers[0]) == {ONE}, "before the first commit: all of other jobs"
    assert earlier.note_first_commit() == ONE
    assert earlier.note_first_commit() is None, "a backfill begins once"
    earlier.set_owed([ONE])
    steps.begin_waiting(THREE, "far")
    assert steps.protected_refs(tiers[0]) == {ONE, THREE}
    earlier.set_owed([])
    assert steps.protected_refs(tiers[0]) == {THREE}


def test_a_job_that_has_saved_before_its_first_restore_fills_no_tier(tiers) -> None:
    near, _ = tiers
    near.backend.put(ONE.manifest, [b"{}"])
    earlier = EarlierSteps(tiers, "b" * 12, 30)
    steps = JobSteps(tiers, earlier)
    steps.set_committed(near, StepRef(2, "b" * 12))
    steps.set_restored(ONE)
    assert steps.protected_refs(near) == frozenset()
    assert earlier.note_first_commit() is None


def test_all_steps_stay_on_a_tier_that_the_backfill_cannot_list(tiers) -> None:
    near, far = tiers
    farthest = OpenTier(2, far.tier, far.backend)
    for tier in tiers:
        tier.backend.put(ONE.manifest, [b"{}"])
    earlier = EarlierSteps((near, far, farthest), "b" * 12, 30)
    earlier.set_restored(ONE)
    assert earlier.note_first_commit() == ONE
    earlier.set_unlisted(far)
    earlier.set_owed([])
    assert (earlier.needed_refs(near), earlier.needed_refs(far)) == (frozenset(), {ONE})
    assert (earlier.is_owed(near, ONE), earlier.is_owed(far, ONE)) == (False, True)


def test_no_pruner_waits_for_a_backfill_that_has_failed(tiers) -> None:
    near, _ = tiers
    near.backend.put(ONE.manifest, [b"{}"])
    earlier = EarlierSteps(tiers, "b" * 12, patience_seconds=3600)
    earlier.set_restored(ONE)
    assert earlier.note_first_commit() == ONE
    earlier.end_listing()
    assert earlier.needed_refs(near) == {ONE}
    assert earlier.is_owed(near, ONE)


def test_a_step_whose_copies_this_node_keeps_stays_on_that_tier_alone(tiers) -> None:
    near, far = tiers
    steps = JobSteps(tiers, copied_refs=lambda tier: frozenset([ONE] if tier is near else []))
    assert (steps.protected_refs(near), steps.protected_refs(far)) == ({ONE}, frozenset())


def test_a_job_that_restored_nothing_has_nothing_to_fill(tiers) -> None:
    earlier = EarlierSteps(tiers, "b" * 12, 30)
    assert earlier.note_first_commit() is None
    assert earlier.needed_refs(tiers[0]) == frozenset()


def test_a_step_in_a_slot_is_removed_manifest_first_and_stays_kept_if_that_fails(
    tmp_path: Path,
) -> None:
    names = (ONE.manifest, ONE.key(fragment_name(0)), ONE.key(data_name(0, is_encoded=False)))
    inner = open_backend(str(tmp_path))
    for name in names:
        inner.put(name, [b"x"])
    fault = Rule(verb="delete", key=names[1], nth=1, fault=Raise(AccessDenied(names[1])))
    backend = FaultyBackend(inner, [fault])
    tier, slots = OpenTier(0, Tier(str(tmp_path)), backend), SlotSteps(0, JobSteps([]))
    slots.keep("/dev/shm/slot", tier, ONE)
    assert (slots.step_in("/dev/shm/slot"), slots.newest()) == (1, 1)
    assert slots.step_in("/dev/shm/other") == -1
    with pytest.raises(AccessDenied):
        slots.evict("/dev/shm/slot")
    assert slots.kept_by(tier) == {"/dev/shm/slot": ONE}
    assert {info.key for info in inner.list(ONE.folder)} == set(names[1:])
    slots.evict("/dev/shm/slot")
    assert (list(inner.list(ONE.folder)), slots.newest()) == ([], -1)
