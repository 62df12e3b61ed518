"""A position in the data that restores on any number of ranks."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sized
from typing import Any, Final, TypeVar

import torch
from torch import distributed as dist
from torch.utils.data import DataLoader, Sampler

from ckpt.adapters.torch_store import world_of_launcher
from ckpt.adapters.walk.stand_in import Checked
from ckpt.checks import shown, whole
from ckpt.errors import ConfigError, RestoreError

T = TypeVar("T")
_MOST: Final = (1 << 63) - 1
_ORDER: Final = ("seed", "length", "shuffle")
"""What the order of the samples depends on."""


class ElasticSampler(Sampler[int], Checked):
    """Deals the samples of a dataset to the ranks, and knows how many of them were trained on.

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
    The ranks take its samples in turn. The position is the number of samples that all ranks
    together have taken from that order. It is the same on all ranks, and a restore on another
    number of ranks deals the rest of the order to these.

    All ranks get equally many samples. An epoch therefore gives each sample at most once, and
    leaves out the end of the order, fewer samples than there are ranks. The last batch of an epoch
    may be smaller than the others, by the same number of samples on each rank. With
    ``DataLoader(drop_last=True)`` that batch is left out, too. If the order is shuffled, other
    epochs leave out other samples.

    Workers of a loader read ahead, so a sampler cannot know which of its samples the loop has
    trained on. Only what the loop has received counts: see `batches`.

    Args:
        data: The dataset, or its length.
        shuffle: Whether the order is random; otherwise it is that of the dataset.
        seed: The same on all ranks.
        rank: This rank's place among those that share the samples. If it and ``world_size`` are
            left out, they are those of the default process group. With model parallelism, give the
            place and the size of the data-parallel group.
        world_size: The number of ranks that share the samples.

    Raises:
        ConfigError: A value is wrong, or a launcher has started several ranks and there is no
            process group yet.

    Threads: the training thread.
    """

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
            raise ConfigError(f"ElasticSampler({shown(data)}): give a dataset with a length, or it")
        length = data if isinstance(data, int) else len(data)
        self._rank, self._world_size = _place(rank, world_size)
        whole("seed", seed, 0, _MOST)
        whole("the length of the dataset", length, self._world_size, _MOST)
        if not isinstance(shuffle, bool):
            raise ConfigError(f"shuffle={shown(shuffle)}: give True or False")
        self._order = {"seed": seed, "length": length, "shuffle": shuffle}
        self._length = length
        self._epoch = self._consumed = 0
        self._iteration: object | None = None

    @property
    def epoch(self) -> int:
        """The number of epochs that have ended."""
        return self._epoch

    def batches(self, loader: DataLoader[T]) -> Iterator[Any]:
        """Yield the batches of the loader from the position to the end of the epoch.

        The position advances by a batch of each rank whenever the loop receives one, whatever the
        workers have read ahead. The next epoch begins when the loop asks for a batch and there is
        none. A loop that is left early keeps its position, and the next call continues there.

        Train on a batch before you save, and do not read ahead of the loop: a thread that takes
        batches from this iterator in advance moves the position in advance, too.

        Args:
            loader: Built with ``sampler=`` this sampler, and the same batch size on all ranks.

        Raises:
            ConfigError: The loader has another sampler, or the position was restored, or another
                loop over it has begun, since this loop received its last batch.
        """
        if loader.sampler is not self:
            raise ConfigError(
                "the loader does not take its samples from this ElasticSampler: build it with "
                "DataLoader(data, batch_size=..., sampler=sampler)"
            )
        iteration = self._iteration = object()
        left = len(self)
        try:
            for batch in loader:
                samples = min(loader.batch_size or 1, left)
                left -= samples
                self._consumed += samples * self._world_size
                yield batch
                if self._iteration is not iteration:
                    raise ConfigError(
                        "the data position was restored, or another loop has begun, while a loop "
                        "over ElasticSampler.batches() ran: leave that loop first"
                    )
            self._epoch, self._consumed = self._epoch + 1, 0
        finally:
            if self._iteration is iteration:
                self._iteration = None

    def __iter__(self) -> Iterator[int]:
        """Return the samples that this rank gets in the rest of the epoch.

        Raises:
            ConfigError: Not within `batches`: the position would not advance.
        """
        if self._iteration is None:
            raise ConfigError(
                "the position in the data does not follow a loop over the loader itself: "
                "write 'for batch in sampler.batches(loader)'"
            )
        start, stop = self._consumed, self._consumed + len(self) * self._world_size
        if not self._order["shuffle"]:
            return iter(range(start + self._rank, stop, self._world_size))
        generator = torch.Generator().manual_seed(self._order["seed"] + self._epoch)
        order = torch.randperm(self._length, generator=generator)
        return iter(order[start + self._rank : stop : self._world_size].tolist())

    def __len__(self) -> int:
        """Return the number of samples that this rank gets in the rest of the epoch."""
        return (self._length - self._consumed) // self._world_size

    def state_dict(self) -> dict[str, int | bool]:
        """Return the position as plain values, the same on all ranks after the same step."""
        return {"epoch": self._epoch, "consumed": self._consumed, **self._order}

    def check_saved(self, state_dict: Mapping[str, Any]) -> None:
        """Raise ``RestoreError`` if the position belongs to another order, or is none."""
        position = dict(state_dict)
        now = self.state_dict()
        if position.keys() != now.keys() or any(
            type(value) is not type(now[name]) for name, value in position.items()
        ):
            raise RestoreError(
                "the checkpoint has another value in the place of an ElasticSampler: restore it "
                "into one of its kind, or leave it out (only=...)"
            )
        if differing := [name for name in _ORDER if position[name] != now[name]]:
            saved, own = (
                ", ".join(f"{name}={values[name]}" for name in differing)
                for values in (position, now)
            )
            raise RestoreError(
                f"the data position was saved with {saved}, this ElasticSampler has {own}, so that "
                "it gives the samples in another order: build it as it was, or leave it out of the "
                "restore (only=...) to begin at its first sample"
            )
        if position["epoch"] < 0 or not 0 <= position["consumed"] <= self._length:
            raise RestoreError(
                f"a data position of epoch={position['epoch']}, consumed={position['consumed']} "
                f"is not in {self._length} samples: restore another step"
            )

    def load_state_dict(self, state_dict: Mapping[str, Any]) -> None:
        """Take the position, saved on any number of ranks.

        Raises:
            RestoreError: The seed, the length or the shuffling differ. Nothing has changed.
        """
        self.check_saved(state_dict)
        self._epoch, self._consumed = state_dict["epoch"], state_dict["consumed"]
        self._iteration = None


def _place(rank: int | None, world_size: int | None) -> tuple[int, int]:
    if (rank is None) != (world_size is None):
        raise ConfigError(f"rank={rank}, world_size={world_size}: give both or none of them")
    if rank is not None and world_size is not None:
        whole("world_size", world_size, 1, _MOST)
        whole("rank", rank, 0, world_size - 1)
        return rank, world_size
    if dist.is_available() and dist.is_initialized():
        return dist.get_rank(), dist.get_world_size()
    if (variable := world_of_launcher()) is not None:
        raise ConfigError(
            f"{variable} says there are several ranks: call torch.distributed.init_process_group() "
            "before building an ElasticSampler, or give it rank= and world_size="
        )
    return 0, 1
