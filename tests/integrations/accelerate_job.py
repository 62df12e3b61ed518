"""A training with Accelerate that has one of everything.

It has two models with an optimizer each, a scheduler, dropout, a shuffled order, gradient
accumulation, and an object of its own.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import Any

import torch
from accelerate import Accelerator
from accelerate.state import AcceleratorState, GradientState
from accelerate.utils import DataLoaderConfiguration, ProjectConfiguration, set_seed
from torch import nn
from torch.utils.data import DataLoader, TensorDataset

BATCHES = 10
EPOCHS = 3


class Seen:
    """What this rank has trained on. It differs between ranks."""

    def __init__(self) -> None:
        self.batches = 0
        self.sum = torch.zeros(())

    def state_dict(self) -> dict[str, Any]:
        return {"batches": self.batches, "sum": self.sum}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        self.batches, self.sum = state["batches"], state["sum"]


def forget() -> None:
    """Reset the state that Accelerate keeps in its classes."""
    AcceleratorState._reset_state(reset_partial_state=True)
    GradientState._reset_state()


def accelerator(*, stateful: bool = False, **project: Any) -> Accelerator:
    return Accelerator(
        cpu=True,
        gradient_accumulation_steps=2,
        dataloader_config=DataLoaderConfiguration(
            use_seedable_sampler=True, use_stateful_dataloader=stateful
        ),
        project_config=ProjectConfiguration(**project),
    )


class Job:
    """All that a script has made when its loop begins."""

    def __init__(
        self, made: Accelerator, *, seed: int = 7, workers: int = 0, draws: bool = False
    ) -> None:
        self.accelerator = made
        ranks = made.num_processes
        set_seed(seed)
        length = 4 * BATCHES * ranks
        data = torch.randn(length, 6, generator=torch.Generator().manual_seed(1))
        # With a generator of its own, the loader does not draw from the global one.
        loader = DataLoader(
            TensorDataset(data, torch.arange(length)),
            4,
            shuffle=True,
            num_workers=workers,
            generator=None if draws else torch.Generator(),
        )
        net = nn.Sequential(nn.Linear(6, 8), nn.Tanh(), nn.Dropout(0.3), nn.Linear(8, 1))
        critic = nn.Linear(6, 1)
        first = torch.optim.AdamW(net.parameters(), 1e-2)
        second = torch.optim.SGD(critic.parameters(), 1e-2, momentum=0.9)
        schedule = torch.optim.lr_scheduler.StepLR(first, 3, 0.5)
        self.net, self.first, self.schedule, self.loader = made.prepare(
            net, first, schedule, loader
        )
        self.critic, self.second = made.prepare(critic, second)
        self.seen = Seen()
        made.register_for_checkpointing(self.seen)
        torch.manual_seed(100 * seed + made.process_index)

    def train(self, *, after: Callable[[int], object] = lambda _: 0) -> dict[str, list[Any]]:
        """Return batch -> what was trained on, the loss and the rate, from where the job stands."""
        stateful = self.loader.use_stateful_dataloader
        out: dict[str, list[Any]] = {}
        begun, done = divmod(self.seen.batches, BATCHES)
        for epoch in range(begun, EPOCHS):
            batches = self.loader
            batches.set_epoch(epoch)
            if done and not stateful:
                batches = self.accelerator.skip_first_batches(self.loader, done)
                batches.set_epoch(epoch)  # releases before 1.14 forget it
            done = 0
            for values, numbers in batches:
                out[str(self.seen.batches)] = [numbers.tolist(), *self._step(values)]
                self.seen.batches += 1
                self.seen.sum += numbers.sum()
                after(self.seen.batches)
        return out

    def _step(self, values: torch.Tensor) -> Iterator[float]:
        with self.accelerator.accumulate(self.net, self.critic):
            loss = (self.net(values) - self.critic(values)).square().mean()
            self.accelerator.backward(loss)
            for each in (self.first, self.second, self.schedule):
                each.step()
            self.first.zero_grad()
            self.second.zero_grad()
        yield loss.item()
        yield self.first.param_groups[0]["lr"]
