"""A pinned step stays until the pin ends, for any order of a pin and a removal."""

from __future__ import annotations

import itertools
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch

from ckpt import CheckpointManager, Tier
from ckpt.catalog.inventory import Inventory
from ckpt.catalog.step_listing import committed, find
from ckpt.errors import AccessDenied, CkptError, ConfigError, NoCheckpoint, OutOfSpace
from ckpt.retention.policy import PIN, Retention, judge
from ckpt.retention.pruner import prune, remove_earlier_steps
from ckpt.retention.removal import remove
from ckpt.root.claim import Claim
from ckpt.root.claim_marker import claim_committed_for_removal, claim_for_finish
from ckpt.root.owner import Owner
from ckpt.root.pins import (
    all_pins,
    is_pinned,
    note_of,
    put_pin,
    remove_pin,
    renew_pin,
    reserve_step,
)
from ckpt.storage.api import StorageBackend, is_there
from ckpt.storage.registry import open_backend
from ckpt.storage.testing import Crash, FaultyBackend, Raise, Rule, SimulatedCrash
from tests.kit.marks import torture
from tests.kit.stores import Wrapped


def save(root: Path, *steps: int, **tier: Any) -> StorageBackend:
    with CheckpointManager(Tier(str(root), **tier)) as manager:
        for step in steps:
            manager.save({"x": torch.full((9,), step)}, step)
    return open_backend(str(root))


def steps(backend: StorageBackend) -> list[int]:
    return sorted(ref.step for ref in committed(backend))


def test_a_pinned_step_outlives_the_retention_of_another_job(tmp_path: Path) -> None:
    backend = save(tmp_path, 1, 2)
    (ref,) = find(backend, 1)
    pin = put_pin(backend, ref, 60, "look at it")
    save(tmp_path, 3, 4, keep_last=1)
    assert steps(backend) == [1, 4]
    assert note_of(backend, pin).reason == "look at it"
    assert "@" in note_of(backend, pin).by

    remove_pin(backend, pin)
    save(tmp_path, 5, keep_last=1)
    assert steps(backend) == [5]


def test_a_step_is_reserved_before_it_is_saved(tmp_path: Path) -> None:
    backend = open_backend(str(tmp_path))
    reserve_step(backend, 2, 60)
    save(tmp_path, 1, 2, 3, keep_last=1)
    assert steps(backend) == [2, 3]
    assert is_pinned(backend, find(backend, 2)[0])
    assert not is_pinned(backend, find(backend, 3)[0])


def test_a_pin_ends_by_itself_an_hour_late(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    backend = save(tmp_path, 1, 2)
    put_pin(backend, find(backend, 1)[0], 60)
    now = time.time()
    monkeypatch.setattr(time, "time", lambda: now + 60 + 3590)
    prune(backend, Retention(keep_last=1))
    assert steps(backend) == [1, 2]
    (judged,) = [
        one
        for one in judge(Inventory(backend).look(), Retention(keep_last=1))
        if one.step.ref.step == 1
    ]
    assert judged.reasons == (PIN,)

    monkeypatch.setattr(time, "time", lambda: now + 60 + 3700)
    prune(backend, Retention(keep_last=1), dry_run=True)
    assert len(all_pins(backend)) == 1
    prune(backend, Retention(keep_last=1))
    assert steps(backend) == [2]
    assert all_pins(backend) == []


def test_a_full_tier_evicts_no_pinned_step(tmp_path: Path) -> None:
    one = 1 << 16
    state = {"x": torch.zeros(one // 4)}
    with CheckpointManager(Tier(str(tmp_path), capacity=3 * one + one // 2)) as manager:
        for step in (1, 2):
            manager.save(state, step)
        backend = open_backend(str(tmp_path))
        held = [put_pin(backend, find(backend, step)[0], 60) for step in (1, 2)]
        manager.save(state, 3)
        with pytest.raises(OutOfSpace, match="these are pinned: 1, 2"):
            manager.save(state, 4)
        assert steps(backend) == [1, 2, 3]
        remove_pin(backend, held[0])
        manager.save(state, 5)
        assert steps(backend) == [2, 3, 5]


def test_a_later_job_that_removes_steps_from_memory_leaves_a_pinned_one(tmp_path: Path) -> None:
    backend = save(tmp_path, 1, 2)
    pin = put_pin(backend, find(backend, 1)[0], 60)
    claim = Claim(backend, Owner.of_this_process("bbbbbbbbbbbb"))
    claim.take()
    remove_earlier_steps(backend, claim)
    assert steps(backend) == [1]
    remove_pin(backend, pin)
    remove_earlier_steps(backend, claim)
    assert steps(backend) == []


class Interrupted(Wrapped):
    """A backend that runs something else right before its ``nth`` call."""

    def __init__(self, backend: StorageBackend, nth: int, other: Callable[[], object]) -> None:
        super().__init__(backend)
        self.nth, self.other, self.calls = nth, other, 0

    def __getattr__(self, name: str) -> Any:
        found = super().__getattr__(name)
        if name not in {"put", "head", "list", "delete", "read_into", "folders"}:
            return found

        def call(*args: Any, **options: Any) -> Any:
            self.calls += 1
            if self.calls == self.nth:
                self.other()
            result = found(*args, **options)
            return list(result) if name in {"list", "folders"} else result

        return call


@pytest.mark.parametrize("stride", [2, *torture(1)])
def test_a_pin_that_succeeds_holds_whatever_two_removals_do_meanwhile(
    tmp_path: Path, stride: int
) -> None:
    """One removal runs, with a pin at any of its calls, and another removal at any call
    of the pin.
    """
    outcomes = set()
    for nth, mth in itertools.product(range(1, 12), range(1, 6, stride)):
        backend = save(tmp_path / f"{nth}-{mth}", 1, 2)
        (ref,) = find(backend, 1)
        first, second = (next(h for h in Inventory(backend).look() if h.ref == ref) for _ in "ab")
        pinned: list[bool] = []

        def pin(backend=backend, ref=ref, mth=mth, second=second, pinned=pinned) -> None:
            try:
                other = lambda: remove(backend, second)  # noqa: E731
                put_pin(Interrupted(backend, mth, other), ref, 60)
            except NoCheckpoint:
                pinned.append(False)
            else:
                pinned.append(True)

        remove(Interrupted(backend, nth, pin), first)
        if not pinned:
            continue
        there = 1 in steps(backend)
        assert there or not pinned[0], (nth, mth)
        assert pinned[0] == is_pinned(backend, ref)
        if there:  # the step is whole
            assert {h.ref.step for h in Inventory(backend).look() if h.state == "committed"} >= {1}
        outcomes.add((pinned[0], there))
    assert {(True, True), (False, False)} <= outcomes


def test_a_pin_cut_off_at_any_call_leaves_the_step_whole(tmp_path: Path) -> None:
    rules = (
        Rule(verb="put", nth=1, fault=Crash()),
        Rule(verb="head", nth=1, fault=Crash()),
        Rule(verb="head", nth=2, fault=Crash()),
    )
    for number, rule in enumerate(rules):
        backend = save(tmp_path / str(number), 1)
        (ref,) = find(backend, 1)
        with pytest.raises(SimulatedCrash):
            put_pin(FaultyBackend(backend, [rule]), ref, 60)
        assert steps(backend) == [1]


@pytest.mark.parametrize("seconds", [0, -1, float("nan"), float("inf"), 367 * 86400])
def test_a_time_out_of_bounds_is_refused(tmp_path: Path, seconds: float) -> None:
    backend = save(tmp_path, 1)
    with pytest.raises(ConfigError, match="366 days"):
        put_pin(backend, find(backend, 1)[0], seconds)
    with pytest.raises(ConfigError, match="at most 200"):
        put_pin(backend, find(backend, 1)[0], 60, "x" * 201)
    assert not (tmp_path / "pins").exists()


def test_a_step_that_is_not_there_cannot_be_pinned(tmp_path: Path) -> None:
    backend = save(tmp_path, 1, 2)
    (ref,) = find(backend, 1)
    prune(backend, Retention(keep_last=1))
    with pytest.raises(NoCheckpoint, match="step 1 is not there"):
        put_pin(backend, ref, 60)
    assert all_pins(backend) == []


def test_a_step_with_the_marker_of_a_killed_finisher_can_be_pinned(tmp_path: Path) -> None:
    backend = save(tmp_path, 1)
    (step,) = Inventory(backend).look()
    assert claim_for_finish(backend, step.ref)
    pin = put_pin(backend, step.ref, 60)
    assert not remove(backend, step)
    remove_pin(backend, pin)


def test_a_step_that_is_being_removed_cannot_be_pinned(tmp_path: Path) -> None:
    backend = save(tmp_path, 1)
    (ref,) = find(backend, 1)
    assert claim_committed_for_removal(backend, ref)
    with pytest.raises(NoCheckpoint, match="step 1 is being removed: if that was cut short, 'ckpt"):
        put_pin(backend, ref, 60)
    assert all_pins(backend) == []


def test_a_renewed_pin_replaces_the_one_before(tmp_path: Path) -> None:
    backend = save(tmp_path, 1)
    first = put_pin(backend, find(backend, 1)[0], 60)
    later = renew_pin(backend, first, 120)
    assert all_pins(backend) == [later]
    assert later.until > first.until


def test_a_pin_is_renewed_after_a_removal_has_given_way(tmp_path: Path) -> None:
    backend = save(tmp_path, 1)
    (held,) = Inventory(backend).look()
    first = put_pin(backend, held.ref, 60)
    assert not remove(backend, held)
    assert is_there(backend, held.ref.claim_marker)
    later = renew_pin(backend, first, 120)
    assert all_pins(backend) == [later]
    assert not remove(backend, held)
    assert steps(backend) == [1]


def test_foreign_and_damaged_files_among_the_pins_are_no_pins(tmp_path: Path) -> None:
    backend = save(tmp_path, 1)
    pin = put_pin(backend, find(backend, 1)[0], 60)
    folder = tmp_path / "pins"
    (folder / pin.key.rpartition("/")[2]).write_bytes(b"\x00garbage")
    for name in ("notes.txt", "step-1.x.5.0", f"step-000000001.abcdef.9.{'g' * 16}"):
        (folder / name).write_text("x")
    assert all_pins(backend) == [pin]
    assert note_of(backend, pin).reason == ""
    remove_pin(backend, pin)
    assert note_of(backend, pin).by == ""


def test_a_store_that_fails_after_the_pin_was_put_leaves_none(tmp_path: Path) -> None:
    backend = save(tmp_path, 1)
    (ref,) = find(backend, 1)

    faulty = FaultyBackend(backend, [Rule(verb="head", fault=Raise(AccessDenied))])
    with pytest.raises(CkptError):
        put_pin(faulty, ref, 60)
    assert all_pins(backend) == []
