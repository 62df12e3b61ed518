from __future__ import annotations

import math
import time

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from ckpt.model.box import (
    Box,
    BoxIndex,
    even_slab,
    flat_start,
    split_flat,
    split_rows,
    tiling_fault,
)
from tests.kit.examples import examples
from tests.model.boxes import (
    boxes_in,
    mask,
    numbered,
    partition,
    shape_and_boxes,
    shapes,
    solid_shapes,
    solid_shapes_with_rows,
)

randoms = st.randoms(use_true_random=False)


def fault_of(shape, boxes) -> str:
    """Return the fault that there must be."""
    fault = tiling_fault(shape, boxes)
    assert fault is not None
    return fault


@given(shape_and_boxes(2))
def test_two_boxes_meet_where_both_masks_are_set(drawn):
    shape, (one, two) = drawn
    common = mask(shape, one) & mask(shape, two)
    met = one.intersect(two)
    assert met == two.intersect(one)
    if met is None:
        assert not common.any()
    else:
        assert met.numel > 0
        assert np.array_equal(mask(shape, met), common)


@given(st.data())
def test_a_relative_box_indexes_the_outer_box(data):
    shape = data.draw(shapes)
    outer = data.draw(boxes_in(shape))
    part = data.draw(boxes_in(outer.shape))
    inner = Box(tuple(a + b for a, b in zip(outer.offsets, part.offsets, strict=True)), part.shape)
    array = numbered(shape)
    assert np.array_equal(
        array[outer.slices()][inner.relative_to(outer).slices()], array[inner.slices()]
    )


def test_a_box_of_a_0d_tensor_is_its_one_element():
    box = Box.whole(())
    assert (box.numel, box.intersect(box), box.is_inside(())) == (1, box, True)
    assert numbered(())[box.slices()] == 0


@pytest.mark.parametrize(
    ("box", "shape"),
    [
        (Box((0,), (4,)), (3,)),
        (Box((3,), (1,)), (3,)),
        (Box((-1,), (2,)), (3,)),
        (Box((2,), (-1,)), (3,)),
        (Box((0,), (3,)), (3, 1)),
        (Box((0, 0), (3,)), (3,)),
        (Box((0,), (3, 1)), (3,)),
        (Box((), ()), (1,)),
    ],
)
def test_a_box_that_sticks_out_is_not_inside(box, shape):
    assert not box.is_inside(shape)


@given(shape_and_boxes(1))
def test_a_box_cut_out_of_a_shape_is_inside_it(drawn):
    shape, (box,) = drawn
    assert box.is_inside(shape)


# -- split_rows ------------------------------------------------------------------------------------


@given(shape_and_boxes(1), st.integers(1, 40))
def test_rows_follow_each_other_in_the_memory_of_the_box(drawn, most):
    shape, (box,) = drawn
    array = numbered(shape)
    parts = split_rows(box, most)
    assert all(1 <= part.numel <= most for part in parts)
    runs = [array[part.slices()].ravel() for part in parts]
    joined = np.concatenate(runs) if runs else np.zeros(0, dtype=int)
    assert np.array_equal(joined, array[box.slices()].ravel())


@given(shape_and_boxes(1), st.integers(1, 40))
def test_rows_are_not_cut_finer_than_a_third_of_what_is_allowed(drawn, most):
    _, (box,) = drawn
    parts = split_rows(box, most)
    assert len(parts) <= 1 or len(parts) * most < 3 * box.numel


@pytest.mark.parametrize(
    ("box", "most", "shapes_of_parts"),
    [
        (Box.whole(()), 1, [()]),
        (Box.whole((0,)), 5, []),
        (Box.whole((3, 0, 2)), 1, []),
        (Box.whole((1, 1, 1)), 1, [(1, 1, 1)]),
        (Box.whole((2, 5)), 3, [(1, 3), (1, 2), (1, 3), (1, 2)]),  # a row is larger than a part
        (Box.whole((5, 2)), 4, [(2, 2), (2, 2), (1, 2)]),
        (Box.whole((1, 1, 7)), 3, [(1, 1, 3), (1, 1, 3), (1, 1, 1)]),
        (Box.whole((4,)), 4, [(4,)]),
    ],
)
def test_rows_of_odd_boxes(box, most, shapes_of_parts):
    assert [part.shape for part in split_rows(box, most)] == shapes_of_parts


def test_a_row_of_many_gigabytes_is_cut_without_touching_memory():
    parts = split_rows(Box((3, 0), (2, 1 << 40)), 1 << 36)
    assert len(parts) == 2 * 16
    assert parts[17] == Box((4, 1 << 36), (1, 1 << 36))


@pytest.mark.skipif(np.lib.NumpyVersion(np.__version__) < "2.0.0", reason="NumPy 1 has 32 at most")
def test_a_box_of_sixty_dimensions_is_cut():
    box = Box.whole((1,) * 58 + (3, 4))
    assert [part.shape[-2:] for part in split_rows(box, 4)] == [(1, 4)] * 3


# -- even_slab -------------------------------------------------------------------------------------


@given(shape_and_boxes(1), st.integers(1, 9))
def test_even_slabs_tile_the_box_and_differ_by_one_row(drawn, count):
    shape, (box,) = drawn
    slabs = [even_slab(box, count, index) for index in range(count)]
    assert len(slabs) == count
    if all(n < count for n in box.shape):
        assert slabs == [None] * count
        return
    seen = sum(
        (mask(shape, slab).astype(int) for slab in slabs if slab), np.zeros(shape, dtype=int)
    )
    assert np.array_equal(seen, mask(shape, box).astype(int))
    dim = next(d for d, n in enumerate(box.shape) if n >= count)
    lengths = [slab.shape[dim] for slab in slabs if slab]
    assert len(lengths) == count
    assert max(lengths) - min(lengths) <= 1


# -- tiling ----------------------------------------------------------------------------------------


@given(solid_shapes, st.integers(1, 12), randoms)
def test_a_partition_has_no_fault(shape, count, rng):
    assert tiling_fault(shape, partition(shape, count, rng)) is None


@given(solid_shapes_with_rows, st.integers(1, 12), randoms)
def test_a_partition_with_empty_boxes_has_no_fault(shape, count, rng):
    boxes = [
        *partition(shape, count, rng),
        Box((0,) * len(shape), (0,) * len(shape)),
        Box(shape, (0,) * len(shape)),
    ]
    assert tiling_fault(shape, boxes) is None


@given(solid_shapes, st.integers(1, 12), randoms)
def test_a_dropped_box_leaves_a_hole_of_its_size(shape, count, rng):
    boxes = partition(shape, count, rng)
    dropped = boxes.pop(rng.randrange(len(boxes)))
    total = math.prod(shape)
    assert tiling_fault(shape, boxes) == f"{dropped.numel} of {total} elements are in no box"


@given(solid_shapes, st.integers(1, 12), randoms)
def test_a_box_given_twice_overlaps(shape, count, rng):
    boxes = partition(shape, count, rng)
    boxes.insert(rng.randrange(len(boxes) + 1), rng.choice(boxes))
    assert "overlap" in fault_of(shape, boxes)


@given(solid_shapes_with_rows, st.integers(1, 12), randoms)
def test_a_shifted_box_is_found(shape, count, rng):
    boxes = partition(shape, count, rng)
    index, dim = rng.randrange(len(boxes)), rng.randrange(len(shape))
    offsets = list(boxes[index].offsets)
    offsets[dim] += rng.choice([-1, 1])
    boxes[index] = Box(tuple(offsets), boxes[index].shape)
    assert tiling_fault(shape, boxes) is not None


@settings(max_examples=examples(300))
@given(st.data())
def test_any_set_of_boxes_is_judged_as_numpy_counts(data):
    shape = data.draw(shapes)
    boxes = data.draw(st.lists(boxes_in(shape), max_size=5))
    counts = sum((mask(shape, box).astype(int) for box in boxes), np.zeros(shape, dtype=int))
    fault = tiling_fault(shape, boxes)
    assert (fault is None) == bool((counts == 1).all())
    assert ("overlap" in (fault or "")) == bool((counts > 1).any())


def test_a_pinwheel_is_accepted():
    boxes = [
        Box((0, 0), (1, 2)),
        Box((0, 2), (2, 1)),
        Box((2, 1), (1, 2)),
        Box((1, 0), (2, 1)),
        Box((1, 1), (1, 1)),
    ]
    assert tiling_fault((3, 3), boxes) is None
    assert tiling_fault((3, 3), boxes[:-1]) == "1 of 9 elements are in no box"


def test_a_hole_and_an_overlap_of_the_same_size_do_not_cancel():
    boxes = [Box((0,), (2,)), Box((1,), (2,))]
    assert "overlap" in fault_of((4,), boxes)


def test_a_box_outside_is_named():
    assert "(3,)+(2,) is not inside the shape (4,)" in fault_of(
        (4,), [Box((0,), (3,)), Box((3,), (2,))]
    )


def test_a_0d_tensor_has_one_box():
    box = Box((), ())
    assert tiling_fault((), [box]) is None
    assert tiling_fault((), []) == "1 of 1 elements are in no box"
    assert "overlap" in fault_of((), [box, box])


def test_a_tensor_without_elements_needs_no_box():
    assert tiling_fault((0, 5), []) is None
    assert tiling_fault((0, 5), [Box((0, 0), (0, 5)), Box((0, 2), (0, 1))]) is None


def test_a_mesh_of_sixteen_thousand_shards_is_checked():
    boxes = [Box((row * 3, column * 5), (3, 5)) for row in range(64) for column in range(256)]
    shape = (192, boxes[-1].offsets[1] + 5)
    assert tiling_fault(shape, boxes) is None
    assert tiling_fault(shape, boxes[:-1]) is not None


@given(st.data())
def test_a_flat_range_is_few_boxes_that_follow_each_other(data):
    shape = data.draw(shapes)
    whole = numbered(shape)
    start = data.draw(st.integers(0, whole.size))
    stop = data.draw(st.integers(start, whole.size))
    boxes = split_flat(shape, start, stop)
    found = [whole[box.slices()].reshape(-1) for box in boxes]
    assert np.array_equal(np.concatenate([np.empty(0, int), *found]), np.arange(start, stop))
    assert len(boxes) <= max(1, 2 * len(shape) - 1)


def test_a_flat_range_beyond_the_tensor_is_refused():
    with pytest.raises(ValueError, match="elements 3 to 13 are not in a tensor of shape"):
        split_flat((3, 4), 3, 13)


@given(st.data())
def test_a_part_begins_where_its_elements_follow_each_other(data):
    shape = data.draw(solid_shapes)
    whole = data.draw(boxes_in(shape, least=1))
    inner = data.draw(boxes_in(whole.shape, least=1))
    offsets = tuple(a + b for a, b in zip(whole.offsets, inner.offsets, strict=True))
    numbers = numbered(whole.shape)[inner.slices()].ravel()
    is_run = np.array_equal(numbers, np.arange(numbers[0], numbers[0] + numbers.size))
    assert flat_start(Box(offsets, inner.shape), whole) == (numbers[0] if is_run else None)


@given(st.data())
def test_a_box_contains_what_its_mask_covers(data):
    shape = data.draw(solid_shapes)
    one, two = data.draw(boxes_in(shape)), data.draw(boxes_in(shape))
    if not two.numel:
        two = Box(tuple(n - 1 for n in shape), (1,) * len(shape))
    assert one.contains(two) == bool((mask(shape, one) >= mask(shape, two)).all())


@pytest.mark.parametrize("dims", [2, 3])
def test_many_irregular_boxes_take_time_in_proportion(dims):
    """The boxes are all open along the first dimension. Each was once compared with each."""

    def seconds(count):
        boxes = [Box((0, *[i] * (dims - 1)), (2, *[1] * (dims - 1))) for i in range(count - 1)]
        boxes.append(
            Box((0,) * dims, (1, *[1] * (dims - 1)))
        )  # the volume of what is missing, where there is already a box
        shape = (2, *[count] * (dims - 1))
        began = time.process_time()
        assert tiling_fault(shape, boxes) is not None
        return time.process_time() - began

    seconds(100)
    assert seconds(40_000) < 40 * max(seconds(4_000), 1e-3)


def test_boxes_of_the_right_volume_that_overlap_far_apart_are_found():
    """More pairs are open at once than are compared. The reader still knows that there is an
    overlap.
    """
    count = 3_000
    boxes = [Box((0, i), (2, 1)) for i in range(count - 1)] + [
        Box((0, 5), (1, 1)),
        Box((1, 7), (1, 1)),
    ]
    assert "overlap" in fault_of((2, count), boxes)
    assert tiling_fault((2, count), [*boxes[:-2], Box((0, count - 1), (2, 1))]) is None


def box_lists(dims, *, least=0, most=60):
    ranges = st.tuples(st.integers(0, 9), st.integers(0, 5))
    return st.lists(
        st.lists(ranges, min_size=dims, max_size=dims).map(
            lambda pairs: Box(tuple(at for at, _ in pairs), tuple(n for _, n in pairs))
        ),
        min_size=least,
        max_size=most,
    )


@given(st.integers(0, 3).flatmap(lambda dims: st.tuples(box_lists(dims), box_lists(dims, least=1))))
def test_the_boxes_that_meet_are_those_that_a_comparison_with_each_finds(pair):
    stored, wanted = pair
    index = BoxIndex(stored)
    for box in wanted:
        meets = [i for i, other in enumerate(stored) if other.intersect(box)]
        assert index.search(box) == meets


@pytest.mark.parametrize("far", [False, True])
def test_a_search_compares_only_boxes_nearby(monkeypatch, far):
    rows = [Box((i, 0), (1, 4)) for i in range(1000)]
    index = BoxIndex([Box((0, 4), (1000, 1)), *rows] if far else rows)
    compared = []
    monkeypatch.setattr(Box, "intersect", lambda *_: compared.append(1))
    assert index.search(Box((500, 1), (2, 2))) == [500 + far, 501 + far]
    assert not compared
