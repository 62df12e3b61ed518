"""Restore a model with load hooks, and the state of an old Adam into AdamW, on each rank, and
compare with torch's own load.

Arguments: the layout, and a folder for the checkpoint.
"""

from __future__ import annotations

import copy
import sys
from typing import Any

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.fsdp import fully_shard
from torch.distributed.optim import ZeroRedundancyOptimizer
from torch.nn.parallel import DistributedDataParallel
from torch.optim import Optimizer

from bench.rank_exit import exit_rank
from ckpt import CheckpointManager


class Coded(nn.Linear):
    """Doubles its weight when it loads a state dict, and counts."""

    def __init__(self) -> None:
        super().__init__(8, 4)
        self.register_buffer("count", torch.zeros(()))
        self.loads = 0
        self.register_load_state_dict_pre_hook(self.twice)
        self.register_load_state_dict_post_hook(lambda m, _: setattr(m, "loads", int(m.count)))

    @staticmethod
    def twice(_: nn.Module, state_dict: dict[str, Any], prefix: str, *__: Any) -> None:
        state_dict[f"{prefix}weight"] = state_dict[f"{prefix}weight"] * 2


def coded(model: Any) -> Any:
    return getattr(model, "module", model)[1]


def build(layout: str, kind: type[Optimizer]) -> tuple[nn.Module, Any]:
    torch.manual_seed(0)
    model: Any = nn.Sequential(nn.Linear(6, 8), Coded())
    if layout == "fsdp2":
        fully_shard(model)
    elif layout == "ddp":
        model = DistributedDataParallel(model)
    if layout == "zero":
        return model, ZeroRedundancyOptimizer(model.parameters(), kind, lr=0.1, weight_decay=0.5)
    return model, kind(model.parameters(), lr=0.1, weight_decay=0.5)  # type: ignore[call-arg]


def inside(optimizer: Any) -> Any:
    return getattr(optimizer, "optim", optimizer)


def train(model: nn.Module, optimizer: Any) -> None:
    optimizer.zero_grad()
    x = torch.ones(2, 6)
    (model(x) ** 2).sum().backward()
    if isinstance(optimizer, ZeroRedundancyOptimizer):
        for parameter in model.parameters():
            dist.all_reduce(parameter.grad)  # type: ignore[arg-type]
    optimizer.step()


def local(tensor: torch.Tensor) -> torch.Tensor:
    return getattr(tensor, "_local_tensor", tensor).detach()


def age(optimizer: Any) -> None:
    for values in optimizer.state.values():
        values["step"] = int(values["step"])
    for group in optimizer.param_groups:
        group.pop("decoupled_weight_decay")


def main(layout: str, root: str) -> None:
    dist.init_process_group("gloo")
    model, optimizer = build(layout, torch.optim.Adam)
    for _ in range(2):
        train(model, optimizer)
    coded(model).count.fill_(3)
    wanted, reference = build(layout, torch.optim.AdamW)
    wanted.load_state_dict(copy.deepcopy(model.state_dict()))
    inside(reference).load_state_dict(copy.deepcopy(inside(optimizer).state_dict()))
    age(inside(optimizer))
    for group in optimizer.param_groups:
        group.pop("decoupled_weight_decay", None)
    ends: list[str] = []
    target, restored = build(layout, torch.optim.AdamW)
    restored.register_load_state_dict_post_hook(lambda _: ends.append("post"))
    with CheckpointManager(root) as manager:
        manager.save({"model": model, "optimizer": optimizer}, 1)
        manager.restore({"model": target, "optimizer": restored})
    assert ends == ["post"]
    assert coded(target).loads == coded(wanted).loads == 3
    if layout == "zero":
        for group in reference.param_groups:
            group["decoupled_weight_decay"] = True
    for _ in range(2):
        for one, other in zip(wanted.parameters(), target.parameters(), strict=True):
            assert torch.equal(local(one), local(other))
        train(wanted, reference)
        train(target, restored)
    print("continues as torch", flush=True)
    exit_rank()


main(*sys.argv[1:])
