"""The places where a reader puts chunks."""

from __future__ import annotations

import numpy as np

from ckpt.plan.leaf import Leaf
from ckpt.plan.restore import ChunkRead


class ArraySink:
    """A sink of leaves as arrays, one box each; ``direct`` if the caller wants it."""

    def __init__(self, wanted: list[Leaf], *, direct: bool) -> None:
        self.wanted, self.is_direct = wanted, direct
        self.arrays = [np.zeros(leaf.boxes[0].shape, dtype=leaf.dtype) for leaf in wanted]
        self.direct_reads: list[ChunkRead] = []
        self.placed_reads: list[ChunkRead] = []

    def direct(self, read: ChunkRead) -> memoryview | None:
        target = read.targets[0]
        if not self.is_direct or len(read.targets) > 1 or target.part != read.box:
            return None
        region = self.arrays[target.leaf][
            target.part.relative_to(self.wanted[target.leaf].boxes[0]).slices()
        ]
        if not region.flags.c_contiguous:
            return None
        self.direct_reads.append(read)
        return region.reshape(-1).view(np.uint8).data

    def place(self, read: ChunkRead, data: memoryview) -> None:
        self.placed_reads.append(read)
        chunk = np.frombuffer(data, dtype=read.dtype).reshape(read.box.shape)
        for target in read.targets:
            box = self.wanted[target.leaf].boxes[0]
            self.arrays[target.leaf][target.part.relative_to(box).slices()] = chunk[
                target.part.relative_to(read.box).slices()
            ]
