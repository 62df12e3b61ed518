"""Samples detect changes that move no version counter, by what the sources held at the call."""

from __future__ import annotations

import gc
import itertools
import threading
from collections.abc import Callable

import pytest
import torch

from ckpt.errors import TensorChanged
from ckpt.staging import copies as copying
from ckpt.staging.copies import Copy
from ckpt.staging.snapshot import Batch, Snapshot
from ckpt.staging.window import RingWindow
from ckpt.staging.witness import (
    LINE_BYTES,
    PLACES_AT_ONCE,
    SPACING_BYTES,
    WHOLE_BYTES,
    Sample,
    Subset,
)
from tests.kit.rings import ring_of

MIB = 1 << 20


def copy_of(source: torch.Tensor, name: str = "model/weight", end: int = 0) -> Copy:
    target = torch.zeros(source.shape, dtype=source.dtype)
    return Copy(name, source, target, source, end or source.nbytes)


def snapshot_of(*late: Copy, check: str = "sampled") -> Snapshot:
    return Snapshot(7, [Batch(eager=(), late_copies=late, checks=())], check=check)  # type: ignore[arg-type]


def confirmed(snapshot: Snapshot) -> None:
    snapshot.copy_eager()
    snapshot.copy_late()
    snapshot.wait_landed(0)
    snapshot.confirm()


SOURCES: dict[str, Callable[[], torch.Tensor]] = {
    "a number": lambda: torch.tensor(3.0),
    "one element": lambda: torch.ones(1, dtype=torch.int8),
    "up to a line": lambda: torch.randn(LINE_BYTES // 4),
    "an odd length": lambda: torch.randn(1001),
    "just more than is taken whole": lambda: torch.ones(WHOLE_BYTES + 1, dtype=torch.uint8),
    "one spacing": lambda: torch.ones(SPACING_BYTES, dtype=torch.uint8),
    "several lines": lambda: torch.randn(2048, 1024),
    "bfloat16": lambda: torch.randn(512, 512).bfloat16(),
    "complex": lambda: torch.randn(300, 40, dtype=torch.complex128),
    "transposed": lambda: torch.randn(300, 700).t(),
    "channels last": lambda: torch.randn(8, 16, 9, 9).to(memory_format=torch.channels_last),
    "every other row": lambda: torch.randn(600, 40)[::2],
    "a part of a storage": lambda: torch.randn(4000)[13:3001],
}


@pytest.mark.parametrize("check", ["sampled", "full"])
@pytest.mark.parametrize("kind", SOURCES)
def test_what_stays_as_it_was_is_confirmed_and_a_change_of_all_of_it_is_not(kind, check):
    source = SOURCES[kind]()
    kept = copy_of(source)
    confirmed(snapshot_of(kept, check=check))
    assert torch.equal(kept.target, source)
    snapshot = snapshot_of(copy_of(torch.randn(5), "kept"), copy_of(source), check=check)
    source.data.add_(1)
    with pytest.raises(TensorChanged, match="'model/weight' was changed while step 7"):
        confirmed(snapshot)


def test_full_sees_one_bit_in_any_place():
    source = torch.zeros(MIB, dtype=torch.uint8)
    for place in (0, 12345, MIB - 1):
        snapshot = snapshot_of(copy_of(source), check="full")
        source.data[place] ^= 1
        with pytest.raises(TensorChanged):
            confirmed(snapshot)


def test_a_sample_sees_a_sparse_change_and_misses_a_few_elements():
    """The docs describe this limit."""
    torch.manual_seed(0)
    source = torch.randn(16 * MIB // 4)
    seen = snapshot_of(copy_of(source))
    source.data.clamp_(-3, 3)  # 0.3 % of the elements
    with pytest.raises(TensorChanged):
        confirmed(seen)
    missed = snapshot_of(copy_of(source))
    source.data[:2] += 1
    confirmed(missed)


def test_with_the_check_off_counters_alone_are_compared():
    source = torch.ones(5)
    snapshot = snapshot_of(copy_of(source), check="off")
    source.data.add_(1)
    confirmed(snapshot)
    snapshot = snapshot_of(copy_of(source), check="off")
    source.add_(1)
    with pytest.raises(TensorChanged):
        confirmed(snapshot)


def test_a_change_after_the_copy_is_no_fault():
    source = torch.ones(3000)
    snapshot = snapshot_of(copy_of(source))
    snapshot.copy_eager()
    snapshot.copy_late()
    source.data.add_(1)
    snapshot.confirm()


def test_nans_are_equal_to_themselves():
    confirmed(snapshot_of(copy_of(torch.full((3000,), float("nan")))))


def offsets_of(subset: Subset) -> list[int]:
    """Return where in the image the places of a subset with one copy begin."""
    return [offset for _, places in subset._places for _, offset, _ in places]


def test_places_are_spread_over_the_source_and_over_the_columns_of_its_rows():
    copy = copy_of(torch.empty(64 * MIB, dtype=torch.uint8))
    sample = Sample([copy])
    sample.build()
    offsets = offsets_of(sample.subsets[0])
    assert len(offsets) == 64 * MIB // SPACING_BYTES
    assert all(0 <= offset <= 64 * MIB - LINE_BYTES for offset in offsets)
    assert {two - one for one, two in itertools.pairwise(offsets)} == {SPACING_BYTES}
    columns = {offset % 16384 // LINE_BYTES for offset in offsets}  # rows of 4,096 floats
    assert len(columns) == 64


def test_one_save_reads_a_bounded_number_of_places_and_successive_ones_all():
    large, small = copy_of(torch.empty(300 * MIB, dtype=torch.uint8)), copy_of(torch.ones(3000))
    sample = Sample([large, small])
    sample.build()
    alone = [Subset([(copy, found)]) for subset in sample.subsets for copy, found in subset._places]
    offsets = [offsets_of(subset) for subset in alone[::2]]
    assert len(sample.subsets) == len(offsets) == 3
    assert all(len(subset) <= PLACES_AT_ONCE + 2 for subset in sample.subsets)
    assert all(len(offsets_of(subset)) == 1 for subset in alone[1::2])
    every = sorted(itertools.chain.from_iterable(offsets))
    assert len(every) == 300 * MIB // SPACING_BYTES
    assert {two - one for one, two in itertools.pairwise(every)} == {SPACING_BYTES}
    assert {sample.next() for _ in range(3)} == set(sample.subsets)


def test_a_sample_keeps_few_objects():
    """Thousands of them in each slot would make the garbage collector run after each restore."""
    copy = copy_of(torch.empty(1200 * MIB, dtype=torch.uint8))
    sample = Sample([copy])
    gc.collect()
    before = len(gc.get_objects())
    sample.build()
    assert len(gc.get_objects()) - before < 100 + PLACES_AT_ONCE
    assert sum(map(len, sample.subsets)) > 4 * PLACES_AT_ONCE


def test_a_change_that_is_made_at_each_save_is_seen_once_all_places_were_read():
    source = torch.zeros(300 * MIB, dtype=torch.uint8)
    batch = Batch(eager=(), late_copies=(copy_of(source),), checks=())
    batch.sample.build()
    changed = source.data[offsets_of(batch.sample.subsets[2])[7] :][:LINE_BYTES]
    seen = []
    for number in range(3):
        snapshot = Snapshot(number, [batch])
        changed.add_(1)
        try:
            confirmed(snapshot)
        except TensorChanged as error:
            seen.append(error.step)
    assert len(seen) == 1


def test_a_batch_is_sampled_again_and_again():
    source = torch.ones(3000)
    batch = Batch(eager=(), late_copies=(copy_of(source),), checks=())
    for number in range(3):
        snapshot = Snapshot(number, [batch])
        if number == 1:
            source.data.add_(1)
            with pytest.raises(TensorChanged, match="step 1"):
                confirmed(snapshot)
        else:
            confirmed(snapshot)


def test_a_source_may_still_be_resized_by_its_owner():
    source = torch.ones(3000)
    confirmed(snapshot_of(copy_of(source)))
    source.untyped_storage().resize_(0)


@pytest.mark.parametrize("check", ["sampled", "full"])
def test_in_a_ring_each_part_is_compared_before_others_take_its_place(check, monkeypatch):
    part = 2048
    monkeypatch.setattr(copying, "PIECE_BYTES", part)
    whole = torch.arange(6 * part // 4, dtype=torch.int32).t()
    turned = torch.randn(part // 16, 4).t()

    def late() -> list[Copy]:
        found = []
        for number in range(6):
            piece = slice(number * part // 4, (number + 1) * part // 4)
            place = torch.empty(part // 4, dtype=torch.int32, device="meta")
            found.append(Copy("whole", whole, place, whole, (number + 1) * part, piece))
        for half in range(2):
            piece = slice(half * part // 8, (half + 1) * part // 8)
            place = torch.empty(part // 8, dtype=torch.float32, device="meta")
            found.append(
                Copy("turned", turned, place, turned, 6 * part + (half + 1) * part // 2, piece)
            )
        return found

    def run(change: Callable[[], object]) -> bytes:
        window = RingWindow(ring_of(2, step=part), 7 * part)
        snapshot = Snapshot(
            7, [Batch(eager=(), late_copies=tuple(late()), checks=())], window, check=check
        )
        snapshot.copy_eager()
        change()
        copier = threading.Thread(target=snapshot.copy_late)
        copier.start()
        written = b""
        try:
            for start in range(0, 7 * part, part):
                written += bytes(window.view(start, start + part))
                window.note_written(start, start + part)
                window.note_hashed(start, start + part)
            return written
        finally:
            copier.join()
            if len(written) == 7 * part:
                snapshot.confirm()

    expected = whole.numpy().tobytes() + turned.contiguous().numpy().tobytes()
    assert run(lambda: None) == expected
    with pytest.raises(TensorChanged, match="'whole'"):
        run(lambda: whole.data[3 * part // 4 : 4 * part // 4].add_(1))
    with pytest.raises(TensorChanged, match="'turned'"):
        run(lambda: turned.data.add_(1))


def test_the_fence_does_not_wait_for_the_comparison(monkeypatch):
    source = torch.ones(3000)
    snapshot = snapshot_of(copy_of(source))
    snapshot.copy_eager()
    gate, passed = threading.Event(), []
    changed_name = Subset.changed_name
    monkeypatch.setattr(
        Subset, "changed_name", lambda *args: (gate.wait(10), changed_name(*args))[1]
    )
    copier = threading.Thread(target=snapshot.copy_late)
    copier.start()
    snapshot.fence()
    passed.append(snapshot.has_landed)
    waiter = threading.Thread(target=lambda: (snapshot.confirm(), passed.append(True)))
    waiter.start()
    assert passed == [True]
    gate.set()
    copier.join()
    waiter.join()
    assert passed == [True, True]
