"""Tests of `ckpt pin` and `ckpt unpin`."""

from __future__ import annotations

from pathlib import Path

import pytest

from ckpt.storage.registry import open_backend
from tests.checkpoints import write_checkpoint
from tests.cli.conftest import ARRAYS, Cli


@pytest.fixture
def runs(tmp_path: Path) -> Path:
    for step in (1, 2, 3):
        write_checkpoint(open_backend(str(tmp_path / "runs")), step=step, arrays=ARRAYS)
    return tmp_path / "runs"


def test_a_pinned_step_is_kept_until_it_is_unpinned(cli: Cli, runs: Path) -> None:
    ran = cli("pin", 1, "--for", "2h", "--reason", "paper")
    assert ran.code == 0
    assert ran.out.startswith("step 1 is pinned until 20")
    ran = cli("prune", "--keep-last", 1, "--dry-run")
    assert "stays: pinned" in ran.out
    assert cli("prune", "--keep-last", 1).code == 0
    assert [step["step"] for step in cli("ls", "--json").json["steps"]] == [1, 3]

    ran = cli("unpin", 1)
    assert ran.code == 0
    assert "paper" in ran.out
    assert "1 pin ended" in ran.out
    assert cli("prune", "--keep-last", 1).code == 0
    assert [step["step"] for step in cli("ls", "--json").json["steps"]] == [3]


def test_json_has_the_pin(cli: Cli, runs: Path) -> None:
    pin = cli("pin", "latest", "--for", "90s", "--json").json["pin"]
    assert pin["step"] == 3
    cli("pin", "2")
    ended = cli("unpin", "--json").json["ended"]
    assert [one["step"] for one in ended] == [2, 3]
    assert cli("unpin", "--json").json["ended"] == []


@pytest.mark.parametrize(
    ("args", "code", "text"),
    [
        (("pin", 1, "--for", "soon"), 2, "90s, 30m, 2h or 1d"),
        (("pin", 1, "--for", "0"), 2, "90s, 30m, 2h or 1d"),
        (("pin", 1, "--for", "2"), 2, "90s, 30m, 2h or 1d"),
        (("pin", 1, "--for", "400d"), 2, "366 days"),
        (("pin", 9), 7, "9"),
        (("pin", 1, "--reason", "x" * 300), 2, "at most 200"),
        (("unpin", 9), 7, "step 9 is not there"),
        (("unpin", "latest"), 2, "all pins end"),
    ],
)
def test_bad_input_is_one_clear_error(
    cli: Cli, runs: Path, args: tuple[object, ...], code: int, text: str
) -> None:
    ran = cli(*args)
    assert (ran.code, text in ran.err) == (code, True), ran.err
    assert not (runs / "pins").exists()


def test_the_reason_of_another_user_cannot_steer_the_terminal(cli: Cli, runs: Path) -> None:
    cli("pin", 1, "--reason", "\x1b]52;c;AAAA\x07")
    ran = cli("unpin")
    assert "\x1b" not in ran.out


def test_the_list_shows_pins(cli: Cli, runs: Path, tmp_path: Path) -> None:
    cli("pin", 1)
    lines = cli("ls").out.splitlines()
    assert ["pinned until" in line for line in lines[1:]] == [True, False, False]
    assert [bool(step["pinned_until"]) for step in cli("ls", "--json").json["steps"]] == [
        True,
        False,
        False,
    ]
    several = cli("ls", "runs", "other")
    assert [", pinned" in line for line in several.out.splitlines()[1:]] == [True, False, False]
