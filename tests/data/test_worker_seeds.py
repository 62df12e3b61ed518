"""A resume within an epoch trains with the random numbers of an uninterrupted run.

The seeds of a loader's workers take no number of the global generators.
"""

from __future__ import annotations

import random
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from torch import nn
from torch.utils.data import DataLoader, IterableDataset

from ckpt import CheckpointManager, PerRank, RngState
from ckpt.data import ElasticSampler, ElasticStream
from tests.kit.marks import torture

LENGTH, SIZE, EPOCHS = 24, 4, 3


class Noisy(torch.utils.data.Dataset[torch.Tensor]):
    """Samples with noise of the global generators, in the process that reads them."""

    def __init__(self, *, noise: bool) -> None:
        self.noise = noise

    def __len__(self) -> int:
        return LENGTH

    def __getitem__(self, index: int) -> torch.Tensor:
        sample = torch.linspace(0, 1, 6) + index
        noise = [torch.rand(()).item(), random.random(), np.random.random()] if self.noise else []
        return sample + sum(noise)


class Lines(IterableDataset[torch.Tensor]):
    """The same samples, without a length."""

    def __init__(self, *, noise: bool) -> None:
        self.data = Noisy(noise=noise)

    def __iter__(self) -> Iterator[torch.Tensor]:
        return (self.data[index] for index in range(LENGTH))


class Job:
    def __init__(self, kind: str, seed: int, *, noise: bool = False, **more: Any) -> None:
        torch.manual_seed(seed)
        random.seed(seed)
        np.random.seed(seed)
        self.model = nn.Sequential(nn.Linear(6, 8), nn.Dropout(0.3), nn.Linear(8, 1))
        self.optimizer = torch.optim.SGD(self.model.parameters(), lr=1e-5)
        self.position: ElasticSampler | ElasticStream
        data: Noisy | ElasticStream
        if kind == "sampler":
            data, self.position = Noisy(noise=noise), ElasticSampler(LENGTH, seed=1)
            more["sampler"] = self.position
        else:
            data = self.position = ElasticStream(Lines(noise=noise))
        self.loader: DataLoader[torch.Tensor] = DataLoader(data, batch_size=SIZE, **more)
        self.losses: list[float] = []
        self.state: dict[str, Any] = {
            "model": self.model,
            "optimizer": self.optimizer,
            "data": self.position,
            "rng": PerRank(RngState()),
        }

    def train(
        self, stop: int | None = None, *, between: Callable[[], object] = lambda: None
    ) -> list[float]:
        """Train to the end, or until there are ``stop`` losses. Return the losses."""
        while self.position.epoch < EPOCHS and len(self.losses) != stop:
            for batch in self.position.batches(self.loader):
                loss = self.model(batch).square().mean()
                self.optimizer.zero_grad()
                loss.backward()
                self.optimizer.step()
                self.losses.append(loss.item())
                if len(self.losses) == stop:
                    return self.losses
            between()
        return self.losses


PERSISTENT = {"num_workers": 2, "persistent_workers": True}


@pytest.mark.parametrize(
    ("workers", "kind", "saved"),
    [
        pytest.param({}, "sampler", 4, id="no workers-sampler"),
        pytest.param({"num_workers": 2}, "stream", 4, id="workers-stream"),
        pytest.param(PERSISTENT, "sampler", 8, id="persistent workers-sampler"),
        *torture(({}, "stream", 4), ({"num_workers": 2}, "sampler", 4), (PERSISTENT, "stream", 8)),
    ],
)
def test_a_resume_within_an_epoch_trains_bit_for_bit(
    tmp_path: Path, kind: str, workers: dict[str, Any], saved: int
) -> None:
    whole = Job(kind, 1, **workers).train()
    first = Job(kind, 1, **workers)
    with CheckpointManager(tmp_path) as manager:
        first.train(saved)
        manager.save(first.state, saved)
        second = Job(kind, 2, **workers)
        manager.restore(second.state)
    assert first.losses + second.train() == whole


def test_a_resume_between_epochs_trains_bit_for_bit_with_persistent_workers(tmp_path: Path) -> None:
    """Workers that stay draw a seed in their first epoch only, which differs after a resume."""
    more: dict[str, Any] = {"num_workers": 1, "persistent_workers": True}
    first = Job("sampler", 1, **more)
    with CheckpointManager(tmp_path) as manager:
        first.train(between=lambda: manager.save(first.state, first.position.epoch))
        second = Job("sampler", 2, **more)
        manager.restore(second.state, 1)
    assert second.train() == first.losses[LENGTH // SIZE :]


@pytest.mark.parametrize("kind", ["sampler", "stream"])
def test_random_samples_of_this_process_are_those_of_an_uninterrupted_run(
    tmp_path: Path, kind: str
) -> None:
    """A stream reads the samples before the position again, and this uses up random numbers."""
    whole = Job(kind, 1, noise=True).train()
    first = Job(kind, 1, noise=True)
    with CheckpointManager(tmp_path) as manager:
        first.train(4)
        manager.save(first.state, 4)
        second = Job(kind, 2, noise=True)
        manager.restore(second.state)
    assert first.losses + second.train() == whole


@pytest.mark.parametrize("kind", ["sampler", "stream"])
def test_workers_draw_other_numbers_in_each_epoch_and_after_a_resume(
    tmp_path: Path, kind: str
) -> None:
    """The epochs after the resume are those of an uninterrupted run, with random samples too."""
    more: dict[str, Any] = {"noise": True, "num_workers": 1}
    whole = Job(kind, 1, **more)
    epochs = [[batch.tolist() for batch in whole.position.batches(whole.loader)] for _ in range(2)]
    first = Job(kind, 1, **more)
    with CheckpointManager(tmp_path) as manager:
        loop = first.position.batches(first.loader)
        begun = [next(loop).tolist() for _ in range(3)]
        manager.save(first.state, 3)
        second = Job(kind, 2, **more)
        manager.restore(second.state)
    assert begun == epochs[0][:3]
    remaining = [batch.tolist() for batch in second.position.batches(second.loader)]
    following = [batch.tolist() for batch in second.position.batches(second.loader)]
    assert following == epochs[1]
    noise = [
        torch.tensor(batches[0])[0] - torch.tensor(batches[0])[0].round()
        for batches in (*epochs, remaining)
    ]
    assert not any(torch.equal(noise[a], noise[b]) for a, b in [(0, 1), (0, 2), (1, 2)])
