"""Saving a part of a state: patterns, the trained part of a model, and what a restore does then."""

from __future__ import annotations

import sys
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch.distributed.fsdp import fully_shard
from torch.distributed.tensor import DTensor

import ckpt
from bench.rank_exit import exit_rank
from ckpt import CheckpointManager
from ckpt.errors import CkptError
from tests.kit.jobs import job, train, values


def sharded(seed: int) -> dict[str, Any]:
    plain = job(seed)
    for layer in plain["model"]:
        fully_shard(layer)
    fully_shard(plain["model"])
    plain["optimizer"] = torch.optim.AdamW(plain["model"].parameters(), lr=0.01)
    train(plain)
    return plain


def whole(state: dict[str, Any]) -> dict[str, torch.Tensor]:
    return {
        name: value.full_tensor() if isinstance(value, DTensor) else value
        for name, value in values(state).items()
    }


def check(manager: CheckpointManager, step: int, saved: Any, taken: tuple[str, ...]) -> None:
    other = sharded(9)
    before = whole(other)
    report = manager.restore(other, step)
    assert report is not None
    for name, value in whole(other).items():
        is_taken = any(part in name for part in taken)
        assert torch.equal(value, (saved if is_taken else before)[name]), (step, name)
        inside = any(name == left or name.startswith(f"{left}/") for left in report.left_alone)
        assert inside != is_taken, (step, name, report.left_alone)


def main() -> None:
    dist.init_process_group("gloo")
    root = Path(sys.argv[1])
    state = sharded(1)
    saved = whole(state)
    with CheckpointManager(root, commit_timeout_seconds=60) as manager:
        manager.save(state, 1, only="*lora*")
        manager.save({"model": ckpt.trainable(state["model"])}, 2)
        manager.save(state, 3, exclude="model/0.*")
        check(manager, 1, saved, ("lora",))
    with CheckpointManager(root, commit_timeout_seconds=60) as manager:
        check(manager, 3, saved, ("model/1.", "model/2.", "data/"))
        with pytest.raises(CkptError, match="modle"):
            manager.save(state, 4, only=["model", "modle"])
        # a pattern that matches on one rank only is not a pattern that matches nothing
        mine = state | ({"extra": torch.ones(2)} if dist.get_rank() == 0 else {})
        manager.save(mine, 5, only=["model", "extra"])
    with ckpt.open(root, step=2) as opened:
        assert all("base" not in name for name in opened.names())
    dist.barrier()
    print("ALL WELL")
    exit_rank()


main()
