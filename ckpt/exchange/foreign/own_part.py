"""The data file for those parts of an adopted step that cannot be used where they are.

These are parts whose bytes are not in row-major order in the foreign file, such as those of a
tensor in ``channels_last``, and values that a reader had to compute. An image is the content of a
data file. The file has a header, and then the items of its plan: each is a box of a leaf, which is
a tensor. A *sink* takes the chunks that are read.
"""

from __future__ import annotations

from bisect import bisect_right
from collections.abc import Sequence
from dataclasses import dataclass
from functools import lru_cache

import numpy as np
import torch

from ckpt.exchange.inert.inert_torch import Span
from ckpt.exchange.inert.input_limits import open_file
from ckpt.model.box import Box
from ckpt.model.dtype import DTYPES
from ckpt.pipeline.chunk_reader import Sink
from ckpt.pipeline.stored_image import StoredImage
from ckpt.plan.restore import ChunkRead
from ckpt.plan.save import SavePlan
from ckpt.staging.image import copyable

Source = Span | torch.Tensor
"""The elements of a part: in a file, or in memory."""


@dataclass(frozen=True, slots=True)
class OwnPart:
    """A data file that is made of parts of the foreign files.

    Attributes:
        plan: The layout of the file.
        sources: The source of each box of the plan, by the index of the leaf and the box.
    """

    plan: SavePlan
    sources: dict[tuple[int, Box], Source]

    def image(self, rank: int) -> StoredImage:
        """Return the image of the file, whose bytes are read when they are needed."""
        reads: list[ChunkRead] = []
        start = 0
        for index, nbytes in enumerate(self.plan.chunks):
            box = Box((start,), (nbytes,))
            reads.append(
                ChunkRead(
                    rank=rank,
                    index=index,
                    offset=start,
                    nbytes=nbytes,
                    checksum="",
                    dtype="uint8",
                    box=box,
                    targets=(),
                )
            )
            start += nbytes
        item_starts = [item.offset for item in self.plan.items]
        read_item = lru_cache(maxsize=2)(self._read_item)  # A box may have many chunks

        def read(chunks: Sequence[ChunkRead], sink: Sink) -> None:
            for chunk in chunks:
                begin = chunk.offset
                if begin < len(self.plan.header):
                    data = memoryview(self.plan.header)
                else:
                    position = bisect_right(item_starts, begin) - 1
                    begin -= item_starts[position]
                    data = read_item(position)[begin : begin + chunk.nbytes]
                sink.place(chunk, data)

        return StoredImage(reads, read)

    def _read_item(self, position: int) -> memoryview:
        item = self.plan.items[position]
        return _bytes_of(self.sources[item.leaf, item.box])


def _bytes_of(source: Source) -> memoryview:
    """Return the elements of a source in row-major order."""
    if isinstance(source, torch.Tensor):
        dtype = str(source.dtype).removeprefix("torch.")
        flat = copyable(source.detach(), dtype).contiguous().reshape(-1).view(torch.uint8)
        return memoryview(flat.numpy())  # type: ignore[arg-type]
    itemsize = DTYPES[source.dtype].itemsize
    last_element = sum((n - 1) * step for n, step in zip(source.shape, source.strides, strict=True))
    with open_file(source.path) as file:
        file.seek(source.offset)
        data = file.read((last_element + 1) * itemsize)
    view = np.lib.stride_tricks.as_strided(
        np.frombuffer(data, dtype=f"V{itemsize}"),  # Bytes, since NumPy lacks some dtypes
        source.shape,
        [step * itemsize for step in source.strides],
    )
    return memoryview(np.ascontiguousarray(view).reshape(-1).view(np.uint8))  # type: ignore[arg-type]
