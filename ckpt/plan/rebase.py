"""Reads of one tier's files -> the same chunks in another tier's files of the same step, which
may be encoded otherwise.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import replace
from itertools import accumulate

from ckpt.model.manifest import Chunk, Encoding, File, Manifest, stored_lengths
from ckpt.plan.restore import ChunkRead


def same_chunks(one: Manifest, two: Manifest) -> bool:
    """Return True if both hold the same bytes, however they are encoded."""
    return [(file.rank, file.chunks) for file in one.files] == [
        (file.rank, file.chunks) for file in two.files
    ]


class Rebase:
    """From the files of ``here`` to those of ``there``. Threads: any."""

    def __init__(self, here: Manifest, there: Manifest) -> None:
        self.there = there
        self._alike = here is there or (here.encoded == there.encoded and here.files == there.files)
        self._here = here.file_map(), here.encodings()
        self._there = there.file_map(), there.encodings()
        self._known: dict[
            int, tuple[Mapping[int, int], Sequence[Chunk], Sequence[int], Sequence[int], bool]
        ] = {}

    def __call__(self, reads: Iterable[ChunkRead]) -> list[tuple[ChunkRead, ChunkRead]]:
        """Pairs of a read and the one for the same chunk there, in order.

        Chunks that are not there are left out, and so are those that are wanted as they are stored
        ``here`` if they are stored otherwise there.
        """
        if self._alike:
            return [(read, read) for read in reads]
        pairs: list[tuple[ChunkRead, ChunkRead]] = []
        for read in reads:
            indices, chunks, offsets, lengths, same = self._file(read.rank)
            index = indices[read.offset]
            as_stored = read.as_stored and read.encoded_nbytes is not None
            if (
                index < len(chunks)
                and chunks[index].checksum == read.checksum
                and (same or not as_stored)
            ):
                length = lengths[index]
                encoded = length if length < read.nbytes else None
                moved = replace(
                    read, offset=offsets[index], encoded_nbytes=encoded, as_stored=as_stored
                )
                pairs.append((read, moved))
        return pairs

    def _file(
        self, rank: int
    ) -> tuple[Mapping[int, int], Sequence[Chunk], Sequence[int], Sequence[int], bool]:
        """Index of each chunk by its place here; the chunks, their places and lengths there;
        whether the file is the same.
        """
        if rank not in self._known:
            places, _ = _table(*self._here, rank)
            offsets, lengths = _table(*self._there, rank)
            file = self._there[0].get(rank)
            self._known[rank] = (
                {offset: index for index, offset in enumerate(places)},
                file.chunks if file else (),
                offsets,
                lengths,
                self._here[1].get(rank) == self._there[1].get(rank),
            )
        return self._known[rank]


def _table(
    files: Mapping[int, File], encodings: Mapping[int, Encoding], rank: int
) -> tuple[Sequence[int], Sequence[int]]:
    """Return where the chunks of a rank's file begin, and their lengths in the file."""
    file = files.get(rank)
    if file is None:
        return (), ()
    lengths = stored_lengths(file, encodings.get(rank))
    return list(accumulate(lengths, initial=0)), lengths
