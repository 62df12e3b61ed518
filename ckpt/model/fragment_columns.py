"""Convert fragments between stored columns and objects.

With columns, the merge of thousands of fragments works on arrays. The *form* of a fragment is the
part that is equal to the byte on most ranks of a mesh: names, shapes, positions in the file, and
lengths of chunks. The offsets of the boxes and the checksums are stored apart from the form.
Therefore a reader unpacks each different form once, even if thousands of ranks have it.

The committer checks and merges columns (``check_packed``, ``plan.merge_layouts``). All other code
unpacks the few fragments that it needs to objects (``fragment_of``).

A *fragment* is the record of what one rank has written, and a *shard* is a box (a rectangular
region of a tensor) in its file. A *column* is an array of 64-bit integers, and a *frame* is zstd
data. The *heading* of a tensor is its name, dtype, shape and *order*. The order says how its
dimensions are sorted in memory. A *tied* name is one more name of a tensor, and *views* are tensors
that share memory with others. An *increment* is a data file without the first chunks, which the
file of an older step, its *base*, has too. Its ``lead`` is the size of what it holds before its own
chunks. An *adopted* base consists of files of another program, and the *positions* say where its
chunks are.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, Final

import msgspec
import numpy as np
from msgspec.structs import replace

from ckpt.errors import ManifestCorrupt
from ckpt.model.box_layouts import Ints
from ckpt.model.checksum import CHECKSUM_BYTES
from ckpt.model.chunks import chunk_lengths
from ckpt.model.dtype import DTYPES
from ckpt.model.manifest import (
    FILE_SPACE,
    AdoptedBase,
    Chunk,
    Encoding,
    Fragment,
    Increment,
    Packed,
    Shard,
    Tensor,
)
from ckpt.model.record_encoding import MAX_EXPANSION, compress, decompress, unpack
from ckpt.model.validate import (
    MAX_CHUNK_BYTES,
    MAX_DIMENSIONS,
    check_fragment_fields,
    check_tensor,
    check_tied,
    require,
)
from ckpt.model.views import views_fault

_COMMON_FIELDS: Final = (
    "format", "step", "attempt", "rank", "world_size", "created_at", "chunk_bytes",
    "tied", "tree", "per_rank", "metadata", "in_manifest", "views", "locations",
)  # fmt: skip
_MAX_FRAME_BYTES: Final = 1 << 30
"""The most bytes of an unpacked frame. A rank with a million tensors needs about a fifth of this
size.
"""
_SMALL_FRAME_BYTES: Final = 1 << 20
"""A frame may unpack to this size plus ``MAX_EXPANSION`` times the size of the frame."""


class Form(msgspec.Struct, frozen=True, array_like=True):
    """The part of a fragment that many ranks have in common.

    Attributes:
        tensors: The JSON array with ``[name, dtype, shape, order]`` of each tensor.
        dims: The largest number of dimensions of a tensor.
        shards: A column with ``2 + dims`` numbers for each shard: the index of its tensor, its
            offset in the file in bytes, and its shape, padded with ones.
        chunks: A column with the length of each chunk of the file in bytes.
    """

    tensors: msgspec.Raw
    dims: int
    shards: bytes
    chunks: bytes


Heading = tuple[str, str, tuple[int, ...], tuple[int, ...]]
"""The name, the dtype, the global shape and the order of a tensor (see ``manifest.Tensor``)."""

Table = tuple[tuple[Heading, ...], Ints, Ints, Ints]
"""The headings of a form, and three arrays with an entry for each heading: the bytes of an element,
the global shape padded with ones, and the least shape that a shard may have (0 in each dimension of
the tensor, 1 in the padding).
"""
Tables = dict[tuple[bytes, int], Table]
"""The tables of earlier forms. A key consists of ``Form.tensors`` and ``Form.dims``."""

_headings: Final[msgspec.json.Decoder[Any]] = msgspec.json.Decoder(tuple[Heading, ...])
_form: Final = msgspec.json.Decoder(Form)


@dataclass(frozen=True, slots=True, kw_only=True)
class Columns:
    """A form that is unpacked to arrays and checked.

    Attributes:
        headings: The name, the dtype, the global shape and the order of each tensor.
        dims: The largest number of dimensions of a tensor.
        tensor_index: The index of the tensor of each shard.
        file_offset: The offset of each shard in the file in bytes.
        shape: The shape of each shard, padded with ones.
        max_offsets: The largest offsets that each shard may have in its tensor.
        chunks: The length of each chunk of the file in bytes.
        starts: The index of the first chunk of each shard.
        counts: The number of chunks of each shard.
        size: The size of the file in bytes.
    """

    headings: tuple[Heading, ...]
    dims: int
    tensor_index: Ints
    file_offset: Ints
    shape: Ints
    max_offsets: Ints
    chunks: Ints
    starts: Ints
    counts: Ints
    size: int


@dataclass(frozen=True, slots=True)
class Frames:
    """The two frames of a fragment that depend on the save plan only. All saves with the same save
    plan share these frames.
    """

    form: bytes
    offsets: bytes


def frames_of(tensors: Sequence[Tensor], chunks: Sequence[int]) -> Frames:
    """Return the frames for the fragment of one rank.

    Args:
        tensors: The tensors with the shards of this rank.
        chunks: The length of each chunk of the rank's file in bytes.
    """
    dims = max((len(tensor.shape) for tensor in tensors), default=0)
    rows: list[list[int]] = []
    offsets: list[list[int]] = []
    for index, tensor in enumerate(tensors):
        padding = dims - len(tensor.shape)
        for shard in tensor.shards:
            rows.append([index, shard.offset, *shard.shape, *[1] * padding])
            offsets.append([*shard.offsets, *[0] * padding])
    headings = msgspec.json.encode(
        [(tensor.name, tensor.dtype, tensor.shape, tensor.order) for tensor in tensors]
    )
    form = Form(msgspec.Raw(headings), dims, _column_bytes(rows), _column_bytes(list(chunks)))
    return Frames(compress(msgspec.json.encode(form)), compress(_column_bytes(offsets)))


def pack_fragment(fragment: Fragment, frames: Frames | None = None) -> Packed:
    """Return the stored form of a fragment. ``frames`` is the result of ``frames_of`` for its
    tensors and chunks; None to compute it.
    """
    file, encodings = fragment.file, fragment.encoded
    chunks = file.chunks if file else ()
    frames = frames or frames_of(fragment.tensors, [chunk.nbytes for chunk in chunks])
    replicas = msgspec.json.encode(fragment.replicas, order="deterministic")
    return Packed(
        **_common_fields(fragment),
        file=replace(file, chunks=()) if file else None,
        form=frames.form,
        offsets=frames.offsets,
        checksums=bytes.fromhex("".join(chunk.checksum for chunk in chunks)),
        replicas=compress(replicas) if fragment.replicas else b"",
        encoded=tuple(
            Encoding(encoding.rank, encoding.codec, (encoding.size,)) for encoding in encodings
        ),
        lengths=_column_bytes([length for encoding in encodings for length in encoding.lengths]),
        increments=tuple(increment.without_positions() for increment in fragment.increments),
        positions=_column_bytes(
            [
                position
                for increment in fragment.increments
                if increment.adoption is not None
                for position in increment.adoption.positions
            ]
        ),
    )


def _common_fields(record: Packed | Fragment) -> dict[str, Any]:
    """Return the fields that ``Packed`` and ``Fragment`` have in the same form."""
    return {name: getattr(record, name) for name in _COMMON_FIELDS}


def read_fragment(data: bytes, *, key: str) -> Fragment:
    """Decode and check the bytes of a stored fragment, and return the fragment.

    Args:
        data: The bytes.
        key: The key of the fragment, for errors.

    Raises:
        ManifestCorrupt: ``data`` is damaged, or is not a fragment.
        FormatTooNew, FormatTooOld: The fragment has another format.
        CodecMissing: The codec of the data file is not installed here.
    """
    return fragment_of(unpack(data, Packed, key=key), key=key)


def fragment_of(record: Packed, *, key: str) -> Fragment:
    """Check a stored fragment, and return it with its columns unpacked to objects.

    Raises:
        ManifestCorrupt: The fragment is invalid. The error names the first fault.
        CodecMissing: The codec of the data file is not installed here.
    """
    columns = columns_of(record.form, record.chunk_bytes, key=key)
    offsets = offsets_of(record.offsets, columns, key=key)
    check_packed(record, columns, key=key)
    shards: list[list[Shard]] = [[] for _ in columns.headings]
    dims = [len(shape) for _, _, shape, _ in columns.headings]
    for index, file_offset, start, shape in zip(
        columns.tensor_index.tolist(),
        columns.file_offset.tolist(),
        offsets.tolist(),
        columns.shape.tolist(),
        strict=True,
    ):
        own_dims = dims[index]
        shards[index].append(
            Shard(record.rank, file_offset, tuple(start[:own_dims]), tuple(shape[:own_dims]))
        )
    digests = record.checksums.hex()
    width = 2 * CHECKSUM_BYTES
    chunks = tuple(
        Chunk(nbytes, digests[i * width : (i + 1) * width])
        for i, nbytes in enumerate(columns.chunks.tolist())
    )
    file = record.file
    lengths = tuple(_column(record.lengths, key).tolist())
    return Fragment(
        **_common_fields(record),
        file=replace(file, chunks=chunks) if file else None,
        tensors=tuple(
            Tensor(name, dtype, shape, tuple(own_shards), order)
            for (name, dtype, shape, order), own_shards in zip(
                columns.headings, shards, strict=True
            )
        ),
        replicas=replicas_of(record.replicas, key=key),
        encoded=tuple(
            Encoding(encoding.rank, encoding.codec, lengths) for encoding in record.encoded
        ),
        increments=tuple(
            _with_positions(increment, record, key) for increment in record.increments
        ),
    )


def _with_positions(increment: Increment, record: Packed, key: str) -> Increment:
    """Return the increment of a fragment with the positions of the chunks in an adopted base."""
    if increment.adoption is None:
        return increment
    positions = tuple(_column(record.positions, key).tolist())
    return replace(increment, adoption=replace(increment.adoption, positions=positions))


def replicas_of(frame: bytes, *, key: str) -> dict[str, str]:
    """Unpack the frame ``Packed.replicas``, and return the digests of replicated tensors by name.
    The result is empty if the frame is empty. Raises ``ManifestCorrupt`` if the frame is invalid.
    """
    try:
        return msgspec.json.decode(_unpack(frame, key), type=dict[str, str]) if frame else {}
    except msgspec.MsgspecError as error:
        raise ManifestCorrupt(key, str(error)[:200]) from None


def columns_of(form: bytes, chunk_bytes: int, *, key: str, tables: Tables | None = None) -> Columns:
    """Unpack a form, and check everything in it that can be checked without the offsets and the
    file of a fragment.

    Args:
        form: The frame ``Packed.form``.
        chunk_bytes: The most bytes of a chunk.
        key: The key of the fragment, for errors.
        tables: The tables of earlier forms, which are used again for forms with the same tensors.
            The function adds the table of a form with new tensors. None to use no tables.

    Raises:
        ManifestCorrupt: The form is one that ckpt never writes.
    """
    try:
        content = _form.decode(_unpack(form, key))
    except msgspec.MsgspecError as error:
        raise ManifestCorrupt(key, str(error)[:200]) from None
    dims, tables = content.dims, {} if tables is None else tables
    table_key = bytes(content.tensors), dims
    if table_key not in tables:
        tables[table_key] = _make_table(content.tensors, dims, key)
    # With an entry for each tensor. ``least_shape`` is the least shape that a shard of it may have.
    headings, itemsize, global_shape, least_shape = tables[table_key]
    rows, chunks = _column(content.shards, key), _column(content.chunks, key)
    require(len(rows) % (2 + dims) == 0, key, "a row of its shards is cut")
    table = rows.reshape(-1, 2 + dims)
    tensor_index, file_offset, shape = table[:, 0], table[:, 1], table[:, 2:]
    is_known = (tensor_index >= 0) & (tensor_index < len(headings))
    require(bool(is_known.all()), key, "a shard of no tensor")
    require(bool((chunks > 0).all() and _total(chunks) < 1 << 60), key, "a chunk of no bytes")
    require(bool((shape >= least_shape[tensor_index]).all()), key, "a shard of less than nothing")
    max_offsets = global_shape[tensor_index] - shape
    require(bool((max_offsets >= 0).all()), key, "a box is not inside the shape of its tensor")
    starts, counts = _chunks_of(
        itemsize[tensor_index], file_offset, shape, chunks, chunk_bytes, key
    )
    return Columns(
        headings=headings,
        dims=dims,
        tensor_index=tensor_index,
        file_offset=file_offset,
        shape=shape,
        max_offsets=max_offsets,
        chunks=chunks,
        starts=starts,
        counts=counts,
        size=_total(chunks),
    )


def offsets_of(frame: bytes, columns: Columns, *, key: str) -> Ints:
    """Unpack the frame ``Packed.offsets``. Return the offsets of the shards in their tensors, one
    row of ``columns.dims`` numbers for each shard.

    Raises:
        ManifestCorrupt: The number of offsets is wrong, or a box is not inside its tensor.
    """
    count = len(columns.tensor_index) * columns.dims
    numbers = _column(_unpack(frame, key, at_least=8 * count), key)
    require(len(numbers) == count, key, "its offsets are not those of its form")
    offsets = (
        numbers.reshape(-1, columns.dims)
        if columns.dims
        else np.zeros((len(columns.tensor_index), 0), np.int64)
    )
    is_inside = (offsets >= 0) & (offsets <= columns.max_offsets)
    require(bool(is_inside.all()), key, "a box is not inside the shape of its tensor")
    return offsets


def check_packed(record: Packed, columns: Columns, *, key: str) -> Packed:
    """Return ``record`` after checking it, except for its offsets, which ``offsets_of`` checks.

    Args:
        record: The fragment.
        columns: The unpacked form of the fragment.
        key: The name of the fragment in errors.

    Raises:
        ManifestCorrupt: The fragment is invalid. The error names the first fault.
        CodecMissing: The codec of the data file is not installed here.
    """
    check_fragment_fields(record, key)
    size = record.file.size if record.file else 0
    require(columns.size == size, key, "the chunks of its file do not add up to its size")
    require(record.file is not None or not len(columns.tensor_index), key, "shards, but no file")
    count = len(columns.chunks)
    require(len(record.checksums) == CHECKSUM_BYTES * count, key, "not one checksum for each chunk")
    if record.tied:
        check_tied(record.tied, {name for name, *_ in columns.headings}, key)
    if record.views:
        kinds = {name: (dtype, shape) for name, dtype, shape, _ in columns.headings}
        require(not (fault := views_fault(record.views, kinds)), key, fault)
    has_adopted_base = any(increment.adoption for increment in record.increments)
    require(has_adopted_base or not record.positions, key, "positions, but no adopted base")
    if record.increments:
        _check_increment(record, columns, key)
    if record.encoded or record.lengths:
        lengths = _column(record.lengths, key)
        require(
            len(record.encoded) == 1 and len(lengths) == count, key, "not one length for each chunk"
        )
        # A reader allocates memory for the raw bytes of a chunk before it decodes the chunk, so
        # an encoded chunk may not claim more than ``MAX_CHUNK_BYTES``.
        is_encoded = (lengths < columns.chunks) & (columns.chunks <= MAX_CHUNK_BYTES)
        fits = (lengths > 0) & (is_encoded | (lengths == columns.chunks))
        require(bool(fits.all()), key, "an encoded chunk is too long")
        require(record.encoded[0].lengths == (_total(lengths),), key, "its encoded size is another")
    return record


def _check_increment(record: Packed, columns: Columns, key: str) -> None:
    """Raise ``ManifestCorrupt`` if the entry of an increment does not fit the chunks."""
    increment = record.increments[0]
    require(increment.count < len(columns.chunks), key, "an increment without a chunk of its own")
    lengths = _column(record.lengths, key) if record.encoded else columns.chunks
    own_size = increment.lead + _total(lengths[increment.count :])
    require(own_size == increment.size, key, "its increment has another size")
    base_size = _total(lengths[: increment.count])
    if increment.has_image_header:  # The first chunk is in this file, since the base is elsewhere
        header_bytes = _total(lengths[:1])
        fits = increment.lead == header_bytes if record.encoded else increment.lead > header_bytes
        require(fits, key, "its increment has another header")
        base_size += increment.base_lead - header_bytes
    if increment.adoption is not None:
        chunks = columns.chunks[1 : increment.count]
        is_raw = np.array_equal(lengths[1 : increment.count], chunks)
        require(is_raw, key, "an encoded chunk in a file of another program")
        _check_positions(record, increment.adoption, chunks, key)
        return
    require(base_size <= increment.base_size, key, "the base of its increment is too small")


def _check_positions(record: Packed, adoption: AdoptedBase, lengths: Ints, key: str) -> None:
    """Raise ``ManifestCorrupt`` unless each chunk that an increment leaves out is in a file of its
    adopted base. ``lengths`` has the lengths of these chunks.
    """
    positions = _column(record.positions, key)
    require(len(positions) == len(lengths), key, "not one position for each chunk of its base")
    sizes = np.array([file.size for file in adoption.files], np.int64)
    index, offset = np.divmod(positions, FILE_SPACE)
    require(bool(((index >= 0) & (index < len(sizes))).all()), key, "a position in no file")
    fits = offset + lengths <= sizes[index]
    require(bool(fits.all()), key, "a position after the end of its file")


def _chunks_of(
    itemsize: Ints, file_offset: Ints, shape: Ints, chunks: Ints, chunk_bytes: int, key: str
) -> tuple[Ints, Ints]:
    """Return the index of the first chunk and the number of chunks of each shard. ``itemsize``,
    ``file_offset`` and ``shape`` have an entry for each shard, and ``chunks`` has all lengths.

    Raises:
        ManifestCorrupt: The chunks of a shard are not cut as ``split_rows`` cuts its box, or two
            shards share a chunk.
    """
    edges = np.concatenate([np.zeros(1, np.int64), np.cumsum(chunks)])
    # The product is below 2**63, since the shard is inside a shape that ``check_tensor`` has
    # checked.
    nbytes = np.prod(shape, axis=1, dtype=np.int64) * itemsize
    has_bytes = nbytes > 0
    starts = np.searchsorted(
        edges, file_offset
    )  # The first chunk of each shard, if it begins a chunk
    is_on_edge = (starts < len(chunks)) & (edges[np.minimum(starts, len(chunks))] == file_offset)
    require(
        bool((is_on_edge | ~has_bytes).all()),
        key,
        "a shard is not aligned with the chunks of its file",
    )
    starts = np.where(has_bytes, starts, 0)
    counts = has_bytes.astype(np.int64)
    first_lengths = np.where(has_bytes, chunks[starts] if len(chunks) else 0, 0)
    require(bool((first_lengths <= chunk_bytes).all()), key, "a chunk is too long")
    most_count = len(chunks)  # The most chunks that the remaining shards can have together
    for row in np.flatnonzero(first_lengths != nbytes).tolist():  # Shards of several chunks
        start = int(starts[row])
        size, box_shape = int(itemsize[row]), tuple(shape[row].tolist())  # Padding changes no chunk
        lengths = (
            chunk_lengths(
                box_shape,
                int(first_lengths[row]) // size,
                at_most=min(most_count, len(chunks) - start),
            )
            or []
        )
        fits = bool(lengths) and np.array_equal(
            np.array(lengths) * size, chunks[start : start + len(lengths)]
        )
        require(fits, key, "a shard is not aligned with the chunks of its file")
        counts[row] = len(lengths)
        most_count -= len(lengths)
    order = np.argsort(starts[has_bytes], kind="stable")
    ends = (starts + counts)[has_bytes][order]
    require(
        bool((ends[:-1] <= starts[has_bytes][order][1:]).all()), key, "shards overlap in their file"
    )
    return starts, counts


def _make_table(raw: msgspec.Raw, dims: int, key: str) -> Table:
    """Check the tensors ``raw`` of a form, and return their table. The table has the headings, and
    for each tensor the bytes of an element, the padded shape and the least shape of a shard.
    """
    try:
        headings = _headings.decode(raw)
    except msgspec.MsgspecError as error:
        raise ManifestCorrupt(key, str(error)[:200]) from None
    require(0 <= dims <= MAX_DIMENSIONS, key, f"tensors of {dims} dimensions")
    names: set[str] = set()
    for name, dtype, shape, order in headings:
        check_tensor(Tensor(name, dtype, shape, (), order), names, key)
        require(len(shape) <= dims, key, f"tensor {name!r} has more dimensions than its form")
    itemsize = np.array([DTYPES[dtype].itemsize for _, dtype, *_ in headings], dtype=np.int64)
    rows = [[*shape, *[1] * (dims - len(shape))] for _, _, shape, _ in headings]
    global_shape = np.array(rows, dtype=np.int64).reshape(len(rows), dims)
    own_dims = np.array([len(shape) for _, _, shape, _ in headings], dtype=np.int64)
    # In the padding of its shape, a shard has the extent 1.
    least_shape = (np.arange(dims) >= own_dims[:, None]).astype(np.int64)
    return headings, itemsize, global_shape, least_shape


def _column_bytes(numbers: list[Any]) -> bytes:
    return np.array(numbers, dtype="<i8").tobytes()


def _column(data: bytes, key: str) -> Ints:
    require(len(data) % 8 == 0, key, "a column is cut")
    return np.frombuffer(data, dtype="<i8").astype(np.int64, copy=False)


def _total(numbers: Ints) -> int:
    return sum(numbers.tolist()) if len(numbers) else 0


def _unpack(frame: bytes, key: str, *, at_least: int = 0) -> bytes:
    """Return the bytes that a frame unpacks to.

    The usual limit for the result depends on the size of the frame. A result of up to ``at_least``
    bytes is accepted even if it exceeds this limit.

    Raises:
        ManifestCorrupt: The frame is damaged, or the result is too long.
    """
    limit = max(at_least, min(_MAX_FRAME_BYTES, _SMALL_FRAME_BYTES + MAX_EXPANSION * len(frame)))
    return decompress(frame, key, at_most=limit)
