"""Positions in the training data that restore on any number of ranks."""

from __future__ import annotations

from collections import deque
from collections.abc import Iterable, Iterator, Mapping, Sized
from itertools import chain, islice
from typing import Any, Final, TypeVar

import torch
from torch import distributed as dist
from torch.utils.data import DataLoader, IterableDataset, Sampler, get_worker_info

from ckpt.adapters.tensors.per_rank import RngState
from ckpt.adapters.torch_private import outside_of_workers
from ckpt.adapters.torch_store import world_of_launcher
from ckpt.adapters.walk.stand_in import Checkable
from ckpt.checks import text_of, whole
from ckpt.errors import ConfigError, RestoreError
from ckpt.integrations.datasets_order import check_undivided, order_of
from ckpt.integrations.worker_seeds import seed_loader

T = TypeVar("T")
_MAX_SAMPLES: Final = (1 << 63) - 1


class _Position(Checkable):
    """The position in the training data, which is the same on all ranks. A loop over ``batches``
    advances the position.
    """

    _example: str
    """Example code for an error text: it builds a loader over an object of this class."""

    def __init__(self, order: Mapping[str, int | bool | str], place: tuple[int, int]) -> None:
        """Begin at the first sample of epoch 0.

        Args:
            order: The settings that decide the order of the samples, besides the epoch.
            place: The rank and the number of ranks.
        """
        self._order = dict(order)
        self._rank, self._world_size = place
        self._epoch = self._sample_count = self._batch_size = 0
        self._iteration: object | None = None

    @property
    def epoch(self) -> int:
        """The number of epochs that have ended."""
        return self._epoch

    def batches(self, loader: DataLoader[Any]) -> Iterator[Any]:
        """Yield the batches of the loader from the position to the end of the epoch.

        Whenever the loop receives a batch, the position advances by a batch of each rank. Samples
        that the workers have read ahead do not count. The epoch ends when the loop asks for a batch
        and no batch remains. If a loop is left early, the next call continues from its position.

        Train on a batch before you save, and do not read ahead of the loop. If a thread takes
        batches from this iterator in advance, the position advances too early.

        Args:
            loader: A ``DataLoader`` or a ``StatefulDataLoader`` over this object, with the same
                batch size on all ranks. It may have any number of workers.

        Raises:
            ConfigError: The loader does not take its samples from this object, has a position of
                its own, or yields the batches of its workers in any order. The error is also raised
                if the position was restored, or another loop has begun, since the last batch.
        """
        self._check_loader(loader)
        size = self._batch_size = loader.batch_size or 1
        iteration = self._iteration = object()
        rest = self._begin()
        try:
            for batch in self._read(loader):
                samples = min(size, rest)
                rest -= samples
                self._sample_count += samples * self._world_size
                yield batch
                if self._iteration is not iteration:
                    raise ConfigError(
                        "the data position was restored, or another loop has begun, while a loop "
                        f"over {self._name}.batches() ran: leave that loop first"
                    )
            self._epoch, self._sample_count = self._epoch + 1, 0
        finally:
            if self._iteration is iteration:
                self._iteration = None
                self._end()

    def _read(self, loader: DataLoader[Any]) -> Iterator[Any]:
        with seed_loader(loader, self._rank, self._epoch, self._sample_count):
            batches = iter(loader)
            head = list(islice(batches, 1))  # Some loaders begin with their first batch only
        return chain(head, batches)

    def _begin(self) -> int:
        """Prepare a loop that begins at the position, and return how many samples it gives to this
        rank.

        If the number is unknown, return a number that is larger than any data set.
        """
        raise NotImplementedError

    def _end(self) -> None:
        """Note that the loop has ended, so no loop runs."""

    def _reads(self, loader: DataLoader[Any]) -> bool:
        """Return True if the loader takes its samples from this object."""
        raise NotImplementedError

    def _check_loader(self, loader: DataLoader[Any]) -> None:
        if not self._reads(loader):
            raise ConfigError(
                f"the loader does not take its samples from this {self._name}: build it with "
                f"{self._example}"
            )
        if getattr(loader, "next_iter_state", None) is not None:
            raise ConfigError(
                f"the loader has a position of its own, and this {self._name} has another: put "
                "only the latter into the state, not the StatefulDataLoader"
            )
        if loader.num_workers and not getattr(loader, "in_order", True):
            raise ConfigError(
                "the loader gives its batches in any order, so that there is no position between "
                "them: leave out in_order=False"
            )

    @property
    def _name(self) -> str:
        return type(self).__name__

    def _no_loop(self, name: str) -> ConfigError:
        return ConfigError(
            "the position in the data does not follow a loop over the loader itself: "
            f"write 'for batch in {name}.batches(loader)'"
        )

    def state_dict(self) -> dict[str, int | bool | str]:
        """Return the position, and the settings that decide the order, as plain values.

        After the same step, the values are the same on all ranks.
        """
        return {"epoch": self._epoch, "consumed": self._sample_count, **self._order}

    def check_saved(self, state_dict: Mapping[str, Any]) -> None:
        """Raise ``RestoreError`` if this object cannot continue from ``state_dict``.

        This is so if ``state_dict`` is not a position, belongs to another order of the samples, or
        is outside of the data.
        """
        position = dict(state_dict)
        if position.keys() != self.state_dict().keys() or any(
            type(position[name]) is not int for name in ("epoch", "consumed")
        ):
            raise RestoreError(
                f"the checkpoint has another value in the place of an {self._name}: restore it "
                "into one of its kind, or leave it out (only=...)"
            )
        own = {name: repr(value) for name, value in self._order.items()}
        saved_values = {name: repr(position[name]) for name in own}
        if differences := [name for name in own if saved_values[name] != own[name]]:
            was, own_text = (
                ", ".join(f"{name}={values[name]}" for name in differences)
                for values in (saved_values, own)
            )
            raise RestoreError(
                f"the data position was saved with {was}, this {self._name} has {own_text}, so "
                "that "
                "it gives the samples in another order: build it as it was, or leave it out of the "
                "restore (only=...) to begin at its first sample"
            )
        if position["epoch"] < 0 or not 0 <= position["consumed"] <= self._max_samples():
            raise RestoreError(
                f"a data position of epoch={position['epoch']}, consumed={position['consumed']} "
                f"is not in this {self._name}: restore another step"
            )

    def _max_samples(self) -> int:
        """Return the largest number of samples that all ranks may have taken in one epoch."""
        return _MAX_SAMPLES

    def load_state_dict(self, state_dict: Mapping[str, Any]) -> None:
        """Set the position to a saved position, which any number of ranks may have saved.

        Raises:
            RestoreError: The saved value is not a position, is outside of the data, or belongs to
                another order of the samples, such as one with another seed or length. Nothing has
                changed.
        """
        self.check_saved(state_dict)
        self._epoch, self._sample_count = state_dict["epoch"], state_dict["consumed"]
        self._iteration = None


class ElasticSampler(_Position, Sampler[int]):
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
        place = _place(rank, world_size)
        whole("seed", seed, 0, _MAX_SAMPLES)
        whole("the length of the dataset", length, place[1], _MAX_SAMPLES)
        if not isinstance(shuffle, bool):
            raise ConfigError(f"shuffle={text_of(shuffle)}: give True or False")
        super().__init__({"seed": seed, "length": length, "shuffle": shuffle}, place)
        self._seed, self._length, self._shuffle = seed, length, shuffle

    def _reads(self, loader: DataLoader[Any]) -> bool:
        return loader.sampler is self

    def _begin(self) -> int:
        return len(self)

    def _max_samples(self) -> int:
        return self._length

    def __iter__(self) -> Iterator[int]:
        """Return an iterator over the indices of this rank's samples from the position on.

        Raises:
            ConfigError: No loop over `batches` runs, so the position would not advance.
        """
        if self._iteration is None:
            raise self._no_loop("sampler")
        start, stop = self._sample_count, self._sample_count + len(self) * self._world_size
        if not self._shuffle:
            return iter(range(start + self._rank, stop, self._world_size))
        generator = torch.Generator().manual_seed(self._seed + self._epoch)
        order = torch.randperm(self._length, generator=generator)
        return iter(order[start + self._rank : stop : self._world_size].tolist())

    def __len__(self) -> int:
        """Return the number of samples that this rank gets from the position on."""
        return (self._length - self._sample_count) // self._world_size


class ElasticStream(_Position, IterableDataset[Any]):
    """Deals the samples of an iterable dataset to the ranks and their loaders' workers, and counts
    the samples that were trained on.

        stream = ElasticStream(data.shuffle(seed=1, buffer_size=1000))
        loader = DataLoader(stream, batch_size=16, num_workers=2)
        state = {"model": model, "optimizer": optimizer, "data": stream, "step": 0}
        manager.restore(state)
        while stream.epoch < epochs:
            for batch in stream.batches(loader):
                train_step(batch)
                state["step"] += 1
                manager.save_async(state)

    The ranks take the samples in turn, in the order in which one process reads them. The position
    is the number of samples that all ranks together have taken in the epoch. It restores on another
    number of ranks and of workers. The batches of a rank do not depend on the number of workers.

    For this, every worker of every rank reads the whole dataset, and yields only its own share.
    After a restore, it reads the samples before the position again, so that a shuffle buffer has
    the same content as before. Put expensive work into the ``collate_fn`` of the loader, which gets
    the samples of its own rank only.

    All ranks get equally many samples. If the number of samples is no multiple of the number of
    ranks, an epoch leaves out the remainder at its end. With ``DataLoader(drop_last=True)`` it also
    leaves out a smaller last batch.

    A restore raises ``RestoreError`` if this class can see that the order differs from the saved
    order. For a ``datasets.IterableDataset`` it compares the kinds of the processing steps, their
    numbers (such as ``buffer_size``), the states of their generators, and the number of shards. It
    does not compare functions, such as that of ``map``. It also compares the number of samples,
    unless the dataset reads files or a generator. For other datasets it compares only the number of
    samples, if they have a length.

    Args:
        data: A dataset that gives the same samples in the same order in every process, such as a
            ``datasets.IterableDataset``. It may be shuffled with a seed. If it has a method
            ``set_epoch``, a loop calls it with the epoch. Do not split the dataset by ranks.
        rank: As for `ElasticSampler`.
        world_size: As for `ElasticSampler`.

    Raises:
        ConfigError: A value is wrong, the dataset is split by ranks, or a launcher has started
            several ranks and there is no process group yet.

    Thread safety: the training thread calls all methods.
    """

    _example = "DataLoader(stream, batch_size=...)"

    def __init__(
        self, data: Iterable[Any], *, rank: int | None = None, world_size: int | None = None
    ) -> None:
        if not isinstance(data, Iterable) or isinstance(data, Iterator):
            raise ConfigError(
                f"ElasticStream({text_of(data)}): give a dataset that can be read again and again. "
                "ElasticSampler takes one with indices"
            )
        check_undivided(data)
        super().__init__(order_of(data), _place(rank, world_size))
        self._data = data
        # Workers read from this tensor where a loop begins. It has the epoch, the position and the
        # batch size, which is 0 if no loop runs. Its memory is shared, since workers may outlive a
        # loop.
        self._start = torch.zeros(3, dtype=torch.int64)
        self._start.share_memory_()  # type: ignore[no-untyped-call]

    def _reads(self, loader: DataLoader[Any]) -> bool:
        return loader.dataset is self

    def _begin(self) -> int:
        check_undivided(self._data)
        self._start[:] = torch.tensor([self._epoch, self._sample_count, self._batch_size])
        self._set_epoch(self._epoch)
        return _MAX_SAMPLES

    def _end(self) -> None:
        self._start[2] = 0

    def _set_epoch(self, epoch: int) -> None:
        if (set_epoch := getattr(self._data, "set_epoch", None)) is not None:
            set_epoch(epoch)

    def __iter__(self) -> Iterator[Any]:
        """Return an iterator over the samples of this worker of this rank from the position on.

        Raises:
            ConfigError: No loop over `batches` runs, so the position would not advance.
        """
        epoch, start, batch_size = map(int, self._start)
        if not batch_size:
            raise self._no_loop("stream")
        worker = get_worker_info()
        if worker is None:
            return self._dealt(start, batch_size, 0, 1)
        self._set_epoch(epoch)  # An earlier loop may have started this worker process
        return self._dealt(start, batch_size, worker.id, worker.num_workers)

    def _dealt(self, start: int, batch_size: int, worker: int, workers: int) -> Iterator[Any]:
        own: Any = None
        samples = _read(self._data)
        _skip(samples, start)
        for index, sample in enumerate(samples):
            turn, rank = divmod(index, self._world_size)
            if turn // batch_size % workers != worker:
                continue
            if rank == self._rank:
                own = sample
            if rank == self._world_size - 1:  # Now every rank has a sample of this turn
                yield own


def _read(data: Iterable[Any]) -> Iterator[Any]:
    """Yield all samples of ``data``, even in a worker of a loader.

    Some datasets yield only the worker's part in a worker. So this function hides the worker from
    ``data``.
    """
    with outside_of_workers():
        samples = iter(data)
    while True:
        with outside_of_workers():
            try:
                sample = next(samples)
            except StopIteration:
                return
        yield sample


def _skip(samples: Iterator[Any], count: int) -> None:
    """Read ``count`` samples, and set the global random number generators back if there are any."""
    if count:
        rng = RngState()
        state = rng.state_dict()
        deque(islice(samples, count), maxlen=0)
        rng.load_state_dict(state)


def _place(rank: int | None, world_size: int | None) -> tuple[int, int]:
    if (rank is None) != (world_size is None):
        raise ConfigError(f"rank={rank}, world_size={world_size}: give both or none of them")
    if rank is not None and world_size is not None:
        whole("world_size", world_size, 1, _MAX_SAMPLES)
        whole("rank", rank, 0, world_size - 1)
        return rank, world_size
    if dist.is_available() and dist.is_initialized():
        return dist.get_rank(), dist.get_world_size()
    if (variable := world_of_launcher()) is not None:
        raise ConfigError(
            f"{variable} says there are several ranks: call torch.distributed.init_process_group() "
            "before building what deals the samples, or give it rank= and world_size="
        )
    return 0, 1
