"""Write a folder of ``torch.distributed.checkpoint`` into OUT/state, under ``torchrun``.

KIND is ``fsdp2``, ``tp``, ``hsdp`` (four ranks) or ``flat`` (FSDP2 with a flat optimizer, as
torchtitan saves it). ``hf`` and ``hf-consolidated`` write the model alone with the storage writer
of Hugging Face.
"""

from __future__ import annotations

import os
import sys
import warnings
from typing import Any

import torch
import torch.distributed as dist
import torch.distributed.checkpoint as dcp
from torch.distributed.checkpoint.state_dict import StateDictOptions, get_state_dict
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard
from torch.distributed.tensor.parallel import ColwiseParallel, RowwiseParallel, parallelize_module

from tests.exchange.folders.net import build, train, write_truth


def main(out: str, kind: str) -> None:
    warnings.simplefilter("ignore")
    dist.init_process_group("gloo")
    world = dist.get_world_size()
    net, _ = build()
    if kind == "tp":
        plan = {"layers.0": ColwiseParallel(), "layers.1": RowwiseParallel()}
        parallelize_module(net, init_device_mesh("cpu", (world,)), plan)
    else:
        shape = (2, world // 2) if kind == "hsdp" else (world,)
        names = ("replicate", "shard")[-len(shape) :]
        fully_shard(net, mesh=init_device_mesh("cpu", shape, mesh_dim_names=names))
    optimizer = torch.optim.AdamW(net.parameters(), lr=0.01, foreach=False)
    train(net, optimizer)
    folder = os.path.join(out, "state")
    if kind.startswith("hf"):
        write_hf(folder, net, consolidated=kind.endswith("consolidated"))
        write_truth(out, net, None)
    elif kind == "flat":
        options = StateDictOptions(flatten_optimizer_state_dict=True)
        model, moments = get_state_dict(net, optimizer, options=options)
        counts = {"step": torch.tensor(2, dtype=torch.int32)}
        dcp.save({**model, "optimizer": moments, "train_state": counts}, checkpoint_id=folder)
        write_truth(out, net, optimizer, at="train_state/step", step=2)
    else:
        model, moments = get_state_dict(net, optimizer)
        dcp.save({"model": model, "optimizer": moments, "step": 2}, checkpoint_id=folder)
        write_truth(out, net, optimizer, at="step", step=2)
    dist.barrier()
    dist.destroy_process_group()


def write_hf(folder: str, net: Any, *, consolidated: bool) -> None:
    from torch.distributed.checkpoint.hf_storage import HuggingFaceStorageWriter

    index = dict.fromkeys(net.state_dict(), 1)
    writer = HuggingFaceStorageWriter(
        path=folder, fqn_to_index_mapping=index, save_distributed=True,
        enable_consolidation=consolidated,
    )  # fmt: skip
    dcp.save(dict(net.state_dict()), storage_writer=writer)


if __name__ == "__main__":
    main(*sys.argv[1:])
