"""The plots that scenarios share: bars beside each other, and lines with their names at the end."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

from bench.measure import Spread
from bench.result import Kind, Line, Result
from bench.style import (
    COLOURS,
    FLOOR,
    INK,
    SOFT,
    bare,
    colour,
    figure,
    head,
    ours,
    round_bytes,
    tick,
    write,
)

_BAR_INCHES = 0.3
_HEAD_INCHES = 1.3


@dataclass(frozen=True)
class Panel:
    """One number of every contender.

    ``floor``: the line it is compared with; ``first``: the same number of the first save.
    """

    key: str
    title: str
    subtitle: str
    floor: str = ""
    first: str = ""
    kind: Kind = "seconds"
    longer_is_better: bool = False


def ordered(lines: Sequence[Line]) -> list[Line]:
    """In the order of the colours, ours last: at the top of bars and of lines."""
    order = list(COLOURS)[::-1]
    unknown = {True: len(order), False: -1}
    return sorted(
        lines,
        key=lambda line: order.index(line.name) if line.name in order else unknown[ours(line.name)],
    )


def bars(result: Result, panels: Sequence[Panel], path: str, reading: str = "") -> None:
    """Horizontal bars, one row of panels for each case."""
    cases = result.cases()
    heights = [_HEAD_INCHES + _BAR_INCHES * (len(result.of(case)) + 1) for case in cases]
    size = (4.4 * len(panels) + 1.4, sum(heights) + 1.1)
    firsts = " Ring: the first save." if any(panel.first for panel in panels) else ""
    better = "Longer is better." if panels[0].longer_is_better else "Shorter is better."
    reading = (
        f"Bars: medians; lines: lowest to highest.{firsts} {better} {reading} All that is shown "
        "was loaded back and compared equal."
    )
    with figure(result, path, size, " ".join(reading.split()), rows=len(cases)) as (drawn, plt):
        grid = drawn.subplots(
            len(cases),
            len(panels),
            squeeze=False,
            sharey="row",
            gridspec_kw={"height_ratios": heights},
        )
        for axes, case in zip(grid, cases, strict=True):
            lines = ordered(result.of(case))
            for axis, panel in zip(axes, panels, strict=True):
                floor = result.find(case, panel.floor)
                _panel(axis, lines, panel, floor)
                if floor:
                    _floor(axis, floor, panel)
            if len(cases) > 1:
                _name(axes[0], case)
            axes[0].set_yticks(range(len(lines)), [line.label for line in lines], fontsize=10)
            for text, line in zip(axes[0].get_yticklabels(), lines, strict=True):
                text.set_color(colour("ckpt.save_async") if ours(line.name) else INK)
                text.set_fontweight("bold" if ours(line.name) else "normal")
        del plt


def _name(axis: Any, case: str) -> None:
    """What a row of panels is about, above it."""
    text = axis.annotate(
        case,
        (0.0, 1.0),
        xycoords=("figure fraction", "axes fraction"),
        xytext=(11, 40),
        textcoords="offset points",
        fontsize=12.5,
        weight="bold",
        color=SOFT,
    )
    text.set_in_layout(False)


def _panel(axis: Any, lines: Sequence[Line], panel: Panel, floor: Line | None) -> None:
    """Logarithmic where the longest is far from the shortest and none is below zero; rates
    never.
    """
    ends = [(y, line, _ends(line, panel.key)) for y, line in enumerate(lines)]
    known = [(y, line, spread) for y, line, spread in ends if spread is not None]
    values = [
        value
        for _, line, spread in known
        for value in (spread.low, spread.high, *_first(line, panel))
    ]
    values += [value for value in [floor.median(panel.key) if floor else None] if value is not None]
    values = values or [1.0]
    logarithmic = panel.kind != "per_second" and min(values) > 0 and max(values) > 8 * min(values)
    left = 10.0 ** math.floor(math.log10(min(values))) if logarithmic else 0.0
    for y, line, spread in known:
        axis.barh(y, spread.median - left, left=left, height=0.66, color=colour(line.name))
        axis.plot(
            [spread.low, spread.high],
            [y, y],
            color=INK,
            linewidth=1.1,
            alpha=0.55,
            solid_capstyle="butt",
        )
        for first in _first(line, panel):
            axis.plot(
                [first],
                [y],
                "o",
                markersize=5,
                markerfacecolor="white",
                markeredgecolor=INK,
                markeredgewidth=1,
            )
        note = axis.annotate(
            write(spread.median, panel.kind),
            (max(spread.high, spread.median, 0.0, *_first(line, panel)), y),
            xytext=(7, 0),
            textcoords="offset points",
            va="center",
            fontsize=9,
            fontweight="bold" if ours(line.name) else "normal",
            color=colour("ckpt.save_async") if ours(line.name) else INK,
            bbox={
                "boxstyle": "square,pad=0.1",
                "facecolor": "white",
                "edgecolor": "none",
                "alpha": 0.8,
            },
            zorder=3,
        )
        for first in _first(line, panel):
            words = f"first {write(first, panel.kind)}"
            where: Any = {
                "xycoords": note,
                "xytext": (4, 0),
                "textcoords": "offset points",
                "va": "center",
            }
            axis.annotate(words, (1, 0.5), fontsize=8, color=SOFT, **where)
    for y, line, none in ends:
        if none is None:
            text = line.numbers.get(panel.key) or "none"
            axis.annotate(
                str(text),
                (left, y),
                xytext=(6, 0),
                textcoords="offset points",
                va="center",
                fontsize=9,
                color=SOFT,
            )
    _scale(axis, values, left, logarithmic, panel)
    axis.set_ylim(-1.1, len(lines) - 0.45)  # a strip below the bars for what the floor is called
    scale = " (logarithmic)" if logarithmic else ""
    head(axis, panel.title, f"{panel.subtitle}{scale}")


def _ends(line: Line, key: str) -> Spread | None:
    value = line.numbers.get(key)
    if isinstance(value, int | float):
        return Spread.of([value])
    return value if isinstance(value, Spread) else None


def _first(line: Line, panel: Panel) -> list[float]:
    value = line.median(panel.first) if panel.first else None
    return [] if value is None else [value]


def _scale(
    axis: Any, values: Sequence[float], left: float, logarithmic: bool, panel: Panel
) -> None:
    from matplotlib.ticker import LogLocator, MultipleLocator, NullFormatter

    if logarithmic:
        axis.set_xscale("log")
        axis.set_xlim(left, max(values) * (max(values) / left) ** (0.5 if panel.first else 0.36))
        axis.xaxis.set_major_locator(LogLocator(numticks=5))
        axis.xaxis.set_minor_formatter(NullFormatter())
    else:
        axis.set_xlim(min(0.0, *values) * 1.1, max(*values, 1e-9) * 1.36)
        axis.axvline(0, color=SOFT, linewidth=0.8)
        if panel.kind == "bytes":
            axis.xaxis.set_major_locator(MultipleLocator(round_bytes(axis.get_xlim()[1])))
        else:
            axis.locator_params(axis="x", nbins=4)
    axis.xaxis.set_major_formatter(lambda value, _: tick(value, panel.kind))
    bare(axis)


def _floor(axis: Any, floor: Line, panel: Panel) -> None:
    value = floor.median(panel.key)
    if value is None:
        return
    low, high = axis.get_xlim()
    axis.axvline(value, color=FLOOR, linewidth=1, linestyle=(0, (4, 3)), zorder=2.5)
    span = (
        (math.log(value / low) / math.log(high / low)) if low > 0 else (value - low) / (high - low)
    )
    right = span > 0.6  # else the words would leave the panel
    text = axis.annotate(
        f"{floor.label.removeprefix('floor: ')} {write(value, panel.kind)}",
        (value, 0),
        xycoords=("data", "axes fraction"),
        xytext=(-4 if right else 4, 3),
        textcoords="offset points",
        fontsize=8,
        ha="right" if right else "left",
        color=FLOOR,
        va="bottom",
    )
    text.set_in_layout(False)


@dataclass(frozen=True)
class Series:
    """One line of a plot."""

    name: str
    label: str
    x: Sequence[float]
    y: Sequence[float]


def lines(axis: Any, series: Sequence[Series], *, markers: bool = True, gap: float = 0.055) -> None:
    """Lines with their names at their right ends, moved apart where they would overlap.

    Scales and limits must be set before.
    """
    for one in series:
        mine = ours(one.name)
        dashed = one.name.startswith("floor.")
        axis.plot(
            one.x,
            one.y,
            color=FLOOR if dashed else colour(one.name),
            linewidth=2.6 if mine else 1.6,
            linestyle=(0, (4, 3)) if dashed else "-",
            marker="o" if markers and not dashed else "",
            markersize=4.5 if mine else 3.5,
            zorder=3 if mine else 2,
        )

    def height(one: Series) -> float:
        return float(
            axis.transAxes.inverted().transform(axis.transData.transform((one.x[-1], one.y[-1])))[1]
        )

    known = [each for each in series if each.x]
    for one, placed in zip(known, spread_out([height(each) for each in known], gap), strict=True):
        mine = ours(one.name)
        shade = FLOOR if one.name.startswith("floor.") else colour(one.name)
        axis.annotate(
            one.label,
            (one.x[-1], one.y[-1]),
            xytext=(1.04, placed),
            textcoords="axes fraction",
            va="center",
            fontsize=9,
            fontweight="bold" if mine else "normal",
            color=shade,
            arrowprops={
                "arrowstyle": "-",
                "color": shade,
                "linewidth": 0.6,
                "alpha": 0.6,
                "relpos": (0, 0.5),
            },
            annotation_clip=False,
        )


def spread_out(heights: Sequence[float], gap: float) -> list[float]:
    """The same heights, moved as little as may be so that no two are nearer than ``gap``.

    Neighbours push each other apart.
    """
    order = sorted(range(len(heights)), key=heights.__getitem__)
    placed = [heights[at] for at in order]
    for _ in range(200):
        for low in range(len(placed) - 1):
            near = gap - (placed[low + 1] - placed[low])
            if near > 0:
                placed[low] -= near / 2
                placed[low + 1] += near / 2
    back = dict(zip(order, placed, strict=True))
    return [back[at] for at in range(len(heights))]
