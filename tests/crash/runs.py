"""Start the scripts of this folder."""

from __future__ import annotations

from pathlib import Path

from tests.kit.worlds import run_script

TINY, LARGE = 100, (64 << 20) // 8


def nursery(*args: object, script: str = "nursery.py", timeout: float = 280) -> str:
    """Return what the script has printed, and fail if it fails."""
    said = run_script(Path(__file__).parent / script, *args, timeout=timeout)
    assert "ALL WELL" in said
    return said
