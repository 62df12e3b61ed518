"""Ranks of horovodrun sum over all ranks, save each step in ``ROOT``, and continue where they were.

horovodrun --gloo -np 2 python horovod_ranks.py ROOT
"""

import sys
from typing import Any

import horovod.torch as hvd
import torch

import ckpt
from ckpt.integrations.arrays import state_of


def main() -> None:
    hvd.init()
    total = torch.zeros(4)
    state: dict[str, Any] = {
        "total": state_of(total, replicas=range(hvd.size())),
        "own": ckpt.PerRank(10 + hvd.rank()),
        "step": 0,
    }
    with ckpt.CheckpointManager(sys.argv[1], coordinator=ckpt.join_horovod(hvd)) as manager:
        manager.restore(state)
        for step in range(state["step"] + 1, state["step"] + 4):
            total += hvd.allreduce(torch.full((4,), float(step)), op=hvd.Sum)
            manager.save_async(state | {"step": step})
    assert state["own"].value == 10 + hvd.rank()
    print(f"rank {hvd.rank()} of {hvd.size()}: {total.tolist()}", flush=True)


if __name__ == "__main__":
    main()
