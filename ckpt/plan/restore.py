"""Make the restore plan: the chunks that a rank must read, and the target regions that each chunk
fills.

A *leaf* is a tensor as one rank holds it, and a *box* is a region of a tensor. A *shard* is a
stored box, and its *chunks* are parts of its rows. A manifest knows the chunks of the ranks whose
*fragments* are filled in.

For every wanted box, the plan finds the stored shards that overlap it, the chunks of each shard
that overlap it, and the common box of each chunk and the wanted box. A chunk is always read as a
whole, since its checksum covers all of it. If the whole chunk is wanted and is contiguous in the
target, the pipeline can read or decode it directly into the target. ``coalesce`` plans few large
requests that serve the reads of many neighbouring chunks.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass, replace

from ckpt.errors import DtypeMismatch, EntryMissing, ManifestCorrupt, ShapeMismatch
from ckpt.model.box import Box, BoxIndex, split_rows, tiling_fault
from ckpt.model.dtype import DTYPES
from ckpt.model.manifest import Manifest, Shard, StoredFile, Tensor
from ckpt.plan.leaf import Leaf

ChunkId = tuple[int, int]
"""The identity of a chunk, which is the same on all tiers: the rank whose file it is in, and its
index in that file.
"""


@dataclass(frozen=True, slots=True, kw_only=True)
class Target:
    """A region that a part of a chunk fills.

    Attributes:
        leaf: The index of the leaf in the argument ``leaves`` of ``plan_restore``.
        piece: The index of the box among the boxes of the leaf.
        part: The region, as a box of the global tensor.
    """

    leaf: int
    piece: int
    part: Box


@dataclass(frozen=True, slots=True, kw_only=True)
class ChunkRead:
    """The read of one chunk.

    Attributes:
        rank: The rank whose file holds the chunk.
        index: The index of the chunk in the file.
        offset: The position of the chunk in the file in bytes.
        nbytes: The size of the chunk in bytes, before any encoding.
        checksum: The checksum of the bytes before any encoding.
        dtype: The dtype of the chunk's tensor.
        box: The region of the global tensor that the chunk holds.
        targets: The regions that the chunk fills.
        encoded_nbytes: The size of the chunk in the file if the chunk is encoded, else None.
        as_stored: Whether the reader wants the bytes as they are in the file, without decoding.
        in_base: Whether the chunk is in the file of another step (see ``StoredFile.base``).
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
    in_base: bool = False

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
        """Return the read of the chunk with ``index`` in ``file``."""
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
            in_base=index in file.base_chunks,
        )

    def from_file(self, file: StoredFile, index: int, *, as_stored: bool = False) -> ChunkRead:
        """Return a read of the chunk with ``index`` in ``file``, which must be equal to the chunk
        of this read. The result has the targets of this read.
        """
        return replace(
            self,
            rank=file.rank,
            index=index,
            offset=file.offsets[index],
            encoded_nbytes=file.encoded_nbytes(index),
            as_stored=as_stored,
            in_base=index in file.base_chunks,
        )

    @property
    def chunk_id(self) -> ChunkId:
        return self.rank, self.index

    @property
    def stored_nbytes(self) -> int:
        return self.nbytes if self.encoded_nbytes is None else self.encoded_nbytes

    @property
    def needs_decoding(self) -> bool:
        """Return True if the chunk must be decoded after it is read."""
        return self.encoded_nbytes is not None and not self.as_stored


@dataclass(frozen=True, slots=True, kw_only=True)
class RestorePlan:
    """The chunks that a rank reads, in file order.

    ``wanted_bytes`` is the size of all targets together. ``read_bytes`` is the number of bytes that
    the rank reads from the store, which holds encoded chunks if the tier has a codec.
    """

    reads: tuple[ChunkRead, ...]
    wanted_bytes: int

    @property
    def read_bytes(self) -> int:
        return sum(read.stored_nbytes for read in self.reads)


def plan_restore(manifest: Manifest, leaves: Sequence[Leaf]) -> RestorePlan:
    """Return the restore plan for ``leaves``.

    A leaf may have a tied name, which is a further name of a stored tensor.

    Raises:
        EntryMissing: The manifest lacks a name.
        ShapeMismatch: A leaf and the stored tensor differ in shape.
        DtypeMismatch: A leaf and the stored tensor differ in dtype.
        ManifestCorrupt: The stored boxes do not cover a wanted box exactly once.
    """
    tensors = manifest.tensor_map()
    if missing := [leaf.name for leaf in leaves if leaf.name not in tensors]:
        raise EntryMissing(missing, manifest.step, present=tensors)
    table = _ChunkTable(manifest)
    for index, leaf in enumerate(leaves):
        tensor = tensors[leaf.name]
        _check_shape_and_dtype(leaf, tensor)
        shard_boxes = [shard.box for shard in tensor.shards]
        box_index = BoxIndex(shard_boxes)
        if not manifest.is_filled:  # Some fragments are not filled in
            _check_coverage(leaf, shard_boxes, box_index)
        for piece, box in enumerate(leaf.boxes):
            for position in box_index.search(box):
                shard_box = shard_boxes[position]
                is_same_box = box == shard_box  # This common case needs no intersection
                for chunk in table.chunks(tensor.shards[position], shard_box, tensor.dtype):
                    if part := chunk.box if is_same_box else chunk.box.intersect(box):
                        chunk.targets.append(Target(leaf=index, piece=piece, part=part))
    return RestorePlan(reads=table.reads(), wanted_bytes=sum(leaf.nbytes for leaf in leaves))


def chunks_of(file: StoredFile, *, as_stored: bool = False) -> list[ChunkRead]:
    """Return reads of all chunks of a file, as chunks of a 1-D tensor of bytes.

    The tensor is the image, or with ``as_stored`` the file as the tier stores it. The result is
    empty if ``file`` comes from a manifest that does not have the fragment of its rank filled in.
    """
    reads: list[ChunkRead] = []
    position = 0
    for index, chunk in enumerate(file.chunks):
        nbytes = file.lengths[index] if as_stored else chunk.nbytes
        box = Box((position,), (nbytes,))
        reads.append(ChunkRead.of(file, index, dtype="uint8", box=box, as_stored=as_stored))
        position += nbytes
    return reads


def _check_shape_and_dtype(leaf: Leaf, tensor: Tensor) -> None:
    if leaf.shape != tensor.shape:
        raise ShapeMismatch(leaf.name, tensor.shape, leaf.shape)
    if leaf.dtype != tensor.dtype:
        raise DtypeMismatch(leaf.name, tensor.dtype, leaf.dtype)


def _check_coverage(leaf: Leaf, shard_boxes: Sequence[Box], index: BoxIndex) -> None:
    """Raise ``ManifestCorrupt`` unless the stored boxes cover each box of ``leaf`` exactly once.
    ``index`` finds those of ``shard_boxes`` that overlap a box.

    If only some fragments are filled in, the earlier checks of the manifest prove only that the
    volumes of all boxes of the tensor add up to the volume of the tensor.
    """
    for box in leaf.boxes:
        parts = [
            part for position in index.search(box) if (part := box.intersect(shard_boxes[position]))
        ]
        if parts != [box] and (
            fault := tiling_fault(box.shape, [part.relative_to(box) for part in parts])
        ):
            raise ManifestCorrupt(leaf.name, fault)


@dataclass(frozen=True, slots=True)
class _Chunk:
    """A chunk of a tensor, with the list of its targets, which ``plan_restore`` extends."""

    file: StoredFile
    index: int
    dtype: str
    box: Box
    targets: list[Target]


class _ChunkTable:
    """The chunks of the shards, each computed once, since many wanted boxes may overlap a shard."""

    def __init__(self, manifest: Manifest) -> None:
        self._files = manifest.stored_files()
        self._chunks: dict[tuple[int, int], list[_Chunk]] = {}

    def chunks(self, shard: Shard, shard_box: Box, dtype: str) -> list[_Chunk]:
        """Return the chunks of a shard that has elements.

        ``shard_box`` is the box of the shard, and ``dtype`` is the dtype of its tensor.
        """
        key = (shard.rank, shard.offset)
        if key not in self._chunks:
            self._chunks[key] = self._build(shard, shard_box, dtype)
        return self._chunks[key]

    def reads(self) -> tuple[ChunkRead, ...]:
        """Return the reads of the chunks that have targets, in file order."""
        return tuple(
            ChunkRead.of(
                chunk.file, chunk.index, dtype=chunk.dtype, box=chunk.box, targets=chunk.targets
            )
            for _, chunks in sorted(self._chunks.items())
            for chunk in chunks
            if chunk.targets
        )

    def _build(self, shard: Shard, shard_box: Box, dtype: str) -> list[_Chunk]:
        """Return what ``chunks`` returns. The length of the first chunk says how the box is cut."""
        file = self._files[shard.rank]
        first_chunk = file.staged_index[shard.offset]  # The index of the chunk that begins there
        boxes = split_rows(shard_box, file.chunks[first_chunk].nbytes // DTYPES[dtype].itemsize)
        return [_Chunk(file, index, dtype, box, []) for index, box in enumerate(boxes, first_chunk)]


@dataclass(frozen=True, slots=True, kw_only=True)
class Run:
    """One request to a store: read ``nbytes`` bytes of the file of ``rank``, from ``offset`` on.

    ``reads`` are the chunk reads that the request serves, in file order. ``in_base`` is that of all
    of them.
    """

    rank: int
    offset: int
    nbytes: int
    reads: tuple[ChunkRead, ...]
    in_base: bool = False


def coalesce(reads: Iterable[ChunkRead], *, most_bytes: int, gap_bytes: int) -> list[Run]:
    """Return runs that together serve all of ``reads``, in file order. A *run* is one request to a
    store, for the chunks of neighbouring reads.

    Args:
        reads: The reads in file order.
        most_bytes: The largest size of a run in bytes. A single larger read is a run of its own.
        gap_bytes: The largest gap in bytes between two reads of a run in their file. The run
            includes the bytes of the gap.
    """
    runs: list[Run] = []
    pending: list[ChunkRead] = []
    for read in reads:
        if pending:
            last = pending[-1]
            is_near = (
                read.rank == last.rank
                and read.in_base == last.in_base
                and 0 <= read.offset - (last.offset + last.stored_nbytes) <= gap_bytes
            )
            if not is_near or read.offset + read.stored_nbytes - pending[0].offset > most_bytes:
                runs.append(_run_of(pending))
                pending = []
        pending.append(read)
    if pending:
        runs.append(_run_of(pending))
    return runs


def _run_of(reads: list[ChunkRead]) -> Run:
    """Return the run that serves ``reads``, which are neighbours in their file."""
    head, last = reads[0], reads[-1]
    return Run(
        rank=head.rank,
        offset=head.offset,
        nbytes=last.offset + last.stored_nbytes - head.offset,
        reads=tuple(reads),
        in_base=head.in_base,
    )
