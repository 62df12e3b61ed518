"""The settings that decide the order of the samples of a ``datasets.IterableDataset``.

In this module, a step is a processing step of such a dataset, such as a shuffle or a map.
"""

from __future__ import annotations

import hashlib
from collections.abc import Iterable, Iterator, Sized
from typing import Any, Final

import numpy as np

from ckpt.errors import ConfigError

_NUMERIC_SETTINGS: Final = ("batch_size", "buffer_size", "max_input_shards", "n", "num_times")
"""The attributes of a step that are numbers and may change the order."""


def check_undivided(data: object) -> None:
    """Raise ``ConfigError`` if ``split_dataset_by_node()`` has split the dataset, or if it begins
    at a position that its ``load_state_dict()`` has set.
    """
    if getattr(data, "_distributed", None) is not None:
        raise ConfigError(
            "the dataset is split by ranks already: give ElasticStream what "
            "datasets.distributed.split_dataset_by_node() got"
        )
    if getattr(data, "_starting_state_dict", None) is not None:
        raise ConfigError(
            "the dataset has a position of its own from its load_state_dict(): give ElasticStream "
            "a dataset that begins at its first sample"
        )


def order_of(data: Iterable[Any]) -> dict[str, int | bool | str]:
    """Return the known settings of ``data`` that decide the order of its samples.

    Returns:
        ``seed``: a digest of the states of all random generators, or "none" without generators.
        ``length``: the number of samples that the sources have before any processing, or
        "unknown". ``shuffle``: whether the dataset has a random generator. ``shards``: the number
        of shards. ``steps``: the names of the steps with the numbers that were given to them, such
        as "batch_size=8".
    """
    steps = list(_steps(getattr(data, "_ex_iterable", None)))
    generators = [
        repr(value.bit_generator.state)
        for step in steps
        for value in vars(step).values()
        if isinstance(value, np.random.Generator)
    ]
    lengths = [_length(step) for step in steps if not _sources(step)]
    if not steps:
        lengths = [len(data) if isinstance(data, Sized) else None]
    known_lengths = [length for length in lengths if length is not None]
    digest = hashlib.sha256("".join(generators).encode()).hexdigest()[:12]
    return {
        "seed": digest if generators else "none",
        "length": sum(known_lengths) if len(known_lengths) == len(lengths) else "unknown",
        "shuffle": bool(generators),
        "shards": getattr(data, "num_shards", 1),
        "steps": ", ".join(map(_describe, steps)),
    }


def _steps(step: Any) -> Iterator[Any]:
    """Yield the steps of a ``datasets.IterableDataset``, the last one first."""
    if step is not None:
        yield step
        for source in _sources(step):
            yield from _steps(source)


def _sources(step: Any) -> list[Any]:
    """Return the steps that ``step`` reads from; empty for a source of samples."""
    source = getattr(step, "ex_iterable", None)
    return getattr(step, "ex_iterables", []) if source is None else [source]


def _length(step: Any) -> int | None:
    """Return the number of samples of a step that reads from no other step.

    Return None if the number is unknown. It is known if every shard that the step reads has a
    length, such as a shard of a ``datasets.Dataset``.
    """
    # A step without a list of shards counts as one with a shard of no known length.
    shards = getattr(step, "kwargs", {}).get("shards", [""])
    is_known = all(isinstance(shard, Sized) and not isinstance(shard, str) for shard in shards)
    return sum(map(len, shards)) if is_known else None


def _describe(step: Any) -> str:
    values = vars(step)
    numbers = [f"{name}={values[name]}" for name in _NUMERIC_SETTINGS if name in values]
    return " ".join([type(step).__name__, *numbers])
