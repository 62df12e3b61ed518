"""Tests of `ckpt bisect`."""

from __future__ import annotations

import math
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from ckpt.cli.bisect import Outcome, search
from ckpt.model.keys import StepRef
from ckpt.root.pins import all_pins
from ckpt.storage.registry import open_backend
from tests.checkpoints import write_checkpoint
from tests.cli.conftest import ARRAYS, Cli


@pytest.fixture
def root(tmp_path: Path) -> Path:
    """A run with the steps 0 to 12."""
    for step in range(13):
        write_checkpoint(open_backend(str(tmp_path / "run")), step=step, arrays=ARRAYS)
    return tmp_path / "run"


def test_the_first_bad_step_is_found_with_few_runs(cli: Cli, root: Path) -> None:
    ran = cli("bisect", root, "--good", 0, "--bad", 12, "--run", "test {step} -lt 7")
    assert ran.code == 0
    assert ran.out.splitlines()[-1] == "the first bad step is 7; the last good one is 6"
    assert len(ran.out.splitlines()) <= 5
    assert not all_pins(open_backend(str(root)))


def test_the_command_gets_the_folder_of_the_step(cli: Cli, root: Path) -> None:
    command = "test -f {path}/manifest.json && test {step} -lt 3"
    ran = cli("bisect", root, "--good", 0, "--bad", 12, "--run", command, "--json")
    assert (ran.json["last_good"], ran.json["first_bad"]) == (2, 3)


def test_steps_that_cannot_be_tested_are_named(cli: Cli, root: Path) -> None:
    command = "test {step} -ge 5 -a {step} -le 8 && exit 125; test {step} -lt 7"
    ran = cli("bisect", root, "--good", 0, "--bad", 12, "--run", command)
    assert ran.out.splitlines()[-1] == (
        "the first bad step is 9 or one of 5-8, which cannot be tested; the last good one is 4"
    )


def test_abandoned_steps_are_left_out(cli: Cli, root: Path) -> None:
    assert cli("rollback", root, 8).code == 0
    ran = cli("bisect", root, "--good", 0, "--bad", 12, "--run", "true")
    assert ran.code == 7
    assert "step 12 is abandoned: name steps of the current branch" in ran.err
    assert f"ckpt rollback {root} 12" in ran.err


def test_a_search_that_could_test_no_step_has_found_nothing(cli: Cli, root: Path) -> None:
    for options in ([], ["--json"]):
        ran = cli("bisect", root, "--good", 0, "--bad", 12, "--run", "exit 125", *options)
        assert ran.code == 2
        assert "none of the steps between 0 and 12 can be tested" in ran.err
        assert "the first bad step" not in ran.out


@pytest.mark.parametrize(
    ("words", "code", "text"),
    [
        (["--good", 5, "--bad", 5, "--run", "true"], 2, "must be earlier"),
        (["--good", 1, "--bad", 5, "--run", " "], 2, "--run is empty"),
        (["--good", 1, "--bad", 99, "--run", "true"], 7, "step 99 is no checkpoint"),
        (["--good", 1, "--bad", 5, "--run", "kill -9 $$"], 2, "was ended by a signal"),
        (["--good", 1, "--bad", 5, "--run", "no-such-command"], 2, "the shell cannot start"),
        (["--good", 1, "--bad", 5, "--run", "false"], 2, "says that step 1 is bad too"),
        (["--good", 1, "--bad", 5, "--run", "true"], 2, "says that step 5 is good too"),
        (["--good", 1, "--bad", 5], 2, "--run"),
    ],
)
def test_bad_input(cli: Cli, root: Path, words: list[object], code: int, text: str) -> None:
    ran = cli("bisect", root, *words)
    assert ran.code == code
    assert text in ran.err


@given(st.integers(2, 60), st.data())
def test_the_search_finds_the_border_whatever_cannot_be_tested(count: int, data: st.DataObject):
    border = data.draw(st.integers(1, count - 1))
    untestable = data.draw(st.sets(st.integers(1, count - 2)) if count > 2 else st.just(set()))
    calls = 0

    def test(ref: StepRef) -> Outcome:
        nonlocal calls
        calls += 1
        return "untestable" if ref.step in untestable else "bad" if ref.step >= border else "good"

    result = search([StepRef(step, "a" * 6) for step in range(count)], test)
    assert result.good < border <= result.bad
    assert set(result.untestable) == set(range(result.good + 1, result.bad)) <= untestable
    assert calls <= math.log2(count) + 1 + len(untestable)
