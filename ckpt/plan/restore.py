"""Which chunks have to be read for what this rank wants, and where does each part of them go?

For every wanted box: the stored shards that meet it; of each, the chunks that meet it; of each chunk, the common box. A chunk is read whole, because its checksum covers
all of it. If the chunk lies whole in the wanted box and in one piece there, it can be read straight into place.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Mapping, Sequence
from dataclasses import dataclass

from ckpt.errors import DtypeMismatch, EntryMissing, ShapeMismatch
from ckpt.model.box import Box, split_rows
from ckpt.model.dtype import DTYPES
from ckpt.model.manifest import Manifest, Shard, Tensor, chunk_offsets
from ckpt.plan.leaf import Leaf


@dataclass(frozen=True, slots=True, kw_only=True)
class Target:
    """Where a part of a chunk goes: ``part`` (global coordinates) into piece ``piece`` of leaf ``leaf``."""

    leaf: int
    piece: int
    part: Box


@dataclass(frozen=True, slots=True, kw_only=True)
class ChunkRead:
    """One chunk that is needed. ``box`` in global coordinates of its tensor; ``offset`` and ``nbytes`` in bytes of the file of ``rank``."""

    rank: int
    offset: int
    nbytes: int
    checksum: str
    dtype: str
    box: Box
    targets: tuple[Target, ...]


@dataclass(frozen=True, slots=True, kw_only=True)
class RestorePlan:
    """Reads in file order. ``wanted_bytes`` is what lands in the target, ``read_bytes`` what is fetched for it."""

    reads: tuple[ChunkRead, ...]
    wanted_bytes: int

    @property
    def read_bytes(self) -> int:
        return sum(read.nbytes for read in self.reads)


def plan_restore(manifest: Manifest, wanted: Sequence[Leaf]) -> RestorePlan:
    """The reads for ``wanted``, whose names may be tied ones.

    Raises:
        EntryMissing, ShapeMismatch, DtypeMismatch: Before anything is read.
    """
    tensors = manifest.tensor_map()
    if missing := [leaf.name for leaf in wanted if leaf.name not in tensors]:
        raise EntryMissing(missing, manifest.step)
    found: dict[tuple[int, int], ChunkRead] = {}
    targets: dict[tuple[int, int], list[Target]] = defaultdict(list)
    table = _ChunkTable(manifest)
    for index, leaf in enumerate(wanted):
        tensor = tensors[leaf.name]
        _check(leaf, tensor)
        for shard in tensor.shards:
            for piece, box in enumerate(leaf.boxes):
                if box.intersect(shard.box) is None:
                    continue
                for read in table.reads(shard, tensor.dtype):
                    if part := read.box.intersect(box):
                        key = (read.rank, read.offset)
                        found.setdefault(key, read)
                        targets[key].append(Target(leaf=index, piece=piece, part=part))
    reads = tuple(_aim(found[key], targets[key]) for key in sorted(found))
    return RestorePlan(reads=reads, wanted_bytes=sum(leaf.nbytes for leaf in wanted))


def _aim(read: ChunkRead, targets: Sequence[Target]) -> ChunkRead:
    return ChunkRead(
        rank=read.rank,
        offset=read.offset,
        nbytes=read.nbytes,
        checksum=read.checksum,
        dtype=read.dtype,
        box=read.box,
        targets=tuple(targets),
    )


def _check(leaf: Leaf, tensor: Tensor) -> None:
    if leaf.shape != tensor.shape:
        raise ShapeMismatch(leaf.name, tensor.shape, leaf.shape)
    if leaf.dtype != tensor.dtype:
        raise DtypeMismatch(leaf.name, tensor.dtype, leaf.dtype)


class _ChunkTable:
    """Chunks of a shard, as reads without targets; remembered, because many boxes may want the same shard."""

    def __init__(self, manifest: Manifest) -> None:
        self._files = manifest.file_map()
        self._chunk_bytes = manifest.chunk_bytes
        self._index: dict[int, Mapping[int, int]] = {}
        self._known: dict[tuple[int, int], list[ChunkRead]] = {}

    def reads(self, shard: Shard, dtype: str) -> list[ChunkRead]:
        key = (shard.rank, shard.offset)
        if key not in self._known:
            self._known[key] = self._build(shard, dtype)
        return self._known[key]

    def _build(self, shard: Shard, dtype: str) -> list[ChunkRead]:
        file = self._files[shard.rank]
        if shard.rank not in self._index:
            self._index[shard.rank] = {offset: i for i, offset in enumerate(chunk_offsets(file))}
        first = self._index[shard.rank][shard.offset]
        itemsize = DTYPES[dtype].itemsize
        reads: list[ChunkRead] = []
        offset = shard.offset
        for position, box in enumerate(split_rows(shard.box, self._chunk_bytes // itemsize)):
            chunk = file.chunks[first + position]
            reads.append(
                ChunkRead(
                    rank=shard.rank,
                    offset=offset,
                    nbytes=chunk.nbytes,
                    checksum=chunk.checksum,
                    dtype=dtype,
                    box=box,
                    targets=(),
                )
            )
            offset += chunk.nbytes
        return reads
