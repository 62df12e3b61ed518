"""A state with everything that other formats cannot represent easily."""

from __future__ import annotations

from collections import Counter, OrderedDict
from typing import Any

import numpy as np
import torch
from torch import nn


class Net(nn.Module):
    """A network with tied weights, a buffer, 0-d and bf16 parameters."""

    def __init__(self) -> None:
        super().__init__()
        self.embed = nn.Embedding(12, 8)
        self.head = nn.Linear(8, 12, bias=False)
        self.head.weight = self.embed.weight
        self.norm = nn.BatchNorm1d(8)
        self.gain = nn.Parameter(torch.tensor(1.5))
        self.low = nn.Parameter(torch.randn(8).to(torch.bfloat16))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.head(self.norm(self.embed(x)) * self.gain + self.low)


def trained(seed: int = 0, steps: int = 2) -> tuple[Net, torch.optim.Optimizer]:
    torch.manual_seed(seed)
    net = Net()
    optimizer = torch.optim.AdamW(net.parameters(), lr=0.01 * (seed + 1))
    for _ in range(steps):
        optimizer.zero_grad()
        net(torch.arange(12)).square().mean().backward()
        optimizer.step()
    return net, optimizer


def odd_state() -> dict[str, Any]:
    """Return plain values and tensors outside of modules."""
    return {
        "epoch": 3,
        "best": 0.25,
        "note": "naïve \u2713",
        "flags": {"a": True, "none": None, 3: "three"},
        "pair": (1, [2, 3.5]),
        "ordered": OrderedDict(b=1, a=2),
        "count": Counter(x=2),
        "raw": b"\x00\xff",
        "set": {1, 2},
        "frozen": frozenset({1}),
        "z": 1 + 2j,
        "big": 1 << 80,
        "inf": float("inf"),
        "np": np.float32(0.5),
        "array": np.arange(6, dtype=np.int32).reshape(2, 3),
        "size": torch.Size([2, 3]),
        "dtype": torch.bfloat16,
        "device": torch.device("cpu"),
        "empty": {},
        "tensors": {
            "a/b~c.d e": torch.randn(3, 5),
            "f8": torch.randn(9).to(torch.float8_e4m3fn),
            "f8_5": torch.randn(9).to(torch.float8_e5m2),
            "bf16": torch.randn(4, 4).to(torch.bfloat16),
            "zero": torch.tensor(7),
            "nothing": torch.empty(0, 3),
            "c128": torch.randn(3).to(torch.complex128),
            "c64": torch.randn(3).to(torch.complex64),
            "u16": torch.tensor([1, 2, 65535], dtype=torch.uint16),
            "bool": torch.tensor([True, False, True]),
        },
        "listed": [torch.ones(2), torch.zeros(3)],
        "tuple": (1, torch.arange(5.0), {"inner": [torch.ones(2), (torch.tensor(3),)]}),
        "tuples": [(torch.arange(3), torch.Size([2]))],
    }


def same(one: Any, two: Any) -> bool:
    """Check that both are equal bit for bit."""
    if isinstance(one, torch.Tensor) and isinstance(two, torch.Tensor):
        one, two = one.detach(), two.detach()
        return (
            one.dtype == two.dtype
            and one.shape == two.shape
            and one.contiguous()
            .reshape(-1)
            .view(torch.uint8)
            .equal(two.contiguous().reshape(-1).view(torch.uint8))
        )
    if isinstance(one, dict):
        return (
            type(one) is type(two)
            and one.keys() == two.keys()
            and all(same(one[k], two[k]) for k in one)
        )
    if isinstance(one, list | tuple):
        return type(one) is type(two) and len(one) == len(two) and all(map(same, one, two))
    return type(one) is type(two) and bool(one == two)
