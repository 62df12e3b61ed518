"""A restore on two ranks.

Each rank repairs what is damaged for it, fetches once what is missing near, and restores locally
the next time.
"""

from __future__ import annotations

from pathlib import Path

import pytest

from tests.distributed.launch import WORKERS
from tests.kit.worlds import world

pytestmark = pytest.mark.distributed


def test_damaged_then_empty_then_far_gone(tmp_path: Path) -> None:
    assert "ALL WELL" in world(2, WORKERS / "nearest.py", tmp_path)
