"""What a tier keeps, as a training job sees it."""

from __future__ import annotations

import json
import os
import time
from pathlib import Path

import pytest
import torch

from ckpt import CheckpointManager, Tier
from ckpt.catalog.index import committed
from ckpt.catalog.prune import prune
from ckpt.errors import ConfigError
from ckpt.plan.retention import Retention
from ckpt.storage.registry import open_backend
from ckpt.storage.testing import Crash, FaultyBackend, Rule, SimulatedCrash
from tests.cli.conftest import cli  # noqa: F401 - a fixture
from tests.test_review import faulty, whole


def saved(root: Path, steps: list[int], **tier) -> None:
    with CheckpointManager(Tier(str(root), **tier)) as manager:
        for step in steps:
            manager.save({"x": torch.full((9,), step)}, step)


def test_old_steps_go_once_newer_ones_are_committed_and_strangers_files_stay(tmp_path):
    saved(tmp_path, [1])
    (tmp_path / "notes.txt").write_text("mine")
    (folder,) = tmp_path.glob("step-*")
    (folder / "plot.png").write_text("also mine")
    saved(tmp_path, [2, 5, 6, 7, 10, 11], keep_last=2, keep_every=5)
    assert whole(tmp_path) == [5, 10, 11]
    assert (tmp_path / "notes.txt").read_text() == "mine"
    assert [path.name for path in folder.iterdir()] == ["plot.png"]


def test_each_tier_keeps_by_its_own_rule(tmp_path):
    near, far = tmp_path / "near", tmp_path / "far"
    with CheckpointManager([Tier(str(near), keep_last=1), Tier(str(far), every=2)]) as manager:
        for step in range(1, 6):
            manager.save({"x": torch.ones(3)}, step)
    assert (whole(near), whole(far)) == ([5], [2, 4])


def test_a_rollback_never_costs_the_steps_of_the_running_job(tmp_path):
    saved(tmp_path, [1, 2, 3])
    with CheckpointManager(Tier(str(tmp_path), keep_last=1)) as manager:
        manager.restore({"x": torch.zeros(9, dtype=torch.int64)}, step=1)
        manager.save({"x": torch.ones(9)}, 2)
    attempts = {ref.attempt for ref in committed(open_backend(str(tmp_path))) if ref.step == 2}
    assert len(attempts) == 2 or 2 in whole(tmp_path)
    assert 2 in whole(tmp_path)


def test_a_prune_cut_anywhere_leaves_whole_checkpoints_and_the_next_one_ends_it(tmp_path):
    for at in range(1, 12):
        root = tmp_path / str(at)
        saved(root, [1, 2, 3])
        backend = FaultyBackend(open_backend(str(root)), [Rule(verb="delete", key="", nth=at, fault=Crash())])
        try:
            prune(backend, Retention(keep_last=1))
        except SimulatedCrash:
            assert set(whole(root)) >= {3}
            prune(open_backend(str(root)), Retention(keep_last=1), grace_seconds=0, undated=True)
        assert whole(root) == [3]
        assert len(list(root.glob("step-*"))) == 1, at


def test_remains_are_left_alone_while_somebody_may_still_commit_them(tmp_path):
    saved(tmp_path, [1, 2, 3])
    for manifest in sorted(tmp_path.glob("step-*/manifest.json"))[:2]:
        manifest.unlink()
    backend = open_backend(str(tmp_path))
    assert prune(backend, Retention(keep_last=5)) == []
    old = sorted(tmp_path.glob("step-*"))[0]
    (old / "rank-00000.json").unlink()
    assert prune(backend, Retention(keep_last=5)) == []  # no date on it
    dry = prune(backend, Retention(keep_last=5), undated=True, grace_seconds=-1, dry_run=True)
    assert [(one.ref.step, one.committed) for one in dry] == [(1, False), (2, False)]
    assert len(list(tmp_path.glob("step-*"))) == 3
    prune(backend, Retention(keep_last=5), undated=True)
    assert not old.exists()


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


def test_ten_saves_are_pruned_beside_the_saving_and_not_in_it(tmp_path, monkeypatch):
    slow = open_backend(str(tmp_path))

    class Slow:
        def __getattr__(self, name):
            return getattr(slow, name)

        def delete(self, key: str) -> None:
            time.sleep(0.2)
            slow.delete(key)

    monkeypatch.setattr("ckpt.storage.tiers.open_backend", lambda url, options: Slow())
    manager = CheckpointManager(Tier(str(tmp_path), keep_last=1))
    began = time.perf_counter()
    for step in range(4):
        manager.save({"x": torch.ones(3)}, step)
    assert time.perf_counter() - began < 0.55
    manager.close()
    assert whole(tmp_path) == [3]


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
