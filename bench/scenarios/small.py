"""Scenario 2: thousands of small tensors, where bytes cost nothing and names cost all."""

from __future__ import annotations

from dataclasses import dataclass

from bench import plots
from bench.result import Line, Result
from bench.runner import Bench, Shape
from bench.scenarios import idle, option


@dataclass(frozen=True, kw_only=True)
class Options:
    tensors: tuple[int, ...] = option((3000, 30000), "in a dict")
    parameters: int = option(
        1000,
        "of a model with AdamW: three times as many tensors, and a step count each; 0 for none",
    )
    size_mib: int = option(64, "of each state")
    repeats: int = option(5, "saves after the first")
    budget_seconds: float = option(110.0, "after which no other contender is begun")


QUICK = Options(tensors=(300,), parameters=100, size_mib=8, repeats=2, budget_seconds=20)
_PARAMETERS_PER_LAYER = 12


def run(bench: Bench, options: Options) -> Result:
    size = options.size_mib << 20
    lines: list[Line] = []
    if options.parameters:
        layers = max(1, round(options.parameters / _PARAMETERS_PER_LAYER))
        shape = Shape("training", size, layers)
        lines += idle.measure(
            bench, f"model + optimizer, {options.parameters:,} parameters", shape, options.repeats
        )
    for count in options.tensors:
        lines += idle.measure(
            bench, f"{count:,} tensors", Shape("raw", size, count), options.repeats
        )
    columns = (
        idle.CALL,
        idle.SAFE,
        idle.DURABLE,
        idle.FIRST_SAFE,
        idle.FIRST_DURABLE,
        idle.ON_DISK,
        idle.SAVES,
    )
    return bench.result("Thousands of small tensors", columns, idle.NOTES, lines)


def plot(result: Result, path: str) -> None:
    panels = (
        plots.Panel("call_seconds", "call", "until the call returns"),
        plots.Panel("safe_seconds", "safe", "until the state may change", "floor.copy"),
        plots.Panel("durable_seconds", "durable", "until written and fsynced", "floor.write"),
    )
    plots.bars(result, panels, path)
