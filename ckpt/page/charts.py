"""Line charts as paths of an SVG whose box is 1000 wide and 100 high. Pure.

The plot stretches with the page. Its labels are text of the page, so they stay readable at any
width.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Final

WIDTH: Final = 1000
HEIGHT: Final = 100
_MOST_POINTS: Final = 200
_USUAL: Final = 2.5
"""A chart is at most this many times as high as its 95th percentile, so that one slow save does not
flatten all others.
"""
_TINY: Final = 1e-290

Points = Sequence[tuple[int, float]]
"""Steps, ascending, and a value for each."""


@dataclass(frozen=True, slots=True)
class Dot:
    """A point: its place in the box, and what it stands for."""

    x: float
    y: float
    text: str


@dataclass(frozen=True, slots=True)
class Line:
    """A line of a chart. ``last`` is its newest value as text."""

    name: str
    path: str
    dots: tuple[Dot, ...]
    last: str


@dataclass(frozen=True, slots=True)
class Chart:
    """A chart.

    Attributes:
        title: What it shows.
        lines: Its lines.
        ticks: The labels of the y axis, from the top down.
        first, last: The steps at both ends of the x axis.
        above: How many points are higher than the chart. They are drawn at its upper edge.
    """

    title: str
    lines: tuple[Line, ...]
    ticks: tuple[str, ...]
    first: int
    last: int
    above: int = 0

    @property
    def summary(self) -> str:
        """The chart in words."""
        text = "; ".join(f"{line.name}: {line.last}" for line in self.lines)
        return f"{self.title}, steps {self.first} to {self.last}. Newest: {text}"


def chart(title: str, series: Mapping[str, Points], text: Callable[[float], str]) -> Chart | None:
    """Return a chart of the newest points; None if there is no line to draw.

    Args:
        title: What it shows.
        series: Name -> points.
        text: Makes a value readable.
    """
    newest = {name: list(points)[-_MOST_POINTS:] for name, points in series.items() if points}
    steps = sorted({step for points in newest.values() for step, _ in points})
    if len(steps) < 2:
        return None
    values = sorted(value for points in newest.values() for _, value in points)
    top = nice(min(values[-1], _USUAL * values[int(0.95 * (len(values) - 1))]) or values[-1])
    span = steps[-1] - steps[0]

    def line(name: str, points: Points) -> Line:
        dots = tuple(
            Dot(
                round((step - steps[0]) / span * WIDTH, 1),
                round((1 - min(max(0.0, value) / top, 1.0)) * HEIGHT, 1),
                f"step {step}: {text(value)}",
            )
            for step, value in points
        )
        path = "M" + "L".join(f"{dot.x} {dot.y}" for dot in dots)
        return Line(name, path, dots, text(points[-1][1]))

    lines = tuple(line(name, points) for name, points in newest.items())
    above = sum(value > top for value in values)
    return Chart(title, lines, (text(top), text(top / 2), "0"), steps[0], steps[-1], above)


def nice(value: float) -> float:
    """Return the least of 1, 2 and 5 times a power of ten that is not below ``value``.

    It is 1 for what is no measurement: 0 and less, and where a power of ten is not exact.
    """
    if not _TINY < value < 1 / _TINY:
        return 1.0
    power = 10.0 ** math.floor(math.log10(value))
    return next(each * power for each in (1, 2, 5, 10) if each * power >= value * 0.999999)
