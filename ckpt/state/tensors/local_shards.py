"""Describe a tensor by the boxes that this rank holds, each with its own memory.

ckpt describes ``ShardedTensor``, the parameters of FSDP1, and parameters inside of flat buffers in
this form, as ``LocalShards``. For a sharded layout that ckpt does not support by itself, put
``LocalShards`` into the state in place of the tensor.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence

import torch
from torch.optim import Optimizer

from ckpt.errors import ConfigError
from ckpt.model.box import Box, split_flat


class LocalShards:
    """A tensor, described by the boxes that this rank holds, each in its own memory.

    The tensor is saved like any other, and restored in place into the memory of its parts, whatever
    layout it was saved under. Pass the same object to every save while its memory is the same, so
    that the save does not examine it again.

    Args:
        shape: The shape of the whole tensor, in elements.
        shards: Pairs (offsets, memory), one for each part that this rank holds. A part has the
            shape of its memory, which may be a view. Together, the ranks must hold every element.
            If several ranks hold an element, the boxes with this element must be equal. A rank may
            hold no part if ``dtype`` is given, and at most 65,536 parts.
        replicas: The global ranks that are known to hold the same boxes with the same values,
            including this rank. Each of them writes a part of the boxes.
        dtype: The dtype of the tensor. It defaults to that of the parts.
        owner: The optimizer whose ``step`` is the only code that changes the memory, if there is
            one. The memory is then copied while training continues, and the next step of this
            optimizer waits for the copy.

    Raises:
        ConfigError: A part is not inside of ``shape``, the dtypes of the parts and the argument
            ``dtype`` are not all the same, or there is neither a part nor a ``dtype``.

    Attributes:
        boxes: The boxes of the parts, in the order of ``shards``.
        tensors: The memory of the parts, in the order of ``shards``.
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
        offsets_and_tensors = [(tuple(offsets), tensor) for offsets, tensor in shards]
        self.shape = tuple(shape)
        self.boxes = tuple(
            Box(offsets, tuple(tensor.shape)) for offsets, tensor in offsets_and_tensors
        )
        self.tensors = tuple(tensor for _, tensor in offsets_and_tensors)
        self.replicas = tuple(sorted(set(replicas)))
        self.owner = owner
        for box in self.boxes:
            if not box.is_inside(self.shape):
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
        """Return ``LocalShards`` for a rank that holds consecutive elements of a flattened tensor.

        Args:
            shape: The shape of the whole tensor.
            start: The index of the rank's first element in the row-major order of the tensor.
            memory: The elements of the rank, as a 1-D tensor.
            replicas: The ``replicas`` of ``LocalShards``.
            owner: The ``owner`` of ``LocalShards``.
        """
        shards: list[tuple[Sequence[int], torch.Tensor]] = []
        memory, position = memory.detach(), 0  # A detached tensor shares the version counter
        for box in split_flat(shape, start, start + memory.numel()):
            shards.append((box.offsets, memory[position : position + box.numel].view(box.shape)))
            position += box.numel
        return cls(shape, shards, replicas, dtype=memory.dtype, owner=owner)

    def __repr__(self) -> str:
        return f"LocalShards({self.shape}, {len(self.boxes)} part(s))"


TensorOrShards = torch.Tensor | LocalShards
"""The values of a state that have a name and bytes of their own in a checkpoint."""
