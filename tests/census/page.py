"""Resume every optimizer of some packages, and write what that gives into docs/safety.md.

``python -m tests.census.page`` (``make census``) installs the packages of packages.txt into
``.build/census``, without what they require, since torch must stay the one that is tested. It takes
about an hour on two processors. With names of packages, only these are measured, and with words
such as ``timm:lion`` only these optimizers. The other rows are those of the last run, which are in
the folder ``records``. Each row is in ``.build/census`` as soon as it is measured. ``--seconds`` is
for slow optimizers.
"""

from __future__ import annotations

import argparse
import json
import os
import subprocess
import sys
import tempfile
import textwrap
from collections import defaultdict
from collections.abc import Iterable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from importlib import metadata
from pathlib import Path
from typing import Final

import msgspec

from tests.census.cells import EQUAL, NONE, Row, is_refusal
from tests.census.optimizers import PACKAGES
from tests.versions.matrix import ROOT, uv

BUILD: Final = ROOT / ".build" / "census"
PINS: Final = Path(__file__).with_name("packages.txt")
RECORDS: Final = Path(__file__).with_name("records")
"""The newest row of each optimizer. The page is made of them."""
PAGE: Final = ROOT / "docs" / "safety.md"
BEGIN, END = "<!-- census: python -m tests.census.page -->", "<!-- end of the census -->"
WORKERS: Final = 2
SECONDS: Final = 60.0
"""How long one part of a measurement, such as the first 12 steps, may take."""
MOST_SECONDS: Final = 7200.0
"""How long a package may take."""
WAYS: Final = ("torch", "torch rollback", "ckpt", "ckpt rollback")
PLACES: Final = {1: "one process", 2: "FSDP2"}


def install() -> None:
    """Install the packages, unless they are there."""
    stamp = BUILD / "installed"
    if not stamp.exists() or stamp.read_text() != PINS.read_text():
        uv("pip", "install", "-q", "--no-deps", "--target", str(_packages()), "-r", str(PINS))
        stamp.write_text(PINS.read_text())


def measure(
    package: str, folder: Path, names: Sequence[str] = (), *, seconds: float = SECONDS
) -> None:
    """Measure the optimizers of one package, half of them in each of two processes.

    The rows go into ``folder``. With ``names``, only these are measured. A part of a measurement
    may take ``seconds``.
    """
    path = folder / f"{package}.jsonl"
    if not names:
        path.unlink(missing_ok=True)

    def part(first: int) -> str:
        numbers = [str(number) for number in (first, WORKERS, seconds)]
        words = [sys.executable, "-m", "tests.census.rows", package, work, *numbers]
        with path.open("ab") as file:
            done = subprocess.run(
                [*words, *names],
                cwd=ROOT,
                env=_environment(),
                stdout=file,
                stderr=subprocess.PIPE,
                check=False,
                timeout=MOST_SECONDS,
            )
        return done.stderr.decode()[-2000:] if done.returncode else ""

    with tempfile.TemporaryDirectory() as work, ThreadPoolExecutor(WORKERS) as pool:
        if errors := "".join(pool.map(part, range(WORKERS))):
            raise RuntimeError(f"{package}: {errors}")


def rows_in(folder: Path, package: str) -> list[Row]:
    """Return the newest row of each optimizer of a package, on one rank and on several."""
    path = folder / f"{package}.jsonl"
    lines = path.read_bytes().splitlines() if path.exists() else []
    rows = [msgspec.json.decode(line, type=Row) for line in lines]
    newest = {(row.ranks, row.name.lower()): row for row in rows}
    return [newest[key] for key in sorted(newest)]


def recall(folder: Path, records: Path = RECORDS) -> None:
    """Put the rows of the last run into ``folder``, for each package that has no rows there."""
    for package in PACKAGES:
        name = f"{package}.jsonl"
        if not (folder / name).exists() and (records / name).exists():
            (folder / name).write_bytes((records / name).read_bytes())


def record(folder: Path, records: Path = RECORDS) -> None:
    """Keep the rows in ``folder`` for the next run."""
    records.mkdir(exist_ok=True)
    for package in PACKAGES:
        if rows := rows_in(folder, package):
            lines = b"".join(msgspec.json.encode(row) + b"\n" for row in rows)
            (records / f"{package}.jsonl").write_bytes(lines)


def _environment() -> dict[str, str]:
    path = [str(ROOT), str(ROOT / "backends"), str(_packages())]
    return {
        **os.environ,
        "PYTHONPATH": os.pathsep.join(path),
        "OMP_NUM_THREADS": "1",
        "TORCHDYNAMO_DISABLE": "1",
    }


def _packages() -> Path:
    return BUILD / "packages"


# -- the page --------------------------------------------------------------------------------------


def shortfalls(rows: Iterable[Row]) -> list[Row]:
    """Return the rows where ``torch.save`` resumes bit for bit, and ckpt neither does nor refuses
    by name.
    """
    return [
        row
        for row in rows
        if any(
            row.cells.get(f"torch{way}") == EQUAL and not _is_right(row.ckpt(way))
            for way in ("", " rollback")
        )
    ]


def _is_right(cell: str) -> bool:
    return cell == EQUAL or is_refusal(cell)


def table(rows: Sequence[Row], versions: dict[str, str]) -> str:
    """Return the tables of the page."""
    return "\n".join([*_counts(rows, versions), "", *_exceptions(rows), "", *_idle(rows)])


def _counts(rows: Sequence[Row], versions: dict[str, str]) -> Iterator[str]:
    heads = [f"{place}: {who}" for place in PLACES.values() for who in ("`torch.save`", "ckpt")]
    yield _line(["package", "version", "optimizers", *heads])
    yield _line(["---"] * 7)
    for package in dict.fromkeys(row.package for row in rows):
        own = [row for row in rows if row.package == package]
        counts = [
            _equal([row for row in own if row.ranks == ranks and NONE not in row.cells], who)
            for ranks in PLACES
            for who in ("torch", "ckpt")
        ]
        total = len({row.name for row in own})
        yield _line([f"`{package}`", versions[package], str(total), *counts])


def _equal(rows: Sequence[Row], who: str) -> str:
    ways = (who, f"{who} rollback")
    number = sum(all(row.cells.get(way) == EQUAL for way in ways) for row in rows)
    return f"{number} of {len(rows)}" if rows else "-"


def _exceptions(rows: Iterable[Row]) -> Iterator[str]:
    grouped: defaultdict[tuple[str, ...], list[str]] = defaultdict(list)
    for row in rows:
        cells = (
            row.cells.get("torch", ""),
            row.cells.get("torch rollback", ""),
            row.ckpt(""),
            row.ckpt(" rollback"),
        )
        if NONE not in row.cells and set(cells) != {EQUAL}:
            grouped[row.package, PLACES[row.ranks], *cells].append(row.name)
    yield _line(
        ["not equal", "where", "`torch.save`: fresh", "rollback", "ckpt: fresh", "rollback"]
    )
    yield _line(["---"] * 6)
    for (package, *found), names in grouped.items():
        yield _line([f"`{package}`: {', '.join(names)}", *found])


def _idle(rows: Sequence[Row]) -> Iterator[str]:
    for ranks, place in PLACES.items():
        idle: defaultdict[str, list[str]] = defaultdict(list)
        for row in rows:
            if row.ranks == ranks and NONE in row.cells and not (ranks > 1 and _is_idle(rows, row)):
                idle[row.package].append(row.name)
        if idle:
            words = (f"`{package}`: {', '.join(names)}" for package, names in idle.items())
            yield textwrap.fill(f"Did not train here ({place}): {'; '.join(words)}.", 100)
            yield ""


def _is_idle(rows: Iterable[Row], row: Row) -> bool:
    """Return True if the optimizer does not train in one process."""
    return any(
        NONE in other.cells
        for other in rows
        if (other.package, other.name, other.ranks) == (row.package, row.name, 1)
    )


def _line(texts: Iterable[str]) -> str:
    return f"| {' | '.join(texts)} |"


def reported() -> str:
    """Return the tables that the page has now."""
    return PAGE.read_text().partition(BEGIN)[2].partition(END)[0].strip()


def versions_of(packages: Iterable[str]) -> dict[str, str]:
    """Return the version of each package."""
    pins = dict(line.split("==") for line in PINS.read_text().split())
    names = {package: package.partition(".")[0] for package in packages}
    return {
        package: pins[name] if name in pins else metadata.version(name).partition("+")[0]
        for package, name in names.items()
    }


def write(folder: Path) -> list[Row]:
    """Write the page from the rows in ``folder``, and return the rows."""
    rows = [row for package in PACKAGES for row in rows_in(folder, package)]
    head, _, rest = PAGE.read_text().partition(BEGIN)
    tail = rest.partition(END)[2]
    versions = versions_of({row.package: None for row in rows})
    PAGE.write_text(f"{head}{BEGIN}\n\n{table(rows, versions)}\n{END}{tail}")
    return rows


def main() -> None:
    """Measure the packages or optimizers of the command line, and write the page."""
    parser = argparse.ArgumentParser(description="Measure optimizers, and write docs/safety.md.")
    parser.add_argument("words", nargs="*", default=PACKAGES, metavar="PACKAGE[:OPTIMIZER]")
    parser.add_argument("--seconds", type=float, default=SECONDS, help="the limit of each part")
    arguments = parser.parse_args()
    BUILD.mkdir(parents=True, exist_ok=True)
    install()
    recall(BUILD)
    names: defaultdict[str, list[str]] = defaultdict(list)
    for package, colon, name in (word.partition(":") for word in arguments.words):
        names[package] += [name] if colon else []
    errors = []
    for package, chosen in names.items():
        try:
            measure(package, BUILD, chosen, seconds=arguments.seconds)
        except (RuntimeError, subprocess.TimeoutExpired) as error:
            errors.append(str(error))
    record(BUILD)
    errors += [json.dumps(msgspec.to_builtins(row)) for row in shortfalls(write(BUILD))]
    if errors:
        sys.exit("\n".join(errors))


if __name__ == "__main__":
    main()
