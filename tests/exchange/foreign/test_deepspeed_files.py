"""Universal checkpoints of DeepSpeed are read, and its other files say what they lack.

The files here are as DeepSpeed 0.19.8 writes them. ``make imports`` runs DeepSpeed itself.
"""

from __future__ import annotations

import os
import re
from pathlib import Path
from typing import Any

import pytest
import torch

from ckpt import CheckpointManager
from ckpt.exchange.foreign.deepspeed_files import read_universal
from tests.cli.conftest import Cli
from tests.exchange.folders.compare import is_same
from tests.exchange.folders.net import build, moments, trained

FILE = "mp_rank_00_model_states.pt"


class Scaler:
    """A class that only pickle could load."""


def engine(net: torch.nn.Module, stage: int) -> dict[str, Any]:
    """Return the content of the engine's file, whose weights are bfloat16."""
    named = dict(net.named_parameters())
    module = {name: value.bfloat16() for name, value in net.state_dict().items()}
    if stage == 3:
        module |= {name: torch.empty(0, dtype=torch.bfloat16) for name in named}
    return {
        "module": module,
        "buffer_names": ["scale"],
        "optimizer": None,
        "param_shapes": [{name: value.shape for name, value in named.items()}],
        "shared_params": {},
        "lr_scheduler": {"last_batch_iteration": 1},
        "global_steps": 2,
        "ds_config": {"scheduler": {"type": "WarmupLR"}},
        "client": Scaler(),
    }


def universal(folder: str, stage: int) -> tuple[torch.nn.Module, torch.optim.Optimizer]:
    """Write a universal checkpoint. ZeRO 3 has flat values, and the step for all parameters."""
    net, optimizer = trained()
    os.makedirs(f"{folder}/zero")
    name = FILE if stage == 1 else f"zero_pp_rank_0_{FILE}"
    torch.save(engine(net, stage), f"{folder}/{name}")
    for key, state in moments(net, optimizer).items():
        place = Path(folder, "zero", key)
        place.mkdir()
        weight = net.get_parameter(key).detach()
        values = {"fp32": weight, **state}
        if stage == 3:
            del values["step"]
        for kind, value in values.items():
            is_plain = stage == 3 or kind == "step"
            held = value.flatten() if stage == 3 else value
            torch.save(held if is_plain else {"cat_dim": 0, "param": value}, place / f"{kind}.pt")
    os.mkdir(f"{folder}/zero/scale")  # DeepSpeed writes the buffers too
    torch.save({"param": net.get_buffer("scale")}, f"{folder}/zero/scale/fp32.pt")
    group = {**optimizer.state_dict()["param_groups"][0], "params": [0]}
    common: dict[str, Any] = {"loss_scaler": Scaler(), "param_groups": [group]}
    if stage == 3:
        step = {"step": torch.tensor(2.0), "exp_avg": torch.zeros(236)}
        common["optimizer_state_dict"] = {"state": {0: step}, "param_groups": [group]}
    torch.save(common, f"{folder}/zero/optimizer_state.pt")
    return net, optimizer


@pytest.mark.parametrize("stage", [1, 3])
def test_a_universal_checkpoint_restores_as_a_whole(cli: Cli, stage: int) -> None:
    net, optimizer = universal("uni", stage)
    ran = cli("import", "uni", "runs", "--step", 2)
    assert ran.code == 0, ran.err
    assert "from deepspeed" in ran.out
    assert "'client' is not taken" in ran.err
    other, another = build(seed=1)
    schedule: dict[str, Any] = {}
    state = {"model": other, "optimizer": another, "scheduler": schedule, "deepspeed": {}}
    with CheckpointManager("runs") as manager:
        report = manager.restore(state)
    assert report is not None
    assert (report.missing, report.unexpected) == ((), ())
    assert is_same(dict(other.state_dict()), dict(net.state_dict()))
    assert is_same(moments(other, another), moments(net, optimizer))
    assert another.param_groups[0]["lr"] == 0.01
    assert state["scheduler"] == {"last_batch_iteration": 1}
    assert state["deepspeed"]["global_steps"] == 2  # type: ignore[index]


def test_an_engine_takes_the_schedule_and_the_counters_with_the_optimizer(cli: Cli) -> None:
    universal("uni", 1)
    cli("import", "uni", "runs", "--step", 2)
    ran = cli("show", "runs")
    assert re.search(r"optimizer/extra/counters/global_steps +2\n", ran.out)
    assert re.search(r"optimizer/extra/scheduler/kind +'WarmupLR'\n", ran.out)
    assert re.search(r"optimizer/extra/scheduler/state/last_batch_iteration +1\n", ran.out)


def test_a_small_file_is_not_mapped_after_it_was_read(tmp_path: Path) -> None:
    """A process may have 65,530 maps, and a parameter has up to four files."""
    universal(str(tmp_path / "uni"), 1)
    folder = read_universal(str(tmp_path / "uni"))
    assert folder is not None
    assert f"{tmp_path}/uni/zero" not in Path("/proc/self/maps").read_text()
    assert folder.state["model"]


def test_a_group_without_its_names_leaves_the_optimizer_out_with_a_note(cli: Cli) -> None:
    universal("uni", 1)
    path = "uni/zero/optimizer_state.pt"
    common = torch.load(path, weights_only=False)
    torch.save({**common, "param_groups": common["param_groups"] * 2}, path)
    ran = cli("import", "uni", "runs", "--step", 2)
    assert ran.code == 0
    assert "the optimizer is not taken" in ran.err


@pytest.mark.parametrize(
    ("name", "content"),
    [
        ("zero/first.weight/fp32.pt", {"param": torch.zeros(3, 4)}),
        ("zero/first.weight/fp32.pt", {"other": torch.zeros(8, 4)}),
        ("zero/first.weight/fp32.pt", 3),
        ("zero/optimizer_state.pt", {}),
        (FILE, {"module": {}}),
        (FILE, {"module": {"../../x": torch.zeros(2)}, "param_shapes": [{"../../x": (2,)}]}),
    ],
)
def test_files_that_are_not_as_deepspeed_writes_them_are_refused(
    cli: Cli, name: str, content: Any
) -> None:
    universal("uni", 1)
    torch.save(content, f"uni/{name}")
    ran = cli("import", "uni", "runs", "--step", 2)
    assert ran.code == 4
    assert ran.err.count("\n") == 1
    assert not Path("runs").exists()


def test_a_missing_weight_is_told(cli: Cli) -> None:
    universal("uni", 1)
    os.remove("uni/zero/first.weight/fp32.pt")
    ran = cli("import", "uni", "runs", "--step", 2)
    assert ran.code == 4
    assert "fp32.pt is missing" in ran.err


def test_a_weight_that_is_not_trained_and_in_pieces_is_refused(cli: Cli) -> None:
    universal("uni", 3)
    path = f"uni/zero_pp_rank_0_{FILE}"
    content = torch.load(path, weights_only=False)
    content["module"]["frozen"] = torch.empty(0)
    torch.save({**content, "frozen_param_shapes": {"frozen": torch.Size([4])}}, path)
    ran = cli("import", "uni", "runs", "--step", 2)
    assert ran.code == 2
    assert "has no elements of 'frozen'" in ran.err
    assert "zero_to_fp32.py RUN fp32" in ran.err


@pytest.mark.parametrize("kind", ["model", "optim"])
def test_the_file_of_one_rank_says_how_to_get_the_weights(cli: Cli, kind: str) -> None:
    os.makedirs("run/global_step2")
    name = f"run/global_step2/zero_pp_rank_0_mp_rank_00_{kind}_states.pt"
    torch.save(engine(trained()[0], 3), name)
    ran = cli("import", name, "runs", "--step", 2)
    assert ran.code == 2
    run = os.path.abspath("run")
    assert f"python {run}/zero_to_fp32.py {run} fp32 --tag global_step2" in ran.err
    assert not Path("runs").exists()


def test_a_file_of_a_universal_checkpoint_names_its_folder(cli: Cli) -> None:
    universal("uni", 3)
    ran = cli("import", f"uni/zero_pp_rank_0_{FILE}", "runs", "--step", 2)
    assert ran.code == 2
    assert ran.err.rstrip().endswith("name uni")


def plain(content: dict[str, Any]) -> dict[str, Any]:
    return {key: value for key, value in content.items() if key != "client"}


def test_weights_without_elements_are_refused_whatever_the_name(cli: Cli) -> None:
    os.makedirs("run/step")
    torch.save(plain(engine(trained()[0], 3)), "run/step/copy.pt")
    ran = cli("import", "run/step/copy.pt", "runs", "--step", 2)
    assert ran.code == 2
    assert "has no elements of 'first.weight'" in ran.err


@pytest.mark.parametrize("source", [f"run/global_step2/{FILE}", "run/global_step2"])
def test_the_file_of_the_engine_names_what_is_elsewhere(cli: Cli, source: str) -> None:
    net, _ = trained()
    os.makedirs("run/global_step2")
    torch.save(plain(engine(net, 1)), f"run/global_step2/{FILE}")
    ran = cli("import", source, "runs", "--step", 2)
    assert ran.code == 0, ran.err
    assert "has the bfloat16 weights that DeepSpeed's engine computes with" in ran.err
    assert "--tag global_step2" in ran.err
    state = {
        "model": {name: torch.zeros_like(v) for name, v in net.bfloat16().state_dict().items()}
    }
    with CheckpointManager("runs") as manager:
        manager.restore(state, only="model")
    assert is_same(state["model"], dict(net.state_dict()))


def test_an_engine_without_zero_has_all_in_its_file(cli: Cli) -> None:
    net, optimizer = trained()
    os.makedirs("run")
    content = {**plain(engine(net, 1)), "optimizer": optimizer.state_dict()}
    torch.save(content, f"run/{FILE}")
    ran = cli("import", f"run/{FILE}", "runs", "--step", 2)
    assert ran.code == 0
    assert "left aside" not in ran.err
