"""Restore an imported step into a fresh model and optimizer, and compare them with the truth."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import torch
from torch import nn

from ckpt import CheckpointManager
from ckpt.errors import CkptError
from tests.exchange.folders.net import TRUTH, Net, moments


class Holder(nn.Module):
    """A module with the network as a child, as the module of Lightning has it."""

    def __init__(self) -> None:
        super().__init__()
        self.net = Net()


class Schedule:
    """An object in the place of a scheduler."""

    def __init__(self) -> None:
        self.state: dict[str, Any] = {}

    def state_dict(self) -> dict[str, Any]:
        return self.state

    def load_state_dict(self, state: dict[str, Any]) -> None:
        self.state = state


def target(truth: dict[str, Any]) -> tuple[nn.Module, torch.optim.Optimizer | None]:
    """Return an untrained network, and an optimizer with the groups of the true one."""
    torch.manual_seed(9)
    net = Holder() if all(name.startswith("net.") for name in truth["model"]) else Net()
    named = dict(net.named_parameters())
    groups = [{"params": [named[name] for name in group]} for group in truth["groups"]]
    return net, torch.optim.AdamW(groups, lr=1.0) if groups else None


def is_same(one: Any, other: Any) -> bool:
    if isinstance(other, torch.Tensor):
        return isinstance(one, torch.Tensor) and torch.equal(one, other)
    if isinstance(other, dict):
        return one.keys() == other.keys() and all(is_same(one[key], other[key]) for key in other)
    return bool(one == other)


def compare(root: Path, folder: Path) -> dict[str, str]:
    """Return "yes" or the reason why not, for each of the columns weights, optimizer, schedule and
    position that the folder has.

    Args:
        root: The root with the import.
        folder: The folder with the truth.
    """
    truth = torch.load(folder / TRUTH, weights_only=True)
    net, optimizer = target(truth)
    columns = {"weights": _weights(root, net, truth)}
    if optimizer is not None:
        columns["optimizer"] = _optimizer(root, net, optimizer, truth)
    if truth["schedule"]:
        schedule = Schedule()
        columns["scheduler"] = _tried(root, {"scheduler": schedule}) or _answer(
            is_same(schedule.state, truth["schedule"])
        )
    if truth["at"]:
        columns["position"] = _position(root, truth)
    return columns


def _answer(same: bool) -> str:
    return "yes" if same else "differs"


def _tried(root: Path, state: dict[str, Any]) -> str:
    """Restore ``state``, and return the error; empty if there is none."""
    try:
        with CheckpointManager(str(root)) as manager:
            manager.restore(state, only=list(state))
    except CkptError as error:
        return f"{type(error).__name__}: {error}"
    return ""


def _weights(root: Path, net: nn.Module, truth: dict[str, Any]) -> str:
    if net.state_dict().keys() != truth["model"].keys():  # A library's own model, or its own names
        model = {name: torch.zeros_like(value) for name, value in truth["model"].items()}
        return _tried(root, {"model": model}) or _answer(is_same(model, dict(truth["model"])))
    return _tried(root, {"model": net}) or _answer(
        is_same(dict(net.state_dict()), dict(truth["model"]))
    )


def _optimizer(
    root: Path, net: nn.Module, optimizer: torch.optim.Optimizer, truth: dict[str, Any]
) -> str:
    if error := _tried(root, {"model": net, "optimizer": optimizer}):
        return error
    rates = [group["lr"] for group in optimizer.param_groups]
    same = is_same(moments(net, optimizer), truth["optimizer"])
    return _answer(same and torch.allclose(torch.tensor(rates), torch.tensor(truth["lr"])))


def _position(root: Path, truth: dict[str, Any]) -> str:
    name, _, path = truth["at"].partition("/")
    state: dict[str, Any] = {name: None}
    if error := _tried(root, state):
        return error
    value = state[name]
    for part in filter(None, path.split("/")):
        value = (json.loads(value) if isinstance(value, str) else value)[part]
    return _answer(int(value) == truth["step"])
