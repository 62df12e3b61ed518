"""What counts as green in the matrix of torch releases."""

from __future__ import annotations

import copy
from itertools import product

import pytest

from tests.versions.matrix import WORLDS, Row, is_green

NAMES = ["2.9.1@3.11", "2.10.0@3.11"]
READ = {f"{name}, {world}": "equal" for name, world in product(NAMES, WORLDS)}


@pytest.fixture
def results() -> dict[str, Row]:
    row: Row = {"tests": "7 passed, 1 skipped", **dict.fromkeys(WORLDS, "equal")}
    row["read"] = dict.fromkeys(WORLDS, READ)
    return {name: copy.deepcopy(row) for name in NAMES}


def test_rows_that_passed_and_are_equal_are_green(results: dict[str, Row]) -> None:
    assert is_green(results, NAMES)


@pytest.mark.parametrize(
    "tests",
    ["7 passed, 1 skipped, 23 errors", "1 failed, 6 passed", "ended after 1800 s", "nothing"],
)
def test_a_row_whose_tests_did_not_all_pass_is_not_green(
    results: dict[str, Row], tests: str
) -> None:
    results[NAMES[1]]["tests"] = tests
    assert not is_green(results, NAMES)


@pytest.mark.parametrize("world", WORLDS)
def test_a_save_that_failed_is_not_green(results: dict[str, Row], world: str) -> None:
    results[NAMES[0]][world] = "failed: write-1.log"
    assert not is_green(results, NAMES)


def test_one_restore_of_four_that_differs_is_not_green(results: dict[str, Row]) -> None:
    results[NAMES[0]]["read"][WORLDS[0]] = {**READ, f"{NAMES[1]}, {WORLDS[1]}": "2 differences: a"}
    assert not is_green(results, NAMES)
