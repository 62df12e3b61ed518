"""An index of boxes gives what a comparison with each box gives."""

import pytest
from hypothesis import given
from hypothesis import strategies as st

from ckpt.model.box import Box
from ckpt.model.box_index import BoxIndex


def boxes(dims, *, least=0, most=60):
    ranges = st.tuples(st.integers(0, 9), st.integers(0, 5))
    return st.lists(
        st.lists(ranges, min_size=dims, max_size=dims).map(
            lambda pairs: Box(tuple(at for at, _ in pairs), tuple(n for _, n in pairs))
        ),
        min_size=least,
        max_size=most,
    )


@given(st.integers(0, 3).flatmap(lambda dims: st.tuples(boxes(dims), boxes(dims, least=1))))
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
