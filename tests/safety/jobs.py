"""The same small training job in each of the layouts that the table has a column for."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from typing import Any, Final

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard
from torch.distributed.tensor.parallel import ColwiseParallel, RowwiseParallel, parallelize_module
from torch.nn.parallel import DistributedDataParallel
from torch.optim import Optimizer

from tests.overlap.jobs import WIDTH, Net

COLUMNS: Final = ("plain", "DDP", "FSDP2", "TP")

Build = Callable[[Iterable[nn.Parameter]], Optimizer]


def laid_out(net: Net, column: str) -> nn.Module:
    """Return the net in the layout of the column."""
    if column == "plain":
        return net
    mesh = init_device_mesh("cpu", (dist.get_world_size(),))
    if column == "DDP":
        return DistributedDataParallel(net)
    if column == "FSDP2":
        fully_shard(net.two, mesh=mesh)
        fully_shard(net, mesh=mesh)
        return net
    assert column == "TP"
    return parallelize_module(net, mesh, {"one": ColwiseParallel(), "two": RowwiseParallel()})


class Job:
    """A model and its optimizer, both trained for a step.

    Attributes:
        state: What is saved. A case may add to it.
        other: What a case keeps outside of the state.
    """

    def __init__(self, column: str, build: Build, seed: int) -> None:
        torch.manual_seed(seed)
        self.column = column
        self.model: Any = laid_out(Net(), column)
        self.optimizer: Any = build(self.model.parameters())
        self.state: dict[str, Any] = {"model": self.model, "optimizer": self.optimizer}
        self.other: Any = None
        for number in range(2):
            self.train(number)

    @property
    def parameters(self) -> list[nn.Parameter]:
        return list(self.model.parameters())

    @property
    def weight(self) -> nn.Parameter:
        net = self.model.module if self.column == "DDP" else self.model
        return net.two.weight

    @property
    def moment(self) -> torch.Tensor:
        return self.optimizer.state[self.weight]["exp_avg"]

    def backward(self, number: int) -> torch.Tensor:
        loss = self.model(torch.randn(8, WIDTH, generator=torch.Generator().manual_seed(number)))
        loss.backward()
        return loss

    def train(self, number: int) -> None:
        self.loss(number)
        self.optimizer.step(lambda: self.loss(number))

    def loss(self, number: int) -> torch.Tensor:
        self.optimizer.zero_grad()
        return self.backward(number)
