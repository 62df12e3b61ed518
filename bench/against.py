"""Compare this tree with another one of the same project, such as the commit before a change.

    git worktree add /tmp/before COMMIT
    python -m bench.against /tmp/before [--scenarios train restore] [--rounds 5] [--quick]

Options that this program does not know, such as ``--quick``, go to the scenarios.

Each round runs each scenario twice, once with the packages of either tree, and each round begins
with the other tree. Both runs use the bench of this tree and the same environment, and they measure
``ckpt`` alone. A row of the table is one figure of one case. Its ratio is the median, over the
rounds, of the figure of this tree over that of the other tree. Above 1, this tree is slower.
"""

from __future__ import annotations

import argparse
import json
import os
import re
import statistics
import subprocess
import sys
import tempfile
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Final

from rich.console import Console
from rich.table import Table

from bench.style import write

_HERE: Final = Path(__file__).resolve().parent.parent
_SCENARIOS: Final = ("train", "raw", "small", "restore", "ranks", "objects")
_OURS: Final = "ckpt.save_async"
_TIMES: Final = (
    "stall_seconds",
    "drag_seconds",
    "durable_seconds",
    "safe_seconds",
    "idle_durable_seconds",
    "cold_seconds",
    "warm_seconds",
)
_SIZES: Final = ("added_memory_bytes",)
_SPEEDS: Final = ("up_bytes_per_second", "down_bytes_per_second")

Figures = Mapping[tuple[str, str, str], float]
"""The medians of one run, by case, contender and column, as seconds, bytes, or seconds for each
byte.
"""


@dataclass(frozen=True)
class Row:
    """One figure of one scenario, with a value of each tree for each round."""

    scenario: str
    figure: tuple[str, str, str]
    before: tuple[float, ...]
    now: tuple[float, ...]

    @property
    def ratios(self) -> tuple[float, ...]:
        """This tree over the other one, round by round."""
        return tuple(now / before for now, before in zip(self.now, self.before, strict=True))


def main() -> int:
    """Measure, print the table and write it as JSON. Returns 1 if a run fails."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("other", type=Path, help="a worktree of the commit to compare with")
    parser.add_argument("--scenarios", nargs="+", choices=_SCENARIOS, default=_SCENARIOS)
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--dir", type=Path, default=Path(".build/bench"), help="on the disk")
    parser.add_argument("--out", type=Path, help="a file for all values, as JSON")
    asked, options = parser.parse_known_args()
    disk = asked.dir.resolve()  # The runs have working folders of their own
    disk.mkdir(parents=True, exist_ok=True)
    console = Console()
    rows: list[Row] = []
    with tempfile.TemporaryDirectory(dir=disk) as folder:
        trees = {
            "before": packages(asked.other.resolve(), Path(folder, "before")),
            "now": packages(_HERE, Path(folder, "now")),
        }
        for scenario in asked.scenarios:
            runs: dict[str, list[Figures]] = {name: [] for name in trees}
            for number in range(asked.rounds):
                for name in list(trees)[:: -1 if number % 2 else 1]:
                    console.print(f"{scenario}, round {number + 1}: {name}", style="dim")
                    try:
                        runs[name].append(_run(scenario, options, trees[name], disk))
                    except subprocess.CalledProcessError as error:
                        console.print(error.stdout, markup=False)
                        return 1
            rows += compared(scenario, runs["before"], runs["now"])
    console.print(_table(rows))
    if asked.out:
        values = [{**vars(row), "ratios": row.ratios} for row in rows]
        asked.out.write_text(json.dumps(values, indent=1) + "\n")
    return 0


def packages(tree: Path, folder: Path) -> Path:
    """Fill ``folder`` with links to the bench of this tree and the packages of ``tree``."""
    folder.mkdir()
    for name, target in {
        "bench": _HERE / "bench",
        "ckpt": tree / "ckpt",
        "ckpt_backends": tree / "backends" / "ckpt_backends",
    }.items():
        (folder / name).symlink_to(target.resolve(strict=True))
    return folder


def _run(scenario: str, options: Sequence[str], tree: Path, folder: Path) -> Figures:
    """Return the figures of one run with the packages in ``tree``."""
    with tempfile.TemporaryDirectory(dir=tree.parent) as out:
        command = [sys.executable, "-m", "bench", scenario, "--out", out, "--dir", str(folder)]
        subprocess.run(
            [*command, *options, "--contenders", _OURS],
            cwd=tree,
            env={**os.environ, "PYTHONPATH": str(tree)},
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            text=True,
            check=True,
        )
        return figures(json.loads(Path(out, f"{scenario}.json").read_text()))


def figures(result: Mapping[str, Any]) -> Figures:
    """Return what is compared of the JSON of one run."""
    return {
        (line["case"], line["name"], column): 1 / value if column in _SPEEDS else value
        for line in result["lines"]
        if line["name"].startswith("ckpt")
        for column, numbers in line["numbers"].items()
        if column in (*_TIMES, *_SIZES, *_SPEEDS) and (value := _median(numbers))
    }


def _median(numbers: Any) -> float | None:
    value = numbers["median"] if isinstance(numbers, Mapping) else numbers
    return float(value) if isinstance(value, int | float) else None


def compared(scenario: str, before: Sequence[Figures], now: Sequence[Figures]) -> Iterator[Row]:
    """Yield a row for each figure that all runs of both trees have."""
    for figure in before[0]:
        if all(figure in run for run in (*before, *now)):
            yield Row(
                scenario,
                figure,
                tuple(run[figure] for run in before),
                tuple(run[figure] for run in now),
            )


def _table(rows: Iterable[Row]) -> Table:
    table = Table(box=None, padding=(0, 1, 0, 0))
    for heading in ("scenario", "case", "figure", "before", "now", "now / before"):
        table.add_column(heading, no_wrap=heading != "case")
    for row in rows:
        case, name, column = row.figure
        values = [statistics.median(run) for run in (row.before, row.now)]
        if column in _SPEEDS:
            texts = [write(1 / value, "per_second") for value in values]
        else:
            texts = [write(value, "bytes" if column in _SIZES else "seconds") for value in values]
        table.add_row(
            row.scenario,
            case if name == _OURS else f"{case}, {name.removeprefix('ckpt.')}",
            re.sub("_(bytes_per_second|bytes|seconds)$", "", column).replace("_", " "),
            *texts,
            f"{statistics.median(row.ratios):.2f} ({min(row.ratios):.2f}-{max(row.ratios):.2f})",
        )
    return table


if __name__ == "__main__":
    sys.exit(main())
