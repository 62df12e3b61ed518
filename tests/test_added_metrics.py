"""Metrics that arrive after the save, from an evaluation that ends later."""

from __future__ import annotations

import math
from pathlib import Path
from typing import Any, Literal

import numpy as np
import pytest
import torch

from ckpt import CheckpointManager, Tier
from ckpt.catalog.inventory import Inventory
from ckpt.catalog.late_metrics import add_metrics
from ckpt.errors import ConfigError, ManagerClosed, OutOfSpace
from ckpt.model.keys import StepRef
from ckpt.model.metrics import metrics_of
from ckpt.storage.registry import open_backend
from ckpt.storage.testing import Raise, Rule
from tests.checkpoints import write_checkpoint
from tests.cli.conftest import cli  # noqa: F401
from tests.coordination.world import World
from tests.kit.stores import faulty, whole


def state(step: int = 0) -> dict[str, Any]:
    return {"x": torch.full((100,), step)}


def records(root: Path) -> list[Path]:
    return sorted(root.rglob("metrics-*.json"))


def test_the_best_step_by_a_late_metric_stays(tmp_path: Path) -> None:
    tier = Tier(str(tmp_path), keep_last=1, keep_best=("accuracy", "max"))
    with CheckpointManager(tier) as manager:
        manager.save(state(), 1, metrics={"loss": 3.0})
        manager.add_metrics(1, {"accuracy": 0.5})
        for step in range(2, 6):
            manager.save(state(), step)
            manager.add_metrics(step, {"accuracy": {3: torch.tensor(0.9)}.get(step, 0.1)})
        manager.save(state(), 6)
    assert whole(tmp_path) == [3, 6]
    assert len(records(tmp_path)) == 1  # the others were removed with their steps


def test_a_metric_that_beats_the_best_is_seen_for_a_step_that_was_looked_at_before(
    tmp_path: Path,
) -> None:
    """Retention remembers whole steps, and an addition changes them."""
    tier = Tier(str(tmp_path), keep_last=2, keep_best=("accuracy", "max"))
    with CheckpointManager(tier) as manager:
        manager.save(state(), 1, metrics={"accuracy": 0.2})
        manager.save(state(), 2, metrics={"loss": 1.0})
        manager.save(state(), 3)  # step 2 is known from here on
        manager.add_metrics(2, {"accuracy": 0.7})
        manager.save(state(), 4)
        manager.save(state(), 5)
    assert whole(tmp_path) == [2, 4, 5]


def test_ls_and_show_print_them(tmp_path: Path, cli: Any) -> None:  # noqa: F811
    root = tmp_path / "runs"
    with CheckpointManager(root, metadata={"team": "speech"}) as manager:
        manager.save(state(), 1, metrics={"loss": 2.5})
        manager.add_metrics(1, {"accuracy": 0.25, "worst": math.inf})
        manager.add_metrics(1, {"f1": 0.75})
        manager.save(state(), 2)
        manager.add_metrics(2, {"loss": math.nan})
        assert manager.restore(state(), 2) is not None
    first, second = cli("ls", "--json").json["steps"]
    assert first["metrics"].items() >= {"loss": 2.5, "accuracy": 0.25, "f1": 0.75}.items()
    assert set(first["metrics"]) == {"loss", "accuracy", "f1", "worst"}
    assert first["metadata"]["team"] == "speech"
    assert set(second["metrics"]) == {"loss"}
    assert "0.25" in cli("ls").out
    assert "metrics/accuracy" in cli("show", 1).out
    assert cli("verify").code == 0


def test_a_metric_is_written_once_and_wrong_calls_write_nothing(tmp_path: Path) -> None:
    with CheckpointManager(tmp_path) as manager:
        manager.save(state(), 1, metrics={"loss": 2.0})
        manager.add_metrics(1, {"accuracy": 0.5, "odd": math.nan})
        manager.add_metrics(1, {"accuracy": 0.5, "loss": 2.0, "odd": math.nan})
        assert len(records(tmp_path)) == 1
        for step, metrics, words in (
            (2, {"accuracy": 0.5}, "step 2 is on no durable tier"),
            (1, {"accuracy": 0.6, "f1": 1.0}, "has 'accuracy' = 0.5, not 0.6"),
            (1, {"loss": 1.0}, "has 'loss' = 2, not 1"),
            (1, {"f1": "high"}, "not a number"),
            (1, {"": 1.0}, "not a name"),
            (1, [1.0], "give numbers by name"),
            (-1, {"f1": 1.0}, "whole number"),
        ):
            with pytest.raises(ConfigError, match=words):
                manager.add_metrics(step, metrics)  # type: ignore[arg-type]
        assert len(records(tmp_path)) == 1
    with pytest.raises(ManagerClosed):
        manager.add_metrics(1, {"f1": 1.0})


def test_a_save_under_way_is_waited_for_and_one_that_failed_is_unknown(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    rule = Rule(verb="upload", key="step-000000002", fault=Raise(OutOfSpace))
    faulty(monkeypatch, tmp_path, [rule])
    with CheckpointManager(tmp_path) as manager:
        manager.save_async({"x": torch.zeros(3_000_000)}, 1)
        manager.add_metrics(1, {"accuracy": 0.5})
        manager.save_async(state(), 2)
        with pytest.raises(ConfigError, match="step 2 is on no durable tier"):
            manager.add_metrics(2, {"accuracy": 0.5})
        with pytest.raises(OutOfSpace):  # its error is raised nevertheless
            manager.fence()
    assert len(records(tmp_path)) == 1


def test_each_tier_that_has_the_step_gets_them_and_a_later_job_may_add(tmp_path: Path) -> None:
    near, far = tmp_path / "near", tmp_path / "far"
    tiers = [Tier(str(near)), Tier(str(far), every=2, codec="zstd")]
    with CheckpointManager(tiers) as manager:
        manager.save(state(), 1)
        manager.save(state(), 2)
    with CheckpointManager(tiers) as manager:
        manager.restore(state())
        manager.add_metrics(1, {"accuracy": 0.5})
        manager.add_metrics(2, {"accuracy": 0.5})
    assert (len(records(near)), len(records(far))) == (2, 1)


def test_all_tiers_get_them_for_the_same_attempt_at_a_step(tmp_path: Path) -> None:
    """The youngest attempt is on one tier only, since its save failed on the other."""
    near, far = (open_backend(str(tmp_path / name)) for name in ("near", "far"))
    old, young = "b" * 12, "a" * 12
    for store in (near, far):
        write_checkpoint(store, 7, {"x": np.zeros(3)}, attempt=old, created_at=1.0)
    write_checkpoint(near, 7, {"x": np.zeros(3)}, attempt=young, created_at=2.0)
    add_metrics([near, far], 7, {"accuracy": 0.5}, own="c" * 12)
    assert [path.parent.name for path in records(tmp_path)] == [StepRef(7, young).folder]
    add_metrics([near, far], 7, {"accuracy": 0.5}, own=old)
    assert [path.parent.name for path in records(tmp_path / "far")] == [StepRef(7, old).folder]
    assert len(records(tmp_path)) == 3


def test_a_record_that_is_damaged_counts_as_none(tmp_path: Path, cli: Any) -> None:  # noqa: F811
    root = tmp_path / "runs"
    with CheckpointManager(root) as manager:
        manager.save(state(), 1)
        manager.add_metrics(1, {"accuracy": 0.5})
    (record,) = records(root)
    data = record.read_bytes()
    for damaged in (b"", data[:-1], data.replace(b"0.5", b"0.9"), b"[]", b"null", b" " * (2 << 20)):
        record.write_bytes(damaged)
        (step,) = cli("ls", "--json").json["steps"]
        assert (step["state"], step["metrics"]) == ("committed", {})
    with CheckpointManager(root) as manager:
        manager.add_metrics(1, {"accuracy": 0.5})  # it is written again
        assert manager.restore(state()) is not None
    assert record.read_bytes() == data


def test_a_crash_in_the_midst_leaves_all_or_nothing(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    faulty(
        monkeypatch, tmp_path, [Rule(verb="put", key="metrics-", nth=1, fault=Raise(OutOfSpace))]
    )
    with CheckpointManager(tmp_path) as manager:
        manager.save(state(), 1)
        with pytest.raises(OutOfSpace):
            manager.add_metrics(1, {"accuracy": 0.5})
        assert records(tmp_path) == []
        manager.add_metrics(1, {"accuracy": 0.5})
    assert len(records(tmp_path)) == 1


@pytest.mark.parametrize("adding", [(1,), (0, 1, 2)])
def test_any_rank_adds_and_the_leader_s_retention_sees_it(
    tmp_path: Path, adding: tuple[int, ...]
) -> None:
    tier = Tier(str(tmp_path), keep_last=2, keep_best=("accuracy", "max"))

    def train(coordinator: Any) -> None:
        with CheckpointManager(tier, coordinator=coordinator) as manager:
            for step in range(1, 4):
                manager.save({f"x{coordinator.rank}": torch.ones(3)}, step)
                if coordinator.rank in adding and step == 1:
                    manager.add_metrics(step, {"accuracy": 0.9})
                    assert len(records(tmp_path)) == 1

    assert World(3, patience=30).run(train) == dict.fromkeys(range(3))
    assert whole(tmp_path) == [1, 2, 3]
    assert len(records(tmp_path)) == 1


def test_the_evictor_keeps_the_best_step_by_a_metric_that_came_late(tmp_path: Path) -> None:
    """A tier with a capacity remembers steps too, and an addition changes them."""
    large = {"x": torch.zeros(250_000)}
    tier = Tier(str(tmp_path), capacity="4.5MB", keep_last=10, keep_best=("loss", "min"))
    with CheckpointManager(tier) as manager:
        for step in range(1, 7):
            manager.save(large, step, metrics={} if step == 1 else {"loss": 1.0})
            if step == 3:
                manager.add_metrics(1, {"loss": 0.1})  # step 1 is known by now
    kept = whole(tmp_path)
    assert {1, 6} <= set(kept)
    assert len(kept) == 4


@pytest.mark.parametrize("keep_best", [None, ("accuracy", "max")])
def test_a_removed_step_leaves_no_folder_whatever_was_added(
    tmp_path: Path, keep_best: tuple[str, Literal["min", "max"]] | None
) -> None:
    with CheckpointManager(Tier(str(tmp_path), keep_last=1, keep_best=keep_best)) as manager:
        for step in range(1, 5):
            manager.save(state(), step)
            manager.add_metrics(step, {"accuracy": step / 10})
        manager.save(state(), 5, metrics={"accuracy": 0.9})
    assert [path.name.partition("-")[0] for path in tmp_path.glob("step*")] == ["step"]
    assert records(tmp_path) == []


def test_more_metrics_than_a_reader_takes_are_refused_before_any_is_written(tmp_path: Path) -> None:
    with CheckpointManager(tmp_path) as manager:
        manager.save(state(), 1)
        with pytest.raises(ConfigError, match="too many"):
            manager.add_metrics(1, {f"metric-{n}": 0.0 for n in range(20_000)})
    assert records(tmp_path) == []


def test_a_metric_may_have_the_name_of_a_tag(tmp_path: Path) -> None:
    with CheckpointManager(tmp_path) as manager:
        manager.save(state(), 1, metrics={"x": 2.0})
        manager.add_metrics(1, {"$": 1.0})
    (held,) = Inventory(open_backend(str(tmp_path))).look()
    assert held.metrics == metrics_of(held.metadata) == {"$": 1.0, "x": 2.0}
