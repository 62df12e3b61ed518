"""Host memory for one version of the weights, which copies from an earlier version what did not
change.

A version is filled chunk by chunk. A chunk that is equal in the earlier version is copied from
there. A chunk whose difference is known is made from the earlier chunk and the difference, which a
chain of deltas (``DeltaChains``) gives. A read (a ``ChunkRead``) says which chunk of a tensor is
read. Each chunk is compared with its checksum in its memory, so neither damage of the store nor a
write of the caller into an earlier version can get into a later one.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import numpy as np

from ckpt.catalog.delta_chain import DeltaChains
from ckpt.catalog.tensor_reader import MemorySink
from ckpt.exchange.weights.load import bytes_of, empty_tensor
from ckpt.model.box import Box
from ckpt.model.checksum import checksum
from ckpt.model.manifest import Tensor
from ckpt.plan.leaf import Leaf
from ckpt.plan.restore import ChunkRead

Bytes = np.ndarray[Any, np.dtype[np.uint8]]


class VersionMemory:
    """The tensors of one version.

    Args:
        tensors: The tensors as they are stored.

    Attributes:
        layout: The names, dtypes and shapes of the tensors. Only a version of the same layout can
            be made from another one.
        leaves: The tensors that have bytes, for the plan of a restore.
        sink: Puts chunks that were read into the tensors.
        values: The tensors by the names under which they are stored.

    ``_checksums`` has the checksum of each chunk, by the tensor and the box that it fills.

    Thread safety: any thread may call ``take_chunk``, for different chunks.
    """

    def __init__(self, tensors: Sequence[Tensor]) -> None:
        self.layout = layout_of(tensors)
        self.values = {tensor.name: empty_tensor(tensor) for tensor in tensors}
        self.leaves = [
            Leaf(tensor.name, tensor.dtype, tensor.shape, (Box.whole(tensor.shape),))
            for tensor in tensors
            if tensor.nbytes
        ]
        self.sink = MemorySink(
            self.leaves, [bytes_of(self.values[leaf.name]) for leaf in self.leaves]
        )
        self._checksums: dict[tuple[int, Box], str] = {}

    def note_chunks(self, reads: Sequence[ChunkRead]) -> None:
        """Note that the memory gets the chunks of ``reads`` now."""
        self._checksums = {_place(read): read.checksum for read in reads}

    def tensor_name(self, read: ChunkRead) -> str:
        """Return the name of the tensor that a chunk belongs to."""
        return self.leaves[read.targets[0].leaf].name

    def lacks(self, read: ChunkRead) -> bool:
        """Return True unless this memory has a chunk with the place and the checksum of ``read``.

        A chunk that is cut in another way counts as new.
        """
        return self.checksum_at(read) != read.checksum

    def checksum_at(self, read: ChunkRead) -> str | None:
        """Return the checksum of the chunk at the place of ``read``; None if the tensor is cut in
        another way here.
        """
        return self._checksums.get(_place(read))

    def take_chunk(self, read: ChunkRead, base: VersionMemory, chains: DeltaChains) -> bool:
        """Fill the place of a chunk from ``base``, and return True. Return False if the chunk must
        be read, because ``base`` does not have it and ``chains`` do not lead to it.
        """
        target_region, base_region = self.sink.region(read), base.sink.region(read)
        is_contiguous = target_region.flags.c_contiguous
        data: Bytes = (
            target_region.reshape(-1).view(np.uint8)
            if is_contiguous
            else np.empty(read.nbytes, dtype=np.uint8)
        )
        # The cut of a tensor may differ from that of the base, so the bytes may be equal although
        # the base has no chunk of this place.
        may_be_equal = base.checksum_at(read) in (None, read.checksum)
        if not may_be_equal and not chains.has(read.chunk_id):
            return False
        data.view(target_region.dtype).reshape(target_region.shape)[...] = base_region
        is_intact = may_be_equal and checksum(data.data) == read.checksum
        if not is_intact and chains.has(read.chunk_id):
            is_applied = chains.apply(read.chunk_id, data.data)
            is_intact = is_applied and checksum(data.data) == read.checksum
        if not is_intact:
            return False
        if not is_contiguous:
            target_region[...] = data.view(target_region.dtype).reshape(target_region.shape)
        return True


def layout_of(tensors: Sequence[Tensor]) -> tuple[tuple[str, str, tuple[int, ...]], ...]:
    """Return the names, dtypes and shapes of ``tensors``."""
    return tuple((tensor.name, tensor.dtype, tensor.shape) for tensor in tensors)


def _place(read: ChunkRead) -> tuple[int, Box]:
    return read.targets[0].leaf, read.box
