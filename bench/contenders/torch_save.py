"""``torch.save`` of the state dicts: one file per rank, with what that rank holds."""

from __future__ import annotations

import os

import torch
import torch.distributed as dist

from bench.contenders import Handle, fsync
from bench.contenders.trees import land, leaves, own_state
from bench.state import Subject


class TorchSave:
    """Writes a temporary file and renames it, as careful scripts do; the bench fsyncs it.

    Loads through ``mmap``, into the live tensors.
    """

    def prepare(self, subject: Subject, folder: str) -> None:
        self._subject, self._folder = subject, folder

    def save(self, step: int) -> Handle:
        path = os.path.join(self._folder, f"step-{step}")
        os.makedirs(path, exist_ok=True)
        file = file_of(path)
        self._write(f"{file}.tmp")
        os.rename(f"{file}.tmp", file)
        return Handle(step, path)

    def wait_safe(self, handle: Handle) -> None:
        """It was safe on return."""

    def wait_durable(self, handle: Handle) -> None:
        fsync(file_of(handle.path), handle.path, self._folder)

    def load_back(self, path: str, into: Subject) -> None:
        self._read(file_of(path), into)

    def close(self) -> None:
        """Nothing is held."""

    def _write(self, file: str) -> None:
        torch.save(own_state(self._subject), file)

    def _read(self, file: str, into: Subject) -> None:
        land(into, leaves(torch.load(file, weights_only=True, mmap=True)).__getitem__)


def file_of(path: str) -> str:
    """This rank's file of the checkpoint at ``path``."""
    return os.path.join(path, f"rank-{dist.get_rank() if dist.is_initialized() else 0}")
