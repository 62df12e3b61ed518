"""``ckpt.load`` gives what ``torch.load`` gives of a file with the same state."""

from __future__ import annotations

import re
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from torch import nn

import ckpt
from ckpt import CheckpointManager, PerRank, Tier
from ckpt.errors import ChecksumMismatch, ConfigError, EntryMissing, NoCheckpoint
from tests.exchange.states import same


class Net(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        first = nn.Linear(4, 4)
        self.blocks = nn.ModuleList([first, nn.Linear(4, 4)])
        self.head = nn.Linear(4, 4, bias=False)
        self.head.weight = first.weight


@pytest.fixture(scope="module")
def state() -> dict[str, Any]:
    model = Net()
    optimizer = torch.optim.AdamW(model.parameters(), lr=0.5)
    model.head(model.blocks[1](torch.ones(2, 4))).sum().backward()
    optimizer.step()
    return {
        "model": model, "optimizer": optimizer, "step": 3, "array": np.arange(3.0),
        "history": [1, torch.ones(2), {"a/b": torch.zeros(0, 3)}], "rng": PerRank([7]),
        "column": torch.arange(6.0).reshape(2, 3).t(), "half": torch.ones(2, dtype=torch.bfloat16),
    }  # fmt: skip


@pytest.fixture(scope="module")
def root(state: dict[str, Any], tmp_path_factory: pytest.TempPathFactory) -> Path:
    path = tmp_path_factory.mktemp("root")
    with CheckpointManager(path, chunk_size=1024) as manager:
        manager.save({"model": nn.Linear(2, 2)}, step=1)
        manager.save(state, step=3)
    return path


def test_a_model_loads_what_is_read_of_it(root: Path, state: dict[str, Any]) -> None:
    weights = ckpt.load(root, "model")
    assert weights.keys() == state["model"].state_dict().keys()
    model = Net()
    model.load_state_dict(weights)
    assert all(map(torch.equal, model.state_dict().values(), state["model"].state_dict().values()))
    assert weights["head.weight"] is weights["blocks.0.weight"]


class Renamed(nn.Module):
    """Since its second version, its only entry has another name."""

    _version = 2

    def __init__(self) -> None:
        super().__init__()
        self.scale = nn.Parameter(torch.ones(1))

    def _load_from_state_dict(self, state_dict, prefix, local_metadata, *args):  # type: ignore[no-untyped-def]
        if local_metadata.get("version") != 2:
            state_dict[prefix + "scale"] = state_dict.pop(prefix + "factor")
        super()._load_from_state_dict(state_dict, prefix, local_metadata, *args)


def test_modules_are_told_the_versions_that_were_saved(tmp_path: Path) -> None:
    model = nn.Sequential(Renamed(), nn.Sequential(nn.BatchNorm1d(1), Renamed()), nn.ReLU())
    with CheckpointManager(tmp_path) as manager:
        manager.save({"model": model}, step=1)
    weights = ckpt.load(tmp_path, "model")
    saved = model.state_dict()._metadata  # type: ignore[attr-defined]
    assert weights._metadata == {name: saved[name] for name in ("", "0", "1", "1.0", "1.1")}
    model.load_state_dict(weights)
    assert ckpt.load(tmp_path)["model"]._metadata == weights._metadata


def test_an_optimizer_loads_what_is_read_of_it(root: Path, state: dict[str, Any]) -> None:
    optimizer = torch.optim.AdamW(Net().parameters())
    optimizer.load_state_dict(ckpt.load(root, "optimizer"))
    ours, saved = optimizer.state_dict(), state["optimizer"].state_dict()
    assert ours["param_groups"] == saved["param_groups"]
    assert ours["state"].keys() == saved["state"].keys()
    for number, values in saved["state"].items():
        assert all(map(torch.equal, values.values(), ours["state"][number].values()))


def test_an_optimizer_that_has_loaded_takes_a_new_group(root: Path) -> None:
    """torch refuses a group without names in an optimizer with names, and loading gives it some."""
    optimizer = torch.optim.AdamW(Net().parameters())
    optimizer.load_state_dict(ckpt.load(root, "optimizer"))
    optimizer.add_param_group({"params": [nn.Parameter(torch.ones(1))]})
    assert len(optimizer.param_groups) == 2


@pytest.mark.parametrize(
    "arguments",
    [
        {"name": 5}, {"name": ["model"]}, {"name": b"model"}, {"step": "best:"}, {"step": -1},
        {"step": True}, {"device": "cuda:99"}, {"device": "nothing"}, {"device": None},
        {"dtype": "bfloat16"}, {"dtype": torch.float4_e2m1fn_x2},
    ],
)  # fmt: skip
def test_a_wrong_argument_is_named(root: Path, arguments: dict[str, Any]) -> None:
    ((argument, value),) = arguments.items()
    with pytest.raises(ConfigError, match=re.escape(f"{argument}={value!r}: ")):
        ckpt.load(root, **arguments)


def test_a_whole_state_is_read(root: Path, state: dict[str, Any]) -> None:
    values = ckpt.load(root)
    assert values.keys() == state.keys()
    assert values["step"] == 3
    assert values["rng"] == [[7]]
    assert torch.equal(values["array"], torch.arange(3.0, dtype=torch.float64))
    assert values["column"].stride() == state["column"].stride()
    assert values["history"][2]["a/b"].shape == (0, 3)


@pytest.mark.parametrize(
    ("name", "expected"),
    [("step", 3), ("history/0", 1), ("rng/0/0", 7), ("optimizer/param_groups/0/lr", 0.5)],
)
def test_a_plain_value_has_a_name(root: Path, name: str, expected: object) -> None:
    assert ckpt.load(root, name) == expected


@pytest.mark.parametrize(
    "name", ["history/1", "history/2/a~1b", "column", "half", "model/blocks.0.weight"]
)
def test_a_tensor_has_a_name(root: Path, state: dict[str, Any], name: str) -> None:
    saved = {
        "history/1": state["history"][1], "history/2/a~1b": state["history"][2]["a/b"],
        "column": state["column"], "half": state["half"],
        "model/blocks.0.weight": state["model"].blocks[0].weight.detach(),
    }  # fmt: skip
    assert same(ckpt.load(root, name), saved[name])


def test_the_state_of_one_parameter_has_a_name(root: Path, state: dict[str, Any]) -> None:
    value = ckpt.load(root, "optimizer/model/blocks.1.bias/exp_avg")
    parameter = state["model"].blocks[1].bias
    assert torch.equal(value, state["optimizer"].state[parameter]["exp_avg"])


def test_only_the_part_is_read(root: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    names: list[str] = []
    from ckpt.catalog.tensor_reader import StepReader

    read = StepReader.read
    monkeypatch.setattr(
        StepReader, "read", lambda self, wanted: (names.extend(w.name for w in wanted), read(self, wanted))[1]  # noqa: E501
    )  # fmt: skip
    ckpt.load(root, "history")
    assert names == ["history/1"]


def test_floats_take_a_dtype_and_all_tensors_a_device(root: Path) -> None:
    values = ckpt.load(root, dtype=torch.bfloat16, device="meta")
    assert values["column"].dtype is torch.bfloat16
    assert values["column"].device.type == "meta"
    assert ckpt.load(root, "history", dtype=torch.float64)[1].dtype is torch.float64


def test_packed_numbers_keep_their_dtype(tmp_path: Path) -> None:
    packed = torch.arange(6, dtype=torch.uint8).view(torch.float4_e2m1fn_x2)
    with CheckpointManager(tmp_path) as manager:
        manager.save({"packed": packed, "scale": torch.ones(2)}, step=1)
    values = ckpt.load(tmp_path, dtype=torch.bfloat16)
    assert values["scale"].dtype == torch.bfloat16
    assert values["packed"].dtype == torch.float4_e2m1fn_x2
    assert torch.equal(values["packed"].view(torch.uint8), packed.view(torch.uint8))


def test_values_beyond_the_range_of_a_dtype_are_named(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    state = {
        "large": torch.tensor([[1.0, 1e5]]), "endless": torch.tensor([torch.inf, torch.nan]),
        "small": torch.ones(3), "number": torch.tensor(-1e5), "whole": torch.tensor([100_000]),
    }  # fmt: skip
    with CheckpointManager(tmp_path) as manager:
        manager.save(state, step=1)
    assert ckpt.load(tmp_path, dtype=torch.bfloat16)["large"].isfinite().all()
    assert caplog.messages == []
    assert ckpt.load(tmp_path, dtype=torch.float16)["large"].isinf().any()
    (warning,) = caplog.messages
    assert "dtype=torch.float16: values of 'large', 'number' are beyond the range" in warning


def test_the_default_device_of_a_script_is_not_that_of_what_is_read(
    root: Path, state: dict[str, Any]
) -> None:
    """Scripts and engines set one for the tensors that they make."""
    with torch.device("meta"):
        weights = ckpt.load(root, "model")
        with ckpt.open(root) as opened:
            column, empty = opened.tensor("column")[1:], opened.tensor("history/2/a~1b")[...]
        with ckpt.follow(root, "model", timeout_seconds=60) as versions:
            version = next(versions)
    assert same(dict(weights), dict(state["model"].state_dict()))
    assert same(dict(version.weights), dict(weights))
    assert torch.equal(column, state["column"][1:])
    assert empty.device.type == "cpu"


def test_an_older_step_and_the_options_of_a_tier(root: Path) -> None:
    assert ckpt.load(Tier(str(root)), "model", step=1)["weight"].shape == (2, 2)
    with pytest.raises(NoCheckpoint):
        ckpt.load(root, step=2)


def test_a_name_that_is_not_there_is_an_error_with_names_like_it(root: Path) -> None:
    with pytest.raises(EntryMissing, match=r"model/blocks\.0\.weight"):
        ckpt.load(root, "model/blocks.0.weights")
    for name in ("model/blocks.0.weight/deeper", "modle", "step/0", "history/7"):
        with pytest.raises(EntryMissing):
            ckpt.load(root, name)


def test_a_dtype_of_integers_is_refused(root: Path) -> None:
    with pytest.raises(ConfigError, match="floating-point"):
        ckpt.load(root, dtype=torch.int8)


def test_an_empty_name_is_refused(root: Path) -> None:
    with pytest.raises(ConfigError, match="whole state"):
        ckpt.load(root, "")


def test_damage_is_an_error(root: Path, tmp_path: Path) -> None:
    with CheckpointManager(tmp_path) as manager:
        manager.save({"t": torch.ones(64)}, step=1)
    (file,) = tmp_path.rglob("rank*.safetensors*")
    raw = bytearray(file.read_bytes())
    raw[-5] ^= 1
    file.write_bytes(raw)
    with pytest.raises(ChecksumMismatch):
        ckpt.load(tmp_path, "t")
