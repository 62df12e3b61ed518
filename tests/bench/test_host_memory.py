from __future__ import annotations

from pathlib import Path

import pytest

from bench.host_memory import Case, measure


@pytest.mark.torture
def test_each_setting_has_a_row_with_its_figures(tmp_path: Path) -> None:
    case = Case(step=0.2, saves=2, turns=2, size_bytes=16 << 20)
    rows = measure(["defaults", "`slots=1`"], case, str(tmp_path))
    assert [row.split(" | ")[0] for row in rows] == ["| defaults", "| `slots=1`"]
    for row in rows:
        _, step, most, last, *times = row.strip("| ").split(" | ")
        assert step == "0.2 s"
        assert float(most.rstrip("×")) > 0.9  # whole images, since the state is small
        assert float(last.rstrip("×")) > 0.5
        assert len(times) == 3
