"""FOLDER: four ranks get their host memory one after the other, and then save together."""

from __future__ import annotations

import sys

import torch
import torch.distributed as dist

from bench.rank_exit import exit_rank
from ckpt import CheckpointManager
from tests.kit.waiting import until


def main() -> None:
    dist.init_process_group("gloo")
    rank, ranks = dist.get_rank(), dist.get_world_size()
    state = {"own": {f"{rank}": torch.full((50 << 20,), float(rank))}}  # 200 MiB
    with CheckpointManager(sys.argv[1]) as manager:
        slots = manager._saver.slots
        for turn in range(ranks):
            if rank == turn:
                manager.prepare(state)
                assert until(lambda: slots.nbytes == 48 << 20)
            dist.barrier()
        budget = slots._budget
        assert budget is not None
        print(f"share: {budget.sentence}")
    exit_rank()


if __name__ == "__main__":
    main()
