"""Reads of one tier's files -> reads of the same chunks in another tier's files of the same step,
which may be encoded otherwise.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping

from ckpt.model.manifest import Manifest, StoredFile
from ckpt.plan.restore import ChunkRead


def same_chunks(one: Manifest, two: Manifest) -> bool:
    """Return True if both hold the same bytes, however they are encoded."""
    return [(file.rank, file.chunks) for file in one.files] == [
        (file.rank, file.chunks) for file in two.files
    ]


def rebase(
    reads: Iterable[ChunkRead], here: Mapping[int, StoredFile], there: Mapping[int, StoredFile]
) -> list[ChunkRead]:
    """Return ``reads`` of the files ``here`` as reads of the files ``there``, in order.

    Chunks that are not there are left out, and so are those that are wanted as they are stored
    ``here`` if they are stored otherwise there.
    """
    found: list[ChunkRead] = []
    for read in reads:
        file = there.get(read.rank)
        if file is None or not _has(file, read):
            continue
        as_stored = read.as_stored and read.encoded_nbytes is not None
        if not as_stored or file.encoding == here[read.rank].encoding:
            found.append(read.moved(file, read.index, as_stored=as_stored))
    return found


def _has(file: StoredFile, read: ChunkRead) -> bool:
    return read.index < len(file.chunks) and file.chunks[read.index].checksum == read.checksum
