"""``torch.save`` of the state dicts into one file."""

from __future__ import annotations

import os

import torch

from bench.contenders import Handle, fsync_tree
from bench.state import Training


class TorchSave:
    """Writes a temporary file and renames it, as careful scripts do; the bench fsyncs it."""

    def prepare(self, state: Training, folder: str) -> None:
        self._state, self._folder = state, folder

    def save(self, step: int) -> Handle:
        path = os.path.join(self._folder, f"step-{step}.pt")
        state = {
            "model": self._state.model.state_dict(),
            "optimizer": self._state.optimizer.state_dict(),
            "step": self._state.step,
        }
        torch.save(state, f"{path}.tmp")
        os.rename(f"{path}.tmp", path)
        return Handle(step, path)

    def wait_safe(self, handle: Handle) -> None:
        """It was safe on return."""

    def wait_durable(self, handle: Handle) -> None:
        fsync_tree(handle.path)

    def load_back(self, path: str, into: Training) -> None:
        state = torch.load(path, weights_only=True)
        into.model.load_state_dict(state["model"])
        into.optimizer.load_state_dict(state["optimizer"])
        into.step = state["step"]

    def close(self) -> None:
        """Nothing is held."""
