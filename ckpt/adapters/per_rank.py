"""Values that differ between ranks, declared as such; and the one nearly everybody has: the random number generators."""

from __future__ import annotations

import random
from collections.abc import Callable
from typing import Any, Literal

import numpy as np
import torch

OnResize = Literal["error", "same_rank", "first"] | Callable[[int, int, int], int | None]
"""Whose value a rank takes when the world has another size: nobody's (an error), its own if there was one, rank 0's, or
``policy(rank, world_size, saved_world_size)`` -> saved rank, or None to keep what it has."""


class PerRank:
    """Marks a value of the state that each rank saves and restores for itself.

    Args:
        value: Anything a state may hold: plain values (replaced on restore), or an object with ``state_dict``/``load_state_dict`` (loaded in place).
        on_resize: Whose value a rank takes when the world has another size: see ``OnResize``.

    Attributes:
        value: As given; after a restore, what was restored.
    """

    def __init__(self, value: Any, *, on_resize: OnResize = "error") -> None:
        self.value = value
        self.on_resize = on_resize

    def __repr__(self) -> str:
        return f"PerRank({self.value!r})"


class RngState:
    """The random number generators of this process: Python's, NumPy's global one, torch's on the CPU and, once CUDA is in use, on every CUDA device.

    Nearly always wrapped: ``PerRank(RngState())``.
    """

    def state_dict(self) -> dict[str, Any]:
        """Their states now."""
        state: dict[str, Any] = {
            "python": random.getstate(),
            "numpy": np.random.get_state(),
            "torch": torch.get_rng_state(),
        }
        if torch.cuda.is_available() and torch.cuda.is_initialized():  # type: ignore[no-untyped-call]
            state["cuda"] = torch.cuda.get_rng_state_all()
        return state

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Set them. CUDA states beyond the devices at hand are ignored."""
        random.setstate(state["python"])
        np.random.set_state(state["numpy"])
        torch.set_rng_state(state["torch"])
        if "cuda" in state and torch.cuda.is_available():
            torch.cuda.set_rng_state_all(state["cuda"][: torch.cuda.device_count()])
