"""A restore of the best step, or of one that is some checkpoints older than the newest."""

from __future__ import annotations

import math
import shutil
from pathlib import Path
from typing import Any

import pytest
import torch

import ckpt
from ckpt import CheckpointManager, Tier
from ckpt.errors import ConfigError, NoCheckpoint, StorageError
from ckpt.storage.testing import Raise, Rule
from tests.coordination.world import World
from tests.kit.states import restored, state
from tests.kit.stores import faulty

LOSSES = {1: 0.5, 2: 0.25, 3: 0.25, 4: math.nan, 5: -math.inf, 6: 0.75}


def run(tiers: Any, losses: dict[int, float] = LOSSES, name: str = "loss") -> None:
    with CheckpointManager(tiers) as manager:
        for step, loss in losses.items():
            manager.save(state(step), step, metrics={name: loss})


def test_the_best_step_is_restored_and_a_branch_begins_there(near):
    run(near)
    with CheckpointManager(near) as manager:
        assert manager.best("loss") == 3, "of equal values the newer, and no NaN or infinity"
        target = state(0)
        assert restored(manager, target, step="best:loss").step == 3
        assert target["x"][0] == 3
        assert manager.steps() == [1, 2, 3]
        assert manager.latest_step() == 3
        assert manager.best("loss", "max") == 1, "abandoned steps do not count"
        manager.save(state(40), 4, metrics={"loss": 0.1})
        assert manager.best("loss") == 4
    with CheckpointManager(near) as manager:
        target = state(0)
        assert restored(manager, target, step="best:loss").step == 4
        assert target["x"][0] == 40, "of two attempts, that of the current branch"


def test_a_restore_of_the_newest_step_by_its_metric_begins_no_branch(near):
    run(near, {1: 0.5, 2: 0.25})
    with CheckpointManager(near) as manager:
        assert restored(manager, state(0), step="best:loss").step == 2
    assert not (near / "rollbacks").exists()


def test_checkpoints_are_counted_back_from_the_newest(near):
    run(near, {10: 1.0, 20: 1.0, 35: 1.0})
    with CheckpointManager(near) as manager:
        assert restored(manager, state(0), step="latest~2", rollback=False).step == 10
        assert restored(manager, state(0), step="latest").step == 35
        assert restored(manager, state(0), step="latest~1").step == 20
        assert restored(manager, state(0), step="latest~1").step == 10, "of the new branch"
        assert restored(manager, state(0), step="35").step == 35


def test_metrics_that_are_added_later_count(near, far):
    tiers = [str(near), str(far)]
    run(tiers, {1: 0.5, 2: 0.25}, name="loss")
    with CheckpointManager(tiers) as manager:
        with pytest.raises(ConfigError, match="no step has this metric; there is 'loss'"):
            manager.best("accuracy", "max")
        manager.add_metrics(1, {"accuracy": 0.9})
        manager.add_metrics(2, {"accuracy": 0.8})
        assert manager.best("accuracy", "max") == 1
        assert restored(manager, state(0), step="best:accuracy:max", rollback=False).step == 1
    shutil.rmtree(near)
    with ckpt.open(far, step="best:accuracy:min") as opened:
        assert opened.step == 2
    assert ckpt.load(far, "x", step="best:accuracy:max")[0] == 1


def test_keep_best_says_which_values_are_the_best(near):
    tier = Tier(str(near), keep_last=9, keep_best=("score", "max"))
    run(tier, {1: 0.5, 2: 0.25}, name="score")
    with CheckpointManager(tier) as manager:
        assert manager.best("score") == 1
        assert manager.best("score", "min") == 2
        assert restored(manager, state(0), step="best:score", rollback=False).step == 1
        assert restored(manager, state(0), step="best:score:min").step == 2
    with ckpt.open(tier, step="best:score") as opened:
        assert opened.step == 1
    with ckpt.open(near, step="best:score") as opened:
        assert opened.step == 1, "the journal of the job says it"
    with CheckpointManager(near) as manager:
        assert manager.best("score") == 1


def test_a_direction_that_is_not_known_is_asked_for(near):
    run(near, {1: 0.5, 2: 0.25}, name="score")
    with CheckpointManager(near) as manager:
        for ask in (lambda: manager.best("score"), lambda: ckpt.open(near, step="best:score")):
            with pytest.raises(ConfigError, match="best:score:max takes the largest"):
                ask()


def test_the_best_step_may_be_on_any_tier(near, far):
    tiers = [Tier(str(near), keep_last=1), Tier(str(far))]
    run(tiers, {1: 0.1, 2: 0.2, 3: 0.3})
    with CheckpointManager(tiers) as manager:
        assert manager.best("loss") == 1
        assert restored(manager, state(0), step="best:loss").step == 1


@pytest.mark.parametrize(
    ("step", "error", "words"),
    [
        ("best:", ConfigError, "a step is a number"),
        ("latest~x", ConfigError, "a step is a number"),
        ("best", ConfigError, "a step is a number"),
        ("best:accuracy", ConfigError, "no step has this metric; there is 'loss'"),
        ("best:val/loss", ConfigError, "no step has this metric; there is 'loss'"),
        ("latest~99", NoCheckpoint, "there are 2 checkpoints, and the oldest is latest~1, step 4"),
        ("best:loss", NoCheckpoint, "no value of the metric is finite"),
        (-1, ConfigError, "a step is a whole number"),
    ],
)
def test_a_step_that_there_is_not_is_an_error_and_changes_nothing(near, step, error, words):
    run(near, {4: math.nan, 5: math.inf})
    target = state(0)
    with CheckpointManager(near) as manager, pytest.raises(error, match=words):
        manager.restore(target, step=step)
    assert not target["x"].any()
    assert not (near / "rollbacks").exists()
    with pytest.raises(error, match=words):
        ckpt.load(near, step=step)


def test_a_run_without_metrics_or_without_steps_has_no_best_step(near):
    with CheckpointManager(near) as manager:
        assert manager.best("loss") is None
        with pytest.raises(NoCheckpoint, match="it is empty, or does not exist"):
            manager.restore(state(0), step="best:loss")
        manager.save(state(1), 1)
        assert manager.best("loss") is None
        with pytest.raises(NoCheckpoint, match="no checkpoint has metrics"):
            manager.restore(state(0), step="best:loss")
    with pytest.raises(ckpt.CkptError, match="closed"):
        manager.best("loss")


@pytest.mark.parametrize(("metric", "mode"), [("", None), (None, None), ("loss", "least")])
def test_a_wrong_question_is_an_error(near, metric, mode):
    with CheckpointManager(near) as manager, pytest.raises(ConfigError):
        manager.best(metric, mode)


def test_a_tier_that_does_not_answer_may_have_the_best_step(near, far, monkeypatch):
    tiers = [str(near), str(far)]
    run(tiers, {1: 0.5, 2: 0.25})
    faulty(monkeypatch, far, [Rule(verb="folders", fault=Raise(StorageError))])
    with CheckpointManager(tiers) as manager:
        with pytest.raises(StorageError, match=str(far)):
            manager.restore(state(0), step="best:loss")
        with pytest.raises(StorageError, match=str(far)):
            manager.best("loss")
        assert restored(manager, state(0)).step == 2, "the newest step is wanted without delay"


# -- ranks ----------------------------------------------------------------------------------------


def test_all_ranks_restore_the_step_that_the_leader_finds(tmp_path: Path):
    def job(coordinator: Any) -> tuple[Any, ...]:
        tier = Tier(str(tmp_path / f"node{coordinator.rank}"), local=True)
        name = f"x{coordinator.rank}"
        with CheckpointManager(tier, coordinator=coordinator) as manager:
            for step in (1, 2, 3):
                value = {name: torch.full((100,), step)}
                manager.save(value, step, metrics={"loss": abs(step - 2)})
            report = restored(manager, value, step="best:loss")
            return report.step, value[name][0].item(), manager.steps(), manager.latest_step()

    results = World(3, patience=60).run(job)
    assert results == dict.fromkeys(range(3), (2, 2, [1, 2], 2))


def test_a_leader_on_a_new_node_finds_the_best_step_on_the_other_nodes(tmp_path: Path):
    def manager_of(coordinator: Any) -> CheckpointManager:
        tier = Tier(str(tmp_path / f"node{coordinator.rank}"), local=True, buddies=1)
        return CheckpointManager(tier, coordinator=coordinator)

    def save(coordinator: Any) -> None:
        with manager_of(coordinator) as manager:
            for step in (1, 2, 3):
                value = {f"x{coordinator.rank}": torch.full((100,), float(step))}
                manager.save(value, step, metrics={"loss": abs(step - 2)})

    def restore(coordinator: Any) -> tuple[int, float]:
        name = f"x{coordinator.rank}"
        value = {name: torch.zeros(100)}
        with manager_of(coordinator) as manager:
            return restored(manager, value, step="best:loss").step, value[name][0].item()

    assert World(2, patience=60).run(save) == {0: None, 1: None}
    shutil.rmtree(tmp_path / "node0")
    assert World(2, patience=60).run(restore) == {0: (2, 2.0), 1: (2, 2.0)}


def test_all_ranks_learn_that_there_is_no_such_step(tmp_path: Path):
    def job(coordinator: Any) -> str:
        with CheckpointManager(str(tmp_path), coordinator=coordinator) as manager:
            value = {f"x{coordinator.rank}": torch.zeros(100)}
            manager.save(value, 1, metrics={"loss": 1.0})
            with pytest.raises(ckpt.CkptError) as caught:
                manager.restore(value, step="best:accuracy")
            return str(caught.value)

    for rank, text in World(2, patience=60).run(job).items():
        assert "best:accuracy: no step has this metric; there is 'loss'" in text, rank
