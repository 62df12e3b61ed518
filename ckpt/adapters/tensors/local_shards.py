"""A tensor of which this rank holds some boxes, each in its own memory: the form of all sharded
layouts.

A DTensor, a tensor of FSDP1, and a parameter inside of a flat buffer have this form. For a layout
that ckpt does not know, put ``LocalShards`` into the state in place of the tensor.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence

import torch
from torch.optim import Optimizer

from ckpt.errors import ConfigError
from ckpt.model.box import Box, split_flat


class LocalShards:
    """A tensor of which this rank holds some boxes.

    It is saved as an ordinary tensor, and restored in place into its parts, whatever layout it was
    saved under. Pass the same object to every save while its memory is the same: the save then
    does not examine it again.

    Args:
        shape: Shape of the whole tensor, in elements.
        shards: Pairs (offsets, memory), one for each part that this rank holds. A part has the
            shape of its memory, which may be a view. Together, the ranks must hold every element.
            An element that several ranks hold must belong to equal boxes. There may be no part at
            all if ``dtype`` is given.
        replicas: Global ranks that are known to hold the same boxes with the same values, this rank
            included. They share the writing.
        dtype: Dtype of the tensor. It defaults to that of the parts.
        owner: The optimizer whose ``step`` alone changes the memory, if there is one. The memory is
            then copied while training continues, and that step waits for the copy.

    Attributes:
        boxes: The boxes of the parts, in order.
        tensors: The memory of the parts, in order.
    """

    __slots__ = ("__weakref__", "boxes", "dtype", "owner", "replicas", "shape", "tensors")

    def __init__(
        self,
        shape: Sequence[int],
        shards: Iterable[tuple[Sequence[int], torch.Tensor]],
        replicas: Iterable[int] = (),
        *,
        dtype: torch.dtype | None = None,
        owner: Optimizer | None = None,
    ) -> None:
        pairs = [(tuple(offsets), tensor) for offsets, tensor in shards]
        self.shape = tuple(shape)
        self.boxes = tuple(Box(offsets, tuple(tensor.shape)) for offsets, tensor in pairs)
        self.tensors = tuple(tensor for _, tensor in pairs)
        self.replicas = tuple(sorted(set(replicas)))
        self.owner = owner
        for box in self.boxes:
            if not box.inside(self.shape):
                raise ConfigError(
                    f"LocalShards: {box} is not inside the shape {self.shape}: give offsets in "
                    "elements of the whole tensor, one per dimension, "
                    "and memory that has as many dimensions"
                )
        dtypes = {tensor.dtype for tensor in self.tensors} | ({dtype} if dtype else set())
        if len(dtypes) != 1:
            text = " and ".join(sorted(map(str, dtypes))) or "no dtype"
            raise ConfigError(
                f"LocalShards: {text}: give all parts one dtype, and say dtype= where there is no "
                "part"
            )
        (self.dtype,) = dtypes

    @classmethod
    def of_range(
        cls,
        shape: Sequence[int],
        start: int,
        memory: torch.Tensor,
        replicas: Iterable[int] = (),
        *,
        owner: Optimizer | None = None,
    ) -> LocalShards:
        """Return the elements of a flat tensor from ``start`` on that the 1-D ``memory`` holds."""
        shards: list[tuple[Sequence[int], torch.Tensor]] = []
        memory, at = memory.detach(), 0  # A detached tensor shares the version counter
        for box in split_flat(shape, start, start + memory.numel()):
            shards.append((box.offsets, memory[at : at + box.numel].view(box.shape)))
            at += box.numel
        return cls(shape, shards, replicas, dtype=memory.dtype, owner=owner)

    def __repr__(self) -> str:
        return f"LocalShards({self.shape}, {len(self.boxes)} part(s))"


Source = torch.Tensor | LocalShards
"""What has a name and bytes of its own in a checkpoint."""
