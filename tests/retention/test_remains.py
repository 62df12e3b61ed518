"""What may be removed, and what only looks as if it might."""

from __future__ import annotations

import os
import threading
import time
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import msgspec
import pytest
from msgspec.structs import replace

from ckpt.catalog.inventory import Inventory
from ckpt.config import SaveConfig, Tier
from ckpt.coordination.single import SingleCoordinator
from ckpt.errors import AccessDenied, OutOfSpace, TransientStorageError
from ckpt.model.checksum import checksum
from ckpt.model.keys import OWNER, StepRef
from ckpt.model.manifest import FORMAT
from ckpt.retention.evictor import Evictor
from ckpt.retention.policy import FixedGuard, PruneContext, Retention
from ckpt.retention.pruner import Pruner, prune, remove_earlier_steps
from ckpt.retention.quota import Quota
from ckpt.retention.removal import remove
from ckpt.root.claim import Claim, Takeover, TakeoverPost
from ckpt.root.claim_marker import claim_for_finish
from ckpt.root.owner import Owner, read_owner
from ckpt.storage.testing import FaultyBackend, Raise, Rule
from ckpt.storage.tiers import OpenTier, open_tiers

ONE, TWO = "aaaaaaaaaaaa", "bbbbbbbbbbbb"


@pytest.fixture(autouse=True)
def no_ended_attempts(monkeypatch: pytest.MonkeyPatch) -> None:
    """Forget which attempts other tests have ended in this process."""
    monkeypatch.setattr("ckpt.root.owner._ended_attempts", set[str]())


def attempt(
    root: Path,
    step: int,
    of: str,
    *,
    version: int | None = FORMAT,
    days: float = 0.0,
    created_at: int = 1,
) -> Path:
    """Make a folder with a data file of 1,000 bytes, and a manifest of that format unless it is
    None.
    """
    folder = root / StepRef(step, of).folder
    folder.mkdir(parents=True)
    (folder / "rank-00000.safetensors").write_bytes(bytes(1000))
    if version is not None:
        body = (
            f'{{"format":{version},"step":{step},"attempt":"{of}",'
            f'"world_size":1,"created_at":{created_at},"layout_of":[],'
            '"files":[["rank-00000.safetensors",0,1000,[]]],"metadata":{}}'
        ).encode()
        (folder / "manifest.json").write_bytes(
            b'{"checksum":"' + checksum(body).encode() + b'","body":' + body + b"}"
        )
    for path in folder.iterdir():
        os.utime(path, (time.time() - days * 86400,) * 2)
    return folder


def tier(root: Path, **fields: Any) -> OpenTier:
    (opened,) = open_tiers((Tier(str(root), **fields),))
    return opened


def claim_of(root: Path, attempt: str) -> Claim:
    return Claim(tier(root).backend, Owner.of_this_process(attempt))


def room(root: Path, capacity: int) -> Quota:
    coordinator = SingleCoordinator()
    claim = claim_of(root, coordinator.attempt)
    claim.take()
    return Quota(
        tier(root, capacity=capacity),
        coordinator,
        claim,
        FixedGuard(),
        timeout=5,
    )


def test_a_checkpoint_of_a_later_format_is_nobodys_to_remove(tmp_path: Path) -> None:
    later = attempt(tmp_path, 10, ONE, version=9, days=30)
    attempt(tmp_path, 20, TWO)
    assert prune(tier(tmp_path).backend, Retention(keep_last=1), PruneContext(own=TWO)) == []
    assert later.exists()


def test_nor_does_it_go_for_room(tmp_path: Path) -> None:
    later = attempt(tmp_path, 10, ONE, version=9, days=30)
    with pytest.raises(OutOfSpace):
        room(tmp_path, 1500).agree(StepRef(20, TWO), 0, 1000, restored_ref=None)
    assert later.exists()


def owned_by(root: Path, attempt: str, *, machine: str | None = None) -> None:
    """Let the root belong to a job of another process.

    It has ended, or it may live on another ``machine``.
    """
    owner = Owner.of_this_process(attempt)
    owner = replace(owner, machine=machine) if machine else replace(owner, started=1)
    tier(root).backend.put(OWNER, [msgspec.json.encode(owner)])


def test_what_a_dead_job_left_goes_for_room_however_young(tmp_path: Path) -> None:
    whole, remains = attempt(tmp_path, 10, ONE), attempt(tmp_path, 20, ONE, version=None)
    owned_by(tmp_path, ONE)
    room(tmp_path, 2500).agree(StepRef(20, TWO), 0, 1000, restored_ref=StepRef(10, ONE))
    assert whole.exists()
    assert not remains.exists()


def test_what_jobs_left_that_died_one_after_the_other_goes_too(tmp_path: Path) -> None:
    """Each of them was the owner's predecessor once, and its owner had seen that it was dead."""
    remains = [attempt(tmp_path, 20 + n, of, version=None) for n, of in enumerate((ONE, TWO))]
    for of in (ONE, TWO):
        owned_by(tmp_path, of) if of == ONE else claim_of(tmp_path, of).take()
    taken = read_owner(tier(tmp_path).backend)
    assert taken is not None
    tier(tmp_path).backend.put(OWNER, [msgspec.json.encode(replace(taken, started=1))])
    room(tmp_path, 1500).agree(StepRef(30, "c" * 12), 0, 1000, restored_ref=None)
    assert [folder.exists() for folder in remains] == [False, False]


def test_what_was_begun_today_by_a_job_that_may_live_stays(tmp_path: Path) -> None:
    """It is on another machine, has lost the root, and may be about to put its manifest."""
    young = attempt(tmp_path, 20, ONE, version=None)
    old = attempt(tmp_path, 21, ONE, version=None, days=2)
    owned_by(tmp_path, ONE, machine="elsewhere")
    with pytest.raises(OutOfSpace):
        room(tmp_path, 1500).agree(StepRef(30, TWO), 0, 1000, restored_ref=None)
    assert (young.exists(), old.exists()) == (True, True)


def test_what_was_begun_days_ago_goes(tmp_path: Path) -> None:
    old = attempt(tmp_path, 21, ONE, version=None, days=2)
    owned_by(tmp_path, ONE, machine="elsewhere")
    room(tmp_path, 1500).agree(StepRef(30, TWO), 0, 1000, restored_ref=None)
    assert not old.exists()


def test_a_partial_cache_of_the_running_job_goes_when_it_is_old(tmp_path: Path) -> None:
    attempt(tmp_path, 10, ONE)
    old = attempt(tmp_path, 5, ONE, version=None, days=2)
    young = attempt(tmp_path, 6, ONE, version=None)
    prune(tier(tmp_path).backend, Retention(keep_last=1), PruneContext(own=ONE))
    assert not old.exists()
    assert young.exists()


def test_a_manifest_that_cannot_be_read_stops_no_pruning(tmp_path: Path) -> None:
    (attempt(tmp_path, 5, ONE) / "manifest.json").write_bytes(b"nonsense")
    gone, kept = attempt(tmp_path, 10, ONE), attempt(tmp_path, 20, ONE)
    prune(tier(tmp_path).backend, Retention(keep_last=1), PruneContext(own=ONE))
    assert not gone.exists()
    assert kept.exists()


def test_ranks_that_make_room_at_once_take_off_nothing_that_must_stay(tmp_path: Path) -> None:
    """Several ranks meet a full disk in the same moment, and each of them looks and removes."""
    for step in range(1, 9):
        attempt(tmp_path, step, ONE)
    waited_for = frozenset({StepRef(3, ONE)})
    gate = threading.Barrier(6)

    def rank(_: int) -> bool:
        evictor = Evictor(
            tier(tmp_path, capacity="1GB"),
            claim_of(tmp_path, ONE),
            FixedGuard(waited_for),
        )
        gate.wait()
        return evictor.evict(StepRef(9, ONE), 2500, restored_ref=None)

    with ThreadPoolExecutor(6) as ranks:
        outcomes = list(ranks.map(rank, range(6)))
    assert any(outcomes)
    left = {held.ref.step: held.state for held in Inventory(tier(tmp_path).backend).look()}
    assert left[3] == left[8] == "committed"
    assert set(left.values()) == {"committed"}  # no step is half removed
    assert 1 not in left


def test_what_a_finisher_left_that_never_came_back_goes_in_the_end(tmp_path: Path) -> None:
    """For example, its disk was full: there was room for the mark, and not for the manifest."""
    backend, ref = tier(tmp_path).backend, StepRef(5, ONE)
    attempt(tmp_path, 10, TWO)
    left = attempt(tmp_path, 5, ONE, version=None, days=30)
    assert claim_for_finish(backend, ref)

    def days_later(days: float) -> list[int]:
        """Return how many files are left, and the size of the mark."""
        if (mark := left / "claim").exists():
            os.utime(mark, (time.time() - days * 86400,) * 2)
        prune(backend, Retention(keep_last=1), PruneContext(own=TWO))
        return [len(list(left.iterdir())), mark.stat().st_size] if left.exists() else []

    count, size = days_later(0.5)
    assert (count, size > 0) == (2, True)  # it may be running
    assert days_later(2) == [2, 0]  # the pruner's mark has replaced it
    assert not claim_for_finish(backend, ref)
    assert days_later(0.5) == [2, 0]
    assert days_later(2) == []


def test_a_folder_that_cannot_be_removed_keeps_no_other_from_being_removed(tmp_path: Path) -> None:
    stuck, gone, kept = (attempt(tmp_path, step, ONE) for step in (1, 2, 3))
    backend = FaultyBackend(
        tier(tmp_path).backend, [Rule(verb="delete", key=stuck.name, fault=Raise(AccessDenied))]
    )
    with pytest.raises(AccessDenied):
        prune(backend, Retention(keep_last=1), PruneContext(own=ONE))
    assert (stuck.exists(), gone.exists(), kept.exists()) == (True, False, True)


def test_a_store_that_does_not_answer_is_not_asked_for_every_folder(tmp_path: Path) -> None:
    for step in range(1, 6):
        attempt(tmp_path, step, ONE)
    backend = FaultyBackend(
        tier(tmp_path).backend, [Rule(verb="delete", fault=Raise(TransientStorageError))]
    )
    with pytest.raises(TransientStorageError):
        prune(backend, Retention(keep_last=1), PruneContext(own=ONE))
    assert [call.verb for call in backend.calls].count("delete") == 1


def evictor(root: Path, capacity: int, claim: Claim) -> Evictor:
    there = tier(root, capacity=capacity)
    return Evictor(there, claim, FixedGuard())


def cut_off(root: Path, step: int, of: str, nbytes: int) -> Path:
    """Leave a write that a kill has cut off, alone in the folder of its step."""
    folder = root / StepRef(step, of).folder
    folder.mkdir(parents=True)
    (folder / ".rank-00000.safetensors.0123456789ab.tmp").write_bytes(bytes(nbytes))
    return folder


def test_the_cut_off_writes_of_a_dead_job_go_before_any_step(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    caplog.set_level("INFO", "ckpt")
    steps = [attempt(tmp_path, step, ONE) for step in (1, 2)]
    left = [cut_off(tmp_path, step, ONE, 40_960) for step in (3, 4, 5)]
    (tmp_path / OWNER).write_bytes(
        msgspec.json.encode(replace(Owner.of_this_process(ONE), started=1))
    )
    claim = claim_of(tmp_path, TWO)
    claim.take()
    evictor(tmp_path, 140_000, claim).evict_to_capacity(StepRef(6, TWO), 20_000, restored_ref=None)
    assert sum(folder.exists() for folder in left) == 2
    assert all(folder.exists() for folder in steps)
    assert "what was begun of step 5 was evicted" in caplog.text
    assert "which gives 41" in caplog.text


def test_the_cut_off_writes_of_a_job_that_may_live_stay_and_are_counted(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    caplog.set_level("INFO", "ckpt")
    steps = [attempt(tmp_path, step, TWO) for step in (1, 2)]
    theirs = cut_off(tmp_path, 3, ONE, 40_960)
    claim = claim_of(tmp_path, TWO)
    claim.take()
    evictor(tmp_path, 46_000, claim).evict_to_capacity(StepRef(6, TWO), 3500, restored_ref=None)
    assert (theirs.exists(), steps[0].exists(), steps[1].exists()) == (True, False, True)
    assert "step 3" not in caplog.text
    with pytest.raises(OutOfSpace):
        evictor(tmp_path, 46_000, claim).evict_to_capacity(
            StepRef(6, TWO), 30_000, restored_ref=None
        )


def test_a_step_that_cannot_be_removed_gives_no_room(tmp_path: Path) -> None:
    steps = [attempt(tmp_path, step, TWO) for step in (1, 2, 3)]
    claim = claim_of(tmp_path, TWO)
    claim.take()
    stuck = FaultyBackend(
        tier(tmp_path).backend, [Rule(verb="delete", key=steps[0].name, fault=Raise(AccessDenied))]
    )
    there = OpenTier(0, Tier(str(tmp_path), capacity=4000), stuck)
    Evictor(there, claim, FixedGuard()).evict_to_capacity(StepRef(4, TWO), 1000, restored_ref=None)
    assert [step.exists() for step in steps] == [True, False, True]


def test_a_rank_that_does_not_lead_makes_no_room_of_what_the_job_before_has_committed(
    tmp_path: Path,
) -> None:
    steps = [attempt(tmp_path, step, ONE) for step in (1, 2, 3)]
    left = cut_off(tmp_path, 4, ONE, 40_960)
    (tmp_path / OWNER).write_bytes(
        msgspec.json.encode(replace(Owner.of_this_process(ONE), started=1))
    )
    # the leader, which knows that a farther tier still needs some of them
    claim_of(tmp_path, TWO).take()
    other = Pruner(
        tier(tmp_path, keep_last=1),
        claim_of(tmp_path, TWO),
        FixedGuard(),
        SaveConfig(),
        leads=False,
    )
    assert other.evict(None)
    other.close()
    assert not left.exists()
    assert all(step.exists() for step in steps)


@pytest.mark.parametrize(
    ("restored", "needed", "stay"),
    [(None, (), [3]), (1, (), [1, 3]), (None, (2,), [2, 3])],
)
def test_a_job_removes_before_its_first_save_what_a_killed_job_did_not_come_to(
    tmp_path: Path, restored: int | None, needed: tuple[int, ...], stay: list[int]
) -> None:
    steps = [attempt(tmp_path, step, ONE) for step in (1, 2, 3)]
    (tmp_path / OWNER).write_bytes(
        msgspec.json.encode(replace(Owner.of_this_process(ONE), started=1))
    )
    claim = claim_of(tmp_path, TWO)
    claim.take()
    guard = FixedGuard([StepRef(step, ONE) for step in needed])
    pruner = Pruner(tier(tmp_path, keep_last=1), claim, guard, SaveConfig(), leads=True)
    pruner.remove_remains(StepRef(restored, ONE) if restored else None)
    assert [step for step, folder in enumerate(steps, 1) if folder.exists()] == stay
    pruner.close()


@pytest.mark.parametrize("what", ["clear", "prune"])
def test_a_node_keeps_its_part_of_a_step_that_another_node_may_list(
    tmp_path: Path, what: str
) -> None:
    part = attempt(tmp_path, 3, ONE, version=None)
    (part / "rank-00000.json").write_bytes(b"{}")
    # its fragment is missing, so no node lists this one
    cut = attempt(tmp_path, 4, ONE, version=None)
    (tmp_path / OWNER).write_bytes(
        msgspec.json.encode(replace(Owner.of_this_process(ONE), started=1))
    )
    claim = claim_of(tmp_path, TWO)
    claim.take()
    pruner = Pruner(tier(tmp_path, local=True), claim, FixedGuard(), SaveConfig(), leads=True)
    pruner.remove_remains(None) if what == "clear" else pruner.request_run()
    pruner.close()
    assert (part.exists(), cut.exists()) == (True, False)


@pytest.mark.parametrize("left", ["data", "write"])
@pytest.mark.parametrize("what", ["clear", "prune"])
def test_a_restore_that_was_killed_while_it_copied_costs_a_node_nothing_of_its_part(
    tmp_path: Path, left: str, what: str
) -> None:
    """It was copying the file of rank 5, of another node, to the same folder as that of rank 0."""
    part = attempt(tmp_path, 3, ONE, version=None)
    (part / "rank-00000.json").write_bytes(b"{}")
    if left == "data":
        (part / "rank-00005.safetensors").write_bytes(bytes(1000))
    else:
        other = cut_off(tmp_path, 4, ONE, 40_960)
        for path in other.iterdir():
            path.rename(part / path.name.replace("rank-00000", "rank-00005"))
        other.rmdir()
    (tmp_path / OWNER).write_bytes(
        msgspec.json.encode(replace(Owner.of_this_process(ONE), started=1))
    )
    claim = claim_of(tmp_path, TWO)
    claim.take()
    pruner = Pruner(tier(tmp_path, local=True), claim, FixedGuard(), SaveConfig(), leads=True)
    pruner.remove_remains(None) if what == "clear" else pruner.request_run()
    pruner.close()
    assert {"rank-00000.json", "rank-00000.safetensors"} <= {path.name for path in part.iterdir()}


def test_a_full_node_gives_up_its_part_of_a_step_but_for_the_one_that_was_restored(
    tmp_path: Path,
) -> None:
    parts = [attempt(tmp_path, step, ONE, version=None) for step in (3, 4)]
    for part in parts:
        (part / "rank-00000.json").write_bytes(b"{}")
    (tmp_path / OWNER).write_bytes(
        msgspec.json.encode(replace(Owner.of_this_process(ONE), started=1))
    )
    claim = claim_of(tmp_path, TWO)
    claim.take()
    pruner = Pruner(tier(tmp_path, local=True), claim, FixedGuard(), SaveConfig(), leads=True)
    assert pruner.evict(StepRef(4, ONE))
    pruner.close()
    assert [part.exists() for part in parts] == [False, True]


@pytest.mark.parametrize("what", ["clear", "evict"])
def test_a_node_keeps_its_part_of_the_restored_step_however_old_it_is(
    tmp_path: Path, what: str
) -> None:
    parts = [attempt(tmp_path, step, ONE, version=None) for step in (3, 4)]
    for part in parts:
        (part / "rank-00000.json").write_bytes(b"{}")
        for path in part.iterdir():
            os.utime(path, (time.time() - 2 * 86400,) * 2)
    (tmp_path / OWNER).write_bytes(
        msgspec.json.encode(replace(Owner.of_this_process(ONE), started=1))
    )
    claim = claim_of(tmp_path, TWO)
    claim.take()
    here = tier(tmp_path, local=True, capacity=1500)
    if what == "clear":
        pruner = Pruner(here, claim, FixedGuard(), SaveConfig(), leads=True)
        pruner.remove_remains(StepRef(4, ONE))
        pruner.close()
    else:
        room = Evictor(here, claim, FixedGuard())
        room.evict_to_capacity(StepRef(5, TWO), 400, restored_ref=StepRef(4, ONE))
        with pytest.raises(OutOfSpace):
            room.evict_to_capacity(StepRef(5, TWO), 1000, restored_ref=StepRef(4, ONE))
    assert [part.exists() for part in parts] == [False, True]


def test_a_rank_that_does_not_lead_evicts_only_what_its_job_answers_for(tmp_path: Path) -> None:
    """The leader found step 1 when it took the root.

    Another job has saved step 2 since, and closed.
    """
    steps = [attempt(tmp_path, 1, ONE), attempt(tmp_path, 2, "c" * 12), attempt(tmp_path, 3, TWO)]
    posted = TakeoverPost(SingleCoordinator(), 0)
    posted.post(Takeover(frozenset([StepRef(1, ONE)]), None))
    follower = Claim(tier(tmp_path).backend, Owner.of_this_process(TWO), takeover_post=posted)
    assert evictor(tmp_path, 10_000, follower).evict(StepRef(4, TWO), 2000, restored_ref=None)
    assert [step.exists() for step in steps] == [False, True, True]


def test_what_the_job_goes_on_from_stays_on_a_node_that_does_not_list_it(tmp_path: Path) -> None:
    """Another node lists step 12, which was restored. This one has its part, and lists step 10."""
    listed, restored, older = (
        attempt(tmp_path, 10, ONE),
        attempt(tmp_path, 12, ONE, version=None),
        attempt(tmp_path, 9, ONE),
    )
    for folder in (listed, restored, older):
        (folder / "rank-00000.json").write_bytes(b"{}")
    (tmp_path / OWNER).write_bytes(
        msgspec.json.encode(replace(Owner.of_this_process(ONE), started=1))
    )
    claim = claim_of(tmp_path, TWO)
    claim.take()
    remove_earlier_steps(tier(tmp_path).backend, claim, restored_ref=StepRef(12, ONE), part=True)
    assert [folder.exists() for folder in (listed, restored, older)] == [True, True, False]
    remove_earlier_steps(tier(tmp_path).backend, claim, part=True)
    assert [folder.exists() for folder in (listed, restored)] == [False, False]


@pytest.mark.parametrize("is_restored", [True, False])
def test_of_two_attempts_at_a_step_the_one_that_a_restart_needs_stays(
    tmp_path: Path, is_restored: bool
) -> None:
    """It is the restored one, or else the youngest. Its name says nothing about that."""
    abandoned = attempt(tmp_path, 7, "c" * 12, created_at=3 if is_restored else 1)
    needed = attempt(tmp_path, 7, TWO, created_at=2)
    claim = claim_of(tmp_path, "d" * 12)
    claim.take()
    capacity = 2 * sum(path.stat().st_size for path in needed.iterdir())
    restored = StepRef(7, TWO) if is_restored else None
    room = evictor(tmp_path, capacity, claim)
    room.evict_to_capacity(StepRef(8, "d" * 12), 1000, restored_ref=restored)
    assert (abandoned.exists(), needed.exists()) == (False, True)


@pytest.mark.parametrize("nbytes", [0, 40_960])
def test_a_step_that_is_committed_while_its_folder_without_files_is_removed_stays(
    tmp_path: Path, nbytes: int
) -> None:
    """For example, ``ckpt copy`` copies the step."""
    backend, ref = tier(tmp_path).backend, StepRef(5, ONE)
    left = cut_off(tmp_path, 5, ONE, nbytes) if nbytes else tmp_path / ref.folder
    left.mkdir(exist_ok=True)
    (held,) = Inventory(backend).look()
    backend.put(ref.manifest, [b"{}"])
    remove(backend, held)
    assert [path.name for path in left.iterdir()] == ["manifest.json"]
    backend.delete(ref.manifest)
    left.mkdir(exist_ok=True)
    remove(backend, held)
    assert not left.exists()


def test_remains_that_are_evicted_for_two_reasons_give_their_room_once(tmp_path: Path) -> None:
    """They are old, and they are a copy that this job makes."""
    steps = [attempt(tmp_path, step, ONE) for step in (1, 2)]
    remains = attempt(tmp_path, 3, ONE, version=None, days=2)
    claim = claim_of(tmp_path, TWO)
    claim.take()
    claim.note_copy(StepRef(3, ONE))
    newest = sum(path.stat().st_size for path in steps[1].iterdir())
    room = evictor(tmp_path, newest + 500, claim)
    with pytest.raises(OutOfSpace):
        room.evict_to_capacity(StepRef(4, TWO), 1000, restored_ref=None)
    room.evict_to_capacity(StepRef(4, TWO), 500, restored_ref=None)
    assert [folder.exists() for folder in (remains, *steps)] == [False, False, True]


def test_a_folder_of_somebody_else_in_the_root_keeps_no_remains_there(tmp_path: Path) -> None:
    left = attempt(tmp_path, 3, ONE, version=None)
    (tmp_path / "logs of 10:55:01").mkdir()  # no key of a store has such a name
    (tmp_path / OWNER).write_bytes(
        msgspec.json.encode(replace(Owner.of_this_process(ONE), started=1))
    )
    claim = claim_of(tmp_path, TWO)
    claim.take()
    pruner = Pruner(tier(tmp_path), claim, FixedGuard(), SaveConfig(), leads=True)
    pruner.remove_remains(None)
    pruner.close()
    assert not left.exists()
