"""What a rank of ``bench.node_memory`` does: ``torchrun -m bench.node_memory_rank PLAN``.

All ranks train one GPT in FSDP2 shards, and save it with each setting in turn. Rank 0 writes the
figures of all ranks for each turn, as a JSON line, into the file that the plan names.
"""

from __future__ import annotations

import os
import shutil
import time
from contextlib import nullcontext
from typing import Any

import torch.distributed as dist

from bench.measure import MemorySampler
from bench.rank import any_rank, begin, say
from bench.rank_exit import exit_rank
from bench.state import Training
from bench.whole_slots import whole_slots
from ckpt import CheckpointManager


def main() -> None:
    """Measure all settings in turn."""
    plan, group, training = begin()
    for number in range(plan["turns"]):
        for name in plan["names"]:
            folder = os.path.join(plan["folder"], f"{name}-{number}")
            figures = _turn(training, group, plan, name, folder)
            ranks: list[Any] = [None] * dist.get_world_size()
            dist.all_gather_object(ranks, figures)
            say(plan, name=name, ranks=ranks)
            if dist.get_rank() == 0:
                shutil.rmtree(folder)
            dist.barrier()
    exit_rank()


def _turn(
    training: Training, group: dist.ProcessGroup, plan: dict[str, Any], name: str, folder: str
) -> dict[str, Any]:
    """Save some times with one setting. The first save, in which the memory settles, is left out of
    the times, and not of the memory.
    """
    with whole_slots() if name == "whole slots" else nullcontext():
        earlier_bytes = _training_bytes(training, group, plan)
        with MemorySampler(os.getpid()) as sampler, CheckpointManager(folder) as manager:
            manager.prepare(training.objects())
            saves = [_save(manager, training, group, plan) for _ in range(plan["saves"] + 1)]
        own_bytes = max(earlier_bytes, _training_bytes(training, group, plan))
        return {"memory": sampler.peak_bytes - own_bytes, "saves": saves[1:]}


def _training_bytes(training: Training, group: dist.ProcessGroup, plan: dict[str, Any]) -> int:
    """Return the memory that the training itself needs at its peak, in as many steps as saves."""
    with MemorySampler(os.getpid()) as sampler:
        for _ in range(plan["saves"] + 1):
            _compute(training, group, plan, time.perf_counter())
            training.forward_backward()
            say(plan, step=training.step)  # so that the parent sees progress
    return sampler.peak_bytes


def _save(
    manager: CheckpointManager, training: Training, group: dist.ProcessGroup, plan: dict[str, Any]
) -> tuple[float, float, int]:
    """Return the stall, the durable time and the bytes of a save. The optimizer's step comes
    ``plan["ahead"]`` seconds after the call.
    """
    dist.barrier(group)
    began = time.perf_counter()
    pending = manager.save_async(training.objects(), training.step)
    _compute(training, group, plan, began)
    pending.result()
    training.forward_backward()
    say(plan, step=training.step)
    assert pending.durable_seconds is not None
    return pending.stall_seconds, pending.durable_seconds, pending.nbytes


def _compute(
    training: Training, group: dist.ProcessGroup, plan: dict[str, Any], began: float
) -> None:
    """Run the passes of a step, until ``plan["ahead"]`` seconds after ``began``, and the step."""
    while any_rank(time.perf_counter() - began < plan["ahead"], group):
        training.forward_backward()
    training.optimizer_step()


if __name__ == "__main__":
    main()
