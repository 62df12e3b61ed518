"""The model that every writer trains, and what an import of it must give back."""

from __future__ import annotations

import os
from typing import Any

import torch
from torch import nn

TRUTH = "truth.pt"
"""The file beside a folder with what the folder holds."""


class Net(nn.Module):
    """A small network with two layers of equal shapes, norms and a buffer."""

    def __init__(self) -> None:
        super().__init__()
        self.first = nn.Linear(4, 8)
        self.layers = nn.ModuleList(nn.Linear(8, 8) for _ in range(2))
        self.norm = nn.LayerNorm(8)
        self.last = nn.Linear(8, 4)
        self.register_buffer("scale", torch.full((4,), 0.5))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        x = self.first(x)
        for layer in self.layers:
            x = torch.tanh(layer(x))
        return self.last(self.norm(x)) * self.scale


def build(seed: int = 0) -> tuple[Net, torch.optim.Optimizer]:
    """Return an untrained network and its optimizer."""
    torch.manual_seed(seed)
    net = Net()
    return net, torch.optim.AdamW(net.parameters(), lr=0.01)


def batch(step: int) -> torch.Tensor:
    return torch.linspace(-1, 1, 12).reshape(3, 4) * (step + 1)


def train(net: Any, optimizer: Any, steps: int = 2) -> None:
    for step in range(steps):
        optimizer.zero_grad()
        net(batch(step)).square().sum().backward()
        optimizer.step()


def trained() -> tuple[Net, torch.optim.Optimizer]:
    net, optimizer = build()
    train(net, optimizer)
    return net, optimizer


def moments(net: nn.Module, optimizer: torch.optim.Optimizer) -> dict[str, dict[str, Any]]:
    """Return the optimizer's state of each parameter, by the name of the parameter."""
    names = {id(value): name for name, value in net.named_parameters()}
    return {
        names[id(value)]: {key: whole(item) for key, item in held.items()}
        for value, held in optimizer.state.items()
    }


def whole(value: Any) -> Any:
    """Return a DTensor as the whole tensor, and any other value as it is."""
    return value.full_tensor() if hasattr(value, "full_tensor") else value


def write_truth(
    out: str,
    net: nn.Module,
    optimizer: torch.optim.Optimizer | None,
    *,
    at: str = "",
    step: int = 0,
    schedule: dict[str, Any] | None = None,
) -> None:
    """Write what the folder ``out`` holds. Only rank 0 writes, but all ranks take part.

    Args:
        out: The folder.
        net: The network.
        optimizer: Its optimizer; None if the folder has none.
        at: The name under which an import has the position, such as ``accelerate/step``.
        step: The position.
        schedule: The state of the scheduler, if there is one.
    """
    names = {id(value): name for name, value in net.named_parameters()}
    groups = [] if optimizer is None else optimizer.param_groups
    truth = {
        "model": {name: whole(value).detach() for name, value in net.state_dict().items()},
        "optimizer": None if optimizer is None else moments(net, optimizer),
        "groups": [[names[id(value)] for value in group["params"]] for group in groups],
        "lr": [group["lr"] for group in groups],
        "at": at,
        "step": step,
        "schedule": schedule,
    }
    if int(os.environ.get("RANK", "0")) == 0:
        torch.save(truth, os.path.join(out, TRUTH))
