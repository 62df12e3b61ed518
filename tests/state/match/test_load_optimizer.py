"""Where the restored values of an optimizer's state are."""

from __future__ import annotations

from collections.abc import Mapping
from enum import IntEnum
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn

from ckpt.errors import RestoreError, UnsupportedValue
from ckpt.state.match import load_optimizer
from ckpt.state.match.optimizer_load_code import move_to_parameter
from ckpt.state.walk.modules import new_state
from tests.kit.worlds import world
from tests.state.saving import assert_same, restored, saved


def adam(*, fused: bool, steps: int) -> dict[str, Any]:
    model = nn.Linear(2, 2)
    optimizer = torch.optim.Adam(model.parameters(), 0.1, fused=fused)
    for _ in range(steps):
        model(torch.ones(2)).sum().backward()
        optimizer.step()
    return {"model": model, "optimizer": optimizer}


def step_of(state: dict[str, Any]) -> torch.Tensor:
    found = state["optimizer"].state[state["model"].weight]["step"]
    assert isinstance(found, torch.Tensor)
    return found


@pytest.mark.parametrize("fused", [False, True])
@pytest.mark.parametrize("takes_groups", [False, True])
def test_a_new_step_is_where_the_settings_after_the_restore_want_it(
    monkeypatch: pytest.MonkeyPatch, fused: bool, takes_groups: bool
) -> None:
    root = saved(adam(fused=fused, steps=3))
    seen: list[Any] = []

    def noted(
        parameter: torch.Tensor, group: Mapping[str, Any], *rest: Any, **how: Any
    ) -> torch.Tensor:
        seen.append(group["fused"])
        return new_state(parameter, group, *rest, **how)

    monkeypatch.setattr(load_optimizer, "new_state", noted)
    target = adam(fused=not fused, steps=0)
    only = None if takes_groups else ["model", "optimizer/model"]
    restored(root, target, only=only)
    wanted = fused if takes_groups else not fused
    assert target["optimizer"].param_groups[0]["fused"] == wanted
    assert set(seen) == {wanted}
    assert step_of(target) == 3


@pytest.mark.parametrize("fused", [False, True])
def test_a_held_step_is_filled_in_place_unless_the_settings_move_it(fused: bool) -> None:
    root = saved(adam(fused=True, steps=3))
    target = adam(fused=fused, steps=1)
    before = step_of(target)
    restored(root, target)
    assert (step_of(target) is before) == fused
    assert step_of(target) == 3


def test_tensors_inside_of_lists_go_to_the_device_of_the_parameter() -> None:
    value = {"dirs": [torch.ones(2), (torch.ones(1), None, 3)], "in": {"step": torch.ones(())}}
    parameter = torch.empty(3, device="meta")
    meta = parameter.device
    moved = move_to_parameter(value, {}, parameter)
    assert moved["dirs"][0].device == moved["dirs"][1][0].device == meta
    assert moved["dirs"][1][1:] == (None, 3)
    assert moved["in"]["step"].device.type == "cpu"
    assert move_to_parameter(value, {"fused": True}, parameter)["in"]["step"].device == meta


@pytest.mark.distributed
def test_tensors_inside_of_dicts_are_sharded_as_their_parameter(tmp_path: Path) -> None:
    world(2, Path(__file__).with_name("buffers_by_beta.py"), tmp_path)


@pytest.mark.distributed
def test_tensors_of_other_shapes_than_their_sharded_parameters_come_back(tmp_path: Path) -> None:
    world(2, Path(__file__).with_name("sharded_shapes.py"), tmp_path)


class Scale:
    def __init__(self, factor: float) -> None:
        self.factor, self.basis = factor, torch.full((2,), factor)


class Scaled(torch.optim.SGD):
    """Keeps an object in its state, as Conda of pytorch_optimizer does."""


class OwnState:
    """Does what the error advises."""

    def __init__(self, optimizer: torch.optim.Optimizer) -> None:
        self.optimizer = optimizer

    def state_dict(self) -> dict[str, Any]:
        found = self.optimizer.state_dict()
        return {
            **found,
            "state": {number: vars(held["scale"]) for number, held in found["state"].items()},
        }

    def load_state_dict(self, state: dict[str, Any]) -> None:
        made: dict[int, Any] = {}
        for number, parts in state["state"].items():
            made[number] = {"scale": Scale(0.0)}
            vars(made[number]["scale"]).update(parts)
        self.optimizer.load_state_dict({**state, "state": made})


def scaled(factor: float) -> dict[str, Any]:
    model = nn.Linear(2, 2)
    optimizer = Scaled(model.parameters(), lr=0.1)
    for parameter in model.parameters():
        optimizer.state[parameter]["scale"] = Scale(factor)
    return {"model": model, "optimizer": optimizer}


def test_the_advice_for_an_object_in_the_state_of_an_optimizer_resumes_it() -> None:
    source, target = scaled(3.0), scaled(1.0)
    with pytest.raises(
        UnsupportedValue, match="put an object into the state whose state_dict"
    ) as no:
        saved(source)
    assert no.value.name == "optimizer/model/weight/scale"
    target["optimizer"].state.clear()
    optimizers = source["optimizer"], target["optimizer"]
    source["optimizer"], target["optimizer"] = map(OwnState, optimizers)
    restored(saved(source), target)
    for held in optimizers[1].state.values():
        assert held["scale"].factor == 3.0
        assert held["scale"].basis.tolist() == [3.0, 3.0]


class Norm(IntEnum):
    NONE = 0
    SIGN = 4


class Signed(torch.optim.SGD):
    """Has a member of an enum among its settings, as SCION of pytorch_optimizer does."""

    def __init__(self, params: Any, norm: Any) -> None:
        super().__init__(params, lr=0.1)
        self.param_groups[0]["norm"] = norm


def signed(norm: Any) -> dict[str, Any]:
    model = nn.Linear(2, 2)
    return {"model": model, "optimizer": Signed(model.parameters(), norm)}


@pytest.mark.parametrize(("norm", "kind"), [(Norm.NONE, Norm), (0, int)])
def test_a_setting_that_is_a_member_of_an_enum_is_one_of_the_target_s(norm: Any, kind: Any) -> None:
    target = signed(norm)
    restored(saved(signed(Norm.SIGN)), target)
    setting = target["optimizer"].param_groups[0]["norm"]
    assert type(setting) is kind
    assert setting == Norm.SIGN


def test_a_value_that_the_enum_of_the_target_does_not_have_changes_nothing() -> None:
    target = signed(Norm.NONE)
    before = target["model"].weight.clone()
    with pytest.raises(RestoreError, match=r"'norm' .* 7 is not a valid Norm"):
        restored(saved(signed(7)), target)
    assert target["optimizer"].param_groups[0]["norm"] is Norm.NONE
    assert target["model"].weight.equal(before)


def test_lists_of_a_meta_parameter_that_becomes_real_keep_their_values() -> None:
    def state(device: str) -> dict[str, Any]:
        model = nn.Linear(2, 2, device=device)
        optimizer = torch.optim.LBFGS(model.parameters(), 0.1, max_iter=3)
        return {"model": model, "optimizer": optimizer}

    source, target = state("cpu"), state("meta")

    def closure() -> torch.Tensor:
        source["optimizer"].zero_grad()
        loss = (source["model"](torch.ones(2)) ** 2).sum()
        loss.backward()
        return loss  # type: ignore[no-any-return]

    source["optimizer"].step(closure)
    restored(saved(source), target)
    (kept,) = source["optimizer"].state.values()
    (found,) = target["optimizer"].state.values()
    assert len(kept["old_dirs"]) > 0
    assert_same(found["old_dirs"], kept["old_dirs"])
