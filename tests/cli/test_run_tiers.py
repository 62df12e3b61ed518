from __future__ import annotations

import shutil
from pathlib import Path

import pytest
import torch

from ckpt import CheckpointManager, Tier
from tests.cli.conftest import Cli

STATE = {"x": torch.ones(2)}
CALLS = {
    "rollback": ("rollback", "runs", 1),
    "rm": ("rm", "runs", 1),
    "run": ("rm", "runs", "--run"),
}


def save(steps: int, *roots: str) -> None:
    with CheckpointManager([Tier(root) for root in roots]) as manager:
        for step in range(1, steps + 1):
            manager.save(STATE, step)


@pytest.mark.parametrize("name", CALLS)
def test_a_job_that_lives_and_has_not_saved_yet_is_seen(
    cli: Cli, tmp_path: Path, name: str
) -> None:
    save(3, "runs")
    with CheckpointManager("runs") as manager:
        manager.restore(STATE)
        ran = cli(*CALLS[name])
        assert ran.code == 5
        assert "the job lives, and has not saved yet" in ran.err
        assert "--force" in ran.err
        assert "rollback=False" in ran.err
        assert manager.steps() == [1, 2, 3]
    assert cli(*CALLS[name]).code == 0


@pytest.mark.parametrize("name", CALLS)
def test_an_evaluation_that_keeps_its_manager_open_holds_nothing(
    cli: Cli, tmp_path: Path, name: str
) -> None:
    save(3, "runs")
    with CheckpointManager("runs") as manager:
        for step in (None, 2):
            manager.restore(STATE, step, rollback=False)
        assert cli(*CALLS[name], "--dry-run").code == 0
        assert cli(*CALLS[name]).code == 0


def test_a_job_that_goes_on_after_an_evaluation_is_seen(cli: Cli, tmp_path: Path) -> None:
    save(3, "runs")
    with CheckpointManager("runs") as manager:
        manager.restore(STATE, rollback=False)
        manager.restore(STATE)
        manager.restore(STATE, rollback=False)
        assert cli("rm", "runs", 1).code == 5


@pytest.mark.parametrize("name", CALLS)
@pytest.mark.parametrize("links", ["the command", "the job"])
def test_a_run_behind_a_link_is_the_run(cli: Cli, tmp_path: Path, name: str, links: str) -> None:
    Path("data").mkdir()
    Path("runs").symlink_to("data")
    roots = ["data/gpt", "runs/gpt"]
    saved_to, named = roots if links == "the command" else reversed(roots)
    call = (CALLS[name][0], named, *CALLS[name][2:])
    save(3, saved_to)
    with CheckpointManager(saved_to) as manager:
        manager.restore(STATE)
        assert cli(*call).code == 5
    ran = cli(*call)
    assert ran.code == 0
    assert "also saved" not in ran.err


@pytest.mark.parametrize("name", CALLS)
def test_a_place_of_the_run_that_is_not_named_is_named_by_a_warning(
    cli: Cli, tmp_path: Path, name: str
) -> None:
    save(3, "runs", "far")
    ran = cli(*CALLS[name], "--dry-run")
    assert ran.code == 0
    assert f"also saved to {tmp_path / 'far'}" in ran.err
    ran = cli(CALLS[name][0], "runs", "far", *CALLS[name][2:], "--dry-run")
    assert ran.code == 0
    assert "also saved" not in ran.err


@pytest.mark.parametrize("name", CALLS)
def test_a_run_that_was_moved_or_copied_has_nothing_to_do_with_its_old_places(
    cli: Cli, tmp_path: Path, name: str
) -> None:
    save(3, "near", "far")
    Path("near").rename("runs")
    Path("near.journal").rename("runs.journal")
    save(2, "near")
    assert "also saved" not in cli(*CALLS[name], "--dry-run").err


def test_the_copy_of_a_run_whose_job_lives_is_free(cli: Cli, tmp_path: Path) -> None:
    save(3, "exp/runs")
    with CheckpointManager("exp/runs") as manager:
        manager.restore(STATE)
        shutil.copytree("exp", "copy")
        assert cli("rm", "copy/runs", 1).code == 0
        assert cli("rm", "exp/runs", 1).code == 5


def test_a_tier_that_only_some_steps_went_to_is_named(cli: Cli, tmp_path: Path) -> None:
    with CheckpointManager([Tier("runs"), Tier("far", every=2)]) as manager:
        for step in (1, 2, 3):
            manager.save(STATE, step)
    assert "also saved" in cli("rm", "runs", 2, "--dry-run").err


def test_an_evaluation_does_not_hide_a_job_that_has_not_saved_yet(cli: Cli, tmp_path: Path) -> None:
    save(3, "runs")
    with CheckpointManager("runs") as manager:
        manager.restore(STATE)
        with CheckpointManager("runs") as evaluation:
            evaluation.restore(STATE, step=2, rollback=False)
        assert cli("rollback", "runs", 1).code == 5
