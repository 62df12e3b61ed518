"""Tests of `ckpt advise`."""

from __future__ import annotations

import math
import re
from pathlib import Path

import pytest
import torch

from ckpt import CheckpointManager
from ckpt.cli.advise import sentence
from ckpt.observe import Journal
from ckpt.observe.save_interval import Advice, Measurements
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


def test_the_last_line_is_one_sentence(cli: Cli, runs: Path) -> None:
    out = cli("advise", "--failures-per-day", 2).out
    assert re.search(r"\n\nyou save every [\d.]+ s and lose .* a day.*\n$", out)


@pytest.mark.parametrize(
    ("interval", "loss", "expected"),
    [
        (0.3, 52.0, "you save every 0.3 s and lose 52 min a day; every 29 s you would lose 7 min"),
        (600.0, 300.0, "you save every 10 min and lose 5.0 h a day; every 29 s you would lose 7"),
        (29.0, 7.1, "you save every 29 s and lose 7.1 min a day, which is near the least"),
        (math.nan, math.nan, "save every 29 s: you would lose 7 min a day"),
    ],
)
def test_the_advice_is_one_sentence(interval: float, loss: float, expected: str) -> None:
    memory, disk = (
        Advice(
            tier=tier,
            durable_seconds=1.0,
            interval_seconds=seconds,
            is_bound=False,
            lost_minutes=7.0,
            lost_minutes_now=loss,
        )
        for tier, seconds in (("shm://x", 3.0), ("disk", 29.0))
    )
    measurements = Measurements(
        stall_seconds=0.1,
        interval_seconds=interval,
        durable_seconds={},
        nbytes=1,
        failures_per_day=1.0,
    )
    assert sentence(measurements, [memory, disk]).startswith(expected)


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
        (("checkpoint.pt", "--failures-per-day", "2"), "checkpoint.pt ROOT --step N` makes"),
        (("s3://bucket/run", "--failures-per-day", "2"), "a journal is on this machine"),
    ],
)
def test_bad_input_is_one_clear_error(
    cli: Cli, runs: Path, args: tuple[str, ...], text: str
) -> None:
    Path("empty").mkdir()
    Path("checkpoint.pt").write_bytes(b"")
    ran = cli("advise", *args)
    assert (ran.code, text in ran.err) == (2, True), ran.err


def test_a_place_that_does_not_exist_is_no_checkpoint(cli: Cli) -> None:
    ran = cli("advise", "elsewhere", "--failures-per-day", "2")
    assert (ran.code, "does not exist" in ran.err) == (7, True), ran.err
