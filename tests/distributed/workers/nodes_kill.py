"""FOLDER MAPPING FAR REPLICAS: four ranks that each find the root of node MAPPING[rank].

They restore, check, and save every step until they are killed.

Every value of the state follows from the step and its own place, so that a mixture of two steps is
detected. FAR says how often the shared tier takes a step, with 0 for never. REPLICAS is the number
of other nodes that keep the files of a node.
"""

from __future__ import annotations

import itertools
import sys
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor import DTensor, Shard

from ckpt import CheckpointManager, Tier

ROWS = 1024


def fill(state: dict[str, Any], step: int) -> None:
    with torch.no_grad():
        for number, tensor in enumerate(state["tensors"].values()):
            part = tensor.to_local() if isinstance(tensor, DTensor) else tensor
            part.copy_(torch.arange(part.numel()).reshape(part.shape) + step * 1000.0 + number)
    state["step"] = step


def main() -> None:
    dist.init_process_group("gloo")
    folder, rank = Path(sys.argv[1]), dist.get_rank()
    far, here, buddies = int(sys.argv[3]), sys.argv[2][rank], int(sys.argv[4])
    mesh = init_device_mesh("cpu", (4,))
    tensors: dict[str, torch.Tensor] = {
        f"t{number}": DTensor.from_local(torch.zeros(ROWS // 4, 96), mesh, [Shard(0)])
        for number in range(6)
    }
    state: dict[str, Any] = {"tensors": {**tensors, "small": torch.zeros(5)}, "step": 0}
    tiers = [Tier(str(folder / f"node{here}"), local=True, keep_last=3, buddies=buddies)]
    if far:
        tiers.append(Tier(str(folder / "shared"), every=far, keep_last=3))
    manager = CheckpointManager(tiers, chunk_size=1 << 13, commit_timeout_seconds=30)
    report = manager.restore(state)
    first = 1
    if report is not None:
        found = {name: tensor.clone() for name, tensor in state["tensors"].items()}
        fill(state, report.step)
        for name, tensor in state["tensors"].items():
            assert torch.equal(found[name], tensor), (name, report)
        first = report.step + 1
    print(f"RESTORED {rank} {first - 1}", flush=True)
    for step in itertools.count(first):
        fill(state, step)
        manager.save(state)
        if rank == 0:
            print(f"COMMITTED {step}", flush=True)


main()
