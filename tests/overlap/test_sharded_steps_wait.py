"""Each of two ranks steps while its shards are copied.

The cases are FSDP2, tensor parallelism, DDP, FSDP1 and ZeroRedundancyOptimizer.
"""

from __future__ import annotations

from pathlib import Path

import pytest

from tests.kit.worlds import world

WORKER = Path(__file__).resolve().parent / "sharded.py"


@pytest.mark.torture
@pytest.mark.slow
@pytest.mark.distributed
def test_every_rank_waits_for_its_own_copy(tmp_path: Path) -> None:
    assert "ALL WELL" in world(2, WORKER, tmp_path)
