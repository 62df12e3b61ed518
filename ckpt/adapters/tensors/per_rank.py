"""Values that are declared to differ between ranks, such as the random number generators."""

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
"""Which rank's value a rank takes if the world has another size.

"error" refuses the restore. "same_rank" takes its own value if there is one. "first" takes that of
rank 0. A function ``policy(rank, world_size, saved_world_size)`` returns the rank that saved the
value, or None to keep the present value.
"""


class PerRank:
    """Marks a value of the state that each rank saves and restores for itself.

    Args:
        value: Anything a state may hold: plain values (replaced on restore), or an object with
            ``state_dict``/``load_state_dict`` (loaded in place).
        on_resize: Whose value a rank takes when the world has another size: see ``OnResize``.

    Raises:
        ConfigError: ``on_resize`` is none of these.

    Attributes:
        value: As given; after a restore, what was restored.
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
    """The random number generators of this process: Python's, NumPy's global one, torch's on the
    CPU and, once the accelerator is in use, on each of its devices.

    Nearly always wrapped: ``PerRank(RngState())``.
    """

    def state_dict(self) -> dict[str, Any]:
        """Return the states of the generators now."""
        state: dict[str, Any] = {
            "python": random.getstate(),
            "numpy": np.random.get_state(),
            "torch": torch.get_rng_state(),
        }
        if (found := _accelerator()) is not None:
            name, module = found
            state[name] = [module.get_rng_state(index) for index in range(module.device_count())]
        return state

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Set them. States of another accelerator, or beyond the devices at hand, are ignored."""
        random.setstate(state["python"])
        np.random.set_state(state["numpy"])
        torch.set_rng_state(state["torch"])
        if (found := _accelerator(in_use=False)) is not None and found[0] in state:
            name, module = found
            for index, held in zip(range(module.device_count()), state[name], strict=False):
                module.set_rng_state(held, index)


def _accelerator(*, in_use: bool = True) -> tuple[str, Any] | None:
    """Return the accelerator's name and module, if it has generators that can be kept.

    ``in_use``: nothing is asked that would make a context.
    """
    device = torch.accelerator.current_accelerator(check_available=True)
    if device is None:
        return None
    module = torch.get_device_module(device)
    if in_use and not getattr(module, "is_initialized", lambda: True)():
        return None
    return (device.type, module) if hasattr(module, "get_rng_state") else None
