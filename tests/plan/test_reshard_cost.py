"""What a restore into another layout reads beyond what it wants, and in how many requests.

The tests use only plans, and move no byte.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence

import numpy as np
import pytest

from ckpt.model.box import Box, split_flat
from ckpt.model.manifest import FORMAT, Chunk, File, Fragment, Manifest
from ckpt.model.mesh_boxes import Cut, cut_boxes
from ckpt.pipeline.chunk_reader import GAP_BYTES, RUN_BYTES
from ckpt.plan.leaf import Leaf
from ckpt.plan.restore import RestorePlan, coalesce, plan_restore
from ckpt.plan.save import plan_save
from ckpt.plan.shared_reads import by_key, share
from tests.kit.marks import each_once
from tests.plan.worlds import merged, raw

CHUNK = 512 << 10
SHAPES = {"wide": (6144, 2048), "tall": (2048, 8192), "bias": (6144,)}
Boxes = Callable[[Sequence[int], int], list[Box]]


def rows(world_size: int) -> Boxes:
    """Return the boxes of FSDP2."""
    return lambda shape, rank: cut_boxes(shape, [Cut(0, world_size, rank)])


def rows_of_rows(shards: int, parts: int) -> Boxes:
    """Return the boxes of FSDP2 after tensor parallelism of the same dimension."""
    return lambda shape, rank: cut_boxes(
        shape, [Cut(0, shards, rank // parts, parts), Cut(0, parts, rank % parts)]
    )


def columns(world_size: int) -> Boxes:
    """Return the boxes of tensor parallelism of the last dimension."""
    return lambda shape, rank: cut_boxes(shape, [Cut(len(shape) - 1, world_size, rank)])


def ranges(world_size: int) -> Boxes:
    """Return the boxes of FSDP1 and ZeRO: equal parts of the flat tensor."""

    def of(shape: Sequence[int], rank: int) -> list[Box]:
        total = math.prod(shape)
        size = -(-total // world_size)
        return split_flat(shape, min(total, size * rank), min(total, size * (rank + 1)))

    return of


def leaves(boxes: Boxes, rank: int) -> list[Leaf]:
    return [
        Leaf(name, "float32", shape, tuple(boxes(shape, rank))) for name, shape in SHAPES.items()
    ]


def saved(world_size: int, boxes: Boxes, chunk_bytes: int = CHUNK) -> Manifest:
    parts = []
    for rank in range(world_size):
        plan = plan_save(leaves(boxes, rank), rank=rank, chunk_bytes=chunk_bytes)
        file = File(
            f"rank-{rank:05d}.safetensors",
            rank,
            plan.size,
            tuple(Chunk(n, "0" * 32) for n in plan.chunks),
        )
        fragment = Fragment(
            format=FORMAT,
            step=1,
            attempt="abc",
            rank=rank,
            world_size=world_size,
            created_at=0.0,
            chunk_bytes=chunk_bytes,
            file=file,
            tensors=plan.tensors,
            tied={},
            tree=raw({}),
            per_rank=raw({}),
            replicas={},
            metadata=raw({}),
        )
        parts.append(fragment)
    return merged(parts)


def plans(manifest: Manifest, world_size: int, boxes: Boxes) -> list[RestorePlan]:
    return [plan_restore(manifest, leaves(boxes, rank)) for rank in range(world_size)]


def ratio(found: Sequence[RestorePlan]) -> float:
    return sum(plan.read_bytes for plan in found) / sum(plan.wanted_bytes for plan in found)


LAYOUTS = {
    "8 rows": (8, rows(8)),
    "6 rows": (6, rows(6)),
    "3 rows": (3, rows(3)),
    "4 x 2 rows": (8, rows_of_rows(4, 2)),
    "8 ranges": (8, ranges(8)),
    "5 ranges": (5, ranges(5)),
}


@pytest.mark.parametrize(("before", "after"), each_once(LAYOUTS, LAYOUTS))
def test_with_chunks_small_beside_shards_little_more_is_read_than_wanted(
    before: str, after: str
) -> None:
    """Eight ranks have 12 to 16 chunks in a shard.

    A chunk is read whole. What a restore reads in excess is the chunks that the ends of each box
    cut.
    """
    found = plans(saved(*LAYOUTS[before]), *LAYOUTS[after])
    assert ratio(found) <= (1.0 if before == after else 1.1)
    for rank, plan in enumerate(found):
        boxes = sum(len(LAYOUTS[after][1](shape, rank)) for shape in SHAPES.values())
        assert plan.read_bytes <= plan.wanted_bytes + 2 * CHUNK * boxes
        runs = coalesce(plan.reads, most_bytes=RUN_BYTES, gap_bytes=GAP_BYTES)
        shards = {(run.rank, read.box) for run in runs for read in run.reads}
        assert len(runs) <= plan.read_bytes // RUN_BYTES + LAYOUTS[before][0] * len(SHAPES)
        assert len(runs) < len(shards) or len(shards) < 8


@pytest.mark.parametrize(
    ("chunk_bytes", "before", "after"), each_once([16 << 20, 64 << 20], LAYOUTS, LAYOUTS)
)
def test_chunks_follow_the_shard(before: str, after: str, chunk_bytes: int) -> None:
    """This holds for any maximal size: the shards of eight are of 6 and 8 MiB here."""
    found = plans(saved(*LAYOUTS[before], chunk_bytes=chunk_bytes), *LAYOUTS[after])
    assert ratio(found) <= (1.0 if before == after else 1.1)


@pytest.mark.parametrize(("mib", "before"), each_once([64, 512, 2048], [2, 3, 4, 6, 8, 12, 16]))
def test_any_world_to_one_up_to_twice_as_large_reads_little_more_than_it_wants(
    before: int, mib: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Parts of 5 MiB and more are wanted.

    A rank that wants less, or a small part of a large shard, reads up to two chunks too many.
    """
    monkeypatch.setitem(SHAPES, "wide", (mib << 6, 4096))
    manifest = saved(before, rows(before), chunk_bytes=16 << 20)
    for after in (1, 2, 3, 4, 6, 8, 12, 16, 24):
        if after <= 2 * before and mib / after >= 5:
            assert ratio(plans(manifest, after, rows(after))) <= 1.1


def test_columns_of_rows_are_read_by_all_that_want_them_or_once_for_all() -> None:
    """No chunk of rows is small enough for this cut alone.

    With ``broadcast=True`` one of the ranks that want a chunk reads it.
    """
    manifest = saved(8, rows(8), chunk_bytes=16 << 20)
    found = plans(manifest, 4, columns(4))
    assert 3.9 < ratio(found) <= 4
    keys = [by_key(plan.reads) for plan in found]
    tables = [np.array(sorted(each), dtype=np.int64) for each in keys]
    read = 0
    for rank, mine in enumerate(keys):
        sizes = {key: chunk.nbytes for key, chunk in mine.items()}
        shares = share(sizes, tables, worth_bytes=64 << 10, parcel_bytes=4 << 20)
        parcels = [
            parcel for group in shares.groups for round_ in group.rounds for parcel in round_
        ]
        taken = [*shares.own_keys, *(key for p in parcels if p.reader == rank for key in p.keys)]
        read += sum(sizes[key] for key in taken)
    assert read <= 1.001 * sum(plan.wanted_bytes for plan in found)
