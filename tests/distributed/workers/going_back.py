"""Ranks save a branch, go back and save another one, or go on from what a death has left.

ROOT first | back VICTIM NUMBER | check. The rank VICTIM kills itself at its call NUMBER to a store,
counted from the restore on. The values tell the history of a step: each step adds the number of its
branch.
"""

from __future__ import annotations

import os
import sys
from pathlib import Path

import torch
import torch.distributed as dist

from bench.rank_exit import exit_rank
from ckpt import CheckpointManager
from tests.crash.sequences.run import die_at

TIERS = ("near", "far")
STEPS = 3
OLD, NEW, LATER = 1, 100, 10_000
"""What a step of each branch adds to the values."""


def note(root: Path, text: str) -> None:
    descriptor = os.open(root / "log", os.O_WRONLY | os.O_APPEND | os.O_CREAT)
    os.write(descriptor, f"{text}\n".encode())
    os.close(descriptor)


def train(
    manager: CheckpointManager, state: dict[str, torch.Tensor], step: int, added: int
) -> None:
    for value in state.values():
        value += added
    manager.save(state, step)


def main(root: Path, action: str, victim: int = -1, number: int = 0) -> None:
    dist.init_process_group("gloo")
    rank = dist.get_rank()
    state = {f"x{rank}": torch.zeros(100)}
    tiers = [str(root / name) for name in TIERS]
    with CheckpointManager(tiers, commit_timeout_seconds=20) as manager:
        if action == "first":
            for step in range(1, STEPS + 1):
                train(manager, state, step, OLD)
        elif action == "back":
            if rank == victim:
                die_at(number)
            manager.restore(state, step=1)
            note(root, "restored")
            train(manager, state, 2, NEW)
            note(root, "saved 2")
        else:
            report = manager.restore(state)
            assert report is not None
            (value,) = set(state[f"x{rank}"].tolist())
            note(root, f"{rank} {report.step} {value:.0f}")
            train(manager, state, report.step + 1, LATER)
    print("ALL WELL", flush=True)
    exit_rank()


if __name__ == "__main__":
    main(Path(sys.argv[1]), sys.argv[2], *map(int, sys.argv[3:]))
