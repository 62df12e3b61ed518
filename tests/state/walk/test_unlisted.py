"""Optimizer state of parameters that the state dict of their module does not hold."""

from __future__ import annotations

import copy
from collections.abc import Callable, Iterable
from typing import Any

import pytest
import torch
from torch import nn

from ckpt import CheckpointManager
from tests.kit.models import compiled
from tests.state.saving import assert_same, manifest_of, new_root, restored, saved


class Fused(nn.Module):
    """Keeps one tensor that its state dict has as three."""

    def __init__(self) -> None:
        super().__init__()
        self.wqkv = nn.Parameter(torch.randn(6, 4))
        self.out = nn.Linear(6, 1)
        self.register_state_dict_post_hook(self.split)
        self.register_load_state_dict_pre_hook(self.join)

    @staticmethod
    def split(module: nn.Module, state: dict[str, Any], prefix: str, _: Any) -> None:
        for name, part in zip("qkv", state.pop(f"{prefix}wqkv").chunk(3), strict=True):
            state[f"{prefix}w{name}"] = part

    @staticmethod
    def join(module: nn.Module, state: dict[str, Any], prefix: str, *_: Any) -> None:
        if f"{prefix}wq" in state:
            state[f"{prefix}wqkv"] = torch.cat([state.pop(f"{prefix}w{name}") for name in "qkv"])

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.out(x @ self.wqkv.T)  # type: ignore[no-any-return]


class Turned(nn.Module):
    """Saves its weight transposed, under the name of the weight."""

    def __init__(self) -> None:
        super().__init__()
        self.w = nn.Parameter(torch.randn(4, 4))
        self.register_state_dict_post_hook(self.turn)
        self.register_load_state_dict_pre_hook(self.turn)

    @staticmethod
    def turn(module: nn.Module, state: dict[str, Any], prefix: str, *_: Any) -> None:
        if f"{prefix}w" in state:
            state[f"{prefix}w"] = state[f"{prefix}w"].T.contiguous()

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return x @ self.w


class Nested(nn.Module):
    """Has a state dict of its own."""

    def __init__(self) -> None:
        super().__init__()
        self.inner = nn.Linear(4, 1)

    def state_dict(self, *args: Any, **kwargs: Any) -> Any:
        return {"weights": {key: value.clone() for key, value in self.inner.state_dict().items()}}

    def load_state_dict(self, state_dict: Any, *args: Any, **kwargs: Any) -> Any:
        self.inner.load_state_dict(state_dict["weights"])

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.inner(x)  # type: ignore[no-any-return]


Order = Callable[[nn.Module], Iterable[nn.Parameter]]


def trained(kind: type[nn.Module], order: Order = nn.Module.parameters) -> dict[str, Any]:
    model = nn.ModuleList([kind(), kind()])
    optimizer = torch.optim.AdamW(order(model), lr=0.1)
    x = torch.ones(2, 4)
    torch.stack([(block(x) * (n + 1)).sum() ** 2 for n, block in enumerate(model)]).sum().backward()
    optimizer.step()
    return {"model": model, "optimizer": optimizer}


def fresh(state: dict[str, Any], order: Order) -> dict[str, Any]:
    model = copy.deepcopy(state["model"])
    return {"model": model, "optimizer": torch.optim.AdamW(order(model), lr=0.1)}


def by_name(state: dict[str, Any]) -> dict[str, Any]:
    names = {parameter: name for name, parameter in state["model"].named_parameters()}
    return {names[key]: dict(value) for key, value in state["optimizer"].state.items()}


@pytest.mark.parametrize("kind", [Fused, Turned, Nested])
def test_state_follows_a_parameter_that_the_state_dict_shows_as_other_tensors(
    kind: type[nn.Module],
) -> None:
    state = trained(kind)
    target = fresh(state, lambda model: reversed(list(model.parameters())))
    restored(saved(state), target)
    assert_same(by_name(target), by_name(state))
    assert len(by_name(target)) == len(list(state["model"].parameters()))


def test_a_part_of_such_parameters_gets_the_state_of_its_own() -> None:
    state = trained(Fused)
    target = fresh(state, lambda model: model[1].parameters())  # type: ignore[index]
    report = restored(saved(state), target, strict=False)
    assert_same(by_name(target), {k: v for k, v in by_name(state).items() if k.startswith("1.")})
    assert "optimizer/model/0.wqkv" in report.unexpected


@pytest.mark.parametrize("wrap", [compiled, nn.DataParallel])
def test_the_name_of_such_a_parameter_is_that_in_the_bare_module(
    wrap: Callable[[nn.Module], nn.Module],
) -> None:
    state = trained(Fused)
    target = fresh(state, lambda model: reversed(list(model.parameters())))
    root = saved({**state, "model": wrap(state["model"])})
    names = {tensor.name for tensor in manifest_of(root).tensors}
    assert "optimizer/model/0.wqkv/exp_avg" in names
    restored(root, target)
    assert_same(by_name(target), by_name(state))


def test_a_parameter_keeps_its_own_state_where_the_state_dict_swaps_two_names() -> None:
    def swap(module: nn.Module, state: dict[str, Any], prefix: str, *_: Any) -> None:
        state["0.w"] = state.pop("1.w")

    model = nn.ModuleList([nn.ParameterDict({"w": torch.ones(2)}) for _ in range(2)])
    model.register_state_dict_post_hook(swap)
    optimizer = torch.optim.SGD(model.parameters(), 0.1, momentum=0.9)
    for n, parameter in enumerate(model.parameters()):
        parameter.grad = torch.full((2,), n + 1.0)
    optimizer.step()
    before = copy.deepcopy(optimizer.state_dict()["state"])
    root = saved({"model": model, "optimizer": optimizer})
    for state in optimizer.state.values():
        state["momentum_buffer"].zero_()
    restored(root, {"model": model, "optimizer": optimizer})
    assert_same(optimizer.state_dict()["state"], before)


def test_another_parameter_behind_the_same_state_dict_is_seen_by_the_next_save() -> None:
    def hide(module: nn.Module, state: dict[str, Any], prefix: str, _: Any) -> None:
        del state[f"{prefix}hidden"]

    class Hidden(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.shown = nn.Parameter(torch.ones(2))
            self.hidden = nn.Parameter(torch.ones(2))
            self.register_state_dict_post_hook(hide)

    model = Hidden()
    state = {"model": model, "optimizer": torch.optim.SGD(model.parameters(), 0.1, momentum=0.9)}

    def step() -> None:
        for parameter in model.parameters():
            parameter.grad = torch.ones_like(parameter)
        state["optimizer"].step()  # type: ignore[attr-defined]

    step()
    root = new_root()
    with CheckpointManager(root) as manager:
        manager.save(state, 1)
        model.hidden = nn.Parameter(torch.zeros(2))
        state["optimizer"] = torch.optim.SGD(model.parameters(), 0.1, momentum=0.9)
        step()
        manager.save(state, 2)
    names = {tensor.name for tensor in manifest_of(root).tensors}
    assert "optimizer/model/hidden/momentum_buffer" in names
