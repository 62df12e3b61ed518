"""The chunks that a rank must read for what it wants, and the places of their parts.

For every wanted box, the plan finds the stored shards that meet it, the chunks of each shard that
meet it, and the common box of each chunk. A chunk is read as a whole, since its checksum covers all
of it. If the whole chunk is wanted and is contiguous in the target, it is read straight into place.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass, replace

from ckpt.errors import DtypeMismatch, EntryMissing, ManifestCorrupt, ShapeMismatch
from ckpt.model.box import Box, split_rows, tiling_fault
from ckpt.model.dtype import DTYPES
from ckpt.model.manifest import Manifest, Shard, StoredFile, Tensor
from ckpt.plan.leaf import Leaf

Place = tuple[int, int]
"""Of a chunk on any tier: the rank whose file it is in, and its index there."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Target:
    """The place of a part of a chunk.

    ``part``, in global coordinates, goes into piece ``piece`` of leaf ``leaf``.
    """

    leaf: int
    piece: int
    part: Box


@dataclass(frozen=True, slots=True, kw_only=True)
class ChunkRead:
    """One chunk that is needed.

    ``box`` in global coordinates of its tensor; ``offset`` in bytes of the file of ``rank``.

    Attributes:
        index: Which chunk of the file it is.
        nbytes: Its bytes before any codec.
        encoded_nbytes: Its bytes in the file if it is encoded, None if it is not.
        as_stored: Whether the bytes are wanted as they are in the file, which may be encoded.
    """

    rank: int
    index: int
    offset: int
    nbytes: int
    checksum: str
    dtype: str
    box: Box
    targets: tuple[Target, ...]
    encoded_nbytes: int | None = None
    as_stored: bool = False

    @classmethod
    def of(
        cls,
        file: StoredFile,
        index: int,
        *,
        dtype: str,
        box: Box,
        targets: Iterable[Target] = (),
        as_stored: bool = False,
    ) -> ChunkRead:
        """Return the read of a chunk of ``file``."""
        chunk = file.chunks[index]
        return cls(
            rank=file.rank,
            index=index,
            offset=file.offsets[index],
            nbytes=chunk.nbytes,
            checksum=chunk.checksum,
            dtype=dtype,
            box=box,
            targets=tuple(targets),
            encoded_nbytes=file.encoded_nbytes(index),
            as_stored=as_stored,
        )

    def moved(self, file: StoredFile, index: int, *, as_stored: bool = False) -> ChunkRead:
        """Return the same read from an equal chunk of another file."""
        return replace(
            self,
            rank=file.rank,
            index=index,
            offset=file.offsets[index],
            encoded_nbytes=file.encoded_nbytes(index),
            as_stored=as_stored,
        )

    @property
    def place(self) -> Place:
        return self.rank, self.index

    @property
    def stored_nbytes(self) -> int:
        return self.nbytes if self.encoded_nbytes is None else self.encoded_nbytes

    @property
    def is_decoded(self) -> bool:
        """Whether the wanted bytes are different from those in the file."""
        return self.encoded_nbytes is not None and not self.as_stored


@dataclass(frozen=True, slots=True, kw_only=True)
class RestorePlan:
    """Reads in file order.

    ``wanted_bytes`` are the bytes that the targets need. ``read_bytes`` are those that are read
    from the store, where chunks may be encoded.
    """

    reads: tuple[ChunkRead, ...]
    wanted_bytes: int

    @property
    def read_bytes(self) -> int:
        return sum(read.stored_nbytes for read in self.reads)


def plan_restore(manifest: Manifest, wanted: Sequence[Leaf]) -> RestorePlan:
    """Return the reads for ``wanted``, whose names may be tied ones.

    Raises:
        EntryMissing, ShapeMismatch, DtypeMismatch: Before anything is read.
    """
    tensors = manifest.tensor_map()
    if missing := [leaf.name for leaf in wanted if leaf.name not in tensors]:
        raise EntryMissing(missing, manifest.step)
    table = _ChunkTable(manifest)
    for index, leaf in enumerate(wanted):
        tensor = tensors[leaf.name]
        _check(leaf, tensor)
        if not manifest.is_filled:
            _check_whole(leaf, tensor)
        for shard in tensor.shards:
            held = shard.box
            for piece, box in enumerate(leaf.boxes):
                whole = box == held  # The common case, thousands of times, needs no intersection
                if not (held.numel if whole else box.intersect(held)):
                    continue
                for chunk in table.chunks(shard, held, tensor.dtype):
                    if part := chunk.box if whole else chunk.box.intersect(box):
                        chunk.targets.append(Target(leaf=index, piece=piece, part=part))
    return RestorePlan(reads=table.wanted(), wanted_bytes=sum(leaf.nbytes for leaf in wanted))


def chunks_of(file: StoredFile, *, as_stored: bool = False) -> list[ChunkRead]:
    """Return all chunks of a file, as bytes.

    The box of each is its place in the bytes that are wanted: those of the image, or,
    ``as_stored``, those of the file. A file whose chunks the manifest leaves to its fragment has
    none.
    """
    found: list[ChunkRead] = []
    place = 0
    for index, chunk in enumerate(file.chunks):
        wanted = file.lengths[index] if as_stored else chunk.nbytes
        box = Box((place,), (wanted,))
        found.append(ChunkRead.of(file, index, dtype="uint8", box=box, as_stored=as_stored))
        place += wanted
    return found


def _check(leaf: Leaf, tensor: Tensor) -> None:
    if leaf.shape != tensor.shape:
        raise ShapeMismatch(leaf.name, tensor.shape, leaf.shape)
    if leaf.dtype != tensor.dtype:
        raise DtypeMismatch(leaf.name, tensor.dtype, leaf.dtype)


def _check_whole(leaf: Leaf, tensor: Tensor) -> None:
    """Check that the boxes that are read cover what is wanted exactly once. The manifest only
    proves that its boxes have the volume of the tensor.
    """
    for box in leaf.boxes:
        parts = [part for shard in tensor.shards if (part := box.intersect(shard.box))]
        if parts != [box] and (
            fault := tiling_fault(box.shape, [part.relative_to(box) for part in parts])
        ):
            raise ManifestCorrupt(leaf.name, fault)


@dataclass(frozen=True, slots=True)
class _Chunk:
    """A chunk of a tensor whose targets are being found."""

    file: StoredFile
    index: int
    dtype: str
    box: Box
    targets: list[Target]


class _ChunkTable:
    """Chunks of shards; remembered, because many boxes may want the same shard."""

    def __init__(self, manifest: Manifest) -> None:
        self._files = manifest.stored_files()
        self._known: dict[tuple[int, int], list[_Chunk]] = {}

    def chunks(self, shard: Shard, held: Box, dtype: str) -> list[_Chunk]:
        """Return the chunks of a shard that is not empty. ``held`` is its box."""
        key = (shard.rank, shard.offset)
        if key not in self._known:
            self._known[key] = self._build(shard, held, dtype)
        return self._known[key]

    def wanted(self) -> tuple[ChunkRead, ...]:
        """Return the reads of the chunks that have targets, in file order."""
        return tuple(
            ChunkRead.of(
                chunk.file, chunk.index, dtype=chunk.dtype, box=chunk.box, targets=chunk.targets
            )
            for _, chunks in sorted(self._known.items())
            for chunk in chunks
            if chunk.targets
        )

    def _build(self, shard: Shard, held: Box, dtype: str) -> list[_Chunk]:
        file = self._files[shard.rank]
        first = file.staged_index[shard.offset]
        boxes = split_rows(held, file.chunks[first].nbytes // DTYPES[dtype].itemsize)
        return [_Chunk(file, index, dtype, box, []) for index, box in enumerate(boxes, first)]
