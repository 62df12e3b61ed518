"""One of the tiers is encoded: a chunk has one identity on both, though its place differs."""

from __future__ import annotations

import json
import sys
from pathlib import Path

import pytest
import torch

from ckpt import CheckpointManager, Tier
from ckpt.catalog.transfer import fetch_step
from ckpt.catalog.verify import StepFolder
from ckpt.cli.main import main
from ckpt.pipeline.workers import Workers
from ckpt.root.attempts import step_refs
from ckpt.storage.registry import open_backend
from tests.kit.damage import flip
from tests.kit.stores import whole


def state(value: float = 1.0) -> dict[str, torch.Tensor]:
    generator = torch.Generator().manual_seed(7)
    return {
        "x": value * torch.randn(40_000, generator=generator),
        "y": value * torch.randn(300, 70, generator=generator),
    }


@pytest.fixture(params=["near", "far"])
def tiers(request: pytest.FixtureRequest, tmp_path: Path) -> list[Tier]:
    """Step 1 is on both tiers, of which one is encoded."""
    tiers = [
        Tier(str(tmp_path / name), codec="zstd" if name == request.param else "none")
        for name in ("near", "far")
    ]
    with CheckpointManager(tiers, chunk_size=16384) as manager:
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


def test_the_verb_restore_mends_what_is_raw_near_from_what_is_encoded_far(
    tiers: list[Tier], tmp_path: Path
) -> None:
    if tiers[0].codec != "none":
        pytest.skip("a chunk that is encoded near cannot be made again of a raw one, byte for byte")
    good = data(tiers[0]).read_bytes()
    flip(data(tiers[0]), -100)
    sources = [open_backend(tier.url) for tier in tiers]
    (ref,) = step_refs(sources[0])
    with Workers("test", 2) as workers:
        fetch_step(sources, StepFolder(open_backend(str(tmp_path / "mended")), ref, workers))
    (mended,) = (tmp_path / "mended").rglob("*.safetensors")
    assert mended.read_bytes() == good


def test_the_verb_copy_takes_the_same_chunks_for_the_same_step(
    tiers: list[Tier], capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    for arguments, result in (((), "already there"), (("--check",), "intact")):
        monkeypatch.setattr(
            sys, "argv", ["ckpt", "copy", tiers[0].url, tiers[1].url, "--json", *arguments]
        )
        main()
        (step,) = json.loads(capsys.readouterr().out)["steps"]
        assert step["result"] == result
