"""Write the table of docs/safety.md.

Every row is measured in every layout that it has a column for. ``python -m tests.safety.page``
takes two minutes.
"""

from __future__ import annotations

import importlib.util
import os
import sys
import tempfile
from collections.abc import Iterable, Iterator
from pathlib import Path
from typing import Final

import msgspec

from tests.kit.worlds import world
from tests.safety.cases import CASES, Case
from tests.safety.jobs import COLUMNS
from tests.safety.measure import Found

ROOT: Final = Path(__file__).resolve().parents[2]
PAGE: Final = ROOT / "docs" / "safety.md"
BEGIN, END = "<!-- measured: python -m tests.safety.page -->", "<!-- end of what is measured -->"
MISSED: Final = "may be missed"

Cell = tuple[str, str, str]
"""Way, check, column."""


def measured(which: str, folder: str | os.PathLike[str]) -> list[Found]:
    """Run the cases in a world of two ranks. ``which`` is "quick" or "all"."""
    seconds = 280 if which == "quick" else 900
    world(2, Path(__file__).with_name("rank.py"), folder, which, timeout=seconds)
    return msgspec.json.decode(Path(folder, "outcomes.json").read_bytes(), type=list[Found])


def cells(found: Iterable[Found]) -> dict[Cell, str]:
    """Return the cells of the page for what was found."""
    by_way = {case.way: case for case in CASES}
    return {
        (one.way, one.check, one.column): MISSED
        if one.outcome == "silent" and by_way[one.way].may_be_missed(one.check)
        else one.outcome
        for one in found
    }


def table(said: dict[Cell, str]) -> str:
    """Return the tables of all groups."""
    lines: list[str] = []
    for group in dict.fromkeys(case.group for case in CASES):
        cases = [case for case in CASES if case.group == group]
        several = any(len(case.checks) > 1 for case in cases)
        head = ["what happens after the call", *(["`check`"] if several else []), *COLUMNS]
        lines += [f"### {group}", "", _row(head), _row(["---"] * len(head))]
        lines += [_row(row) for case in cases for row in _rows(case, said, several=several)]
        lines.append("")
    return "\n".join(lines)


def _rows(case: Case, said: dict[Cell, str], *, several: bool) -> Iterator[list[str]]:
    for check in case.checks:
        outcomes = [
            said[case.way, check, column] if column in case.columns else "-" for column in COLUMNS
        ]
        yield [case.way, *([f"`{check}`"] if several else []), *outcomes]


def _row(texts: Iterable[str]) -> str:
    return f"| {' | '.join(texts)} |"


def reported() -> dict[Cell, str]:
    """Return what the page says now."""
    found: dict[Cell, str] = {}
    for line in _between(PAGE.read_text())[1].splitlines():
        texts = [text.strip() for text in line.strip("| ").split(" | ")]
        way, outcomes = texts[0], texts[-len(COLUMNS) :]
        if len(texts) <= len(COLUMNS) or way == "---" or outcomes == list(COLUMNS):
            continue
        check = texts[1].strip("`") if len(texts) > len(COLUMNS) + 1 else "sampled"
        found |= {
            (way, check, column): said
            for column, said in zip(COLUMNS, outcomes, strict=True)
            if said != "-"
        }
    return found


def _between(text: str) -> tuple[str, str, str]:
    head, _, rest = text.partition(BEGIN)
    inside, _, tail = rest.partition(END)
    return head, inside, tail


def main() -> None:
    """Measure all cases, and write the page. Rows whose package is not installed stay
    as they are.
    """
    missing = {
        case.needs for case in CASES if case.needs and importlib.util.find_spec(case.needs) is None
    }
    if missing:
        print(f"not installed, so their rows are kept: {', '.join(sorted(missing))}")
    with tempfile.TemporaryDirectory() as folder:
        said = reported() | cells(measured("all", folder))
    head, _, tail = _between(PAGE.read_text())
    PAGE.write_text(f"{head}{BEGIN}\n\n{table(said)}\n{END}{tail}")
    if silent := [cell for cell, text in said.items() if text == "silent"]:
        sys.exit("\n".join(f"silent: {' | '.join(cell)}" for cell in silent))


if __name__ == "__main__":
    main()
