"""Each command that takes a step takes its number, `latest`, `latest~3` or `best:METRIC`."""

from __future__ import annotations

import math
from pathlib import Path

import msgspec
import pytest

import ckpt
from ckpt import CheckpointManager, Tier
from ckpt.catalog.late_metrics import put_late
from ckpt.model.values import to_json
from ckpt.storage.api import StorageBackend
from ckpt.storage.registry import open_backend
from tests.checkpoints import write_checkpoint
from tests.cli.conftest import ARRAYS, Cli

METRICS: dict[int, dict[str, float]] = {
    100: {"loss": 0.5, "acc": 0.9},
    200: {"loss": 0.25, "acc": 0.5},
    300: {"loss": math.nan, "val/loss": 3.0},
}


@pytest.fixture
def runs(backend: StorageBackend) -> StorageBackend:
    for step, metrics in METRICS.items():
        save(backend, step, metrics)
    return backend


def save(store: StorageBackend, step: int, metrics: dict[str, float]) -> None:
    metadata = msgspec.Raw(to_json("metadata", {"metrics": metrics}))
    write_checkpoint(store, step, ARRAYS, metadata=metadata)


SELECTORS = [
    ("latest", 300),
    ("latest~0", 300),
    ("latest~2", 100),
    ("best:loss", 200),
    ("best:loss:max", 100),
    ("best:val/loss", 300),
    ("best:acc:max", 100),
]


@pytest.mark.parametrize(("selector", "step"), SELECTORS)
def test_a_selector_is_an_argument_or_an_option(cli: Cli, runs, selector, step) -> None:
    assert cli("show", selector, "--json").json["step"] == step
    assert cli("show", "runs", "--step", selector, "--json").json["step"] == step


def test_each_command_takes_a_selector(cli: Cli, runs: StorageBackend, tmp_path: Path) -> None:
    assert cli("verify", "best:loss", "--json").json["steps"][0]["step"] == 200
    (tier,) = cli("verify", "runs", "best:loss", "--all-tiers", "--json").json["tiers"]
    assert [step["step"] for step in tier["steps"]] == [200]
    diff = cli("diff", "best:loss", "latest~2", "--json").json
    assert ("step-000000200" in diff["a"], "step-000000100" in diff["b"]) == (True, True)
    assert (
        cli("copy", "runs", "there", "--step", "best:loss", "--json").json["steps"][0]["step"]
        == 200
    )
    out = str(tmp_path / "weights.safetensors")
    assert cli("export", "runs", out, "--step", "latest~1", "--json").json["step"] == 200
    assert cli("pin", "best:loss", "--json").json["pin"]["step"] == 200
    assert cli("unpin", "200").code == 0
    restore = cli("restore", "runs", "best:acc:max", "--to", "local", "--json").json
    assert restore["step"] == 100
    prefetch = cli(
        "agent", "prefetch", "runs", "--to", "near", "--step", "best:loss", "--json"
    ).json
    assert prefetch["tiers"][0]["step"] == 200
    ran = cli("rm", "runs", "--after", "best:loss", "--dry-run", "--json").json["removed"]
    assert [step["step"] for step in ran] == [300]
    removed = cli("rm", "runs", "best:acc:max", "latest", "--json").json["removed"]
    assert sorted(step["step"] for step in removed) == [100, 300]


def test_steps_of_an_abandoned_branch_do_not_count(cli: Cli, runs: StorageBackend) -> None:
    assert cli("rollback", "runs", "latest~2", "--json").json["step"] == 100
    for selector in ("latest", "best:loss", "best:acc:min"):
        assert cli("show", selector, "--json").json["step"] == 100
    assert "no step has this metric" in cli("show", "best:val/loss").err
    assert cli("show", "200", "--json").json["step"] == 200, "a number names it all the same"
    assert cli("rollback", "runs", "300", "--json").json["resumed"] == [200, 300]
    assert cli("show", "best:loss", "--json").json["step"] == 200


def test_keep_best_of_the_configuration_says_which_values_are_the_best(
    cli: Cli, runs: StorageBackend
) -> None:
    assert cli("show", "best:acc").code == 2
    Path("ckpt.toml").write_text(
        '[[tiers]]\nurl = "runs"\nkeep_last = 9\nkeep_best = ["acc", "max"]\n'
    )
    assert cli("show", "best:acc", "--json").json["step"] == 100
    assert cli("show", "best:acc:min", "--json").json["step"] == 200
    Path("ckpt.toml").rename("other.toml")
    assert cli("show", "best:acc", "--config", "other.toml", "--json").json["step"] == 100


def test_metrics_that_were_added_later_count(cli: Cli, runs: StorageBackend) -> None:
    ref = write_checkpoint(runs, 50, ARRAYS).ref
    put_late(runs, ref, {"loss": 0.125})
    assert cli("show", "best:loss", "--json").json["step"] == 50


def test_the_steps_of_all_tiers_count(cli: Cli, runs: StorageBackend) -> None:
    save(open_backend("far"), 150, {"loss": 0.125})
    ran = cli("verify", "runs", "far", "best:loss", "--json").json["tiers"]
    assert [[step["step"] for step in tier["steps"]] for tier in ran] == [[], [150]]
    assert cli("restore", "runs", "far", "latest~2", "--to", "local", "--json").json["step"] == 150


@pytest.mark.parametrize(
    ("words", "code", "text"),
    [
        ("show best:", 2, "step='best:': a step is a number"),
        ("show latest~", 2, "a step is a number"),
        ("show latest~x", 2, "latest, latest~1, best:METRIC or branch:NAME"),
        ("show latest~99", 7, "there are 3 checkpoints, and the oldest is latest~2, step 100"),
        ("show best:bleu", 2, "there is 'acc', 'loss', 'val/loss'"),
        ("show best:loss/x", 2, "there is 'acc', 'loss', 'val/loss'"),
        ("show best:acc", 2, "best:acc:max takes the largest"),
        ("show --step last", 2, "step='last': a step is"),
        ("show --step -3", 2, "step='-3': a step is"),
        ("show best:loss latest", 2, "are two steps"),
        ("show best:loss --step 100", 2, "leave one out"),
        ("show empty best:loss", 7, "it is empty, or does not exist"),
        ("copy runs there --step best:", 2, "a step is a number"),
        ("export runs out.pt --step runs", 2, "a step is a number"),
        ("diff best:loss --step latest~x", 2, "a step is a number"),
        ("agent prefetch runs --to near --step newest", 2, "a step is a number"),
        ("unpin best:loss", 2, "STEP is a number here: without one, all pins end"),
        ("unpin --step latest", 2, "STEP is a number here: without one, all pins end"),
        ("finalize latest~1", 2, "STEP is a number here"),
        ("rm runs latest~99", 7, "there are 3 checkpoints"),
        ("restore runs best:bleu --to local", 2, "no step has this metric"),
    ],
)
def test_a_step_that_there_is_not_is_one_clear_error(cli: Cli, runs, words, code, text) -> None:
    ran = cli(*words.split())
    assert text in ran.err
    assert ran.code == code
    assert ran.err.count("\n") == 1
    assert not Path("local").exists()


def test_a_run_without_metrics_or_a_finite_value_has_no_best_step(
    cli: Cli, backend: StorageBackend
) -> None:
    write_checkpoint(backend, 1, ARRAYS)
    ran = cli("show", "best:loss")
    assert (ran.code, "no checkpoint has metrics" in ran.err) == (7, True)
    save(backend, 2, {"loss": math.inf})
    ran = cli("show", "best:loss")
    assert (ran.code, "no value of the metric is finite" in ran.err) == (7, True)


def test_a_folder_may_have_the_name_of_a_selector(cli: Cli, runs: StorageBackend) -> None:
    Path("runs").rename("best:loss")
    assert cli("show", "./best:loss", "latest~1", "--json").json["step"] == 200


def test_the_help_says_what_a_step_may_be(cli: Cli) -> None:
    for command in ("show", "verify", "restore", "diff", "copy", "export", "pin", "rm"):
        text = " ".join(cli(command, "--help").out.replace("│", " ").split())
        assert "latest~3" in text, command
        assert "best:METRIC" in text, command


def test_the_journal_of_a_job_says_which_values_are_the_best(cli: Cli) -> None:
    tier = Tier("runs", keep_last=9, keep_best=("acc", "max"))
    with CheckpointManager(tier) as manager:
        for step, value in ((1, 0.9), (2, 0.5)):
            manager.save({"step": step}, step, metrics={"acc": value})
    assert cli("show", "best:acc", "--json").json["step"] == 1
    with ckpt.open("runs", step="best:acc") as opened:
        assert opened.step == 1
