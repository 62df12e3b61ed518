"""Folders of training libraries are imported with all that a run needs to go on."""

from __future__ import annotations

import json
import os
import random
from collections import defaultdict, deque
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from safetensors.torch import save_file
from torch import nn

from ckpt import CheckpointManager, PerRank, RngState
from tests.cli.conftest import Cli
from tests.exchange.folders.compare import compare, is_same
from tests.exchange.folders.net import build, trained
from tests.kit.worlds import run_script

FOLDERS = Path(__file__).parents[1] / "folders"


def written(library: str, out: Path) -> None:
    """Run a writer, which uses the real library."""
    out.mkdir()
    run_script(FOLDERS / f"write_{library}.py", out, timeout=120)


@pytest.mark.parametrize(
    ("library", "source", "kind", "aside"),
    [
        ("accelerate", "state", "accelerate", ""),
        ("lightning", "last.ckpt", "lightning", ""),
        pytest.param(
            "trainer", "checkpoint-4", "transformers", "training_args.bin",
            marks=pytest.mark.integration,
        ),
    ],
)  # fmt: skip
@pytest.mark.slow
def test_a_folder_of_the_library_itself_restores_as_a_whole(
    cli: Cli, tmp_path: Path, library: str, source: str, kind: str, aside: str
) -> None:
    if library == "trainer":
        pytest.importorskip("transformers", reason="transformers is not installed")
    written(library, tmp_path / "theirs")
    ran = cli("import", tmp_path / "theirs" / source, "runs", "--step", 4)
    assert ran.code == 0, ran.err
    assert f"from {kind}" in ran.out
    assert ("not taken" in ran.err) == bool(aside)
    assert aside in ran.err
    columns = compare(Path("runs"), tmp_path / "theirs")
    assert columns == dict.fromkeys(("weights", "optimizer", "scheduler", "position"), "yes")


def trainer_folder(folder: str = "checkpoint-4", *, ranks: int = 1) -> tuple[nn.Module, Any]:
    """Write the files of the Trainer, and return the model and the optimizer."""
    os.makedirs(folder)
    net, optimizer = trained()
    save_file(net.state_dict(), f"{folder}/model.safetensors")
    torch.save(optimizer.state_dict(), f"{folder}/optimizer.pt")
    torch.save({"last_epoch": 4, "_last_lr": [0.1]}, f"{folder}/scheduler.pt")
    torch.save(object, f"{folder}/training_args.bin")
    for rank in range(ranks):
        np.random.seed(rank)
        torch.manual_seed(rank)
        random.seed(rank)
        states = {
            "python": random.getstate(),
            "numpy": np.random.get_state(),
            "cpu": torch.get_rng_state(),
        }
        name = "rng_state.pth" if ranks == 1 else f"rng_state_{rank}.pth"
        torch.save(states, f"{folder}/{name}")
    Path(f"{folder}/trainer_state.json").write_text(json.dumps({"global_step": 4, "epoch": 0.5}))
    return net, optimizer


def test_the_names_are_those_of_the_integration(cli: Cli) -> None:
    net, optimizer = trainer_folder()
    ran = cli("import", "checkpoint-4", "runs", "--step", 4)
    assert ran.code == 0, ran.err
    assert "not taken from checkpoint-4: training_args.bin" in ran.err
    other, another = build(seed=1)
    state: dict[str, Any] = {
        "model": other,
        "optimizer": another,
        "scheduler": {},
        "rng": PerRank(RngState()),
        "trainer": "",
    }
    with CheckpointManager("runs") as manager:
        report = manager.restore(state)
    assert report is not None
    assert (report.missing, report.unexpected) == ((), ())
    assert is_same(other.state_dict(), net.state_dict())
    assert is_same(another.state_dict()["state"], optimizer.state_dict()["state"])
    assert state["scheduler"] == {"last_epoch": 4, "_last_lr": [0.1]}
    assert json.loads(state["trainer"]) == {"global_step": 4, "epoch": 0.5}
    now = (random.getstate(), torch.get_rng_state(), numpy_state())
    random.seed(0)
    torch.manual_seed(0)
    np.random.seed(0)
    assert now[0] == random.getstate()
    assert torch.equal(now[1], torch.get_rng_state())
    assert np.array_equal(now[2], numpy_state())


def numpy_state() -> Any:
    state: Any = np.random.get_state()
    return state[1]


def test_each_rank_has_its_own_generators(cli: Cli) -> None:
    trainer_folder(ranks=2)
    assert cli("import", "checkpoint-4", "runs", "--step", 4).code == 0
    state: dict[str, Any] = {"rng": []}
    with CheckpointManager("runs") as manager:
        manager.restore(state, only="rng")
    torch.manual_seed(1)
    assert torch.equal(state["rng"][1]["torch"], torch.get_rng_state())


def test_generators_of_some_ranks_are_named_and_not_taken(cli: Cli) -> None:
    trainer_folder(ranks=2)
    os.remove("checkpoint-4/rng_state_0.pth")
    ran = cli("import", "checkpoint-4", "runs", "--step", 4)
    assert ran.code == 0
    assert "the random generators of rank 1 are not taken" in ran.err


def test_two_files_of_weights_are_refused(cli: Cli) -> None:
    net, _ = trainer_folder()
    torch.save(net.state_dict(), "checkpoint-4/pytorch_model.bin")
    ran = cli("import", "checkpoint-4", "runs", "--step", 4)
    assert ran.code == 2
    assert "model.safetensors and pytorch_model.bin" in ran.err
    assert not Path("runs").exists()


class Settings:
    """A class that only pickle could load."""


@pytest.mark.parametrize(
    "value",
    [
        Settings(),
        deque([1]),
        deque([1, 2]),
        defaultdict(int, a=1),
        {0.5: defaultdict(int, a=1, b=2)},
    ],
    ids=["class", "deque of one", "deque", "defaultdict", "number as key"],
)
def test_a_lightning_file_with_objects_is_taken_without_them(cli: Cli, value: Any) -> None:
    net, optimizer = trained()
    content = {
        "pytorch-lightning_version": "2.6.6",
        "global_step": 4,
        "state_dict": net.state_dict(),
        "optimizer_states": [optimizer.state_dict()],
        "lr_schedulers": [],
        "hyper_parameters": {"settings": value},
    }
    torch.save(content, "last.ckpt")
    ran = cli("import", "last.ckpt", "runs", "--step", 4)
    assert ran.code == 0, ran.err
    assert "'hyper_parameters' is not taken" in ran.err
    other, another = build(seed=1)
    with CheckpointManager("runs") as manager:
        manager.restore({"model": other, "optimizer": another}, only=["model", "optimizer"])
    assert is_same(other.state_dict(), net.state_dict())
    assert is_same(another.state_dict()["state"], optimizer.state_dict()["state"])


def test_a_damaged_file_of_generators_is_refused(cli: Cli) -> None:
    trainer_folder()
    path = Path("checkpoint-4/rng_state.pth")
    path.write_bytes(path.read_bytes()[:2000])
    ran = cli("import", "checkpoint-4", "runs", "--step", 4)
    assert ran.code == 4
    assert "is not a whole file of torch.save" in ran.err
    assert not Path("runs").exists()
