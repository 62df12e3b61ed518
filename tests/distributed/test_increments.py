"""Ranks leave out the frozen parts that they wrote before."""

from __future__ import annotations

from pathlib import Path

import pytest

from ckpt import CheckpointManager, Tier
from tests.distributed.launch import WORKERS
from tests.distributed.workers.increments import model_of
from tests.kit.worlds import world

pytestmark = pytest.mark.distributed


def test_two_ranks_write_an_adapter_alone(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    assert "ALL WELL" in world(2, WORKERS / "increments.py", tmp_path)
    tier = Tier(str(tmp_path / "run"), base=str(tmp_path / "fsdp2"))
    with CheckpointManager(tier) as manager:
        manager.save({"model": model_of("plain")}, 1)
    (warning,) = (entry.message for entry in caplog.records)
    assert "step 1 has the files of 2 rank(s), and this job has 1: another number" in warning
