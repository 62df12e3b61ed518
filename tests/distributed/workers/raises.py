"""ROOT: two ranks; rank 1 raises while a save streams that rank 0 never begins.

Rank 0 begins another save, which rank 1 never begins.
"""

from __future__ import annotations

import logging
import sys

import torch
import torch.distributed as dist

from ckpt import CheckpointManager
from ckpt.errors import PeerFailed


def main(root: str) -> None:
    logging.basicConfig(level=logging.WARNING)
    dist.init_process_group("gloo")
    rank = dist.get_rank()
    state = {"x": torch.zeros(1000)}
    manager = CheckpointManager(root, exit_seconds=1.0)
    manager.save(state, 1)
    if rank == 1:
        manager.save_async(state, 2)
        raise ValueError("boom")
    try:
        manager.save(state, 3, timeout=90)
    except PeerFailed as error:
        print("heard:", error, flush=True)
    manager.close()
    print("WELL", flush=True)


main(*sys.argv[1:])
