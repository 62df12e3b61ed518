"""A stream that deals the samples of an iterable dataset to any number of ranks and workers."""

from __future__ import annotations

from collections import deque
from collections.abc import Iterable, Iterator
from itertools import islice
from typing import Any, Final

import torch
from torch.utils.data import DataLoader, IterableDataset, get_worker_info

from ckpt.checks import text_of
from ckpt.data.datasets_order import check_undivided, order_of
from ckpt.data.position import MAX_SAMPLES, Position, place_of
from ckpt.errors import ConfigError
from ckpt.state.tensors.per_rank import RngState
from ckpt.torch_private import outside_of_workers

_BATCH_SIZE: Final = 2
"""The index of the batch size in ``ElasticStream._shared_start``."""


class ElasticStream(Position, IterableDataset[Any]):
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
        super().__init__(order_of(data), place_of(rank, world_size))
        self._data = data
        # Workers read from this tensor where a loop begins. It has the epoch, the position and the
        # batch size, which is 0 if no loop runs. Its memory is shared, since workers may outlive a
        # loop.
        self._shared_start = torch.zeros(3, dtype=torch.int64)
        self._shared_start.share_memory_()  # type: ignore[no-untyped-call]

    def _feeds(self, loader: DataLoader[Any]) -> bool:
        return loader.dataset is self

    def _begin_loop(self) -> int:
        check_undivided(self._data)
        self._shared_start[:] = torch.tensor([self._epoch, self._sample_count, self._batch_size])
        self._set_epoch(self._epoch)
        return MAX_SAMPLES

    def _end_loop(self) -> None:
        self._shared_start[_BATCH_SIZE] = 0

    def _set_epoch(self, epoch: int) -> None:
        if (set_epoch := getattr(self._data, "set_epoch", None)) is not None:
            set_epoch(epoch)

    def __iter__(self) -> Iterator[Any]:
        """Return an iterator over the samples of this worker of this rank from the position on.

        Raises:
            ConfigError: No loop over `batches` runs, so the position would not advance.
        """
        epoch, start, batch_size = map(int, self._shared_start)
        if not batch_size:
            raise self._no_loop_error("stream")
        worker = get_worker_info()
        if worker is None:
            return self._deal(start, batch_size, 0, 1)
        self._set_epoch(epoch)  # An earlier loop may have started this worker process
        return self._deal(start, batch_size, worker.id, worker.num_workers)

    def _deal(self, start: int, batch_size: int, worker: int, worker_count: int) -> Iterator[Any]:
        """Yield the samples of worker number ``worker`` of this rank. In each turn, every rank gets
        a sample, and the workers take the batches of their rank in turn.
        """
        own_sample: Any = None
        samples = _read(self._data)
        _skip(samples, start)
        for index, sample in enumerate(samples):
            turn, rank = divmod(index, self._world_size)
            if turn // batch_size % worker_count != worker:
                continue
            if rank == self._rank:
                own_sample = sample
            if rank == self._world_size - 1:  # Now every rank has a sample of this turn
                yield own_sample


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
