from __future__ import annotations

from tests.checkpoints import Written
from tests.cli.conftest import Cli


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
    assert lines["optimizer/groups/0/values/lr"] == "optimizer/groups/0/values/lr 0.01"
    assert lines["rng"] == "rng <one per rank: 0-1>"
    assert lines["team"] == "team 'speech'"
    assert "rank-00000" not in ran.out


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
