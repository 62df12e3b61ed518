"""Under torchrun two ranks write as a large world does, and then one rank restores without that."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn

import ckpt
from ckpt import CheckpointManager, PerRank
from tests.distributed.launch import WORKERS
from tests.distributed.workers.nets import Net
from tests.kit.worlds import world

pytestmark = pytest.mark.distributed


def test_manifests_by_reference_restore_onto_every_layout_and_another_world(tmp_path: Path) -> None:
    assert "ALL WELL" in world(2, WORKERS / "large.py", tmp_path)
    for mode in ("fsdp", "tp", "ddp"):
        net: nn.Module = Net()
        state: dict[str, Any] = {
            "model": net,
            "optimizer": torch.optim.AdamW(net.parameters(), lr=1e-2),
            "step": 0,
            "own": PerRank({"rank": -1}, on_resize="first"),
        }
        net(torch.randn(6, 18)).backward()
        state["optimizer"].step()
        with CheckpointManager(tmp_path / mode) as manager:
            report = manager.restore(state)
        assert report is not None
        assert (report.step, report.saved_world_size, state["own"].value) == (3, 2, {"rank": 0})
        kept = torch.load(tmp_path / f"{mode}.pt", weights_only=True)
        found = [*net.parameters()]
        found += [
            state["optimizer"].state[p][key] for p in found for key in ("exp_avg", "exp_avg_sq")
        ]
        assert all(torch.equal(a, b) for a, b in zip(kept, found, strict=True))
        with ckpt.open(tmp_path / mode) as opened:
            assert torch.equal(
                opened.tensor("model/big")[100:200, 3], net.get_parameter("big")[100:200, 3]
            )
