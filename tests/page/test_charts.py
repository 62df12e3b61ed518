"""The numbers behind the charts, which a journal may set to anything."""

from __future__ import annotations

import pytest

from ckpt.model.readable import duration
from ckpt.page.charts import chart, nice


@pytest.mark.parametrize("seconds", [5e-324, 1e-310, 1e-300, 0.0, -1.0, 1e300, 1.7e308])
def test_any_seconds_are_drawn(seconds: float) -> None:
    drawn = chart("stall", {"stall": [(1, seconds), (2, seconds)]}, duration)
    assert drawn is not None
    assert [0 <= dot.y <= 100 for dot in drawn.lines[0].dots] == [True, True]


def test_the_top_of_an_axis_is_a_round_number() -> None:
    assert [nice(value) for value in (0.03, 0.5, 7, 1000)] == [0.05, 0.5, 10, 1000]
