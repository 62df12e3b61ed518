"""The merge of fragments by objects, written for clarity. The merge by columns must equal it.

It checks fragments and merges them shard by shard. Property tests compare its manifest, and its
refusals, with those of ``ckpt.plan.merge``.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterable, Mapping, Sequence

import msgspec

from ckpt.errors import CommitError, ManifestCorrupt, ReplicasDiverged, TensorIncomplete
from ckpt.model.box import Box, tiling_fault
from ckpt.model.checksum import CHECKSUM_PATTERN
from ckpt.model.chunks import chunk_lengths
from ckpt.model.dtype import DTYPES
from ckpt.model.keys import data_name
from ckpt.model.manifest import (
    FORMAT,
    Encoding,
    File,
    Fragment,
    FragmentRef,
    Manifest,
    Shard,
    Tensor,
    chunk_offsets,
)
from ckpt.model.validate import MAX_CHUNK_BYTES, check_tensor, require
from ckpt.model.values import parse
from ckpt.plan.merge import _merge_trees, check_replicas
from ckpt.plan.merge_errors import forms_text, kind_conflict, ranks_text

_MAX_BYTES = 1 << 60


def merge_objects(parts: Iterable[tuple[Fragment, FragmentRef]]) -> Manifest:
    """Return the manifest of these fragments, with all of them filled in, and without layouts."""
    ordered = sorted(parts, key=lambda part: part[0].rank)
    fragments = [fragment for fragment, _ in ordered]
    for fragment in fragments:
        check_fragment(fragment, key="fragment")
    first = fragments[0]
    for other in fragments:
        if _save(other) != _save(first):
            raise CommitError(
                f"fragments of ranks {first.rank} and {other.rank} belong to different saves"
            )
    check_replicas((fragment.rank, fragment.replicas) for fragment in fragments)
    _check_kinds(fragments)
    tensors = _merge_tensors(fragments)
    return Manifest(
        format=FORMAT,
        step=first.step,
        attempt=first.attempt,
        world_size=first.world_size,
        created_at=max(fragment.created_at for fragment in fragments),
        chunk_bytes=first.chunk_bytes,
        files=tuple(fragment.file for fragment in fragments if fragment.file),
        fragments=tuple(ref for _, ref in ordered),
        tensors=tensors,
        tied=_merge_tied(fragments, {tensor.name for tensor in tensors}),
        tree=_merge_trees("", _unique_texts((each.rank, each.tree) for each in fragments)),
        metadata=_merge_trees(
            "metadata", _unique_texts((each.rank, each.metadata) for each in fragments)
        ),
        layouts=(),
        layout_of=(),
        encoded=tuple(encoding for fragment in fragments for encoding in fragment.encoded),
        per_rank={str(fragment.rank): fragment.per_rank for fragment in fragments},
        is_filled=True,
    )


def check_fragment(fragment: Fragment, *, key: str) -> Fragment:
    """Return the fragment, or raise ``ManifestCorrupt`` with the first fault."""
    fits = 0 <= fragment.rank < fragment.world_size and fragment.step >= 0
    require(fits, key, "step, rank or world size is out of range")
    require(
        16 <= fragment.chunk_bytes <= MAX_CHUNK_BYTES,
        key,
        f"chunks of {fragment.chunk_bytes} bytes",
    )
    files = (fragment.file,) if fragment.file else ()
    encodings = {encoding.rank: encoding for encoding in fragment.encoded}
    _check_names(files, key, encoded=encodings)
    require(
        all(file.rank == fragment.rank for file in files), key, "holds the file of another rank"
    )
    require(set(encodings) <= {file.rank for file in files}, key, "an encoding of no file")
    _check_chunks(files, key)
    _check_encoded(fragment, {file.rank: file for file in files}, key)
    _check_tensors(fragment.tensors, {file.rank: file for file in files}, fragment.chunk_bytes, key)
    _check_tied(fragment.tied, {tensor.name for tensor in fragment.tensors}, key)
    return fragment


def _save(fragment: Fragment) -> tuple[object, ...]:
    return fragment.step, fragment.attempt, fragment.world_size, fragment.chunk_bytes


def _unique_texts(texts: Iterable[tuple[int, msgspec.Raw]]) -> list[tuple[int, bytes]]:
    unique: dict[bytes, int] = {}
    for rank, text in texts:
        unique.setdefault(bytes(text), rank)
    return [(rank, text) for text, rank in unique.items()]


def _check_kinds(fragments: Sequence[Fragment]) -> None:
    tensors = {tensor.name: fragment.rank for fragment in fragments for tensor in fragment.tensors}
    trees = _unique_texts((fragment.rank, fragment.tree) for fragment in fragments)
    if len(trees) > 1 and (
        found := kind_conflict([(rank, parse(msgspec.Raw(tree))) for rank, tree in trees], tensors)
    ):
        name, one, two = found
        raise ReplicasDiverged(
            name, (one, two), f" (tensor on rank {one} and plain value on rank {two})"
        )


def _is_checksum(text: str) -> bool:
    return CHECKSUM_PATTERN.fullmatch(text) is not None


def _check_names(files: Iterable[File], key: str, *, encoded: Mapping[int, Encoding]) -> None:
    seen: set[int] = set()
    for file in files:
        require(
            file.rank >= 0 and file.name == data_name(file.rank, is_encoded=file.rank in encoded),
            key,
            f"file name {file.name[:80]!r} is not that of its rank",
        )
        require(file.rank not in seen, key, f"file {file.name} is named twice")
        seen.add(file.rank)
        require(0 < file.size <= _MAX_BYTES, key, f"file {file.name} of {file.size} bytes")


def _check_chunks(files: Iterable[File], key: str) -> None:
    for file in files:
        for chunk in file.chunks:
            require(
                chunk.nbytes > 0 and _is_checksum(chunk.checksum), key, f"a chunk of {file.name}"
            )
        require(
            sum(chunk.nbytes for chunk in file.chunks) == file.size,
            key,
            f"the chunks of {file.name} do not add up to its size",
        )


def _check_encoded(record: Fragment, files: Mapping[int, File], key: str) -> None:
    """Check that each chunk decodes to a size that a save makes, since memory is
    reserved before.
    """
    if not record.encoded:
        return
    ranks = [encoding.rank for encoding in record.encoded]
    require(len(set(ranks)) == len(ranks), key, "a file is encoded twice")
    for encoding in record.encoded:
        file = files.get(encoding.rank)
        if file is None or len(encoding.lengths) != len(file.chunks):
            raise ManifestCorrupt(
                key, f"the lengths of rank {encoding.rank} are not those of its chunks"
            )
        require(encoding.codec == "zstd", key, f"the unknown codec {encoding.codec[:40]!r}")
        for chunk, length in zip(file.chunks, encoding.lengths, strict=True):
            fits = length == chunk.nbytes or 0 < length < chunk.nbytes <= MAX_CHUNK_BYTES
            require(
                fits, key, f"a chunk of {file.name} of {chunk.nbytes} bytes is encoded as {length}"
            )


def _check_tensors(
    tensors: Iterable[Tensor], files: Mapping[int, File], chunk_bytes: int, key: str
) -> None:
    chunks = {rank: _lengths(file) for rank, file in files.items()}
    seen: set[str] = set()
    for tensor in tensors:
        check_tensor(tensor, seen, key)
        for shard in tensor.shards:
            require(
                shard.box.is_inside(tensor.shape),
                key,
                f"tensor {tensor.name!r}: a box is not inside its shape",
            )
            _check_shard(tensor, shard, chunks.get(shard.rank), chunk_bytes, key)


def _lengths(file: File) -> dict[int, int]:
    """Return the bytes of each chunk, by where it begins."""
    return {
        offset: chunk.nbytes
        for offset, chunk in zip(chunk_offsets(file), file.chunks, strict=False)
    }


def _check_shard(
    tensor: Tensor, shard: Shard, chunks: dict[int, int] | None, chunk_bytes: int, key: str
) -> None:
    """Check a shard. In ``chunks`` those of the shards before are 0, and its own are 0 afterwards.

    So all shards together take no longer than their files have chunks.
    """
    if chunks is None:
        raise ManifestCorrupt(key, f"tensor {tensor.name!r}: rank {shard.rank} has no file")
    box, itemsize, offset = shard.box, DTYPES[tensor.dtype].itemsize, shard.offset
    if not box.numel:
        return
    fits = box.numel * itemsize < len(chunks) * chunk_bytes
    require(fits, key, f"tensor {tensor.name!r}: a shard has more bytes than its file has chunks")
    first = chunks.get(offset, 0)
    require(first <= chunk_bytes, key, f"tensor {tensor.name!r}: a chunk of {first} bytes")
    lengths = chunk_lengths(box.shape, first // itemsize, at_most=len(chunks))
    astray = "a shard does not lie on the chunks of its file, or overlaps another there"
    for length in [0] if lengths is None else lengths:
        require(
            0 < chunks.get(offset, 0) == length * itemsize, key, f"tensor {tensor.name!r}: {astray}"
        )
        chunks[offset] = 0
        offset += length * itemsize


def _check_tied(tied: Mapping[str, str], names: set[str], key: str) -> None:
    for name, target in tied.items():
        require(
            target in names and name not in names,
            key,
            f"{name[:80]!r} is tied to {target[:80]!r}, which is not stored",
        )


def _merge_tensors(fragments: Sequence[Fragment]) -> tuple[Tensor, ...]:
    by_name: dict[str, list[tuple[int, Tensor]]] = defaultdict(list)
    for fragment in fragments:
        for tensor in fragment.tensors:
            by_name[tensor.name].append((fragment.rank, tensor))
    checksums = _Checksums(fragments)
    merged: list[Tensor] = []
    for name in sorted(by_name):
        parts = by_name[name]
        first = parts[0][1]
        form = (first.dtype, first.shape)
        if any((part.dtype, part.shape) != form for _, part in parts) and (
            reported := forms_text(parts)
        ):
            raise TensorIncomplete(name, reported)
        shards = _unique(
            name, [shard for _, part in parts for shard in part.shards], checksums, first.dtype
        )
        if fault := tiling_fault(first.shape, [shard.box for shard in shards]):
            raise TensorIncomplete(name, f"{fault}: {ranks_text(parts)}")
        order = next((part.order for _, part in parts if part.order), ())
        merged.append(Tensor(name, first.dtype, first.shape, tuple(shards), order))
    return tuple(merged)


def _unique(name: str, shards: Sequence[Shard], checksums: _Checksums, dtype: str) -> list[Shard]:
    kept: dict[Box, Shard] = {}
    for shard in shards:
        other = kept.setdefault(shard.box, shard)
        if other is not shard and checksums.of(other, dtype) != checksums.of(shard, dtype):
            raise ReplicasDiverged(name, [other.rank, shard.rank])
    return [kept[box] for box in sorted(kept)]


class _Checksums:
    """The checksums of a shard's chunks, looked up only where two ranks stored the same box."""

    def __init__(self, fragments: Sequence[Fragment]) -> None:
        self._files = {fragment.rank: fragment.file for fragment in fragments}
        self._index: dict[int, dict[int, int]] = {}

    def of(self, shard: Shard, dtype: str) -> list[str]:
        file = self._files[shard.rank]
        if file is None or not shard.box.numel:
            return []
        if shard.rank not in self._index:
            self._index[shard.rank] = {offset: i for i, offset in enumerate(chunk_offsets(file))}
        start = self._index[shard.rank][shard.offset]
        first = file.chunks[start].nbytes // DTYPES[dtype].itemsize
        lengths = chunk_lengths(shard.shape, first, at_most=len(file.chunks) - start)
        assert lengths is not None  # the fragment was checked
        return [chunk.checksum for chunk in file.chunks[start : start + len(lengths)]]


def _merge_tied(fragments: Sequence[Fragment], stored: set[str]) -> dict[str, str]:
    """A name that some rank stores under its own name needs no tie."""
    tied: dict[str, str] = {}
    holder: dict[str, int] = {}
    for fragment in fragments:
        for name, target in fragment.tied.items():
            rank = holder.setdefault(name, fragment.rank)
            if tied.setdefault(name, target) != target and name not in stored:
                raise ReplicasDiverged(name, [rank, fragment.rank])
    return {name: target for name, target in sorted(tied.items()) if name not in stored}
