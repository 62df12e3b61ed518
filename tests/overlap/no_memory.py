"""A process that can map no memory for a slot until its limit is raised.

no_memory.py ROOT
"""

from __future__ import annotations

import os
import resource
import sys
from typing import Any

import pytest
import torch

from ckpt import CheckpointManager
from ckpt.errors import HostMemoryExhausted
from tests.overlap.window import assert_restores, content

MIB = 1 << 20


def state_of(fill: float) -> dict[str, Any]:
    weight = torch.nn.Parameter(torch.full((64 * MIB // 4,), fill))
    return {
        "weight": torch.nn.ParameterList([weight]),
        "optimizer": torch.optim.SGD([weight], lr=0.1),
    }


def step(state: dict[str, Any]) -> None:
    state["optimizer"].step()


def mapped() -> int:
    with open("/proc/self/statm") as file:
        return int(file.read().split()[0]) * resource.getpagesize()


def own_slots() -> list[str]:
    return [name for name in os.listdir("/dev/shm") if name.startswith(f"ckpt-slot-{os.getpid()}-")]


def main(root: str) -> None:
    torch.set_num_threads(1)
    state = state_of(1.0)
    state["weight"][0].grad = torch.ones_like(state["weight"][0])
    with CheckpointManager(root) as manager:
        resource.setrlimit(resource.RLIMIT_AS, (mapped() + 40 * MIB, resource.RLIM_INFINITY))
        manager.prepare(state)  # the machine has the memory, but this process may not use it
        for number in range(2):
            with pytest.raises(HostMemoryExhausted, match="Cannot allocate memory") as reported:
                manager.save_async(state, number)
            assert reported.value.needed >= 48 * MIB
            step(state)
        assert own_slots() == []
        assert manager.steps() == []
        resource.setrlimit(resource.RLIMIT_AS, (resource.RLIM_INFINITY, resource.RLIM_INFINITY))
        reference = content(state)
        pending = manager.save_async(state, 2)
        step(state)
        pending.result(60)
    assert_restores(root, reference, state_of(9.0), 2)
    print("ALL WELL")


main(*sys.argv[1:])
