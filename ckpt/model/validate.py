"""Is a manifest (or fragment) one that we could have written? Asked of everything read, before anything is done with it.

Names stay in their folder, sizes add up, chunk tables cover their files, shards lie on chunk boundaries, boxes tile their tensors.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Mapping
from itertools import accumulate

from ckpt.errors import ManifestCorrupt
from ckpt.model.box import split_rows, tiling_fault
from ckpt.model.checksum import CHECKSUM_PATTERN
from ckpt.model.dtype import DTYPES
from ckpt.model.layout import data_name, fragment_name
from ckpt.model.manifest import FORMAT, Encoding, File, Fragment, Manifest, Shard, Tensor

MAX_CHUNK_BYTES = 64 << 20
MAX_DIMENSIONS = 64
CODECS = frozenset({"zstd"})
_MAX_BYTES = 1 << 60


def check_manifest(manifest: Manifest, *, key: str) -> Manifest:
    """Return it, or raise ``ManifestCorrupt`` with the first fault."""
    _require(manifest.world_size >= 1 and manifest.step >= 0, key, "step or world size is out of range")
    _check_chunk_bytes(manifest.chunk_bytes, key)
    for fragment in manifest.fragments:
        _require(fragment.name == fragment_name(fragment.rank), key, f"fragment name {fragment.name[:80]!r}")
        _require(
            0 <= fragment.size <= _MAX_BYTES and _is_checksum(fragment.checksum),
            key,
            f"fragment {fragment.name}",
        )
    ranks = [fragment.rank for fragment in manifest.fragments]
    whole = len(ranks) == manifest.world_size and sorted(ranks) == list(range(len(ranks)))
    _require(whole, key, "not one fragment for each rank")
    _check_files(manifest.files, key, encoded=manifest.encodings())
    _check_encoded(manifest, {file.rank: file for file in manifest.files}, key)
    _check_tensors(manifest.tensors, {file.rank: file for file in manifest.files}, manifest.chunk_bytes, key)
    for tensor in manifest.tensors:
        if fault := tiling_fault(tensor.shape, [shard.box for shard in tensor.shards]):
            raise ManifestCorrupt(key, f"tensor {tensor.name!r}: {fault}")
    _check_tied(manifest.tied, {tensor.name for tensor in manifest.tensors}, key)
    return manifest


def check_fragment(fragment: Fragment, *, key: str, known: Fragment | None = None) -> Fragment:
    """Return it, or raise ``ManifestCorrupt`` with the first fault. Its boxes are only a part of the tensors.

    ``known`` is an earlier one of that rank that was in order: tensors that are the same, in chunks of the same lengths, are not looked at again.
    """
    _require(
        0 <= fragment.rank < fragment.world_size and fragment.step >= 0,
        key,
        "step, rank or world size is out of range",
    )
    _check_chunk_bytes(fragment.chunk_bytes, key)
    files = (fragment.file,) if fragment.file else ()
    _check_files(files, key, encoded={encoding.rank: encoding for encoding in fragment.encoded})
    _check_encoded(fragment, {file.rank: file for file in files}, key)
    _require(all(file.rank == fragment.rank for file in files), key, "holds the file of another rank")
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


def _require(condition: bool, key: str, detail: str) -> None:
    if not condition:
        raise ManifestCorrupt(key, detail)


def _is_checksum(text: str) -> bool:
    return CHECKSUM_PATTERN.fullmatch(text) is not None


def _check_chunk_bytes(chunk_bytes: int, key: str) -> None:
    _require(16 <= chunk_bytes <= MAX_CHUNK_BYTES, key, f"chunks of {chunk_bytes} bytes")


def _check_files(files: Iterable[File], key: str, *, encoded: Mapping[int, Encoding]) -> None:
    seen: set[int] = set()
    for file in files:
        _require(
            file.rank >= 0 and file.name == data_name(file.rank, encoded=file.rank in encoded),
            key,
            f"file name {file.name[:80]!r} is not that of its rank",
        )
        _require(file.rank not in seen, key, f"file {file.name} is named twice")
        seen.add(file.rank)
        _require(0 < file.size <= _MAX_BYTES, key, f"file {file.name} of {file.size} bytes")
        for chunk in file.chunks:
            _require(chunk.nbytes > 0 and _is_checksum(chunk.checksum), key, f"a chunk of {file.name}")
        _require(
            sum(chunk.nbytes for chunk in file.chunks) == file.size,
            key,
            f"the chunks of {file.name} do not add up to its size",
        )


def _check_encoded(record: Manifest | Fragment, files: Mapping[int, File], key: str) -> None:
    """What a chunk decodes to is reserved before it is decoded: it must have a size that a save makes."""
    if not record.encoded:
        return
    _require(record.format > FORMAT, key, f"encoded files in a record of format {record.format}")
    ranks = [encoding.rank for encoding in record.encoded]
    _require(len(set(ranks)) == len(ranks), key, "a file is encoded twice")
    for encoding in record.encoded:
        file = files.get(encoding.rank)
        if file is None or len(encoding.lengths) != len(file.chunks):
            raise ManifestCorrupt(key, f"the lengths of rank {encoding.rank} are not those of its chunks")
        _require(encoding.codec in CODECS, key, f"the unknown codec {encoding.codec[:40]!r}")
        for chunk, length in zip(file.chunks, encoding.lengths, strict=True):
            fits = length == chunk.nbytes or 0 < length < chunk.nbytes <= MAX_CHUNK_BYTES
            _require(fits, key, f"a chunk of {file.name} of {chunk.nbytes} bytes is encoded as {length}")


def _check_tensors(tensors: Iterable[Tensor], files: Mapping[int, File], chunk_bytes: int, key: str) -> None:
    edges = {
        rank: set(accumulate((chunk.nbytes for chunk in file.chunks), initial=0))
        for rank, file in files.items()
    }
    seen: set[str] = set()
    for tensor in tensors:
        _require(tensor.name not in seen, key, f"tensor {tensor.name!r} is named twice")
        seen.add(tensor.name)
        _require(
            tensor.dtype in DTYPES, key, f"tensor {tensor.name!r} has the unknown dtype {tensor.dtype[:40]!r}"
        )
        fits = len(tensor.shape) <= MAX_DIMENSIONS and all(0 <= n < 2**62 for n in tensor.shape)
        _require(
            fits and math.prod(n for n in tensor.shape if n) <= _MAX_BYTES,
            key,
            f"tensor {tensor.name!r} has an impossible shape",
        )
        for shard in tensor.shards:
            _require(
                shard.box.inside(tensor.shape), key, f"tensor {tensor.name!r}: a box is not inside its shape"
            )
            _check_shard(tensor, shard, edges.get(shard.rank), chunk_bytes, key)


def _check_shard(tensor: Tensor, shard: Shard, edges: set[int] | None, chunk_bytes: int, key: str) -> None:
    if edges is None:
        raise ManifestCorrupt(key, f"tensor {tensor.name!r}: rank {shard.rank} has no file")
    itemsize = DTYPES[tensor.dtype].itemsize
    # asked before the parts are listed: a few bytes of nonsense must not claim more parts than the file has chunks
    _require(
        shard.box.numel * itemsize < len(edges) * chunk_bytes,
        key,
        f"tensor {tensor.name!r}: a shard has more bytes than its file has chunks",
    )
    offset = shard.offset
    for part in split_rows(shard.box, chunk_bytes // itemsize):
        fits = offset in edges and offset + part.numel * itemsize in edges
        _require(fits, key, f"tensor {tensor.name!r}: a shard does not lie on the chunks of its file")
        offset += part.numel * itemsize


def _check_tied(tied: Mapping[str, str], names: set[str], key: str) -> None:
    for name, target in tied.items():
        _require(
            target in names and name not in names,
            key,
            f"{name[:80]!r} is tied to {target[:80]!r}, which is not stored",
        )
