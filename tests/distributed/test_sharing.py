"""Ranks restore what they share: each rank reads it, or one reads for all."""

from __future__ import annotations

from pathlib import Path

import pytest

from tests.distributed.launch import WORKERS
from tests.kit.worlds import world

pytestmark = pytest.mark.distributed


@pytest.mark.torture
@pytest.mark.parametrize("ranks", [2, pytest.param(4, marks=pytest.mark.torture)])
def test_read_by_each_or_by_one_for_all(tmp_path: Path, ranks: int) -> None:
    assert "ALL WELL" in world(ranks, WORKERS / "sharing.py", tmp_path)
