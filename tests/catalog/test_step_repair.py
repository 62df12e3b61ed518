"""A damaged step is made whole again from other stores, and is never torn meanwhile."""

from __future__ import annotations

import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch

from ckpt import CheckpointManager, Tier
from ckpt.catalog.inventory import Inventory
from ckpt.catalog.step_listing import committed
from ckpt.catalog.step_repair import mend_step
from ckpt.catalog.verify import StepFolder
from ckpt.errors import IntegrityError, ObjectExists, RootInUse, StorageError
from ckpt.pipeline.workers import Workers
from ckpt.retention.removal import remove
from ckpt.root.claim_marker import claim_committed_for_removal
from ckpt.storage.registry import open_backend
from tests.kit.damage import cut, data_of, flip, folder_of, look
from tests.kit.stores import whole

CHUNKS = 5
DAMAGE: dict[str, Callable[[Path], None]] = {"flip": flip, "cut": cut, "remove": Path.unlink}


@pytest.fixture(scope="module")
def saved(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The same step on tiers with and without a codec."""
    folder = tmp_path_factory.mktemp("saved")
    tiers = [Tier(str(folder / name), codec=name) for name in ("none", "zstd")]
    values = torch.arange(CHUNKS << 18, dtype=torch.float32)
    with CheckpointManager(tiers, chunk_size=1 << 20) as manager:
        manager.save({"w": values, "b": torch.ones(7)}, 1)
    return folder


@pytest.fixture(params=["none", "zstd to none", "none to zstd", "zstd"])
def roots(request, saved: Path, tmp_path: Path) -> tuple[Tier, Tier]:
    """Return the damaged tier and the other one, by their codecs."""
    other, _, damaged = request.param.rpartition(" to ")
    return (
        copied(saved, tmp_path / "a", damaged),
        copied(saved, tmp_path / "b", other or damaged),
    )


@pytest.fixture
def two(saved: Path, tmp_path: Path) -> tuple[Tier, Tier]:
    return copied(saved, tmp_path / "a", "none"), copied(saved, tmp_path / "b", "none")


def copied(saved: Path, root: Path, codec: str) -> Tier:
    shutil.copytree(saved / codec, root)
    return Tier(str(root), codec=codec)


def mend(root: Tier, *others: Tier, confirm: Callable[[], object] = lambda: None) -> int:
    """Mend the step on ``root``, and return how many bytes were written."""
    written = 0

    def count(nbytes: int) -> None:
        nonlocal written
        written += nbytes

    with Workers("test", 1) as workers:
        report = look(root)
        sources = [open_backend(other.url) for other in others]
        folder = StepFolder(open_backend(root.url), report.ref, workers)
        mend_step(sources, folder, report.faults, codec=root.codec, confirm=confirm, on_bytes=count)
    return written


@pytest.mark.parametrize("what", DAMAGE)
def test_a_damaged_data_file_is_written_again(roots, what: str) -> None:
    damaged, other = roots
    before = {path.name: path.read_bytes() for path in folder_of(damaged).iterdir()}
    DAMAGE[what](data_of(damaged))
    assert not look(damaged).intact
    assert mend(damaged, other) > 0
    assert look(damaged).intact
    assert {path.name: path.read_bytes() for path in folder_of(damaged).iterdir()} == before
    assert look(other).intact


@pytest.mark.parametrize("what", DAMAGE)
def test_a_damaged_fragment_is_written_again(roots, what: str) -> None:
    damaged, other = roots
    DAMAGE[what](folder_of(damaged) / "rank-00000.json")
    assert not look(damaged).intact
    if damaged.codec != other.codec:  # it says how the files are encoded, which no tier knows
        with pytest.raises(ObjectExists, match="remove the folder"):
            mend(damaged, other)
    else:
        mend(damaged, other)
        assert look(damaged).intact


@pytest.mark.parametrize("what", ["flip", "cut"])
def test_a_damaged_manifest_is_replaced(roots, what: str) -> None:
    damaged, other = roots
    manifest = folder_of(damaged) / "manifest.json"
    flip(manifest, 200) if what == "flip" else manifest.write_bytes(manifest.read_bytes()[:90])
    flip(data_of(damaged))
    assert not look(damaged).intact
    mend(damaged, other)
    assert look(damaged).intact
    assert {path.name for path in folder_of(damaged).iterdir()} == {
        "manifest.json",
        "rank-00000.json",
        data_of(damaged).name,
    }


def test_damage_on_both_tiers_at_different_places_is_mended(two) -> None:
    damaged, other = two
    flip(data_of(damaged), 1000)
    flip(data_of(other), 3 << 20)
    mend(damaged, other)
    assert look(damaged).intact
    assert not look(other).intact
    mend(other, damaged)
    assert look(other).intact


def test_damage_at_the_same_place_stays_and_changes_nothing(two) -> None:
    damaged, other = two
    flip(data_of(damaged), 1000)
    flip(data_of(other), 1001)
    before = data_of(damaged).read_bytes()
    with pytest.raises(IntegrityError):
        mend(damaged, other)
    with pytest.raises(IntegrityError):
        mend(damaged)
    assert data_of(damaged).read_bytes() == before
    assert sorted(path.name for path in folder_of(damaged).iterdir()) == sorted(
        path.name for path in folder_of(other).iterdir()
    )


def test_a_damaged_manifest_stays_if_some_data_is_intact_nowhere(two) -> None:
    """Otherwise the step would be listed, and retention would remove an intact one for it."""
    damaged, other = two
    manifest = folder_of(damaged) / "manifest.json"
    flip(manifest, 200)
    flip(data_of(damaged), 1000)
    flip(data_of(other), 1001)
    before = manifest.read_bytes()
    with pytest.raises(IntegrityError):
        mend(damaged, other)
    assert manifest.read_bytes() == before


def test_a_step_that_is_removed_meanwhile_does_not_come_back(two) -> None:
    damaged, other = two
    flip(data_of(damaged))
    with Workers("test", 1) as workers:
        report = look(damaged)
        shutil.rmtree(folder_of(damaged))
        folder = StepFolder(open_backend(damaged.url), report.ref, workers)
        how: dict[str, Any] = {"codec": "none", "on_bytes": lambda _: None}
        sources = [open_backend(other.url)]
        with pytest.raises((IntegrityError, StorageError)):
            mend_step(sources, folder, report.faults, confirm=lambda: None, **how)
    assert whole(damaged.url) == []


@pytest.mark.parametrize("moment", [1, 2])
def test_a_removal_between_two_looks_leaves_nothing(two, moment: int) -> None:
    damaged, other = two
    flip(data_of(damaged))
    folder, calls = folder_of(damaged), 0

    def remove() -> None:
        nonlocal calls
        calls += 1
        if calls == moment:
            shutil.rmtree(folder)

    mend(damaged, other, confirm=remove)
    assert calls == 2
    assert whole(damaged.url) == []
    assert not list(folder.glob("rank-*"))


@pytest.mark.parametrize("moment", [1, 2, 3, 4, 5])
@pytest.mark.parametrize("roots", ["none to zstd"], indirect=True)
def test_a_step_that_is_encoded_again_and_removed_meanwhile_does_not_come_back(
    roots, moment: int
) -> None:
    damaged, other = roots
    flip(data_of(damaged))
    backend, calls, is_removed = open_backend(damaged.url), 0, False

    def remove_then() -> None:
        nonlocal calls, is_removed
        calls += 1
        if calls == moment:
            [step] = Inventory(backend).look()
            is_removed = remove(backend, step)

    if moment < 4:
        with pytest.raises((IntegrityError, StorageError)):
            mend(damaged, other, confirm=remove_then)
    else:
        mend(damaged, other, confirm=remove_then)
        assert calls == 5, "all moments were tried"
    assert is_removed == (moment < 4), "the marker of the mending keeps the step from then on"
    assert whole(damaged.url) == ([] if is_removed else [1])
    assert is_removed or look(damaged).intact
    assert not list(Path(damaged.url).glob("*/claim"))


@pytest.mark.parametrize("roots", ["none to zstd"], indirect=True)
def test_an_encoding_that_fails_leaves_a_step_that_can_be_removed(roots) -> None:
    damaged, other = roots
    flip(data_of(damaged), 1000)
    flip(data_of(other), 1001)
    with pytest.raises(IntegrityError):
        mend(damaged, other)
    backend = open_backend(damaged.url)
    [step] = Inventory(backend).look()
    assert step.state == "committed"
    assert remove(backend, step)


def test_a_manifest_is_not_replaced_while_the_step_is_removed(two) -> None:
    damaged, other = two
    backend = open_backend(damaged.url)
    [ref] = committed(backend)
    flip(folder_of(damaged) / "manifest.json", 200)
    assert claim_committed_for_removal(backend, ref)
    with pytest.raises(StorageError, match="is being removed"):
        mend(damaged, other)
    assert not look(damaged).intact


def test_nothing_is_written_where_another_job_has_the_root(roots) -> None:
    damaged, other = roots
    flip(data_of(damaged))
    before = data_of(damaged).read_bytes()

    def taken() -> None:
        raise RootInUse(damaged.url, "another job")

    with pytest.raises(RootInUse):
        mend(damaged, other, confirm=taken)
    assert data_of(damaged).read_bytes() == before
