"""The commands on a checkpoint of tensors inside of tensors."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file
from torch import nn
from torch.testing._internal.two_tensor import TwoTensor

import ckpt
from ckpt import CheckpointManager
from tests.cli.conftest import Cli
from tests.state.wrapping import Blocks, Quantised


def state_of(seed: int) -> dict[str, Any]:
    torch.manual_seed(seed)
    model = nn.Linear(4, 8)
    model.table = nn.Parameter(TwoTensor(torch.ones(2, 2), torch.zeros(2, 2)), requires_grad=False)
    optimizer = Quantised([model.weight, model.bias])
    model(torch.randn(3, 4)).sum().backward()
    optimizer.step()
    return {"model": model, "optimizer": optimizer, "alone": Blocks.of(torch.full((2, 4), 1.0))}


@pytest.fixture
def root(tmp_path: Path) -> Path:
    with CheckpointManager(tmp_path / "runs") as manager:
        manager.save(state_of(0), 1)
        manager.save(state_of(1), 2)
    return tmp_path / "runs"


INSIDE = {
    *(f"alone/{name}" for name in ("codes", "scale", "table")),
    *(f"model/table/{name}" for name in "ab"),
    *(
        f"optimizer/model/{parameter}/moment/{name}"
        for parameter in ("weight", "bias")
        for name in ("codes", "scale", "table")
    ),
}


def test_show_has_each_tensor_and_the_class(cli: Cli, root: Path) -> None:
    found = cli("show", root, "--json").json
    assert {tensor["name"] for tensor in found["tensors"]} >= INSIDE
    assert found["tree"]["alone"]["class"] == "tests.state.wrapping.Blocks"
    reported = cli("show", root)
    assert reported.code == 0, reported.err
    assert "alone/codes" in reported.out


def test_diff_names_the_tensor_inside(cli: Cli, root: Path) -> None:
    ran = cli("diff", root, "--step", 1, "--step", 2, "--values")
    assert ran.code == 1, ran.err
    assert "optimizer/model/weight/moment/scale" in ran.out
    assert "alone/codes" not in ran.out
    assert cli("diff", root, "--step", 1, "--step", 1).code == 0


def test_diff_shows_other_metadata(cli: Cli, tmp_path: Path) -> None:
    with CheckpointManager(tmp_path / "runs") as manager:
        for step, signed in enumerate((True, False)):
            manager.save({"t": Blocks.of(torch.ones(2, 4), signed)}, step)
    ran = cli("diff", tmp_path / "runs", "--step", 0, "--step", 1)
    assert ran.code == 1, ran.err
    assert "signed" in ran.out


def test_an_export_has_the_tensors_inside(cli: Cli, root: Path) -> None:
    assert cli("export", root, "out.safetensors").code == 0
    assert load_file("out.safetensors").keys() >= INSIDE
    ran = cli("export", root, "out.pt", "--json")
    assert ran.code == 0, ran.err
    loaded = torch.load("out.pt", weights_only=True)
    expected = state_of(1)
    assert torch.equal(loaded["alone"]["codes"], expected["alone"].codes)
    assert torch.equal(loaded["model"]["table"]["a"], torch.ones(2, 2))
    moment = expected["optimizer"].state[expected["model"].weight]["moment"]
    assert torch.equal(loaded["optimizer"]["state"][0]["moment"]["scale"], moment.scale)
    notes = {note["name"]: note["why"] for note in ran.json["changed"]}
    assert "a dict of the tensors inside" in notes["model/table"]
    assert "Blocks" in notes["optimizer/model/weight/moment"]
    assert cli("export", root, "out", "--format", "dcp").code == 0


def test_what_was_exported_is_imported_as_a_dict(cli: Cli, root: Path) -> None:
    assert cli("export", root, "out.pt").code == 0
    ran = cli("import", "out.pt", "other", "--step", 1)
    assert ran.code == 0, ran.err
    state = {
        "alone": {
            name: torch.zeros_like(getattr(state_of(1)["alone"], name))
            for name in ("codes", "scale", "table")
        }
    }
    with CheckpointManager("other") as manager:
        manager.restore(state, only="alone*")
    assert torch.equal(state["alone"]["codes"], state_of(1)["alone"].codes)


def test_a_file_of_torch_with_such_a_tensor_is_refused(cli: Cli) -> None:
    torch.save({"t": TwoTensor(torch.ones(2), torch.ones(2))}, "in.pt")
    ran = cli("import", "in.pt", "other", "--step", 1)
    assert ran.code not in (0, 1)
    assert "in.pt" in ran.err


def test_a_tensor_inside_is_read_by_its_name(root: Path) -> None:
    expected = state_of(1)["alone"]
    with ckpt.open(root) as opened:
        assert torch.equal(opened.tensor("alone/codes")[:], expected.codes)


def test_a_copy_and_a_verification_see_ordinary_tensors(cli: Cli, root: Path) -> None:
    assert cli("verify", root).code == 0
    assert cli("copy", root, "other").code == 0
    target = state_of(5)
    with CheckpointManager("other") as manager:
        manager.restore(target)
    assert torch.equal(target["alone"].codes, state_of(1)["alone"].codes)
