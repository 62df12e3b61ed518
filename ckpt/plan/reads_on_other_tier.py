"""Change chunk reads from the files of one tier to the files of another tier.

Both tiers hold the same step, but may encode its files differently. A read wants the bytes of a
chunk decoded, or encoded as the tier has them (``as_stored``).
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping

from ckpt.model.manifest import Manifest, StoredFile
from ckpt.plan.restore import ChunkRead


def same_chunks(a: Manifest, b: Manifest) -> bool:
    """Return True if the data files of both manifests have the same raw bytes. Their encodings may
    differ. Both manifests must have the fragments of all ranks filled in.
    """
    return [(file.rank, file.chunks) for file in a.files] == [
        (file.rank, file.chunks) for file in b.files
    ]


def rebase(
    reads: Iterable[ChunkRead],
    source_files: Mapping[int, StoredFile],
    target_files: Mapping[int, StoredFile],
) -> list[ChunkRead]:
    """Return reads that get the chunks of ``reads`` from the files of another tier, in this order.

    The result leaves out a read if the other tier does not have the chunk. It also leaves out a
    read that wants the encoded bytes of a chunk, if the other tier encodes the file in another way.

    Args:
        reads: Reads from the files of the first tier.
        source_files: The files of the first tier, by rank.
        target_files: The files of the other tier, by rank.
    """
    target_reads: list[ChunkRead] = []
    for read in reads:
        file = target_files.get(read.rank)
        if file is None or not _has_equal_chunk(file, read):
            continue
        as_stored = read.as_stored and read.encoded_nbytes is not None
        if not as_stored or file.encoding == source_files[read.rank].encoding:
            target_reads.append(read.from_file(file, read.index, as_stored=as_stored))
    return target_reads


def _has_equal_chunk(file: StoredFile, read: ChunkRead) -> bool:
    return read.index < len(file.chunks) and file.chunks[read.index].checksum == read.checksum
