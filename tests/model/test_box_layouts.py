from __future__ import annotations

import random
from collections.abc import Sequence

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from ckpt.model.box import Box
from ckpt.model.box_layouts import Level, Run, boxes_of, compress, fault_of, ranks_meeting
from tests.kit.examples import examples

Row = tuple[int, tuple[int, ...], tuple[int, ...]]


@st.composite
def rows(draw: st.DrawFn) -> tuple[int, list[Row]]:
    """Draw dimensions, and boxes on ranks: meshes, changed meshes, and boxes that no mesh makes."""
    rng = draw(st.randoms(use_true_random=False))
    dims = draw(st.integers(0, 3))
    if draw(st.booleans()):
        found = [_any(rng, dims) for _ in range(draw(st.integers(0, 30)))]
    else:
        counts = [draw(st.integers(1, 5)) for _ in range(3)]
        steps = [[rng.randint(0, 4) for _ in range(dims)] for _ in counts]
        found = [
            (
                rank,
                tuple(sum(i * s[d] for i, s in zip(at, steps, strict=True)) for d in range(dims)),
                (2,) * dims,
            )
            for rank, at in enumerate(np.ndindex(*counts))
        ]
        for _ in range(draw(st.integers(0, 2))):
            found[rng.randrange(len(found))] = _any(rng, dims)
    return dims, sorted(found)


def _any(rng: random.Random, dims: int) -> Row:
    return rng.randrange(6), *(tuple(rng.randrange(low, 4) for _ in range(dims)) for low in (0, 1))  # type: ignore[return-value]


def columns(dims: int, found: Sequence[Row]) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
    ranks, offsets, shapes = zip(*found, strict=True) if found else ((), (), ())
    return np.array(ranks, np.int64), *(
        np.array(each, np.int64).reshape(len(found), dims) for each in (offsets, shapes)
    )  # type: ignore[return-value]


@settings(max_examples=examples(500))
@given(rows(), st.data())
def test_runs_are_the_same_boxes(given_: tuple[int, list[Row]], data: st.DataObject) -> None:
    dims, found = given_
    runs = compress(*columns(dims, found))
    ranks = range(1 + max((row[0] for row in found), default=0))
    held = [(rank, box.offsets, box.shape) for rank in ranks for box in boxes_of(runs, rank)]
    assert sorted(held) == found
    assert sum(run.count for run in runs) == len(found)  # there are none on other ranks
    if len({row[1:] for row in found}) == len(found):  # a merge leaves them so
        assert "more than once" not in (fault_of(runs, (20,) * dims, 200) or "")
    box = Box(*(tuple(data.draw(st.integers(low, 6)) for _ in range(dims)) for low in (0, 1)))
    assert ranks_meeting(runs, box) == {rank for rank, *held in found if Box(*held).intersect(box)}


@pytest.mark.parametrize("counts", [(64,), (8, 8), (4, 16, 2), (2, 3, 5, 7)])
def test_a_mesh_is_one_run_whatever_it_cuts(counts: tuple[int, ...]) -> None:
    steps = [[(7 * level + dim) % 3 for dim in range(3)] for level in range(len(counts))]
    found = [
        (
            rank,
            tuple(sum(i * s[d] for i, s in zip(at, steps, strict=True)) for d in range(3)),
            (1, 1, 1),
        )
        for rank, at in enumerate(np.ndindex(*counts))
    ]
    assert len(compress(*columns(3, found))) == 1


WHOLE = Run(0, (0,), (2,), (Level(4, 1, (2,)),))


@pytest.mark.parametrize(
    ("run", "expected"),
    [
        (WHOLE, None),
        (Run(0, (0,), (2,), (Level(4, 2, (2,)),)), "ranks"),
        (Run(3, (0,), (2,), (Level(4, -1, (2,)),)), None),
        (Run(2, (0,), (2,), (Level(4, -1, (2,)),)), "ranks"),
        (Run(0, (1,), (2,), (Level(4, 1, (2,)),)), "shape"),
        (Run(0, (0,), (2,), (Level(4, 1, (-2,)),)), "shape"),
        (Run(0, (0,), (2,), (Level(3, 1, (2,)),)), "6 of 8"),
        (Run(0, (0,), (2,), (Level(0, 1, (2,)),)), "backwards"),
        (Run(0, (0,), (-2,), (Level(4, 1, (2,)),)), "backwards"),
        (Run(0, (0, 0), (2,), (Level(4, 1, (2,)),)), "dimensions"),
        (Run(0, (0,), (2,), (Level(4, 1, (2, 2)),)), "dimensions"),
        (Run(0, (0,), (8,), tuple(Level(1, 0, (0,)) for _ in range(9))), "dimensions"),
        (Run(0, (0,), (0,), (Level(1 << 60, 0, (0,)),)), "more than once"),
        (Run(0, (0,), (1,), (Level(1 << 40, 0, (0,)), Level(1 << 40, 0, (0,)))), "more than once"),
        (Run(0, (0,), (2,), (Level(4, 1, (2,)), Level(2, 1, (0,)))), "more than once"),
    ],
)
def test_runs_that_we_do_not_write_are_refused_and_never_expanded(
    run: Run, expected: str | None
) -> None:
    fault = fault_of((run,), (8,), 4)
    assert fault is None if expected is None else fault is not None and expected in fault
