"""Let each rank save and restore values for itself, such as random number generators."""

from __future__ import annotations

import random
from collections.abc import Callable
from typing import Any, Final, Literal, get_args

import numpy as np
import torch

from ckpt.errors import ConfigError

_Rule = Literal["error", "same_rank", "first"]
_RULES: Final = get_args(_Rule)
OnResize = _Rule | Callable[[int, int, int], int | None]
"""The rule by which a rank gets a ``PerRank`` value that another number of ranks has saved.

"error" refuses the restore. "same_rank" takes the value that the rank of the same number saved, and
keeps the present value if there was no such rank. "first" takes the value of rank 0. A function
``policy(rank, world_size, saved_world_size)`` returns the rank whose value to take, or None to keep
the present value.
"""


class PerRank:
    """Marks a value of the state that each rank saves and restores for itself.

    Args:
        value: Anything that a state may hold: plain values, which a restore replaces, or an object
            with ``state_dict`` and ``load_state_dict``, which a restore loads in place.
        on_resize: The rule by which a rank gets its value if another number of ranks has saved the
            checkpoint: "error", "same_rank", "first" or a function (see ``OnResize``).

    Raises:
        ConfigError: ``on_resize`` is none of these.

    Attributes:
        value: The value that was passed, or after a restore the restored value.
    """

    def __init__(self, value: Any, *, on_resize: OnResize = "error") -> None:
        if not callable(on_resize) and on_resize not in _RULES:
            raise ConfigError(
                f"on_resize={on_resize!r}: give one of {', '.join(map(repr, _RULES))}, or a "
                "function"
            )
        self.value = value
        self.on_resize = on_resize

    def __repr__(self) -> str:
        return f"PerRank({self.value!r})"


class RngState:
    """The global random number generators of this process: those of Python, of NumPy, of torch on
    the CPU and, once the accelerator is in use, of its devices.

    Put this object into the state as ``PerRank(RngState())``, since each rank has its own states.

    The generators of a loader's workers are in other processes, and are not restored. No library
    restores them. A loader whose ``generator`` is None draws a number from the global generator of
    torch when a loop over it starts. So a resume within an epoch draws one number more, unless
    ``batches()`` of an ``ElasticSampler`` or ``ElasticStream`` starts the loader, or the loader is
    built with ``generator=torch.Generator()``.
    """

    def state_dict(self) -> dict[str, Any]:
        """Return the present states of the generators."""
        state: dict[str, Any] = {
            "python": random.getstate(),
            "numpy": np.random.get_state(),
            "torch": torch.get_rng_state(),
        }
        if (accelerator := _accelerator()) is not None:
            name, module = accelerator
            state[name] = [module.get_rng_state(index) for index in range(module.device_count())]
        return state

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Set the states of the generators. States of another kind of accelerator, and of devices
        that this process does not have, are ignored.
        """
        random.setstate(state["python"])
        np.random.set_state(state["numpy"])
        torch.set_rng_state(state["torch"])
        if (accelerator := _accelerator(in_use=False)) is not None and accelerator[0] in state:
            name, module = accelerator
            for index, device_state in zip(range(module.device_count()), state[name], strict=False):
                module.set_rng_state(device_state, index)


def _accelerator(*, in_use: bool = True) -> tuple[str, Any] | None:
    """Return the type of the accelerator and its module (such as ``torch.cuda``), or None if there
    is no accelerator or its generators cannot be saved.

    With ``in_use``, return None also if the accelerator is not initialized yet. Reading its
    generators would create a context on it.
    """
    device = torch.accelerator.current_accelerator(check_available=True)
    if device is None:
        return None
    module = torch.get_device_module(device)
    if in_use and not getattr(module, "is_initialized", lambda: True)():
        return None
    return (device.type, module) if hasattr(module, "get_rng_state") else None
