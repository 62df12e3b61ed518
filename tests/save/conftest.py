"""Fixtures for the tests of saves."""

from __future__ import annotations

from pathlib import Path

import pytest


@pytest.fixture
def roots(tmp_path: Path) -> tuple[Path, Path]:
    """The root of a run, whose base is in the other one."""
    return tmp_path / "run", tmp_path / "base"
