"""A sharpness-aware optimizer as projects commonly copy it (davda54/sam).

It wraps another optimizer and steps twice.
"""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any

import torch
from torch import nn
from torch.distributed.tensor import DTensor
from torch.optim import Optimizer


class SAM(Optimizer):
    def __init__(
        self,
        params: Iterable[nn.Parameter],
        base: type[Optimizer],
        rho: float = 0.05,
        **kwargs: Any,
    ) -> None:
        super().__init__(params, {"rho": rho, **kwargs})
        self.base_optimizer = base(self.param_groups, **kwargs)
        self.param_groups = self.base_optimizer.param_groups
        self.defaults.update(self.base_optimizer.defaults)

    @torch.no_grad()
    def first_step(self, zero_grad: bool = False) -> None:
        """Move the parameters to where the loss is highest nearby."""
        grads = [
            p.grad for group in self.param_groups for p in group["params"] if p.grad is not None
        ]
        norms = [grad.norm() for grad in grads]
        norm = (
            sum(float(n.full_tensor() if isinstance(n, DTensor) else n) ** 2 for n in norms) ** 0.5
        )
        for group in self.param_groups:
            for p in group["params"]:
                if p.grad is not None:
                    self.state[p]["old_p"] = p.data.clone()
                    p.add_(p.grad * (group["rho"] / (norm + 1e-12)))
        if zero_grad:
            self.zero_grad()

    @torch.no_grad()
    def second_step(self, zero_grad: bool = False) -> None:
        """Move the parameters back, and step by the gradient of the other place."""
        for group in self.param_groups:
            for p in group["params"]:
                if p.grad is not None:
                    p.data = self.state[p]["old_p"]
        self.base_optimizer.step()
        if zero_grad:
            self.zero_grad()

    def step(self, closure: Any = None) -> Any:
        assert closure is not None
        self.first_step(zero_grad=True)
        with torch.enable_grad():
            closure()
        self.second_step()
