"""What a checkpoint is: files made of chunks, tensors made of shards, and a tree of plain values.

Two layers that know little of each other. *Files* are runs of bytes: every byte of a file lies in exactly one chunk, and a chunk has a
checksum; so whoever holds the chunk table can verify a file without knowing what is in it. *Tensors* are boxes that lie at byte offsets of files, row-major. A shard's
bytes are whole chunks, cut by ``split_rows``: each chunk of a shard is itself a box.

Encoded as JSON arrays in field order (``array_like``), because a manifest may hold a million of them; which is also why the garbage collector is told to pass them by (``gc=False``: no cycles).
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from itertools import accumulate

import msgspec

from ckpt.model.box import Box
from ckpt.model.dtype import DTYPES
from ckpt.model.runs import Runs

FORMAT = 1
ENCODED_FORMAT = 2
"""Written only where a file is encoded: readers of version 1 can read all else."""
REFERENCE_FORMAT = 3
"""The newest that is understood. Written by worlds of at least ``REFERENCE_FROM`` ranks: their manifest leaves to the fragments what only some rank needs."""
REFERENCE_FROM = 16
"""Ranks. A smaller world's manifest is read faster with everything in it than with one more request for each fragment."""
HEADER_ALIGNMENT = 4096


class Chunk(msgspec.Struct, frozen=True, array_like=True, gc=False):
    """The next ``nbytes`` of a file."""

    nbytes: int
    checksum: str


class File(msgspec.Struct, frozen=True, array_like=True, gc=False):
    """A data file of one rank. Chunks follow each other from byte 0 to ``size``; the first is the safetensors header."""

    name: str
    rank: int
    size: int
    chunks: tuple[Chunk, ...]


class Encoding(msgspec.Struct, frozen=True, array_like=True, gc=False):
    """How the file of ``rank`` lies on its tier: its chunks encoded, back to back. ``lengths`` in bytes, one for each chunk; a chunk as long as it was is not encoded."""

    rank: int
    codec: str
    lengths: tuple[int, ...]

    @property
    def size(self) -> int:
        """Bytes of the file on its tier."""
        return sum(self.lengths)


class FragmentRef(msgspec.Struct, frozen=True, array_like=True, gc=False):
    """A fragment's file, so that damage to it is found too."""

    name: str
    rank: int
    size: int
    checksum: str


class Shard(msgspec.Struct, frozen=True, array_like=True, gc=False):
    """One box, stored once: ``offset`` bytes into the file of ``rank``."""

    rank: int
    offset: int
    offsets: tuple[int, ...]
    shape: tuple[int, ...]

    @property
    def box(self) -> Box:
        return Box(self.offsets, self.shape)


class Tensor(msgspec.Struct, frozen=True, array_like=True, gc=False):
    """A global tensor. ``shape`` is the whole tensor's."""

    name: str
    dtype: str
    shape: tuple[int, ...]
    shards: tuple[Shard, ...]

    @property
    def nbytes(self) -> int:
        return math.prod(self.shape) * DTYPES[self.dtype].itemsize


class Fragment(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True, omit_defaults=True):
    """What one rank has made durable on a tier. ``created_at`` in seconds since 1970; ``encoded`` only where its file is."""

    format: int
    step: int
    attempt: str
    rank: int
    world_size: int
    created_at: float
    chunk_bytes: int
    file: File | None
    tensors: tuple[Tensor, ...]
    tied: dict[str, str]
    tree: msgspec.Raw
    per_rank: msgspec.Raw
    replicas: dict[str, str]
    metadata: msgspec.Raw
    encoded: tuple[Encoding, ...] = ()


class Manifest(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True, omit_defaults=True):
    """The merged fragments: the truth of a checkpoint. It exists if and only if the checkpoint does.

    One that is ``by_reference`` lacks what is in the fragments, for ranks whose fragments have not been filled in (``model.reference``): files have no chunks, an encoding one length,
    which is that of the file, tensors no shards, and the ``PerRank`` values are not there.

    Attributes:
        tied: name -> the name its bytes are stored under.
        tree: Plain values and the shape of containers (see ``model.values``).
        per_rank: rank -> the tree of its ``PerRank`` values.
        encoded: Of the files that do not lie there as they were staged.
        layouts: By reference only: what ranks hold of a tensor, as runs; each once, however many tensors lie alike.
        layout_of: By reference only: for each tensor the index of its layout.
    """

    format: int
    step: int
    attempt: str
    world_size: int
    created_at: float
    chunk_bytes: int
    files: tuple[File, ...]
    fragments: tuple[FragmentRef, ...]
    tensors: tuple[Tensor, ...]
    tied: dict[str, str]
    tree: msgspec.Raw
    per_rank: Mapping[str, msgspec.Raw]
    metadata: msgspec.Raw
    encoded: tuple[Encoding, ...] = ()
    by_reference: bool = False
    layouts: tuple[Runs, ...] = ()
    layout_of: tuple[int, ...] = ()

    @property
    def nbytes(self) -> int:
        """Bytes of all data files, as they were staged."""
        return sum(file.size for file in self.files)

    @property
    def stored_bytes(self) -> int:
        """Bytes of all data files, as they lie there."""
        encoded = self.encodings()
        return sum(stored_size(file, encoded.get(file.rank)) for file in self.files)

    @property
    def codecs(self) -> tuple[str, ...]:
        """What its files were encoded with."""
        return tuple(sorted({encoding.codec for encoding in self.encoded}))

    def encodings(self) -> Mapping[int, Encoding]:
        """The encoding of each rank's file that has one."""
        return {encoding.rank: encoding for encoding in self.encoded}

    def tensor_map(self) -> Mapping[str, Tensor]:
        """Tensors by name, tied names included."""
        found = {tensor.name: tensor for tensor in self.tensors}
        return found | {name: found[target] for name, target in self.tied.items()}

    def file_map(self) -> Mapping[int, File]:
        """Data files by rank."""
        return {file.rank: file for file in self.files}


def chunk_offsets(file: File) -> Sequence[int]:
    """Where each chunk of a file begins, in bytes, and the end of the last."""
    return list(accumulate((chunk.nbytes for chunk in file.chunks), initial=0))


def stored_size(file: File, encoding: Encoding | None) -> int:
    """Bytes of a file on its tier."""
    return file.size if encoding is None else encoding.size


def stored_lengths(file: File, encoding: Encoding | None) -> Sequence[int]:
    """Bytes of each chunk on the file's tier."""
    return [chunk.nbytes for chunk in file.chunks] if encoding is None else encoding.lengths
