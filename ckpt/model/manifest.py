"""The records that describe a checkpoint: files made of chunks, tensors made of shards, and a tree
of plain values.

Files and tensors are two separate layers. A *file* is a sequence of bytes. Every byte of a file is
in exactly one chunk, and each chunk has a checksum. A reader with the chunk table can therefore
verify a file without its tensors. A *tensor* consists of shards, and each shard is a box whose
bytes are stored in row-major order from a given offset of a file on. The bytes of a shard are whole
chunks, which ``split_rows`` cuts, so each chunk of a shard is itself a box.

Two records are stored. `Packed` is the fragment of one rank, with the rank's chunks and shards in
columns. `Manifest` refers to the fragments of all ranks. In memory, `Fragment` is a fragment with
its columns unpacked to objects, and ``model.fill_manifest`` puts the contents of fragments into a
manifest.

The small structs are JSON arrays in field order (``array_like``), because a record may hold a
million of them. They contain no reference cycles, so the garbage collector skips them
(``gc=False``).

The *image* of a rank is the content of its file before any encoding. An *increment* is a data file
without the first chunks of its image, which the file of an older step, its *base*, has too. An
*adopted* step consists of files of another program. A *tied* name is one more name of a tensor.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import cached_property
from itertools import accumulate

import msgspec

from ckpt.model.box import Box
from ckpt.model.box_layouts import Runs
from ckpt.model.dtype import DTYPES
from ckpt.model.keys import BaseRef, StepRef, parse_base
from ckpt.model.views import View

FORMAT = 4
"""The version of the format. This package reads and writes no other version, and no earlier version
was ever released.
"""
HEADER_ALIGNMENT = 4096
FILE_SPACE = 1 << 48
"""The distance of two files of an `AdoptedBase` in its positions, in bytes."""


class Chunk(msgspec.Struct, frozen=True, array_like=True, gc=False):
    """A chunk of a file, which begins where the chunk before it ends."""

    nbytes: int
    checksum: str


class File(msgspec.Struct, frozen=True, array_like=True, gc=False):
    """The data file of one rank, as it is in the rank's image, before any encoding.

    The chunks follow each other from byte 0 to ``size``. The first chunk is the safetensors header.
    """

    name: str
    rank: int
    size: int
    chunks: tuple[Chunk, ...]


class Encoding(msgspec.Struct, frozen=True, array_like=True, gc=False):
    """The encoding of the data file of ``rank`` on one tier, where each chunk is encoded by itself.

    ``lengths`` has the size of each chunk on the tier in bytes. A chunk is stored unencoded if this
    is the size of the raw chunk. In a stored manifest or fragment, ``lengths`` has one item only,
    the size of the file.
    """

    rank: int
    codec: str
    lengths: tuple[int, ...]

    @property
    def size(self) -> int:
        """Return the bytes of the file on its tier."""
        return sum(self.lengths)


class Location(msgspec.Struct, frozen=True, array_like=True, gc=False):
    """The place of the data file of ``rank`` if it is a file of another program, outside of the
    folder of the step.

    ``path`` is absolute, or relative to the root of the checkpoints if this is a folder.
    """

    rank: int
    path: str


class AdoptedFile(msgspec.Struct, frozen=True, array_like=True, gc=False):
    """A file of another program, by its location in the manifest of an adopted step."""

    path: str
    size: int


class AdoptedBase(msgspec.Struct, frozen=True, array_like=True, gc=False):
    """The places of the chunks that an increment leaves out, if its base is an adopted step.

    Attributes:
        files: The files of the base that have such chunks.
        positions: The position of each of these chunks: its offset in its file, plus the index of
            the file times ``FILE_SPACE``. Stored records leave them out (see ``Packed.positions``).
    """

    files: tuple[AdoptedFile, ...]
    positions: tuple[int, ...] = ()

    @property
    def end(self) -> int:
        """Return the position of the end of the last file."""
        return (len(self.files) - 1) * FILE_SPACE + self.files[-1].size

    def file_at(self, position: int) -> tuple[AdoptedFile, int]:
        """Return the file that a position is in, and the offset in this file."""
        index, offset = divmod(position, FILE_SPACE)
        return self.files[index], offset


class Increment(msgspec.Struct, frozen=True, array_like=True, gc=False):
    """A data file that holds only the end of the image of ``rank``. The chunks before it are equal
    to those of an older step of the same job, or of a step in another root, and are in the data
    file of that step.

    Attributes:
        base: The folder of the other step on the same tier, or the path to it (see ``BaseRef``).
            Its data file of ``rank`` is whole.
        base_size: The size of the other data file on its tier in bytes; of an adopted base,
            ``AdoptedBase.end``.
        count: How many chunks, from the begin of the image on, are in the other file, at the same
            place. In another root they follow its first chunk, and the first chunk of the image,
            its header, is in this file.
        lead: The size in bytes of what the file holds before its own chunks: a safetensors header,
            which is no chunk of the image and which an encoded file lacks, and after it the first
            chunk of the image if the base is in another root.
        checksum: The checksum of these bytes; empty if there are none or the file is encoded.
        size: The size of the file on the tier in bytes.
        base_lead: The size of the first chunk of the other file on its tier in bytes, if the base
            is in another root and was not adopted; else 0.
        adoption: The places of the chunks if the other step was adopted; else None.
    """

    rank: int
    base: str
    base_size: int
    count: int
    lead: int
    checksum: str
    size: int
    base_lead: int = 0
    adoption: AdoptedBase | None = None

    @property
    def has_image_header(self) -> bool:
        """Return True if the file has the first chunk of the image, since its base is in another
        root.
        """
        return self.base_lead > 0 or self.adoption is not None

    def without_positions(self) -> Increment:
        """Return the increment as records store it, without the positions of the chunks."""
        adoption = self.adoption and AdoptedBase(self.adoption.files)
        return msgspec.structs.replace(self, adoption=adoption)


def bases_of(increments: Iterable[Increment]) -> frozenset[BaseRef]:
    """Return the steps that increments refer to."""
    bases = (parse_base(name) for name in {increment.base for increment in increments})
    return frozenset(base for base in bases if base is not None)


def refs_in_same_root(bases: Iterable[BaseRef]) -> frozenset[StepRef]:
    """Return those of ``bases`` that are steps of the same root as the increments."""
    return frozenset(base.ref for base in bases if not base.root)


class FragmentRef(msgspec.Struct, frozen=True, array_like=True, gc=False):
    """A reference to the file of a fragment. A reader of the file compares its size and checksum
    with the reference to detect damage.
    """

    name: str
    rank: int
    size: int
    checksum: str


class Shard(msgspec.Struct, frozen=True, array_like=True, gc=False):
    """One box of a tensor, stored from byte ``offset`` of the file of ``rank`` on.

    ``offsets`` and ``shape`` are those of the box.
    """

    rank: int
    offset: int
    offsets: tuple[int, ...]
    shape: tuple[int, ...]

    @property
    def box(self) -> Box:
        return Box(self.offsets, self.shape)


class Tensor(msgspec.Struct, frozen=True, array_like=True, gc=False):
    """A global tensor.

    Attributes:
        shape: The shape of the whole tensor, not of one shard.
        order: The dimensions in the order in which the tensor had them in memory when it was saved,
            from the largest stride to the smallest; empty if it was row-major. A restore that makes
            the tensor uses the same order. The stored bytes are row-major in any case.
    """

    name: str
    dtype: str
    shape: tuple[int, ...]
    shards: tuple[Shard, ...]
    order: tuple[int, ...] = ()

    @property
    def nbytes(self) -> int:
        return math.prod(self.shape) * DTYPES[self.dtype].itemsize


class Packed(
    msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True, omit_defaults=True
):
    """A fragment as it is stored, with its chunks and shards in columns.

    A *column* is an array of little-endian 64-bit integers. A *frame* is a zstd frame.

    Attributes:
        created_at: The time of creation, in seconds since 1970.
        file: The data file, without its chunks; None if the rank has written no file.
        chunk_bytes: The most bytes of a chunk.
        form: A frame with a ``model.fragment_columns.Form``: the names and shapes of the tensors,
            the shards and their positions in the file, and the chunk lengths.
        offsets: A frame with a column of ``Form.dims`` numbers for each shard of the form, which
            are the offsets of the shard's box.
        checksums: The checksums of the chunks, 16 bytes each.
        tied: Tied names, each with the name that its bytes are stored under.
        views: The tensors that shared the memory of others, each with its place in a buffer.
        tree: The plain values and the containers of the state (see ``model.values``).
        per_rank: The tree of the ``PerRank`` values of this rank.
        replicas: A frame with the JSON of ``Fragment.replicas``; empty if the rank has no
            replicated tensors.
        metadata: The metadata of the step, as the JSON of plain values.
        encoded: One entry with one length, the size of the encoded file. It is empty if the file is
            not encoded.
        increments: One entry if the file is an increment; otherwise empty.
        lengths: A column with the length of each chunk in the encoded file. It is empty if the file
            is not encoded.
        positions: A column with ``AdoptedBase.positions``; empty unless the file is an increment of
            an adopted step.
        in_manifest: Whether the manifest must carry a copy of this fragment, because the file of
            the fragment may be lost with its node.
        locations: One entry if the data file is a file of another program; else empty.
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
    increments: tuple[Increment, ...] = ()
    lengths: bytes = b""
    positions: bytes = b""
    in_manifest: bool = False
    views: dict[str, View] = {}
    locations: tuple[Location, ...] = ()


class Fragment(msgspec.Struct, frozen=True, kw_only=True):
    """A fragment with its columns unpacked to objects. `Packed` is the fragment as it is stored.

    Attributes:
        replicas: The digests of replicated tensors, by name, each as the text ``boxes=digest``. The
            merge compares them with those of other ranks.
    """

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
    increments: tuple[Increment, ...] = ()
    in_manifest: bool = False
    views: dict[str, View] = {}
    locations: tuple[Location, ...] = ()


class Manifest(
    msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True, omit_defaults=True
):
    """The description of a whole checkpoint, merged from the fragments of all ranks.

    A step is a checkpoint if and only if its manifest exists.

    The stored manifest leaves out the parts of the fragments that not every rank needs. Files have
    no chunks, an encoding has one length (the size of the file), tensors have no shards, and
    ``per_rank`` is empty. ``model.fill_manifest`` adds these parts for the ranks whose fragments it
    gets.

    Attributes:
        tied: Tied names, each with the name that its bytes are stored under.
        views: The tensors that shared the memory of others, each with its place in a buffer.
        tree: The plain values and the containers of the state (see ``model.values``).
        encoded: The encodings of the files that are encoded on this tier.
        locations: The places of the data files that are files of other programs.
        increments: The files that hold only the end of their images on this tier.
        layouts: The layouts of the tensors. A layout states which rank holds which box, as runs
            (see ``model.box_layouts``). Tensors that are cut alike share one layout.
        layout_of: The index of the layout of each tensor.
        carried: Copies of the fragments of all ranks, without the parts that are merged. It is
            empty unless a fragment has ``in_manifest`` set.
        per_rank: The trees of ``PerRank`` values by rank, for the ranks whose fragments
            ``model.fill_manifest`` has added.
        is_filled: Whether ``model.fill_manifest`` has added the fragments of all ranks. Never
            stored.
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
    increments: tuple[Increment, ...] = ()
    carried: tuple[Packed, ...] = ()
    views: dict[str, View] = {}
    locations: tuple[Location, ...] = ()
    per_rank: Mapping[str, msgspec.Raw] = {}
    is_filled: bool = False

    @property
    def nbytes(self) -> int:
        """Return the bytes of all data files together, before any encoding."""
        return sum(file.size for file in self.files)

    @property
    def stored_bytes(self) -> int:
        """Return the bytes of all data files together, as they are stored on the tier. Bytes that
        are in the files of older steps do not count.
        """
        return sum(file.size for file in self.stored_files().values())

    @property
    def bases(self) -> frozenset[StepRef]:
        """Return the older steps of the same root whose files hold a part of the images."""
        return refs_in_same_root(bases_of(self.increments))

    @property
    def codecs(self) -> tuple[str, ...]:
        """Return the names of the codecs of all encoded files, sorted."""
        return tuple(sorted({encoding.codec for encoding in self.encoded}))

    def stored_files(self) -> Mapping[int, StoredFile]:
        """Return each data file as the tier of this manifest stores it, by rank."""
        ref = StepRef(self.step, self.attempt)
        encodings = {encoding.rank: encoding for encoding in self.encoded}
        increments = {increment.rank: increment for increment in self.increments}
        files = {
            file.rank: StoredFile.of(ref, file, encodings.get(file.rank), increments.get(file.rank))
            for file in self.files
        }
        for location in self.locations:
            files[location.rank] = replace(files[location.rank], location=location.path)
        return files

    def tensor_map(self) -> Mapping[str, Tensor]:
        """Return the tensors by name. Tied names are included."""
        tensors = {tensor.name: tensor for tensor in self.tensors}
        return tensors | {name: tensors[target] for name, target in self.tied.items()}

    def file_map(self) -> Mapping[int, File]:
        """Return the data files by rank."""
        return {file.rank: file for file in self.files}


@dataclass(frozen=True)
class StoredFile:
    """A data file as one tier stores it. A chunk of the file has the same index on all tiers.

    If the file is an increment, the chunks before its own ones are in ``base``.

    Attributes:
        ref: The attempt that the file belongs to.
        file: The file before any encoding.
        encoding: The encoding of the file on the tier; None if it is not encoded.
        size: The bytes of the file on the tier.
        location: The path of the file if it is a file of another program (see ``Location``); else
            empty. It is also the key of the file, for a store of locations.
        increment: The entry of the manifest if the file is an increment; otherwise None.
        base_chunks: The indices of the chunks that are in ``base``.
        root: The path to the root that has the file, relative to that of its manifest (see
            ``BaseRef``); empty if it is the same root.
        adoption: The files of other programs that stand for the file, if it is the base of an
            increment and was adopted; else None.
    """

    ref: StepRef
    file: File
    encoding: Encoding | None
    size: int
    location: str = ""
    increment: Increment | None = None
    base_chunks: range = range(0)
    root: str = ""
    adoption: AdoptedBase | None = None

    @classmethod
    def of(
        cls, ref: StepRef, file: File, encoding: Encoding | None, increment: Increment | None = None
    ) -> StoredFile:
        """Return a stored file with the size that its manifest states: that of ``increment`` or of
        ``encoding``, or of ``file`` if both are None.
        """
        whole_size = file.size if encoding is None else encoding.size
        if increment is None:
            return cls(ref, file, encoding, whole_size)
        base_chunks = range(int(increment.has_image_header), increment.count)
        return cls(
            ref, file, encoding, increment.size, increment=increment, base_chunks=base_chunks
        )

    @property
    def rank(self) -> int:
        return self.file.rank

    @property
    def chunks(self) -> Sequence[Chunk]:
        return self.file.chunks

    @property
    def key(self) -> str:
        if self.adoption is not None:  # No single file
            return f"{self.root}/{self.ref.folder}"
        key = self.location or self.ref.key(self.file.name)
        return f"{self.root}/{key}" if self.root else key

    @property
    def codec(self) -> str | None:
        return self.encoding.codec if self.encoding else None

    @cached_property
    def lengths(self) -> Sequence[int]:
        """Return the bytes that each chunk has on the tier."""
        return self.encoding.lengths if self.encoding else [chunk.nbytes for chunk in self.chunks]

    @cached_property
    def offsets(self) -> Sequence[int]:
        """Return the position at which each chunk begins in the file that holds it, and the end of
        the last chunk.
        """
        offsets = list(accumulate(self.lengths, initial=0))
        if (increment := self.increment) is None:
            return offsets
        count = increment.count  # Of the chunks in the other file
        # ``lead`` is the size of what the file holds before its own chunks.
        shift = increment.lead - offsets[count]
        own_offsets = [offset + shift for offset in offsets[count:]]
        if not increment.has_image_header:
            return offsets[:count] + own_offsets
        if increment.adoption is not None:
            return [increment.lead - self.lengths[0], *increment.adoption.positions, *own_offsets]
        # ``base_lead`` is the size of the first chunk of the other file.
        shift = increment.base_lead - self.lengths[0]
        base_offsets = [offset + shift for offset in offsets[1:count]]
        return [increment.lead - self.lengths[0], *base_offsets, *own_offsets]

    @cached_property
    def base(self) -> StoredFile | None:
        """Return the file of the other step that holds the first chunks; None if the file holds
        all chunks.
        """
        if (increment := self.increment) is None or (base := parse_base(increment.base)) is None:
            return None
        return StoredFile(
            base.ref,
            self.file,
            self.encoding,
            increment.base_size,
            root=base.root,
            adoption=increment.adoption,
        )

    @cached_property
    def staged_index(self) -> Mapping[int, int]:
        """Return a map from the offset in the image at which a chunk begins to the chunk's
        index.
        """
        return {offset: index for index, offset in enumerate(chunk_offsets(self.file))}

    def encoded_nbytes(self, index: int) -> int | None:
        """Return the bytes of an encoded chunk on the tier, or None if the chunk is not encoded."""
        length = self.lengths[index]
        return length if length < self.chunks[index].nbytes else None


def chunk_offsets(file: File) -> Sequence[int]:
    """Return the offset in the image at which each chunk of a file begins, and the end of the last
    chunk.
    """
    return list(accumulate((chunk.nbytes for chunk in file.chunks), initial=0))
