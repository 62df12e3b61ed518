"""One rank of ``test_sharded``.

Copies are slow and a step comes at once. Then a state of another seed is restored to what was
saved.
"""

from __future__ import annotations

import os
import sys
from typing import Any

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard
from torch.distributed.tensor import DTensor

from bench.rank_exit import exit_rank
from ckpt import CheckpointManager
from ckpt.staging.device import side_stream
from tests.device.accelerator import SECONDS, device, keep_busy


def trained(place: torch.device, mesh: Any, seed: int) -> dict[str, Any]:
    torch.manual_seed(seed)
    model = nn.Sequential(nn.Linear(256, 256), nn.Linear(256, 256)).to(place)
    for layer in model:
        fully_shard(layer, mesh=mesh)
    fully_shard(model, mesh=mesh)
    optimizer = torch.optim.AdamW(model.parameters(), lr=0.1, foreach=False)
    step({"model": model, "optimizer": optimizer}, place)
    return {"model": model, "optimizer": optimizer}


def step(state: dict[str, Any], place: torch.device) -> None:
    state["model"](torch.ones(4, 256, device=place)).sum().backward()
    state["optimizer"].step()
    state["optimizer"].zero_grad()


def content(state: dict[str, Any]) -> dict[str, torch.Tensor]:
    found: dict[str, torch.Tensor] = {}
    for name, parameter in state["model"].named_parameters():
        held = {"": parameter, **state["optimizer"].state[parameter]}
        for key, value in held.items():
            mine = value.to_local() if isinstance(value, DTensor) else value
            found[name + key] = mine.detach().cpu().clone()
    return found


def main(folder: str) -> None:
    place = device(int(os.environ["LOCAL_RANK"]))
    torch.accelerator.set_device_index(place.index)
    dist.init_process_group(dist.get_default_backend_for_device(place))
    mesh = init_device_mesh(place.type, (dist.get_world_size(),))
    state = trained(place, mesh, seed=0)
    side = side_stream(place)
    assert side is not None
    with CheckpointManager(folder) as manager:
        expected = content(state)
        keep_busy(SECONDS[0], side)
        pending = manager.save_async(state, 1)
        step(state, place)
        pending.result(120)
        changed = content(state)
        assert any(not torch.equal(changed[name], value) for name, value in expected.items())
        loaded = trained(place, mesh, seed=9)
        with torch.Stream(device=place):
            manager.restore(loaded, 1)
        torch.accelerator.synchronize(place)
        found = content(loaded)
        assert [
            name for name, value in expected.items() if not torch.equal(found[name], value)
        ] == []
    print("restored", flush=True)
    exit_rank()


if __name__ == "__main__":
    main(sys.argv[1])
