"""Is a manifest (or fragment) one that we could have written? Asked of everything read, before anything is done with it.

Names stay in their folder, sizes add up, chunk tables cover their files, shards lie on chunk boundaries, boxes tile their tensors.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Mapping
from typing import TYPE_CHECKING

from ckpt.errors import ManifestCorrupt
from ckpt.model.box import tiling_fault
from ckpt.model.checksum import CHECKSUM_PATTERN
from ckpt.model.chunks import lengths_like
from ckpt.model.dtype import DTYPES
from ckpt.model.keys import data_name, fragment_name
from ckpt.model.manifest import (
    FORMAT,
    REFERENCE_FORMAT,
    Encoding,
    File,
    Fragment,
    Manifest,
    Shard,
    Tensor,
    chunk_offsets,
)
from ckpt.model.runs import fault_of
from ckpt.model.values import parse

if TYPE_CHECKING:
    from ckpt.model.packed import Packed

MAX_CHUNK_BYTES = 64 << 20
MAX_DIMENSIONS = 64
CODECS = frozenset({"zstd"})
_MAX_BYTES = 1 << 60


def check_manifest(manifest: Manifest, *, key: str) -> Manifest:
    """Return it, or raise ``ManifestCorrupt`` with the first fault."""
    require(manifest.world_size >= 1 and manifest.step >= 0, key, "step or world size is out of range")
    _check_chunk_bytes(manifest.chunk_bytes, key)
    for fragment in manifest.fragments:
        require(fragment.name == fragment_name(fragment.rank), key, f"fragment name {fragment.name[:80]!r}")
        require(
            0 <= fragment.size <= _MAX_BYTES and _is_checksum(fragment.checksum),
            key,
            f"fragment {fragment.name}",
        )
    ranks = [fragment.rank for fragment in manifest.fragments]
    whole = len(ranks) == manifest.world_size and sorted(ranks) == list(range(len(ranks)))
    require(whole, key, "not one fragment for each rank")
    parse(manifest.metadata, key)
    if manifest.by_reference:
        return _check_reference(manifest, key)
    require(not manifest.layouts and not manifest.layout_of, key, "layouts beside shards")
    _check_names(manifest.files, key, encoded=manifest.encodings())
    _check_chunks(manifest.files, key)
    _check_encoded(manifest, {file.rank: file for file in manifest.files}, key)
    _check_tensors(manifest.tensors, {file.rank: file for file in manifest.files}, manifest.chunk_bytes, key)
    for tensor in manifest.tensors:
        if fault := tiling_fault(tensor.shape, [shard.box for shard in tensor.shards]):
            raise ManifestCorrupt(key, f"tensor {tensor.name!r}: {fault}")
    _check_tied(manifest.tied, {tensor.name for tensor in manifest.tensors}, key)
    return manifest


def _check_reference(manifest: Manifest, key: str) -> Manifest:
    """As far as it goes without the fragments: whether boxes overlap shows where they are filled in, and where something is planned by them."""
    require(manifest.format >= REFERENCE_FORMAT, key, f"a reference in a record of format {manifest.format}")
    encodings, files = manifest.encodings(), manifest.file_map()
    _check_names(manifest.files, key, encoded=encodings)
    require(len(encodings) == len(manifest.encoded), key, "a file is encoded twice")
    for encoding in manifest.encoded:
        fits = encoding.rank in files and len(encoding.lengths) == 1 and 0 < encoding.size <= _MAX_BYTES
        require(fits, key, f"the encoded size of rank {encoding.rank}")
        require(encoding.codec in CODECS, key, f"the unknown codec {encoding.codec[:40]!r}")
    require(
        not manifest.per_rank and not any(file.chunks for file in manifest.files), key, "parts of fragments"
    )
    require(len(manifest.layout_of) == len(manifest.tensors), key, "not one layout for each tensor")
    seen: set[str] = set()
    told: dict[tuple[int, tuple[int, ...]], str | None] = {}
    for tensor, index in zip(manifest.tensors, manifest.layout_of, strict=True):
        check_tensor(tensor.name, tensor.dtype, tensor.shape, seen, key)
        require(
            not tensor.shards and 0 <= index < len(manifest.layouts),
            key,
            f"tensor {tensor.name!r} has no layout",
        )
        if (index, tensor.shape) not in told:
            told[index, tensor.shape] = fault_of(manifest.layouts[index], tensor.shape, manifest.world_size)
        if fault := told[index, tensor.shape]:
            raise ManifestCorrupt(key, f"tensor {tensor.name!r}: {fault}")
    _check_tied(manifest.tied, seen, key)
    return manifest


def check_heading(record: Fragment | Packed, key: str) -> None:
    """What a fragment says of its save and its rank."""
    require(
        0 <= record.rank < record.world_size and record.step >= 0,
        key,
        "step, rank or world size is out of range",
    )
    _check_chunk_bytes(record.chunk_bytes, key)
    files = (record.file,) if record.file else ()
    encodings = {encoding.rank: encoding for encoding in record.encoded}
    _check_names(files, key, encoded=encodings)
    require(all(file.rank == record.rank for file in files), key, "holds the file of another rank")
    require(set(encodings) <= {file.rank for file in files}, key, "an encoding of no file")
    for encoding in record.encoded:
        require(record.format > FORMAT, key, f"encoded files in a record of format {record.format}")
        require(encoding.codec in CODECS, key, f"the unknown codec {encoding.codec[:40]!r}")


def check_fragment(fragment: Fragment, *, key: str, known: Fragment | None = None) -> Fragment:
    """Return it, or raise ``ManifestCorrupt`` with the first fault. Its boxes are only a part of the tensors.

    ``known`` is an earlier one of that rank that was in order: tensors that are the same, in chunks of the same lengths, are not looked at again.
    """
    check_heading(fragment, key)
    files = (fragment.file,) if fragment.file else ()
    _check_chunks(files, key)
    _check_encoded(fragment, {file.rank: file for file in files}, key)
    if known is None or not _same_places(fragment, known):
        _check_tensors(fragment.tensors, {file.rank: file for file in files}, fragment.chunk_bytes, key)
    _check_tied(fragment.tied, {tensor.name for tensor in fragment.tensors}, key)
    return fragment


def _same_places(one: Fragment, two: Fragment) -> bool:
    lengths = [[chunk.nbytes for chunk in each.file.chunks] if each.file else None for each in (one, two)]
    return (
        one.chunk_bytes == two.chunk_bytes
        and one.rank == two.rank
        and lengths[0] == lengths[1]
        and one.tensors == two.tensors
    )


def require(condition: bool, key: str, detail: str) -> None:
    """Raises ``ManifestCorrupt`` unless ``condition`` holds."""
    if not condition:
        raise ManifestCorrupt(key, detail)


def _is_checksum(text: str) -> bool:
    return CHECKSUM_PATTERN.fullmatch(text) is not None


def _check_chunk_bytes(chunk_bytes: int, key: str) -> None:
    require(16 <= chunk_bytes <= MAX_CHUNK_BYTES, key, f"chunks of {chunk_bytes} bytes")


def _check_names(files: Iterable[File], key: str, *, encoded: Mapping[int, Encoding]) -> None:
    seen: set[int] = set()
    for file in files:
        require(
            file.rank >= 0 and file.name == data_name(file.rank, encoded=file.rank in encoded),
            key,
            f"file name {file.name[:80]!r} is not that of its rank",
        )
        require(file.rank not in seen, key, f"file {file.name} is named twice")
        seen.add(file.rank)
        require(0 < file.size <= _MAX_BYTES, key, f"file {file.name} of {file.size} bytes")


def _check_chunks(files: Iterable[File], key: str) -> None:
    for file in files:
        for chunk in file.chunks:
            require(chunk.nbytes > 0 and _is_checksum(chunk.checksum), key, f"a chunk of {file.name}")
        require(
            sum(chunk.nbytes for chunk in file.chunks) == file.size,
            key,
            f"the chunks of {file.name} do not add up to its size",
        )


def _check_encoded(record: Manifest | Fragment, files: Mapping[int, File], key: str) -> None:
    """What a chunk decodes to is reserved before it is decoded: it must have a size that a save makes."""
    if not record.encoded:
        return
    require(record.format > FORMAT, key, f"encoded files in a record of format {record.format}")
    ranks = [encoding.rank for encoding in record.encoded]
    require(len(set(ranks)) == len(ranks), key, "a file is encoded twice")
    for encoding in record.encoded:
        file = files.get(encoding.rank)
        if file is None or len(encoding.lengths) != len(file.chunks):
            raise ManifestCorrupt(key, f"the lengths of rank {encoding.rank} are not those of its chunks")
        require(encoding.codec in CODECS, key, f"the unknown codec {encoding.codec[:40]!r}")
        for chunk, length in zip(file.chunks, encoding.lengths, strict=True):
            fits = length == chunk.nbytes or 0 < length < chunk.nbytes <= MAX_CHUNK_BYTES
            require(fits, key, f"a chunk of {file.name} of {chunk.nbytes} bytes is encoded as {length}")


def _check_tensors(tensors: Iterable[Tensor], files: Mapping[int, File], chunk_bytes: int, key: str) -> None:
    chunks = {rank: _lengths(file) for rank, file in files.items()}
    seen: set[str] = set()
    for tensor in tensors:
        check_tensor(tensor.name, tensor.dtype, tensor.shape, seen, key)
        for shard in tensor.shards:
            require(
                shard.box.inside(tensor.shape), key, f"tensor {tensor.name!r}: a box is not inside its shape"
            )
            _check_shard(tensor, shard, chunks.get(shard.rank), chunk_bytes, key)


def check_tensor(name: str, dtype: str, shape: tuple[int, ...], seen: set[str], key: str) -> None:
    """``seen`` are the names before, and gets this one."""
    require(name not in seen, key, f"tensor {name!r} is named twice")
    seen.add(name)
    require(dtype in DTYPES, key, f"tensor {name!r} has the unknown dtype {dtype[:40]!r}")
    fits = len(shape) <= MAX_DIMENSIONS and all(0 <= n < 2**62 for n in shape)
    require(
        fits and math.prod(n for n in shape if n) * DTYPES[dtype].itemsize <= _MAX_BYTES,
        key,
        f"tensor {name!r} has an impossible shape",
    )


def _lengths(file: File) -> dict[int, int]:
    """Bytes of each chunk, by where it begins."""
    return {offset: chunk.nbytes for offset, chunk in zip(chunk_offsets(file), file.chunks, strict=False)}


def _check_shard(
    tensor: Tensor, shard: Shard, chunks: dict[int, int] | None, chunk_bytes: int, key: str
) -> None:
    """``chunks``: those that the shards before have are 0, and its own are afterwards. So all shards together take no longer than their files have chunks."""
    if chunks is None:
        raise ManifestCorrupt(key, f"tensor {tensor.name!r}: rank {shard.rank} has no file")
    box, itemsize, offset = shard.box, DTYPES[tensor.dtype].itemsize, shard.offset
    if not box.numel:
        return
    fits = box.numel * itemsize < len(chunks) * chunk_bytes
    require(fits, key, f"tensor {tensor.name!r}: a shard has more bytes than its file has chunks")
    first = chunks.get(offset, 0)
    require(first <= chunk_bytes, key, f"tensor {tensor.name!r}: a chunk of {first} bytes")
    lengths = lengths_like(box.shape, first // itemsize, at_most=len(chunks))
    astray = "a shard is not aligned with the chunks of its file, or overlaps another there"
    for length in [0] if lengths is None else lengths:
        require(0 < chunks.get(offset, 0) == length * itemsize, key, f"tensor {tensor.name!r}: {astray}")
        chunks[offset] = 0
        offset += length * itemsize


def _check_tied(tied: Mapping[str, str], names: set[str], key: str) -> None:
    for name, target in tied.items():
        require(
            target in names and name not in names,
            key,
            f"{name[:80]!r} is tied to {target[:80]!r}, which is not stored",
        )
