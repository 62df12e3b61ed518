"""A storage that is shrunk under a tensor while it is copied: the right checkpoint or an error
with its name, and no wild read.
"""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

ROOT = Path(__file__).resolve().parents[2]


def test_memory_that_is_taken_away_in_the_window_is_not_read(tmp_path: Path) -> None:
    done = subprocess.run(
        [sys.executable, "-m", "tests.overlap.freed", str(tmp_path)],
        cwd=ROOT,
        env=os.environ | {"PYTHONPATH": os.pathsep.join([str(ROOT), str(ROOT / "backends")])},
        capture_output=True,
        text=True,
        timeout=60,
        check=False,
    )
    assert done.returncode == 0, (done.returncode, done.stdout, done.stderr[-3000:])
    assert "well: down to 4096 bytes" in done.stdout
    assert "well: down to 0 bytes" in done.stdout
