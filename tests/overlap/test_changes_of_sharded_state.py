"""Everyday code that changes a state during the copy, under FSDP2 and tensor parallelism.

Each way fails the save with the tensor's name.
"""

from __future__ import annotations

from pathlib import Path

import pytest

from tests.kit.worlds import world
from tests.overlap.ways import WAYS, documented

WORKER = Path(__file__).resolve().parent / "changed.py"


@pytest.mark.distributed
def test_no_change_of_sharded_state_is_saved_silently(tmp_path: Path) -> None:
    reported = world(2, WORKER, tmp_path)
    assert "ALL WELL" in reported
    rows = [line.split("WAY|")[1].split("|") for line in reported.splitlines() if "WAY|" in line]
    seen = {(layout, name): how for layout, name, how in rows}
    for column, layout in enumerate(("FSDP2", "TP"), start=1):
        assert {name: seen[layout, name] for name in WAYS} == {
            name: row[column] for name, row in documented().items()
        }
