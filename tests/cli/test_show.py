from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import nn

from ckpt import CheckpointManager
from ckpt.errors import ConfigError
from tests.checkpoints import Written
from tests.cli.conftest import Cli


class WithPlainState(torch.optim.SGD):
    """An optimizer that keeps, for each parameter, a value that is not a tensor."""

    def step(self, closure: Any = None) -> Any:
        for parameter in self.param_groups[0]["params"]:
            self.state[parameter]["kind"] = "plain"


def test_a_step_shows_tensors_values_and_metadata(cli: Cli, steps: dict[int, Written]) -> None:
    ran = cli("show", 200)
    assert ran.code == 0
    lines = {
        line.split()[0]: " ".join(line.split()) for line in ran.out.splitlines() if line.strip()
    }
    assert lines["model/embed"] == "model/embed float32 12 x 8 384 B 2 0-1"
    assert lines["count"] == "count float64 scalar 8 B 1 0"
    assert lines["model/head"] == "model/head model/embed"
    assert lines["epoch"] == "epoch 3"
    assert lines["optimizer/param_groups/0/lr"] == "optimizer/param_groups/0/lr 0.01"
    assert lines["rng"] == "rng <one per rank: 0-1>"
    assert lines["team"] == "team 'speech'"
    assert "rank-00000" not in ran.out


def test_the_names_of_an_optimizer_begin_with_those_that_only_takes(cli: Cli) -> None:
    model = nn.Linear(3, 2)
    optimizer = WithPlainState(model.parameters(), lr=0.125)
    state = {"model": model, "nested": {"optimizer": optimizer}}
    optimizer.step()
    with CheckpointManager("runs") as manager:
        manager.save(state, 1)
        shown = [line.split()[0] for line in cli("show").out.splitlines() if "optimizer" in line]
        assert "nested/optimizer/param_groups/0/lr" in shown
        assert "nested/optimizer/model/weight/kind" in shown
        for name in ("param_groups/0/lr", "model/weight/kind"):
            with pytest.raises(ConfigError, match=r"for a parameter as a whole .* together"):
                manager.restore(state, only=f"nested/optimizer/{name}")
        optimizer.param_groups[0]["lr"] = 1.0
        manager.restore(state, only="nested/optimizer/model/weight")
        assert optimizer.param_groups[0]["lr"] == 1.0
        manager.restore(state, only="nested/optimizer/param_groups")
    assert optimizer.param_groups[0]["lr"] == 0.125


def test_tensors_in_lists_of_lists_are_in_the_table_and_not_among_the_values(cli: Cli) -> None:
    state = {"x": [[], [torch.ones(1), 7], [[3, {"a": 4}]], [[1, 2]]], "plain": [[1, 2], [3, 4]]}
    with CheckpointManager("runs") as manager:
        manager.save(state, step=1)
    words = cli("show", "runs", "1").out.split("values")[1].split("metadata")[0].split("\n")
    assert [line.split() for line in words if line] == [
        ["x/0", "[]"],
        ["x/1/1", "7"],
        ["x/2/0/0", "3"],
        ["x/2/0/1/a", "4"],
        ["x/3", "[[1,", "2]]"],
        ["plain", "[[1,", "2],", "[3,", "4]]"],
    ]


def test_files_are_shown_on_demand(cli: Cli, steps: dict[int, Written]) -> None:
    ran = cli("show", 200, "--files")
    assert ran.out.count(".safetensors") == 2
    assert ran.out.count(".json") == 2


def test_json_holds_everything(cli: Cli, steps: dict[int, Written]) -> None:
    found = cli("show", 300, "--json").json
    assert found["step"] == 300
    assert [tensor["name"] for tensor in found["tensors"]] == ["count", "model/bias", "model/embed"]
    assert found["tensors"][2]["shards"][1]["offsets"] == [6, 0]
    assert found["tree"]["epoch"] == 3
    assert found["per_rank"] == {"0": {"rng": 0}, "1": {"rng": 1}}
    assert found["metadata"] == {"team": "speech"}
    assert found["tied"] == {"model/head": "model/embed"}
    assert len(found["files"]) == len(found["fragments"]) == 2


def test_a_step_that_is_not_there_is_told(cli: Cli, steps: dict[int, Written]) -> None:
    ran = cli("show", 7)
    assert ran.code == 7
    assert "step 7 is not there" in ran.err


def test_an_error_with_json_is_json_too(cli: Cli, steps: dict[int, Written]) -> None:
    ran = cli("show", 7, "--json")
    assert ran.code == 7
    assert ran.json["error"] == "NoCheckpoint"
    assert ran.json["detail"] == "step 7 is not there; the newest are 300, 200, 100"
    assert ran.err.startswith("error: ")
