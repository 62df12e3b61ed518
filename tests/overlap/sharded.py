"""A rank of a job that overlaps its saves with steps of a sharded or replicated model.

torchrun starts it: sharded.py FOLDER.
"""

from __future__ import annotations

import sys
from functools import partial
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import FullyShardedDataParallel, fully_shard
from torch.distributed.optim import ZeroRedundancyOptimizer
from torch.distributed.tensor import DTensor
from torch.distributed.tensor.parallel import ColwiseParallel, RowwiseParallel, parallelize_module
from torch.nn.parallel import DistributedDataParallel

from bench.rank_exit import exit_rank
from ckpt import CheckpointManager
from ckpt.errors import CkptError, TensorChanged, UnsupportedValue
from tests.overlap.jobs import WIDTH, Net
from tests.overlap.window import Window, assert_restores, content
from tests.state.saving import assert_same

MODES = ("fully_shard", "tensor parallel", "DDP", "FSDP1", "FSDP1 flat", "ZeRO")
COPIES = ("DDP", "ZeRO")


def build(mode: str, seed: int) -> dict[str, Any]:
    torch.manual_seed(seed)
    net: Any = Net()
    mesh = init_device_mesh("cpu", (dist.get_world_size(),))
    if mode == "fully_shard":
        fully_shard(net.two, mesh=mesh)
        fully_shard(net, mesh=mesh)
    elif mode == "tensor parallel":
        parallelize_module(net, mesh, {"one": ColwiseParallel(), "two": RowwiseParallel()})
    elif mode.startswith("FSDP1"):
        named = mode == "FSDP1"
        net = FullyShardedDataParallel(net, use_orig_params=named, device_id=torch.device("cpu"))
    else:
        net = DistributedDataParallel(net)
    kind = torch.optim.AdamW
    of_rank = partial(ZeroRedundancyOptimizer, optimizer_class=kind) if mode == "ZeRO" else kind
    state = {"model": net, "optimizer": of_rank(net.parameters(), lr=0.01)}
    train(state, 0)
    return state


def train(state: dict[str, Any], number: int) -> None:
    state["optimizer"].zero_grad()
    state["model"](
        torch.randn(8, WIDTH, generator=torch.Generator().manual_seed(number))
    ).backward()
    state["optimizer"].step()


def overlapped(mode: str, folder: str, window: Window) -> None:
    state, twin = build(mode, 0), build(mode, 0)
    root = f"{folder}/{mode}"
    with CheckpointManager(root) as manager:
        for number in range(1, 4):
            pending = window.save(manager, state, number)
            window.must_wait(partial(train, state, number), patience=0.3)
            train(twin, number)
            pending.result(60)
    assert_same(content(state), content(twin))
    assert_restores(root, window.reference, build(mode, 5))


def changed(mode: str, folder: str, window: Window) -> None:
    """Change a shard on one rank without the manager: no rank has that checkpoint, and the next
    save works.
    """
    state = build(mode, 0)
    with CheckpointManager(f"{folder}/{mode} changed") as manager:
        pending = window.save(manager, state, 1)
        if dist.get_rank() == 1:
            weight = next(held for held in state["model"].parameters() if held.numel())
            with torch.no_grad():
                (weight._local_tensor if isinstance(weight, DTensor) else weight).add_(1)
        window.close()
        error = pending.exception(60)
        mine = dist.get_rank() == 1 and mode not in COPIES  # another rank may copy a replica
        assert isinstance(error, TensorChanged if mine else CkptError), error
        assert ("'model/" if mode.startswith("FSDP1") else "one.weight") in str(error), error
        assert manager.steps() == []
        if mode not in COPIES:  # the replicas differ now, and a save of them is refused
            manager.save(state, 2)
            assert manager.steps() == [2]


def zero_inside_backward(folder: str) -> None:
    """Its steps are taken by hooks of DDP. Every rank refuses the save before anything is begun."""
    net = DistributedDataParallel(Net())
    optimizer = ZeroRedundancyOptimizer(
        net.parameters(), torch.optim.AdamW, overlap_with_ddp=True, lr=0.01, foreach=False
    )
    with CheckpointManager(f"{folder}/inside") as manager:
        with pytest.raises(
            UnsupportedValue, match="'optimizer' is a ZeroRedundancyOptimizer with overlap_with_ddp"
        ):
            manager.save_async({"model": net, "optimizer": optimizer}, 1)
        manager.save({"model": net}, 2)
        assert manager.steps() == [2]


def main(folder: str) -> None:
    torch.set_num_threads(1)
    dist.init_process_group("gloo")
    window = Window()
    window.hold_copies(pytest.MonkeyPatch())
    for mode in MODES:
        overlapped(mode, folder, window)
        changed(mode, folder, window)
    zero_inside_backward(folder)
    dist.barrier()
    if dist.get_rank() == 0:
        print("ALL WELL")
    exit_rank()


main(*sys.argv[1:])
