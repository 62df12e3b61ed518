"""Metrics are given to the save and kept in the manifest, and retention uses them."""

from __future__ import annotations

import math
import re
from pathlib import Path

import msgspec
import pytest
import torch

from ckpt import CheckpointManager, Tier
from ckpt.catalog.step_listing import committed, read_manifest
from ckpt.errors import ConfigError
from ckpt.model.metrics import metrics_of
from ckpt.storage.registry import open_backend
from tests.cli.conftest import cli  # noqa: F401 - a fixture
from tests.coordination.world import World
from tests.kit.stores import whole


def saved(root: Path, losses: dict[int, float | None], **tier) -> None:
    with CheckpointManager(Tier(str(root), **tier)) as manager:
        for step, loss in losses.items():
            reported = None if loss is None else {"loss": loss}
            manager.save({"x": torch.full((9,), step)}, step, metrics=reported)


def test_the_best_stay_beside_the_newest(tmp_path):
    saved(
        tmp_path,
        {1: 3.0, 2: 1.0, 3: 2.0, 4: math.nan, 5: None, 6: 8.0},
        keep_last=1,
        keep_best=("loss", "min", 2),
    )
    assert whole(tmp_path) == [2, 3, 6]


def test_a_restarted_job_knows_the_best_of_the_one_before(tmp_path):
    saved(tmp_path, {1: 0.1, 2: 1.0, 3: 2.0})
    saved(tmp_path, {4: 3.0, 5: 4.0}, keep_last=1, keep_best=("loss", "min"))
    assert whole(tmp_path) == [1, 5]


def test_a_loss_on_its_graph_is_a_number_and_a_word_is_not(tmp_path):
    loss = torch.nn.Linear(2, 1)(torch.ones(2)).sum()
    with CheckpointManager(tmp_path, metadata={"team": "speech"}) as manager:
        manager.save({"x": torch.ones(1)}, 1, metrics={"loss": loss})
        with pytest.raises(ConfigError, match=r"metrics\['loss'\] is a str"):
            manager.save_async({"x": torch.ones(1)}, 2, metrics={"loss": "low"})  # type: ignore[dict-item]
    with pytest.raises(ConfigError, match="take another name"):
        CheckpointManager(tmp_path, metadata={"metrics": 1})


def test_the_command_line_shows_metrics_and_says_why_a_step_stays(cli, tmp_path):  # noqa: F811
    root = tmp_path / "runs"
    saved(root, {1: 0.5, 2: 0.25, 3: 1.0, 4: 2.0})
    listed = cli("ls", "--json").json["steps"]
    assert {one["step"]: one["metrics"] for one in listed}[2] == {"loss": 0.25}
    assert "metrics/loss" in cli("show", 2).out
    wish = ("prune", "--keep-last", 1, "--keep-best", "loss:min", "--dry-run")
    dry = cli(*wish, "--json").json
    assert {one["step"]: one["why"] for one in dry["kept"]} == {4: ["newest"], 2: ["best loss"]}
    assert [one["step"] for one in dry["pruned"]] == [1, 3]
    assert "stays: best loss" in cli(*wish).out
    assert cli("prune", "--keep-last", 1, "--keep-best", "loss").code == 2
    (tmp_path / "ckpt.toml").write_text(
        '[[tiers]]\nurl = "runs"\nkeep_last = 1\nkeep_best = ["loss", "min", 2]\n'
    )
    assert cli("prune", "--root", "runs").code == 0
    assert whole(root) == [1, 2, 4]


def test_a_prune_keeps_the_best_as_the_journal_says_of_the_job(cli, tmp_path):  # noqa: F811
    saved(tmp_path / "runs", {1: 0.5, 2: 0.25, 3: 1.0}, keep_last=5, keep_best=("loss", "min"))
    dry = cli("prune", "--keep-last", 1, "--dry-run", "--json").json
    assert {one["step"]: one["why"] for one in dry["kept"]} == {3: ["newest"], 2: ["best loss"]}
    far = Tier("far", keep_last=5, keep_best=("accuracy", "max"))
    near = Tier("near", keep_last=5, keep_best=("loss", "min"))
    with CheckpointManager([near, far]) as manager:
        for step in (1, 2):
            manager.save({"x": torch.ones(1)}, step, metrics={"loss": step, "accuracy": 0.5})
    ran = cli("prune", "near", "--keep-last", 1)
    assert "keeps the best steps by accuracy, loss" in ran.err
    assert whole("near") == [2]


def test_a_prune_keeps_as_many_best_steps_as_the_job(cli, tmp_path):  # noqa: F811
    near = Tier("near", keep_last=9, keep_best=("loss", "min", 2))
    far = Tier("far", keep_last=9, keep_best=("loss", "min"))
    with CheckpointManager([near, far]) as manager:
        for step, loss in enumerate((0.5, 0.25, 1.0, 2.0), start=1):
            manager.save({"x": torch.ones(1)}, step, metrics={"loss": loss})
    wish = ("prune", "near", "--keep-last", 1, "--dry-run", "--json")
    assert [entry["step"] for entry in cli(*wish).json["pruned"]] == [3]
    journal = tmp_path / "near.journal" / "rank-00000.jsonl"
    older_text = re.sub(r',"counts":{.*?}', "", journal.read_text())
    assert older_text != journal.read_text()
    journal.write_text(older_text)
    assert [entry["step"] for entry in cli(*wish).json["pruned"]] == [1, 3]


def test_where_ranks_differ_the_metrics_of_rank_0_count(tmp_path):
    def save(coordinator):
        with CheckpointManager(
            tmp_path, coordinator=coordinator, metadata={"team": "a"}
        ) as manager:
            manager.save({"x": torch.ones(3)}, 1, metrics={"loss": float(coordinator.rank)})

    assert World(2, patience=30).run(save) == {0: None, 1: None}
    backend = open_backend(str(tmp_path))
    manifest = read_manifest(backend, committed(backend)[0])
    assert metrics_of(manifest.metadata) == {"loss": 0.0}
    assert msgspec.json.decode(manifest.metadata)["team"] == "a"


def test_a_metric_that_no_save_tells_is_said_once(tmp_path, cli, caplog):  # noqa: F811
    tier = Tier(str(tmp_path / "runs"), keep_last=1, keep_best=("los", "min"))
    with CheckpointManager(tier) as manager:
        for step in range(4):
            manager.save({"x": torch.ones(3)}, step, metrics={"loss": 1.0, "accuracy": 0.5})
    reported = [
        record.getMessage() for record in caplog.records if "keep_best" in record.getMessage()
    ]
    assert len(reported) == 1
    assert "'los'" in reported[0]
    assert "'accuracy', 'loss'" in reported[0]
    ran = cli("prune", "--root", "runs", "--keep-last", 1, "--keep-best", "los:min", "--dry-run")
    assert "goes by 'los', which no checkpoint has" in ran.err
