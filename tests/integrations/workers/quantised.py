"""Train with a quantised optimizer of torchao: quantised.py KIND save|restore ROOT.

It prints the losses of four steps: those after the save, or those after the restore. On more ranks
than one the model is sharded by ``fully_shard``.
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


def main(kind: str, phase: str, root: str) -> None:
    torch.set_num_threads(1)
    ranks = int(os.environ.get("WORLD_SIZE", "1"))
    torch.manual_seed(0 if phase == "save" else 7)
    model: Any = nn.Sequential(nn.Linear(64, 256), nn.GELU(), nn.Linear(256, 64))
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
        losses = [step(index) for index in range(4, 8)]
        if pending is not None:
            pending.result()
    print("losses", rank, *losses, flush=True)


main(*sys.argv[1:])
exit_rank()
