"""What a rank does: ``torchrun -m bench.rank PLAN``.

All ranks train one GPT in FSDP2 shards, and save it with one contender after the other. Training
has a process group of its own, so that the default one is free for contenders, as in a CUDA job,
where training talks over NCCL: DCP's ``async_save`` would else mix its collectives, from its
thread, with those of the training, and hang.

Rank 0 writes what happens, one JSON line each, into the file that the plan names; the parent reads
it. An error ends the rank, and so, by torchrun, all of them.
"""

from __future__ import annotations

import json
import os
import shutil
import sys
import time
from dataclasses import asdict
from typing import Any

import torch
import torch.distributed as dist
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.fsdp import fully_shard

from bench import contenders
from bench.compare import contents, differences
from bench.contenders import Contender
from bench.measure import Step, TrainedSave, tree_bytes
from bench.process import BenchError
from bench.rank_exit import exit_rank
from bench.state import GPT, Training, width_for
from bench.worker import Finisher


def begin() -> tuple[dict[str, Any], dist.ProcessGroup, Training]:
    """Begin as a rank. Return the plan in the file that the first argument names, a group of all
    ranks, and a sharded training.
    """
    with open(sys.argv[1]) as file:
        plan = json.load(file)
    torch.set_num_threads(1)
    dist.init_process_group("gloo")
    group = dist.new_group()
    assert isinstance(group, dist.ProcessGroup)
    return plan, group, sharded(group, plan["size"], plan["layers"], plan["batch"])


def main() -> None:
    plan, group, training = begin()
    for name in plan["names"]:
        say(plan, begin=name)
        try:
            _measure(name, training, group, plan)
        except Exception as error:
            reason = (
                error.reason
                if isinstance(error, BenchError)
                else f"{type(error).__name__}: {error}"
            )
            _write(plan, name=name, error=f"rank {dist.get_rank()}: {reason}")
            raise
    dist.barrier()
    exit_rank()


def sharded(group: dist.ProcessGroup, size_bytes: int, layers: int, batch: int) -> Training:
    """A training whose AdamW state of about ``size_bytes`` is spread over all ranks."""
    torch.manual_seed(1)
    model = GPT(layers, width_for(size_bytes, layers))
    mesh = DeviceMesh.from_group(group, "cpu")
    for block in model.blocks:
        fully_shard(block, mesh=mesh)
    fully_shard(model, mesh=mesh)
    training = Training(model, torch.optim.AdamW(model.parameters(), lr=1e-4), batch)
    training.generator.manual_seed(dist.get_rank())
    _step(training)
    return training


def _measure(name: str, training: Training, group: dist.ProcessGroup, plan: dict[str, Any]) -> None:
    folder = os.path.join(plan["folder"], name)
    if dist.get_rank() == 0:
        os.makedirs(folder)
    dist.barrier()
    contender = contenders.make(name)
    contender.prepare(training, folder)
    for number in range(plan["repeats"] + 1):
        save, path, saved = _save(contender, training, group, number + 1, plan["clean_steps"])
        training.spoil()
        contender.load_back(path, training)
        wrong = differences(saved, contents(training))
        everyone: list[Any] = [None] * dist.get_world_size()
        dist.all_gather_object(everyone, (asdict(save), wrong))
        if found := [name for _, each in everyone for name in each]:
            raise BenchError(f"what was loaded is not what was saved: {', '.join(found[:3])}")
        say(plan, name=name, saves=[each for each, _ in everyone], disk_bytes=_clear(folder))
    contender.close()
    say(plan, end=name)


def _save(
    contender: Contender, training: Training, group: dist.ProcessGroup, number: int, clean: int
) -> tuple[TrainedSave, str, dict[str, Any]]:
    """A save in the training loop, between steps without one."""
    _step(training)
    before = [_step(training) for _ in range(clean)]
    saved = contents(training)
    dist.barrier()
    began = time.perf_counter()
    handle = contender.save(number)
    call = time.perf_counter() - began
    finisher = Finisher(contender)
    finisher.take(handle, began + call)
    beside: list[Step] = []
    unsafe = not handle.durable
    while any_rank(
        unsafe or finisher.waiting(), group
    ):  # steps are collective: all ranks take as many
        started = time.perf_counter()
        training.forward_backward()
        waiting = time.perf_counter()
        if unsafe:
            contender.wait_safe(handle)
            unsafe = False
        wait = time.perf_counter() - waiting
        training.optimizer_step()
        beside.append(Step(time.perf_counter() - started - wait, wait))
    durable = finisher.finish()[0] - began
    after = [_step(training) for _ in range(clean)]
    return TrainedSave(call, durable, before + after, beside), handle.path, saved


def _step(training: Training) -> float:
    began = time.perf_counter()
    training.forward_backward()
    training.optimizer_step()
    return time.perf_counter() - began


def any_rank(mine: bool, group: dist.ProcessGroup) -> bool:
    flag = torch.tensor([int(mine)])
    dist.all_reduce(flag, op=dist.ReduceOp.MAX, group=group)
    return bool(flag.item())


def _clear(folder: str) -> int:
    """Delete the checkpoint once all have compared it; returns its bytes."""
    dist.barrier()
    nbytes = 0
    if dist.get_rank() == 0:
        for entry in os.scandir(folder):
            if entry.name.startswith("step-"):
                nbytes += tree_bytes(entry.path)
                shutil.rmtree(entry.path)
    dist.barrier()
    return nbytes


def say(plan: dict[str, Any], **what: Any) -> None:
    if dist.get_rank() == 0:
        _write(plan, **what)


def _write(plan: dict[str, Any], **what: Any) -> None:
    line = json.dumps(what) + "\n"
    descriptor = os.open(plan["answers"], os.O_WRONLY | os.O_APPEND | os.O_CREAT, 0o600)
    os.write(descriptor, line.encode())  # one write: lines of several ranks do not mix
    os.close(descriptor)


if __name__ == "__main__":
    main()
