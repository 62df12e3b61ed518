"""What one version of torch writes, and whether it reads what the others wrote.

``worker.py write FOLDER`` trains three steps, saves with ckpt, and writes the same state with
``torch.save`` beside it. ``worker.py read FOLDER...`` restores each of these into other weights and
compares every tensor with what ``torch.save`` kept, bit for bit. Under torchrun the model is
sharded by ``fully_shard``. The last line of the output is JSON.
"""

from __future__ import annotations

import json
import os
import sys
import traceback
import warnings
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.fsdp import fully_shard
from torch.distributed.tensor import DTensor

from bench.rank_exit import exit_rank
from ckpt import CheckpointManager

STEPS = 3


class Net(nn.Module):
    """A network with shapes that two ranks cannot cut evenly, and a buffer."""

    def __init__(self) -> None:
        super().__init__()
        self.table = nn.Embedding(97, 31)
        self.body = nn.Sequential(nn.Linear(31, 67), nn.GELU(), nn.Linear(67, 31))
        self.norm = nn.BatchNorm1d(31)
        self.head = nn.Linear(31, 97, bias=False)

    def forward(self, words: torch.Tensor) -> torch.Tensor:
        out: torch.Tensor = self.head(self.norm(self.body(self.table(words))))
        return out


def state_of(seed: int) -> dict[str, Any]:
    torch.manual_seed(seed)
    net = Net()
    if dist.is_initialized():
        for layer in (*net.body, net):
            if any(True for _ in layer.parameters()):
                fully_shard(layer)
    adam = torch.optim.AdamW(net.parameters(), lr=0.01 + seed)
    schedule = torch.optim.lr_scheduler.CosineAnnealingLR(adam, 10)
    return {"model": net, "optimizer": adam, "schedule": schedule, "words": [seed, f"{seed}"]}


def train(state: dict[str, Any], steps: int) -> float:
    loss = torch.tensor(0.0)
    for step in range(steps):
        torch.manual_seed(step)
        words = torch.randint(97, (16,))
        loss = nn.functional.cross_entropy(state["model"](words), words)
        loss.backward()
        state["optimizer"].step()
        state["optimizer"].zero_grad()
        state["schedule"].step()
    return loss.item()


def whole(value: Any) -> Any:
    """Return ``value`` with whole tensors, which all ranks have to request."""
    if isinstance(value, DTensor):
        return value.full_tensor().detach().clone()
    if isinstance(value, torch.Tensor):
        return value.detach().clone()
    if isinstance(value, dict):
        return {key: whole(item) for key, item in value.items()}
    return [whole(item) for item in value] if isinstance(value, list | tuple) else value


def contents(state: dict[str, Any]) -> dict[str, Any]:
    return {
        "model": whole(dict(state["model"].state_dict())),
        "optimizer": whole(state["optimizer"].state_dict()),
        "schedule": state["schedule"].state_dict(),
        "words": state["words"],
    }


def differences(one: Any, two: Any, path: str = "") -> list[str]:
    """Return the paths at which two states differ. Tensors are compared by their bytes."""
    if isinstance(one, torch.Tensor) and isinstance(two, torch.Tensor):
        same = (one.dtype, one.shape) == (two.dtype, two.shape) and torch.equal(
            one.contiguous().view(-1).view(torch.uint8), two.contiguous().view(-1).view(torch.uint8)
        )
        return [] if same else [path]
    if isinstance(one, dict) and isinstance(two, dict):
        if one.keys() != two.keys():
            return [f"{path}: {sorted(map(str, one.keys() ^ two.keys()))}"]
        return [each for key in one for each in differences(one[key], two[key], f"{path}/{key}")]
    if isinstance(one, list | tuple) and isinstance(two, list | tuple) and len(one) == len(two):
        pairs = enumerate(zip(one, two, strict=True))
        return [each for at, (a, b) in pairs for each in differences(a, b, f"{path}/{at}")]
    return [] if one == two else [f"{path}: {one!r} is not {two!r}"]


def write(folder: Path) -> dict[str, str]:
    state = state_of(0)
    train(state, STEPS)
    with CheckpointManager(folder / "root") as manager:
        manager.save_async(state, step=STEPS).result(60)
    kept = contents(state)
    if not dist.is_initialized() or dist.get_rank() == 0:
        torch.save(kept, folder / "truth.pt")
    return {"write": "equal"}


def read(folder: Path) -> str:
    state = state_of(1)
    with CheckpointManager(folder / "root") as manager:
        manager.restore(state)
    truth = torch.load(folder / "truth.pt", weights_only=True)
    if found := differences(truth, contents(state)):
        return f"{len(found)} differences: {found[0]}"
    loss = train(state, 1)
    return "equal" if 0 < loss < 100 else f"a loss of {loss}"


def main() -> None:
    warnings.simplefilter("ignore")
    if "RANK" in os.environ:
        dist.init_process_group("gloo")
    found: dict[str, str] = {}
    verb, *folders = sys.argv[1:]
    for folder in folders:
        try:
            found |= write(Path(folder)) if verb == "write" else {folder: read(Path(folder))}
        except Exception as error:
            traceback.print_exc()
            found[folder] = f"{type(error).__name__}: {str(error)[:200]}"
    if dist.is_initialized():
        each: list[Any] = [None] * dist.get_world_size()
        dist.all_gather_object(each, found)
        bad = [one for one in each if set(one.values()) != {"equal"}]
        found = (bad or each)[0]
    if not dist.is_initialized() or dist.get_rank() == 0:
        print(json.dumps(found))
    exit_rank()


if __name__ == "__main__":
    main()
