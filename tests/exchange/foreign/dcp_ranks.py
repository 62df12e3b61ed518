"""Two ranks save a sharded model with ``use_collectives=False``. The argument is the folder."""

from __future__ import annotations

import sys

import torch
import torch.distributed as dist
import torch.distributed.checkpoint as dcp
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor import Shard, distribute_tensor

if __name__ == "__main__":
    dist.init_process_group("gloo")
    mesh = init_device_mesh("cpu", (dist.get_world_size(),))
    whole = torch.arange(20.0).reshape(5, 4)
    model = {"w": distribute_tensor(whole, mesh, [Shard(0)]), "b": torch.ones(3)}
    state = {"model": model, "rank": dist.get_rank()}
    dcp.save(state, checkpoint_id=sys.argv[1], use_collectives=False)
    dist.destroy_process_group()
