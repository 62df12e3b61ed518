"""Write a state to one file with ``torch.save``.

``torch.save`` needs all tensors at once. This module therefore reads them into a scratch file that
is mapped into memory. The tensors may be larger than the memory of the machine.
"""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any

import torch

from ckpt.catalog.tensor_reader import ReadRequest, StepReader
from ckpt.exchange.scratch import Scratch
from ckpt.model.box import Box
from ckpt.model.manifest import Tensor
from ckpt.state.tensors.saved_order import in_saved_order
from ckpt.storage.local_files import durable_file


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


def write_file(path: str, state: dict[str, Any]) -> None:
    """Write ``state`` to a file with ``torch.save``, and make the file durable.

    Raises:
        OSError: The file cannot be written, such as for lack of room.
    """
    with durable_file(path) as file:
        try:
            torch.save(state, file)
        except RuntimeError as error:
            # After a write has failed, the zip writer of torch fails too, and hides the first error
            if isinstance(error.__context__, OSError):
                raise error.__context__ from None
            raise
