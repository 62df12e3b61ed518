"""What torchtitan's trainer has made when it builds its checkpoint manager."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import torch
from torch import nn
from torchtitan.components.optimizer import LRSchedulersContainer, default_adamw

from ckpt.integrations.torchtitan import CkptManager


class Layer(nn.Module):
    seen: torch.Tensor
    rope: torch.Tensor

    def __init__(self) -> None:
        super().__init__()
        self.up, self.down = nn.Linear(3, 4), nn.Linear(4, 2)
        self.register_buffer("seen", torch.zeros(1))
        self.register_buffer("rope", torch.ones(5), persistent=False)

    def forward(self, values: torch.Tensor) -> torch.Tensor:
        self.seen += 1
        found: torch.Tensor = self.down(self.up(values))
        return found


class Net(nn.Module):
    """A part of a model. No two parts have a name in common, as in a pipeline."""

    def __init__(self, number: int = 0) -> None:
        super().__init__()
        self.layers = nn.ModuleDict({str(number): Layer()})

    def forward(self, values: torch.Tensor) -> torch.Tensor:
        return self.layer(values)

    @property
    def layer(self) -> Layer:
        (found,) = self.layers.values()
        assert isinstance(found, Layer)
        return found


class Loader:
    """A loader whose state differs between ranks, and is pickled as torchtitan's own is."""

    position = 0

    def state_dict(self) -> dict[str, Any]:
        return {"dp_rank_0": bytes([self.position]), "world_size": 1}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        self.position = state["dp_rank_0"][0]


class Progress:
    step = 0

    def state_dict(self) -> dict[str, Any]:
        return {"step": self.step}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        self.step = state["step"]


class Job:
    """What the trainer has made when it builds its checkpoint manager."""

    def __init__(
        self, base: Path, seed: int = 1, *, parts: int = 1, loader: Any = None, **how: Any
    ) -> None:
        torch.manual_seed(seed)
        self.parts = [Net(number) for number in range(parts)]
        self.optimizers = default_adamw().build(model_parts=self.parts)
        schedule = LRSchedulersContainer.Config(warmup_steps=2)
        self.schedulers = schedule.build(optimizers=self.optimizers, training_steps=50)
        self.loader: Any = Loader() if loader is None else loader
        self.progress = Progress()
        self.states: dict[str, Any] = {"train_state": self.progress, "seen_tokens": seed}
        given = {"enable": True, "interval": 1, "keep_latest_k": 2, "last_save_model_only": False}
        self.manager = CkptManager.Config(**given | how).build(
            dataloader=self.loader,
            model_parts=self.parts,
            optimizers=self.optimizers,
            lr_schedulers=self.schedulers,
            states=self.states,
            sd_adapter=None,
            base_folder=str(base),
        )

    def train(self) -> float:
        """Do one step of the trainer's loop."""
        loss = sum(part(torch.ones(2, 3)).square().mean() for part in self.parts)
        loss.backward()
        self.manager.maybe_wait_for_staging()
        self.optimizers.step()
        self.schedulers.step()
        self.optimizers.zero_grad()
        self.progress.step += 1
        if isinstance(self.loader, Loader):
            self.loader.position += 1
        return loss.item()

    def run(self, steps: int, *, last: bool = False) -> list[float]:
        found = []
        while self.progress.step < steps:
            found.append(self.train())
            self.manager.save(self.progress.step, last_step=last and self.progress.step == steps)
        self.manager.close()
        return found
