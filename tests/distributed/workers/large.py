"""FOLDER: two ranks that save, and restore in the same layout and in others."""

from __future__ import annotations

import sys
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch.distributed.tensor import DTensor

import ckpt.catalog.tiered_reader as origin
from bench.rank_exit import exit_rank
from ckpt import CheckpointManager, PerRank
from ckpt.catalog.fragments import load_fragment
from tests.distributed.workers.nets import build, step

MODES = ("fsdp", "tp", "ddp")
READ: list[int] = []


def whole(value: torch.Tensor) -> torch.Tensor:
    return value.full_tensor() if isinstance(value, DTensor) else value.detach().clone()


def state_of(mode: str, seed: int) -> dict[str, Any]:
    model, optimizer = build(mode, seed)
    step(model, optimizer, seed)
    return {
        "model": model,
        "optimizer": optimizer,
        "step": 0,
        "own": PerRank({"rank": dist.get_rank() if seed == 0 else -1}, on_resize="first"),
    }


def values(state: dict[str, Any]) -> list[torch.Tensor]:
    """Return the whole parameters and their moments."""
    optimizer = state["optimizer"]
    moments = [
        optimizer.state[p][key]
        for p in state["model"].parameters()
        for key in ("exp_avg", "exp_avg_sq")
    ]
    return [whole(value) for value in (*state["model"].parameters(), *moments)]


def counted(load: Any) -> Any:
    def counting(*args: Any) -> Any:
        READ.append(args[3].rank)
        return load(*args)

    return counting


def main() -> None:
    dist.init_process_group("gloo")
    pytest.MonkeyPatch().setattr(origin, "load_fragment", counted(load_fragment))
    folder = Path(sys.argv[1])
    for mode in MODES:
        state = state_of(mode, 0)
        with CheckpointManager(folder / mode, commit_timeout_seconds=30) as manager:
            for number in (1, 2, 3):
                step(state["model"], state["optimizer"], number)
                state["step"] = number
                manager.save(state)
        kept = values(state)
        for other in MODES:
            target = state_of(other, 7)
            with CheckpointManager(folder / mode) as manager:
                READ.clear()
                report = manager.restore(target)
            assert report is not None
            assert report.step == target["step"] == 3
            assert target["own"].value == {"rank": dist.get_rank()}
            assert all(torch.equal(a, b) for a, b in zip(kept, values(target), strict=True)), (
                mode,
                other,
            )
            assert len(READ) == len(set(READ)), "a fragment was read twice"
        dist.barrier()
        if dist.get_rank() == 0:
            torch.save(kept, folder / f"{mode}.pt")
    dist.barrier()
    if dist.get_rank() == 0:
        print("ALL WELL", flush=True)
    exit_rank()


main()
