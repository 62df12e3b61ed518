"""Tensors -> one file of ``torch.save``.

``torch.save`` needs all tensors at once. So they are in a scratch file that is mapped into memory,
and the system keeps as much of it in memory as there is room for.
"""

from __future__ import annotations

import mmap
import os
import tempfile
from collections.abc import Iterable
from math import prod
from typing import Any, Final

import torch

from ckpt.catalog.tensor_reader import StepReader, Wanted
from ckpt.model.box import Box
from ckpt.model.dtype import DTYPES
from ckpt.model.manifest import Tensor

_ALIGNMENT: Final = 64


class Scratch:
    """Makes tensors without values in a file that has no name. The file is freed with the last of
    them.
    """

    def __init__(
        self, folder: str | None, kinds: Iterable[tuple[str, str, tuple[int, ...]]]
    ) -> None:
        """``kinds`` are (name, dtype, shape).

        ``folder`` must have room for all of it; None for the system's.
        """
        self.memory: dict[str, memoryview] = {}
        self.tensors: dict[str, torch.Tensor] = {}
        places: list[tuple[str, str, tuple[int, ...], int, int]] = []
        end = 0
        for name, dtype, shape in kinds:
            nbytes = prod(shape) * DTYPES[dtype].itemsize
            places.append((name, dtype, shape, end, nbytes))
            end = -(-(end + nbytes) // _ALIGNMENT) * _ALIGNMENT
        with tempfile.TemporaryFile(dir=folder) as file:
            if end:
                # Allocate the file now: on a full disk, a later write would end in a SIGBUS.
                os.posix_fallocate(file.fileno(), 0, end)
            whole = memoryview(mmap.mmap(file.fileno(), max(end, 1)) if end else bytearray(1))
        for name, dtype, shape, start, nbytes in places:
            kind = getattr(torch, dtype)
            self.memory[name] = whole[start : start + nbytes]
            if nbytes:
                # Each tensor has a storage of its own, or torch would take them for views of one.
                raw = torch.frombuffer(self.memory[name], dtype=torch.uint8)
                self.tensors[name] = raw.view(kind).view(shape)
            else:
                self.tensors[name] = torch.empty(shape, dtype=kind)


def read_into_scratch(
    reader: StepReader, tensors: Iterable[Tensor], folder: str
) -> dict[str, torch.Tensor]:
    """Read ``tensors`` into a scratch file, and return them by the names they are stored under."""
    wanted = list(tensors)
    scratch = Scratch(folder, ((tensor.name, tensor.dtype, tensor.shape) for tensor in wanted))
    reader.read(
        [
            Wanted(tensor.name, Box.whole(tensor.shape), scratch.memory[tensor.name])
            for tensor in wanted
            if tensor.nbytes
        ]
    )
    return scratch.tensors


def write_file(path: str, state: dict[str, Any]) -> None:
    """Write the state as ``torch.save`` does, and make the file durable."""
    with open(path, "wb") as file:
        torch.save(state, file)
        file.flush()
        os.fsync(file.fileno())
