"""Scenario: one save as a picture, on which all that each thread does has a name.

The save runs in this process, with functions of ckpt wrapped (``bench.spans``). A plain write of as
many bytes is measured right after each save.
"""

from __future__ import annotations

import json
import time
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, Final

import torch

from bench import style
from bench.floors import Floors
from bench.measure import Spread
from bench.result import Column, Line, Result
from bench.runner import Bench, size_label
from bench.scenarios import option
from bench.spans import FSYNC, FSYNC_FOLDER, ROLES, Span, Spans, recording
from bench.state import Training
from ckpt import CheckpointManager

_NAME: Final = "ckpt.save_async"
_COLOURS: Final = {
    "copy": "#0b7a75",
    "write": "#6f9fd8",
    "hash": "#d8b24a",
    FSYNC: "#b42318",
    FSYNC_FOLDER: "#e3785f",
    "put the fragment": "#8c62c4",
    "put the manifest": "#5b3a8f",
    "the call": "#054542",
    "the optimizer waits": "#e0559a",
    "touch pages": "#9aa83a",
    "grow the spill": "#9aa83a",
    "compare a sample": "#63b8ae",
    "create the file": "#b9805a",
    "publish the file": "#7a4a22",
    "owner and history": "#2f5f9e",
    "votes and merge": "#c9a6ee",
    "make the fragment": "#d9c2f2",
    "other work of the copy": "#b6dcd8",
}
_WAITS: Final = "#e4e7eb"
_OTHERS: Final = "#9aa5b1"
_COLUMNS: Final = (
    Column("seconds", "seconds", "seconds"),
    Column("share", "of the save", "percent"),
    Column("count", "times", "count"),
)
_NOTES: Final = (
    "Each row is what one thread does, without what a row below it names. The rows *streaming* add "
    "up to the save: what they wait for is in the other rows.",
    "Medians of the saves after the first. The picture shows the save of the median time. *of the "
    "save*: as a share of the time from the call until the step is durable.",
    "**floor**: 8 MiB `O_DIRECT` writes by 4 threads into a preallocated file, with fsync, right "
    "after each save.",
    "The wrapped functions cost some microseconds each.",
)


@dataclass(frozen=True, kw_only=True)
class Options:
    size_mib: int = option(1024, "of the state")
    layers: int = option(6, "of the GPT")
    saves: int = option(7, "after the first")
    ahead: float = option(2.0, "seconds from the call until the optimizer's step")
    budget_seconds: float = option(120.0, "after which no further save is begun")


QUICK = Options(size_mib=16, layers=2, saves=2, ahead=0.1, budget_seconds=20)


@dataclass(frozen=True)
class _Save:
    seconds: float
    floor: float
    spans: Sequence[Span]


def run(bench: Bench, options: Options) -> Result:
    torch.set_num_threads(1)
    training = Training.make(options.size_mib << 20, options.layers, batch=1, seed=0)
    floors = Floors(training.nbytes)
    spans, saves = Spans(), list[_Save]()
    with recording(spans), CheckpointManager(bench.place()) as manager:
        manager.prepare(training.objects())
        time.sleep(1.0)
        for number in range(options.saves + 1):
            if number < 2 or not bench.over():
                saves.append(_saved(manager, training, spans, floors, bench, options.ahead))
                bench.say(f"save {number}: {saves[-1].seconds:.3f} s")
    later = sorted(saves[1:], key=lambda save: save.seconds)
    case = size_label(options.size_mib << 20)
    spans_of_middle = _visible(later[len(later) // 2])
    drawn = [
        (span.thread, span.name, round(span.begin, 5), round(span.end, 5))
        for span in spans_of_middle
    ]
    return bench.result(
        "A save, thread by thread",
        _COLUMNS,
        _NOTES,
        _lines(case, later, saves[0]),
        spans=json.dumps(drawn),
    )


def _saved(
    manager: CheckpointManager,
    training: Training,
    spans: Spans,
    floors: Floors,
    bench: Bench,
    ahead: float,
) -> _Save:
    training.forward_backward()
    began = time.perf_counter()
    pending = manager.save_async(training.objects(), training.step)
    time.sleep(max(0.0, began + ahead - time.perf_counter()))
    training.optimizer_step()
    pending.result()
    seconds = pending.durable_seconds
    assert seconds is not None
    found = [span for span in spans.since(began) if span.begin < seconds]
    return _Save(seconds, floors.write(bench.folder), found)


def _visible(save: _Save) -> list[Span]:
    """Return the spans that the picture shows: those of the streaming thread, those that take a
    visible part of the save, and the longest of each kind. So a save that takes long for other
    reasons, such as a busy machine, loses no kind.
    """
    longest: dict[tuple[int, str], Span] = {}
    for span in sorted(save.spans, key=lambda span: span.seconds):
        longest[span.kind] = span
    least = _VISIBLE * save.seconds
    return [
        span
        for span in save.spans
        if span.role == "streaming" or span.seconds > least or span is longest[span.kind]
    ]


def _lines(case: str, saves: Sequence[_Save], first: _Save) -> list[Line]:
    durable = Spread.of(save.seconds for save in saves)
    lines = [
        Line(
            case,
            _NAME,
            "the save, from the call until durable",
            {
                "seconds": durable,
                "share": 1.0,
                "count": len(saves),
                "first_seconds": first.seconds,
                "over_floor": Spread.ratio(
                    [save.seconds for save in saves], [save.floor for save in saves]
                ),
            },
        )
    ]
    for kind in sorted({span.kind for save in saves for span in save.spans}):
        role, name = ROLES[kind[0]], kind[1]
        of = [[span.seconds for span in save.spans if span.kind == kind] for save in saves]
        seconds = Spread.of(map(sum, of))
        if seconds.median >= _LEAST * durable.median:
            numbers: dict[str, Any] = {
                "seconds": seconds,
                "share": seconds.median / durable.median,
                "count": len(of[len(of) // 2]),
            }
            lines.append(Line(case, f"{role}.{name}", f"{role}: {name}", numbers))
    floor = {"seconds": Spread.of(save.floor for save in saves)}
    return [*lines, Line(case, "floor.write", "floor: O_DIRECT write", dict(floor))]


_LEAST: Final = 0.0005  # What takes less of a save has no row
_VISIBLE: Final = 0.0003  # What takes less of a save is not drawn
_BEGIN: Final = 0.05  # of the save is shown as its begin


def plot(result: Result, path: str) -> None:
    """A row for each thread, with a bar for each span, and the begin and the end of the save once
    more, larger.
    """
    (case,) = result.cases()
    line = result.find(case, _NAME)
    assert line is not None
    spans = [Span(*row) for row in json.loads(result.conditions["spans"])]
    end = max(span.end for span in spans if span.role == "streaming")
    spans = [span for span in spans if span.begin < end]
    written = max(span.end for span in spans if span.role == "writing")
    threads = list(dict.fromkeys(span.thread for span in sorted(spans, key=_row)))[::-1]
    reading = (
        "One save: a row for each thread, a bar for what it does. Light grey: it waits. White: it "
        f"has nothing to do. Dashed: the step is durable, after {style.seconds(end)}; median of "
        f"the saves: {style.seconds(line.median('seconds') or 0)}."
    )
    height = 0.55 * len(threads)
    with style.figure(result, path, (13, 2 * height + 4.4), reading, rows=2) as (drawn, plt):
        grid = drawn.add_gridspec(3, 2, height_ratios=(1, 1, 0.35))
        whole = drawn.add_subplot(grid[0, :])
        first, last = (drawn.add_subplot(grid[1, column]) for column in (0, 1))
        margin = 0.3 * (end - written)
        for axis, low, high in (
            (whole, 0.0, end),
            (first, 0.0, _BEGIN * end),
            (last, written - margin, end),
        ):
            _panel(axis, spans, threads, low, high, end)
        style.head(whole, "the save", "seconds after the call")
        style.head(first, "its begin", "until the first parts are written")
        style.head(last, "its end", "from the last part until the step is durable")
        named = [name for name in _COLOURS if any(span.name == name for span in spans)]
        marks = [plt.Rectangle((0, 0), 1, 1, color=_COLOURS[name]) for name in named]
        marks += [plt.Rectangle((0, 0), 1, 1, color=colour) for colour in (_WAITS, _OTHERS)]
        below = drawn.add_subplot(grid[2, :])
        below.axis("off")
        below.legend(
            marks,
            [*named, "waits", "other"],
            ncols=7,
            fontsize=8.5,
            frameon=False,
            loc="center",
        )


def _row(span: Span) -> tuple[int, str]:
    return ROLES.index(span.role), span.thread


def _panel(
    axis: Any, spans: Sequence[Span], threads: Sequence[str], low: float, high: float, end: float
) -> None:
    for row, thread in enumerate(threads):
        for span in spans:
            if span.thread == thread and span.begin < high and span.end > low:
                waits = span.name.startswith("wait ")
                colour = _WAITS if waits else _COLOURS.get(span.name, _OTHERS)
                axis.barh(row, span.seconds, left=span.begin, height=0.7, color=colour)
    axis.set_yticks(range(len(threads)), threads)
    axis.set_ylim(-0.5, len(threads) - 0.5)
    axis.axvline(end, color=style.INK, linewidth=1, linestyle="--")
    axis.set_xlim(low, high + 0.01 * (high - low))
    style.bare(axis)
