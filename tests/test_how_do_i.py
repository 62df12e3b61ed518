"""The answers of ``docs/how-do-i.md`` do what they say."""

from __future__ import annotations

import re
import shlex
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file
from torch import nn
from typer.testing import CliRunner

import ckpt
from ckpt import CheckpointManager, Tier
from ckpt.cli.main import app
from tests.kit.marks import torture
from tests.kit.pages import FENCE, blocks
from tests.kit.worlds import ROOT

PAGE = "how-do-i.md"
_PYTHON = {block.text: block.name for block in blocks("python") if block.page.name == PAGE}
_COMMANDS = [
    line
    for block in blocks("")
    if block.page.name == PAGE
    for line in block.text.splitlines()
    if line.startswith("ckpt ")
]


_IN_PROSE = [
    " ".join(text.split())
    for text in re.findall(
        r"`(ckpt [^`]+ [^`]+)`", FENCE.sub("", (ROOT / "docs" / PAGE).read_text())
    )
]


def job(seed: int) -> dict[str, Any]:
    torch.manual_seed(seed)
    model = nn.Sequential(nn.Linear(4, 4), nn.Linear(4, 2))
    optimizer = torch.optim.AdamW(model.parameters(), lr=0.1 * seed)
    model(torch.ones(1, 4)).sum().backward()
    optimizer.step()
    return {"model": model, "optimizer": optimizer, "step": 100 * seed}


@pytest.fixture(autouse=True)
def run(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A run with the steps 100, 200 and 300, in the working folder."""
    monkeypatch.chdir(tmp_path)
    with CheckpointManager("runs/gpt") as manager:
        for seed in (1, 2, 3):
            manager.save(job(seed), metrics={"loss": 4.0 - seed})
    return tmp_path / "runs" / "gpt"


def answer(words: str, **own_names: object) -> dict[str, Any]:
    """Run the answer with these words as a user does, and return its names."""
    (text,) = [text for text in _PYTHON if words in text]
    names = job(5)
    names |= {"state": dict(names), "ckpt": ckpt, "torch": torch}
    names |= {"CheckpointManager": CheckpointManager, "Tier": Tier, **own_names}
    exec(text, names)
    return names


def command(*words: str) -> str:
    (line,) = [line for line in _COMMANDS if line.split()[1] == words[0]]
    text = line.replace("/mnt/backup", "backup").replace("python eval.py", "echo")
    outcome = CliRunner().invoke(app, shlex.split(text)[1:] + list(words[1:]))
    assert outcome.exit_code in (0, 1), outcome.output  # 1: `ckpt diff` has found differences
    return outcome.output


def equal(model: nn.Module, seed: int) -> bool:
    saved = job(seed)["model"].state_dict()
    return all(torch.equal(value, saved[name]) for name, value in model.state_dict().items())


def test_the_weights_alone() -> None:
    assert equal(answer('ckpt.load("runs/gpt", "model")')["model"], 3)


def test_the_weights_are_followed() -> None:
    names = answer("ckpt.follow")
    assert equal(names["model"], 3)
    assert names["version"].step == 300


def test_the_losses_of_removed_steps_are_in_the_history() -> None:
    assert CliRunner().invoke(app, ["rm", "runs/gpt", "300"]).exit_code == 0
    rows = answer("opened.history()")["rows"]
    assert [(row["step"], row["state"], row["loss"]) for row in rows] == [
        (100, "committed", 3.0),
        (200, "committed", 2.0),
        (300, "removed", 1.0),
    ]


def test_the_run_goes_on_from_an_older_step() -> None:
    assert equal(answer("step=200")["model"], 2)
    state = job(5)
    with CheckpointManager("runs/gpt") as manager:
        report = manager.restore(state)
        assert manager.steps() == [100, 200]
    assert report is not None
    assert report.step == 200
    assert equal(state["model"], 2)


def test_a_frozen_base_is_shared() -> None:
    state = job(1)
    state["model"][0].requires_grad_(False)
    with CheckpointManager("runs/gpt") as manager:
        manager.save(state, 400)
    answer("base=", state=state)
    outcome = CliRunner().invoke(app, ["ls", "runs/lora"])
    assert "and step 400 of ../gpt" in outcome.output
    assert equal_weights(ckpt.load("runs/lora", "model"), state["model"])


def equal_weights(weights: Any, model: nn.Module) -> bool:
    return all(torch.equal(value, weights[name]) for name, value in model.state_dict().items())


def test_the_best_step_stays() -> None:
    answer("keep_best")
    with CheckpointManager("runs/gpt") as manager:
        assert manager.steps() == [300, 400]
    assert "loss" in CliRunner().invoke(app, ["ls", "runs/gpt"]).output


def test_the_best_step_is_loaded() -> None:
    assert all(
        torch.equal(value, job(3)["model"].state_dict()[name])
        for name, value in answer("best:loss")["weights"].items()
    )


def test_another_optimizer_begins_afresh() -> None:
    names = answer("torch.optim.SGD")
    assert equal(names["model"], 3)
    assert not names["optimizer"].state


def test_another_learning_rate_keeps_the_moments() -> None:
    names = answer("param_groups")
    assert names["optimizer"].param_groups[0]["lr"] == 0.5
    saved = job(3)["optimizer"].state_dict()["state"][0]["exp_avg"]
    assert torch.equal(names["optimizer"].state_dict()["state"][0]["exp_avg"], saved)


def test_the_weights_of_another_run() -> None:
    assert equal(answer('rename={"net": "model"}')["model"], 3)


def test_the_average_is_evaluated() -> None:
    with CheckpointManager("runs/ema") as manager:
        manager.save({"ema": torch.optim.swa_utils.AveragedModel(job(2)["model"])}, 1)
    assert equal(answer("runs/ema")["model"], 2)


def test_all_but_one_part() -> None:
    model = answer('exclude="model/0.*"')["model"]
    assert torch.equal(model[0].weight, job(5)["model"][0].weight)
    assert torch.equal(model[1].weight, job(3)["model"][1].weight)


def test_a_cell_that_runs_again_takes_over() -> None:
    first, second = answer("manager = Check"), answer("manager = Check")
    second["manager"].save(second["state"], step=500)
    assert equal(second["model"], 3)
    second["manager"].close()
    first["manager"].close()


@pytest.mark.parametrize("method", ["fork", *torture("spawn")])
def test_ranks_are_started_by_spawn(tmp_path: Path, method: str) -> None:
    (text,) = [text for text in _PYTHON if "init_process_group" in text]
    arguments = (2, text, f"file://{tmp_path}/meeting")
    start: Any = torch.multiprocessing.start_processes
    start(_train, arguments, nprocs=2, start_method=method)


def _train(rank: int, ranks: int, text: str, meeting: str) -> None:
    state = job(5)
    names: dict[str, Any] = {
        "CheckpointManager": CheckpointManager, "torch": torch, "state": state,
        "__name__": "train",
    }  # fmt: skip
    exec(text, names)
    names["train"](rank, ranks, meeting)
    assert equal(state["model"], 3)
    torch.distributed.destroy_process_group()


def test_a_file_for_other_programs() -> None:
    command("export")
    weights = load_file("gpt.safetensors")
    model = job(5)["model"]
    model.load_state_dict(weights)
    assert equal(model, 3)


def test_two_steps_are_compared() -> None:
    assert "model/0.weight" in command("diff")


def test_a_run_is_copied(tmp_path: Path) -> None:
    (tmp_path / "backup").mkdir()
    command("copy")
    with CheckpointManager("backup/gpt") as manager:
        assert manager.steps() == [100, 200, 300]


def test_steps_are_pruned_for_show(run: Path) -> None:
    command("prune")
    assert len(list(run.glob("*step*"))) == 3


def test_each_step_is_handled_once() -> None:
    assert command("watch", "--once").count("step") >= 3


@pytest.mark.parametrize("text", _IN_PROSE)
def test_a_command_in_the_text_does_it(tmp_path: Path, text: str) -> None:
    with CheckpointManager("runs/gpt") as manager:
        manager.restore(job(5))
        manager.save(job(4), metrics={"loss": 0.5})
    (tmp_path / "gpt2").mkdir()
    (tmp_path / "gpt2" / "config.json").write_text('{"model_type": "gpt2"}')
    outcome = CliRunner().invoke(app, shlex.split(text)[1:])
    assert outcome.exit_code == 0, outcome.output
    assert outcome.output


def test_the_text_has_these_commands() -> None:
    words = [tuple(text.split()[1:2]) for text in _IN_PROSE]
    assert {word for (word,) in words} == {"export", "rollback", "log", "branch", "ls", "rm"}


def test_each_answer_in_code_is_run_here() -> None:
    assert len(_PYTHON) == 14
    assert {line.split()[1] for line in _COMMANDS} == {
        "watch",
        "export",
        "diff",
        "copy",
        "prune",
    }
