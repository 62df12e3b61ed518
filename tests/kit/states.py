"""Small states that the number of a step determines."""

from __future__ import annotations

from typing import Any

import torch

from ckpt import CheckpointManager, PerRank, RestoreReport


def state(step: int) -> dict[str, torch.Tensor]:
    return {"x": torch.full((50_000,), step)}


IMAGE = 404_096  # the size of ``state`` as int64, and 4 kB of header


def state_of(step: int) -> dict[str, Any]:
    torch.manual_seed(step)
    return {"x": torch.randn(3000), "y": torch.randn(40, 50), "step": step, "rng": PerRank([step])}


def blank() -> dict[str, Any]:
    return {"x": torch.zeros(3000), "y": torch.zeros(40, 50), "step": -1, "rng": PerRank(None)}


def assert_is(target: dict[str, Any], step: int) -> None:
    expected = state_of(step)
    assert torch.equal(target["x"], expected["x"])
    assert torch.equal(target["y"], expected["y"])
    assert target["step"] == step
    assert target["rng"].value == [step]


def restored(manager: CheckpointManager, target: dict[str, Any], **how: Any) -> RestoreReport:
    """Restore a checkpoint, which must be there, and return the report."""
    report = manager.restore(target, **how)
    assert report is not None
    return report
