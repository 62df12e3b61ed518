"""docs/stores.md says what was measured, and the product says the same."""

from __future__ import annotations

import re
from pathlib import Path

from tests.stores.measure import Measured, Place, measure
from tests.stores.page import PAGE, contradictions, page, results
from tests.stores.places import FILE_SYSTEMS, UML


def test_the_tables_are_those_of_the_results() -> None:
    text = PAGE.read_text()
    assert page(text, results()) == text, "run: python -m tests.stores.page --write"


def test_a_cell_states_each_fact_once() -> None:
    lines = [line for line in PAGE.read_text().splitlines() if line.startswith("| ")]
    cells = [cell for line in lines for cell in line.strip("| ").split(" | ")]
    repeats = {cell for cell in cells if len(words := facts(cell)) != len(set(words))}
    assert repeats == set()


def facts(cell: str) -> list[str]:
    """Return the dates of a cell, and its names with their versions."""
    return re.findall(r"\d{4}-\d\d-\d\d|[\w-]+ \d[\w.:+~-]*", cell)


def test_the_table_of_the_product_says_what_was_measured() -> None:
    assert list(contradictions(results())) == []


def test_each_result_has_a_row() -> None:
    mounts = {setup.name for setup in FILE_SYSTEMS} | {*UML}
    assert {name for name, row in results().items() if not row.scheme} <= mounts


def test_a_folder_is_measured(tmp_path: Path) -> None:
    done = measure(Place(clients=[str(tmp_path / "run")]))
    assert done == Measured(fault="", winners=1)


def test_a_store_that_two_writers_can_win_is_told(tmp_path: Path) -> None:
    """The writers see two folders, as two clients that hide their files from each other."""
    clients = [str(tmp_path / "one"), str(tmp_path / "two")]
    done = measure(Place(clients=clients))
    assert done.winners == 2
    assert done.fault
