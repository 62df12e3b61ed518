"""A job whose files refer to older steps is killed at any call to the store."""

from __future__ import annotations

from pathlib import Path

import pytest

from tests.crash.runs import nursery


@pytest.mark.parametrize("stride", [41, pytest.param(1, marks=pytest.mark.torture)])
def test_each_listed_step_is_what_was_saved(tmp_path: Path, stride: int) -> None:
    assert "deaths" in nursery(tmp_path, stride, script="increments.py", timeout=900)
