"""Train with a quantised optimizer of torchao: KIND save|restore|move ROOT [TO [WIDTH]].

The script prints the losses of four steps: those after the save, or those after the restore. With
several ranks ``fully_shard`` shards the model. "move" restores the state and saves it below TO.
"""

from __future__ import annotations

import importlib
import os
import sys
from typing import Any

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.fsdp import fully_shard

from bench.rank_exit import exit_rank
from ckpt import CheckpointManager


def main(kind: str, phase: str, root: str, to: str = "", width: str = "256") -> None:
    torch.set_num_threads(1)
    # torch's cache of compiled steps uses the code of one class of moments for another class
    caches: Any = importlib.import_module("torch._functorch.config")
    caches.enable_autograd_cache = False
    ranks = int(os.environ.get("WORLD_SIZE", "1"))
    torch.manual_seed(0 if phase == "save" else 7)
    model: Any = nn.Sequential(nn.Linear(64, int(width)), nn.GELU(), nn.Linear(int(width), 64))
    if ranks > 1:
        dist.init_process_group("gloo")
        fully_shard(model)
    optimizer = getattr(importlib.import_module("torchao.optim"), kind)(model.parameters(), lr=0.01)
    rank = dist.get_rank() if ranks > 1 else 0
    data = torch.randn(8, 16, 64, generator=torch.Generator().manual_seed(rank))

    def step(index: int) -> str:
        optimizer.zero_grad()
        loss = (model(data[index]) - data[index]).square().mean()
        loss.backward()
        optimizer.step()
        return float(loss.detach()).hex()

    state = {"model": model, "optimizer": optimizer}
    with CheckpointManager(root) as manager:
        if phase == "save":
            for index in range(4):
                step(index)
            pending = manager.save_async(state, 4)
        else:
            manager.restore(state)
            pending = None
        if phase == "move":
            with CheckpointManager(to) as other:
                other.save(state, 4)
        losses = [step(index) for index in range(4, 8)]
        if pending is not None:
            pending.result()
    print("losses", rank, *losses, flush=True)


main(*sys.argv[1:])
exit_rank()
