"""One network under every kind of parallelism; its names are the same under all."""

from __future__ import annotations

from typing import Any

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard
from torch.distributed.tensor import DTensor
from torch.distributed.tensor.parallel import ColwiseParallel, RowwiseParallel, parallelize_module
from torch.nn.parallel import DistributedDataParallel

from ckpt import PerRank, RngState


class Net(nn.Module):
    """Uneven sizes, a tie, buffers, one parameter that is large enough to be cut among replicas, and one with fewer rows than ranks."""

    def __init__(self) -> None:
        super().__init__()
        self.up, self.down = nn.Linear(18, 48), nn.Linear(48, 33)
        self.norm = nn.BatchNorm1d(33)
        self.head, self.other = nn.Linear(33, 3), nn.Linear(33, 3)
        self.other.weight = self.head.weight
        self.big = nn.Parameter(torch.randn(701, 333))
        self.tiny = nn.Parameter(torch.randn(1, 5))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        x = self.norm(self.down(self.up(x).relu()))
        return (self.head(x) + self.other(x)).square().sum() + self.big.square().sum() + self.tiny.sum()


def build(mode: str, seed: int) -> tuple[nn.Module, torch.optim.Optimizer]:
    torch.manual_seed(seed)
    net: nn.Module = Net()
    world = dist.get_world_size() if dist.is_initialized() else 1
    plan = {"up": ColwiseParallel(), "down": RowwiseParallel()}
    if mode == "fsdp":
        fully_shard(net, mesh=init_device_mesh("cpu", (world,)))
    elif mode == "tp":
        parallelize_module(net, init_device_mesh("cpu", (world,)), plan)
    elif mode == "fsdp+tp":
        mesh = init_device_mesh("cpu", (world // 2, 2), mesh_dim_names=("dp", "tp"))
        parallelize_module(net, mesh["tp"], plan)
        fully_shard(net, mesh=mesh["dp"])
    elif mode == "hsdp":
        fully_shard(net, mesh=init_device_mesh("cpu", (world // 2, 2), mesh_dim_names=("copies", "shards")))
    elif mode == "ddp":
        net = DistributedDataParallel(net)
    return net, torch.optim.AdamW(net.parameters(), lr=1e-2)


def step(net: nn.Module, optimizer: torch.optim.Optimizer, number: int) -> None:
    torch.manual_seed(number)
    optimizer.zero_grad()
    net(torch.randn(6, 18)).backward()
    optimizer.step()


def state_of(net: nn.Module, optimizer: torch.optim.Optimizer, number: int) -> dict[str, Any]:
    rank = dist.get_rank() if dist.is_initialized() else 0
    return {
        "model": net,
        "optimizer": optimizer,
        "step": number,
        "history": [0.5, {"loss": (1, 2)}],
        "common": torch.arange(7.0),
        "rng": PerRank(RngState(), on_resize="same_rank"),
        "who": PerRank(rank, on_resize="first"),
        "last": PerRank({"rank": torch.tensor(rank)}, on_resize=lambda rank, world, saved: saved - 1),
    }


def whole(tensor: torch.Tensor) -> torch.Tensor:
    return (tensor.full_tensor() if isinstance(tensor, DTensor) else tensor).detach().clone()


def full(net: nn.Module, optimizer: torch.optim.Optimizer) -> dict[str, torch.Tensor]:
    """Every tensor whole, by a name that no wrapper changes. All ranks must call it."""
    bare = net.module if isinstance(net, DistributedDataParallel) else net
    found = {f"model/{name}": whole(tensor) for name, tensor in bare.state_dict(keep_vars=True).items()}
    for name, parameter in bare.named_parameters():
        for key, value in optimizer.state[parameter].items():
            found[f"optimizer/{name}/{key}"] = whole(value)
    return found


def assert_same(have: dict[str, torch.Tensor], want: dict[str, torch.Tensor]) -> None:
    assert have.keys() == want.keys(), have.keys() ^ want.keys()
    for name, tensor in want.items():
        assert torch.equal(have[name], tensor), name
