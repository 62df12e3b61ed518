"""What a save and a restore enter is counted, and only shrinks."""

from __future__ import annotations

import re

from tests.kit.worlds import ROOT, run_script

MOST = {
    "a save to one tier": (392, 60),
    "a save to near and far": (448, 65),
    "a restore": (534, 75),
}
"""The most functions and files."""


def test_a_save_and_a_restore_enter_no_more_functions_and_files() -> None:
    said = run_script(ROOT / "bench" / "trace.py")
    rows = re.findall(r"^\| (a [\w ]+) \| (\d+) \| (\d+) \|$", said, re.MULTILINE)
    counts = {name: (int(functions), int(files)) for name, functions, files in rows}
    assert counts.keys() == MOST.keys()
    for name, most in MOST.items():
        assert all(0 < count <= limit for count, limit in zip(counts[name], most, strict=True)), (
            counts
        )
