"""The report of a run: a table on the terminal; Markdown, CSV, JSON and a plot per scenario;
and one page over all.
"""

from __future__ import annotations

import csv
import json
import os
from collections.abc import Sequence
from typing import Any, Final

from rich.console import Console
from rich.table import Table

from bench import scenarios
from bench.measure import Spread
from bench.result import Column, Failure, Line, Result
from bench.runner import label
from bench.scenarios.restore import SAME
from bench.style import cell, machine, ours

_WIDE: Final = 150
_SHOWN: Final = 8  # columns on a terminal; the files have all


def show(result: Result, console: Console) -> None:
    """Print the tables, one per case."""
    for case in result.cases():
        table = Table(
            title=f"{result.title}: {case} (medians)", title_justify="left", row_styles=["", "dim"]
        )
        table.add_column("", no_wrap=True)
        shown = result.columns[:_SHOWN]
        for column in shown:
            table.add_column(column.heading, justify="right")
        for line in (*result.of(case), *result.of(case, floors=True)):
            cells = [cell(line.numbers.get(column.key), column.kind) for column in shown]
            table.add_row(line.label, *cells, style="bold green" if ours(line.name) else "")
        wide = Console(
            file=console.file, width=max(console.width, _WIDE)
        )  # a pipe has no width, and a cut number is a wrong one
        wide.print(table)
    for one in result.failures:
        console.print(
            f"[red]no numbers: {_where(one)}: {one.reason}[/]",
            highlight=False,
            soft_wrap=True,
        )
    console.print(machine(result), style="dim", highlight=False)


def write(result: Result, folder: str) -> list[str]:
    """Write ``<scenario>.{json,csv,md,png}`` and ``README.md``; returns their paths."""
    os.makedirs(folder, exist_ok=True)
    paths = [os.path.join(folder, f"{result.scenario}.{kind}") for kind in ("json", "csv", "md")]
    for path, make in zip(paths, (_json, _csv, _markdown), strict=True):
        make(result, path)
    if any(True for case in result.cases() if result.of(case)):
        paths.append(os.path.join(folder, f"{result.scenario}.png"))
        scenarios.load(result.scenario).plot(result, paths[-1])
    return [*paths, _page(folder)]


def read(folder: str) -> dict[str, Result]:
    """The results that lie in a folder, in the order of the scenarios."""
    found = {}
    for name in scenarios.ALL:
        path = os.path.join(folder, f"{name}.json")
        if os.path.exists(path):
            with open(path) as file:
                found[name] = Result.from_json(json.load(file))
    return found


def _json(result: Result, path: str) -> None:
    with open(path, "w") as file:
        json.dump(result.as_json(), file, indent=1)
        file.write("\n")


def _csv(result: Result, path: str) -> None:
    rows: list[dict[str, Any]] = []
    for line in result.lines:
        row: dict[str, Any] = {"case": line.case, "name": line.name, "label": line.label}
        for key, value in line.numbers.items():
            if isinstance(value, Spread):
                row |= {f"{key}_{end}": getattr(value, end) for end in ("median", "low", "high")}
            else:
                row[key] = value
        rows.append(row)
    columns = list(dict.fromkeys(key for row in rows for key in row)) or ["case", "name", "label"]
    with open(path, "w", newline="") as file:
        writer = csv.DictWriter(file, columns, restval="", lineterminator="\n")
        writer.writeheader()
        writer.writerows(rows)


def _markdown(result: Result, path: str) -> None:
    text = [f"# {result.title}", "", machine(result), ""]
    if any(result.of(case) for case in result.cases()):
        text += [f"![{result.title}]({result.scenario}.png)", ""]
    for case in result.cases():
        text += [f"## {case}", ""] if len(result.cases()) > 1 else []
        text += [*_table(result.columns, [*result.of(case), *result.of(case, floors=True)]), ""]
    text += _without(result)
    text += [*(f"* {note}" for note in result.notes), ""]
    text += [
        f"Made by `{result.conditions['command']}`; how: `bench/scenarios/{result.scenario}.py`.",
        "",
    ]
    with open(path, "w") as file:
        file.write("\n".join(text))


def _table(columns: Sequence[Column], lines: Sequence[Line]) -> list[str]:
    text = [
        "| | " + " | ".join(column.heading for column in columns) + " |",
        "|---" + "|---:" * len(columns) + "|",
    ]
    for line in lines:
        floor = line.name.startswith("floor.")
        name = (
            f"**{line.label}**" if ours(line.name) else f"*{line.label}*" if floor else line.label
        )
        cells = [cell(line.numbers.get(column.key), column.kind) for column in columns]
        text.append("| " + " | ".join([name, *cells]) + " |")
    return text


# -- one page over all -----------------------------------------------------------------------------

_MAIN: Final = (
    Column("stall_seconds", "stall", "seconds"),
    Column("drag_seconds", "drag", "seconds"),
    Column("durable_seconds", "durable", "seconds"),
    Column("idle_durable_seconds", "idle: durable", "seconds"),
    Column("cold_bytes_per_second", "restore, cold", "per_second"),
    Column("added_memory_bytes", "memory added", "bytes"),
)
_MAIN_NOTES: Final = (
    "**stall**: seconds the training thread loses per save. **drag**: seconds training loses "
    "beside the save while it streams. **durable**: from the call until complete and fsynced. "
    "These three in a training loop; **idle: durable** with nothing else running. **restore, "
    "cold**: bytes of the state per second from files out of the page cache into live tensors. "
    "**memory added**: host memory while saving, over training alone.",
    "Medians of at least {least:.0f} saves of each kind, contenders taking turns in one run; "
    "loads are of the scenario *restore*, a run of its own (both below). Everything with a number "
    "here was loaded back and compared with what was saved.",
)


def _page(folder: str) -> str:
    """``README.md`` of the results that lie there."""
    found = read(folder)
    text = ["# Results", ""]
    if train := found.get("train"):
        text += _main(train, found.get("restore"))
    text += ["| scenario | | run | load begin, end | commit |", "|---|---|---|---|---|"]
    text += [_row(folder, name, result, scenarios.ALL[name]) for name, result in found.items()]
    text += [
        _row(folder, f"{more}/{name}", result, f"{scenarios.ALL[name]}; another run")
        for more in sorted(os.listdir(folder))
        if os.path.isdir(os.path.join(folder, more))
        for name, result in read(os.path.join(folder, more)).items()
    ]
    last = found.get("train") or next(reversed(found.values()))
    text += [
        "",
        machine(last),
        "",
        f"Made by `{last.conditions['command']}`; how: [bench/README.md](../README.md).",
        "",
    ]
    path = os.path.join(folder, "README.md")
    with open(path, "w") as file:
        file.write("\n".join(text))
    return path


def _row(folder: str, name: str, result: Result, words: str) -> str:
    c = result.conditions
    files = ", ".join(
        f"[{kind}]({name}.{kind})"
        for kind in ("csv", "json", "png")
        if os.path.exists(os.path.join(folder, f"{name}.{kind}"))
    )
    return (
        f"| [{name}]({name}.md): {words} | {files} | {c['date']}, {c['run_seconds']:.0f} s | "
        f"{c['load_begin']}, {c['load_end']} | {c['commit']} |"
    )


def _main(train: Result, restore: Result | None) -> list[str]:
    case = train.cases()[0] if train.cases() else ""
    loads = restore.cases()[0] if restore and restore.cases() else ""
    lines = []
    for line in train.of(case):
        kept = Line(line.case, line.name, line.label, dict(line.numbers))
        if restore and loads:
            loader = restore.find(loads, SAME.get(line.name, line.name)) or restore.find(
                loads, line.name
            )
            kept.numbers["cold_bytes_per_second"] = (
                loader.median("cold_bytes_per_second") if loader else None
            )
        lines.append(kept)
    if floor := train.find(case, "floor.write"):
        idle = {"idle_durable_seconds": floor.numbers["idle_durable_seconds"]}
        lines.append(Line(case, floor.name, "floor: O_DIRECT write", idle))
    if restore and (floor := restore.find(loads, "floor.read")):
        lines.append(floor)
    least = min((line.median("saves") or 0 for line in train.of(case)), default=0)
    text = [f"A training state of {case}:", "", *_table(_MAIN, lines), ""]
    text += [*(f"* {note.format(least=least)}" for note in _MAIN_NOTES), ""]
    return [*text, *_without(train), "![what one save costs](train.png)", ""]


def _without(result: Result) -> list[str]:
    """Who has no numbers, and why."""
    if not result.failures and not result.skipped:
        return []
    text = [f"* {_where(one)}: {one.reason}" for one in result.failures]
    text += [f"* {_where(one)}: left out, {one.reason}" for one in result.skipped]
    return ["No numbers:", "", *text, ""]


def _where(one: Failure) -> str:
    return ", ".join(filter(None, [one.case, label(one.name)]))
