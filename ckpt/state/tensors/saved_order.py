"""Give a tensor that was read in row-major order the dimension order that it had when saved."""

from __future__ import annotations

import torch

from ckpt.model.manifest import Tensor
from ckpt.staging.image import copyable
from ckpt.state.tensors.layout import empty_in_order


def in_saved_order(tensor: torch.Tensor, record: Tensor) -> torch.Tensor:
    """Return ``tensor`` with its dimensions in memory in the order in which they were saved.

    ``record`` is the description of the tensor in the checkpoint. Some dtypes are copied as an
    integer dtype (see ``copyable``).
    """
    if not record.order:
        return tensor
    target = empty_in_order(tensor.shape, record.order, dtype=tensor.dtype)
    copyable(target, record.dtype).copy_(copyable(tensor, record.dtype))
    return target
