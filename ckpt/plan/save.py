"""Make the save plan: the boxes that a rank writes, and their places in its image.

1. Share: the replicas of a leaf together write it once. A large leaf is cut into slabs, one for
each replica. A small leaf, or one with a box that cannot be cut into that many slabs, is written by
the replica that has the fewest bytes to write so far. All replicas have the same leaves and compute
the same division, so they exchange no messages.

2. Order: the boxes are sorted by descending element size, then by name. Therefore every box is
aligned and the image has no gaps, as safetensors requires.

3. Place: the image begins with a safetensors header, padded to a multiple of 4096 bytes. The boxes
follow.
"""

from __future__ import annotations

import heapq
from collections import defaultdict
from collections.abc import Iterable, Sequence
from dataclasses import dataclass

import msgspec

from ckpt.model.box import Box, even_slab
from ckpt.model.chunks import split_box
from ckpt.model.dtype import safetensors_entry
from ckpt.model.manifest import HEADER_ALIGNMENT, Shard, Tensor
from ckpt.plan.leaf import Leaf

SPLIT_FROM_BYTES = 256 << 10
"""The smallest size in bytes from which a replicated tensor is cut into slabs. For a smaller
tensor, the additional requests would cost more time than the slabs save.
"""


@dataclass(frozen=True, slots=True, kw_only=True)
class WriteItem:
    """One box that a rank writes.

    Attributes:
        leaf: The index of the leaf in the argument ``leaves`` of ``plan_save``.
        box: The box.
        offset: The position of the box in the image in bytes.
        nbytes: The size of the box in bytes.
    """

    leaf: int
    box: Box
    offset: int
    nbytes: int


@dataclass(frozen=True, slots=True, kw_only=True)
class SavePlan:
    """The layout of the image of one rank. The same leaves always give the same plan.

    Attributes:
        header: The padded safetensors header, with which the image begins.
        items: The boxes in the order of the image, without gaps after the header.
        size: The size of the whole image in bytes.
        chunks: The sizes of the chunks in bytes, in the order of the image. The header is the first
            chunk.
        tensors: The tensors with the shards of this rank, as the fragment describes them.
    """

    header: bytes
    items: tuple[WriteItem, ...]
    size: int
    chunks: tuple[int, ...]
    tensors: tuple[Tensor, ...]


def plan_save(leaves: Sequence[Leaf], *, rank: int, chunk_bytes: int) -> SavePlan:
    """Return the save plan of ``rank``.

    If all replicas of a leaf call this with the same leaves, their plans together write each leaf
    once, without gap or overlap.

    Args:
        leaves: The leaves of this rank.
        rank: This rank.
        chunk_bytes: The largest size of a chunk in bytes, except for the header.
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
        chunks += [part.numel * itemsize for part in split_box(box, itemsize, chunk_bytes)]
        end += box.numel * itemsize
    return SavePlan(
        header=header,
        items=tuple(items),
        size=end,
        chunks=tuple(chunks),
        tensors=_tensors(leaves, items, rank),
    )


def _share(leaves: Sequence[Leaf], rank: int) -> list[tuple[int, Box]]:
    own_boxes: list[tuple[int, Box]] = []
    small: dict[tuple[int, ...], list[int]] = defaultdict(list)
    for index, leaf in enumerate(leaves):
        if len(leaf.replicas) < 2:
            own_boxes += [(index, box) for box in leaf.boxes]
        elif leaf.nbytes >= SPLIT_FROM_BYTES and all(_slab(box, leaf, 0) for box in leaf.boxes):
            part = leaf.replicas.index(rank)
            own_boxes += [(index, slab) for box in leaf.boxes if (slab := _slab(box, leaf, part))]
        else:
            small[leaf.replicas].append(index)
    for replicas, indices in small.items():
        own_boxes += [
            (index, box)
            for index in _lightest(leaves, indices, replicas, rank)
            for box in leaves[index].boxes
        ]
    return own_boxes


def _slab(box: Box, leaf: Leaf, part: int) -> Box | None:
    return even_slab(box, len(leaf.replicas), part)


def _lightest(
    leaves: Sequence[Leaf], indices: Iterable[int], replicas: tuple[int, ...], rank: int
) -> list[int]:
    """Distribute small leaves among their replicas, and return the indices of those that ``rank``
    writes.

    In order of descending size, each leaf goes to the replica that has the fewest bytes so far. The
    replica with the most bytes then has at most 4/3 of the optimum (Graham 1969). All replicas
    compute the same distribution.
    """
    loads = sorted((0, replica) for replica in replicas)  # A sorted list is a valid heap
    own_indices: list[int] = []
    for index in sorted(indices, key=lambda i: (-leaves[i].nbytes, leaves[i].name)):
        load, owner = loads[0]
        heapq.heapreplace(loads, (load + max(1, leaves[index].nbytes), owner))
        if owner == rank:
            own_indices.append(index)
    return own_indices


def _header(leaves: Sequence[Leaf], order: Sequence[tuple[int, Box]], rank: int) -> bytes:
    """Return the padded safetensors header for the boxes in ``order``. If a rank writes several
    boxes of a tensor, their names in the header are 'name', 'name@1' and so on.
    """
    entries: dict[str, object] = {"__metadata__": {"format": "pt", "ckpt": "1", "rank": str(rank)}}
    names = {leaf.name for leaf in leaves}
    serials: dict[int, int] = {}  # The last serial number of each leaf
    start = 0
    for index, box in order:
        leaf = leaves[index]
        serial = serials.get(index, -1) + 1
        name = f"{leaf.name}@{serial}" if serial else leaf.name
        while name in entries or (serial and name in names):
            serial += 1
            name = f"{leaf.name}@{serial}"
        serials[index] = serial
        entries[name], start = safetensors_entry(leaf.dtype, box.shape, start)
    text = msgspec.json.encode(entries)
    size = -(-(8 + len(text)) // HEADER_ALIGNMENT) * HEADER_ALIGNMENT
    return (size - 8).to_bytes(8, "little") + text.ljust(size - 8)


def _tensors(leaves: Sequence[Leaf], items: Iterable[WriteItem], rank: int) -> tuple[Tensor, ...]:
    shards: dict[int, list[Shard]] = defaultdict(list)
    for item in items:
        if leaves[item.leaf].spare:
            continue
        shards[item.leaf].append(Shard(rank, item.offset, item.box.offsets, item.box.shape))
    return tuple(
        Tensor(leaf.name, leaf.dtype, leaf.shape, tuple(shards[i]), leaf.order)
        for i, leaf in enumerate(leaves)
    )
