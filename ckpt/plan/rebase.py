"""Reads of one tier's files -> the same chunks in another tier's files of the same step, which may be encoded otherwise."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import replace
from itertools import accumulate

from ckpt.model.manifest import Encoding, File, Manifest, stored_lengths
from ckpt.plan.restore import ChunkRead


def same_file(one: Manifest, two: Manifest, rank: int) -> bool:
    """Whether the file of ``rank`` is the same, byte for byte, under the same name."""
    here, there = one.file_map().get(rank), two.file_map().get(rank)
    return here == there and one.encodings().get(rank) == two.encodings().get(rank)


def same_chunks(one: Manifest, two: Manifest) -> bool:
    """Whether both hold the same bytes, however they are encoded."""
    return [(file.rank, file.chunks) for file in one.files] == [
        (file.rank, file.chunks) for file in two.files
    ]


def rebase(reads: Iterable[ChunkRead], here: Manifest, there: Manifest) -> list[tuple[ChunkRead, ChunkRead]]:
    """Pairs of a read of ``here`` and the one of ``there`` for the same chunk, in order; chunks that ``there`` does not have are left out."""
    if here.encoded == there.encoded and here.files == there.files:
        return [(read, read) for read in reads]
    from_files, from_encodings = here.file_map(), here.encodings()
    files, encodings = there.file_map(), there.encodings()
    indices: dict[int, Mapping[int, int]] = {}
    places: dict[int, tuple[Sequence[int], Sequence[int]]] = {}
    pairs: list[tuple[ChunkRead, ChunkRead]] = []
    for read in reads:
        if read.rank not in indices:
            offsets, _ = _table(from_files, from_encodings, read.rank)
            indices[read.rank] = {offset: index for index, offset in enumerate(offsets)}
            places[read.rank] = _table(files, encodings, read.rank)
        offsets, lengths = places[read.rank]
        index = indices[read.rank][read.offset]
        if index < len(lengths) and files[read.rank].chunks[index].checksum == read.checksum:
            length = lengths[index]
            encoded = length if length < read.nbytes else None
            pairs.append((read, replace(read, offset=offsets[index], encoded_nbytes=encoded)))
    return pairs


def _table(
    files: Mapping[int, File], encodings: Mapping[int, Encoding], rank: int
) -> tuple[Sequence[int], Sequence[int]]:
    """Where the chunks of a rank's file begin, and their lengths there."""
    file = files.get(rank)
    if file is None:
        return (), ()
    lengths = stored_lengths(file, encodings.get(rank))
    return list(accumulate(lengths, initial=0)), lengths
