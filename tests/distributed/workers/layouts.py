# ruff: noqa: PT017 - a worker has no pytest
"""save|load FOLDER MODE...: train and save under each mode, or restore each mode's checkpoint under
others.

An argument of load is SAVED_MODE:MODE. A mode that is saved may have a folder before it: 2/fsdp.
"""

from __future__ import annotations

import sys
from pathlib import Path

import torch
import torch.distributed as dist

from bench.rank_exit import exit_rank
from ckpt import CheckpointManager, PerRank
from ckpt.errors import ConfigError
from tests.distributed.workers.nets import (
    assert_close,
    assert_same,
    build,
    columns,
    full,
    state_of,
    step,
)


def save(folder: Path, saved: str) -> None:
    net, optimizer = build(saved.rpartition("/")[2], seed=0)
    for number in range(3):
        step(net, optimizer, number)
    expected = full(net, optimizer)
    torch.manual_seed(1000 + dist.get_rank())
    with CheckpointManager(folder / saved) as manager:
        pending = manager.save_async(
            state_of(net, optimizer, 3)
            | {"strict": PerRank(1, on_resize="same_rank"), "columns": columns(1)}
        )
        drawn = torch.rand(3)
        for number in range(3, 5):  # training goes on while the save streams
            step(net, optimizer, number)
        pending.result(60)
    after = full(net, optimizer)
    if dist.get_rank() == 0:
        torch.save({"expected": expected, "after": after}, folder / f"{saved}.pt")
    torch.save(drawn, folder / f"{saved}.{dist.get_rank()}.drawn")


def load(folder: Path, saved: str, mode: str) -> None:
    kept = torch.load(folder / f"{saved}.pt")
    alike = saved.rpartition("/")[2] == mode
    for already in (0, 2) if alike else (0,):
        net, optimizer = build(mode, seed=9)
        for number in range(70, 70 + already):
            step(net, optimizer, number)
        state = state_of(net, optimizer, -1) | {
            "history": None,
            "common": torch.zeros(7),
            "columns": columns(0),
        }
        state["who"].value = state["last"].value = None
        with CheckpointManager(folder / saved) as manager:
            state["strict"] = PerRank(0, on_resize="first")
            report = manager.restore(state)
            assert report is not None
            if report.saved_world_size != dist.get_world_size():
                before = full(net, optimizer)
                try:
                    manager.restore(state | {"strict": PerRank(0)})
                except ConfigError as error:
                    assert "strict" in str(error), error
                else:
                    raise AssertionError(
                        "a PerRank value came back to another world without a policy"
                    )
                assert_same(full(net, optimizer), before)
                manager.restore(state)
        assert_same(full(net, optimizer), kept["expected"])
        assert state["history"] == [0.5, {"loss": (1, 2)}]
        assert torch.equal(state["common"], torch.arange(7.0))
        assert torch.equal(state["columns"].to_local(), columns(1).to_local())
        rank, world = dist.get_rank(), report.saved_world_size
        if rank < world:
            assert torch.equal(torch.rand(3), torch.load(folder / f"{saved}.{rank}.drawn"))
        same = world == dist.get_world_size()
        assert state["who"].value == (rank if same else 0), state["who"].value
        assert state["last"].value["rank"] == (rank if same else world - 1)
        for number in range(3, 5):
            step(net, optimizer, number)
        (assert_same if alike and same else assert_close)(full(net, optimizer), kept["after"])


def main() -> None:
    folder = Path(sys.argv[1])
    dist.init_process_group("gloo")
    for task in sys.argv[2:]:
        saved, _, mode = task.partition(":")
        print(f"{task} begins", flush=True)
        if mode:
            load(folder, saved, mode)
        else:
            save(folder, saved)
        dist.barrier()
    if dist.get_rank() == 0:
        print("ALL WELL")
    exit_rank()


main()
