"""Run the measurement of a started store in a process of its own, and describe the result."""

from __future__ import annotations

import datetime as dt
import os
import platform
import shutil
import subprocess
import sys
from collections.abc import Sequence
from importlib import metadata
from pathlib import Path
from typing import Final

import msgspec

from tests.stores.measure import MARK, Measured, Place

ROOT: Final = Path(__file__).resolve().parents[2]
SECONDS: Final = 600


class Row(msgspec.Struct, frozen=True, kw_only=True):
    """The result of a store.

    Attributes:
        versions: The versions of the programs that were run.
        date: The day of the run.
        measured: The result.
        scheme: The URL scheme; '' for a mounted file system.
        note: What is special about this server, or what the measurement does not show.
    """

    versions: str
    date: str
    measured: Measured
    scheme: str = ""
    note: str = ""


def run(place: Place, versions: str, *, scheme: str = "", note: str = "") -> Row:
    """Measure a store."""
    text = msgspec.json.encode(place).decode()
    printed = output([sys.executable, "-m", "tests.stores.measure", text])
    [line] = [line for line in printed.splitlines() if line.startswith(MARK)]
    result = msgspec.json.decode(line.removeprefix(MARK), type=Measured)
    return row(versions, result, scheme=scheme, note=note)


def row(versions: str, result: Measured, *, scheme: str = "", note: str = "") -> Row:
    """Return the result of a measurement that was made today."""
    today = dt.datetime.now(tz=dt.UTC).date().isoformat()
    return Row(versions=versions, date=today, measured=result, scheme=scheme, note=note)


def output(words: Sequence[str], own: dict[str, str] | None = None) -> str:
    """Return what a command prints. ``own`` is added to its environment."""
    done = subprocess.run(
        words,
        cwd=ROOT,
        env=os.environ
        | {"PYTHONPATH": f"{ROOT}:{ROOT}/backends", "OMP_NUM_THREADS": "1"}
        | (own or {}),
        capture_output=True,
        text=True,
        timeout=SECONDS + 60,
        check=False,
    )
    if done.returncode:
        raise RuntimeError(f"{words} has failed:\n{done.stdout[-2000:]}\n{done.stderr[-4000:]}")
    return done.stdout


def linux(*packages: str) -> str:
    """Return the versions of the kernel and of Debian's ``packages``."""
    kernel = platform.release().partition("-")[0]
    return ", ".join([f"Linux {kernel}", *filter(None, [debian(*packages)])])


def debian(*packages: str) -> str:
    """Return the versions of Debian's ``packages``."""
    words = ["dpkg-query", "-W", "-f", "${Package} ${Version}\n", *packages]
    if not packages or shutil.which(words[0]) is None:
        return ", ".join(packages)
    done = subprocess.run(words, capture_output=True, text=True, check=False)
    return ", ".join(done.stdout.splitlines())


def pypi(*packages: str) -> str:
    """Return the versions of ``packages`` from PyPI."""
    return ", ".join(f"{package} {metadata.version(package)}" for package in packages)
