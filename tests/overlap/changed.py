"""A rank of a job whose sharded state is changed during the copy, in every way of ``ways``.

torchrun starts it: changed.py FOLDER.
"""

from __future__ import annotations

import sys
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard
from torch.distributed.tensor.parallel import ColwiseParallel, RowwiseParallel, parallelize_module

from bench.rank_exit import exit_rank
from ckpt import CheckpointManager
from ckpt.errors import CkptError, TensorChanged
from tests.overlap.jobs import WIDTH
from tests.overlap.ways import WAYS, State, TwoLayers, model_and_average, seen_by
from tests.overlap.window import Window, assert_restores, content

LAYOUTS = ("FSDP2", "TP")


def build(layout: str, seed: int) -> State:
    torch.manual_seed(seed)
    mesh = init_device_mesh("cpu", (dist.get_world_size(),))

    def shard(net: TwoLayers) -> None:
        if layout == "FSDP2":
            fully_shard(net.two, mesh=mesh)
            fully_shard(net, mesh=mesh)
        else:
            parallelize_module(net, mesh, {"one": ColwiseParallel(), "two": RowwiseParallel()})

    state = model_and_average(shard)
    train(state)
    return state


def train(state: dict[str, Any]) -> None:
    state["optimizer"].zero_grad()
    state["model"](torch.randn(8, WIDTH, generator=torch.Generator().manual_seed(1))).backward()
    state["optimizer"].step()


def recast(layout: str, folder: str) -> None:
    """Save the same tensor objects in one dtype after the other."""
    state = build(layout, 0)
    for overlap in ("auto", "off"):
        root = f"{folder}/{layout} recast {overlap}"
        with CheckpointManager(root, overlap=overlap) as manager:  # type: ignore[arg-type]
            for number, dtype in enumerate((torch.float32, torch.bfloat16, torch.float64)):
                state["model"].to(dtype)
                target = build(layout, 5)
                target["model"].to(dtype)
                expected = content(state)
                manager.save(state, number)
                assert_restores(root, expected, target, number)


def main(folder: str) -> None:
    torch.set_num_threads(1)
    dist.init_process_group("gloo")
    window = Window()
    window.hold_copies(pytest.MonkeyPatch())
    silent: list[str] = []
    for layout in LAYOUTS:
        state, root = build(layout, 0), f"{folder}/{layout}"
        with CheckpointManager(root) as manager:
            for number, (name, change) in enumerate(WAYS.items()):
                pending = window.save(manager, state, number)
                how = seen_by(state, change)
                window.close()
                error = pending.exception(60)
                assert error is None or isinstance(error, CkptError), error
                if dist.get_rank() == 0:
                    # The line is one write: torchrun starts Python unbuffered, and the ranks write
                    # between the writes of each other.
                    print(f"WAY|{layout}|{name}|{how}\n", end="")
                if error is None:
                    silent.append(f"{layout}: {name}")
                else:
                    reported = isinstance(error, TensorChanged) or "was changed while step" in str(
                        error
                    )
                    assert reported, (layout, name, error)
            last = len(WAYS)
            pending = window.save(manager, state, last)
            window.close()
            pending.result(60)
            assert not silent, silent
            assert manager.steps() == [last]
        assert_restores(root, window.reference, build(layout, 5), last)
        recast(layout, folder)
    dist.barrier()
    if dist.get_rank() == 0:
        print("ALL WELL")
    exit_rank()


main(*sys.argv[1:])
