"""Restore an adopted root on all ranks, and compare it with DCP's own load of the folder.

The arguments are the root, the folder of DCP and the kind of sharding: ``fsdp2``, ``tp`` or
``hsdp``. If the folder is not there, the ranks write it first, and rank 0 adopts it.
"""

from __future__ import annotations

import os
import sys
import warnings
from typing import Any

import torch
import torch.distributed as dist
import torch.distributed.checkpoint as dcp
from torch.distributed.checkpoint.state_dict import get_state_dict, set_state_dict
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard
from torch.distributed.tensor import DTensor
from torch.distributed.tensor.parallel import ColwiseParallel, RowwiseParallel, parallelize_module

from bench.rank_exit import exit_rank
from ckpt import CheckpointManager, Tier
from ckpt.exchange.foreign.adoption import adopt_checkpoint
from ckpt.exchange.foreign.imports import ForeignCheckpoint
from tests.exchange.folders.net import Net, train


def sharded(kind: str, seed: int) -> tuple[Net, torch.optim.Optimizer]:
    """Return a net and an optimizer of another history."""
    torch.manual_seed(seed)
    net, world = Net(), dist.get_world_size()
    if kind == "tp":
        plan = {"layers.0": ColwiseParallel(), "layers.1": RowwiseParallel()}
        parallelize_module(net, init_device_mesh("cpu", (world,)), plan)
    else:
        shape = (2, world // 2) if kind == "hsdp" and world > 1 else (world,)
        names = ("replicate", "shard")[-len(shape) :]
        fully_shard(net, mesh=init_device_mesh("cpu", shape, mesh_dim_names=names))
    optimizer = torch.optim.AdamW(net.parameters(), lr=0.5, foreach=False)
    train(net, optimizer, steps=1)
    return net, optimizer


def flat(value: Any, path: str = "") -> dict[str, Any]:
    """Return the local values of a nested state, by path."""
    if isinstance(value, dict):
        parts = [flat(item, f"{path}/{key}") for key, item in value.items()]
        return {name: item for part in parts for name, item in part.items()}
    if isinstance(value, list):
        return flat(dict(enumerate(value)), path)
    return {path: value.to_local() if isinstance(value, DTensor) else value}


def main(root: str, folder: str, kind: str) -> None:
    warnings.simplefilter("ignore")
    dist.init_process_group("gloo")
    if not os.path.exists(folder):
        model, moments = get_state_dict(*sharded(kind, seed=4))
        dcp.save({"model": model, "optimizer": moments, "step": 2}, checkpoint_id=folder)
        if dist.get_rank() == 0:
            adopt_checkpoint(ForeignCheckpoint(path=folder), Tier(root), 2)
        dist.barrier()
    net, optimizer = sharded(kind, seed=5)
    with CheckpointManager(root) as manager:
        state = {"model": net, "optimizer": optimizer, "step": 0}
        report = manager.restore(state)
        assert report is not None
        assert (report.missing, report.unexpected) == ((), ()), report
    other, other_optimizer = sharded(kind, seed=6)
    model, moments = get_state_dict(other, other_optimizer)
    target: dict[str, Any] = {"model": model, "optimizer": moments, "step": 0}
    dcp.load(target, checkpoint_id=folder)
    set_state_dict(
        other,
        other_optimizer,
        model_state_dict=target["model"],
        optim_state_dict=target["optimizer"],
    )
    assert state["step"] == target["step"]
    ours = flat(list(get_state_dict(net, optimizer)))
    theirs = flat(list(get_state_dict(other, other_optimizer)))
    assert ours.keys() == theirs.keys()
    for name, value in theirs.items():
        same = (
            torch.equal(ours[name], value)
            if isinstance(value, torch.Tensor)
            else ours[name] == value
        )
        assert same, (name, ours[name], value)
    print(f"{len(theirs)} values are equal")
    dist.barrier()
    exit_rank()


if __name__ == "__main__":
    main(*sys.argv[1:])
