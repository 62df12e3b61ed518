"""Each change of the state gives the checkpoint of the call or an error.

docs/safety.md says which one, for each change.
"""

from __future__ import annotations

from pathlib import Path

import pytest

from tests.safety.cases import CASES
from tests.safety.page import MISSED, cells, measured, reported


@pytest.mark.slow
@pytest.mark.distributed
@pytest.mark.parametrize("which", ["quick", pytest.param("all", marks=pytest.mark.torture)])
@pytest.mark.timeout(900)
def test_every_way_is_correct_or_a_named_error_as_the_page_says(which: str, tmp_path: Path) -> None:
    found = cells(measured(which, tmp_path))
    assert len(found) > 50
    assert set(found.values()) <= {"correct", "named error", MISSED}, found
    page = reported()
    assert found == {cell: page.get(cell) for cell in found}


def test_the_page_has_all_rows_and_no_others() -> None:
    assert set(reported()) == {
        (case.way, check, column)
        for case in CASES
        for check in case.checks
        for column in case.columns
    }


def test_what_no_version_counter_sees_is_missed_without_a_check() -> None:
    """The measure can detect a wrong checkpoint: with ``check="off"`` it found one."""
    said = {text for (_, check, _), text in reported().items() if check == "off"}
    assert said == {MISSED}


def test_a_change_that_may_be_missed_is_seen_by_the_full_check() -> None:
    page = reported()
    sparse = [case for case in CASES if case.sparse]
    assert sparse
    for case in sparse:
        assert {page[case.way, "full", column] for column in case.columns} == {"named error"}
