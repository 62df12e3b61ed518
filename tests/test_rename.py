"""Restoring under other names, in other dtypes, and from what another program or optimizer has
saved.
"""

from __future__ import annotations

import json
import re
from collections.abc import Callable, Mapping
from itertools import product
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from torch import nn
from torch.optim.swa_utils import AveragedModel

from ckpt import CheckpointManager, PerRank
from ckpt.errors import (
    ConfigError,
    DtypeMismatch,
    EntryMissing,
    EntryUnexpected,
    KindMismatch,
    OptimizerMismatch,
    RestoreError,
    ShapeMismatch,
)
from tests.kit.marks import torture
from tests.kit.pages import block
from tests.state.saving import assert_same, restored


class Net(nn.Module):
    """A network of a backbone and heads."""

    def __init__(self, backbone: str = "backbone", heads: tuple[str, ...] = ("head",)) -> None:
        super().__init__()
        self.add_module(backbone, nn.Sequential(nn.Linear(4, 4), nn.BatchNorm1d(4)))
        self.order = (backbone, *heads)
        for head in heads:
            self.add_module(head, nn.Linear(4, 4))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        for name in self.order:
            x = getattr(self, name)(x)
        return x


def job(seed: int, model: nn.Module | None = None, stepped: bool = True) -> dict[str, Any]:
    torch.manual_seed(seed)
    model = model or Net()
    for parameter in model.parameters():
        nn.init.normal_(parameter)
    optimizer = torch.optim.AdamW(model.parameters(), lr=0.1 * seed)
    if stepped:
        model(torch.rand(8, 4)).sum().backward()
        optimizer.step()
    return {
        "model": model,
        "optimizer": optimizer,
        "epoch": seed,
        "own": PerRank(torch.full((2,), seed)),
    }


@pytest.fixture
def root(tmp_path: Path) -> str:
    with CheckpointManager(str(tmp_path)) as manager:
        manager.save(job(1), 5)
    return str(tmp_path)


def unchanged(
    root: str, state: dict[str, Any], error: type[Exception], match: str, **how: Any
) -> None:
    """Check that it fails, and leaves everything as it was."""
    before = {name: t.clone() for name, t in state["model"].state_dict().items()}
    settings = [dict(group) for group in state["optimizer"].param_groups]
    with pytest.raises(error, match=match):
        restored(root, state, **how)
    assert all(torch.equal(t, before[name]) for name, t in state["model"].state_dict().items())
    assert state["epoch"] == 2
    assert [group["lr"] for group in state["optimizer"].param_groups] == [
        each["lr"] for each in settings
    ]


def moments(state: Mapping[str, Any], module: str) -> list[torch.Tensor]:
    parameter = state["model"].get_parameter(f"{module}.weight")
    return [state["optimizer"].state[parameter][key] for key in ("exp_avg", "exp_avg_sq", "step")]


@pytest.mark.parametrize(
    "rename",
    [
        {"model/trunk.*": "model/backbone.*"},
        {"model/trunk*": "model/backbone*"},
        {"*/trunk.*": "*/backbone.*"},
        {"model/trunk.0.*": "model/backbone.0.*", "model/trunk.1.*": "model/backbone.1.*"},
        lambda name: name.replace("trunk", "backbone"),
        lambda name: (
            name.replace("model/trunk.", "model/backbone.") if name.startswith("model/") else name
        ),
    ],
)
@pytest.mark.parametrize("stepped", [True, False])
def test_a_renamed_module_takes_its_optimizer_along(root: str, rename: Any, stepped: bool) -> None:
    state, saved = job(2, Net("trunk"), stepped=stepped), job(1)
    report = restored(root, state, rename=rename)
    assert torch.equal(state["model"].trunk[0].weight, saved["model"].backbone[0].weight)
    assert torch.equal(state["model"].trunk[1].running_var, saved["model"].backbone[1].running_var)
    for here, there in zip(moments(state, "trunk.0"), moments(saved, "backbone.0"), strict=True):
        assert torch.equal(here, there)
    assert ("model/trunk.0.weight", "model/backbone.0.weight") in report.renamed
    assert ("optimizer/model/trunk.0.bias", "optimizer/model/backbone.0.bias") in report.renamed
    assert not any("head" in name for pair in report.renamed for name in pair)


def test_everything_below_a_name(root: str) -> None:
    inner, saved = job(2), job(1)
    state = {
        "teacher": inner["model"],
        "nested": {"adamw": inner["optimizer"]},
        "mine": PerRank(torch.zeros(2, dtype=torch.int64)),
    }
    report = restored(
        root,
        state,
        rename={"teacher": "model", "nested/adamw": "optimizer", "mine": "own"},
        only=["*"],
        strict=False,
    )
    assert torch.equal(inner["model"].head.weight, saved["model"].head.weight)
    assert torch.equal(moments(inner, "head")[0], moments(saved, "head")[0])
    assert inner["optimizer"].param_groups[0]["lr"] == 0.1
    assert state["mine"].value.tolist() == [1, 1]
    assert report.unexpected == ("epoch",)
    assert report.missing == ()
    with pytest.raises(DtypeMismatch, match=r"^'own' is saved as int64"):
        restored(root, {"own": PerRank(torch.zeros(2))}, only="own")


def test_the_average_of_a_model_fills_a_plain_model_and_the_error_says_how(tmp_path: Path) -> None:
    average, net = AveragedModel(Net()), Net()
    with CheckpointManager(tmp_path) as manager:
        manager.save({"ema": average}, 1)
        with pytest.raises(EntryMissing) as refused:
            manager.restore({"net": net}, only="net", rename={"net": "ema/module"})
        (text,) = re.findall(r"rename=(\{.*\})", str(refused.value))
        assert text == '{"net/*": "ema/module.*"}'
        assert text in block("docs/how-do-i.md", "runs/ema")
        manager.restore({"net": net}, only="net", rename=json.loads(text))
    assert_tensors(net.state_dict(), average.module.state_dict())


def test_two_names_of_one_source_and_a_rule_for_many(root: str) -> None:
    state = job(2, Net(heads=("one", "two")))
    saved = job(1)["model"]
    report = restored(
        root, state, rename={"model/one.*": "model/head.*", "model/two.*": "model/head.*"}
    )
    for head in (state["model"].one, state["model"].two):
        assert torch.equal(head.weight, saved.head.weight)
    assert state["model"].one.weight.data_ptr() != state["model"].two.weight.data_ptr()
    assert len(report.renamed) == 8
    state = {"weights": [torch.zeros(4, 4), torch.zeros(4, 4)], "array": np.zeros(4, np.float32)}
    restored(
        root,
        state,
        rename={"weights/*": "model/head.weight", "array": "model/head.bias"},
        strict=False,
    )
    assert torch.equal(state["weights"][1], saved.head.weight)
    assert state["array"].tolist() == saved.head.bias.tolist()


def test_one_optimizer_from_two(tmp_path: Path) -> None:
    saved = job(1)
    model = saved["model"]
    parts = {"model": model}
    for name in ("backbone", "head"):
        parts[f"opt_{name}"] = torch.optim.AdamW(model.get_submodule(name).parameters(), lr=0.5)
    for name in ("backbone", "head"):
        parts[f"opt_{name}"].step()
    with CheckpointManager(str(tmp_path)) as manager:
        manager.save(parts, 1)
    state = {key: value for key, value in job(2).items() if key in ("model", "optimizer")}
    rules = {
        "optimizer/model/backbone.*": "opt_backbone/model/backbone.*",
        "optimizer/model/head.*": "opt_head/model/head.*",
    }
    restored(str(tmp_path), state, rename=rules)
    there = parts["opt_head"].state[model.head.weight]["exp_avg"]
    assert torch.equal(moments(state, "head")[0], there)
    assert state["optimizer"].param_groups[0]["lr"] == 0.5


def assert_tensors(have: dict[str, torch.Tensor], want: dict[str, torch.Tensor]) -> None:
    assert have.keys() == want.keys()
    for name, tensor in want.items():
        assert torch.equal(have[name], tensor), name


def test_a_plain_state_dict_into_a_module_and_a_module_into_tensors(
    tmp_path: Path, root: str
) -> None:
    saved = job(1)["model"]
    with CheckpointManager(str(tmp_path / "plain")) as manager:
        manager.save(
            {"weights": {f"module.{name}": t for name, t in saved.state_dict().items()}}, 1
        )
    state = {"model": job(2)["model"]}
    restored(
        str(tmp_path / "plain"), state, rename={"model/*": "weights/module.*", "model": "weights"}
    )
    assert torch.equal(state["model"].head.weight, saved.head.weight)
    table = {"model": {name: torch.zeros_like(t) for name, t in saved.state_dict().items()}}
    whole = {"model": job(2)["model"]}
    for target in (table, whole):
        restored(root, target, only="model/*")
    assert_tensors(table["model"], whole["model"].state_dict())


@pytest.mark.parametrize(
    ("rename", "error", "expected"),
    [
        (
            {"modle/*": "model/*"},
            ConfigError,
            "fits 'modle/\\*'; it has 'model', 'optimizer', 'epoch'",
        ),
        ({"model/trunk": "model/backbone"}, ConfigError, r"parted by dots \(model/encoder\.\*\)"),
        (
            {"model/head.*": "model/tail.*"},
            EntryMissing,
            r"'model/tail\.weight' \(which 'model/head\.weight'",
        ),
        (
            {"model/head.weight": "model/head.bias"},
            ShapeMismatch,
            r"head\.bias' \(which 'model/head\.weight'",
        ),
        ({"model/head.weight": "epoch"}, KindMismatch, "head.weight"),
        ({"epoch": "model/head.weight"}, KindMismatch, "epoch"),
        ({"model": "optimizer"}, KindMismatch, "model"),
        (
            {"model/head.*": "model/backbone.0.*"},
            EntryUnexpected,
            r"or exclude='model/head\.",
        ),
        (
            lambda name: "model/head.weight" if name == "model/head.bias" else name,
            ShapeMismatch,
            "head.bias",
        ),
        (lambda name: 3, ConfigError, "gave 3"),
        (lambda name: {}[name], ConfigError, "failed: KeyError"),
        ({}, ConfigError, "leave it out"),
        ({"model/*": "model/*/*"}, ConfigError, "as many"),
        ({"model/x": "model/*"}, ConfigError, "as many"),
        ({"model": 3}, ConfigError, "both must be names"),
        ({"": "model"}, ConfigError, "both must be names"),
        ("model", ConfigError, "a dict of names"),
        (3, ConfigError, "a dict of names"),
    ],
)
def test_a_renaming_that_does_not_fit_changes_nothing(
    root: str, rename: Any, error: type[Exception], expected: str
) -> None:
    unchanged(root, job(2), error, expected, rename=rename)


def test_a_source_that_is_not_there_may_be_left(root: str) -> None:
    state = job(2)
    before = state["model"].head.weight.clone()
    report = restored(root, state, rename={"model/head.*": "model/tail.*"}, strict=False)
    assert report.missing == (
        "model/head.weight",
        "model/head.bias",
        "optimizer/model/head.weight",
        "optimizer/model/head.bias",
    )
    assert torch.equal(state["model"].head.weight, before)
    assert set(report.unexpected) == {
        "model/head.weight",
        "model/head.bias",
        "optimizer/model/head.weight",
        "optimizer/model/head.bias",
    }


def test_tied_weights_are_not_filled_from_two_sources(root: str) -> None:
    model: Any = Net(heads=("one", "two"))
    model.one.weight = model.two.weight
    rename = {"model/one.*": "model/head.*", "model/two.*": "model/backbone.0.*"}
    unchanged(root, job(2, model), RestoreError, "share their memory", rename=rename)
    restored(
        root,
        job(2, model),
        rename={"model/one.*": "model/head.*", "model/two.*": "model/head.*"},
        strict=False,
    )


# -- dtypes ----------------------------------------------------------------------------------------

FLOATS = ["float64", "float16", "bfloat16", "float8_e4m3fn", "float8_e5m2", "float8_e8m0fnu"]


@pytest.mark.parametrize("there", FLOATS)
@pytest.mark.parametrize("here", ["float32", "bfloat16", "float8_e4m3fn"])
def test_floats_become_other_floats_when_asked(tmp_path: Path, here: str, there: str) -> None:
    values = torch.rand(300, 7).mul(4).to(getattr(torch, there))
    state = {
        "whole": torch.zeros(300, 7, dtype=getattr(torch, here)),
        "strided": torch.zeros(7, 300, dtype=getattr(torch, here)).t(),
    }
    with CheckpointManager(str(tmp_path), chunk_size=1 << 12) as manager:
        manager.save({"whole": values, "strided": values}, 1)
        if here != there:
            with pytest.raises(DtypeMismatch, match="cast=True"):
                manager.restore(state)
        report = manager.restore(state, cast=True)
    assert report is not None
    expected = values.to(getattr(torch, here))
    for tensor in state.values():
        assert torch.equal(tensor.contiguous().view(torch.uint8), expected.view(torch.uint8))
    assert report.converted == (
        () if here == there else (("whole", there, here), ("strided", there, here))
    )
    assert report.nbytes == 2 * values.nbytes


@pytest.mark.parametrize("here", ["float16", "float8_e4m3fn", "float8_e5m2"])
def test_a_value_beyond_the_range_is_named(
    tmp_path: Path, here: str, caplog: pytest.LogCaptureFixture
) -> None:
    names = ("large", "small", "infinite")
    saved = {name: torch.ones(3, 2) for name in names}
    saved["large"][1, 1], saved["infinite"][0, 0] = 1e9, torch.inf
    with CheckpointManager(str(tmp_path)) as manager:
        manager.save(saved, 1)
        manager.restore({name: torch.zeros(3, 2) for name in names}, cast=True)
        assert "beyond the range" not in caplog.text
        half = {name: torch.zeros(3, 2, dtype=getattr(torch, here)) for name in names}
        manager.restore(half, cast=True)
    (line,) = [text for text in caplog.messages if "beyond the range" in text]
    assert "values of 'large' are beyond" in line


@pytest.mark.parametrize(
    ("there", "here", "good"),
    [
        ("int32", "int64", True), ("uint8", "int16", True), ("int64", "int32", False), ("int8", "uint8", False),  # noqa: E501
        ("uint64", "int64", False), ("bool", "uint8", False), ("int32", "float32", False), ("complex64", "float32", False),  # noqa: E501
        ("float32", "complex64", False), ("complex64", "complex128", True), ("float32", "int32", False),  # noqa: E501
    ],
)  # fmt: skip
def test_what_would_lose_is_no_cast(tmp_path: Path, there: str, here: str, good: bool) -> None:
    values = torch.arange(6).to(getattr(torch, there))
    state: dict[str, Any] = {"x": torch.full((6,), 7, dtype=getattr(torch, here)), "n": 0}
    with CheckpointManager(str(tmp_path)) as manager:
        manager.save({"x": values, "n": 1}, 1)
        if not good:
            with pytest.raises(DtypeMismatch, match="without loss"):
                manager.restore(state, cast=True)
            assert state["n"] == 0
            return
        manager.restore(state, cast=True)
    assert torch.equal(state["x"], values.to(getattr(torch, here)))


@pytest.mark.parametrize("stepped", [True, False])
def test_a_model_and_its_optimizer_in_another_dtype(root: str, stepped: bool) -> None:
    """Torch's optimizers do it: what had the dtype of its parameter has it again."""
    state = job(2, Net().to(torch.float64), stepped=False)
    if stepped:
        state["model"](torch.rand(8, 4, dtype=torch.float64)).sum().backward()
        state["optimizer"].step()
    report = restored(root, state, cast=True)
    saved = job(1)
    for here, there in zip(moments(state, "head"), moments(saved, "head"), strict=True):
        assert torch.equal(here, there.to(here.dtype))
    assert [t.dtype for t in moments(state, "head")] == [
        torch.float64,
        torch.float64,
        torch.float32,
    ]
    assert ("optimizer/model/head.weight/exp_avg", "float32", "float64") in report.converted
    state["model"](torch.rand(8, 4, dtype=torch.float64)).sum().backward()
    state["optimizer"].step()


def test_moments_of_their_own_dtype_keep_it(tmp_path: Path) -> None:
    saved = job(1, Net().to(torch.bfloat16), stepped=False)
    for parameter in saved["model"].parameters():
        saved["optimizer"].state[parameter] = {
            "step": torch.tensor(1.0),
            "exp_avg": torch.zeros_like(parameter, dtype=torch.float64),
        }
    state = job(2, stepped=False)
    with CheckpointManager(str(tmp_path)) as manager:
        manager.save(saved, 1)
        manager.restore(state, cast=True)
    held = state["optimizer"].state[state["model"].head.weight]["exp_avg"]
    assert held.dtype == torch.float64


@pytest.mark.parametrize(
    ("setting", "value"), [("cast", "float32"), ("cast", None), ("strict", "no")]
)
def test_settings_that_are_none(root: str, setting: str, value: Any) -> None:
    unchanged(root, job(2), ConfigError, setting, **{setting: value})


# -- what other programs have saved ----------------------------------------------------------------

Make = Callable[[Any], torch.optim.Optimizer]
OTHERS: dict[str, Make] = {
    "sgd": lambda p: torch.optim.SGD(p, lr=0.3),
    "momentum": lambda p: torch.optim.SGD(p, lr=0.3, momentum=0.9),
    "adagrad": lambda p: torch.optim.Adagrad(p, lr=0.3),
    "rmsprop": lambda p: torch.optim.RMSprop(p, lr=0.3),
}


@pytest.mark.parametrize(
    ("backwards", "stepped", "kind"),
    [
        *product([True], [True, False], ["sgd", "adagrad"]),
        *product([False], [True, False], ["momentum", "rmsprop"]),
        *torture(*product([True], [True, False], ["momentum", "rmsprop"])),
        *torture(*product([False], [True, False], ["sgd", "adagrad"])),
    ],
)
def test_the_state_of_another_optimizer_is_no_state_of_this_one(
    tmp_path: Path, root: str, kind: str, stepped: bool, backwards: bool
) -> None:
    state = job(2, stepped=False)
    other = state | {"optimizer": OTHERS[kind](state["model"].parameters())}
    for each in (other, state) if stepped or backwards else ():
        state["model"](torch.rand(8, 4)).sum().backward()
        each["optimizer"].step()
    if backwards:
        root = str(tmp_path / "other")
        with CheckpointManager(root) as manager:
            manager.save(other, 1)
        other = job(2, stepped=stepped)
    unchanged(root, other, OptimizerMismatch, "another kind of optimizer")
    lr = other["optimizer"].param_groups[0]["lr"]
    report = restored(root, other, strict=False)
    assert report.unexpected == ("optimizer",)
    assert other["optimizer"].param_groups[0]["lr"] == lr
    state["model"](torch.rand(8, 4)).sum().backward()
    other["optimizer"].step()


@pytest.mark.parametrize(
    ("there", "here"),
    [
        ({"amsgrad": True}, {}),
        ({}, {"amsgrad": True}),
        ({"foreach": False}, {"capturable": False, "fused": None}),
        ({"maximize": True}, {"differentiable": False}),
    ],
)
@pytest.mark.parametrize("scheduler", [True, False])
def test_options_and_schedulers_make_no_other_optimizer(
    tmp_path: Path, there: dict[str, Any], here: dict[str, Any], scheduler: bool
) -> None:
    states = [job(seed, stepped=False) for seed in (1, 2)]
    for state, options in zip(states, (there, here), strict=True):
        state["optimizer"] = torch.optim.AdamW(state["model"].parameters(), lr=0.1, **options)
        state["model"](torch.rand(8, 4)).sum().backward()
        state["optimizer"].step()
    if scheduler:
        torch.optim.lr_scheduler.OneCycleLR(states[0]["optimizer"], 1.0, total_steps=9)
        states[0]["optimizer"].param_groups[0]["of a user"] = 3
    # an older torch saves it like this
    del states[1]["optimizer"].param_groups[0]["decoupled_weight_decay"]
    with CheckpointManager(str(tmp_path)) as manager:
        manager.save(states[0], 1)
        manager.restore(states[1])
        manager.save(states[1], 2)
        manager.restore(states[0])


def test_a_plain_dict_is_given_to_an_object(tmp_path: Path) -> None:
    """``ckpt import`` makes such a dict of a scheduler in a file of ``torch.save``."""
    optimizer = job(1)["optimizer"]
    scheduler = torch.optim.lr_scheduler.StepLR(optimizer, 7)
    scheduler.last_epoch = 41
    averaged = torch.optim.swa_utils.AveragedModel(nn.Linear(2, 2))
    with CheckpointManager(str(tmp_path)) as manager:
        manager.save({"scheduler": scheduler.state_dict(), "ema": averaged.state_dict()}, 1)
        other = torch.optim.lr_scheduler.StepLR(job(2)["optimizer"], 3)
        target = torch.optim.swa_utils.AveragedModel(nn.Linear(2, 2))
        manager.restore({"scheduler": other, "ema": target})
    assert (other.step_size, other.last_epoch) == (7, 41)
    assert_same(dict(target.state_dict()), dict(averaged.state_dict()))
    with CheckpointManager(str(tmp_path / "b")) as manager:
        manager.save({"scheduler": [1, 2]}, 1)
        with pytest.raises(KindMismatch):
            manager.restore({"scheduler": other})


@pytest.mark.parametrize(
    "how",
    [{"rename": {"teacher": "model"}}, {"rename": lambda name: name.replace("teacher", "model")}],
)
def test_a_part_that_is_renamed_is_as_strict_as_one_that_is_not(
    root: str, how: dict[str, Any]
) -> None:
    """``only`` selects the state's names, also among what the checkpoint has in addition."""
    teacher = Net(heads=())
    before = {name: tensor.clone() for name, tensor in teacher.state_dict().items()}
    with pytest.raises(EntryUnexpected, match=r"model/head\.weight"):
        restored(root, {"teacher": teacher}, only="teacher", **how)
    assert all(torch.equal(tensor, before[name]) for name, tensor in teacher.state_dict().items())
    report = restored(root, {"teacher": teacher}, only="teacher", strict=False, **how)
    assert report.unexpected == ("model/head.bias", "model/head.weight")
    restored(root, {"teacher": teacher}, only="teacher/backbone.*", **how)
