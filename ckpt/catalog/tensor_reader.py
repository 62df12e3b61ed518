"""Read tensors of a committed step, or boxes of them, as raw bytes, without torch.

Only the chunks that hold wanted bytes are read, and each chunk is verified. A *box* is a
rectangular region of a tensor, and each chunk holds one. A *leaf* is a tensor with its wanted
boxes. A *target* is the region of a wanted box that a chunk fills, and its ``part`` is the box of
this region in the tensor.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from typing import Any, Final

import numpy as np

from ckpt.errors import EntryMissing, IntegrityError
from ckpt.model.box import Box, split_rows
from ckpt.model.dtype import DTYPES
from ckpt.model.keys import StepRef
from ckpt.model.manifest import Manifest, Tensor
from ckpt.pipeline.chunk_reader import ChunkReader, read_plan
from ckpt.pipeline.retry import RetryPolicy
from ckpt.pipeline.workers import Workers
from ckpt.plan.leaf import Leaf
from ckpt.plan.restore import ChunkRead, plan_restore
from ckpt.storage.api import StorageBackend

BATCH_BYTES: Final = 128 << 20
"""How many bytes of a step are in memory at a time while the whole step is read."""

LIST_NAMES: Final = "`ckpt show` lists all names"
_ELEMENT_DTYPES: Final = {1: "u1", 2: "u2", 4: "u4", 8: "u8"}


@dataclass(frozen=True, slots=True)
class ReadRequest:
    """A box of a tensor, and the memory ``out`` that the bytes of the box are read into. The memory
    has the size of the box, and is filled in row-major order.
    """

    name: str
    box: Box
    out: memoryview


@dataclass(frozen=True, slots=True)
class Piece:
    """A run of a tensor's elements in row-major order.

    Attributes:
        offset: The number of bytes of the tensor before the run.
        data: The bytes of the run. The memory is valid until the next piece is taken.
    """

    tensor: Tensor
    offset: int
    data: memoryview


class StepReader:
    """A committed step, opened for reading.

    Thread safety: one thread at a time may use it. The threads of ``workers`` read.

    Args:
        backend: The store. The caller closes it, and ``workers`` too.
        ref: The step.
        manifest: The manifest of the step, with its fragments filled in.
        workers: The threads that read.
        retry: How requests are retried; None for the default policy.

    Attributes:
        tensors: The tensors of the step by name, including tied names.
        read_bytes: The number of bytes that were read so far.
        on_bytes: Called by the workers with the number of bytes that were just read.
    """

    def __init__(
        self,
        backend: StorageBackend,
        ref: StepRef,
        manifest: Manifest,
        workers: Workers,
        retry: RetryPolicy | None = None,
    ) -> None:
        self.on_bytes: Callable[[int], None] = lambda _: None
        self.backend, self.ref, self.manifest = backend, ref, manifest
        self.tensors = manifest.tensor_map()
        self.read_bytes = 0
        self._workers, self._reader = workers, ChunkReader(backend, retry or RetryPolicy())
        self._files = manifest.stored_files()

    def tensor(self, name: str) -> Tensor:
        """Return a tensor of the step. Raises ``EntryMissing`` if the step has no such tensor."""
        if (tensor := self.tensors.get(name)) is None:
            raise EntryMissing([name], self.ref.step, present=self.tensors, way=LIST_NAMES)
        return tensor

    def read(self, requests: Sequence[ReadRequest]) -> None:
        """Read all of ``requests`` into the memory that each entry names.

        Raises:
            EntryMissing: The step has no tensor of such a name.
            IntegrityError, StorageError: Some bytes are damaged or cannot be read. The memory may
                have been filled in part.
        """
        leaves: list[Leaf] = []
        for request in requests:
            tensor = self.tensor(request.name)
            leaves.append(Leaf(request.name, tensor.dtype, tensor.shape, (request.box,)))
        plan = plan_restore(self.manifest, leaves)
        try:
            read_plan(
                plan,
                MemorySink(leaves, [request.out for request in requests]),
                reader=self._reader,
                files=self._files,
                workers=self._workers,
                on_bytes=self.on_bytes,
            )
        except IntegrityError as error:
            error.root = self.backend.url
            raise
        self.read_bytes += plan.read_bytes

    def checksums(self, name: str) -> dict[Box, str]:
        """Return the checksum of each chunk of a tensor, by the box of the chunk. Reads nothing."""
        tensor = self.tensor(name)
        leaf = Leaf(name, tensor.dtype, tensor.shape, (Box.whole(tensor.shape),))
        return {read.box: read.checksum for read in plan_restore(self.manifest, [leaf]).reads}

    def stream(
        self, tensors: Sequence[Tensor], *, most_bytes: int = BATCH_BYTES
    ) -> Iterator[Piece]:
        """Yield all bytes of ``tensors`` in order, with at most ``most_bytes`` in memory at a time.

        Small tensors are read together, and large tensors are read in parts.
        """
        batch: list[tuple[Tensor, int, Box]] = []
        size = 0
        for tensor in tensors:
            itemsize, offset = DTYPES[tensor.dtype].itemsize, 0
            for box in split_rows(Box.whole(tensor.shape), max(1, most_bytes // itemsize)):
                nbytes = box.numel * itemsize
                if batch and size + nbytes > most_bytes:
                    yield from self._pieces(batch, size)
                    batch, size = [], 0
                batch.append((tensor, offset, box))
                offset, size = offset + nbytes, size + nbytes
        if batch:
            yield from self._pieces(batch, size)

    def _pieces(self, batch: Sequence[tuple[Tensor, int, Box]], size: int) -> Iterator[Piece]:
        """Read the boxes of ``batch``, which have ``size`` bytes in all, and yield them."""
        memory = memoryview(bytearray(size))
        requests: list[ReadRequest] = []
        start = 0
        for tensor, _, box in batch:
            end = start + box.numel * DTYPES[tensor.dtype].itemsize
            requests.append(ReadRequest(tensor.name, box, memory[start:end]))
            start = end
        self.read(requests)
        for (tensor, offset, _), request in zip(batch, requests, strict=True):
            yield Piece(tensor, offset, request.out)


class MemorySink:
    """A `Sink` that fills plain memory. Any thread may call the methods, since chunks do not
    overlap.

    Args:
        leaves: The tensors, each with one box.
        outs: The memory of the boxes.
    """

    def __init__(self, leaves: Sequence[Leaf], outs: Sequence[memoryview]) -> None:
        self._boxes = [leaf.boxes[0] for leaf in leaves]
        self._arrays = [
            np.frombuffer(out, dtype=_element_dtype(leaf.itemsize)).reshape(leaf.boxes[0].shape)
            for leaf, out in zip(leaves, outs, strict=True)
        ]

    def direct(self, read: ChunkRead) -> memoryview | None:
        """Return the contiguous memory that exactly this chunk fills; None if the chunk is wanted
        only in part, or if its memory is not contiguous.
        """
        if len(read.targets) != 1 or read.targets[0].part != read.box:
            return None
        region = self.region(read)
        return region.reshape(-1).view(np.uint8).data if region.flags.c_contiguous else None

    def place(self, read: ChunkRead, data: memoryview) -> None:
        """Copy the wanted parts of a chunk into the memory."""
        chunk = np.frombuffer(data, dtype=_element_dtype(DTYPES[read.dtype].itemsize)).reshape(
            read.box.shape
        )
        for index, target in enumerate(read.targets):
            self.region(read, index)[...] = _slice(chunk, target.part.relative_to(read.box))

    def region(self, read: ChunkRead, index: int = 0) -> np.ndarray[Any, Any]:
        """Return a view of the memory that a target of the chunk fills."""
        target = read.targets[index]
        return _slice(self._arrays[target.leaf], target.part.relative_to(self._boxes[target.leaf]))


def _slice(array: np.ndarray[Any, Any], box: Box) -> np.ndarray[Any, Any]:
    """Return a view of the part of an array that ``box`` names. The array may be 0-dimensional."""
    index: Any = (*box.slices(), ...)
    part: np.ndarray[Any, Any] = array[index]
    return part


def _element_dtype(itemsize: int) -> str:
    """Return the name of a NumPy dtype of this size that does not change the bytes of elements."""
    return _ELEMENT_DTYPES.get(itemsize, f"V{itemsize}")
