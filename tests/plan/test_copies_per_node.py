"""Two nodes of two ranks.

Both nodes have all of a replicated tensor, and each rank has a shard of another one.
"""

from __future__ import annotations

from collections import Counter

import numpy as np
import pytest

from ckpt.model.box import Box, even_slab
from ckpt.model.manifest import Fragment, Manifest
from ckpt.plan.copies_per_node import nearest_copies, nonwriter_leaf, ranks_without_copy, writers
from ckpt.plan.leaf import Leaf
from ckpt.plan.restore import plan_restore
from tests.plan.worlds import fragment_of, merged

NODE_OF = (0, 0, 1, 1)
ARRAYS = {
    "same": np.arange(160_000, dtype=np.float32).reshape(1600, 100),
    "zeros": np.zeros((1600, 100), dtype=np.float32),
    "cut": np.arange(64, dtype=np.float32).reshape(16, 4),
}


def leaves_of(rank: int, node_of: tuple[int, ...] = NODE_OF) -> list[Leaf]:
    whole = Box.whole(ARRAYS["same"].shape)
    ranks = (0, 1, 2, 3)
    share = writers(ranks, rank, node_of) if node_of else ranks
    cut = even_slab(Box.whole((16, 4)), 4, rank)
    assert cut is not None
    return [
        Leaf("same", "float32", whole.shape, (whole,), share),
        Leaf("zeros", "float32", whole.shape, (whole,), share),
        Leaf("cut", "float32", (16, 4), (cut,), ()),
    ]


def manifest_of(node_of: tuple[int, ...] = NODE_OF) -> Manifest:
    parts = [
        fragment_of(rank, 4, leaves_of(rank, node_of), ARRAYS, chunk_bytes=1 << 14)
        for rank in range(4)
    ]
    return merged([fragment for _, fragment in parts])


@pytest.mark.parametrize(
    ("replicas", "node_of", "expected"),
    [
        ((0, 1, 2, 3), (0, 0, 1, 1), (2, 3)),
        ((0, 2), (0, 0, 1, 1), ()),  # a copy on each node, by one rank each
        ((0, 1, 2), (0, 0, 1, 1), ()),  # unequal parts are not copies of each other
        ((), (0, 0, 1, 1), ()),
    ],
)
def test_who_shares_the_writing_of_a_copy(
    replicas: tuple[int, ...], node_of: tuple[int, ...], expected: tuple[int, ...]
) -> None:
    assert writers(replicas, 2, node_of) == expected


@pytest.mark.parametrize("node", [0, 1])
def test_every_chunk_comes_from_the_own_node_once_and_is_the_same(node: int) -> None:
    manifest = manifest_of()
    plan = plan_restore(manifest, leaves_of(2 * node))
    distance = {rank: int(NODE_OF[rank] != node) for rank in range(4)}
    near = nearest_copies(plan, manifest, distance)
    assert {NODE_OF[read.rank] for read in near.reads} == {node}
    places = [(read.rank, read.offset) for read in near.reads]
    assert places == sorted(set(places))
    assert sorted((read.checksum, read.nbytes) for read in near.reads) == sorted(
        (read.checksum, read.nbytes) for read in plan.reads
    )
    targets = {(target, read.checksum) for read in plan.reads for target in read.targets}
    assert {(target, read.checksum) for read in near.reads for target in read.targets} == targets
    for read in near.reads:  # the chunk that is there is the right one
        file = manifest.file_map()[read.rank]
        ends = np.cumsum([0, *(chunk.nbytes for chunk in file.chunks)]).tolist()
        assert file.chunks[ends.index(read.offset)].checksum == read.checksum


def test_unequal_shares_are_whole_on_every_rank() -> None:
    assert [writers((0, 1, 2), rank, (0, 0, 1, 1)) for rank in range(3)] == [(), (), ()]


def test_equal_chunks_of_other_tensors_are_not_read_twice() -> None:
    """All zeros are equal."""
    manifest = manifest_of()
    near = nearest_copies(plan_restore(manifest, leaves_of(0)), manifest, {0: 0, 1: 1})
    places = [(read.rank, read.offset) for read in near.reads]
    assert len(places) == len(set(places))


def test_what_has_no_nearer_copy_stays_where_it_is() -> None:
    manifest = manifest_of(())
    plan = plan_restore(manifest, leaves_of(0, ()))
    near = nearest_copies(plan, manifest, {0: 0, 1: 0, 2: 1, 3: 1})
    assert {read.rank for read in near.reads if read.checksum not in _zeros(manifest)} == {
        0,
        1,
        2,
        3,
    }
    assert nearest_copies(plan, manifest, dict.fromkeys(range(4), 0)) is plan


def test_a_node_is_enough_for_what_it_has_a_copy_of() -> None:
    assert ranks_without_copy(manifest_of(), {0, 1, 2, 3}) == []
    assert ranks_without_copy(manifest_of(), {0, 1}) == [2, 3]  # their shards of "cut"
    whole = [leaf for leaf in leaves_of(0) if leaf.name != "cut"]
    parts = [
        fragment_of(
            rank,
            4,
            [leaf for leaf in leaves_of(rank) if leaf.name != "cut"],
            ARRAYS,
            chunk_bytes=1 << 14,
        )
        for rank in range(4)
    ]
    manifest = merged([fragment for _, fragment in parts])
    assert ranks_without_copy(manifest, {2, 3}) == []
    assert ranks_without_copy(manifest, {2}) == [1, 3]  # 0 and 2 have written the same
    near = nearest_copies(plan_restore(manifest, whole), manifest, {2: 1, 3: 1})
    assert {read.rank for read in near.reads} == {2, 3}


@pytest.mark.parametrize(
    ("rank", "node_of", "boxes", "spare"),
    [
        (1, (), 0, False),  # one place for all: the first rank's is enough
        (1, (0, 0, 1, 1), 0, False),
        (2, (0, 0, 1, 1), 1, True),
        (3, (0, 0, 1, 1), 0, False),
        (2, (1, 0, 0, 1), 0, False),
        (3, (0, 0, 0, 1), 1, True),
    ],
)
def test_the_lowest_rank_of_each_node_writes_a_spare_of_what_it_leaves_to_the_first(
    rank: int, node_of: tuple[int, ...], boxes: int, spare: bool
) -> None:
    leaf = Leaf("buffer", "float32", (16,), (Box.whole((16,)),))
    found = nonwriter_leaf(leaf, (0, 1, 2, 3), rank, node_of)
    assert (len(found.boxes), found.spare) == (boxes, spare)


def test_a_spare_serves_where_it_is_equal_and_harms_nothing_where_it_differs() -> None:
    whole = Box.whole((16,))
    plain = [Leaf(name, "float32", (16,), (whole,)) for name in ("alike", "drifted")]

    def part(rank: int) -> Fragment:
        leaves = (
            plain
            if rank == 0
            else [nonwriter_leaf(leaf, (0, 1, 2, 3), rank, NODE_OF) for leaf in plain]
        )
        arrays = {
            "alike": np.arange(16, dtype=np.float32),
            "drifted": np.full(16, rank, dtype=np.float32),
        }
        return fragment_of(rank, 4, leaves, arrays)[1]

    manifest = merged([part(rank) for rank in range(4)])
    assert {shard.rank for tensor in manifest.tensors for shard in tensor.shards} == {0}

    plan = plan_restore(manifest, plain)
    near = nearest_copies(plan, manifest, {2: 0, 3: 0, 0: 1, 1: 1})
    assert Counter(read.rank for read in near.reads) == {0: 1, 2: 1}
    (here,) = (read for read in near.reads if read.rank == 2)
    (meant,) = (read for read in plan.reads if read.targets == here.targets)
    assert here.checksum == meant.checksum
    assert ranks_without_copy(manifest, {2, 3}) == [0]
    same = [file.chunks for file in manifest.files if file.rank in (0, 2)]
    assert len({chunk.checksum for chunks in same for chunk in chunks[1:]}) == 3


def _zeros(manifest: Manifest) -> set[str]:
    counts: dict[str, int] = {}
    for file in manifest.files:
        for chunk in file.chunks:
            counts[chunk.checksum] = counts.get(chunk.checksum, 0) + 1
    return {digest for digest, count in counts.items() if count > 1}
