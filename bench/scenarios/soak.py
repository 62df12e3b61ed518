"""Scenario 7: whether many saves leave anything behind.

A training saves again and again; after each save its process and their children are counted.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from functools import partial
from typing import Any, Final

from bench import plots, style
from bench.heat import Checker, Heat, Session
from bench.measure import Footprint, Spread, footprint, slope
from bench.result import Column, Kind, Line, Result
from bench.runner import Bench, Shape, label, size_label
from bench.scenarios import option

_SETTLED: Final = 0.75  # the part of the saves that must be flat: the last
_FLAT_PART: Final = 0.02
_FLAT_BYTES: Final = 4 << 20
_COLUMNS = (
    Column("saves", "saves", "count"),
    Column("memory_bytes", "memory", "bytes"),
    Column("memory_growth", "memory: growth", "text"),
    Column("descriptors", "descriptors", "count"),
    Column("descriptor_growth", "descriptors: growth", "text"),
    Column("threads", "threads", "count"),
    Column("thread_growth", "threads: growth", "text"),
    Column("verdict", "flat?", "text"),
)
_NOTES = (
    "After each save: anonymous and shared memory, open descriptors and threads, of the training "
    "process and its children. The median over all saves, and the **growth** "
    "over the last three quarters of the saves, from the straight line nearest to them.",
    f"**flat**: memory grew by less than {_FLAT_PART:.0%} of itself or {_FLAT_BYTES >> 20} MiB, "
    "descriptors and threads by less than one.",
    "A training step before each save, a wait until it is durable after it. The first, the last "
    "and every fiftieth checkpoint were loaded back and compared.",
)


@dataclass(frozen=True, kw_only=True)
class Options:
    saves: int = option(200, "of each contender")
    size_mib: int = option(64, "of the AdamW state")
    layers: int = option(6, "of the model")
    budget_seconds: float = option(80.0, "after which no other contender is begun")


QUICK = Options(saves=12, size_mib=4, layers=2, budget_seconds=40)


@dataclass
class _Seen:
    session: Session
    after: list[Footprint] = field(default_factory=list)


def run(bench: Bench, options: Options) -> Result:
    shape = Shape("training", options.size_mib << 20, options.layers)
    case = size_label(shape.size)
    seen: dict[str, _Seen] = {}
    for lot in bench.heats(case, shape, bench.ours_and_best(), beside_bytes=shape.check_bytes()):
        with Heat(bench, case, shape, lot) as heat, Checker(bench, shape) as checker:
            seen |= {name: _Seen(session) for name, session in heat.sessions.items()}
            for number in range(options.saves):
                compare = number % 50 == 0 or number == options.saves - 1
                heat.each(number, _visit, seen, checker, compare=compare)
                if compare:
                    bench.say(f"{number + 1} of {options.saves} saves")
            heat.each(0, Session.close)
            seen = {
                name: one for name, one in seen.items() if name in heat.sessions or name not in lot
            }
    lines = [_line(case, name, one) for name, one in seen.items()]
    return bench.result(f"What {options.saves} saves leave behind", _COLUMNS, _NOTES, lines)


def _visit(session: Session, seen: dict[str, _Seen], checker: Checker, *, compare: bool) -> None:
    session.save("idle", compare=compare, train=True)
    seen[session.name].after.append(footprint(session.process.pid))
    if compare:
        session.check(checker)


def _line(case: str, name: str, seen: _Seen) -> Line:
    last = int(len(seen.after) * _SETTLED)
    numbers: dict[str, Any] = {"saves": len(seen.after)}
    growth: dict[str, float] = {}
    for key in ("memory_bytes", "descriptors", "threads"):
        values = [float(getattr(one, key)) for one in seen.after]
        numbers[key] = Spread.of(values)
        growth[key] = slope(values[-last:]) * (last - 1)
        numbers[f"{key}_grown"] = growth[key]
    numbers["memory_growth"] = f"{growth['memory_bytes'] / 2**20:+.1f} MiB in {last}"
    numbers["descriptor_growth"] = f"{growth['descriptors']:+.1f} in {last}"
    numbers["thread_growth"] = f"{growth['threads']:+.1f} in {last}"
    numbers["verdict"] = "flat" if flat(growth, numbers["memory_bytes"].median) else "grows"
    return Line(case, name, label(name), numbers)


def flat(growth: dict[str, float], memory_bytes: float) -> bool:
    """Whether nothing has grown."""
    allowed = max(_FLAT_BYTES, _FLAT_PART * memory_bytes)
    return growth["memory_bytes"] < allowed and growth["descriptors"] < 1 and growth["threads"] < 1


def plot(result: Result, path: str) -> None:
    panels: tuple[tuple[str, str, Kind], ...] = (
        ("memory_bytes", "memory", "bytes"),
        ("descriptors", "open descriptors", "count"),
        ("threads", "threads", "count"),
    )
    from matplotlib.ticker import MultipleLocator

    reading = (
        "After each save: the training process and its children. Axes begin at zero, so that flat "
        "looks flat."
    )
    with style.figure(result, path, (15, 4.6), reading) as (drawn, plt):
        for axis, (key, title, kind) in zip(drawn.subplots(1, 3), panels, strict=True):
            series = []
            for line in plots.ordered(result.lines):
                value = line.numbers[key]
                assert isinstance(value, Spread)
                series.append(
                    plots.Series(line.name, line.label, range(1, len(value.all) + 1), value.all)
                )
            axis.set_ylim(0, max(max(each.y) for each in series) * 1.15)
            axis.set_xlim(0, max(len(each.y) for each in series))
            if kind == "bytes":
                axis.yaxis.set_major_locator(MultipleLocator(style.round_bytes(axis.get_ylim()[1])))
            axis.yaxis.set_major_formatter(partial(_tick, kind))
            axis.set_xlabel("save", color=style.SOFT)
            style.bare(axis, grid="y")
            plots.lines(axis, series, markers=False, gap=0.07)
            style.head(axis, title, "process and children, after each save")
        del plt


def _tick(kind: Kind, value: float, _: int) -> str:
    return style.tick(value, kind)
