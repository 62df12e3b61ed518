"""A storage shrinks under a tensor while it is copied.

The result is the right checkpoint or an error with the tensor's name, and no wild read.
"""

from __future__ import annotations

from pathlib import Path

from tests.kit.worlds import run_script

SCRIPT = Path(__file__).with_name("freed.py")


def test_memory_that_is_taken_away_in_the_window_is_not_read(tmp_path: Path) -> None:
    said = run_script(SCRIPT, tmp_path, timeout=60)
    assert "well: down to 4096 bytes" in said
    assert "well: down to 0 bytes" in said
