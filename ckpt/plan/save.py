"""The boxes that a rank writes, and their places in its image.

1. *Share*: a leaf that n replicas hold is written once. A large leaf is cut into n slabs, and a
small one goes to the replica with the least work. Every replica decides alike from the same leaves,
so nothing is exchanged. 2. *Order*: descending element size, then name. So every tensor is aligned
and the image has no gaps, as safetensors requires. 3. *Place*: a safetensors header padded to 4096
bytes, then the tensors.
"""

from __future__ import annotations

import heapq
from collections import defaultdict
from collections.abc import Iterable, Sequence
from dataclasses import dataclass

import msgspec

from ckpt.model.box import Box, even_slab
from ckpt.model.chunks import cut
from ckpt.model.dtype import safetensors_entry
from ckpt.model.manifest import HEADER_ALIGNMENT, Shard, Tensor
from ckpt.plan.leaf import Leaf

SPLIT_FROM_BYTES = 256 << 10
"""Replicated tensors from this size on are cut among their replicas; below, the cut would cost
more requests than it saves bytes.
"""


@dataclass(frozen=True, slots=True, kw_only=True)
class WriteItem:
    """One box of a leaf in the image.

    ``offset`` and ``nbytes`` are in bytes of the file. ``leaf`` is an index of the planned leaves.
    """

    leaf: int
    box: Box
    offset: int
    nbytes: int


@dataclass(frozen=True, slots=True, kw_only=True)
class SavePlan:
    """The layout of the image of one rank. It does not change while the leaves do not.

    Attributes:
        header: The first bytes of the file, padded.
        items: The items in file order, without gaps after the header.
        size: The size of the whole file in bytes.
        chunks: The lengths of all chunks: the header, then those of each item.
        tensors: The tensors as the fragment describes them.
    """

    header: bytes
    items: tuple[WriteItem, ...]
    size: int
    chunks: tuple[int, ...]
    tensors: tuple[Tensor, ...]


def plan_save(leaves: Sequence[Leaf], *, rank: int, chunk_bytes: int) -> SavePlan:
    """Return the plan of ``rank``.

    Needs no other rank: replicas that are given the same leaves share them without gap or overlap.
    """
    boxes = _share(leaves, rank)
    order = sorted(
        boxes, key=lambda pair: (-leaves[pair[0]].itemsize, leaves[pair[0]].name, pair[1])
    )
    header = _header(leaves, order, rank)
    items: list[WriteItem] = []
    chunks = [len(header)]
    end = len(header)
    for index, box in order:
        itemsize = leaves[index].itemsize
        items.append(WriteItem(leaf=index, box=box, offset=end, nbytes=box.numel * itemsize))
        chunks += [part.numel * itemsize for part in cut(box, itemsize, chunk_bytes)]
        end += box.numel * itemsize
    return SavePlan(
        header=header,
        items=tuple(items),
        size=end,
        chunks=tuple(chunks),
        tensors=_tensors(leaves, items, rank),
    )


def _share(leaves: Sequence[Leaf], rank: int) -> list[tuple[int, Box]]:
    mine: list[tuple[int, Box]] = []
    small: dict[tuple[int, ...], list[int]] = defaultdict(list)
    for index, leaf in enumerate(leaves):
        if len(leaf.replicas) < 2:
            mine += [(index, box) for box in leaf.boxes]
        elif leaf.nbytes >= SPLIT_FROM_BYTES and all(_cut(box, leaf, 0) for box in leaf.boxes):
            part = leaf.replicas.index(rank)
            mine += [(index, slab) for box in leaf.boxes if (slab := _cut(box, leaf, part))]
        else:
            small[leaf.replicas].append(index)
    for replicas, indices in small.items():
        mine += [
            (index, box)
            for index in _lightest(leaves, indices, replicas, rank)
            for box in leaves[index].boxes
        ]
    return mine


def _cut(box: Box, leaf: Leaf, part: int) -> Box | None:
    return even_slab(box, len(leaf.replicas), part)


def _lightest(
    leaves: Sequence[Leaf], indices: Iterable[int], replicas: tuple[int, ...], rank: int
) -> list[int]:
    """Give the largest leaf to the replica with the least work, and so on.

    The result is within 4/3 of the optimum (Graham 1969), and the same on every replica.
    """
    loads = sorted((0, replica) for replica in replicas)  # A sorted list is a heap
    mine: list[int] = []
    for index in sorted(indices, key=lambda i: (-leaves[i].nbytes, leaves[i].name)):
        load, owner = loads[0]
        heapq.heapreplace(loads, (load + max(1, leaves[index].nbytes), owner))
        if owner == rank:
            mine.append(index)
    return mine


def _header(leaves: Sequence[Leaf], order: Sequence[tuple[int, Box]], rank: int) -> bytes:
    """Return a safetensors header. A tensor with several boxes here has them as 'name', 'name@1'
    and so on.
    """
    entries: dict[str, object] = {"__metadata__": {"format": "pt", "ckpt": "1", "rank": str(rank)}}
    taken = {leaf.name for leaf in leaves}
    start = 0
    for index, box in order:
        leaf = leaves[index]
        name, serial = leaf.name, 0
        while name in entries or (serial and name in taken):
            serial += 1
            name = f"{leaf.name}@{serial}"
        entries[name], start = safetensors_entry(leaf.dtype, box.shape, start)
    text = msgspec.json.encode(entries)
    padded = -(-(8 + len(text)) // HEADER_ALIGNMENT) * HEADER_ALIGNMENT
    return (padded - 8).to_bytes(8, "little") + text.ljust(padded - 8)


def _tensors(leaves: Sequence[Leaf], items: Iterable[WriteItem], rank: int) -> tuple[Tensor, ...]:
    shards: dict[int, list[Shard]] = defaultdict(list)
    for item in items:
        if leaves[item.leaf].spare:
            continue
        shards[item.leaf].append(Shard(rank, item.offset, item.box.offsets, item.box.shape))
    return tuple(
        Tensor(leaf.name, leaf.dtype, leaf.shape, tuple(shards[i])) for i, leaf in enumerate(leaves)
    )
