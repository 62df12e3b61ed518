"""Tiers of which one is encoded: a chunk has one identity on both, though its place differs."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch

from ckpt import CheckpointManager, Tier
from tests.test_restorer import flip
from tests.test_review import whole


def state(value: float = 1.0) -> dict[str, torch.Tensor]:
    generator = torch.Generator().manual_seed(7)
    return {
        "x": value * torch.randn(40_000, generator=generator),
        "y": value * torch.randn(300, 70, generator=generator),
    }


@pytest.fixture(params=["near", "far"])
def tiers(request: pytest.FixtureRequest, tmp_path: Path) -> list[Tier]:
    """Step 1 on both; one of them is encoded."""
    tiers = [
        Tier(str(tmp_path / name), codec="zstd" if name == request.param else "none")
        for name in ("near", "far")
    ]
    with CheckpointManager(tiers, chunk_bytes=16384) as manager:
        manager.save(state(), 1)
    return tiers


def data(tier: Tier) -> Path:
    (path,) = (path for path in Path(tier.url).rglob("rank-*") if path.suffix != ".json")
    return path


def test_a_chunk_damaged_near_comes_from_the_file_of_another_name_far(tiers: list[Tier]) -> None:
    assert data(tiers[0]).suffix != data(tiers[1]).suffix
    flip(data(tiers[0]), -100)
    target = state(0.0)
    with CheckpointManager(tiers) as manager:
        report = manager.restore(target)
    assert all(torch.equal(target[name], tensor) for name, tensor in state().items())
    assert report is not None
    assert (report.tier, report.skipped) == (tiers[0].url, ())
    (repair,) = report.repaired
    assert repair.nbytes <= 16384


def test_a_file_missing_near_comes_from_far(tiers: list[Tier]) -> None:
    data(tiers[0]).unlink()
    target = state(0.0)
    with CheckpointManager(tiers) as manager:
        report = manager.restore(target)
    assert all(torch.equal(target[name], tensor) for name, tensor in state().items())
    assert report is not None
    assert report.tier == tiers[1].url


def test_an_empty_folder_is_filled_with_what_is_far_as_it_lies_there(
    tiers: list[Tier], tmp_path: Path
) -> None:
    fresh = [Tier(str(tmp_path / "fresh")), tiers[1]]
    for tier in (tiers[1].url, fresh[0].url):
        target = state(0.0)
        with CheckpointManager(fresh) as manager:
            report = manager.restore(target)
        assert report is not None
        assert report.tier == tier
        assert all(torch.equal(target[name], tensor) for name, tensor in state().items())
    assert data(fresh[0]).read_bytes() == data(tiers[1]).read_bytes()
    assert whole(fresh[0].url) == [1]
