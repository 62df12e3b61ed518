"""Write a state to one file with ``torch.save``.

``torch.save`` needs all tensors at once. This module therefore reads them into a scratch file that
is mapped into memory. The tensors may be larger than the memory of the machine.
"""

from __future__ import annotations

import mmap
import os
import tempfile
from collections.abc import Iterable
from math import prod
from typing import Any, Final

import torch

from ckpt.catalog.tensor_reader import ReadRequest, StepReader
from ckpt.model.box import Box
from ckpt.model.dtype import DTYPES
from ckpt.model.manifest import Tensor
from ckpt.staging.image import copyable
from ckpt.state.tensors.layout import empty_in_order

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
                self.tensors[name] = torch.empty(shape, dtype=kind)


def read_into_scratch(
    reader: StepReader, tensors: Iterable[Tensor], folder: str
) -> dict[str, torch.Tensor]:
    """Read ``tensors`` from the checkpoint into a scratch file in ``folder``, and return them by
    their stored names, with their dimensions in memory as they were saved.
    """
    sources = list(tensors)
    scratch = Scratch(folder, ((tensor.name, tensor.dtype, tensor.shape) for tensor in sources))
    reader.read(
        [
            ReadRequest(tensor.name, Box.whole(tensor.shape), scratch.memory[tensor.name])
            for tensor in sources
            if tensor.nbytes
        ]
    )
    tensors_in_order = {
        tensor.name: in_saved_order(scratch.tensors[tensor.name], tensor) for tensor in sources
    }
    return scratch.tensors | tensors_in_order


def in_saved_order(tensor: torch.Tensor, record: Tensor) -> torch.Tensor:
    """Return ``tensor`` with its dimensions in memory in the order in which they were saved."""
    if not record.order:
        return tensor
    target = empty_in_order(tensor.shape, record.order, dtype=tensor.dtype)
    copyable(target, record.dtype).copy_(copyable(tensor, record.dtype))
    return target


def write_file(path: str, state: dict[str, Any]) -> None:
    """Write ``state`` to a file with ``torch.save``, and make the file durable.

    Raises:
        OSError: The file cannot be written, such as for lack of room.
    """
    with open(path, "wb") as file:
        try:
            torch.save(state, file)
        except RuntimeError as error:
            # After a write has failed, the zip writer of torch fails too, and hides the first error
            if isinstance(error.__context__, OSError):
                raise error.__context__ from None
            raise
        file.flush()
        os.fsync(file.fileno())
