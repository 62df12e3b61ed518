"""Tests of `ckpt prove`."""

from __future__ import annotations

import shutil
import sys
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from ckpt.catalog.step_listing import committed
from ckpt.events import SaveStaged
from ckpt.observe import Journal
from ckpt.observe.journal_files import journal_files
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


def go_on(root: str, factor: float, keep_last: int | None = None, begin: int = 0) -> None:
    """Resume from the newest step, and save the next three. The factor counts from ``begin`` on."""
    store, journal = open_backend(root), Journal(root, rank=0)
    newest = committed(store)[0].step
    for step in range(newest + 1, newest + 4):
        save(store, step, factor if step >= begin else 1.0, journal)
        prune(store, Retention(keep_last=keep_last))
    journal.close()


def save(store: StorageBackend, step: int, factor: float, journal: Journal | None = None) -> None:
    if journal is not None:
        metrics = {"loss": factor / (step + 1)}
        journal(SaveStaged(step=step, nbytes=9, stall_seconds=0.1, metrics=metrics))
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
    longer = cli("prove", root, "--step", 2, "--steps", 2, "--run", command(tmp_path))
    assert longer.code == 0, longer.err
    assert longer.out.splitlines()[-1].endswith("the step is proven")


def test_the_metrics_of_a_kept_step_are_its_own_and_not_those_of_an_abandoned_attempt(
    cli: Cli, root: Path, tmp_path: Path
) -> None:
    """A branch was taken up again, after another one had saved the same number."""
    journal = Journal(str(root), rank=0)
    journal(SaveStaged(step=3, nbytes=9, stall_seconds=0.1, metrics={"loss": 99.0}))
    journal.close()
    ran = cli("prove", root, "--step", 2, "--run", command(tmp_path))
    assert ran.code == 0, ran.out + ran.err


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
    assert "metric loss of step 5" in ran.out
    assert "first difference: loss of step 5 is 0.1666" in ran.out
    assert "model/w" in ran.out
    assert "the training is deterministic, and the resume is not" in ran.out
    assert "proven" not in str(cli("ls", "--json", root).json["steps"][1]["metrics"])


def test_a_training_that_is_not_deterministic_proves_nothing(
    cli: Cli, root: Path, tmp_path: Path
) -> None:
    ran = cli("prove", root, "--run", command(tmp_path, "random.random()"), "--json")
    assert ran.code == 1
    assert not ran.json["deterministic"]


@pytest.fixture
def sparse_root(tmp_path: Path) -> Path:
    """A run that has saved the steps 1 to 5 with a journal, and keeps the steps 1 and 5."""
    root = tmp_path / "sparse"
    store, journal = open_backend(str(root)), Journal(root, rank=0)
    for step in range(1, 6):
        save(store, step, 1.0, journal)
    journal.close()
    prune(store, Retention(keep_last=1, keep_every=1))
    for ref in committed(store):
        if 1 < ref.step < 5:
            shutil.rmtree(root / ref.folder)
    return root


def test_some_steps_are_replayed_and_compared_with_the_journal(
    cli: Cli, sparse_root: Path, tmp_path: Path
) -> None:
    """The run keeps none of the steps 2 and 3, so its journal alone has their loss."""
    words = ("prove", sparse_root, "--step", 1, "--steps", 2, "--run", command(tmp_path))
    ran = cli(*words)
    assert ran.code == 0, ran.err
    assert ran.out.splitlines()[1:] == [
        "the metrics of 2 steps are equal",
        "the run keeps none of these steps, so no state was compared, and the step is not marked "
        "as proven",
    ]
    report = cli(*words, "--json").json
    assert (report["until"], report["proven"], report["state_compared_at"]) == (3, False, None)
    assert "proven" not in str(cli("ls", "--json", sparse_root).json)


def test_the_journal_may_be_beside_another_tier_of_the_configuration(
    cli: Cli, sparse_root: Path, tmp_path: Path
) -> None:
    far = tmp_path / "far"
    sparse_root.rename(far)
    config = tmp_path / "ckpt.toml"
    config.write_text(f'[[tiers]]\nurl = "{sparse_root}"\n[[tiers]]\nurl = "{far}"\n')
    words = ("--step", 1, "--steps", 2, "--config", config, "--run", command(tmp_path))
    ran = cli("prove", far, *words, "--json")
    assert ran.json["steps_with_equal_metrics"] == 2
    config.write_text(f'[[tiers]]\nurl = "{sparse_root}"\n')  # That of another run
    assert "know only 1 later step" in cli("prove", far, *words).err


def test_the_last_kept_step_among_some_is_compared_too(
    cli: Cli, sparse_root: Path, root: Path, tmp_path: Path
) -> None:
    train = command(tmp_path, "1.0, 1")
    ran = cli("prove", root, "--step", 1, "--steps", 3, "--run", train, "--json")
    assert ran.json["proven"], ran.err
    assert (ran.json["state_compared_at"], ran.json["steps_with_equal_metrics"]) == (4, 3)
    rows = cli("ls", "--json", root).json["steps"]
    assert {row["step"]: row["metrics"].get("proven") for row in rows}[1] == 3.0


def test_steps_after_the_state_that_is_compared_are_not_proven(
    cli: Cli, sparse_root: Path, tmp_path: Path
) -> None:
    save(open_backend(str(sparse_root)), 2, 1.0)
    train = command(tmp_path)
    ran = cli("prove", sparse_root, "--step", 1, "--steps", 2, "--run", train, "--json")
    assert (ran.json["until"], ran.json["state_compared_at"]) == (3, 2), ran.err
    rows = cli("ls", "--json", sparse_root).json["steps"]
    assert {row["step"]: row["metrics"].get("proven") for row in rows}[1] == 1.0


def test_the_first_step_that_differs_is_named(cli: Cli, sparse_root: Path, tmp_path: Path) -> None:
    train = command(tmp_path, "2.0, None, 3")
    ran = cli("prove", sparse_root, "--step", 1, "--steps", 3, "--run", train)
    assert ran.code == 1
    assert "first difference: loss of step 3 is 0.25 in the run, and 0.5 in the replay" in ran.out
    assert "metric loss of step 2" not in ran.out
    assert "the training is deterministic" in ran.out


@pytest.mark.parametrize("damage", ["cut", "of another version", "deleted", "binary"])
def test_a_journal_that_knows_too_few_steps_is_an_error(
    cli: Cli, sparse_root: Path, tmp_path: Path, damage: str
) -> None:
    for path in map(Path, journal_files(sparse_root)):
        text = path.read_bytes()
        path.write_bytes(
            {
                "cut": text[: text.index(b'"step":3')],
                "of another version": text.replace(b'"event":"Save', b'"event":"Put'),
                "deleted": b"",
                "binary": b"\xff\x00" * 99,
            }[damage]
        )
    ran = cli("prove", sparse_root, "--step", 1, "--steps", 4, "--run", command(tmp_path))
    assert ran.code == 2
    assert "(a journal that was cut, deleted, or written by another version" in ran.err
    assert not all_pins(open_backend(str(sparse_root)))


def test_steps_of_an_earlier_history_in_the_journal_are_left_out(
    cli: Cli, sparse_root: Path, tmp_path: Path
) -> None:
    """The run was begun again, in the same folder and with another loss."""
    journal = Journal(sparse_root, rank=0)
    for step in (1, 2):
        save(open_backend(str(tmp_path / "scratch")), step, 1.0, journal)
    journal.close()
    ran = cli("prove", sparse_root, "--step", 1, "--steps", 3, "--run", command(tmp_path))
    assert ran.code == 2
    assert "know only 2 later steps" in ran.err  # Step 2 of the journal, and step 5 that is kept


def test_a_replay_without_the_metrics_of_the_run_compares_nothing(
    cli: Cli, sparse_root: Path, tmp_path: Path
) -> None:
    for path in map(Path, journal_files(sparse_root)):
        path.write_bytes(path.read_bytes().replace(b'"loss"', b'"accuracy"'))
    ran = cli("prove", sparse_root, "--step", 1, "--steps", 2, "--run", command(tmp_path))
    assert ran.code == 5
    assert "none of the metrics of the run (accuracy)" in ran.err
    for path in map(Path, journal_files(sparse_root)):
        path.write_bytes(path.read_bytes().replace(b'"metrics"', b'"others"'))
    ran = cli("prove", sparse_root, "--step", 1, "--steps", 2, "--run", command(tmp_path))
    assert ran.code == 2
    assert "has no metrics of them" in ran.err


@pytest.mark.parametrize(
    ("words", "code", "text"),
    [
        (["--run", "python train.py"], 2, "take its root from {root}"),
        (["--step", 5, "--run", "true {root}"], 7, "no step follows step 5"),
        (["--step", 9, "--run", "true {root}"], 7, "step 9 is"),
        (["--step", 3, "--until", 2, "--run", "true {root}"], 2, "must be later"),
        (["--step", 2, "--steps", 4, "--run", "true {root}"], 2, "know only 3 later steps"),
        (["--step", 2, "--steps", 1, "--until", 3, "--run", "true {root}"], 2, "give one of them"),
        (["--step", 2, "--steps", 0, "--run", "true {root}"], 2, "--steps"),
        (["--run", "exit 3; {root}"], 5, "has ended with exit code 3 before it saved step 5"),
        (["--run", "true {root}"], 5, "save there the steps that the run saved"),
        (["--run", "true {root}", "--scratch", "/proc/none"], 2, "no such folder"),
        ([], 2, "--run"),
    ],
)
def test_bad_input(cli: Cli, root: Path, words: list[object], code: int, text: str) -> None:
    ran = cli("prove", root, *words)
    assert text in ran.err
    assert ran.code == code
    assert not all_pins(open_backend(str(root)))
