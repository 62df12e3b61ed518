"""Fill tensors with chunks. A chunk is read directly into contiguous host memory of its target. If
this is not possible, the bytes of the chunk are copied or converted.

A chunk is a part of a saved tensor, and ``read.box`` is its box, a rectangular region of the
tensor. A leaf describes a target without its data: its name, its dtype and its boxes. Each of
``read.targets`` is a region to fill: the box ``target.part``, which is inside of the box number
``target.piece`` of the leaf number ``target.leaf``.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Final

import torch

from ckpt.model.box import flat_start
from ckpt.model.dtype import DTYPES
from ckpt.plan.leaf import Leaf
from ckpt.plan.restore import ChunkRead
from ckpt.staging.device import drain, is_ordered, refuse_capture, use_stream
from ckpt.staging.image import copyable, view_as
from ckpt.state.tensors.layout import memories
from ckpt.state.tensors.local_shards import TensorOrShards

_LARGE_BYTES: Final = 256 << 10


class TensorSink:
    """Fills ``targets`` with chunks. ``leaves[i]`` is the leaf of ``targets[i]``, and has the boxes
    that this rank holds.

    A leaf has the dtype of the saved data. If the target has another dtype, each chunk is
    converted.

    On an accelerator with streams, all writes go to the stream that is current for the device when
    the sink is built. So work that the caller later queues on this stream runs after the writes.
    When the sink is built, it first waits for all work that is queued on the device, on any stream.

    ``_local_tensors`` has the memory of each box of each target. ``_conversion_flags`` says for
    each target whether its chunks are converted, and ``_overflow_indices`` are the targets that got
    a value beyond the range of their dtype. ``_direct_memories`` has the result of
    ``_direct_memory`` for each (leaf, piece) for which it was called.

    Thread safety:
        Build it on the training thread. Any thread may then call its methods, since chunks do not
        overlap.

    Raises:
        StagingError: A graph is being captured on a device of the targets.
    """

    def __init__(self, leaves: Sequence[Leaf], targets: Sequence[TensorOrShards]) -> None:
        self._leaves = leaves
        self._conversion_flags = [
            str(target.dtype) != f"torch.{leaf.dtype}"
            for leaf, target in zip(leaves, targets, strict=True)
        ]
        self._local_tensors = [
            [
                memory.detach() if is_converted else copyable(memory.detach(), leaf.dtype)
                for memory in memories(target, leaf.boxes)
            ]
            for leaf, target, is_converted in zip(
                leaves, targets, self._conversion_flags, strict=True
            )
        ]
        self._overflow_indices: set[int] = set()
        self._direct_memories: dict[tuple[int, int], memoryview | None] = {}
        all_devices = {
            memory.device for box_memories in self._local_tensors for memory in box_memories
        }
        devices = [device for device in all_devices if device.type != "cpu"]
        if devices:
            refuse_capture(devices, "restore")
            drain(devices)
        self._streams = {
            device: torch.accelerator.current_stream(device)
            for device in devices
            if is_ordered(device)
        }

    @property
    def overflow_names(self) -> list[str]:
        """The tensors that got a value beyond the range of their dtype."""
        return sorted(self._leaves[index].name for index in self._overflow_indices)

    def direct(self, read: ChunkRead) -> memoryview | None:
        """Return the memory of the target that the chunk fills, or None if the chunk cannot be read
        directly into one piece of host memory.
        """
        if len(read.targets) != 1 or read.targets[0].part != read.box:
            return None
        target = read.targets[0]
        box_key = (target.leaf, target.piece)
        if box_key not in self._direct_memories:
            self._direct_memories[box_key] = self._direct_memory(*box_key)
        memory, itemsize = self._direct_memories[box_key], self._leaves[target.leaf].itemsize
        start = flat_start(read.box, self._leaves[target.leaf].boxes[target.piece])
        if memory is None or start is None or read.box.numel * itemsize != read.nbytes:
            return None
        view = memory[start * itemsize : start * itemsize + read.nbytes]
        return view if view.nbytes == read.nbytes else None

    def _direct_memory(self, leaf_index: int, piece_index: int) -> memoryview | None:
        """Return the memory of box number ``piece_index`` of target number ``leaf_index`` as bytes.

        Return None if saved bytes cannot go there unchanged. This is so if the memory is not
        contiguous host memory, if the target has another dtype than the saved data, or if the
        target is a lazily conjugated or negated view.
        """
        tensor = self._local_tensors[leaf_index][piece_index]
        if self._conversion_flags[leaf_index] or not tensor.is_cpu or not tensor.is_contiguous():
            return None
        if tensor.is_conj() or tensor.is_neg():
            return None
        # A tensor of one element is contiguous whatever its stride is.
        flat = tensor.as_strided((tensor.numel(),), (1,))
        # Python 3.11 has no ``collections.abc.Buffer``.
        return memoryview(flat.view(torch.uint8).numpy())  # type: ignore[arg-type]

    def place(self, read: ChunkRead, data: memoryview) -> None:
        """Copy the parts of a chunk to the targets that need them. ``data`` has the raw bytes of
        the chunk.
        """
        if read.nbytes < _LARGE_BYTES and (memory := self.direct(read)) is not None:
            # For thousands of small tensors, this takes a tenth of the time of torch's copies.
            memory[:] = data
            return
        raw = torch.frombuffer(data, dtype=torch.uint8)
        # A decoded chunk may begin at any address, but conversions of torch need aligned elements.
        if raw.data_ptr() % DTYPES[read.dtype].itemsize:
            raw = raw.clone()
        plain = view_as(raw, read.dtype, read.box.shape)
        for index, target in enumerate(read.targets):
            # A conversion needs the values in their own dtype. For some dtypes, ``plain`` has an
            # integer dtype, which is enough for copies.
            is_converted = self._conversion_flags[target.leaf]
            chunk = (
                raw.view(getattr(torch, read.dtype)).view(read.box.shape) if is_converted else plain
            )
            part = chunk[target.part.relative_to(read.box).slices()]
            region = self._region(read, index)
            with use_stream(self._streams.get(region.device)):
                region.copy_(part)
            if is_converted and overflows(part, region.dtype):
                self._overflow_indices.add(target.leaf)

    def _region(self, read: ChunkRead, index: int) -> torch.Tensor:
        """Return a view of the memory that target number ``index`` of ``read`` describes."""
        target = read.targets[index]
        tensor = self._local_tensors[target.leaf][target.piece]
        box = self._leaves[target.leaf].boxes[target.piece]
        return tensor if target.part == box else tensor[target.part.relative_to(box).slices()]


def overflows(values: torch.Tensor, dtype: torch.dtype) -> bool:
    """Return True if a finite one of ``values`` is beyond the range of ``dtype``."""
    is_float = values.dtype.is_floating_point or values.dtype.is_complex
    if not is_float or torch.finfo(dtype).max >= torch.finfo(values.dtype).max:
        return False
    if values.dtype.is_complex:
        values = torch.view_as_real(values)
    elif values.dtype.itemsize < 4:  # Some of these dtypes have no arithmetic
        values = values.to(torch.float32)
    return bool((values.isfinite() & (values.abs() > torch.finfo(dtype).max)).any())
