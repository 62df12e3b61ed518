"""1,024 ranks and more, simulated as ``python -m bench scale`` does.

Nothing grows faster than the ranks, and a rank that restores reads only its own share.
"""

from __future__ import annotations

import time
from collections.abc import Callable
from functools import partial

import pytest

from bench.worlds import Job, World, model_of
from ckpt.model.box import Box
from ckpt.model.checksum import checksum
from ckpt.model.fill_manifest import fill_manifest, ranks_of
from ckpt.model.fragment_columns import fragment_of
from ckpt.model.keys import fragment_name
from ckpt.model.manifest import FragmentRef, Manifest, Packed
from ckpt.model.record_encoding import pack, unpack
from ckpt.model.validate import check_manifest
from ckpt.plan.leaf import Leaf
from ckpt.plan.merge import MergeCache, merge
from ckpt.plan.restore import plan_restore
from ckpt.plan.save import plan_save
from tests.kit.marks import torture

FEW, MANY = 256, 1024
MODEL = model_of(25)
Parts = list[tuple[Packed, FragmentRef]]


def saved(layout: str, ranks: int) -> tuple[World, Parts]:
    world = World(layout, ranks, MODEL)
    job = Job(world)
    parts: Parts = []
    for rank in range(ranks):
        packed = job.packed(rank, 1, world.leaves(rank))
        data = pack(packed)
        parts.append((packed, FragmentRef(fragment_name(rank), rank, len(data), checksum(data))))
    return world, parts


def seconds(work: Callable[[], object]) -> float:
    """Return the processor time, the least of three measurements: the machine is shared."""
    found = []
    for _ in range(3):
        start = time.process_time()
        work()
        found.append(time.process_time() - start)
    return min(found)


@pytest.mark.parametrize("layout", ["fsdp2", "hsdp", *torture("hsdp2", "3d")])
def test_a_commit_and_a_restore_grow_no_faster_than_the_ranks(layout: str) -> None:
    first: dict[int, float] = {}
    later: dict[int, float] = {}
    size: dict[int, int] = {}
    for ranks in (FEW, MANY):
        world, parts = saved(layout, ranks)
        known = MergeCache()
        outline = merge(parts, known)
        size[ranks] = len(pack(outline))
        first[ranks] = seconds(lambda parts=parts: merge(parts))  # type: ignore[misc]
        later[ranks] = seconds(lambda parts=parts, known=known: merge(parts, known))  # type: ignore[misc]
        manifest = check_manifest(unpack(pack(outline), Manifest, key="k"), key="k")
        assert sum(map(len, manifest.layouts)) <= 40, "runs that grow with the ranks"
        wanted = world.leaves(ranks // 3)
        near = ranks_of(manifest, [(leaf.name, leaf.boxes) for leaf in wanted])
        replicas = {rank for leaf in wanted if leaf.shape for rank in leaf.replicas}
        assert near <= {0, ranks // 3} | replicas, "more than its own share"
        filled = fill_manifest(
            manifest, {rank: fragment_of(parts[rank][0], key="k") for rank in near}, key="k"
        )
        assert plan_restore(filled, wanted).wanted_bytes == sum(leaf.nbytes for leaf in wanted)
    more = MANY / FEW
    assert size[MANY] < more * size[FEW]
    assert later[MANY] < 2 * more * later[FEW]  # quadratic code takes four times as much
    assert first[MANY] < 2 * more * first[FEW]


def test_what_a_rank_writes_is_planned_in_the_same_time_however_many_ranks_hold_it_too() -> None:
    found: dict[int, float] = {}
    for ranks in (FEW, 16 * FEW):
        everybody = tuple(range(ranks))
        leaves = [
            Leaf(t.name, "float32", t.shape, (Box.whole(t.shape),), everybody)
            for t in model_of(200)
        ]
        found[ranks] = seconds(partial(plan_save, leaves, rank=7, chunk_bytes=16 << 20))
    assert found[16 * FEW] < 4 * found[FEW]
