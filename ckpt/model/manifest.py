"""What a checkpoint is: files made of chunks, tensors made of shards, and a tree of plain values.

Two layers know little of each other. *Files* are runs of bytes: every byte of a file is in exactly
one chunk, and a chunk has a checksum, so a reader with the chunk table can verify a file without
knowing what is in it. *Tensors* are boxes at byte offsets of files, row-major. A shard's bytes are
whole chunks, cut by ``split_rows``: each chunk of a shard is itself a box.

Two records are stored: the fragment of each rank (`Packed`), which has the rank's chunks and shards
in columns, and the `Manifest`, which refers to the fragments. `Fragment` is a fragment with its
columns unpacked to objects, and a manifest can be filled with fragments (``model.fill``).

The small structs are JSON arrays in field order (``array_like``), because a record may hold a
million of them. The garbage collector skips them (``gc=False``): they have no cycles.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property
from itertools import accumulate

import msgspec

from ckpt.model.box import Box
from ckpt.model.dtype import DTYPES
from ckpt.model.keys import StepRef
from ckpt.model.runs import Runs

FORMAT = 4
"""The only format that this package writes and reads. Earlier ones were never released."""
HEADER_ALIGNMENT = 4096


class Chunk(msgspec.Struct, frozen=True, array_like=True, gc=False):
    """The next ``nbytes`` of a file."""

    nbytes: int
    checksum: str


class File(msgspec.Struct, frozen=True, array_like=True, gc=False):
    """A data file of one rank.

    Chunks follow each other from byte 0 to ``size``; the first is the safetensors header.
    """

    name: str
    rank: int
    size: int
    chunks: tuple[Chunk, ...]


class Encoding(msgspec.Struct, frozen=True, array_like=True, gc=False):
    """How the file of ``rank`` is stored on its tier: its chunks are encoded, one after another.

    ``lengths`` has the bytes of each chunk. A chunk that is as long as before is not encoded.
    """

    rank: int
    codec: str
    lengths: tuple[int, ...]

    @property
    def size(self) -> int:
        """Bytes of the file on its tier."""
        return sum(self.lengths)


class FragmentRef(msgspec.Struct, frozen=True, array_like=True, gc=False):
    """The name, size and checksum of a fragment's file, by which damage to it is found."""

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
    """A global tensor. ``shape`` is that of the whole tensor."""

    name: str
    dtype: str
    shape: tuple[int, ...]
    shards: tuple[Shard, ...]

    @property
    def nbytes(self) -> int:
        return math.prod(self.shape) * DTYPES[self.dtype].itemsize


class Packed(
    msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True, omit_defaults=True
):
    """The stored form of a fragment: what one rank has made durable on a tier, in columns.

    Frames are zstd frames, and numbers in columns are little-endian 64-bit integers.

    Attributes:
        created_at: In seconds since 1970.
        file: The data file, without its chunks.
        form: A frame of a ``model.packed.Form``: names, shapes, places in the file, chunk lengths.
        offsets: A frame: for each shard of the form its offsets in the global tensor, as many
            numbers as the form has dimensions.
        checksums: 16 bytes for each chunk.
        replicas: A frame of the JSON object, or empty if there are none.
        encoded: One length, which is that of the file. Empty if the file is not encoded.
        lengths: If the file is encoded: for each chunk its length in the file.
        in_manifest: The manifest has a copy of this fragment, because the file may be lost with
            its node.
    """

    format: int
    step: int
    attempt: str
    rank: int
    world_size: int
    created_at: float
    chunk_bytes: int
    file: File | None
    form: bytes
    offsets: bytes
    checksums: bytes
    tied: dict[str, str]
    tree: msgspec.Raw
    per_rank: msgspec.Raw
    replicas: bytes
    metadata: msgspec.Raw
    encoded: tuple[Encoding, ...] = ()
    lengths: bytes = b""
    in_manifest: bool = False


class Fragment(msgspec.Struct, frozen=True, kw_only=True):
    """A fragment with its columns unpacked to objects. It is never stored; see `Packed`."""

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
    in_manifest: bool = False


class Manifest(
    msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True, omit_defaults=True
):
    """The merged fragments: the truth of a checkpoint.

    It exists if and only if the checkpoint does.

    The stored manifest leaves to the fragments what only some rank needs: its files have no chunks,
    an encoding has one length (that of the file), tensors have no shards, and ``per_rank`` is
    empty. ``model.fill.fill`` puts these parts in, for some ranks or for all.

    Attributes:
        tied: name -> the name its bytes are stored under.
        tree: Plain values and the shape of containers (see ``model.values``).
        encoded: Of the files that are encoded on this tier.
        layouts: Which rank holds which box of a tensor, as runs. Tensors that are cut alike share
            one layout.
        layout_of: For each tensor the index of its layout.
        carried: The fragments of all ranks, without what is merged, if they are ``in_manifest``.
        per_rank: rank -> the tree of its ``PerRank`` values. Only of ranks that are filled in.
        is_filled: Whether the fragments of all ranks are filled in. Never stored.
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
    metadata: msgspec.Raw
    layouts: tuple[Runs, ...]
    layout_of: tuple[int, ...]
    encoded: tuple[Encoding, ...] = ()
    carried: tuple[Packed, ...] = ()
    per_rank: Mapping[str, msgspec.Raw] = {}
    is_filled: bool = False

    @property
    def nbytes(self) -> int:
        """Bytes of all data files as they were staged."""
        return sum(file.size for file in self.files)

    @property
    def stored_bytes(self) -> int:
        """Bytes of all data files as they are stored."""
        return sum(stored.size for stored in self.stored_files().values())

    @property
    def codecs(self) -> tuple[str, ...]:
        """What its files were encoded with."""
        return tuple(sorted({encoding.codec for encoding in self.encoded}))

    def stored_files(self) -> Mapping[int, StoredFile]:
        """Return the data files by rank, as they are on the tier of this manifest."""
        ref = StepRef(self.step, self.attempt)
        encodings = {encoding.rank: encoding for encoding in self.encoded}
        return {
            file.rank: StoredFile.of(ref, file, encodings.get(file.rank)) for file in self.files
        }

    def tensor_map(self) -> Mapping[str, Tensor]:
        """Return the tensors by name, with tied names."""
        found = {tensor.name: tensor for tensor in self.tensors}
        return found | {name: found[target] for name, target in self.tied.items()}

    def file_map(self) -> Mapping[int, File]:
        """Return the data files by rank."""
        return {file.rank: file for file in self.files}


@dataclass(frozen=True)
class StoredFile:
    """A data file as one tier stores it. A chunk is named by its index in the file, which is the
    same on all tiers.

    Attributes:
        ref: The step.
        file: The file as it was staged.
        encoding: How the chunks are encoded on the tier; None if they are not.
        size: Bytes of the file on the tier.
    """

    ref: StepRef
    file: File
    encoding: Encoding | None
    size: int

    @classmethod
    def of(cls, ref: StepRef, file: File, encoding: Encoding | None) -> StoredFile:
        """Return the file with the size that a manifest says."""
        return cls(ref, file, encoding, file.size if encoding is None else encoding.size)

    @property
    def rank(self) -> int:
        return self.file.rank

    @property
    def chunks(self) -> Sequence[Chunk]:
        return self.file.chunks

    @property
    def key(self) -> str:
        return self.ref.key(self.file.name)

    @property
    def codec(self) -> str | None:
        return self.encoding.codec if self.encoding else None

    @cached_property
    def lengths(self) -> Sequence[int]:
        """Return the bytes of each chunk on the tier."""
        return self.encoding.lengths if self.encoding else [chunk.nbytes for chunk in self.chunks]

    @cached_property
    def offsets(self) -> Sequence[int]:
        """Return where each chunk begins on the tier, and the end of the last."""
        return list(accumulate(self.lengths, initial=0))

    @cached_property
    def staged_index(self) -> Mapping[int, int]:
        """Return the index of the chunk that begins at an offset of the image."""
        return {offset: index for index, offset in enumerate(chunk_offsets(self.file))}

    def encoded_nbytes(self, index: int) -> int | None:
        """Return the bytes of a chunk on the tier, or None if it is not encoded."""
        length = self.lengths[index]
        return length if length < self.chunks[index].nbytes else None


def chunk_offsets(file: File) -> Sequence[int]:
    """Return where each chunk of a file begins in the image, and the end of the last."""
    return list(accumulate((chunk.nbytes for chunk in file.chunks), initial=0))
