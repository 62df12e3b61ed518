"""The curve of a metric over the steps of a run, with marks for what happened. Pure functions.

As in `ckpt.page.charts`, the image stretches with the page, and its labels are HTML text.

The *scale* turns steps and values into positions in the image. A value above its ``top`` is an
*outlier*. If the run has gone back to an older step, the steps after that one are *abandoned*, and
have a line of their own (``branch_path``).
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Final, Literal

from ckpt.page.charts import HEIGHT, WIDTH, Chart, Line

Kind = Literal["kept", "removed", "abandoned", "best", "failed", "restore"]
KIND_MEANING: Final[dict[Kind, str]] = {
    "kept": "kept",
    "removed": "removed",
    "abandoned": "abandoned, since the run went back",
    "best": "the best that is kept",
    "restore": "a restore",
    "failed": "a save that failed",
}
"""The words for the marks of each kind in the legend."""
_MOST_POINTS: Final = 400
"""The number of points of the line. Of more steps, every second or third and so on is drawn."""
_MOST_MARKS: Final = 120
"""The number of newest marks of each kind."""
_FAILURE_HEIGHT: Final = 14
"""The height of the mark of a save that failed. That of a restore is as high as the image."""
_TOP_FACTOR: Final = 4.0
"""The top of a chart is at most about this many times as far from the least value as 95 % of the
values are, so that one spike does not flatten the curve.
"""


@dataclass(frozen=True, slots=True)
class Point:
    """The value of the metric at a step.

    Attributes:
        step: The number of the step.
        value: The value; it may be NaN or infinite.
        is_kept: Whether a tier has the step.
    """

    step: int
    value: float
    is_kept: bool


@dataclass(frozen=True, slots=True)
class Mark:
    """A mark of a chart, with its SVG path and its text."""

    kind: Kind
    path: str
    text: str


@dataclass(frozen=True, slots=True, kw_only=True)
class MetricChart:
    """The curve of a metric as the page draws it.

    Attributes:
        name: The name of the metric.
        path: The SVG path of the line.
        branch_path: The SVG path of the line through the abandoned steps; empty if there are none.
        marks: The marks, in the order in which they are drawn.
        ticks: The labels of the y axis, from the top down.
        first_step, last_step: The steps at both ends of the x axis.
        outliers: The number of points above the top. They are drawn at its upper edge.
        best: The best step that is kept, with its value, as text; empty if it is not known.
        newest: The newest step, with its value, as text.
    """

    name: str
    path: str
    branch_path: str
    marks: tuple[Mark, ...]
    ticks: tuple[str, ...]
    first_step: int
    last_step: int
    outliers: int
    best: str
    newest: str

    @property
    def summary(self) -> str:
        """A text for screen readers."""
        best = f"; best: {self.best}" if self.best else ""
        steps = f"steps {self.first_step} to {self.last_step}"
        return f"{self.name}, {steps}. Newest: {self.newest}{best}"

    @property
    def legend(self) -> dict[Kind, str]:
        """The meaning of each kind of mark in the chart."""
        kinds = {mark.kind for mark in self.marks}
        return {kind: text for kind, text in KIND_MEANING.items() if kind in kinds}


def metric_chart(
    name: str,
    points: Sequence[Point],
    best_step: int | None,
    *,
    abandoned_points: Sequence[Point] = (),
    restores: Sequence[int] = (),
    failures: Sequence[int] = (),
) -> MetricChart | None:
    """Return the curve of a metric; None if fewer than two steps have a finite value.

    Args:
        name: The name of the metric.
        points: The values, in ascending order of the steps.
        best_step: The best step that is kept; None if it is not known.
        abandoned_points: The values of the steps after which the run has gone back.
        restores: The steps that were restored.
        failures: The steps whose saves have failed.
    """
    finite_points = _finite(points)
    if len(finite_points) < 2:
        return None
    branch_points = _finite(abandoned_points)
    scale = _scale([*finite_points, *branch_points])
    fork = [  # The last point before the abandoned steps, from which their line begins
        point for point in finite_points if branch_points and point.step < branch_points[0].step
    ][-1:]
    best = next((point for point in finite_points if point.step == best_step), None)
    marks = [  # Marks at other steps would lie outside of the image
        *(
            _vertical_mark(scale, "restore", step)
            for step in dict.fromkeys(restores)
            if scale.start <= step <= scale.end
        ),
        *(
            _vertical_mark(scale, "failed", step)
            for step in dict.fromkeys(failures)
            if scale.start <= step <= scale.end
        ),
        *(_dot_mark(scale, "removed", point) for point in finite_points if not point.is_kept),
        *(_dot_mark(scale, "abandoned", point) for point in branch_points),
        *(_dot_mark(scale, "kept", point) for point in finite_points if point.is_kept),
    ]
    visible_marks = [mark for kind in KIND_MEANING for mark in _newest(marks, kind)]
    return MetricChart(
        name=name,
        path=_path(scale, _sample(finite_points)),
        branch_path=_path(scale, [*fork, *branch_points]) if branch_points else "",
        marks=(*visible_marks, *([_dot_mark(scale, "best", best)] if best else [])),
        ticks=scale.ticks,
        first_step=scale.start,
        last_step=scale.end,
        outliers=sum(point.value > scale.top for point in (*finite_points, *branch_points)),
        best=f"step {best.step}, {best.value:.6g}" if best else "",
        newest=f"step {finite_points[-1].step}, {finite_points[-1].value:.6g}",
    )


def runs_chart(name: str, runs: Mapping[str, Sequence[Point]]) -> Chart | None:
    """Return one chart with the curve of a metric of each run; None if fewer than two runs have two
    finite values.

    Args:
        name: The name of the metric.
        runs: The values in ascending order of the steps, by the name of the run.
    """
    curves = {run: _finite(points) for run, points in runs.items()}
    curves = {run: points for run, points in curves.items() if len(points) > 1}
    if len(curves) < 2:
        return None
    scale = _scale([point for points in curves.values() for point in points])
    lines = tuple(
        Line(run, _path(scale, _sample(points)), (), f"{points[-1].value:.4g}")
        for run, points in curves.items()
    )
    outliers = sum(point.value > scale.top for points in curves.values() for point in points)
    return Chart(name, lines, scale.ticks, scale.start, scale.end, outliers)


@dataclass(frozen=True, slots=True)
class _Scale:
    """The place of steps and values in the image.

    Attributes:
        start, end: The first and the last step, at the left and the right edge.
        low, top: The values at the lower and the upper edge.
    """

    start: int
    end: int
    low: float
    top: float

    def x(self, step: int) -> float:
        return round((step - self.start) / max(1, self.end - self.start) * WIDTH, 1)

    def y(self, value: float) -> float:
        share = (min(value, self.top) - self.low) / (self.top - self.low)
        return round((1 - share) * HEIGHT, 1)

    @property
    def ticks(self) -> tuple[str, ...]:
        return tuple(f"{value:.4g}" for value in (self.top, (self.top + self.low) / 2, self.low))


def _scale(points: Sequence[Point]) -> _Scale:
    """Return the scale for the points. A spike does not fit (see ``_TOP_FACTOR``)."""
    values = sorted(point.value for point in points)
    low = values[0]
    usual_height = values[int(0.95 * (len(values) - 1))] - low
    top = min(values[-1], low + _TOP_FACTOR * usual_height) if usual_height else values[-1]
    steps = [point.step for point in points]
    return _Scale(min(steps), max(steps), low, top if top > low else low + (abs(low) or 1.0))


def _finite(points: Sequence[Point]) -> list[Point]:
    return [point for point in points if math.isfinite(point.value)]


def _sample(points: Sequence[Point]) -> list[Point]:
    """Return the points of a line, without some that are not kept if there are many."""
    stride = -(-len(points) // _MOST_POINTS)
    return [
        point
        for index, point in enumerate(points)
        if index % stride == 0 or point.is_kept or point is points[-1]
    ]


def _path(scale: _Scale, points: Sequence[Point]) -> str:
    return "M" + "L".join(f"{scale.x(point.step)} {scale.y(point.value)}" for point in points)


def _dot_mark(scale: _Scale, kind: Kind, point: Point) -> Mark:
    text = f"step {point.step}, {KIND_MEANING[kind]}: {point.value:.6g}"
    # "h0" is a line without length, whose round caps are the dot.
    return Mark(kind, f"M{scale.x(point.step)} {scale.y(point.value)}h0", text)


def _vertical_mark(scale: _Scale, kind: Kind, step: int) -> Mark:
    x, top = scale.x(step), 0 if kind == "restore" else HEIGHT - _FAILURE_HEIGHT
    return Mark(kind, f"M{x} {HEIGHT}V{top}", f"{KIND_MEANING[kind]} at step {step}")


def _newest(marks: Sequence[Mark], kind: Kind) -> list[Mark]:
    return [mark for mark in marks if mark.kind == kind][-_MOST_MARKS:]
