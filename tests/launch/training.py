"""The training that the launchers start: two ranks of ``examples/train_gpt.py``."""

from __future__ import annotations

import json
import os
import sys
from collections.abc import Callable
from pathlib import Path

import pytest

from tests.kit.waiting import until
from tests.kit.worlds import world

ROOT = Path(__file__).resolve().parents[2]
STEPS = 300
_SIZE = ["--parallel", "ddp", "--layers", "1", "--width", "64", "--save-every", "1000"]
ENVIRONMENT = {
    "OMP_NUM_THREADS": "1",
    "PYTHON": sys.executable,
    "PYTHONPATH": os.pathsep.join([str(ROOT), str(ROOT / "backends")]),
    "PYTHONWARNINGS": "ignore",
}


def command(folder: Path) -> list[str]:
    """Return the script and its options; it saves in ``folder`` and writes its losses there."""
    places = ["--root", str(folder / "root"), "--losses", str(folder / "losses")]
    return [str(ROOT / "examples" / "train_gpt.py"), *_SIZE, "--steps", str(STEPS), *places]


def losses(folder: Path) -> list[tuple[int, str]]:
    """Return each step that was trained, in this order, with its exact loss."""
    try:
        lines = (folder / "losses").read_text().splitlines(keepends=True)
    except FileNotFoundError:
        return []
    notes = [json.loads(line) for line in lines if line.endswith("\n")]
    return [(note["step"], note["loss"]) for note in notes if "loss" in note]


def wait_until(what: Callable[[], bool], output: Path, seconds: float = 100) -> None:
    """Wait, and fail with the output of the job if it takes longer."""
    if not until(what, seconds):
        said = output.read_text(errors="replace") if output.exists() else "no output"
        pytest.fail(f"it did not happen within {seconds:g} s:\n{said[-6000:]}", pytrace=False)


def uninterrupted(folder: Path) -> list[tuple[int, str]]:
    """Return the losses of an uninterrupted run."""
    folder.mkdir()
    script, *options = command(folder)
    world(2, Path(script), *options, timeout=120)
    return losses(folder)
