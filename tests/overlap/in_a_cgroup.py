"""FOLDER CGROUP SIGHT: a training whose cgroup allows 1.4 times of its own memory at the peak saves
at each step, to a slow store. With "blind" for SIGHT, ckpt does not see the limit.
"""

from __future__ import annotations

import sys
from pathlib import Path

import pytest
import torch
from torch import nn

from ckpt import CheckpointManager
from ckpt.staging import memory_budget
from ckpt.storage.testing import Delay, Rule
from tests.kit.memory_cgroup import MOUNTS, MemoryCgroup
from tests.kit.stores import faulty

SAVES = 6
SETTLING_STEPS = 8
"""The memory of the training grows during the first steps."""


def main() -> None:
    folder, cgroup_folder = Path(sys.argv[1]), Path(sys.argv[2])
    names = next(names for mount, *names in MOUNTS if (cgroup_folder / names[0]).exists())
    cgroup = MemoryCgroup(cgroup_folder, *names)
    cgroup.enter()
    torch.manual_seed(0)
    torch.set_num_threads(1)
    model = nn.Sequential(*(nn.Linear(2500, 2500) for _ in range(8)))  # 191 MiB
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3)
    for _ in range(SETTLING_STEPS):
        expected = [parameter.detach().clone() for parameter in model[0].parameters()]
        step(model, optimizer)
    own = cgroup.peak
    cgroup.set_limit(int(1.4 * own))
    if sys.argv[3] == "blind":
        memory_budget._cgroup_rooms = list
    state = {"model": model, "optimizer": optimizer}
    faulty(pytest.MonkeyPatch(), folder, [Rule(verb="write", fault=Delay(0.1))])
    with CheckpointManager(folder) as manager:
        for number in range(SAVES):
            pending = manager.save_async(state, number)
            expected = [parameter.detach().clone() for parameter in model[0].parameters()]
            step(model, optimizer)
        pending.result(300)
        added = manager._saver.slots.nbytes
    cgroup.set_limit(2 * own)
    with CheckpointManager(folder) as manager:
        manager.restore(state)
    assert all(map(torch.equal, expected, (p.detach() for p in model[0].parameters())))
    print(f"own {own >> 20} MiB, state {pending.nbytes >> 20} MiB, images {added >> 20} MiB")


def step(model: nn.Module, optimizer: torch.optim.Optimizer) -> None:
    model(torch.randn(1, 2500)).square().mean().backward()
    optimizer.step()


if __name__ == "__main__":
    main()
