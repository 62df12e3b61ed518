"""ROOT: a rank that trains under FSDP2 with an optimizer whose state is a dict of buffers.

It trains on after a rollback, and with fresh objects, as without a restore.
"""

from __future__ import annotations

import sys
from typing import Any

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.fsdp import fully_shard
from torch.distributed.tensor import DTensor
from torch.optim import Optimizer

from bench.rank_exit import exit_rank
from ckpt import CheckpointManager

BETAS = (0.0, 0.9)


class Aggregated(Optimizer):
    """Keeps a momentum buffer for each beta, as AggMo of the package pytorch_optimizer does."""

    def __init__(self, params: Any) -> None:
        super().__init__(params, {"lr": 0.1})

    @torch.no_grad()
    def step(self, closure: Any = None) -> None:  # type: ignore[override]
        del closure
        for parameter in self.param_groups[0]["params"]:
            state = self.state[parameter]
            if not state:
                state["buffers"] = {beta: torch.zeros_like(parameter) for beta in BETAS}
                state["last"] = [torch.zeros_like(parameter)]
            for beta, buffer in state["buffers"].items():
                buffer.mul_(beta).add_(parameter.grad)
                parameter.add_(buffer, alpha=-0.05)
            state["last"][0].copy_(parameter.grad)


def model_of(seed: int) -> nn.Module:
    torch.manual_seed(seed)
    model = nn.Linear(3, 5)  # uneven on two ranks
    fully_shard(model)
    return model


def job(seed: int) -> dict[str, Any]:
    model = model_of(seed)
    return {"model": model, "optimizer": Aggregated(model.parameters())}


def train(state: dict[str, Any], steps: range) -> list[float]:
    losses = []
    for step in steps:
        loss = state["model"](torch.full((2, 3), step + 1.0)).square().mean()
        loss.backward()
        state["optimizer"].step()
        state["optimizer"].zero_grad()
        losses.append(loss.item())
    return losses


def main(root: str) -> None:
    dist.init_process_group("gloo")
    state = job(0)
    train(state, range(3))
    with CheckpointManager(root) as manager:
        manager.save(state, 3)
        expected = train(state, range(3, 6))
        manager.restore(state)
        assert train(state, range(3, 6)) == expected
        fresh = job(1)
        manager.restore(fresh)
    for held in fresh["optimizer"].state.values():
        for tensor in (*held["buffers"].values(), *held["last"]):
            assert isinstance(tensor, DTensor)
    assert train(fresh, range(3, 6)) == expected


if __name__ == "__main__":
    main(sys.argv[1])
    exit_rank()
