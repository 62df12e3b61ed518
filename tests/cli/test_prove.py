"""Tests of `ckpt prove`."""

from __future__ import annotations

import sys
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from ckpt.catalog.index import committed
from ckpt.retention.policy import Retention
from ckpt.retention.pruner import prune
from ckpt.root.pins import all_pins
from ckpt.storage.api import StorageBackend
from ckpt.storage.registry import open_backend
from tests.checkpoints import write_checkpoint
from tests.cli.conftest import Cli

TRAINING = """
import random, sys
sys.path.insert(0, {project!r})
from tests.cli.test_prove import go_on
go_on(sys.argv[1], {factor!r})
"""


def arrays_of(step: int, factor: float) -> dict[str, np.ndarray[Any, Any]]:
    return {"model/w": np.arange(64, dtype=np.float32) * factor + step, "count": np.array(step)}


def go_on(root: str, factor: float, keep_last: int | None = None) -> None:
    """Resume from the newest step, and save the next three."""
    store = open_backend(root)
    newest = committed(store)[0].step
    for step in range(newest + 1, newest + 4):
        save(store, step, factor)
        prune(store, Retention(keep_last=keep_last))


def save(store: StorageBackend, step: int, factor: float) -> None:
    write_checkpoint(
        store,
        step,
        arrays_of(step, factor),
        tree={"step": step},
        metadata={"metrics": {"loss": factor / (step + 1)}},
    )


@pytest.fixture
def root(tmp_path: Path) -> Path:
    """A run with the steps 1 to 5."""
    for step in range(1, 6):
        save(open_backend(str(tmp_path / "run")), step, 1.0)
    return tmp_path / "run"


def command(tmp_path: Path, factor: str = "1.0") -> str:
    project = str(Path(__file__).resolve().parents[2])
    script = tmp_path / "train.py"
    script.write_text(TRAINING.format(project=project, factor=0).replace("0)", f"{factor})"))
    return f"{sys.executable} {script} {{root}}"


def test_a_replay_that_is_equal_proves_the_step(cli: Cli, root: Path, tmp_path: Path) -> None:
    ran = cli("prove", root, "--step", 2, "--run", command(tmp_path))
    assert ran.code == 0, ran.err
    assert "step 2 was replayed up to step 3" in ran.out
    assert ran.out.splitlines()[-1].endswith("the step is proven")
    rows = {row["step"]: row["metrics"] for row in cli("ls", "--json", root).json["steps"]}
    assert rows[2]["proven"] == 1.0
    assert "proven" not in rows[3]
    store = open_backend(str(root))
    assert not all_pins(store)
    assert [ref.step for ref in committed(store)] == [5, 4, 3, 2, 1]
    assert cli("show", root, "best:proven:max", "--json").json["step"] == 2


def test_a_replay_that_keeps_one_step_keeps_the_one_to_compare_with(
    cli: Cli, root: Path, tmp_path: Path
) -> None:
    """The training saves later steps, and removes all but the newest, before the command looks."""
    ran = cli("prove", root, "--step", 1, "--run", command(tmp_path, "1.0, 1"), "--json")
    assert ran.json["proven"]


def test_until_names_a_later_step(cli: Cli, root: Path, tmp_path: Path) -> None:
    ran = cli("prove", root, "--step", 1, "--until", 4, "--run", command(tmp_path), "--json")
    assert ran.json["proven"]
    assert ran.json["until"] == 4


def test_a_resume_that_does_something_else_is_named(cli: Cli, root: Path, tmp_path: Path) -> None:
    ran = cli("prove", root, "--run", command(tmp_path, "2.0"))
    assert ran.code == 1
    assert "metric loss" in ran.out
    assert "model/w" in ran.out
    assert "the training is deterministic, and the resume is not" in ran.out
    assert "proven" not in str(cli("ls", "--json", root).json["steps"][1]["metrics"])


def test_a_training_that_is_not_deterministic_proves_nothing(
    cli: Cli, root: Path, tmp_path: Path
) -> None:
    ran = cli("prove", root, "--run", command(tmp_path, "random.random()"), "--json")
    assert ran.code == 1
    assert not ran.json["deterministic"]


@pytest.mark.parametrize(
    ("words", "code", "text"),
    [
        (["--run", "python train.py"], 2, "take its root from {root}"),
        (["--step", 5, "--run", "true {root}"], 7, "no step follows step 5"),
        (["--step", 9, "--run", "true {root}"], 7, "step 9 is"),
        (["--step", 3, "--until", 2, "--run", "true {root}"], 2, "must be later"),
        (["--run", "exit 3; {root}"], 5, "has ended with exit code 3 before it saved step 5"),
        (["--run", "true {root}", "--scratch", "/proc/none"], 2, "no such folder"),
        ([], 2, "--run"),
    ],
)
def test_bad_input(cli: Cli, root: Path, words: list[object], code: int, text: str) -> None:
    ran = cli("prove", root, *words)
    assert text in ran.err
    assert ran.code == code
    assert not all_pins(open_backend(str(root)))
