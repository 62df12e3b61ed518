"""Tests of `ckpt branch`."""

from __future__ import annotations

from pathlib import Path

import pytest

from ckpt.catalog.branches import all_branches
from ckpt.root.pins import all_pins
from ckpt.storage.registry import open_backend
from tests.cli.conftest import Cli, run_on_two_tiers


@pytest.fixture
def tiers(cli: Cli, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> tuple[Path, Path]:
    """A run on two tiers, which ``ckpt.toml`` names. Step 2 is the branch "first"."""
    monkeypatch.delenv("CKPT_ROOT")
    roots = run_on_two_tiers(tmp_path, (1, 2, 3, 4), (2, 3, 4))
    assert cli("branch", "first", 2, "--reason", "before the spike").code == 0
    return roots


def numbers(cli: Cli, root: Path) -> list[int]:
    return [step["step"] for step in cli("ls", "--json", root).json["steps"]]


def test_a_named_step_stays_on_all_tiers(cli: Cli, tiers: tuple[Path, Path]) -> None:
    for root in tiers:
        assert cli("prune", root, "--keep-last", 1, "--force").code == 0
        assert numbers(cli, root) == [2, 4]
        [branch] = all_branches(open_backend(str(root)))
        assert (branch.name, branch.reason) == ("first", "before the spike")
    ran = cli("rm", 2)
    assert ran.code == 5
    assert "first --delete" in ran.err
    ran = cli("unpin", tiers[0], 2)
    assert (ran.code, ran.out) == (0, "0 pins ended\n")
    assert "1 name still kept: `ckpt branch NAME --delete`" in ran.err
    assert len(all_pins(open_backend(str(tiers[0])))) == 1, "only --delete ends it"


def test_the_list_of_steps_says_that_a_step_has_a_name(cli: Cli, tiers: tuple[Path, Path]) -> None:
    """It is kept by a pin that ends in the year 9892."""
    states = [line.split("  ")[-1].strip() for line in cli("ls", tiers[0]).out.splitlines()[1:]]
    assert states == ["committed", "committed, named", "committed", "committed"]


def test_commands_take_the_name_for_the_step(cli: Cli, tiers: tuple[Path, Path]) -> None:
    assert cli("show", tiers[0], "branch:first", "--json").json["step"] == 2
    assert cli("verify", tiers[1], "branch:first").code == 0
    assert cli("restore", tiers[0], "branch:first", "--json").json["step"] == 2
    assert cli("copy", tiers[0], "there", "--step", "branch:first").code == 0
    assert numbers(cli, Path("there")) == [2]


def test_log_lists_the_names(cli: Cli, tiers: tuple[Path, Path]) -> None:
    assert cli("branch", "second", "latest").code == 0
    lines = cli("log").out.splitlines()
    assert "branch:second" in lines[1]
    assert "branch:first: before the spike" in lines[3]
    branches = cli("log", "--json").json["branches"]
    assert [(branch["name"], branch["step"]) for branch in branches] == [
        ("first", 2),
        ("second", 4),
    ]


def test_a_name_leads_back_to_an_abandoned_branch(cli: Cli, tiers: tuple[Path, Path]) -> None:
    assert cli("branch", "later", 4).code == 0
    assert cli("rollback", "branch:first").code == 0
    assert cli("show", tiers[0], "latest", "--json").json["step"] == 2
    assert "branch:later; abandoned by rollback 1" in cli("log").out
    ran = cli("rollback", "branch:later")
    assert ran.code == 0
    assert "on the branch again: 3-4" in ran.out


def test_a_deleted_name_is_free_again(cli: Cli, tiers: tuple[Path, Path]) -> None:
    ran = cli("branch", "first", 3)
    assert ran.code == 2
    assert "is step 2 already" in ran.err
    assert cli("branch", "first", 2).code == 0, "it has the name already"
    assert cli("branch", "first", "--delete", "--json").json["deleted"]
    assert not any(all_pins(open_backend(str(root))) for root in tiers)
    assert cli("branch", tiers[0], tiers[1], "first", 3).code == 0
    assert cli("show", tiers[1], "branch:first", "--json").json["step"] == 3


@pytest.mark.parametrize(
    ("words", "code", "text"),
    [
        (["a b", 2], 2, "use 1 to 64 letters"),
        (["x"], 2, "give NAME and STEP"),
        ([2], 2, "give NAME and STEP"),
        (["runs/gpt", 2], 2, "runs/gpt is a place, since a name has no slash: give NAME"),
        (["x", 9], 7, "step 9 is no checkpoint"),
        (["none", "--delete"], 7, "there is 'first'"),
        (["x", "branch:none"], 7, "no branch has the name 'none'"),
    ],
)
def test_bad_input_is_one_clear_error(
    cli: Cli, tiers: tuple[Path, Path], words: list[object], code: int, text: str
) -> None:
    ran = cli("branch", *words)
    assert ran.code == code, ran.err
    assert text in ran.err
    assert [branch.name for branch in all_branches(open_backend(str(tiers[0])))] == ["first"]
