"""Save a small Llama that two ranks hold in shards. hf_shards.py ROOT CONFIG fsdp2|tp"""

from __future__ import annotations

import sys

import torch
import torch.distributed as dist
import transformers
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard
from torch.distributed.tensor.parallel import (
    ColwiseParallel,
    ParallelStyle,
    RowwiseParallel,
    parallelize_module,
)

from bench.rank_exit import exit_rank
from ckpt import CheckpointManager

PLAN: dict[str, type[ParallelStyle]] = {
    **dict.fromkeys(("q_proj", "k_proj", "v_proj", "gate_proj", "up_proj"), ColwiseParallel),
    **dict.fromkeys(("o_proj", "down_proj"), RowwiseParallel),
}


def main(root: str, config: str, layout: str) -> None:
    dist.init_process_group("gloo")
    torch.manual_seed(0)
    model = transformers.AutoModelForCausalLM.from_config(
        transformers.AutoConfig.from_pretrained(config)
    )
    mesh = init_device_mesh("cpu", (2,))
    if layout == "fsdp2":
        for layer in model.model.layers:
            fully_shard(layer, mesh=mesh)
        fully_shard(model, mesh=mesh)
    else:
        plan = {
            name: PLAN[last]()
            for name, _ in model.named_modules()
            if (last := name.rpartition(".")[2]) in PLAN
        }
        parallelize_module(model, mesh, plan)
    with CheckpointManager(root) as manager:
        manager.save({"model": model}, 1)
    exit_rank()


main(*sys.argv[1:])
