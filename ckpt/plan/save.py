"""Make the save plan: the boxes that a rank writes, and their places in its image.

A *leaf* is a tensor as one rank holds it, and the *image* is the rank's part of the state in
memory, laid out as its file. *Replicas* are ranks that hold the same boxes. A *slab* is a part of a
box along one dimension. A *frozen* tensor is not expected to change between two saves. An
*increment* is a data file without the first chunks of its image, which the file of another step
has. A *spare* leaf is a further copy, which the fragment does not name.

1. Share: the replicas of a leaf together write it once. A large leaf is cut into slabs, one for
each replica. A small leaf, or one with a box that cannot be cut into that many slabs, is written by
the replica that has the fewest bytes to write so far. All replicas have the same leaves and compute
the same division, so they exchange no messages.

2. Order: the boxes are sorted by descending element size, then by name. Therefore every box is
aligned and the image has no gaps, as safetensors requires. Boxes of frozen tensors come first, so
that an increment can leave them out. They are a multiple of 16 bytes each, which keeps the others
aligned.

3. Place: the image begins with a safetensors header, padded to a multiple of 4096 bytes. The boxes
follow.
"""

from __future__ import annotations

import heapq
from collections import defaultdict
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass
from itertools import accumulate

import msgspec

from ckpt.model.box import Box, even_slab, split_rows
from ckpt.model.chunks import split_box
from ckpt.model.dtype import DTYPES, safetensors_entry
from ckpt.model.manifest import HEADER_ALIGNMENT, Shard, Tensor
from ckpt.plan.leaf import Leaf

_ALIGNMENT = 16
"""The largest size of an element in bytes."""
SPLIT_FROM_BYTES = 256 << 10
"""The smallest size in bytes from which a replicated tensor is cut into slabs. For a smaller
tensor, the additional requests would cost more time than the slabs save.
"""


Entry = tuple[str, str, tuple[int, ...]]
"""The name and the dtype of a tensor, and the shape of one box of it."""


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
        frozen_chunks: How many chunks, from the begin of the image on, hold the header and frozen
            tensors; 0 if no tensor is frozen.
    """

    header: bytes
    items: tuple[WriteItem, ...]
    size: int
    chunks: tuple[int, ...]
    tensors: tuple[Tensor, ...]
    frozen_chunks: int = 0


def plan_save(leaves: Sequence[Leaf], *, rank: int, chunk_bytes: int) -> SavePlan:
    """Return the save plan of ``rank``.

    If all replicas of a leaf call this with the same leaves, their plans together write each leaf
    once, without gap or overlap.

    Args:
        leaves: The leaves of this rank.
        rank: This rank.
        chunk_bytes: The largest size of a chunk in bytes, except for the header.
    """

    def image_order(indexed_box: tuple[int, Box]) -> tuple[int, str, Box]:
        index, box = indexed_box
        return -leaves[index].itemsize, leaves[index].name, box

    order = sorted(_own_boxes(leaves, rank), key=image_order)
    frozen_boxes = [
        (index, box)
        for index, box in order
        if leaves[index].is_frozen and box.numel * leaves[index].itemsize % _ALIGNMENT == 0
    ]
    if frozen_boxes:
        frozen_set = set(frozen_boxes)
        order = frozen_boxes + [box for box in order if box not in frozen_set]
    header = safetensors_header(
        [(leaves[index].name, leaves[index].dtype, box.shape) for index, box in order], rank
    )
    items: list[WriteItem] = []
    chunks = [len(header)]
    end, frozen_chunks = len(header), 0
    for position, (index, box) in enumerate(order):
        itemsize = leaves[index].itemsize
        items.append(WriteItem(leaf=index, box=box, offset=end, nbytes=box.numel * itemsize))
        chunks += [part.numel * itemsize for part in split_box(box, itemsize, chunk_bytes)]
        end += box.numel * itemsize
        if position < len(frozen_boxes):
            frozen_chunks = len(chunks)
    return SavePlan(
        header=header,
        items=tuple(items),
        size=end,
        chunks=tuple(chunks),
        tensors=_tensors(leaves, items, rank),
        # An increment gets its header from ``tensors``, which lack the spare boxes.
        frozen_chunks=0 if any(leaf.spare for leaf in leaves) else frozen_chunks,
    )


def _own_boxes(leaves: Sequence[Leaf], rank: int) -> list[tuple[int, Box]]:
    """Return the boxes that ``rank`` writes, each with the index of its leaf."""
    own_boxes: list[tuple[int, Box]] = []
    small_leaves: dict[tuple[int, ...], list[int]] = defaultdict(list)  # Indices by replicas
    for index, leaf in enumerate(leaves):
        if len(leaf.replicas) < 2:
            own_boxes += [(index, box) for box in leaf.boxes]
        elif leaf.nbytes >= SPLIT_FROM_BYTES and all(_slab(box, leaf, 0) for box in leaf.boxes):
            part = leaf.replicas.index(rank)
            own_boxes += [(index, slab) for box in leaf.boxes if (slab := _slab(box, leaf, part))]
        else:
            small_leaves[leaf.replicas].append(index)
    for replicas, indices in small_leaves.items():
        own_boxes += [
            (index, box)
            for index in _balance(leaves, indices, replicas, rank)
            for box in leaves[index].boxes
        ]
    return own_boxes


def _slab(box: Box, leaf: Leaf, part: int) -> Box | None:
    """Return the slab of ``box`` for the replica with index ``part``; None if the box cannot be cut
    into a slab for each replica.
    """
    return even_slab(box, len(leaf.replicas), part)


def _balance(
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
        # An empty leaf counts as a byte, so that one replica does not get all of them.
        heapq.heapreplace(loads, (load + max(1, leaves[index].nbytes), owner))
        if owner == rank:
            own_indices.append(index)
    return own_indices


def safetensors_header(entries: Sequence[Entry], rank: int, *, phase: int = 0) -> bytes:
    """Return the padded safetensors header of a file that holds boxes without gaps.

    If the file has several boxes of a tensor, their names in the header are 'name', 'name@1' and so
    on.

    Args:
        entries: The boxes, in the order of the file.
        rank: The rank whose file it is.
        phase: The length of the header modulo ``HEADER_ALIGNMENT``.
    """
    table: dict[str, object] = {"__metadata__": {"format": "pt", "ckpt": "1", "rank": str(rank)}}
    names = {name for name, _, _ in entries}
    serials: dict[str, int] = {}  # The last serial number of each tensor
    start = 0
    for tensor, dtype, shape in entries:
        serial = serials.get(tensor, -1) + 1
        name = f"{tensor}@{serial}" if serial else tensor
        while name in table or (serial and name in names):  # A tensor may be called 'name@1'
            serial += 1
            name = f"{tensor}@{serial}"
        serials[tensor] = serial
        table[name], start = safetensors_entry(dtype, shape, start)
    text = msgspec.json.encode(table)
    size = 8 + len(text)
    size += (phase - size) % HEADER_ALIGNMENT
    return (size - 8).to_bytes(8, "little") + text.ljust(size - 8)


def boxes_of_chunks(plan: SavePlan, limit: int) -> dict[int, tuple[Tensor, Box]]:
    """Return the tensor and the box that each of the first ``limit`` chunks holds, by the index of
    the chunk. The header is left out.
    """
    starts = accumulate(plan.chunks[:limit], initial=0)
    index_at = {start: index for index, start in enumerate(starts)}
    boxes: dict[int, tuple[Tensor, Box]] = {}
    for tensor in plan.tensors:
        for shard in tensor.shards:
            begin = index_at.get(shard.offset, limit)
            if begin < limit:
                most_elements = plan.chunks[begin] // DTYPES[tensor.dtype].itemsize
                parts = enumerate(split_rows(shard.box, most_elements), begin)
                boxes |= {index: (tensor, box) for index, box in parts}
    return boxes


def tail_header(
    tensors: Iterable[Tensor],
    chunks: Sequence[int],
    count: int,
    rank: int,
    *,
    has_image_header: bool = False,
) -> bytes:
    """Return the header of an increment, which holds all chunks of an image but the first
    ``count``.

    A box whose first chunks are left out has an entry for each of its other chunks. The length of
    the header is that of the chunks before, modulo ``HEADER_ALIGNMENT``. So each byte of the image
    has the same alignment in the file as in memory.

    Args:
        tensors: The tensors with the shards of the rank.
        chunks: The lengths of all chunks of the image in bytes.
        count: How many chunks are left out.
        rank: The rank of the image.
        has_image_header: Whether the increment has the first chunk too, the header of the image.
            This is the first entry, with the name "image-header".
    """
    starts = list(accumulate(chunks, initial=0))
    shards = sorted(
        (shard.offset, index, tensor, shard)
        for index, tensor in enumerate(tensors)
        for shard in tensor.shards
    )

    def entries() -> Iterator[Entry]:
        if has_image_header:
            yield "image-header", "uint8", (chunks[0],)
        for offset, _, tensor, shard in shards:
            itemsize = DTYPES[tensor.dtype].itemsize
            if offset >= starts[count]:  # The whole box is in the increment
                yield tensor.name, tensor.dtype, shard.shape
            elif offset + shard.box.numel * itemsize > starts[count]:
                first_chunk = starts.index(offset)
                boxes = split_rows(shard.box, chunks[first_chunk] // itemsize)
                for box in boxes[count - first_chunk :]:
                    yield tensor.name, tensor.dtype, box.shape

    return safetensors_header(list(entries()), rank, phase=starts[count] % HEADER_ALIGNMENT)


def _tensors(leaves: Sequence[Leaf], items: Iterable[WriteItem], rank: int) -> tuple[Tensor, ...]:
    """Return the tensors of all ``leaves`` that are not spare, with the shards that ``items``
    write. A shard is one box and its place in the file of ``rank``.
    """
    shards: dict[int, list[Shard]] = defaultdict(list)
    for item in items:
        if leaves[item.leaf].spare:
            continue
        shards[item.leaf].append(Shard(rank, item.offset, item.box.offsets, item.box.shape))
    return tuple(
        Tensor(leaf.name, leaf.dtype, leaf.shape, tuple(shards[i]), leaf.order)
        for i, leaf in enumerate(leaves)
    )
