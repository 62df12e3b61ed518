"""Restoring a part: only some names, or what both sides have."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from torch import nn

from ckpt import CheckpointManager, PerRank
from ckpt.errors import ConfigError, EntryMissing, EntryUnexpected, RestoreError, ShapeMismatch


def job(seed: int, *, head: int = 3, deeper: bool = False) -> dict[str, Any]:
    """Return a model, its optimizer that has stepped, a scheduler and a number."""
    torch.manual_seed(seed)
    layers: list[nn.Module] = [nn.Linear(4, 4), nn.BatchNorm1d(4), nn.Linear(4, head)]
    model = nn.Sequential(*layers, *([nn.Linear(head, 2)] if deeper else []))
    optimizer = torch.optim.AdamW(model.parameters(), lr=0.1 * seed)
    model(torch.rand(8, 4)).sum().backward()
    optimizer.step()
    scheduler = torch.optim.lr_scheduler.StepLR(optimizer, 7 * seed)
    bare = {
        "ema": torch.full((3,), float(seed)),
        "array": np.full(2, seed),
        "nested": {"a": torch.full((2, 2), seed)},
        "history": [torch.full((1,), seed)],
        "own": PerRank(torch.full((2,), seed)),
    }
    return {
        "model": model,
        "optimizer": optimizer,
        "scheduler": scheduler,
        "step": 100 * seed,
    } | bare


def tensors(state: dict[str, Any]) -> dict[str, torch.Tensor]:
    """Return every tensor of model and optimizer."""
    found = {
        f"model/{name}": tensor.detach().clone()
        for name, tensor in state["model"].state_dict().items()
    }
    for name, parameter in state["model"].named_parameters():
        for key, value in state["optimizer"].state[parameter].items():
            found[f"optimizer/model/{name}/{key}"] = value.clone()
    found |= {
        "ema": state["ema"].clone(),
        "array": torch.tensor(state["array"]),
        "own": state["own"].value.clone(),
    }
    return found | {
        "nested/a": state["nested"]["a"].clone(),
        "history/0": state["history"][0].clone(),
    }


@pytest.fixture
def root(tmp_path: Path) -> str:
    with CheckpointManager(str(tmp_path)) as manager:
        manager.save(job(1), 5)
    return str(tmp_path)


def assert_taken(state: dict[str, Any], before: dict[str, torch.Tensor], *taken: str) -> None:
    """Check that names that begin with one of ``taken`` are as saved, and all others unchanged."""
    saved = tensors(job(1))
    for name, value in tensors(state).items():
        expected = saved if name.startswith(taken) else before
        assert torch.equal(value, expected[name]), name


def test_a_model_without_its_optimizer(root: str) -> None:
    state = {"model": job(2)["model"]}
    with CheckpointManager(root) as manager:
        with pytest.raises(EntryUnexpected):
            manager.restore(state)
        report = manager.restore(state, only="model/*")
    assert report is not None
    assert report.nbytes == sum(t.nbytes for t in job(1)["model"].state_dict().values())
    assert report.read_bytes < 2 * report.nbytes
    for name, value in job(1)["model"].state_dict().items():
        assert torch.equal(state["model"].state_dict()[name], value)


@pytest.mark.parametrize(
    ("only", "taken"),
    [
        ("model/*", ["model/"]),
        ("model/0.*", ["model/0."]),
        (["model/2.weight", "optimizer/model/2.*"], ["model/2.weight", "optimizer/model/2."]),
        ("optimizer/*", ["optimizer/"]),
        (["*"], [""]),
        ("model", ["model/"]),
        ("model/", ["model/"]),
        ("nested", ["nested/"]),
        ("history/*", ["history/"]),
        (["ema", "array", "own"], ["ema", "array", "own"]),
        ("step", ["nothing"]),
    ],
)
def test_what_is_not_asked_for_keeps_what_it_has(
    root: str, only: str | list[str], taken: list[str]
) -> None:
    state = job(2)
    before = tensors(state)
    with CheckpointManager(root) as manager:
        manager.restore(state, only=only)
    assert_taken(state, before, *taken)
    whole = only == ["*"]
    assert state["step"] == (100 if whole or only == "step" else 200)
    assert state["scheduler"].step_size == (7 if whole else 14)
    lr = state["optimizer"].param_groups[0]["lr"]
    assert lr == (0.1 if whole or only == "optimizer/*" else 0.2)


def test_the_settings_of_an_optimizer_alone(root: str) -> None:
    state = job(2)
    before = tensors(state)
    with CheckpointManager(root) as manager:
        manager.restore(state, only="optimizer/param_groups")
    assert_taken(state, before, "nothing")
    assert state["optimizer"].param_groups[0]["lr"] == 0.1


def test_what_is_not_asked_for_need_not_fit(root: str) -> None:
    state = job(2) | {
        "ema": torch.zeros(99),
        "history": [torch.zeros(1)] * 5,
        "own": PerRank("text"),
    }
    with CheckpointManager(root) as manager:
        manager.restore(state, only="model/*")
    assert torch.equal(state["model"][0].weight, job(1)["model"][0].weight)


def test_names_that_one_side_lacks_are_told_unless_strict(root: str) -> None:
    state = job(2, deeper=True) | {"new": torch.full((2,), 3.0)}
    del state["scheduler"]
    before = tensors(state)
    with CheckpointManager(root) as manager:
        with pytest.raises(EntryMissing):
            manager.restore(state)
        assert all(torch.equal(value, before[name]) for name, value in tensors(state).items())
        report = manager.restore(state, strict=False)
    assert report is not None
    assert sorted(report.missing) == [
        "model/3.bias",
        "model/3.weight",
        "new",
        "optimizer/model/3.bias",
        "optimizer/model/3.weight",
    ]
    assert report.unexpected == ("scheduler",)
    assert_taken(
        state,
        before,
        *("ema", "array", "own", "nested", "history"),
        "model/0",
        "model/1",
        "model/2",
        "optimizer/model/0",
        "optimizer/model/1",
        "optimizer/model/2",
    )
    assert state["new"].tolist() == [3.0, 3.0]


def test_a_whole_restore_lacks_nothing(root: str) -> None:
    with CheckpointManager(root) as manager:
        report = manager.restore(job(2), strict=False)
    assert report is not None
    assert report.missing == report.unexpected == ()


def test_a_shape_that_differs_is_an_error_also_then_unless_it_is_left_out(root: str) -> None:
    state = job(2, head=5)
    before = tensors(state)
    with CheckpointManager(root) as manager:
        with pytest.raises(ShapeMismatch, match=r"model/2\.weight"):
            manager.restore(state, strict=False)
        manager.restore(state, only=["model/0.*", "model/1.*"])
    assert_taken(state, before, "model/0.", "model/1.")


def test_a_pattern_that_fits_nothing_of_the_state_is_an_error(root: str) -> None:
    with CheckpointManager(root) as manager, pytest.raises(ConfigError, match="modle"):
        manager.restore(job(2), only="modle/*")


@pytest.mark.parametrize("only", [[], "", [3], [""]])
def test_no_pattern_at_all(root: str, only: Any) -> None:
    with CheckpointManager(root) as manager, pytest.raises(ConfigError, match="only="):
        manager.restore(job(2), only=only)


def test_a_state_with_nothing_in_common_is_told_of(tmp_path, caplog):
    with CheckpointManager(tmp_path) as manager:
        manager.save({"model": torch.ones(3)}, 1)
    with CheckpointManager(tmp_path) as manager:
        manager.restore({"modle": torch.zeros(3)}, strict=False)
    assert "step 1 has nothing of the state" in caplog.text


def test_what_is_excluded_keeps_its_values_with_the_state_of_its_optimizer(root: str) -> None:
    state = job(2)
    before = tensors(state)
    with CheckpointManager(root) as manager:
        manager.restore(state, exclude="model/2.*")
    head = ("model/2.", "optimizer/model/2.")
    assert_taken(state, before, *(name for name in before if not name.startswith(head)))
    assert state["optimizer"].param_groups[0]["lr"] == 0.1


def test_an_exclusion_wins_over_a_selection(root: str) -> None:
    state = job(2)
    before = tensors(state)
    with CheckpointManager(root) as manager:
        manager.restore(state, only="model", exclude="model/2.*")
    assert_taken(state, before, "model/0.", "model/1.")


def test_an_excluded_value_need_not_fit_and_need_not_be_saved(root: str) -> None:
    state = job(2, head=5) | {"new": torch.ones(2)}
    with CheckpointManager(root) as manager:
        manager.restore(state, exclude=["model/2.*", "new"])
    assert torch.equal(state["new"], torch.ones(2))
    assert torch.equal(state["model"][0].weight, job(1)["model"][0].weight)


def tied_model(seed: int) -> nn.ModuleDict:
    torch.manual_seed(seed)
    model = nn.ModuleDict({"embed": nn.Embedding(6, 4), "head": nn.Linear(4, 6, bias=False)})
    model["head"].weight = model["embed"].weight
    return model


def weight_of(model: nn.ModuleDict) -> torch.Tensor:
    return model.get_parameter("head.weight").detach()


@pytest.mark.parametrize(
    "name", ["model/embed.weight", "model/head.*", "head", "twin", "parts/0", "parts"]
)
def test_a_tensor_that_is_excluded_by_one_of_its_names_is_not_overwritten(
    tmp_path: Path, name: str
) -> None:
    def state(seed: int) -> dict[str, Any]:
        model = tied_model(seed)
        head = model["head"]
        return {"model": model, "head": head.weight, "twin": head, "parts": [head.weight]}

    with CheckpointManager(tmp_path) as manager:
        manager.save(state(1), 1)
        target = state(2)
        with pytest.raises(RestoreError, match="exclude both or neither"):
            manager.restore(target, exclude=name)
        assert torch.equal(target["head"], weight_of(tied_model(2)))
        manager.restore(target, exclude=["model/embed.*", "model/head.*", "head", "twin", "parts"])
    assert torch.equal(target["head"], weight_of(tied_model(2)))


def test_values_that_no_restore_could_fill_can_be_excluded(root: str) -> None:
    state = job(2) | {
        "lazy": nn.LazyLinear(3),
        "odd": {"sparse": torch.eye(2).to_sparse(), "meta": torch.ones(2, device="meta")},
    }
    with CheckpointManager(root) as manager:
        manager.restore(state, exclude=["lazy", "odd"])
    assert torch.equal(state["ema"], job(1)["ema"])


def test_a_restore_with_an_exclusion_is_of_a_part(root: str) -> None:
    state = job(2)
    del state["step"]
    with CheckpointManager(root) as manager:
        manager.save(state, 9)
        manager.restore(job(2), 5, exclude="model/2.*")
        assert manager.save(state).step == 10


def test_an_exclusion_that_matches_nothing_is_an_error(root: str) -> None:
    with CheckpointManager(root) as manager, pytest.raises(ConfigError, match="no name"):
        manager.restore(job(2), exclude="tail")
