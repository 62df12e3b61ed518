"""Read-through by several ranks: what a node needs from far is fetched into its folder once."""

from __future__ import annotations

import threading
import time
from collections import Counter
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from ckpt.catalog.step_listing import is_committed
from ckpt.catalog.tiered_reader import TieredReader
from ckpt.catalog.verify import verify_step
from ckpt.config import Tier
from ckpt.coordination.coordinator import Coordinator
from ckpt.errors import OutOfSpace, TransientStorageError
from ckpt.model.box import Box, even_slab
from ckpt.model.keys import StepRef
from ckpt.pipeline.retry import RetryPolicy
from ckpt.pipeline.workers import Workers
from ckpt.plan.leaf import Leaf
from ckpt.plan.restore import RestorePlan, plan_restore
from ckpt.restore.read_through import CacheContext, ReadThrough
from ckpt.root.claim_marker import claim_for_finish
from ckpt.storage.api import StorageBackend
from ckpt.storage.registry import open_backend
from ckpt.storage.testing.faulty import FaultyBackend, Raise, Rule, flip_byte
from ckpt.storage.tiers import OpenTier
from tests.checkpoints import Written, write_checkpoint
from tests.coordination.world import World
from tests.kit.sinks import ArraySink

ARRAY = np.random.default_rng(4).standard_normal((12, 16))
IMPATIENT = RetryPolicy(attempts=2, first_seconds=0.001, most_seconds=0.002)
ALL = Box.whole(ARRAY.shape)


class Node:
    """Tiers as the ranks of one machine see them. Every store counts its calls."""

    def __init__(self, *stores: tuple[str, StorageBackend]) -> None:
        self.tiers = [
            OpenTier(index, Tier(url), store) for index, (url, store) in enumerate(stores)
        ]

    def rank(
        self,
        ref: StepRef,
        coordinator: Coordinator,
        box: Box,
        *,
        subject: str = "r",
        patience: float = 5,
        together: threading.Barrier | None = None,
    ) -> tuple[np.ndarray[Any, Any], ReadThrough, RestorePlan, Sequence[RestorePlan]]:
        """Return what a rank that wants ``box`` gets.

        The values are its array, its cache, what was left to read, and which store gave it.
        """
        wanted = [Leaf("x", "float64", ARRAY.shape, (box,))]
        origin = TieredReader([tier.backend for tier in self.tiers], ref, retry=IMPATIENT)
        found = origin.with_fragments(origin.manifest(), wanted)
        plan = plan_restore(found.manifest, wanted)
        sink = ArraySink(wanted, direct=True)
        with Workers("test", 2) as workers:
            context = CacheContext(
                coordinator=coordinator,
                subject=subject,
                patience=patience,
                workers=workers,
                retry=IMPATIENT,
            )
            cache = ReadThrough(self.tiers, origin, found, context)
            cache.find_missing(plan)
            left = cache.fill(plan, sink)
            given = origin.read(left, sink, workers=workers)
            if together is not None:
                together.wait(30)  # a file is mended when all have read it
            cache.mend()
        return sink.arrays[0], cache, left, given


@pytest.fixture
def far(tmp_path: Path) -> FaultyBackend:
    return FaultyBackend(open_backend(str(tmp_path / "far")))


@pytest.fixture
def written(far: FaultyBackend) -> Written:
    return write_checkpoint(far, 7, {"x": ARRAY}, world_size=4, chunk_bytes=128)


def data_reads(store: FaultyBackend) -> Counter[str]:
    """Return the number of bytes of data files that were requested."""
    found: Counter[str] = Counter()
    for call in store.calls:
        if call.verb == "read_into" and "safetensors" in call.key:
            found[call.key] += call.nbytes
    return found


def sizes(written: Written) -> dict[str, int]:
    return {written.ref.key(file.name): file.size for file in written.manifest.files}


@pytest.mark.parametrize("ranks", [1, 2, 4])
def test_replicas_on_a_node_fetch_each_file_once(
    tmp_path: Path, far: FaultyBackend, written: Written, ranks: int
) -> None:
    """All ranks want everything. Without the cache each of them would read it from far."""
    near = str(tmp_path / "near")
    node = Node((near, open_backend(near)), ("far", far))
    world = World(ranks, patience=5)
    outcomes = world.run(lambda mine: node.rank(written.ref, mine, ALL))
    for array, cache, _, given in outcomes.values():
        assert np.array_equal(array, ARRAY)
        assert len(given[1].reads) == 0
        assert set(cache.source_by_rank.values()) <= {1}
    assert data_reads(far) == sizes(written)
    assert (
        sum(cache.cached_bytes for _, cache, _, _ in outcomes.values()) == written.manifest.nbytes
    )
    with Workers("test", 2) as workers:
        assert verify_step(open_backend(near), written.ref, workers=workers).intact
    before = len(far.calls)
    again = world.run(lambda mine: node.rank(written.ref, mine, ALL, subject="again"))
    assert all(np.array_equal(array, ARRAY) for array, *_ in again.values())
    assert len(far.calls) == before


def test_who_fetches_does_not_read_again_what_has_passed_by(
    tmp_path: Path, far: FaultyBackend, written: Written
) -> None:
    near = FaultyBackend(open_backend(str(tmp_path / "near")))
    node = Node((str(tmp_path / "near"), near), ("far", far))
    _, cache, left, _ = node.rank(written.ref, World(1).coordinator(0), ALL)
    assert left.reads == ()
    assert cache.nbytes_by_source[1] == ARRAY.nbytes
    asked = [
        call.key for call in near.calls if call.verb == "read_into" and "safetensors" in call.key
    ]
    assert sorted(asked) == sorted(sizes(written))  # once, to find that it is not there


def test_two_machines_have_a_cache_each_and_only_of_what_they_need(
    tmp_path: Path, far: FaultyBackend, written: Written
) -> None:
    """Ranks 0 and 1 are on one machine, 2 and 3 on the other. The name of the folder distinguishes
    them.
    """
    roots = [str(tmp_path / "one"), str(tmp_path / "two")]
    nodes = [Node((root, open_backend(root)), ("far", far)) for root in roots]
    boxes = [even_slab(ALL, 4, rank) for rank in range(4)]

    def work(mine: Coordinator) -> Any:
        box = boxes[mine.rank]
        assert box is not None
        array, cache, _, _ = nodes[mine.rank // 2].rank(written.ref, mine, box)
        assert np.array_equal(array, ARRAY[box.slices()])
        return cache.cached_bytes

    outcomes = World(4, patience=5).run(work)
    assert all(isinstance(outcome, int) for outcome in outcomes.values()), outcomes
    assert sum(outcomes.values()) == written.manifest.nbytes
    assert data_reads(far) == sizes(written)
    for number, root in enumerate(roots):
        cache = open_backend(root)
        assert not is_committed(cache, written.ref)
        there = {info.name for info in cache.list("")}
        own = {
            f"rank-{rank:05d}.{kind}"
            for rank in (2 * number, 2 * number + 1)
            for kind in ("safetensors", "json")
        }
        assert there == own


def test_a_folder_that_all_machines_see_is_filled_once(
    tmp_path: Path, far: FaultyBackend, written: Written
) -> None:
    near = str(tmp_path / "near")
    shared = open_backend(near, {"shared": True})
    nodes = [Node((near, shared), ("far", far)) for _ in range(2)]
    outcomes = World(2, patience=5).run(
        lambda mine: nodes[mine.rank].rank(written.ref, mine, ALL)[0]
    )
    assert all(np.array_equal(array, ARRAY) for array in outcomes.values())
    assert data_reads(far) == sizes(written)
    assert is_committed(shared, written.ref)


@pytest.mark.parametrize("harm", [False, True], ids=["whole", "damaged"])
def test_what_others_have_cached_is_read_before_the_step_is_listed(
    tmp_path: Path, far: FaultyBackend, harm: bool
) -> None:
    """The manifest has no chunks of the files that this rank does not use."""
    written = write_checkpoint(far, 7, {"x": ARRAY}, world_size=4, chunk_bytes=128)
    near = open_backend(str(tmp_path / "near"))
    node = Node((str(tmp_path / "near"), near), ("far", far))
    boxes = [even_slab(ALL, 4, rank) for rank in range(4)]
    for number, box in enumerate(boxes[1:], 1):
        assert box is not None
        node.rank(written.ref, World(1).coordinator(0), box, subject=str(number))
    if harm:
        flip_byte(near, written.ref.key("rank-00002.safetensors"), -9)
    assert boxes[0] is not None
    node.rank(written.ref, World(1).coordinator(0), boxes[0], subject="last")
    assert is_committed(near, written.ref) == (not harm)


def test_a_full_disk_met_by_one_rank_is_no_ones_failure(
    tmp_path: Path, far: FaultyBackend, written: Written
) -> None:
    near = str(tmp_path / "near")
    store = FaultyBackend(
        open_backend(near), [Rule(verb="upload", key="rank-0000[23]", fault=Raise(OutOfSpace))]
    )
    node = Node((near, store), ("far", far))
    outcomes = World(2, patience=5).run(lambda mine: node.rank(written.ref, mine, ALL)[0])
    assert all(np.array_equal(array, ARRAY) for array in outcomes.values()), outcomes
    assert not is_committed(store, written.ref)


def test_what_a_second_cache_fetches_again_is_counted_once(
    tmp_path: Path, far: FaultyBackend, written: Written
) -> None:
    near, second = str(tmp_path / "near"), str(tmp_path / "second")
    full = FaultyBackend(
        open_backend(near), [Rule(verb="upload", key="rank-00002", fault=Raise(OutOfSpace))]
    )
    node = Node((near, full), (second, open_backend(second)), (str(tmp_path / "far"), far))
    array, cache, left, _ = node.rank(written.ref, World(1).coordinator(0), ALL)
    assert np.array_equal(array, ARRAY)
    assert is_committed(open_backend(second), written.ref)
    assert (dict(cache.nbytes_by_source), left.reads) == ({2: ARRAY.nbytes}, ())


def test_a_file_that_only_a_nearer_cache_got_is_read_before_the_step_is_listed(
    tmp_path: Path, far: FaultyBackend, written: Written
) -> None:
    """The nearer cache is full and gives its files back. The second one has a damaged file."""
    near, second = str(tmp_path / "near"), open_backend(str(tmp_path / "second"))
    full = FaultyBackend(
        open_backend(near), [Rule(verb="upload", key="rank-00002", fault=Raise(OutOfSpace))]
    )
    key = written.ref.key("rank-00001.safetensors")
    second.put(key, [(tmp_path / "far" / key).read_bytes()])
    flip_byte(second, key, -9)
    node = Node((near, full), (str(tmp_path / "second"), second), (str(tmp_path / "far"), far))
    array, *_ = node.rank(written.ref, World(1).coordinator(0), ALL)
    assert np.array_equal(array, ARRAY)
    assert not is_committed(second, written.ref)


def test_what_somebody_else_is_about_to_list_there_is_not_taken_back_from_a_full_disk(
    tmp_path: Path, far: FaultyBackend, written: Written
) -> None:
    near = open_backend(str(tmp_path / "near"))
    assert claim_for_finish(near, written.ref)
    full = FaultyBackend(near, [Rule(verb="upload", key="rank-00003", fault=Raise(OutOfSpace))])
    node = Node((str(tmp_path / "near"), full), (str(tmp_path / "far"), far))
    array, *_ = node.rank(written.ref, World(1).coordinator(0), ALL)
    assert np.array_equal(array, ARRAY)
    kept = {info.name for info in near.list(f"{written.ref.folder}/")}
    assert {"rank-00000.json", "rank-00000.safetensors", "claim"} <= kept


def test_a_full_disk_takes_back_no_file_that_the_restore_has_not_put_there(
    tmp_path: Path, far: FaultyBackend, written: Written
) -> None:
    """No source has a row of rank 2's file intact, which is not wanted. The disk has a part."""
    near = open_backend(str(tmp_path / "near"))
    key = written.ref.key("rank-00002.safetensors")
    near.put(key, [(tmp_path / "far" / key).read_bytes()[:-1]])
    flip_byte(far, key, -300)
    full = FaultyBackend(near, [Rule(verb="upload", key="rank-00003", fault=Raise(OutOfSpace))])
    node = Node((str(tmp_path / "near"), full), (str(tmp_path / "far"), far))
    rows = Box((7, 0), (5, 16))
    array, cache, *_ = node.rank(written.ref, World(1).coordinator(0), rows)
    assert np.array_equal(array, ARRAY[7:])
    assert [info.key for info in near.list(f"{written.ref.folder}/")] == [key]
    assert cache.cached_bytes == 0


def test_what_one_source_has_not_intact_is_fetched_from_the_one_behind_it(
    tmp_path: Path, far: FaultyBackend, written: Written
) -> None:
    farther = open_backend(str(tmp_path / "farther"))
    write_checkpoint(farther, 7, {"x": ARRAY}, world_size=4, chunk_bytes=128)
    flip_byte(far, written.ref.key(written.manifest.files[1].name), -9)
    near = str(tmp_path / "near")
    node = Node((near, open_backend(near)), ("s3", far), ("gs", farther))
    array, cache, _, _ = node.rank(written.ref, World(1).coordinator(0), ALL)
    assert np.array_equal(array, ARRAY)
    assert cache.source_by_rank == {0: 1, 1: 2, 2: 1, 3: 1}
    assert is_committed(open_backend(near), written.ref)


def test_a_rank_that_dies_while_it_fetches_does_not_hold_up_the_others_for_good(
    tmp_path: Path, far: FaultyBackend, written: Written
) -> None:
    near = str(tmp_path / "near")
    node = Node((near, open_backend(near)), ("far", far))
    world = World(2, patience=0.05)
    _, cache, _, _ = node.rank(written.ref, world.coordinator(1), ALL)  # this finds the subjects
    taken = [subject for subject in world.verdicts if not subject.endswith("/end")]
    for path in Path(near).rglob("*.*"):
        path.unlink() if path.is_file() else None
    again = World(2, patience=0.05)
    for subject in taken[:2]:
        again.verdicts[subject] = b"0"  # rank 0 has begun two of them, and is dead
    array, cache, _, given = node.rank(written.ref, again.coordinator(1), ALL)
    assert np.array_equal(array, ARRAY)
    assert len(cache.source_by_rank) == 2
    assert len(given[1].reads) == 6


def test_the_waits_for_others_do_not_add_up(
    tmp_path: Path, far: FaultyBackend, written: Written
) -> None:
    """Another rank has begun all four files and is dead. The wait for it happens once, not four
    times.
    """
    near = str(tmp_path / "near")
    node = Node((near, open_backend(near)), ("far", far))
    world = World(2, patience=5)
    _, cache, _, _ = node.rank(written.ref, world.coordinator(1), ALL)  # this finds the subjects
    for path in Path(near).rglob("*.*"):
        path.unlink() if path.is_file() else None
    again = World(2, patience=5)
    for subject in world.verdicts:
        if not subject.endswith(("/end", "list")):
            again.verdicts[subject] = b"0"
    began = time.monotonic()
    array, cache, _, given = node.rank(written.ref, again.coordinator(1), ALL, patience=2)
    assert np.array_equal(array, ARRAY)
    assert (len(cache.source_by_rank), len(given[1].reads)) == (0, 12)
    assert time.monotonic() - began < 4 * 2


def test_replicas_mend_a_damaged_file_once(
    tmp_path: Path, far: FaultyBackend, written: Written
) -> None:
    near = FaultyBackend(open_backend(str(tmp_path / "near")))
    node = Node((str(tmp_path / "near"), near), ("far", far))
    write_checkpoint(near, 7, {"x": ARRAY}, world_size=4, chunk_bytes=128)
    key = written.ref.key(written.manifest.files[1].name)
    flip_byte(near, key, -9)
    uploads = len([call for call in near.calls if call.verb == "upload"])
    together = threading.Barrier(3)
    outcomes = World(3, patience=5).run(
        lambda mine: node.rank(written.ref, mine, ALL, together=together)
    )
    for array, cache, _, _ in outcomes.values():
        assert np.array_equal(array, ARRAY)
        assert [(repair.key, repair.mended) for repair in cache.origin.repairs] == [(key, True)]
    assert len([call for call in near.calls if call.verb == "upload"]) == uploads + 1
    with Workers("test", 2) as workers:
        assert verify_step(near, written.ref, workers=workers).intact


def test_a_source_that_falls_silent_is_not_taken_for_a_full_disk(
    tmp_path: Path, far: FaultyBackend, written: Written, caplog: pytest.LogCaptureFixture
) -> None:
    near = str(tmp_path / "near")
    dying = FaultyBackend(
        far, [Rule(verb="read_into", key="safetensors", fault=Raise(TransientStorageError))]
    )
    node = Node((near, open_backend(near)), ("far", dying))
    with pytest.raises(TransientStorageError):
        node.rank(written.ref, World(1).coordinator(0), ALL)
    assert "does not take" not in caplog.text
