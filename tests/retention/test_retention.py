"""What a tier keeps, as a training job sees it."""

from __future__ import annotations

import json
import os
import threading
import time
from pathlib import Path

import pytest
import torch

from ckpt import CheckpointManager, Tier
from ckpt.catalog.step_listing import committed
from ckpt.errors import ConfigError, HistoryHidden
from ckpt.retention.policy import PruneContext, Retention
from ckpt.retention.pruner import prune
from ckpt.storage.registry import open_backend
from ckpt.storage.testing import Crash, FaultyBackend, Rule, SimulatedCrash
from tests.cli.conftest import cli  # noqa: F401 - a fixture
from tests.kit.stores import Wrapped, faulty, whole, wrap_stores


def saved(root: Path, steps: list[int], **tier) -> None:
    with CheckpointManager(Tier(str(root), **tier)) as manager:
        for step in steps:
            manager.save({"x": torch.full((9,), step)}, step)


def age(folder: Path, hours: float) -> None:
    """Make all in ``folder`` look as if it was put ``hours`` ago."""
    for path in folder.iterdir():
        os.utime(path, (time.time() - hours * 3600,) * 2)


def test_old_steps_go_once_newer_ones_are_committed_and_strangers_files_stay(tmp_path):
    saved(tmp_path, [1])
    (tmp_path / "notes.txt").write_text("mine")
    (folder,) = tmp_path.glob("step-*")
    (folder / "plot.png").write_text("also mine")
    saved(tmp_path, [2, 5, 6, 7, 10, 11], keep_last=2, keep_every=5)
    assert whole(tmp_path) == [5, 10, 11]
    assert (tmp_path / "notes.txt").read_text() == "mine"
    assert [path.name for path in folder.iterdir()] == ["plot.png"]


def test_steps_of_an_earlier_job_go_though_the_clock_was_set_back_since(tmp_path):
    saved(tmp_path, [1, 2])
    for folder in tmp_path.glob("step-*"):
        age(folder, hours=-24)
    saved(tmp_path, [3, 4], keep_last=1)
    assert whole(tmp_path) == [4]


def test_each_tier_keeps_by_its_own_rule(tmp_path):
    near, far = tmp_path / "near", tmp_path / "far"
    with CheckpointManager([Tier(str(near), keep_last=1), Tier(str(far), every=2)]) as manager:
        for step in range(1, 6):
            manager.save({"x": torch.ones(3)}, step)
    assert (whole(near), whole(far)) == ([5], [2, 4])


def test_a_rollback_never_costs_the_steps_of_the_running_job(tmp_path):
    saved(tmp_path, [1, 2, 3])
    before = set(committed(open_backend(str(tmp_path))))
    with CheckpointManager(Tier(str(tmp_path), keep_last=1)) as manager:
        manager.restore({"x": torch.zeros(9, dtype=torch.int64)}, step=1)
        manager.save({"x": torch.ones(9)}, 2)
    assert [ref.step for ref in set(committed(open_backend(str(tmp_path)))) - before] == [2]
    assert 2 in whole(tmp_path)


def test_a_prune_cut_anywhere_leaves_whole_checkpoints_and_the_next_one_ends_it(tmp_path):
    for at in range(1, 12):
        root = tmp_path / str(at)
        saved(root, [1, 2, 3])
        backend = FaultyBackend(
            open_backend(str(root)), [Rule(verb="delete", key="", nth=at, fault=Crash())]
        )
        try:
            prune(backend, Retention(keep_last=1))
        except SimulatedCrash:
            assert set(whole(root)) >= {3}
            prune(
                open_backend(str(root)),
                Retention(keep_last=1),
                PruneContext(grace_seconds=0, includes_undated=True),
            )
        assert whole(root) == [3]
        assert len(list(root.glob("step-*"))) == 1, at


def test_remains_are_left_alone_while_somebody_may_still_commit_them(tmp_path):
    saved(tmp_path, [1, 2, 3])
    for manifest in sorted(tmp_path.glob("step-*/manifest.json"))[:2]:
        manifest.unlink()
    backend = open_backend(str(tmp_path))
    assert prune(backend, Retention(keep_last=5)) == []
    old, young = sorted(tmp_path.glob("step-*"))[:2]
    (old / "rank-00000.json").unlink()
    # the store says that it is young
    assert prune(backend, Retention(keep_last=5), PruneContext(includes_undated=True)) == []
    dry = prune(backend, Retention(keep_last=5), PruneContext(grace_seconds=-1), dry_run=True)
    assert [(one.ref.step, one.state) for one in dry] == [(1, "incomplete"), (2, "incomplete")]
    assert len(list(tmp_path.glob("step-*"))) == 3
    age(old, hours=25)
    assert [one.ref.step for one in prune(backend, Retention(keep_last=5))] == [1]
    assert (old.exists(), young.exists()) == (False, True)


def test_a_store_that_cannot_delete_costs_no_save(tmp_path, monkeypatch, caplog):
    from ckpt.errors import AccessDenied
    from ckpt.storage.testing import Raise

    faulty(
        monkeypatch,
        tmp_path,
        [Rule(verb="delete", key="manifest", nth=None, fault=Raise(AccessDenied("k", "no")))],
    )
    saved(tmp_path, [1, 2], keep_last=1)
    assert whole(tmp_path) == [1, 2]
    assert "were not removed" in caplog.text


def test_saves_are_pruned_beside_the_saving_and_not_in_it(tmp_path, monkeypatch):
    over = threading.Event()
    waited: list[bool] = []

    class Slow(Wrapped):
        def delete(self, key: str) -> None:
            waited.append(over.wait(60))  # the wait would time out if the removal ran in the saves
            self.inner.delete(key)

    wrap_stores(monkeypatch, lambda url, store: Slow(store))
    manager = CheckpointManager(Tier(str(tmp_path), keep_last=1))
    for step in range(4):
        manager.save({"x": torch.ones(3)}, step)
    assert len(list(tmp_path.glob("step-*/manifest.json"))) == 4
    over.set()
    manager.close()
    assert whole(tmp_path) == [3]
    assert waited
    assert all(waited)


def test_memory_keeps_what_its_slots_hold(tmp_path):
    with pytest.raises(ConfigError, match="leave keep_last out"):
        CheckpointManager([Tier("memory", keep_last=1), Tier(str(tmp_path))])


def test_from_the_command_line(cli, tmp_path):  # noqa: F811
    root = tmp_path / "runs"
    saved(root, [1, 2, 3, 4])
    assert cli("prune").code == 2
    dry = cli("prune", "--keep-last", 1, "--keep-every", 2, "--dry-run", "--json")
    assert [one["step"] for one in dry.json["pruned"]] == [1, 3]
    assert whole(root) == [1, 2, 3, 4]
    done = cli("prune", "--keep-last", 1, "--keep-every", 2)
    assert done.code == 0
    assert "2 steps removed" in done.out
    assert whole(root) == [2, 4]
    (tmp_path / "ckpt.toml").write_text('[[tiers]]\nurl = "runs"\nkeep_last = 1\n')
    os.environ.pop("CKPT_ROOT")
    assert json.loads(cli("prune", "--json").out)["pruned"][0]["step"] == 2


def dead(root: Path, *, fragments: bool, hours: float) -> Path:
    """Make what a job has left that died in the middle of step 7."""
    folder = root / "step-000000007.deadbeefzzzz"
    folder.mkdir(parents=True)
    (folder / "rank-00000.safetensors").write_bytes(b"x" * 5000)
    if fragments:
        (folder / "rank-00001.json").write_text("{}")
    (folder / ".rank-00002.safetensors.0123456789ab.tmp").write_bytes(b"y" * 5000)
    age(folder, hours)
    return folder


@pytest.mark.parametrize("rule", [{}, {"keep_last": 2}])
@pytest.mark.parametrize("fragments", [False, True])
def test_what_a_dead_job_has_left_goes_after_the_grace_time(tmp_path, rule, fragments):
    old = dead(tmp_path / "old", fragments=fragments, hours=25)
    young = dead(tmp_path / "young", fragments=fragments, hours=23)
    for folder in (old, young):
        saved(folder.parent, [8], **rule)
        assert whole(folder.parent) == [8]
    assert (old.exists(), young.exists()) == (False, True)
    assert len(list(young.iterdir())) == 2 + fragments


def test_only_cut_off_writes_are_left_in_a_folder(tmp_path):
    folder = dead(tmp_path, fragments=False, hours=2)
    (folder / "rank-00000.safetensors").unlink()
    saved(tmp_path, [8])
    assert not folder.exists()


def test_a_checkpoint_goes_with_the_cut_off_writes_in_its_folder(tmp_path):
    """A process that is killed while it writes the manifest leaves such a write. Another process
    may then commit the step.
    """
    saved(tmp_path, [1, 2])
    folder = next(tmp_path.glob("step-000000001.*"))
    (folder / ".manifest.json.0123456789ab.tmp").write_bytes(b"y")
    (tmp_path / ".notes.0123456789ab.tmp").write_bytes(b"not of a step")
    backend = open_backend(str(tmp_path))
    prune(backend, Retention(keep_last=1), PruneContext(own="another"))
    assert whole(tmp_path) == [2]
    assert not folder.exists()
    assert (tmp_path / ".notes.0123456789ab.tmp").exists()


def test_a_checkpoint_that_has_lost_files_does_not_count_and_goes_after_the_grace_time(
    tmp_path,
    cli,  # noqa: F811
):
    root = tmp_path / "runs"
    saved(root, [1, 2, 3, 4])
    folders = sorted(root.glob("step-*"))
    for folder in folders[2:]:
        (folder / "rank-00000.safetensors").unlink()
    age(folders[3], hours=25)
    backend = open_backend(str(root))
    listed = {one["step"]: one["state"] for one in cli("ls", "--json").json["steps"]}
    assert listed == {1: "committed", 2: "committed", 3: "damaged", 4: "damaged"}
    gone = prune(backend, Retention(keep_last=1))
    assert [(one.ref.step, one.state) for one in gone] == [(1, "committed"), (4, "damaged")]
    assert [path.name[:14] for path in sorted(root.glob("step-*"))] == [
        "step-000000002",
        "step-000000003",
    ]
    age(folders[2], hours=25)
    assert [one.ref.step for one in prune(backend, Retention(keep_last=1))] == [3]


def test_the_last_that_is_left_stays_though_it_has_lost_files(tmp_path):
    saved(tmp_path, [1])
    (folder,) = tmp_path.glob("step-*")
    (folder / "rank-00000.safetensors").unlink()
    age(folder, hours=99)
    assert prune(open_backend(str(tmp_path)), Retention(keep_last=1)) == []


def test_a_listing_that_lags_behind_costs_nothing(tmp_path):
    saved(tmp_path, [1, 2, 3])
    for folder in tmp_path.glob("step-*"):
        age(folder, hours=99)

    class Lagging(Wrapped):
        def list(self, prefix):
            return (
                info for info in self.inner.list(prefix) if not info.key.endswith(".safetensors")
            )

    lagging = Lagging(open_backend(str(tmp_path)))
    assert [one.ref.step for one in prune(lagging, Retention(keep_last=2))] == [1]
    assert whole(tmp_path) == [2, 3]


def test_steps_behind_those_of_another_run_are_refused_and_a_restore_settles_it(tmp_path, caplog):
    saved(tmp_path, [100, 200])
    with CheckpointManager(tmp_path) as manager:
        with pytest.raises(HistoryHidden, match=f"{tmp_path} holds step 200 of an earlier job"):
            manager.save({"x": torch.ones(9)}, 1)
        manager.save({"x": torch.ones(9)}, 300)
    with CheckpointManager(tmp_path) as manager:
        manager.restore({"x": torch.zeros(9, dtype=torch.int64)}, step=100, rollback=False)
        manager.save({"x": torch.ones(9)}, 150)
        assert f"{tmp_path} holds step 300, and this job continues from step 100" in caplog.text
    with CheckpointManager(tmp_path) as manager:
        manager.restore({"x": torch.zeros(9, dtype=torch.int64)}, step=100)
        caplog.clear()
        manager.save({"x": torch.ones(9)}, 160)
        assert "holds step" not in caplog.text
        assert manager.steps() == [100, 160]
    assert whole(tmp_path) == [100, 150, 160, 200, 300]


def test_a_tier_that_keeps_all_is_looked_through_for_remains_once_in_a_job(tmp_path, monkeypatch):
    backend = FaultyBackend(open_backend(str(tmp_path)))
    monkeypatch.setattr("ckpt.storage.tiers.open_backend", lambda url, options: backend)
    saved(tmp_path, [1, 2, 3, 4, 5])
    # one for the owner of the root, and one for the remains
    assert [call.verb for call in backend.calls].count("folders") == 2


def test_saves_that_are_committed_during_the_look_for_remains_cause_no_other(tmp_path, monkeypatch):
    backend, over = FaultyBackend(open_backend(str(tmp_path))), threading.Event()

    class Slow(Wrapped):
        def folders(self, prefix: str):
            if threading.current_thread().name.startswith("ckpt-prune"):
                assert over.wait(60)
            return backend.folders(prefix)

    monkeypatch.setattr("ckpt.storage.tiers.open_backend", lambda url, options: Slow(backend))
    with CheckpointManager(str(tmp_path)) as manager:
        for step in range(3):
            manager.save({"x": torch.ones(3)}, step)
        over.set()
    assert [call.verb for call in backend.calls].count("folders") == 2


def test_prune_says_why_remains_stay_and_which_option_another_one_adds_to(tmp_path, cli):  # noqa: F811
    root = tmp_path / "runs"
    saved(root, [1])
    dead(root, fragments=True, hours=2)
    for extra in ([], ["--dry-run"]):
        ran = cli("prune", "runs", "--keep-last", 1, *extra)
        assert ran.code == 0
        assert "remains of 1 save stay until they are a day old" in ran.out
    for option, value in (("--keep-best", "loss:min"), ("--keep-every", "5")):
        ran = cli("prune", "runs", option, value)
        assert ran.code == 2
        assert f"{option} adds to --keep-last: give --keep-last N too" in ran.err


def test_a_manager_that_saves_nothing_removes_nothing(tmp_path):
    near, far = tmp_path / "near", tmp_path / "far"
    saved(near, [1, 2, 3])
    CheckpointManager([Tier(str(near), keep_last=1), far]).close()
    assert whole(near) == [1, 2, 3]


def test_two_attempts_at_a_step_are_one_step(cli, tmp_path):  # noqa: F811
    root = tmp_path / "runs"
    state = {"x": torch.zeros(3)}
    with CheckpointManager(str(root)) as manager:
        for step in (1, 2):
            manager.save(state, step)
        manager.restore(state, step=1)
        for step in (2, 3):
            manager.save(state, step)
    assert "2 steps would be removed" in cli("prune", "--keep-last", 1, "--dry-run").out
