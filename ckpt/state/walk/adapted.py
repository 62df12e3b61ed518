"""Find the object that ckpt saves and loads in the place of a value.

Random number generators have such an object in ckpt. For other values, ckpt calls the adapters that
other distributions provide as entry points of the group ``ckpt.adapters``. An adapter is a function
that takes one value of a state. It returns an object with ``state_dict()`` and
``load_state_dict()`` to save and load in place of the value, or None if it does not support the
value. ckpt calls adapters for values that it cannot save by itself, such as an engine or a loader
of a framework.
"""

from __future__ import annotations

import logging
from collections.abc import Callable, Mapping
from functools import cache
from importlib.metadata import entry_points
from typing import Any, Final, cast

import numpy as np
import torch
from torch import nn
from torch.optim import Optimizer

from ckpt.state.walk.generators import GeneratorState, is_generator

_log = logging.getLogger("ckpt")
_GROUP: Final = "ckpt.adapters"
_NATIVE_TYPES: Final = (
    torch.Tensor, nn.Module, Optimizer, np.ndarray, Mapping, list, tuple, set, frozenset,
    str, bytes, int, float, complex, bool, type(None),
)  # fmt: skip

Adapter = Callable[[object], object | None]


@cache
def _adapters() -> tuple[Adapter, ...]:
    """Return the adapters of all installed distributions."""
    adapters: list[Adapter] = []
    for entry in entry_points(group=_GROUP):
        try:
            adapters.append(cast(Adapter, entry.load()))
        except Exception as error:  # noqa: BLE001 - another package's mistake must not cost a save
            _log.warning(
                "ckpt: the adapter %r of %r cannot be loaded: %s", entry.name, entry.value, error
            )
    return tuple(adapters)


def adapt(value: Any) -> Any:
    """Return the `GeneratorState` of a generator, or the object that the first adapter for
    ``value`` returns. Return ``value`` itself if no adapter supports it, or if ckpt needs none.
    """
    if isinstance(value, _NATIVE_TYPES):
        return value
    if is_generator(value):
        return GeneratorState(value)
    for adapter in _adapters():
        if (stand_in := adapter(value)) is not None:
            return stand_in
    return value
