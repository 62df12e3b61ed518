"""What a restore into another layout reads beyond what it wants, and in how many requests. Plans alone: no byte is moved."""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence

import pytest

from ckpt.model.box import Box, split_flat
from ckpt.model.cuts import Cut, cut_boxes
from ckpt.model.manifest import FORMAT, Chunk, File, Fragment, Manifest
from ckpt.pipeline.reader import GAP_BYTES, RUN_BYTES
from ckpt.plan.coalesce import coalesce
from ckpt.plan.leaf import Leaf
from ckpt.plan.merge import merge
from ckpt.plan.restore import RestorePlan, plan_restore
from ckpt.plan.save import plan_save
from tests.plan.worlds import raw, with_ref

CHUNK = 512 << 10
SHAPES = {"wide": (6144, 2048), "tall": (2048, 8192), "bias": (6144,)}
Boxes = Callable[[Sequence[int], int], list[Box]]


def rows(world_size: int) -> Boxes:
    """FSDP2."""
    return lambda shape, rank: cut_boxes(shape, [Cut(0, world_size, rank)])


def rows_of_rows(shards: int, parts: int) -> Boxes:
    """FSDP2 after tensor parallelism of the same dimension."""
    return lambda shape, rank: cut_boxes(
        shape, [Cut(0, shards, rank // parts, parts), Cut(0, parts, rank % parts)]
    )


def ranges(world_size: int) -> Boxes:
    """FSDP1, ZeRO: equal parts of the flat tensor."""

    def of(shape: Sequence[int], rank: int) -> list[Box]:
        total = math.prod(shape)
        size = -(-total // world_size)
        return split_flat(shape, min(total, size * rank), min(total, size * (rank + 1)))

    return of


def leaves(boxes: Boxes, rank: int) -> list[Leaf]:
    return [Leaf(name, "float32", shape, tuple(boxes(shape, rank))) for name, shape in SHAPES.items()]


def saved(world_size: int, boxes: Boxes, chunk_bytes: int = CHUNK) -> Manifest:
    parts = []
    for rank in range(world_size):
        plan = plan_save(leaves(boxes, rank), rank=rank, chunk_bytes=chunk_bytes)
        file = File(
            f"rank-{rank:05d}.safetensors", rank, plan.size, tuple(Chunk(n, "0" * 32) for n in plan.chunks)
        )
        fragment = Fragment(
            format=FORMAT, step=1, attempt="abc", rank=rank, world_size=world_size, created_at=0.0, chunk_bytes=chunk_bytes,
            file=file, tensors=plan.tensors, tied={}, tree=raw({}), per_rank=raw({}), replicas={}, metadata=raw({}),
        )  # fmt: skip
        parts.append(with_ref(fragment))
    return merge(parts)


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


@pytest.mark.parametrize("before", LAYOUTS)
@pytest.mark.parametrize("after", LAYOUTS)
def test_with_chunks_small_beside_shards_little_more_is_read_than_wanted(before: str, after: str) -> None:
    """At 12 to 16 chunks a shard of eight. A chunk is read whole: what each box reads too much are the chunks that its ends cut."""
    found = plans(saved(*LAYOUTS[before]), *LAYOUTS[after])
    assert ratio(found) <= (1.0 if before == after else 1.1)
    for rank, plan in enumerate(found):
        boxes = sum(len(LAYOUTS[after][1](shape, rank)) for shape in SHAPES.values())
        assert plan.read_bytes <= plan.wanted_bytes + 2 * CHUNK * boxes
        runs = coalesce(plan.reads, most_bytes=RUN_BYTES, gap_bytes=GAP_BYTES)
        shards = {(run.rank, read.box) for run in runs for read in run.reads}
        assert len(runs) <= plan.read_bytes // RUN_BYTES + LAYOUTS[before][0] * len(SHAPES)
        assert len(runs) < len(shards) or len(shards) < 8


def test_a_chunk_as_large_as_the_shard_is_read_by_all_that_want_a_part_of_it() -> None:
    """What larger chunks cost: the price of a checksum over all of each."""
    eight, six = LAYOUTS["8 rows"], LAYOUTS["6 rows"]
    assert ratio(plans(saved(*eight, chunk_bytes=64 << 20), *six)) == pytest.approx(1.57, abs=0.01)
    assert ratio(plans(saved(*eight, chunk_bytes=64 << 20), *eight)) == 1.0
