from __future__ import annotations

import time

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from ckpt.model import chunks
from ckpt.model.box import Box, split_rows
from ckpt.model.chunks import LEAST_BYTES, PARTS, chunk_lengths, split_box
from tests.kit.examples import examples
from tests.model.boxes import boxes_in, shapes, solid_shapes

MIB = 1 << 20


def lengths(box: Box, first: int, at_most: int) -> list[int] | None:
    return chunk_lengths(box.shape, first, at_most=at_most)


@settings(max_examples=examples(300))
@given(st.data())
def test_a_cut_box_is_told_by_its_first_chunk(data: st.DataObject) -> None:
    """The chunks are small, so that a box has many."""
    box = data.draw(boxes_in(data.draw(shapes)))
    itemsize = data.draw(st.sampled_from([1, 2, 4, 8, 16]))
    chunk_bytes = data.draw(st.integers(16, 400))
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(chunks, "LEAST_BYTES", data.draw(st.sampled_from([16, 32, LEAST_BYTES])))
        parts = split_box(box, itemsize, chunk_bytes)
    assert sum(part.numel for part in parts) == box.numel
    assert all(0 < part.numel * itemsize <= chunk_bytes for part in parts)
    if parts:
        assert split_rows(box, parts[0].numel) == parts
        assert lengths(box, parts[0].numel, len(parts)) == [part.numel for part in parts]
        assert lengths(box, parts[0].numel, len(parts) - 1) is None


@given(st.data())
def test_boxes_cut_at_a_fixed_size_are_told_by_their_first_chunk_too(data: st.DataObject) -> None:
    """All chunks were such before a chunk's size followed the box."""
    box = data.draw(boxes_in(data.draw(solid_shapes), least=1))
    parts = split_rows(box, data.draw(st.integers(1, 50)))
    assert split_rows(box, parts[0].numel) == parts
    assert lengths(box, parts[0].numel, len(parts)) == [part.numel for part in parts]


@given(st.data(), st.integers(-2, 200))
def test_what_no_cut_begins_with_is_none(data: st.DataObject, first: int) -> None:
    box = data.draw(boxes_in(data.draw(shapes)))
    found = lengths(box, first, 1000)
    if found is not None:
        assert found == [part.numel for part in split_rows(box, first)]
        assert found[0] == first
    elif 0 < first <= box.numel:
        assert split_rows(box, first)[0].numel != first


@pytest.mark.parametrize(
    ("shape", "least", "most"),
    [
        ((128 * MIB,), PARTS, PARTS),
        ((4096, 4096), PARTS, PARTS),
        ((4099, 4099), PARTS, PARTS),
        ((17, 3, 1 << 20), 17, 17 * 3),  # rows of 4 MiB, in 204 MiB
        ((1 << 20,), 8, 8),  # 4 MiB: a chunk is not smaller than 512 KiB
        ((31, 150_000), 31, 31),  # rows of 600 kB, each a chunk
        ((3, 1_000_000), 24, 24),  # rows of 4 MB, each eight chunks of 500 kB
        ((9 * 131_072 // 8,), 2, 2),  # two halves of 576 KiB, not 512 and 64
        ((1000,), 1, 1),
        ((), 1, 1),
        ((1024 * MIB,), 256, 256),  # a chunk is not larger than 16 MiB
    ],
)
def test_how_many_chunks_a_box_has(shape: tuple[int, ...], least: int, most: int) -> None:
    parts = split_box(Box.whole(shape), 4, 16 * MIB)
    assert least <= len(parts) <= most
    sizes = [part.numel * 4 for part in parts]
    assert min(sizes) >= min(sum(sizes), LEAST_BYTES // 2)
    assert max(sizes) <= 2 * min(sizes)


def test_a_few_bytes_of_nonsense_do_not_make_a_long_list() -> None:
    began = time.process_time()
    assert lengths(Box.whole((1 << 40, 3)), 1, 1 << 20) is None
    assert lengths(Box.whole((1 << 20, 1 << 20, 2)), 2, 1 << 20) is None
    assert time.process_time() - began < 0.1
