from __future__ import annotations

from pathlib import Path

import pytest

from bench.node_memory import SETTINGS, measure


@pytest.mark.torture
def test_each_setting_has_a_row_with_its_figures(tmp_path: Path) -> None:
    plan = {
        "folder": str(tmp_path),
        "names": SETTINGS,
        "size": 16 << 20,
        "batch": 1,
        "layers": 2,
        "ahead": 0.1,
        "saves": 2,
        "turns": 1,
    }
    rows = [row.strip("| ").split(" | ") for row in measure(2, plan)]
    assert [row[0] for row in rows] == list(SETTINGS)
    for _, memory, stall, durable in rows:
        assert float(memory.rstrip("×")) > 0.9  # whole images, since the state is small
        assert "s" in stall
        assert "s" in durable
