"""Scenario 10: saves to a folder with a far tier behind it that is well, slow, or away for a
while: what that costs the saves, and whether all is there in the end.
"""

from __future__ import annotations

import os
import time
from dataclasses import dataclass, field
from typing import Any, Final

from bench import plots
from bench.measure import Spread
from bench.process import BenchError
from bench.proxy import Proxy
from bench.result import Column, Line, Result
from bench.runner import Bench
from bench.scenarios import option
from bench.scenarios.objects import served

_COLUMNS: Final = (
    Column("stall_seconds", "stall", "seconds"),
    Column("near_seconds", "near durable", "seconds"),
    Column("near_worst_seconds", "near durable, worst", "seconds"),
    Column("waiting", "not far yet", "count"),
    Column("far_seconds", "all far after", "seconds"),
    Column("restored", "restored from far", "count"),
)
_NONE, _WELL, _SLOW, _AWAY = "none", "healthy", "1 MB/s", "down"
_LABELS: Final = {
    _NONE: "no far tier",
    _WELL: "far tier healthy",
    _SLOW: "far tier at 1 MB/s for {seconds:g} s",
    _AWAY: "far tier down for {seconds:g} s",
}
_NOTES: Final = (
    "{saves} saves of {mib} MiB, one every {pause:g} s, to a folder and, behind a wire, to "
    "rclone's S3 server on this machine; after one that does not count. The wire is slowed or cut "
    "before the first of them, and well again after {seconds:g} s.",
    "**stall**: of the call. **near durable**: from the call until the folder has it. **not far "
    "yet**: saves that had not got to the server when the wire was well again; without trouble, "
    "when the last save was in the folder. "
    "**all far after**: seconds from then until the server had them all. **restored from far**: "
    "that many were restored from the server alone, and compared.",
)


@dataclass(frozen=True, kw_only=True)
class Options:
    size_mib: int = option(32, "of each save")
    saves: int = option(5, "for each state of the wire")
    outage_seconds: float = option(60.0, "that the far tier is down, or slow")
    budget_seconds: float = option(300.0, "unused: it takes three times the outage, and a little")


QUICK = Options(size_mib=1, saves=2, outage_seconds=2, budget_seconds=30)


@dataclass
class _Seen:
    stalls: list[float] = field(default_factory=list)
    nears: list[float] = field(default_factory=list)
    far: float | None = None
    waiting: int | None = None
    restored: int | None = None


def run(bench: Bench, options: Options) -> Result:
    lines: list[Line] = []
    case = f"{options.size_mib} MiB"
    with served("rclone", bench) as (port, _), Proxy(port) as wire:
        for trouble, label in _LABELS.items():
            bench.show(f"{case}, {label.format(seconds=options.outage_seconds)}")
            process = bench.process()
            try:
                seen = _in_trouble(process, bench, options, wire, trouble)
            except BenchError as error:
                bench.fail(case, f"far.{trouble}", error)
                continue
            finally:
                wire.down, wire.bytes_per_second = False, 0.0
                process.end()
            lines.append(
                _line(bench, case, trouble, label.format(seconds=options.outage_seconds), seen)
            )
    given = {
        "saves": options.saves,
        "mib": options.size_mib,
        "seconds": options.outage_seconds,
        "pause": options.outage_seconds / (options.saves + 1),
    }
    return bench.result(
        "A far tier in trouble", _COLUMNS, [note.format(**given) for note in _NOTES], lines
    )


def _line(bench: Bench, case: str, trouble: str, label: str, seen: _Seen) -> Line:
    numbers: dict[str, Any] = {
        "stall_seconds": Spread.of(seen.stalls),
        "near_seconds": Spread.of(seen.nears),
        "near_worst_seconds": max(seen.nears),
    }
    rest = {"far_seconds": seen.far, "waiting": seen.waiting, "restored": seen.restored}
    numbers |= {key: value for key, value in rest.items() if value is not None}
    line = Line(case, f"far.{trouble}", label, numbers)
    far = f", all far {seen.far:.1f} s later" if seen.far is not None else ""
    bench.say(
        f"{case}, {label}: stall {1e3 * (line.median('stall_seconds') or 0):.2f} ms, near "
        f"{1e3 * (line.median('near_seconds') or 0):.0f} ms{far}"
    )
    return line


def _in_trouble(process: Any, bench: Bench, options: Options, wire: Proxy, trouble: str) -> _Seen:
    name = trouble.replace("/", "").replace(" ", "")
    near = os.path.join(bench.folder, f"near-{name}")
    url = None if trouble == _NONE else wire.url
    process.ask("far_open", near=near, url=url, name=name, size=options.size_mib << 20)
    process.ask("far_save")  # of a warm process
    process.ask("far_wait")
    wire.down, wire.bytes_per_second = trouble == _AWAY, 1e6 if trouble == _SLOW else 0.0
    began, seen = time.monotonic(), _Seen()
    for number in range(options.saves):
        due = began + number * options.outage_seconds / (options.saves + 1)
        time.sleep(max(0.0, due - time.monotonic()))
        answer = process.ask("far_save")
        seen.stalls.append(answer["stall"])
        seen.nears.append(answer["near"])
    if trouble == _NONE:
        return seen
    if trouble != _WELL:
        time.sleep(max(0.0, began + options.outage_seconds - time.monotonic()))
    seen.waiting = process.ask("far_waiting")["saves"]
    wire.down, wire.bytes_per_second, began = False, 0.0, time.monotonic()
    process.ask("far_wait")
    seen.far = time.monotonic() - began
    seen.restored = process.ask("far_check")["restored"]
    return seen


def plot(result: Result, path: str) -> None:
    panels = (
        plots.Panel("stall_seconds", "stall", "of the call"),
        plots.Panel("near_seconds", "near durable", "until the folder has it"),
    )
    plots.bars(result, panels, path)
