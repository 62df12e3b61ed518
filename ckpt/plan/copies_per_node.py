"""Copies of replicated tensors on several nodes: which ranks write them, and which one is read.
Pure decisions.

If each node has written its own copy of replicated tensors, the manifest names one of these copies.
But it has the chunk tables of all files, and chunks with the same checksum and length are equal. So
a near copy can replace one that is far or gone.
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
    """Return ``plan`` with each chunk read from the nearest rank's file that holds it.

    Every place is read once, as in ``plan``. A chunk without a nearer copy stays.

    Args:
        distance: The distance of ranks' files: 0 is this node, 1 is nearer than all ranks that are
            not listed.
    """
    far = [read for read in plan.reads if distance.get(read.rank, _FARTHEST)]
    if not far:
        return plan
    wanted = {(read.nbytes, read.checksum) for read in far}
    taken = {read.place for read in plan.reads}
    copies: dict[tuple[int, str], list[tuple[int, int, int]]] = defaultdict(list)
    for file in manifest.files:
        far_off = distance.get(file.rank, _FARTHEST)
        for index, chunk in enumerate(file.chunks):
            key = chunk.nbytes, chunk.checksum
            if key in wanted and (file.rank, index) not in taken:
                copies[key].append((far_off, file.rank, index))
    for found in copies.values():
        found.sort(reverse=True)
    files = manifest.stored_files()

    def nearer(read: ChunkRead) -> ChunkRead:
        found = copies.get((read.nbytes, read.checksum))
        if not found or found[-1][0] >= distance.get(read.rank, _FARTHEST):
            return read
        _, rank, index = found.pop()
        return read.moved(files[rank], index)

    reads = sorted(map(nearer, plan.reads), key=lambda read: read.place)
    return replace(plan, reads=tuple(reads))


def writers(replicas: tuple[int, ...], rank: int, node_of: Sequence[int]) -> tuple[int, ...]:
    """Return the ranks of ``replicas`` that share the writing of one copy with ``rank``.

    They are all of them, or those of its node if nodes are given. A lone rank gets an empty tuple.
    Every replica decides alike. If nodes hold unequal numbers of replicas, each rank writes all of
    it, since parts that are cut in different ways are no copies of each other.
    """
    if not node_of or rank not in replicas:
        return replicas
    counts = Counter(node_of[other] for other in replicas)
    mates = tuple(other for other in replicas if node_of[other] == node_of[rank])
    return mates if len(set(counts.values())) == 1 and len(mates) > 1 else ()


def left(leaf: Leaf, ranks: tuple[int, ...], rank: int, node_of: Sequence[int]) -> Leaf:
    """Return ``leaf`` for a rank that leaves it to the first of ``ranks``.

    It is a name without elements. If nodes are given, it is a spare copy on the lowest rank of each
    node. The name makes a loss an error: if no rank had any elements, the merge would abort.
    """
    lowest = min(
        (other for other in ranks if node_of and node_of[other] == node_of[rank]), default=None
    )
    return replace(leaf, spare=True) if rank == lowest else replace(leaf, boxes=())


def without_copy(manifest: Manifest, there: Collection[int]) -> list[int]:
    """Return the ranks of whose file some chunk is in no file of ``there``.

    A file's header, its first chunk, is not needed.
    """
    held = {
        (chunk.nbytes, chunk.checksum)
        for file in manifest.files
        if file.rank in there
        for chunk in file.chunks
    }
    return [
        file.rank
        for file in manifest.files
        if file.rank not in there
        and any((chunk.nbytes, chunk.checksum) not in held for chunk in file.chunks[1:])
    ]
