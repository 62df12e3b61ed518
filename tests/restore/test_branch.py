"""A restore of an older step begins a branch, and the later steps are abandoned."""

from __future__ import annotations

import shutil
import subprocess
import threading
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest
import torch
from msgspec.structs import replace
from torch import nn

import ckpt
from ckpt import CheckpointManager, Tier
from ckpt.catalog.branches import put_branch
from ckpt.catalog.candidates import candidates
from ckpt.catalog.rollbacks import all_rollbacks, newest_rollback
from ckpt.catalog.step_listing import committed, find
from ckpt.catalog.watching import Watcher
from ckpt.config import SaveConfig
from ckpt.errors import (
    AccessDenied,
    ConfigError,
    NoCheckpoint,
    StorageError,
    TransientStorageError,
)
from ckpt.events import Observers, RolledBack
from ckpt.model.keys import StepRef, rollback_key
from ckpt.model.rollback import Rollback, roll_back
from ckpt.model.selector import BranchStep
from ckpt.pending import SaveRecord
from ckpt.pipeline.workers import Workers
from ckpt.retention import pruner
from ckpt.root.owner import Owner, put_owner
from ckpt.root.pins import put_pin
from ckpt.save.ledger import SaveLedger
from ckpt.storage.registry import open_backend
from ckpt.storage.testing import Crash, Raise, Rule, SimulatedCrash
from tests.coordination.world import World
from tests.kit.states import restored, state
from tests.kit.stores import faulty, whole


def run(tiers: Any, *steps: int, **settings: Any) -> None:
    with CheckpointManager(tiers, **settings) as manager:
        for step in steps:
            manager.save(state(step), step)


def go_back(tiers: Any, step: int | str, **how: Any) -> None:
    with CheckpointManager(tiers) as manager:
        restored(manager, state(0), step=step, **how)


def newest(tiers: Any) -> tuple[int, float]:
    """Return the step that a restore takes, and the value of the state."""
    with CheckpointManager(tiers) as manager:
        target = state(0)
        report = restored(manager, target)
        assert manager.latest_step() == report.step
        assert manager.steps()[-1] == report.step
        return report.step, target["x"][0].item()


def test_a_job_that_dies_before_its_first_save_has_gone_back(near):
    run(near, 5, 6, 7)
    go_back(near, 5)
    assert newest(near) == (5, 5)
    assert whole(near) == [5, 6, 7], "nothing is removed"


def test_all_tiers_know_and_one_is_enough(near, far):
    tiers = [str(near), str(far)]
    run(tiers, 5, 6, 7)
    go_back(tiers, 5)
    assert newest(far) == (5, 5)
    shutil.rmtree(near)
    assert newest(tiers) == (5, 5)
    (far / rollback_key(1)).unlink()  # What read-through has put into the near folder counts too
    go_back(tiers, 7)
    assert newest(tiers) == (7, 7)


def test_the_next_job_saves_the_same_numbers_again(near):
    run(near, 5, 6, 7)
    go_back(near, 5)
    with CheckpointManager(near) as manager:
        restored(manager, state(0))
        for step in (6, 7):
            manager.save(state(10 * step), step)
    assert newest(near) == (7, 70)
    with CheckpointManager(near) as manager:
        target = state(0)
        restored(manager, target, step=6)
        assert target["x"][0] == 60, "of two attempts, the one of the current branch"


def test_the_same_manager_saves_the_same_numbers_again(near, far):
    tiers = [str(near), str(far)]
    trained = state(0)
    with CheckpointManager(tiers) as manager:
        for value in (1, 10, 100):
            for step in (1, 2, 3):
                if value > 1 and step == 1:
                    restored(manager, trained, step=1)
                    continue
                trained["x"].fill_(value * step)
                manager.save(trained, step)
            assert manager.steps() == [1, 2, 3]
    assert newest(tiers) == newest(far) == (3, 300)
    assert len(committed(open_backend(str(far)))) == 7


def test_an_abandoned_branch_can_be_taken_up_again(near):
    run(near, 1, 2, 3)
    go_back(near, 1)
    run_on(near, 2, 20)
    go_back(near, 3)
    with CheckpointManager(near) as manager:
        assert manager.steps() == [1, 2, 3]
        target = state(0)
        restored(manager, target, step=2)
        assert target["x"][0] == 2
    assert [record.step for record in all_rollbacks(open_backend(str(near)))] == [1, 3, 2]


def test_a_branch_that_is_taken_up_again_without_a_loss_abandons_nothing(near, caplog):
    run(near, 1, 2, 3)
    go_back(near, 1)
    assert "later steps are abandoned" in caplog.text
    caplog.clear()
    go_back(near, 3)
    assert "step 3: it is on the current branch again, and no step is abandoned" in caplog.text
    go_back(near, 2)
    assert "step 2: later steps are abandoned" in caplog.text


def test_a_branch_that_is_taken_up_again_abandons_the_lower_steps_of_the_present_one(near, caplog):
    run(near, 10, 20, 30, 40, 50)
    go_back(near, 20)
    run_on(near, 30, 300)
    run_on(near, 40, 400)
    caplog.clear()
    go_back(near, 50)
    assert "step 50: steps of the branch until now are abandoned" in caplog.text
    assert newest(near) == (50, 50)


def run_on(tiers: Any, step: int, value: int) -> None:
    with CheckpointManager(tiers) as manager:
        restored(manager, state(0))
        manager.save(state(value), step)


def test_saves_under_way_are_abandoned(gated, far):
    trained = state(0)
    gated.open.set()
    with CheckpointManager(str(far), slots=3) as manager:
        for step in (5, 6, 7):
            trained["x"].fill_(step)
            save = manager.save_async(trained, step)
            if step == 5:
                save.result()
                gated.open.clear()  # No tier has anything of the later steps yet
        restored(manager, trained, step=5)
        gated.open.set()
        trained["x"].fill_(60)
        manager.save(trained, 6)
    assert newest(far) == (6, 60)


@pytest.mark.parametrize("step", [6, None, "latest~0"])
def test_a_step_whose_save_is_under_way_is_waited_for(gated, far, step):
    trained = state(0)
    gated.open.set()
    with CheckpointManager(str(far)) as manager:
        manager.save(trained, 5)
        gated.open.clear()
        trained["x"].fill_(6)
        save = manager.save_async(trained, 6)
        save.wait_staged()
        trained["x"].fill_(60)
        threading.Timer(0.3, gated.open.set).start()
        restored(manager, trained, step=step)
    assert int(trained["x"][0]) == 6
    assert newest(far) == (6, 6)


def test_the_newest_step_is_waited_for_only_for_a_while(gated, far, monkeypatch):
    monkeypatch.setattr("ckpt.save.ledger._NEWEST_STEP_SECONDS", 0.1)
    trained = state(0)
    gated.open.set()
    with CheckpointManager(str(far)) as manager:
        manager.save(trained, 5)
        gated.open.clear()
        manager.save_async(trained, 6).wait_staged()
        assert restored(manager, trained).step == 5
        gated.open.set()


@pytest.mark.parametrize("step", ["latest~1", "best:loss"])
def test_a_step_is_looked_up_among_all_saves_under_way(near, gated, far, step):
    trained = state(0)
    gated.open.set()
    with CheckpointManager([Tier(str(near), every=2), str(far)]) as manager:
        manager.save(trained, 4, metrics={"loss": 3.0})
        gated.open.clear()
        for number, loss in ((5, 1.0), (6, 2.0)):
            trained["x"].fill_(number)
            save = manager.save_async(trained, number, metrics={"loss": loss})
            save.wait_staged()
        save.result(30, tier=str(near))
        threading.Timer(0.3, gated.open.set).start()
        report = restored(manager, trained, step=step)
    assert (report.step, int(trained["x"][0])) == (5, 5)


def test_a_save_whose_thread_has_not_begun_is_abandoned_too(near):
    trained, gate = state(5), threading.Event()
    with CheckpointManager(str(near)) as manager:
        manager.save(trained, 5)
        manager._saver._streamer.submit(gate.wait, 30)
        trained["x"].fill_(6)
        manager.save_async(trained, 6)
        restored(manager, trained, step=5)
        gate.set()
        trained["x"].fill_(60)
        manager.save(trained, 6)
    assert newest(near) == (6, 60)


@pytest.mark.parametrize("how", [{"only": "x"}, {"rollback": False}])
def test_a_restore_of_a_part_or_for_an_evaluation_begins_nothing(near, how):
    run(near, 5, 6)
    go_back(near, 5, **how)
    assert newest(near) == (6, 6)


def test_the_restore_of_the_newest_step_begins_nothing(near):
    run(near, 5, 6)
    go_back(near, 6)
    assert newest_rollback(open_backend(str(near))) is None


def test_the_restore_of_the_newest_step_of_a_branch_reads_no_history(near, monkeypatch):
    run(near, 5, 6)
    go_back(near, 5)
    monkeypatch.setattr("ckpt.restore.branch.all_rollbacks", lambda _store: pytest.fail("read"))
    go_back(near, 5)


@pytest.mark.parametrize("has_saved", [False, True])
def test_a_restore_into_other_tensors_than_those_of_the_job_begins_nothing(near, has_saved):
    trained, other = {"model": nn.Linear(3, 3)}, {"model": nn.Linear(3, 3)}
    with CheckpointManager(near) as manager:
        for step in (1, 2):
            manager.save(trained, step)
    with CheckpointManager(near) as manager:
        restored(manager, trained)
        if has_saved:
            manager.save(trained, 3)
        restored(manager, other, step=1)
        assert manager.latest_step() == 2 + has_saved


@contextmanager
def owned_by_another(root: Path, **changes: Any) -> Iterator[None]:
    """Let another process of this machine own the root."""
    process = subprocess.Popen(["sleep", "60"])
    try:
        started = int(Path(f"/proc/{process.pid}/stat").read_text().rpartition(")")[2].split()[19])
        owner = Owner.of_this_process("otherz")
        own = replace(owner, pid=process.pid, started=started, program="", **changes)
        put_owner(open_backend(str(root)), own)
        yield
    finally:
        process.kill()
        process.wait()


def test_beside_a_living_job_nothing_begins(near):
    run(near, 5, 6)
    with owned_by_another(near):
        go_back(near, 5)
        assert newest(near) == (6, 6)


def test_beside_a_job_on_another_machine_nothing_begins_before_the_first_save(near, far):
    """An evaluation of an old step must not move a training that it cannot see."""
    tiers = [str(near), str(far)]
    run(tiers, 5, 6, 7)
    for root in (near, far):
        with owned_by_another(root, machine="another"):
            pass
    go_back(tiers, 5)
    assert newest(tiers) == (7, 7)
    with CheckpointManager(tiers) as manager:
        restored(manager, state(0), step=5)
        assert manager.steps() == [5], "this manager knows the branch"
        assert manager.latest_step() == 5
        assert restored(manager, state(0)).step == 5
        manager.save(state(60), 6)
    assert newest(tiers) == newest(near) == newest(far) == (6, 60)


def test_a_tier_that_was_away_gets_the_rollback_with_the_first_save(near, far, monkeypatch):
    tiers = [str(near), str(far)]
    run(tiers, 5, 6, 7)
    with monkeypatch.context() as patch:
        faulty(patch, far, [Rule(verb="put", key="rollbacks", fault=Raise(StorageError))])
        go_back(tiers, 5)
    assert newest(far) == (7, 7)
    run_on(tiers, 6, 60)
    assert newest(far) == (6, 60)


def refuse_rollbacks(patch: pytest.MonkeyPatch, root: Path, **fault: Any) -> None:
    """Let ``root`` take no rollback, as if it were away at the moment of the rollback."""
    faulty(patch, root, [Rule(verb="put", key="rollbacks", fault=Raise(StorageError), **fault)])


def test_the_same_job_puts_the_rollback_on_a_tier_that_was_away_with_its_next_save(
    near, far, monkeypatch
):
    tiers: list[Any] = [str(near), Tier(str(far), keep_last=1)]
    refuse_rollbacks(monkeypatch, far, nth=1)
    trained = state(0)
    with CheckpointManager(tiers) as manager:
        for step in (5, 6, 7):
            trained["x"].fill_(step)
            manager.save(trained, step)
        restored(manager, trained, step=5)
        assert newest(far) == (7, 7)
        trained["x"].fill_(60)
        manager.save(trained, 6)
    assert newest(far) == (6, 60)
    assert whole(far) == [6], "retention does not take the abandoned step 7 for the newest"


def test_a_restore_puts_the_rollback_on_a_tier_that_was_away(near, far, monkeypatch):
    tiers = [str(near), str(far)]
    run(tiers, 5, 6, 7)
    with monkeypatch.context() as patch:
        refuse_rollbacks(patch, far)
        go_back(tiers, 5)
    assert newest(tiers) == (5, 5)
    assert newest(far) == (5, 5)


def test_a_restore_that_may_not_write_leaves_the_tier_that_was_away(near, far, monkeypatch, caplog):
    tiers = [str(near), str(far)]
    run(tiers, 5, 6, 7)
    with monkeypatch.context() as patch:
        refuse_rollbacks(patch, far)
        go_back(tiers, 5)
    caplog.clear()
    with monkeypatch.context() as patch:
        faulty(patch, far, [Rule(verb="put", fault=Raise(AccessDenied))])
        assert newest(tiers) == (5, 5)
    assert not [record for record in caplog.records if "rollback" in record.message]
    assert newest(far) == (7, 7)


def test_the_backfill_judges_no_copy_beside_abandoned_steps(near, far, monkeypatch):
    """The farther tier has only abandoned steps, and was away at the rollback."""
    tiers = [str(near), Tier(str(far), keep_last=1)]
    run(near, 5)
    run(str(far), 8, 9)
    with monkeypatch.context() as patch:
        refuse_rollbacks(patch, far)
        go_back(tiers, 5)
    run_on([str(near), Tier(str(far), keep_last=1, every=5)], 6, 60)
    assert newest(far) == (5, 5), "step 5 is copied, and steps 8 and 9 are not the newest"


def test_a_save_of_the_abandoned_branch_that_fails_late_frees_no_number():
    ledger = SaveLedger(Observers(()), SaveConfig(on_error="warn"))
    old, new = (SaveRecord(6, 0, None, began=0.0) for _ in range(2))
    first = StepRef(6, "a" * 12)
    ledger.begin(old, first, owner=ledger)
    ledger.begin_branch(rollback_to(5, first))
    ledger.begin(new, first.retry(1), owner=ledger)
    ledger.end(old, StorageError("", "the old one"))
    assert ledger.has(6), "the new save of step 6 is under way"


def rollback_to(step: int, *heads: StepRef, after: Sequence[Rollback] = ()) -> Rollback:
    ref = StepRef(step, heads[0].attempt)
    trials = {ref.job: max(head.trial for head in heads) + 1}
    rollback = roll_back(after, ref, heads, trials=trials)
    assert rollback is not None
    return rollback


def test_a_branch_that_is_taken_up_again_has_its_own_saves_and_no_others():
    """Step 3 of the first branch was saved, and step 2 of the second one fails late."""
    ledger = SaveLedger(Observers(()), SaveConfig(on_error="warn"))
    saves = {name: SaveRecord(int(name[0]), 0, None, began=0.0) for name in ("1", "2", "3", "2b")}
    first = [StepRef(step, "a" * 12) for step in (1, 2, 3)]
    for ref in first:
        ledger.begin(saves[str(ref.step)], ref, owner=ledger)
        ledger.end(saves[str(ref.step)], None)
    back = rollback_to(1, first[-1])
    ledger.begin_branch(back)
    assert not ledger.has(2)
    second = first[1].retry(1)
    ledger.begin(saves["2b"], second, owner=ledger)
    again = rollback_to(3, first[-1], second, after=[back])
    ledger.begin_branch(again)
    assert ledger.has(3), "it would be saved a second time on its branch"
    ledger.end(saves["2b"], StorageError("", "of the second branch"))
    assert ledger.has(2), "that of the first branch"


def test_a_restore_waits_for_the_save_before_a_newest_one_that_fails():
    ledger = SaveLedger(Observers(()), SaveConfig(on_error="warn"))
    saves = {
        ref: SaveRecord(ref.step, 0, None, began=0.0)
        for ref in (StepRef(5, "a" * 12), StepRef(6, "a" * 12))
    }
    for ref, save in saves.items():
        ledger.begin(save, ref, owner=ledger)
    old, new = saves.values()
    threading.Timer(0.1, ledger.end, [new, StorageError("", "the newest one")]).start()
    threading.Timer(0.3, ledger.end, [old, None]).start()
    ledger.await_restorable(None)
    assert old.done()


def test_observers_learn_of_it(near):
    run(near, 5, 6)
    events: list[object] = []
    with CheckpointManager(near, observers=[events.append]) as manager:
        restored(manager, state(0), step=5)
    assert RolledBack(step=5, number=1) in events


# -- ranks ----------------------------------------------------------------------------------------


def test_all_ranks_agree_on_the_branch(near, far):
    def job(coordinator: Any) -> tuple[list[int], float]:
        with CheckpointManager([str(near), str(far)], coordinator=coordinator) as manager:
            mine = {f"x{coordinator.rank}": torch.zeros(100)}
            for step in (1, 2, 3):
                mine[f"x{coordinator.rank}"].fill_(step)
                manager.save(mine, step)
            restored(manager, mine, step=1)
            for step in (2, 3):
                mine[f"x{coordinator.rank}"].fill_(10 * step)
                manager.save(mine, step)
            restored(manager, mine)
            return manager.steps(), mine[f"x{coordinator.rank}"][0].item()

    results = World(4, patience=60).run(job)
    assert results == dict.fromkeys(range(4), ([1, 2, 3], 30.0))


# -- stores that fail -----------------------------------------------------------------------------


def test_a_tier_that_takes_nothing_is_named_and_the_others_count(near, far, monkeypatch, caplog):
    tiers = [str(near), str(far)]
    run(tiers, 5, 6)
    with monkeypatch.context() as patch:
        faulty(patch, far, [Rule(verb="put", key="rollbacks", fault=Raise(StorageError))])
        go_back(tiers, 5)
    assert f"the rollback to step 5 is not on {far}" in caplog.text
    assert newest(tiers) == (5, 5)


def test_if_no_tier_takes_it_the_restore_says_so(near, monkeypatch):
    run(near, 5, 6)
    with monkeypatch.context() as patch:
        faulty(patch, near, [Rule(verb="put", key="rollbacks", fault=Raise(StorageError))])
        with pytest.raises(StorageError, match="step 5 is restored, but the later steps are not"):
            go_back(near, 5)
    assert newest(near) == (6, 6)


def test_an_evaluation_that_may_only_read_restores_an_older_step(near, monkeypatch, caplog):
    run(near, 5, 6)
    with monkeypatch.context() as patch:
        faulty(patch, near, [Rule(verb="put", fault=Raise(AccessDenied))])
        go_back(near, 5)
    assert "step 5 is restored, but the later steps are not abandoned" in caplog.text
    assert newest(near) == (6, 6)


def test_a_lost_reply_is_no_failure(near, monkeypatch):
    run(near, 5, 6)
    rule = Rule(verb="put", key="rollbacks", nth=1, fault=Raise(TransientStorageError))
    faulty(monkeypatch, near, [rule])
    go_back(near, 5)
    assert newest(near) == (5, 5)


@pytest.mark.parametrize("when", ["before", "after"])
@pytest.mark.parametrize("where", ["near", "far"])
def test_a_crash_leaves_the_old_branch_or_the_new_one(near, far, monkeypatch, when, where):
    tiers = [str(near), str(far)]
    run(tiers, 5, 6)
    with monkeypatch.context() as patch:
        root = near if where == "near" else far
        faulty(patch, root, [Rule(verb="put", key="rollbacks", fault=Crash(when))])
        manager = CheckpointManager(tiers)
        with pytest.raises(SimulatedCrash):
            restored(manager, state(0), step=5)
    step, value = newest(tiers)
    assert step == value
    assert step in (5, 6)
    if when == "after":
        assert step == 5


def test_a_record_that_is_damaged_is_named_and_not_believed(near, caplog):
    run(near, 5, 6, 7)
    go_back(near, 6)
    go_back(near, 5)
    path = near / rollback_key(2)
    path.write_bytes(path.read_bytes()[:-9])
    assert newest(near) == (6, 6), "the rollback before counts"
    assert "a rollback on" in caplog.text
    (near / "rollbacks" / "notes.txt").write_text("a file of another program")
    assert newest(near) == (6, 6)


def test_a_damaged_record_gives_its_number_to_the_next_rollback(near):
    run(near, 5, 6, 7)
    go_back(near, 6)
    (near / rollback_key(2)).write_bytes(b"{")
    go_back(near, 5)
    assert newest(near) == (5, 5)


def test_a_record_under_the_name_of_another_is_not_believed(near, caplog):
    run(near, 5, 6, 7)
    go_back(near, 5)
    go_back(near, 7)
    (near / rollback_key(9)).write_bytes((near / rollback_key(1)).read_bytes())
    assert newest(near) == (7, 7)
    assert "it is rollback 1" in caplog.text


def test_if_the_branch_has_no_step_any_more_all_steps_count_with_a_warning(near, caplog):
    run(near, 5, 6, 7)
    go_back(near, 5)
    shutil.rmtree(next(near.glob("step-000000005.*")))
    assert newest(near) == (7, 7)
    assert "step 7 was abandoned, and it is the newest step that is left" in caplog.text
    assert find(open_backend(str(near)), None)[0].step == 7


def test_a_damaged_branch_gives_no_abandoned_step(near):
    run(near, 5, 6)
    go_back(near, 5)
    data = next(near.glob("step-000000005.*/rank-00000.safetensors"))
    data.write_bytes(data.read_bytes()[:-8] + bytes([255] * 8))
    with CheckpointManager(near) as manager, pytest.raises(NoCheckpoint, match="no step is intact"):
        manager.restore(state(0))


def test_readers_of_the_newest_step_take_that_of_the_branch(near):
    run(near, 5, 6, 7)
    go_back(near, 5)
    store = open_backend(str(near))
    assert [ref.step for ref in committed(store)] == [5, 7, 6]
    assert [step.step for step in Watcher(store, "publish", newest=True).look()] == [5]
    assert [step.step for step in Watcher(store, "all").look()] == [5, 6, 7]
    assert set(ckpt.load(str(near))) == {"x"}
    assert ckpt.load(str(near), "x")[0] == 5


# -- what the caller removes at once ---------------------------------------------------------------


def test_the_newer_steps_go_at_once_from_all_tiers_if_the_caller_says_so(near, far):
    tiers = [str(near), str(far)]
    run(tiers, 5, 6, 7)
    put_pin(open_backend(str(far)), find(open_backend(str(far)), 6)[0], 60)
    go_back(tiers, 5, discard_newer=True)
    assert (whole(near), whole(far)) == ([5], [5, 6]), "a pinned step stays"
    assert newest(tiers) == (5, 5)
    assert len(all_rollbacks(open_backend(str(near)))) == 1


def test_a_manager_that_saves_removes_its_newer_steps_and_goes_on(near, far):
    trained = state(0)
    with CheckpointManager([str(near), str(far)]) as manager:
        for step in (1, 2, 3):
            trained["x"].fill_(step)
            manager.save(trained, step)
        restored(manager, trained, step=1, discard_newer=True)
        assert manager.steps() == whole(near) == whole(far) == [1]
        trained["x"].fill_(20)
        manager.save(trained, 2)
    assert newest(far) == (2, 20)
    assert len(committed(open_backend(str(near)))) == 2


def test_nothing_goes_if_no_branch_begins(near):
    run(near, 5, 6)
    with owned_by_another(near):
        go_back(near, 5, discard_newer=True)
    with owned_by_another(near, machine="another"):
        go_back(near, 5, discard_newer=True)
    assert whole(near) == [5, 6]


def test_a_tier_that_fails_keeps_the_steps_for_retention(near, far, monkeypatch, caplog):
    tiers = [str(near), str(far)]
    run(tiers, 5, 6)
    with monkeypatch.context() as patch:
        faulty(patch, far, [Rule(verb="delete", fault=Raise(StorageError))])
        go_back(tiers, 5, discard_newer=True)
    assert whole(near) == [5]
    assert f"abandoned steps stay on {far} for now" in caplog.text
    assert newest(tiers) == (5, 5)


@pytest.mark.parametrize("how", [{}, {"step": 5, "only": "x"}, {"step": 5, "rollback": False}])
def test_a_discard_without_a_rollback_is_refused(near, how):
    run(near, 5, 6)
    with CheckpointManager(near) as manager, pytest.raises(ConfigError, match="discard_newer"):
        manager.restore(state(0), discard_newer=True, **how)
    assert whole(near) == [5, 6]


# -- named branches --------------------------------------------------------------------------------


def test_a_named_branch_is_restored_by_its_name_after_the_run_has_gone_back(near):
    run(near, 1, 2, 3)
    store = open_backend(str(near))
    put_branch(store, BranchStep("first.try"), find(store, 3)[0])
    go_back(near, 1)
    with CheckpointManager(Tier(str(near), keep_last=1)) as manager:
        restored(manager, state(0))
        for step in (2, 3):
            manager.save(state(10 * step), step)
    assert whole(near) == [3], "of two attempts at step 3, retention keeps both"
    assert len(committed(store)) == 2
    with CheckpointManager(near) as manager:
        target = state(0)
        restored(manager, target, step="branch:first.try")
        assert target["x"][0] == 3
        assert manager.latest_step() == 3
    assert newest(near) == (3, 3)
    assert ckpt.load(str(near), "x", step="branch:first.try")[0] == 3
    with CheckpointManager(near) as manager, pytest.raises(NoCheckpoint, match="second"):
        manager.restore(state(0), step="branch:second")


# -- what is removed, and when --------------------------------------------------------------------


@pytest.fixture
def rivals(near: Path, far: Path) -> tuple[StepRef, StepRef]:
    """A run of two attempts at its newest step, the older one first. The farther tier alone had the
    older one, and was away when the younger one was saved.
    """
    run([near, far], 1)
    run(near, 2)
    (older,) = [ref for ref in committed(open_backend(str(near))) if ref.step == 2]
    (near / older.folder).rename(far / older.folder)
    run_on(near, 2, 20)
    (younger,) = [ref for ref in committed(open_backend(str(near))) if ref.step == 2]
    assert newest([near, far]) == (2, 20)
    return older, younger


def test_going_back_to_an_attempt_holds_against_a_younger_one_of_the_same_number(
    near, far, rivals, caplog
):
    put_branch(open_backend(str(far)), BranchStep("mine"), rivals[0])
    go_back([near, far], "branch:mine")
    assert "step 2: other attempts at it are abandoned" in caplog.text
    assert newest([near, far]) == (2, 2)
    go_back([near, far], 2)
    go_back([near, far], "branch:mine")
    assert [record.number for record in all_rollbacks(open_backend(str(near)))] == [1]


def test_going_back_to_the_younger_of_two_attempts_leaves_it_alone_on_the_branch(near, far, rivals):
    go_back([near, far], 2)
    assert newest([near, far]) == (2, 20)
    (record,) = all_rollbacks(open_backend(str(near)))
    assert [record.keeps(ref) for ref in rivals] == [False, True]


def test_an_attempt_that_is_no_checkpoint_is_no_rival(near):
    run(near, 1, 2)
    (near / StepRef(2, "b" * 12).folder).mkdir()
    (near / StepRef(2, "b" * 12).folder / "rank-00000.json").write_bytes(b"{}")
    go_back(near, 2)
    assert not all_rollbacks(open_backend(str(near)))


def test_abandoned_steps_go_first_but_not_before_the_branch_has_a_step(near):
    tier = Tier(str(near), keep_last=2)
    run(near, 5, 6, 7, 8)
    go_back(tier, 6)
    assert whole(near) == [5, 6, 7, 8]
    run_on(tier, 7, 70)
    assert newest(near) == (7, 70)
    assert whole(near) == [6, 7]
    assert len(committed(open_backend(str(near)))) == 2


def test_a_pruning_under_way_leaves_the_restored_step(near, monkeypatch):
    """It was decided before the restore that the step goes."""
    decided, go = threading.Event(), threading.Event()
    judge_now = pruner.judge_now

    def late(*args, **how):
        verdicts = judge_now(*args, **how)
        if any(verdict.step.ref.step == 3 for verdict in verdicts):
            decided.set()
            assert go.wait(30)
        return verdicts

    monkeypatch.setattr(pruner, "judge_now", late)
    with CheckpointManager(Tier(str(near), keep_last=2)) as manager:
        trained = state(0)
        for step in (1, 2, 3):
            trained["x"].fill_(step)
            manager.save(trained, step)
        assert decided.wait(30)
        restored(manager, trained, step=1)
        go.set()
    assert newest(near) == (1, 1)


def test_a_full_tier_evicts_abandoned_steps_first(near):
    run(near, 5, 6, 7)
    go_back(near, 6)
    tier = Tier(str(near), capacity="1500KB")  # Three steps of 404 kB
    run_on(tier, 7, 70)
    assert [(ref.step) for ref in committed(open_backend(str(near)))] == [7, 6, 5]
    assert newest(near) == (7, 70)


def test_a_policy_that_keeps_all_keeps_abandoned_steps(near):
    run(near, 5, 6)
    go_back(near, 5)
    run_on(near, 6, 60)
    assert len(committed(open_backend(str(near)))) == 3


def test_a_store_without_a_rollback_is_listed_by_one_request(near):
    run(near, 5, 6)
    listings: list[str] = []
    store = open_backend(str(near))
    folders = store.folders
    store.folders = lambda prefix: listings.append(prefix) or folders(prefix)  # type: ignore[method-assign,func-returns-value]
    store.list = lambda prefix: pytest.fail(f"{prefix} is listed")  # type: ignore[method-assign]
    with Workers("list", 1) as workers:
        assert next(candidates([store], None, workers=workers)).ref.step == 6
    assert listings == [""]
