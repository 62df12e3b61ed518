"""Scenario 6: how each grows with the state, from what fits a cache to what hardly fits the
machine.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Final

from bench import plots, style
from bench.result import Line, Result
from bench.runner import Bench, Shape, size_label
from bench.scenarios import idle, option

_TENSORS_PER_GIB: Final = 16
_WHO: Final[tuple[str, ...]] = (
    "ckpt.save_async",
    "torch_checkpointing",
    "dcp.best",
    "dcp.async_save",
    "torch.save",
)


@dataclass(frozen=True, kw_only=True)
class Options:
    from_mib: int = option(64, "the smallest state")
    to_mib: int = option(8192, "the largest; each is twice the previous one")
    repeats: int = option(5, "saves after the first")
    budget_seconds: float = option(120.0, "after which nothing larger is begun")


QUICK = Options(from_mib=4, to_mib=8, repeats=2, budget_seconds=40)


def run(bench: Bench, options: Options) -> Result:
    lines: list[Line] = []
    names = [name for name in _WHO if name in bench.names] or list(bench.names)
    mib = options.from_mib
    while mib <= options.to_mib and names:
        case = size_label(mib << 20)
        names = _in_time(bench, case, names, lines, options)
        shape = Shape("raw", mib << 20, max(_TENSORS_PER_GIB, _TENSORS_PER_GIB * mib >> 10))
        lines += idle.measure(bench, case, shape, options.repeats, names)
        names = [name for name in names if not bench.failed(case, name)]
        mib *= 2
    columns = (
        idle.SAFE,
        idle.DURABLE,
        idle.OVER_COPY,
        idle.OVER_WRITE,
        idle.FIRST_SAFE,
        idle.MEMORY,
        idle.SAVES,
    )
    return bench.result("How a save grows with the state", columns, idle.NOTES, lines)


def _in_time(
    bench: Bench, case: str, names: list[str], lines: list[Line], options: Options
) -> list[str]:
    """Those that will probably end in time: saves of twice the size take twice as long.

    Whoever is left out has come to its end.
    """
    kept = []
    left = bench.left()
    for name in names:
        last = next((line for line in reversed(lines) if line.name == name), None)
        expected = (
            2 * (last.median("durable_seconds") or 0.0) * (options.repeats + 2) if last else 0.0
        )
        if expected > left:
            reason = f"it would take about {expected:.0f} s, {max(0.0, left):.0f} s are left"
            bench.skip(f"{case} and more", name, reason)
        else:
            kept.append(name)
            left -= expected
    return kept


def plot(result: Result, path: str) -> None:
    reading = (
        "Medians; both axes are logarithmic. All that is shown was loaded back and compared "
        "equal. A line ends where memory or the time of the scenario did."
    )
    panels = (
        ("safe_seconds", "safe", "until the state may change", "floor.copy"),
        ("durable_seconds", "durable", "until written and fsynced", "floor.write"),
    )
    with style.figure(result, path, (13, 6), reading) as (drawn, plt):
        for axis, (key, title, subtitle, floor) in zip(drawn.subplots(1, 2), panels, strict=True):
            lines = [
                line
                for line in result.lines
                if line.name == floor or not line.name.startswith("floor.")
            ]
            series = _series(result, [line for line in lines if line.median(key) is not None], key)
            axis.set_xscale("log", base=2)
            axis.set_yscale("log")
            for each in series:
                axis.plot(each.x, each.y, alpha=0)  # sets the limits, which the names need
            xs = sorted({x for each in series for x in each.x})
            axis.set_xticks(xs, [style.tick(x, "bytes") for x in xs], rotation=0)
            style.log_marks(axis)
            axis.minorticks_off()
            axis.set_xlabel("size of the state", color=style.SOFT)
            axis.yaxis.set_major_formatter(lambda value, _: style.tick(value, "seconds"))
            style.bare(axis, grid="both")
            plots.lines(axis, series)
            style.head(axis, title, subtitle)
        del plt


def _series(result: Result, lines: list[Line], key: str) -> list[plots.Series]:
    names = dict.fromkeys(line.name for line in plots.ordered(lines))
    found = []
    for name in names:
        own = [line for line in lines if line.name == name]
        sizes = [_bytes(result, line) for line in own]
        found.append(
            plots.Series(
                name,
                own[0].label.removeprefix("floor: "),
                sizes,
                [line.median(key) or 0.0 for line in own],
            )
        )
    return found


def _bytes(result: Result, line: Line) -> float:
    """A floor has no state of its own: that of its case."""
    return next(value for each in result.of(line.case) if (value := each.median("state_bytes")))
