"""ROOT: train under each kind of parallelism, and save a step without training."""

from __future__ import annotations

import sys
from pathlib import Path

import torch.distributed as dist

from bench.rank_exit import exit_rank
from ckpt import CheckpointManager
from ckpt.events import Event, SaveSuspicious
from tests.distributed.workers.nets import build, state_of, step


def steps_named(root: Path, mode: str) -> list[int]:
    seen: list[int] = []

    def note(event: Event) -> None:
        if isinstance(event, SaveSuspicious):
            seen.append(event.step)

    net, optimizer = build(mode, seed=0)
    with CheckpointManager(root / mode, observers=[note], on_suspicious="warn") as manager:
        for number in range(1, 5):
            if number != 3:
                step(net, optimizer, number)
            manager.save(state_of(net, optimizer, number), number)
    return seen


def main(root: str) -> None:
    dist.init_process_group("gloo")
    for mode in ("ddp", "fsdp", "tp", "zero", "fsdp1"):
        found = steps_named(Path(root), mode)
        # FSDP1 trains parts of its flat parameters, and those are not compared
        assert found == ([] if mode == "fsdp1" else [3]), (mode, dist.get_rank(), found)
    dist.barrier()
    if dist.get_rank() == 0:
        print("ALL WELL", flush=True)
    exit_rank()


main(*sys.argv[1:])
