"""An engine like DeepSpeed's under ZeRO 1, on one rank.

It has 16-bit parameters in one flat buffer per group, fp32 master weights, and a real AdamW over
them.

The real one needs a C++ compiler and seconds to start. ``test_zero.py`` uses it to show what
differs with stages and ranks.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import distributed as dist
from torch import nn
from torch.optim.lr_scheduler import StepLR


class DeepSpeedZeroOptimizer:
    def __init__(self, optimizer: torch.optim.AdamW) -> None:
        self.optimizer = optimizer
        self.bit16_groups: list[list[nn.Parameter]] = []
        self.bit16_groups_flat: list[torch.Tensor] = []
        self.single_partition_of_fp32_groups: list[torch.Tensor] = []
        self.real_dp_process_group = [dist.group.WORLD for _ in optimizer.param_groups]
        self._hp_optimizer_states_linked = True
        for group in optimizer.param_groups:
            parameters = [p for p in group["params"] if p.requires_grad]
            flat = torch.cat(
                [p.detach().reshape(-1) for p in parameters] + [torch.zeros(3)]
            ).bfloat16()
            at = 0
            for parameter in parameters:
                parameter.data = flat[at : at + parameter.numel()].view(parameter.shape)
                at += parameter.numel()
            self.bit16_groups.append(parameters)
            self.bit16_groups_flat.append(flat)
            self.single_partition_of_fp32_groups.append(flat.float().requires_grad_())
            group["params"] = [self.single_partition_of_fp32_groups[-1]]

    def step(self) -> None:
        for group, master in zip(
            self.bit16_groups, self.single_partition_of_fp32_groups, strict=True
        ):
            grads = [p.grad.float().reshape(-1) for p in group if p.grad is not None]
            master.grad = torch.cat([*grads, torch.zeros(3)])
        self.optimizer.step()
        self.update_lp_params()

    @torch.no_grad()
    def update_lp_params(self) -> None:
        for flat, master in zip(
            self.bit16_groups_flat, self.single_partition_of_fp32_groups, strict=True
        ):
            flat.copy_(master)


class Engine:
    has_moe_layers = False

    def __init__(
        self, module: Any, optimizer: torch.optim.AdamW, *, scheduled: bool = True
    ) -> None:
        self.module = module
        for parameter in module.parameters():
            parameter.data = parameter.data.bfloat16()
        self.optimizer: Any = DeepSpeedZeroOptimizer(optimizer)
        self.lr_scheduler: Any = StepLR(optimizer, 2) if scheduled else None
        self.seq_data_parallel_group = dist.group.WORLD
        self.global_steps = self.global_samples = self.skipped_steps = 0

    def train(self, steps: int) -> list[float]:
        losses: list[float] = []
        for _ in range(steps):
            torch.manual_seed(self.global_steps)
            loss = self.module(torch.randn(4, 6).bfloat16()).float().square().mean()
            self.module.zero_grad()
            loss.backward()
            self.optimizer.step()
            if self.lr_scheduler:
                self.lr_scheduler.step()
            self.global_steps += 1
            losses.append(loss.item())
        return losses
