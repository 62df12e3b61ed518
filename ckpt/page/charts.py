"""Line charts as paths of an SVG image that is 1000 units wide and 100 high. Pure functions.

The image stretches with the page. Its labels are HTML text outside of the image, so they stay
readable at any width.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Final

WIDTH: Final = 1000
HEIGHT: Final = 100
_MOST_POINTS: Final = 200
"""The number of newest points of each line that a chart shows."""
_TOP_FACTOR: Final = 2.5
"""The top of a chart is at most about this many times the 95th percentile of its values, so that
one slow save does not flatten all other points.
"""
_LEAST_VALUE: Final = 1e-290
"""`nice` accepts values that are greater than this number and less than its reciprocal."""

Points = Sequence[tuple[int, float]]
"""Pairs of a step and its value, in ascending order of the steps."""


@dataclass(frozen=True, slots=True)
class Dot:
    """A point of a line.

    ``x`` and ``y`` are its coordinates in the image. ``text`` gives its step and value.
    """

    x: float
    y: float
    text: str


@dataclass(frozen=True, slots=True)
class Line:
    """A line of a chart. ``path`` is its SVG path, and ``last`` its newest value as text."""

    name: str
    path: str
    dots: tuple[Dot, ...]
    last: str


@dataclass(frozen=True, slots=True)
class Chart:
    """A line chart as the page draws it.

    Attributes:
        title: The title of the chart.
        lines: One line for each series that has points.
        ticks: The labels of the y axis, from the top down.
        first_step, last: The steps at both ends of the x axis.
        outliers: The number of points above the top of the chart. They are drawn at its upper edge.
    """

    title: str
    lines: tuple[Line, ...]
    ticks: tuple[str, ...]
    first_step: int
    last: int
    outliers: int = 0

    @property
    def summary(self) -> str:
        """A text with the title, the range of steps and the newest values, for screen readers."""
        text = "; ".join(f"{line.name}: {line.last}" for line in self.lines)
        return f"{self.title}, steps {self.first_step} to {self.last}. Newest: {text}"


def chart(title: str, series: Mapping[str, Points], text: Callable[[float], str]) -> Chart | None:
    """Return a chart of the newest points of each series; None if they cover fewer than two steps.

    Args:
        title: The title of the chart.
        series: The points of each line, by the name of the line.
        text: Returns a value as a text with its unit.
    """
    newest = {name: list(points)[-_MOST_POINTS:] for name, points in series.items() if points}
    steps = sorted({step for points in newest.values() for step, _ in points})
    if len(steps) < 2:
        return None
    values = sorted(value for points in newest.values() for _, value in points)
    top = nice(min(values[-1], _TOP_FACTOR * values[int(0.95 * (len(values) - 1))]) or values[-1])
    step_span = steps[-1] - steps[0]

    def line(name: str, points: Points) -> Line:
        dots = tuple(
            Dot(
                round((step - steps[0]) / step_span * WIDTH, 1),
                round((1 - min(max(0.0, value) / top, 1.0)) * HEIGHT, 1),
                f"step {step}: {text(value)}",
            )
            for step, value in points
        )
        path = "M" + "L".join(f"{dot.x} {dot.y}" for dot in dots)
        return Line(name, path, dots, text(points[-1][1]))

    lines = tuple(line(name, points) for name, points in newest.items())
    outliers = sum(value > top for value in values)
    return Chart(title, lines, (text(top), text(top / 2), "0"), steps[0], steps[-1], outliers)


def nice(value: float) -> float:
    """Return the smallest 1, 2 or 5 times a power of ten that is not below ``value``.

    Return 1.0 if ``value`` is no measurement: nan, 0 or less, or so close to 0 or so large that
    powers of ten lose their precision.
    """
    if not _LEAST_VALUE < value < 1 / _LEAST_VALUE:
        return 1.0
    power = 10.0 ** math.floor(math.log10(value))
    # Rounding may make a power of ten a little less than ``value``, which it should equal.
    return next(factor * power for factor in (1, 2, 5, 10) if factor * power >= value * 0.999999)
