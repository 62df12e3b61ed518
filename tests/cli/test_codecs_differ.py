"""Tiers that encode the same step differently, and damage on one."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch

from ckpt import CheckpointManager, Tier
from tests.cli.conftest import Cli

STATE = {"x": torch.randn(300_000) * 0.02, "y": torch.randn(300_000) * 0.02}


@pytest.fixture
def two(cli: Cli) -> Path:
    """Two tiers: steps 25 and 30 are raw on near, and zstd on far.

    Return the folder of step 30 on far, whose data file is damaged.
    """
    with CheckpointManager([Tier("near"), Tier("far", codec="zstd")]) as manager:
        for step in (25, 30):
            manager.save({**STATE, "step": step}, step)
    (folder,) = Path("far").glob("step-*30.*")
    damage(folder)
    return folder


def damage(folder: Path, part: float = 0.75) -> None:
    (file,) = (
        path for path in folder.iterdir() if path.name.startswith("rank") and path.suffix != ".json"
    )
    data = bytearray(file.read_bytes())
    data[int(len(data) * part)] ^= 1
    file.write_bytes(data)


@pytest.mark.parametrize("to", [(), ("--to", "there")])
def test_the_newest_step_is_had_from_the_tier_that_has_it_intact(
    cli: Cli, two: Path, to: tuple[str, ...]
) -> None:
    ran = cli("restore", "--latest", "--root", "far", "--root", "near", *to, "--json")
    assert (ran.code, ran.json["step"]) == (0, 30), ran.err
    assert "far does not have it intact" in ran.err
    place = to[1] if to else "far"
    assert cli("verify", 30, "--root", place).code == 0
    (folder,) = Path(place).glob("step-*30.*")
    assert (
        len([path for path in folder.iterdir() if path.suffix in (".encoded", ".safetensors")]) == 1
    )
    x = torch.zeros_like(STATE["x"])
    with CheckpointManager(place) as manager:
        manager.restore({"x": x}, only="x")
    assert torch.equal(x, STATE["x"])


def test_copy_check_mends_a_tier_with_a_codec_and_leaves_one_that_is_intact(
    cli: Cli, two: Path
) -> None:
    ran = cli("copy", "near", "far", "--step", 30, "--check")
    assert ran.code == 0, ran.err
    assert cli("verify", "--all", "--root", "far").code == 0
    before = {path: path.read_bytes() for path in Path("far").glob("step-*25.*/*")}
    ran = cli("copy", "near", "far", "--step", 25, "--check", "--json")
    assert (ran.code, ran.json["steps"][0]["result"]) == (0, "intact")
    assert {path: path.read_bytes() for path in Path("far").glob("step-*25.*/*")} == before


def test_a_damaged_source_takes_nothing_from_a_tier_that_is_encoded_otherwise(
    cli: Cli, two: Path
) -> None:
    (near,) = Path("near").glob("step-*30.*")
    damage(near)
    before = {path.name: path.read_bytes() for path in two.iterdir()}
    assert cli("copy", "near", "far", "--step", 30, "--check").code == 4
    assert {path.name: path.read_bytes() for path in two.iterdir()} == before


def test_what_each_tier_has_intact_makes_a_whole(cli: Cli, two: Path) -> None:
    (near,) = Path("near").glob("step-*30.*")
    damage(near, 0.25)
    ran = cli("restore", "--latest", "--root", "far", "--root", "near", "--json")
    assert (ran.code, ran.json["step"]) == (0, 30), ran.err
    assert cli("verify", 30, "--root", "far").code == 0
