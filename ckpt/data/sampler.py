"""A sampler that deals the samples of a dataset with indices to any number of ranks."""

from __future__ import annotations

from collections.abc import Iterator, Sized
from typing import Any

import torch
from torch.utils.data import DataLoader, Sampler

from ckpt.checks import check_bool, check_int, text_of
from ckpt.data.position import MAX_SAMPLES, Position, place_of
from ckpt.errors import ConfigError


class ElasticSampler(Position, Sampler[int]):
    """Deals the samples of a dataset to the ranks, and counts the samples that were trained on.

        sampler = ElasticSampler(data)
        loader = DataLoader(data, batch_size=16, sampler=sampler, num_workers=2)
        state = {"model": model, "optimizer": optimizer, "data": sampler, "step": 0}
        manager.restore(state)
        while sampler.epoch < epochs:
            for batch in sampler.batches(loader):
                train_step(batch)
                state["step"] += 1
                manager.save_async(state)

    Each epoch has an order of its own, which depends on the seed, the epoch and the length only.
    The ranks take the samples of this order in turn. The position is the number of samples that all
    ranks together have taken in the epoch, and is the same on all ranks. After a restore on another
    number of ranks, the remaining samples are dealt to the new ranks.

    All ranks get equally many samples. An epoch gives each sample at most once. If the number of
    samples is no multiple of the number of ranks, an epoch leaves out the remainder at the end of
    its order. The last batch of an epoch may be smaller than the other batches, and has the same
    size on each rank. With ``DataLoader(drop_last=True)``, a smaller last batch is left out, too.
    If the order is shuffled, each epoch leaves out other samples.

    A loader with workers takes samples in advance. The sampler therefore counts only the samples
    that the loop has received (see `batches`).

    Args:
        data: The dataset, or its length.
        shuffle: Whether the order is random. With False it is the order of the dataset.
        seed: The seed of the random order, which must be the same on all ranks.
        rank: The number of this rank among the ranks that share the samples. If ``rank`` and
            ``world_size`` are left out, the default process group gives both. With model
            parallelism, give the rank in the data-parallel group and the size of that group.
        world_size: The number of ranks that share the samples.

    Raises:
        ConfigError: A value is wrong, or a launcher has started several ranks and there is no
            process group yet.

    Thread safety: the training thread calls all methods.
    """

    _example = "DataLoader(data, batch_size=..., sampler=sampler)"

    def __init__(
        self,
        data: Sized | int,
        *,
        shuffle: bool = True,
        seed: int = 0,
        rank: int | None = None,
        world_size: int | None = None,
    ) -> None:
        if not isinstance(data, int | Sized):
            raise ConfigError(
                f"ElasticSampler({text_of(data)}): give a dataset with a length, or it. "
                "ElasticStream takes a dataset without one"
            )
        length = data if isinstance(data, int) else len(data)
        place = place_of(rank, world_size)
        _, rank_count = place
        check_int("seed", seed, 0, MAX_SAMPLES)
        check_int("the length of the dataset", length, rank_count, MAX_SAMPLES)
        check_bool("shuffle", shuffle)
        super().__init__({"seed": seed, "length": length, "shuffle": shuffle}, place)
        self._seed, self._length, self._shuffle = seed, length, shuffle

    def _feeds(self, loader: DataLoader[Any]) -> bool:
        return loader.sampler is self

    def _begin_loop(self) -> int:
        return len(self)

    def _max_samples(self) -> int:
        return self._length

    def __iter__(self) -> Iterator[int]:
        """Return an iterator over the indices of this rank's samples from the position on.

        Raises:
            ConfigError: No loop over `batches` runs, so the position would not advance.
        """
        if self._iteration is None:
            raise self._no_loop_error("sampler")
        start, stop = self._sample_count, self._sample_count + len(self) * self._world_size
        if not self._shuffle:
            return iter(range(start + self._rank, stop, self._world_size))
        generator = torch.Generator().manual_seed(self._seed + self._epoch)
        order = torch.randperm(self._length, generator=generator)
        return iter(order[start + self._rank : stop : self._world_size].tolist())

    def __len__(self) -> int:
        """Return the number of samples that this rank gets from the position on."""
        return (self._length - self._sample_count) // self._world_size
