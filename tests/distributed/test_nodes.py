"""Two nodes of two ranks, each with a tier of its own, under torchrun: separate roots stand for separate disks."""

from __future__ import annotations

from pathlib import Path

import pytest

from tests.distributed.launch import torchrun

pytestmark = pytest.mark.distributed


def test_steps_outlive_nodes_as_far_as_their_bytes_do(tmp_path: Path) -> None:
    assert "ALL WELL" in torchrun(4, "nodes.py", tmp_path)
