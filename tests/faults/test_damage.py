"""Any file of any tier is changed, cut or removed.

The damage is found and never restored, and another tier or step replaces the file.
"""

from __future__ import annotations

import itertools
import json
import shutil
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest
import torch

from ckpt import CheckpointManager
from ckpt.cli.main import main as command
from ckpt.errors import NoCheckpoint
from tests.faults.conftest import Count

TIERS = ("near", "far")
STEP = 2


def state(step: int) -> dict[str, object]:
    return {
        "x": torch.arange(40, dtype=torch.int64) * 31 + step,
        "y": torch.full((7,), float(step)),
        "step": step,
    }


@pytest.fixture(autouse=True)
def arguments(monkeypatch: pytest.MonkeyPatch) -> None:
    """Return the arguments of the command line for this test."""
    monkeypatch.setattr(sys, "argv", ["ckpt"])


@pytest.fixture(scope="module")
def pristine(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Steps 1 and 2 on two tiers."""
    root = tmp_path_factory.mktemp("pristine") / "run"
    with CheckpointManager([root / name for name in TIERS], chunk_size=64 << 10) as manager:
        for step in (1, STEP):
            manager.save(state(step), step)
    return root


def damages(content: bytes, stride: int) -> Iterator[tuple[str, bytes | None]]:
    """Yield contents that differ from what was written."""
    for position in range(0, len(content), stride):
        yield (
            "flipped",
            content[:position]
            + bytes([content[position] ^ 1 << position % 8])
            + content[position + 1 :],
        )
    for size in range(0, len(content), stride):
        yield "cut", content[:size]
    yield "cut", content + b"\0"
    yield "cut", None


def restored(root: Path, tiers: tuple[str, ...] = TIERS) -> int:
    """Return the step that a new process restores, after a check of its values."""
    target = state(-1)
    with CheckpointManager([root / name for name in tiers]) as manager:
        report = manager.restore(target)
    assert report is not None
    expected = state(report.step)
    assert target["step"] == report.step
    assert all(torch.equal(target[name], expected[name]) for name in ("x", "y"))  # type: ignore[arg-type]
    return report.step


def verdict(root: Path, capsys: pytest.CaptureFixture[str]) -> bool:
    """Return whether ``ckpt verify --all`` finds everything intact, and both steps."""
    sys.argv[1:] = ["verify", "--all", "--json", "--root", str(root)]
    code = command()
    reported = json.loads(capsys.readouterr().out)
    assert (code == 0) == reported["intact"]
    return bool(reported["intact"]) and len(reported["steps"]) == 2


def sweep(
    pristine: Path, place: Path, capsys: pytest.CaptureFixture[str], stride: int
) -> dict[str, int]:
    shutil.copytree(pristine, place)
    tried = {"flipped": 0, "cut": 0}
    for tier, path in itertools.product(
        TIERS, sorted((place / "near").glob(f"step-{STEP:09d}*/*"))
    ):
        victim = place / tier / path.relative_to(place / "near")
        content = victim.read_bytes()
        for kind, damaged in damages(content, stride):
            victim.unlink() if damaged is None else victim.write_bytes(damaged)
            assert not verdict(place / tier, capsys), (victim, kind)
            assert restored(place) == STEP, (victim, kind)  # the other tier has it
            tried[kind] += 1
        if (
            path.suffix == ".safetensors"
        ):  # half of the image is missing here: this tier alone has the previous step
            victim.write_bytes(content[: len(content) - 100])
            assert restored(place, (tier,)) == STEP - 1
        victim.write_bytes(content)
        assert verdict(place / tier, capsys)
    return tried


def test_some_damage_to_every_file(
    pristine: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str], tally: Count
) -> None:
    for kind, tries in sweep(pristine, tmp_path / "run", capsys, 997).items():
        tally(kind, tries)


@pytest.mark.torture
@pytest.mark.timeout(1800)
def test_all_damage_to_every_file(
    pristine: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str], tally: Count
) -> None:
    for kind, tries in sweep(pristine, tmp_path / "run", capsys, 13).items():
        tally(kind, tries)


def test_where_both_tiers_are_damaged_the_step_before_is_taken(
    pristine: Path, tmp_path: Path, tally: Count
) -> None:
    place = tmp_path / "run"
    shutil.copytree(pristine, place)
    for path in place.glob(f"*/step-{STEP:09d}*/*.safetensors"):
        content = bytearray(path.read_bytes())
        content[-1] ^= 1
        path.write_bytes(content)
    assert restored(place) == STEP - 1
    tally("flipped", 2)


def test_where_nothing_is_whole_that_is_said_and_nothing_is_restored(
    pristine: Path, tmp_path: Path, tally: Count
) -> None:
    place = tmp_path / "run"
    shutil.copytree(pristine, place)
    images = list(place.rglob("*.safetensors"))
    for path in images:
        path.write_bytes(path.read_bytes()[:-1])
    target = state(-1)
    with (
        CheckpointManager([place / name for name in TIERS]) as manager,
        pytest.raises(NoCheckpoint, match="no step is intact"),
    ):
        manager.restore(target)
    tally("cut", len(images))


def test_a_damaged_note_of_the_owner_keeps_nobody_out(
    pristine: Path, tmp_path: Path, tally: Count
) -> None:
    for number, content in enumerate(
        [b"", b"{", b"\xff" * 9, b"[]", b'{"attempt":1}', b"{}" * 40_000]
    ):
        place = tmp_path / f"{number}"
        shutil.copytree(pristine, place)
        (place / "near" / "writer.json").write_bytes(content)
        with CheckpointManager([place / name for name in TIERS]) as manager:
            manager.save(state(3), 3)
        assert restored(place) == 3
        tally("flipped", 1)
