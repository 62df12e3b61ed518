"""Tests of `ckpt advise`."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch

from ckpt import CheckpointManager
from ckpt.observe import Journal
from tests.cli.conftest import Cli


@pytest.fixture
def runs(tmp_path: Path) -> Path:
    root = tmp_path / "runs"
    with CheckpointManager(
        [str(root), str(tmp_path / "far")], observers=[Journal(str(root))]
    ) as manager:
        for step in (1, 2, 3):
            manager.save({"x": torch.zeros(1000)}, step)
    return root


def test_each_tier_has_an_interval_and_a_loss(cli: Cli, runs: Path) -> None:
    ran = cli("advise", "--failures-per-day", 2, "--restart", "3m", "--json")
    assert ran.code == 0, ran.err
    assert [tier["tier"] for tier in ran.json["tiers"]] == [str(runs), str(runs.parent / "far")]
    for tier in ran.json["tiers"]:
        assert tier["interval_seconds"] >= tier["durable_seconds"] > 0
        # a restart takes 3 minutes, twice a day
        assert 6 < tier["lost_minutes"] <= tier["lost_minutes_now"] + 1e-9
    assert ran.json["measured"]["nbytes"] >= 4000


def test_the_table_says_what_was_taken_for_what(cli: Cli, runs: Path) -> None:
    ran = cli("advise", "--failures-per-day", 2, "--drag", "0.5s")
    assert "save every" in ran.out
    assert "500.0 ms per save" in ran.out or "0.50 s per save" in ran.out
    assert "not in the journal" in cli("advise", "--failures-per-day", 2).out


@pytest.mark.parametrize(
    ("args", "text"),
    [
        ((), "give --failures-per-day"),
        (("--failures-per-day", "0"), "out of bounds"),
        (("--failures-per-day", "2", "--restart", "soon"), "--restart soon"),
        (
            ("empty", "--failures-per-day", "2"),
            "has no journal: the job that wrote it had journal=False",
        ),
        (("s3://bucket/run", "--failures-per-day", "2"), "a journal is on this machine"),
    ],
)
def test_bad_input_is_one_clear_error(
    cli: Cli, runs: Path, args: tuple[str, ...], text: str
) -> None:
    Path("empty").mkdir()
    ran = cli("advise", *args)
    assert (ran.code, text in ran.err) == (2, True), ran.err


def test_a_place_that_does_not_exist_is_no_checkpoint(cli: Cli) -> None:
    ran = cli("advise", "elsewhere", "--failures-per-day", "2")
    assert (ran.code, "does not exist" in ran.err) == (7, True), ran.err
