"""The position in the training data, which restores on any number of ranks."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from itertools import chain, islice
from typing import Any, Final

from torch import distributed as dist
from torch.utils.data import DataLoader

from ckpt.checks import check_int
from ckpt.coordination.torch_store import launcher_variable
from ckpt.data.worker_seeds import seed_loader
from ckpt.errors import ConfigError, RestoreError
from ckpt.state.walk.stand_in import Checkable

MAX_SAMPLES: Final = (1 << 63) - 1


class Position(Checkable):
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
        batch_size = self._batch_size = loader.batch_size or 1
        iteration = self._iteration = object()  # Another loop, or a restore, replaces it
        remaining_samples = self._begin_loop()
        try:
            for batch in self._seeded_batches(loader):
                batch_samples = min(batch_size, remaining_samples)
                remaining_samples -= batch_samples
                self._sample_count += batch_samples * self._world_size
                yield batch
                if self._iteration is not iteration:
                    raise ConfigError(
                        "the data position was restored, or another loop has begun, while a loop "
                        f"over {self._class_name}.batches() ran: leave that loop first"
                    )
            self._epoch, self._sample_count = self._epoch + 1, 0
        finally:
            if self._iteration is iteration:
                self._iteration = None
                self._end_loop()

    def skip(self, samples: int) -> None:
        """Leave out the next samples of this epoch, such as those that made the loss explode. The
        order of the others stays the same.

        Call it on all ranks, after a restore and before the loop. If the epoch has fewer samples
        left, the next loop ends at once, and the epoch with it.

        Args:
            samples: The number of samples of all ranks together.

        Raises:
            ConfigError: The number is negative or no integer.
        """
        check_int("samples", samples, 0, MAX_SAMPLES)
        self._sample_count = min(self._sample_count + samples, self._max_samples())
        self._iteration = None

    def _seeded_batches(self, loader: DataLoader[Any]) -> Iterator[Any]:
        """Return an iterator over the loader, which draws no number of the global generators."""
        with seed_loader(loader, self._rank, self._epoch, self._sample_count):
            batches = iter(loader)
            head = list(islice(batches, 1))  # Some loaders begin with their first batch only
        return chain(head, batches)

    def _begin_loop(self) -> int:
        """Prepare a loop that begins at the position, and return how many samples it gives to this
        rank.

        If the number is unknown, return a number that is larger than any data set.
        """
        raise NotImplementedError

    def _end_loop(self) -> None:
        """Note that the loop has ended, so no loop runs."""

    def _feeds(self, loader: DataLoader[Any]) -> bool:
        """Return True if the loader takes its samples from this object."""
        raise NotImplementedError

    def _check_loader(self, loader: DataLoader[Any]) -> None:
        """Raise ``ConfigError`` if ``batches`` cannot loop over the loader."""
        if not self._feeds(loader):
            raise ConfigError(
                f"the loader does not take its samples from this {self._class_name}: build it with "
                f"{self._example}"
            )
        if getattr(loader, "next_iter_state", None) is not None:
            raise ConfigError(
                f"the loader has a position of its own, and this {self._class_name} has another: "
                "put only the latter into the state, not the StatefulDataLoader"
            )
        if loader.num_workers and not getattr(loader, "in_order", True):
            raise ConfigError(
                "the loader gives its batches in any order, so that there is no position between "
                "them: leave out in_order=False"
            )

    @property
    def _class_name(self) -> str:
        return type(self).__name__

    def _no_loop_error(self, name: str) -> ConfigError:
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
                f"the checkpoint has another value in the place of an {self._class_name}: restore "
                "it into one of its kind, or leave it out (only=...)"
            )
        own_values = {name: repr(value) for name, value in self._order.items()}
        saved_values = {name: repr(position[name]) for name in own_values}
        if differences := [name for name in own_values if saved_values[name] != own_values[name]]:
            saved_text, own_text = (
                ", ".join(f"{name}={values[name]}" for name in differences)
                for values in (saved_values, own_values)
            )
            raise RestoreError(
                f"the data position was saved with {saved_text}, this {self._class_name} has "
                f"{own_text}, so that it gives the samples in another order: build it as it was, "
                "or leave it out of the restore (only=...) to begin at its first sample"
            )
        if position["epoch"] < 0 or not 0 <= position["consumed"] <= self._max_samples():
            raise RestoreError(
                f"a data position of epoch={position['epoch']}, consumed={position['consumed']} "
                f"is not in this {self._class_name}: restore another step"
            )

    def _max_samples(self) -> int:
        """Return the largest number of samples that all ranks may have taken in one epoch."""
        return MAX_SAMPLES

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


def place_of(rank: int | None, world_size: int | None) -> tuple[int, int]:
    """Return the rank and the number of ranks: those given, or those of the default process group.

    Raises:
        ConfigError: Only one of them is given, a value is wrong, or a launcher has started several
            ranks and there is no process group yet.
    """
    if (rank is None) != (world_size is None):
        raise ConfigError(f"rank={rank}, world_size={world_size}: give both or none of them")
    if rank is not None and world_size is not None:
        check_int("world_size", world_size, 1, MAX_SAMPLES)
        check_int("rank", rank, 0, world_size - 1)
        return rank, world_size
    if dist.is_available() and dist.is_initialized():
        return dist.get_rank(), dist.get_world_size()
    if (variable := launcher_variable()) is not None:
        raise ConfigError(
            f"{variable} says there are several ranks: call torch.distributed.init_process_group() "
            "before building what deals the samples, or give it rank= and world_size="
        )
    return 0, 1
