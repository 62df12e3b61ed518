"""Tensors in a temporary file that is mapped into memory, for more of them than memory holds."""

from __future__ import annotations

import mmap
import os
import tempfile
from collections.abc import Iterable
from math import prod
from typing import Final

import torch

from ckpt.model.dtype import DTYPES

_ALIGNMENT: Final = 64


class Scratch:
    """Create tensors in a temporary file without a name, which is mapped into memory.

    The values of the tensors are not set. The system frees the file when no tensor and no entry of
    ``memory`` uses it any more.

    Attributes:
        memory: The bytes of each tensor by name.
        tensors: The tensors by name.
    """

    def __init__(
        self, folder: str | None, kinds: Iterable[tuple[str, str, tuple[int, ...]]]
    ) -> None:
        """Create the file and the tensors.

        Args:
            folder: A folder with room for all tensors; None for the system's temporary folder.
            kinds: The name, the dtype and the shape of each tensor.
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
                # Allocate the file now. On a full disk, this raises an error, while a later write
                # to the mapped memory would end the process with SIGBUS.
                os.posix_fallocate(file.fileno(), 0, end)
            whole = memoryview(mmap.mmap(file.fileno(), max(end, 1)) if end else bytearray(1))
        for name, dtype, shape, start, nbytes in places:
            kind = getattr(torch, dtype)
            self.memory[name] = whole[start : start + nbytes]
            if nbytes:
                # Give each tensor its own storage. Otherwise ``torch.save`` would write all tensors
                # as views of one storage.
                raw = torch.frombuffer(self.memory[name], dtype=torch.uint8)
                self.tensors[name] = raw.view(kind).view(shape)
            else:
                self.tensors[name] = torch.empty(shape, dtype=kind, device="cpu")
