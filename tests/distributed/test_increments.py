"""Ranks leave out the frozen parts that they wrote before."""

from __future__ import annotations

from pathlib import Path

import pytest

from tests.distributed.launch import WORKERS
from tests.kit.worlds import world

pytestmark = pytest.mark.distributed


def test_two_ranks_write_an_adapter_alone(tmp_path: Path) -> None:
    assert "ALL WELL" in world(2, WORKERS / "increments.py", tmp_path)
