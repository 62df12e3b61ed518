"""Decide which ranks write copies of replicated tensors if nodes have tiers of their own, and which
copy a restore reads.

If each node writes its own copy of a replicated tensor, the manifest names only one of the copies.
A manifest with the fragments filled in also has the chunk tables of all files, and two chunks with
the same checksum and length are equal. A restore can therefore read an equal chunk on its own node
instead of a chunk that is on another node or lost.

A *leaf* is a tensor as one rank holds it. Its *replicas* are the ranks that hold the same boxes of
it, and may write a *slab* of each box, which is a part along one dimension. A *fragment* describes
what one rank has made durable.
"""

from __future__ import annotations

from collections import Counter, defaultdict
from collections.abc import Collection, Mapping, Sequence
from dataclasses import replace
from typing import Final

from ckpt.model.manifest import Manifest
from ckpt.plan.leaf import Leaf
from ckpt.plan.restore import ChunkRead, RestorePlan

_FARTHEST: Final = 2


def nearest_copies(
    plan: RestorePlan, manifest: Manifest, distance: Mapping[int, int]
) -> RestorePlan:
    """Return a copy of ``plan`` that reads each chunk from the nearest file with an equal chunk.

    As in ``plan``, each chunk of a file is read at most once. If no nearer file has an equal chunk,
    the read stays unchanged.

    Args:
        plan: The restore plan.
        manifest: The manifest, with the fragments of all ranks filled in.
        distance: The distance of the file of a rank: 0 for a file on this node, and 1 for a file on
            another node. The file of a rank that is not in the mapping counts as the farthest.
    """
    far_reads = [read for read in plan.reads if distance.get(read.rank, _FARTHEST)]
    if not far_reads:
        return plan
    far_chunks = {(read.nbytes, read.checksum) for read in far_reads}
    read_ids = {read.chunk_id for read in plan.reads}
    # For each chunk, the distance, the rank and the index of each copy that ``plan`` does not read
    copies: dict[tuple[int, str], list[tuple[int, int, int]]] = defaultdict(list)
    for file in manifest.files:
        file_distance = distance.get(file.rank, _FARTHEST)
        for index, chunk in enumerate(file.chunks):
            key = chunk.nbytes, chunk.checksum
            if key in far_chunks and (file.rank, index) not in read_ids:
                copies[key].append((file_distance, file.rank, index))
    for candidates in copies.values():
        candidates.sort(reverse=True)  # The nearest is the last, which ``pop`` takes
    files = manifest.stored_files()

    def nearer(read: ChunkRead) -> ChunkRead:
        candidates = copies.get((read.nbytes, read.checksum))
        if not candidates:
            return read
        nearest_distance, rank, index = candidates[-1]
        if nearest_distance >= distance.get(read.rank, _FARTHEST):
            return read
        candidates.pop()
        return read.from_file(files[rank], index)

    reads = sorted(map(nearer, plan.reads), key=lambda read: read.chunk_id)
    return replace(plan, reads=tuple(reads))


def writers(replicas: tuple[int, ...], rank: int, node_of: Sequence[int]) -> tuple[int, ...]:
    """Return the ranks that together write one copy of a tensor, each of them one slab. The result
    is empty if ``rank`` writes the whole tensor.

    * If ``rank`` does not hold the tensor, the result is ``replicas``.
    * If all nodes with replicas have the same number of them, and more than one, the result is the
      replicas on the node of ``rank``. Each node then has a copy.
    * In all other cases, the result is empty. With unequal numbers of replicas, the slabs of the
      nodes would have different sizes, and so no equal chunks.

    All replicas on a node get the same result.

    Args:
        replicas: The ranks that hold the tensor.
        rank: The rank that the result is for.
        node_of: The node of each rank.
    """
    if rank not in replicas:
        return replicas
    counts = Counter(node_of[replica] for replica in replicas)
    node_replicas = tuple(replica for replica in replicas if node_of[replica] == node_of[rank])
    return node_replicas if len(set(counts.values())) == 1 and len(node_replicas) > 1 else ()


def nonwriter_leaf(leaf: Leaf, ranks: tuple[int, ...], rank: int, node_of: Sequence[int]) -> Leaf:
    """Return the leaf that this rank plans for a tensor whose boxes another rank writes.

    The result is ``leaf`` without boxes, so that the fragment of this rank contains the name of the
    tensor. If no rank writes the boxes, the merge can therefore report that they are missing. If
    ``node_of`` is not empty, the lowest of ``ranks`` on each node keeps the boxes as a spare copy
    (see ``Leaf.spare``).

    Args:
        leaf: The tensor as this rank holds it.
        ranks: The ranks that hold the tensor.
        rank: This rank.
        node_of: The node of each rank; empty if the nodes have no tiers of their own.
    """
    lowest = min(
        (holder for holder in ranks if node_of and node_of[holder] == node_of[rank]), default=None
    )
    return replace(leaf, spare=True) if rank == lowest else replace(leaf, boxes=())


def ranks_without_copy(manifest: Manifest, remaining_ranks: Collection[int]) -> list[int]:
    """Return the ranks whose files are lost together with data that no remaining file has.

    The file of such a rank has a chunk without an equal chunk in the remaining files. The first
    chunk of a file is its header, and does not count.

    Args:
        manifest: The manifest, with the fragments of all ranks filled in.
        remaining_ranks: The ranks whose files remain.
    """
    chunks = {
        (chunk.nbytes, chunk.checksum)
        for file in manifest.files
        if file.rank in remaining_ranks
        for chunk in file.chunks
    }
    return [
        file.rank
        for file in manifest.files
        if file.rank not in remaining_ranks
        and any((chunk.nbytes, chunk.checksum) not in chunks for chunk in file.chunks[1:])
    ]
