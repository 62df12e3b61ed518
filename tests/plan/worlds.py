"""What an engine would write for a world of ranks, with NumPy for tensors."""

from __future__ import annotations

import random
from collections.abc import Mapping, Sequence

import msgspec
import numpy as np

from ckpt.model.box import Box
from ckpt.model.checksum import checksum
from ckpt.model.fill_manifest import fill_manifest
from ckpt.model.fragment_columns import fragment_of as unpacked
from ckpt.model.fragment_columns import pack_fragment
from ckpt.model.keys import data_name, fragment_name
from ckpt.model.manifest import FORMAT, Chunk, File, Fragment, FragmentRef, Manifest, Packed
from ckpt.model.record_encoding import pack, unpack
from ckpt.model.validate import check_manifest
from ckpt.plan.leaf import Leaf
from ckpt.plan.merge import MergeCache, merge
from ckpt.plan.restore import coalesce, plan_restore
from ckpt.plan.save import SavePlan, plan_save

Arrays = Mapping[str, np.ndarray]


def raw(node: object) -> msgspec.Raw:
    return msgspec.Raw(msgspec.json.encode(node))


def image_of(plan: SavePlan, leaves: Sequence[Leaf], arrays: Arrays) -> bytes:
    image = bytearray(plan.header)
    for item in plan.items:
        assert len(image) == item.offset
        image += np.ascontiguousarray(arrays[leaves[item.leaf].name][item.box.slices()]).tobytes()
    assert len(image) == plan.size
    return bytes(image)


def fragment_of(
    rank: int,
    world_size: int,
    leaves: Sequence[Leaf],
    arrays: Arrays,
    *,
    chunk_bytes: int = 64,
    **changes: object,
) -> tuple[bytes, Fragment]:
    """Return the file and the fragment of one rank."""
    plan = plan_save(leaves, rank=rank, chunk_bytes=chunk_bytes)
    image = image_of(plan, leaves, arrays)
    return image, fragment_over(rank, world_size, plan, image, chunk_bytes=chunk_bytes, **changes)


def fragment_over(
    rank: int, world_size: int, plan: SavePlan, image: bytes, *, chunk_bytes: int, **changes: object
) -> Fragment:
    """Return the fragment of one rank with this image."""
    chunks: list[Chunk] = []
    end = 0
    for nbytes in plan.chunks:
        chunks.append(Chunk(nbytes, checksum(image[end : end + nbytes])))
        end += nbytes
    fragment = Fragment(
        format=FORMAT,
        step=5,
        attempt="abcxyz",
        rank=rank,
        world_size=world_size,
        created_at=1000.0 + rank,
        chunk_bytes=chunk_bytes,
        file=File(data_name(rank), rank, plan.size, tuple(chunks)),
        tensors=plan.tensors,
        tied={},
        tree=raw({}),
        per_rank=raw({}),
        replicas={},
        metadata=raw({}),
    )
    return msgspec.structs.replace(fragment, **changes)


def with_ref(fragment: Fragment) -> tuple[Packed, FragmentRef]:
    """Return the fragment as it is stored, and its entry in the manifest."""
    packed = pack_fragment(fragment)
    data = pack(packed)
    return packed, FragmentRef(
        fragment_name(fragment.rank), fragment.rank, len(data), checksum(data)
    )


def merged(fragments: Sequence[Fragment], known: MergeCache | None = None) -> Manifest:
    """Return the manifest of these fragments, stored, read and checked, with all of
    them filled in.
    """
    parts = [with_ref(fragment) for fragment in fragments]
    stored = pack(merge(parts, known))
    manifest = check_manifest(unpack(stored, Manifest, key="k"), key="k")
    return fill_manifest(
        manifest, {part.rank: unpacked(part, key="k") for part, _ in parts}, key="k"
    )


def assign(boxes: Sequence[Box], world_size: int, rng: random.Random) -> list[tuple[Box, ...]]:
    """Assign each box to one rank."""
    owned: list[list[Box]] = [[] for _ in range(world_size)]
    for box in boxes:
        owned[rng.randrange(world_size)].append(box)
    return [tuple(held) for held in owned]


def fetch(
    manifest: Manifest, images: Mapping[int, bytes], wanted: Sequence[Leaf], *, most: int, gap: int
) -> list[list[np.ndarray]]:
    """Return the pieces of each wanted leaf, read exactly as the plan says."""
    plan = plan_restore(manifest, wanted)
    found = [[np.zeros(box.shape, dtype=leaf.dtype) for box in leaf.boxes] for leaf in wanted]
    for run in coalesce(plan.reads, most_bytes=most, gap_bytes=gap):
        data = images[run.rank][run.offset : run.offset + run.nbytes]
        for read in run.reads:
            piece = data[read.offset - run.offset :][: read.nbytes]
            assert checksum(piece) == read.checksum
            chunk = np.frombuffer(piece, dtype=read.dtype).reshape(read.box.shape)
            for target in read.targets:
                box = wanted[target.leaf].boxes[target.piece]
                part = chunk[target.part.relative_to(read.box).slices()]
                found[target.leaf][target.piece][target.part.relative_to(box).slices()] = part
    return found
