"""Several tiers under torchrun.

All ranks take the steps that wait for a far tier in one order, even if one of them is slow.
"""

from __future__ import annotations

import os
import shutil
from pathlib import Path

import pytest

from ckpt import Tier
from ckpt.storage.tiers import urls_of
from tests.distributed.launch import WORKERS
from tests.kit.stores import whole
from tests.kit.worlds import world

pytestmark = pytest.mark.distributed


def test_memory_near_and_far_on_two_ranks(tmp_path: Path) -> None:
    memory, _ = urls_of([Tier("memory"), Tier(str(tmp_path / "near"))])
    try:
        reported = world(2, WORKERS / "tiers.py", tmp_path)
    finally:  # the near tier is removed meanwhile, so the last step stays in memory
        shutil.rmtree(
            f"/dev/shm/ckpt-memory-{os.getuid()}-{memory.removeprefix('shm://')}",
            ignore_errors=True,
        )
    assert "ALL WELL" in reported
    assert 10 in whole(tmp_path / "far")
    assert str(whole(tmp_path / "far")) in reported
