"""Tests of `ckpt log` and `ckpt rollback`."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest
import torch

from ckpt import CheckpointManager
from ckpt.catalog.rollbacks import all_rollbacks
from ckpt.model.keys import rollback_key
from ckpt.root.owner import Owner, put_owner
from ckpt.storage.registry import open_backend
from tests.checkpoints import write_checkpoint
from tests.cli.conftest import Cli, run_on_two_tiers
from tests.kit.states import restored

ARRAYS = {"x": np.zeros(3, dtype=np.float32)}


@pytest.fixture
def tiers(tmp_path: Path) -> tuple[Path, Path]:
    """A run on two tiers, which ``ckpt.toml`` names. Both have steps 1 to 4."""
    return run_on_two_tiers(tmp_path, (1, 2, 3, 4), (1, 2, 3, 4))


@pytest.fixture(autouse=True)
def _no_root(cli: Cli, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("CKPT_ROOT")


def newest(cli: Cli, root: Path) -> int:
    return int(cli("show", "--json", root, "latest").json["step"])


def graph(text: str) -> list[str]:
    """Return the first words of the lines of ``ckpt log``, which draw the history."""
    return [line.partition("  ")[0].rstrip() for line in text.splitlines()[1:]]


def test_a_rollback_goes_to_all_tiers_of_the_run(cli: Cli, tiers: tuple[Path, Path]) -> None:
    ran = cli("rollback", 2, "--reason", "a spike")
    assert ran.code == 0
    assert "goes on from step 2" in ran.out
    assert "abandoned: 3-4" in ran.out
    for root in tiers:
        assert newest(cli, root) == 2
        [record] = all_rollbacks(open_backend(str(root)))
        assert (record.step, record.reason) == (2, "a spike")
        assert "@" in record.author


def test_the_next_job_goes_on_from_there(cli: Cli, tmp_path: Path) -> None:
    state = {"x": torch.zeros(3)}
    with CheckpointManager(tmp_path / "run") as manager:
        for step in (1, 2, 3):
            manager.save(state, step)
    assert cli("rollback", tmp_path / "run", 1).code == 0
    with CheckpointManager(tmp_path / "run") as manager:
        assert restored(manager, state).step == 1
        manager.save(state, 2)
    assert graph(cli("log", tmp_path / "run").out) == ["* 2", "| o 3", "| o 2", "|/", "* 1"]
    ran = cli("rollback", tmp_path / "run", 3)
    assert "  on the branch again: 2-3\n" in ran.out
    assert "  abandoned: 2, where they are other attempts\n" in ran.out


def test_an_older_attempt_at_a_step_is_not_where_a_job_goes_on(cli: Cli, tmp_path: Path) -> None:
    store = open_backend(str(tmp_path / "run"))
    for attempt, moment in [("oneone", 100.0), ("twotwo", 200.0)]:
        write_checkpoint(store, 4, ARRAYS, attempt=attempt, created_at=moment)
    ran = cli("log", tmp_path / "run")
    assert graph(ran.out) == ["* 4", "o 4"]
    assert "older attempt" in ran.out.splitlines()[-1]
    steps = cli("log", tmp_path / "run", "--json").json["steps"]
    assert {step["attempt"]: step["older"] for step in steps} == {"twotwo": False, "oneone": True}


def test_a_rollback_is_taken_back(cli: Cli, tiers: tuple[Path, Path]) -> None:
    assert cli("rollback", 2).code == 0
    ran = cli("rollback", 4)
    assert "on the branch again: 3-4" in ran.out
    assert newest(cli, tiers[0]) == 4
    assert graph(cli("log").out) == ["* 4", "* 3", "* 2", "* 1"]


def test_a_rollback_to_the_newest_step_abandons_another_attempt_at_it(
    cli: Cli, tmp_path: Path
) -> None:
    store = open_backend(str(tmp_path / "run"))
    for attempt, created_at in (("aaaaaa", 100.0), ("bbbbbb", 200.0)):
        write_checkpoint(store, 5, ARRAYS, attempt=attempt, created_at=created_at)
    assert cli("branch", store.url, "first", 5).code == 0  # The younger one has the name
    shown = cli("rollback", store.url, 5, "--json").json
    assert (shown["attempt"], shown["abandoned"], shown["rollback"]) == ("bbbbbb", [5], 1)
    assert graph(cli("log", store.url).out)[0] == "* 5"
    assert "nothing to do" in cli("rollback", store.url, 5).out


def test_a_dry_run_changes_nothing(cli: Cli, tiers: tuple[Path, Path]) -> None:
    shown = cli("rollback", 3, "--dry-run", "--json").json
    assert (shown["abandoned"], shown["resumed"], shown["rollback"]) == ([4], [], 1)
    assert newest(cli, tiers[0]) == 4


def test_the_step_where_the_run_stands_is_no_rollback(cli: Cli, tiers: tuple[Path, Path]) -> None:
    assert "nothing to do" in cli("rollback", 4).out
    assert not (tiers[0] / "rollbacks").exists()


def test_a_second_call_reaches_the_tier_that_the_first_did_not(
    cli: Cli, tiers: tuple[Path, Path]
) -> None:
    assert cli("rollback", 2).code == 0
    (tiers[1] / rollback_key(1)).unlink()
    assert newest(cli, tiers[1]) == 4
    assert cli("rollback", 2).code == 0
    assert newest(cli, tiers[1]) == 2


def test_beside_a_living_job_it_needs_force(cli: Cli, tiers: tuple[Path, Path]) -> None:
    put_owner(open_backend(str(tiers[0])), Owner.of_this_process("minezz"))
    ran = cli("rollback", 2)
    assert ran.code == 5
    assert "may save later steps again: end it first, or give --force" in ran.err
    assert newest(cli, tiers[0]) == 4
    assert cli("rollback", 2, "--force").code == 0
    assert newest(cli, tiers[0]) == 2


@pytest.mark.parametrize(
    ("words", "code", "text"),
    [
        (["rollback"], 2, "name the step to go back to"),
        (["rollback", "latest"], 2, "name the step to go back to"),
        (["rollback", "9"], 7, "step 9 is no checkpoint there"),
        (["log", "empty"], 7, "it is empty, or does not exist"),
    ],
)
def test_bad_input_changes_nothing(
    cli: Cli, tiers: tuple[Path, Path], words: list[str], code: int, text: str
) -> None:
    ran = cli(*words)
    assert ran.code == code
    assert text in ran.err
    assert newest(cli, tiers[0]) == 4


def test_the_log_and_the_list_name_what_is_abandoned(cli: Cli, tiers: tuple[Path, Path]) -> None:
    assert cli("rollback", 2, "--reason", "a spike").code == 0
    text = cli("log").out
    assert graph(text) == ["| o 4", "| o 3", "|/", "* 2", "* 1"]
    assert "abandoned by rollback 1" in text
    assert "rollback 1 to here" in text
    assert "a spike" in text
    assert graph(cli("log", "-n", 3).out) == ["| o 4", "| o 3", "|/", "* 2"]
    listing = cli("ls", tiers[0]).out.splitlines()
    assert [line.endswith("abandoned") for line in listing[1:]] == [False, False, True, True]
    assert "abandoned" in cli("ls", *tiers).out
    steps = cli("log", "--json").json["steps"]
    assert [(step["step"], step["abandoned_by"]) for step in steps] == [
        (4, 1), (3, 1), (2, None), (1, None),
    ]  # fmt: skip


def test_no_abandoned_step_takes_part_in_the_choice_of_the_best(cli: Cli, tmp_path: Path) -> None:
    root, state = tmp_path / "run", {"x": torch.ones(2)}
    with CheckpointManager(str(root), on_suspicious="ignore", journal=False) as manager:
        for step, loss in ((1, 0.5), (2, 0.1), (3, 0.4)):
            manager.save(state, step, metrics={"loss": loss})
        manager.restore(state, step=1)
        for step, loss in ((2, 0.3), (3, 0.2)):
            manager.save(state, step, metrics={"loss": loss})
    stars = [line for line in cli("log", root).out.splitlines() if line.count("*") == 2]
    assert [line.split()[1] for line in stars] == ["3"]
    assert "* 0.2" in stars[0]
