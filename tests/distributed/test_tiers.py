"""Several tiers under torchrun: what waits for a far tier is taken in one order by all ranks, whichever of them is slow."""

from __future__ import annotations

from pathlib import Path

import pytest

from tests.distributed.launch import torchrun
from tests.test_review import whole

pytestmark = pytest.mark.distributed


def test_memory_near_and_far_on_two_ranks(tmp_path: Path) -> None:
    told = torchrun(2, "tiers.py", tmp_path)
    assert "ALL WELL" in told
    assert 10 in whole(tmp_path / "far")
    assert str(whole(tmp_path / "far")) in told
