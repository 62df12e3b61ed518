"""Small training jobs: the same network and the same steps under each optimizer."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from typing import Any

import torch
from torch import nn
from torch.optim import Optimizer

Build = Callable[[Iterable[nn.Parameter]], Optimizer]

WIDTH = 48


class Net(nn.Module):
    """A network of matrices, biases, a tied weight, and a BatchNorm whose buffers change in
    forward.
    """

    def __init__(self) -> None:
        super().__init__()
        self.one, self.two, self.three = (nn.Linear(WIDTH, WIDTH) for _ in range(3))
        self.norm = nn.BatchNorm1d(WIDTH)
        self.three.weight = self.one.weight

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.three(self.norm(self.two(self.one(x).relu()))).square().mean()


def adamw(parameters: Iterable[nn.Parameter]) -> Optimizer:
    return torch.optim.AdamW(parameters, lr=0.01)


def job(build: Build = adamw, seed: int = 0) -> dict[str, Any]:
    torch.manual_seed(seed)
    model = Net()
    return {"model": model, "optimizer": build(model.parameters()), "step": 0}


def forward_backward(state: dict[str, Any], number: int) -> torch.Tensor:
    generator = torch.Generator().manual_seed(number)
    loss = state["model"](torch.randn(8, WIDTH, generator=generator))
    loss.backward()
    return loss


def train(state: dict[str, Any], number: int) -> None:
    """Take one step with any optimizer, LBFGS included."""

    def closure() -> torch.Tensor:
        state["optimizer"].zero_grad()
        return forward_backward(state, number)

    state["optimizer"].step(closure)
    state["step"] += 1


def trained(build: Build = adamw, seed: int = 0, steps: int = 2) -> dict[str, Any]:
    """Return a job whose optimizer has its state."""
    state = job(build, seed)
    for number in range(steps):
        train(state, number)
    return state
