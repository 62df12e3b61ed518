"""Write the state of each rank with ``torch.save`` into OUT, as verl does: DTensors of FSDP2, or of
FSDP2 and tensor parallelism if there are four ranks.
"""

from __future__ import annotations

import os
import sys

import torch
import torch.distributed as dist
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard
from torch.distributed.tensor.parallel import ColwiseParallel, RowwiseParallel, parallelize_module

from tests.exchange.folders.net import build, train, write_truth


def main(out: str) -> None:
    dist.init_process_group("gloo")
    rank, world = dist.get_rank(), dist.get_world_size()
    net, _ = build()
    if world == 4:
        mesh = init_device_mesh("cpu", (2, 2), mesh_dim_names=("dp", "tp"))
        plan = {"layers.0": ColwiseParallel(), "layers.1": RowwiseParallel()}
        parallelize_module(net, mesh["tp"], plan)
        fully_shard(net, mesh=mesh["dp"])
    else:
        fully_shard(net, mesh=init_device_mesh("cpu", (world,)))
    optimizer = torch.optim.AdamW(net.parameters(), lr=0.01, foreach=False)
    train(net, optimizer)
    folder = os.path.join(out, "actor")
    os.makedirs(folder, exist_ok=True)
    extra = {"lr_scheduler": {"last_epoch": 2}, "seed": rank}
    for kind, state in (
        ("model", net.state_dict()),
        ("optim", optimizer.state_dict()),
        ("extra_state", extra),
    ):
        torch.save(state, os.path.join(folder, f"{kind}_world_size_{world}_rank_{rank}.pt"))
    write_truth(out, net, optimizer, at="extra_state/lr_scheduler/last_epoch", step=2)
    dist.barrier()
    dist.destroy_process_group()


if __name__ == "__main__":
    main(*sys.argv[1:])
