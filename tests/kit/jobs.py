"""A training whose state is saved in parts."""

from __future__ import annotations

from typing import Any

import torch
from torch import nn


class Adapted(nn.Module):
    """A frozen layer with a trained adapter beside it, as PEFT makes them."""

    def __init__(self, width: int) -> None:
        super().__init__()
        self.base = nn.Linear(width, width).requires_grad_(False)
        self.norm = nn.BatchNorm1d(width, affine=False)
        self.lora_a = nn.Linear(width, 2, bias=False)
        self.lora_b = nn.Linear(2, width, bias=False)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        out: torch.Tensor = self.norm(self.base(x)) + self.lora_b(self.lora_a(x))
        return out


def job(seed: int, *, width: int = 64) -> dict[str, Any]:
    """Return a model with a frozen base, and an optimizer that knows all its parameters."""
    torch.manual_seed(seed)
    model = nn.Sequential(Adapted(width), Adapted(width), nn.BatchNorm1d(width))
    state = {
        "model": model,
        "optimizer": torch.optim.AdamW(model.parameters(), lr=0.01 * seed),
        "data": {"seen": seed, "order": torch.full((3,), seed), "log": [seed]},
        "step": seed,
    }
    train(state)
    return state


def train(state: dict[str, Any]) -> None:
    model = state["model"]
    model(torch.rand(8, model[2].num_features)).square().mean().backward()
    state["optimizer"].step()
    state["optimizer"].zero_grad()


def values(state: dict[str, Any]) -> dict[str, torch.Tensor]:
    """Return copies of all tensors of a job."""
    model, optimizer = state["model"], state["optimizer"]
    found = {f"model/{name}": each.clone() for name, each in model.state_dict().items()}
    for name, parameter in model.named_parameters():
        for key, value in optimizer.state[parameter].items():
            found[f"optimizer/model/{name}/{key}"] = value.clone()
    return found | {"data/order": state["data"]["order"].clone()}
