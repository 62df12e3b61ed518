"""docs/reliability.md says exactly what was run."""

from __future__ import annotations

import json

from tests.faults.ledger import FAULTS, PAGE, RESULTS, ROOT, page


def test_the_table_is_that_of_the_results() -> None:
    results = json.loads(RESULTS.read_text())
    text = PAGE.read_text()
    assert page(text, results) == text, "run: python -m tests.faults.ledger"
    assert set(results) <= set(FAULTS)


def test_what_the_table_names_is_there_and_counts() -> None:
    for name, fault in FAULTS.items():
        source = (ROOT / fault.where).read_text()
        assert f'"{name}"' in source or name == "nfs", f"{fault.where} does not count {name}"
