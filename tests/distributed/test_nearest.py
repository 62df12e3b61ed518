"""A restore on two ranks: each mends what is damaged for it, what is missing near is fetched
once, and the next restore is local.
"""

from __future__ import annotations

from pathlib import Path

import pytest

from tests.distributed.launch import WORKERS
from tests.kit.worlds import world

pytestmark = pytest.mark.distributed


def test_damaged_then_empty_then_far_gone(tmp_path: Path) -> None:
    assert "ALL WELL" in world(2, WORKERS / "nearest.py", tmp_path)
