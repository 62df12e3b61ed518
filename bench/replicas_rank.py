"""What a rank of `replicas` does: ``torchrun -m bench.replicas_rank PLAN``.

All ranks hold one model under DDP with its AdamW state, save it once, and restore it again and
again, in turns each reading all of it and one reading each part for all.

Rank 0 writes what happened, one JSON line each, into the file that the plan names. An error ends
the rank, and so, by torchrun, all of them.
"""

from __future__ import annotations

import glob
import json
import os
import sys
import time
from typing import Any, Final, Literal

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.nn.parallel import DistributedDataParallel

from bench.machine import evict
from bench.process import BenchError
from bench.rank_exit import exit_rank
from ckpt import CheckpointManager, Tier

WIDTH: Final = 1024
_BYTES_PER_PARAMETER: Final = 12  # float32: the weight and AdamW's two moments
_WAYS: Final[tuple[Literal["read", "broadcast"], ...]] = ("read", "broadcast")


def main() -> None:
    with open(sys.argv[1]) as file:
        plan = json.load(file)
    torch.set_num_threads(1)
    dist.init_process_group("gloo")
    if dist.get_rank() == 0:
        # a sign of life: starting takes long on a busy machine
        _write(plan["answers"], {"number": 0})
    state, tensors = _held(plan["size"])
    saved = [tensor.clone() for tensor in tensors]
    with CheckpointManager(Tier(plan["url"], options=plan["options"]), slots=1) as manager:
        manager.save(state, 1)
        if dist.get_rank() == 0:
            _write(plan["answers"], {"number": 0})
        for number in range(plan["repeats"] + 1):
            for way in _WAYS if number % 2 else _WAYS[::-1]:
                for tensor in tensors:
                    tensor.fill_(-7)
                if dist.get_rank() == 0:
                    for path in glob.glob(f"{plan['folder']}/root/*/*"):
                        evict(path)
                dist.barrier()
                answer = _restored(manager, state, way)
                if not all(torch.equal(one, two) for one, two in zip(saved, tensors, strict=True)):
                    raise BenchError("what was restored is not what was saved")
                everyone: list[Any] = [None] * dist.get_world_size()
                dist.all_gather_object(everyone, answer)
                if dist.get_rank() == 0:
                    _write(plan["answers"], {"name": way, "number": number, "ranks": everyone})
    dist.barrier()
    exit_rank()


def _held(size_bytes: int) -> tuple[dict[str, Any], list[Tensor]]:
    """A state of about ``size_bytes`` under DDP, the same on all ranks, and its tensors."""
    torch.manual_seed(1)
    count = max(1, size_bytes // (WIDTH * WIDTH * _BYTES_PER_PARAMETER))
    model = DistributedDataParallel(nn.Sequential(*(nn.Linear(WIDTH, WIDTH) for _ in range(count))))
    optimizer = torch.optim.AdamW(model.parameters())
    for parameter in model.parameters():
        parameter.grad = torch.rand_like(parameter)
    optimizer.step()
    optimizer.zero_grad()
    held = [value for each in optimizer.state.values() for value in each.values()]
    return {"model": model, "optimizer": optimizer}, [
        *(p.detach() for p in model.parameters()),
        *held,
    ]


def _restored(
    manager: CheckpointManager, state: dict[str, Any], way: Literal["read", "broadcast"]
) -> dict[str, Any]:
    began, busy = time.perf_counter(), time.process_time()
    report = manager.restore(state, broadcast=way == "broadcast")
    seconds = time.perf_counter() - began
    assert report is not None
    return {
        "seconds": seconds,
        "cpu_seconds": time.process_time() - busy,
        "read_bytes": report.read_bytes,
        "nbytes": report.nbytes,
    }


def _write(path: str, what: dict[str, Any]) -> None:
    descriptor = os.open(path, os.O_WRONLY | os.O_APPEND | os.O_CREAT, 0o600)
    os.write(descriptor, (json.dumps(what) + "\n").encode())
    os.close(descriptor)


if __name__ == "__main__":
    main()
