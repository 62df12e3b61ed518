"""Seeds for the workers of a ``DataLoader`` that take no number of the global generators.

``iter(loader)`` draws a seed for the workers, even if there are none. It draws from the global
generator of torch if the loader has no generator of its own. A resume within an epoch starts the
loader once more than an uninterrupted run does, and would shift all random numbers after it.
"""

from __future__ import annotations

from collections.abc import Generator
from contextlib import contextmanager
from typing import Any

import numpy as np
import torch
from torch.utils.data import DataLoader


class _OwnGenerator(torch.Generator):
    """A generator that this module has made."""


def give_generator(loader: Any, *seed_numbers: int) -> None:
    """Give ``loader`` a generator of its own, unless its caller has given it one. The seed of the
    generator depends on ``seed_numbers``, such as the rank and the epoch.

    Values that are no ``DataLoader`` are left as they are.
    """
    loader = _base_loader(loader)
    if isinstance(loader, DataLoader) and isinstance(loader.generator, _OwnGenerator | None):
        loader.generator = _own_generator(loader, seed_numbers)


@contextmanager
def seed_loader(loader: Any, *seed_numbers: int) -> Generator[None]:
    """Let ``loader`` draw from a generator of its own, in the ``with`` block only."""
    loader = _base_loader(loader)
    generator = loader.generator
    loader.generator = _own_generator(loader, seed_numbers)
    try:
        yield
    finally:
        loader.generator = generator


def _own_generator(loader: DataLoader[Any], seed_numbers: tuple[int, ...]) -> torch.Generator:
    """Return a generator whose seed depends on ``seed_numbers``, and on the seed of the generator
    that ``loader`` would draw from. The latter does not change.
    """
    source = loader.generator
    seed = (
        torch.initial_seed() if isinstance(source, _OwnGenerator | None) else source.initial_seed()
    )
    (number,) = np.random.SeedSequence([seed, *seed_numbers]).generate_state(1, np.uint64).tolist()
    # The loader draws a number on the default device.
    return _OwnGenerator(torch.get_default_device()).manual_seed(number)


def _base_loader(loader: Any) -> Any:
    """Return the loader inside a prepared loader of accelerate, or ``loader`` itself."""
    return getattr(loader, "base_dataloader", loader)
