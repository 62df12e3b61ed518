"""Scenario 1: the state alone, many large tensors, nothing to overlap with.

How near to the memory and the disk does each come?
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Final

from bench import plots
from bench.result import Line, Result
from bench.runner import Bench, Shape, size_label
from bench.scenarios import idle, option

_TENSORS_PER_GIB: Final = 16


@dataclass(frozen=True, kw_only=True)
class Options:
    size_mib: tuple[int, ...] = option((1024, 4096), "of each state")
    repeats: int = option(5, "saves after the first")
    budget_seconds: float = option(200.0, "after which no other contender is begun")


QUICK = Options(size_mib=(16,), repeats=2, budget_seconds=20)


def run(bench: Bench, options: Options) -> Result:
    lines: list[Line] = []
    for mib in options.size_mib:
        shape = Shape("raw", mib << 20, max(_TENSORS_PER_GIB, _TENSORS_PER_GIB * mib >> 10))
        lines += idle.measure(bench, size_label(shape.size), shape, options.repeats)
    columns = (
        idle.SAFE,
        idle.OVER_COPY,
        idle.FIRST_SAFE,
        idle.DURABLE,
        idle.OVER_WRITE,
        idle.FIRST_DURABLE,
        idle.MEMORY,
        idle.SAVES,
    )
    return bench.result("Bare tensors, nothing to overlap with", columns, idle.NOTES, lines)


def plot(result: Result, path: str) -> None:
    panels = (
        plots.Panel(
            "safe_seconds",
            "safe",
            "until the state may change",
            "floor.copy",
            first="first_safe_seconds",
        ),
        plots.Panel(
            "durable_seconds",
            "durable",
            "until written and fsynced",
            "floor.write",
            first="first_durable_seconds",
        ),
    )
    plots.bars(result, panels, path)
