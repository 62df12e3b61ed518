"""Objects that save themselves as ``torch.distributed.checkpoint`` requires.

They are written as in its tutorial and in torchtitan.
"""

from __future__ import annotations

import functools
from typing import Any

import torch
from torch import nn
from torch.distributed.checkpoint.state_dict import (
    StateDictOptions,
    get_model_state_dict,
    get_optimizer_state_dict,
    get_state_dict,
    set_model_state_dict,
    set_optimizer_state_dict,
    set_state_dict,
)
from torch.distributed.checkpoint.stateful import Stateful
from torch.optim import Optimizer


class Net(nn.Module):
    """The tutorial's ``ToyModel``, with rows that do not divide evenly, and a tie."""

    def __init__(self) -> None:
        super().__init__()
        self.net1, self.net2, self.tied = nn.Linear(6, 6), nn.Linear(6, 1), nn.Linear(6, 1)
        self.tied.weight = self.net2.weight
        self.register_buffer("seen", torch.zeros(3))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        hidden = self.net1(x).relu()
        return self.net2(hidden) + self.tied(hidden)


class AppState(Stateful):
    """The tutorial's class (recipes/distributed_checkpoint_recipe)."""

    def __init__(self, model: nn.Module, optimizer: Optimizer, *, flat: bool = False) -> None:
        self.model = model
        self.optimizer = optimizer
        self.options = StateDictOptions(flatten_optimizer_state_dict=flat)

    def state_dict(self) -> dict[str, Any]:
        model_state_dict, optimizer_state_dict = get_state_dict(
            self.model, self.optimizer, options=self.options
        )
        return {"model": model_state_dict, "optim": optimizer_state_dict}

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        set_state_dict(
            self.model,
            self.optimizer,
            model_state_dict=state_dict["model"],
            optim_state_dict=state_dict["optim"],
            options=self.options,
        )


class Duck:
    """The same without the base class."""

    def __init__(self, model: nn.Module, optimizer: Optimizer) -> None:
        self._inner = AppState(model, optimizer)

    def state_dict(self) -> dict[str, Any]:
        return self._inner.state_dict()

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        self._inner.load_state_dict(state_dict)


class ModelWrapper(Stateful):
    """torchtitan's class (components/checkpoint.py)."""

    def __init__(self, model: nn.Module | list[nn.Module]) -> None:
        self.model = [model] if isinstance(model, nn.Module) else model
        self.cache_state_dict = self._get_state_dict()

    def _get_state_dict(self) -> dict[str, Any]:
        return {k: v for sd in map(get_model_state_dict, self.model) for k, v in sd.items()}

    def state_dict(self) -> dict[str, Any]:
        return self.cache_state_dict

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        func = functools.partial(
            set_model_state_dict,
            model_state_dict=state_dict,
            options=StateDictOptions(strict=False),
        )
        list(map(func, self.model))
        self.cache_state_dict = self._get_state_dict()


class OptimizersContainer(Optimizer, Stateful):
    """torchtitan's class (components/optimizer.py)."""

    def __init__(self, model_parts: list[nn.Module], **kwargs: Any) -> None:
        all_params = []
        self.optimizers = []
        self.model_parts = model_parts
        for model in self.model_parts:
            params = [p for p in model.parameters() if p.requires_grad]
            self.optimizers.append(torch.optim.AdamW(params, **kwargs))
            all_params.extend(params)
        Optimizer.__init__(self, all_params, kwargs)

    def step(self, *args: Any, **kwargs: Any) -> Any:
        for optimizer in self.optimizers:
            optimizer.step(*args, **kwargs)

    def zero_grad(self, *args: Any, **kwargs: Any) -> None:
        for optimizer in self.optimizers:
            optimizer.zero_grad(*args, **kwargs)

    def state_dict(self) -> dict[str, Any]:
        func = functools.partial(
            get_optimizer_state_dict, options=StateDictOptions(flatten_optimizer_state_dict=True)
        )
        return {k: v for sd in map(func, self.model_parts, self.optimizers) for k, v in sd.items()}

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        func = functools.partial(
            set_optimizer_state_dict,
            optim_state_dict=state_dict,
            options=StateDictOptions(flatten_optimizer_state_dict=True),
        )
        list(map(func, self.model_parts, self.optimizers))


KINDS = ("tutorial", "tutorial flat", "duck", "torchtitan")


def state_with(kind: str, net: nn.Module, lr: float) -> tuple[dict[str, Any], Any]:
    """Return a state of this kind, and the optimizer that steps."""
    if kind == "torchtitan":
        container = OptimizersContainer([net], lr=lr)
        return {"model": ModelWrapper(net), "optimizer": container, "lr": lr}, container
    optimizer = torch.optim.AdamW(net.parameters(), lr=lr)
    if kind == "duck":
        return {"app": Duck(net, optimizer)}, optimizer
    return {"app": AppState(net, optimizer, flat=kind == "tutorial flat")}, optimizer


def train(net: nn.Module, optimizer: Any, steps: int) -> torch.Tensor:
    """Train ``steps`` more steps on the same data on every rank, and return the parameters."""
    for step in range(steps):
        optimizer.zero_grad()
        net(torch.randn(5, 6, generator=torch.Generator().manual_seed(step))).sum().backward()
        optimizer.step()
    whole = [p.full_tensor() if hasattr(p, "full_tensor") else p for p in net.parameters()]
    return torch.cat([p.detach().reshape(-1) for p in whole])
