"""Save and restore random number generators that are values of a state."""

from __future__ import annotations

import copy
import random
from collections.abc import Mapping
from typing import Any, TypeGuard

import numpy as np
import torch

from ckpt.errors import RestoreError
from ckpt.state.walk.stand_in import Checkable

Generator = torch.Generator | np.random.Generator | np.random.RandomState | random.Random


def is_generator(value: object) -> TypeGuard[Generator]:
    """Return True if ``value`` is a generator of torch (on any device), NumPy or Python that has a
    state.
    """
    return isinstance(value, Generator) and not isinstance(value, random.SystemRandom)


class GeneratorState(Checkable):
    """The present state of a generator, as an object with ``state_dict`` and ``load_state_dict``.

    The state is a plain value, and no tensor, so a save compares it between the ranks.
    """

    def __init__(self, generator: Generator) -> None:
        self._generator = generator

    def state_dict(self) -> dict[str, Any]:
        return {"state": _state_of(self._generator)}

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        _set_state(self._generator, state["state"])

    def check_saved(self, state_dict: Mapping[str, Any]) -> None:
        try:
            _set_state(_other_generator(self._generator), state_dict["state"])
        except (KeyError, RuntimeError, TypeError, ValueError) as error:
            raise RestoreError(
                f"a {type(self._generator).__name__} of the state cannot take what the checkpoint "
                f"has in its place ({error}): make the same kind of generator, on the kind of "
                "device that has saved it, or restore the other entries alone (only=)"
            ) from None


def _state_of(generator: Generator) -> Any:
    """Return the state of a generator as a plain value."""
    match generator:
        case torch.Generator():
            return generator.get_state().numpy().tobytes()
        case np.random.Generator():
            return generator.bit_generator.state
        case np.random.RandomState():
            return generator.get_state()
        case random.Random():
            return generator.getstate()


def _set_state(generator: Generator, state: Any) -> None:
    """Set the state of a generator to what ``_state_of`` has returned."""
    match generator:
        case torch.Generator():
            generator.set_state(torch.frombuffer(bytearray(state), dtype=torch.uint8))
        case np.random.Generator():
            generator.bit_generator.state = state
        case np.random.RandomState():
            generator.set_state(state)
        case random.Random():
            generator.setstate(state)


def _other_generator(generator: Generator) -> Generator:
    """Return another generator of the kind of ``generator``."""
    if isinstance(generator, torch.Generator):
        return torch.Generator(generator.device)
    return copy.deepcopy(generator)
