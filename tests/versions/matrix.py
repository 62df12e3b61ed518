"""Run the tests on each version of torch, restore in each what every other one wrote, and write
docs/versions.md.

``python -m tests.versions.matrix`` (``make matrix``) takes the newest version of each release on
the index, from the first tested one on. ``2.13.0@3.12`` among the arguments is one version, on that
Python. Environments and results stay in ``.build/matrix``; a row that is there is not run again,
unless ``--again`` says so. An environment has 2 to 7 GB.
"""

from __future__ import annotations

import argparse
import datetime as dt
import glob
import json
import os
import re
import shutil
import subprocess
import sys
import tomllib
from collections.abc import Sequence
from itertools import product
from pathlib import Path
from typing import Any, Final

from rich.console import Console
from rich.table import Table

from ckpt.torch_private import TESTED_TORCH

ROOT: Final = Path(__file__).resolve().parents[2]
BUILD: Final = ROOT / ".build" / "matrix"
RESULTS: Final = BUILD / "results.json"
PAGE: Final = ROOT / "docs" / "versions.md"
BEGIN, END = "<!-- measured: make matrix -->", "<!-- end of what is measured -->"
TESTS: Final = (
    "tests/state",
    "tests/staging",
    "tests/restore",
    "tests/test_manager.py",
    "tests/test_torch_private.py",
    "tests/coordination/test_join.py",
    "tests/coordination/test_torch_store.py",
    "tests/distributed/test_layouts.py",
    "tests/distributed/test_in_layouts.py",
)
TOOLS: Final = ("pytest", "pytest-timeout", "pytest-xdist", "hypothesis", "psutil", "safetensors")
WORLDS: Final = ("one process", "FSDP2 on 2 ranks")
FREE_BYTES: Final = 8 << 30
DEFAULT_PYTHON: Final = "3.11"

Row = dict[str, Any]


def versions_on_index() -> list[str]:
    """Return the newest version of each release since the first tested one."""
    said = subprocess.run(
        [sys.executable, "-m", "pip", "index", "versions", "torch"],
        capture_output=True, text=True, check=True,
    ).stdout  # fmt: skip
    newest: dict[tuple[int, int], str] = {}
    for version in re.findall(r"\d+\.\d+\.\d+(?=[,\s])", said.partition("versions:")[2]):
        release = tuple(map(int, version.split(".")[:2]))
        if release >= TESTED_TORCH[0]:
            newest.setdefault(release, version)  # type: ignore[arg-type]
    return [newest[release] for release in sorted(newest)]


def uv(*words: str) -> None:
    """Run uv, which takes files that environments share from one cache."""
    home = BUILD / "uv"
    if not (home / "bin" / "uv").exists():
        subprocess.run([sys.executable, "-m", "venv", home], check=True)
        subprocess.run([home / "bin" / "pip", "install", "-q", "uv"], check=True)
    pythons = glob.glob(os.path.expanduser("~/.pyenv/versions/*/bin"))
    env = {
        **os.environ,
        "PATH": os.pathsep.join([os.environ["PATH"], *pythons]),
        "UV_CACHE_DIR": str(BUILD / "cache"),
        "UV_FIND_LINKS": os.environ.get("PIP_FIND_LINKS", ""),
        "UV_PYTHON_DOWNLOADS": "never",
    }
    subprocess.run([home / "bin" / "uv", *words], check=True, env=env)


def environment(version: str, python: str) -> Path:
    """Return the interpreter of an environment with that torch; it is made if it is not there."""
    made = BUILD / f"torch-{version}-python-{python}"
    if (made / "complete").exists():
        return made / "bin" / "python"
    if shutil.disk_usage(BUILD).free < FREE_BYTES:
        raise OSError(f"less than {FREE_BYTES >> 30} GiB are free in {BUILD}")
    project = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]
    packages = [each for each in project["dependencies"] if not each.startswith("torch")]
    uv("venv", "-q", "--clear", "--python", python, str(made))
    interpreter = made / "bin" / "python"
    words = [f"torch=={version}", *packages, *TOOLS]
    uv("pip", "install", "-q", "--python", str(interpreter), *words)
    (made / "complete").touch()
    return interpreter


def run(interpreter: Path, log: Path, *words: str, seconds: float) -> list[str]:
    """Return the lines that the command prints, which are also in ``log``."""
    env = {
        **os.environ,
        "PYTHONPATH": os.pathsep.join([str(ROOT), str(ROOT / "backends")]),
        "OMP_NUM_THREADS": "1",
        "TORCH_DISABLE_SHARE_RDZV_TCP_STORE": "1",
    }
    with log.open("w") as out:
        try:
            subprocess.run(
                [interpreter, *words], stdout=out, stderr=subprocess.STDOUT, env=env, cwd=ROOT,
                timeout=seconds,
            )  # fmt: skip
        except subprocess.TimeoutExpired:
            out.write(f"\nended after {seconds:.0f} s\n")
    return log.read_text().splitlines()


def tested(interpreter: Path, folder: Path, paths: Sequence[str]) -> str:
    """Return pytest's closing line; the names of failed tests are in the log."""
    words = ["-m", "pytest", "-q", "-n", "2", "--dist", "loadfile", "-p", "no:cacheprovider"]
    words += ["-m", "not server and not torture", *paths]
    lines = run(interpreter, folder / "tests.log", *words, seconds=1800)
    return re.sub(r" in [\d.]+s.*| warnings?,?", "", lines[-1].strip("= ")) if lines else "nothing"


def worked(interpreter: Path, world: str, log: Path, *words: str) -> dict[str, str]:
    """Return what the worker found for each folder."""
    launch = ["-m", "torch.distributed.run", "--standalone", "--nproc-per-node=2"]
    start = launch if world == WORLDS[1] else []
    worker = str(Path(__file__).with_name("worker.py"))
    lines = run(interpreter, log, *start, worker, *words, seconds=600)
    try:
        found: dict[str, str] = json.loads(lines[-1])
    except (IndexError, ValueError):
        return dict.fromkeys(words[1:], f"failed: {log.name}")
    return found


def folder_of(name: str, world: str) -> Path:
    return BUILD / "written" / f"{name}-{WORLDS.index(world)}"


def built(name: str, paths: Sequence[str] = TESTS) -> Row:
    """Make the environment of a row, run the tests in it, and write its checkpoints."""
    version, _, python = name.partition("@")
    logs = BUILD / "logs" / name
    logs.mkdir(parents=True, exist_ok=True)
    interpreter = environment(version, python)
    code = "import platform, torch; print(torch.__version__, platform.python_version())"
    about = run(interpreter, logs / "about.log", "-W", "ignore", "-c", code, seconds=120)[-1]
    row: Row = {"about": about.split(), "date": dt.date.today().isoformat(), "read": {}}
    for world in WORLDS:
        folder = folder_of(name, world)
        shutil.rmtree(folder, ignore_errors=True)
        folder.mkdir(parents=True)
        log = logs / f"write-{WORLDS.index(world)}.log"
        row[world] = next(iter(worked(interpreter, world, log, "write", str(folder)).values()))
    row["tests"] = tested(interpreter, logs, paths)
    return row


def cross(results: dict[str, Row], names: list[str]) -> None:
    """Restore in each row what each other one wrote, in both worlds."""
    for name in names:
        version, _, python = name.partition("@")
        for world in WORLDS:
            sources = {
                str(folder_of(writer, wrote)): f"{writer}, {wrote}"
                for writer, wrote in product(names, WORLDS)
            }
            log = BUILD / "logs" / name / f"read-{WORLDS.index(world)}.log"
            found = worked(environment(version, python), world, log, "read", *sources)
            results[name]["read"][world] = {sources[key]: how for key, how in found.items()}


def cell(results: dict[str, Row], writer: str, reader: str) -> str:
    """Return how many of the four ways (written by one or two ranks, read by one or
    two) are equal.
    """
    read = results[reader]["read"]
    found = [read.get(to, {}).get(f"{writer}, {wrote}") for to, wrote in product(WORLDS, WORLDS)]
    return f"{found.count('equal')} of {len(found)}"


def label(row: Row) -> str:
    torch, python = row["about"]
    return f"{torch} ({'.'.join(python.split('.')[:2])})"


def tables(results: dict[str, Row], names: list[str]) -> tuple[list[list[str]], list[list[str]]]:
    """Return the table of the tests and the table of the restores, with their headings."""
    tests = [["torch", "Python", "date", "tests", *(f"saved in {world}" for world in WORLDS)]]
    for name in names:
        row = results[name]
        tests.append([*row["about"], row["date"], row["tests"], *(row[each] for each in WORLDS)])
    restores = [["written by, read by", *(label(results[name]) for name in names)]]
    for writer in names:
        cells = (cell(results, writer, reader) for reader in names)
        restores.append([label(results[writer]), *cells])
    return tests, restores


def is_green(results: dict[str, Row], names: list[str]) -> bool:
    """Return whether no test failed or ended in an error, and all saves and restores are equal."""
    passed = re.compile(r"\d+ passed(, \d+ (skipped|deselected|xfailed))*")
    return (
        all(passed.fullmatch(results[name]["tests"]) for name in names)
        and all(results[name][world] == "equal" for name, world in product(names, WORLDS))
        and all(cell(results, *pair) == "4 of 4" for pair in product(names, names))
    )


def show(rows: list[list[str]]) -> None:
    table = Table(*rows[0])
    for row in rows[1:]:
        table.add_row(*row)
    Console(width=200).print(table)


def markdown(rows: list[list[str]]) -> str:
    lines = [rows[0], ["---"] * len(rows[0]), *rows[1:]]
    return "\n".join(f"| {' | '.join(line)} |" for line in lines)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("names", nargs="*", help="VERSION or VERSION@PYTHON")
    parser.add_argument("--again", action="store_true", help="run rows that have results")
    parser.add_argument("--tests", nargs="+", default=TESTS, help="files of tests to run")
    asked = parser.parse_args()
    names = [
        name if "@" in name else f"{name}@{DEFAULT_PYTHON}"
        for name in asked.names or versions_on_index()
    ]
    BUILD.mkdir(parents=True, exist_ok=True)
    results: dict[str, Row] = json.loads(RESULTS.read_text()) if RESULTS.exists() else {}
    missed: list[str] = []
    for name in names:
        if asked.again or name not in results:
            try:
                results[name] = built(name, asked.tests)
            except (OSError, subprocess.CalledProcessError) as error:
                print(f"{name} was not run: {error}")
                missed.append(name)
                continue
            RESULTS.write_text(json.dumps(results, indent=1))
    names = sorted(results, key=lambda name: [int(part) for part in re.findall(r"\d+", name)])
    cross(results, names)
    RESULTS.write_text(json.dumps(results, indent=1))
    found = tables(results, names)
    for rows in found:
        show(rows)
    before, _, rest = PAGE.read_text().partition(BEGIN)
    after = rest.partition(END)[2]
    measured = "\n\n".join(map(markdown, found))
    PAGE.write_text(f"{before}{BEGIN}\n\n{measured}\n\n{END}{after}")
    if missed or not is_green(results, names):
        sys.exit(1)


if __name__ == "__main__":
    main()
