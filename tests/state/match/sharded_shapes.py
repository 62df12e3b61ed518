"""ROOT: a rank whose optimizer keeps tensors of other shapes for sharded parameters.

These are plain tensors of one element, and sharded ones.

It trains on with fresh objects, which have taken no step, as without a restore.
"""

from __future__ import annotations

import sys
from typing import Any

import torch
import torch.distributed as dist
from torch.distributed.tensor import DTensor
from torch.optim import Optimizer

from bench.rank_exit import exit_rank
from ckpt import CheckpointManager
from tests.state.match.buffers_by_beta import model_of, train


class Weighted(Optimizer):
    """Keeps the weight of its momentum as QHAdam of the package pytorch_optimizer does."""

    def __init__(self, params: Any) -> None:
        super().__init__(params, {"lr": 0.1})

    @torch.no_grad()
    def step(self, closure: Any = None) -> None:  # type: ignore[override]
        del closure
        for parameter in self.param_groups[0]["params"]:
            state = self.state[parameter]
            if not state:
                state["weight"] = torch.zeros(1)
                state["momentum"] = torch.zeros_like(parameter)
                state["pair"] = torch.stack([torch.zeros_like(parameter)] * 2, dim=-1)
            state["weight"].mul_(0.9).add_(1.0)
            state["momentum"].lerp_(parameter.grad, 1.0 / float(state["weight"]))
            state["pair"].lerp_(torch.stack([parameter.grad, parameter], dim=-1), 0.5)
            parameter.add_(state["momentum"], alpha=-0.05)
            parameter.add_(state["pair"].sum(dim=-1), alpha=-0.05)


def job(seed: int) -> dict[str, Any]:
    model = model_of(seed)
    return {"model": model, "optimizer": Weighted(model.parameters())}


def main(root: str) -> None:
    dist.init_process_group("gloo")
    state = job(0)
    train(state, range(3))
    with CheckpointManager(root) as manager:
        manager.save(state, 3)
        expected = train(state, range(3, 6))
        fresh = job(1)
        manager.restore(fresh)
    for values in fresh["optimizer"].state.values():
        assert isinstance(values["momentum"], DTensor)
        assert type(values["weight"]) is torch.Tensor
        assert isinstance(values["pair"], DTensor)
    assert train(fresh, range(3, 6)) == expected


if __name__ == "__main__":
    main(sys.argv[1])
    exit_rank()
