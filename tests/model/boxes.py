"""Strategies and oracles for boxes: NumPy slicing gives the right result."""

from __future__ import annotations

import random
from collections.abc import Sequence

import numpy as np
from hypothesis import strategies as st

from ckpt.model.box import Box

shapes = st.lists(st.integers(0, 7), max_size=4).map(tuple)
solid_shapes = st.lists(st.integers(1, 7), max_size=4).map(tuple)
solid_shapes_with_rows = st.lists(st.integers(1, 7), min_size=1, max_size=4).map(tuple)


@st.composite
def boxes_in(draw: st.DrawFn, shape: Sequence[int], *, least: int = 0) -> Box:
    """Draw a box of at least ``least`` elements in each dimension of ``shape``."""
    offsets = [draw(st.integers(0, size - least)) for size in shape]
    return Box(
        tuple(offsets),
        tuple(
            draw(st.integers(least, size - start))
            for start, size in zip(offsets, shape, strict=True)
        ),
    )


@st.composite
def shape_and_boxes(draw: st.DrawFn, count: int) -> tuple[tuple[int, ...], list[Box]]:
    shape = draw(shapes)
    return shape, [draw(boxes_in(shape)) for _ in range(count)]


def numbered(shape: Sequence[int]) -> np.ndarray:
    """Return an array whose every element is its own row-major number."""
    return np.arange(int(np.prod(shape, dtype=np.int64))).reshape(tuple(shape))


def mask(shape: Sequence[int], box: Box) -> np.ndarray:
    found = np.zeros(tuple(shape), dtype=bool)
    found[box.slices()] = True
    return found


def partition(shape: Sequence[int], count: int, rng: random.Random) -> list[Box]:
    """Return a random partition of a tensor into at most ``count`` boxes, by cuts through single
    boxes.
    """
    boxes = [Box.whole(shape)]
    for _ in range(count - 1):
        index = rng.randrange(len(boxes))
        box = boxes[index]
        dims = [dim for dim, n in enumerate(box.shape) if n >= 2]
        if not dims:
            continue
        dim = rng.choice(dims)
        at = rng.randrange(1, box.shape[dim])
        low = (*box.shape[:dim], at, *box.shape[dim + 1 :])
        high = (*box.shape[:dim], box.shape[dim] - at, *box.shape[dim + 1 :])
        moved = (*box.offsets[:dim], box.offsets[dim] + at, *box.offsets[dim + 1 :])
        boxes[index : index + 1] = [Box(box.offsets, low), Box(moved, high)]
    rng.shuffle(boxes)
    return boxes
