from __future__ import annotations

import os
from pathlib import Path

import numpy as np
import pytest

from ckpt.catalog.step_listing import is_committed, own_objects, read_packed
from ckpt.catalog.transfer import fetch_step
from ckpt.catalog.transfer_by_rank import copy_part, copy_rank, mend_rank
from ckpt.catalog.verify import StepFolder, verify_step
from ckpt.codec.registry import NO_CODEC
from ckpt.errors import IntegrityError, ObjectNotFound, StorageError
from ckpt.pipeline.workers import Workers
from ckpt.storage.registry import open_backend
from tests.checkpoints import write_checkpoint
from tests.kit.damage import flip
from tests.kit.marks import each_once

ARRAY = np.random.default_rng(4).standard_normal((12, 16))


def test_a_file_that_was_cut_short_is_taken_from_the_next_source(tmp_path: Path) -> None:
    near, far, there = (open_backend(str(tmp_path / name)) for name in ("near", "far", "there"))
    for store in (near, far):
        written = write_checkpoint(store, 7, {"x": ARRAY}, world_size=2)
    key = written.ref.key("rank-00001.safetensors")
    os.truncate(tmp_path / "near" / key, 4100)
    with Workers("test", 2) as workers:
        folder = StepFolder(there, written.ref, workers)
        assert copy_rank([near, far], folder, 1, NO_CODEC, lambda _: None)
    assert (tmp_path / "there" / key).read_bytes() == (tmp_path / "far" / key).read_bytes()


@pytest.mark.parametrize("order", [("near", "far"), ("far", "near")])
def test_damage_on_one_source_is_reported_although_another_lacks_the_files(
    tmp_path: Path, order: tuple[str, str]
) -> None:
    """A store without the files is no reason to stop. A damaged file is lost."""
    near, far, there = (open_backend(str(tmp_path / name)) for name in (*order, "there"))
    written = write_checkpoint(open_backend(str(tmp_path / "far")), 7, {"x": ARRAY}, world_size=2)
    with Workers("test", 2) as workers:
        folder = StepFolder(there, written.ref, workers)
        with pytest.raises(ObjectNotFound):
            copy_rank([near, far], folder, 2, NO_CODEC, lambda _: None)
        flip(tmp_path / "far" / written.ref.key("rank-00001.safetensors"))
        with pytest.raises(IntegrityError):
            copy_rank([near, far], folder, 1, NO_CODEC, lambda _: None)


@pytest.mark.parametrize(
    ("codec", "part"), each_once(["none", "zstd:1"], ["rank-00001.json", "rank-00001.*[!n]"])
)
def test_a_damaged_file_of_a_rank_is_replaced_as_the_manifest_describes_it(
    tmp_path: Path, codec: str, part: str
) -> None:
    far, near = (open_backend(str(tmp_path / name)) for name in ("far", "near"))
    ref = write_checkpoint(far, 7, {"x": np.arange(60_000.0)}, world_size=2).ref
    with Workers("test", 2) as workers:
        folder = StepFolder(near, ref, workers)
        fetch_step([far], folder, codec=codec)
        [damaged] = (tmp_path / "near" / ref.folder).glob(part)
        before = damaged.read_bytes()
        flip(damaged)
        named = read_packed(near, ref)[0].fragments[1]
        mend_rank([far], folder, named, codec, lambda _: None)
        assert damaged.read_bytes() == before
        assert verify_step(near, ref, workers=workers).intact


@pytest.mark.parametrize("part", ["rank-00001.json", "rank-00001.encoded"])
def test_files_that_another_encoder_would_write_are_left_as_they_are(
    tmp_path: Path, part: str
) -> None:
    """One damaged chunk is better than a file whose chunks are not where the fragment says."""
    far, near = (open_backend(str(tmp_path / name)) for name in ("far", "near"))
    ref = write_checkpoint(far, 7, {"x": np.arange(60_000.0)}, world_size=2).ref
    with Workers("test", 2) as workers:
        folder = StepFolder(near, ref, workers)
        fetch_step([far], folder, codec="zstd:1")
        flip(tmp_path / "near" / ref.key(part))
        before = contents(tmp_path / "near")
        named = read_packed(near, ref)[0].fragments[1]
        with pytest.raises(IntegrityError, match="codec or its version has changed"):
            mend_rank([far], folder, named, "zstd:12", lambda _: None)
    assert contents(tmp_path / "near") == before


def test_nothing_is_left_of_a_step_that_is_removed_while_a_rank_is_mended(tmp_path: Path) -> None:
    far, near = (open_backend(str(tmp_path / name)) for name in ("far", "near"))
    ref = write_checkpoint(far, 7, {"x": ARRAY}, world_size=2).ref
    with Workers("test", 2) as workers:
        folder = StepFolder(near, ref, workers)
        fetch_step([far], folder)
        named = read_packed(near, ref)[0].fragments[1]
        flip(tmp_path / "near" / ref.key("rank-00001.safetensors"))

        def remove(_: int) -> None:
            for info in own_objects(near, ref):
                near.delete(info.key)

        mend_rank([far], folder, named, NO_CODEC, remove)
    assert contents(tmp_path / "near") == {}


@pytest.mark.parametrize("name", ["rank-00000.json", "rank-00000.safetensors"])
def test_a_part_whose_files_another_process_has_removed_is_not_committed(
    tmp_path: Path, name: str
) -> None:
    near, there = (open_backend(str(tmp_path / name)) for name in ("near", "there"))
    ref = write_checkpoint(near, 7, {"x": ARRAY}, world_size=3).ref
    with Workers("test", 2) as workers:
        folder = StepFolder(there, ref, workers)
        with pytest.raises(StorageError):
            copy_part(near, folder, {0, 1}, lambda _: None, lambda: there.delete(ref.key(name)))
        assert not is_committed(there, ref)
        copy_part(near, folder, {0, 1}, lambda _: None, lambda: None)
        assert is_committed(there, ref)
        assert verify_step(there, ref, workers=workers, ranks={0, 1}).intact


def contents(root: Path) -> dict[str, bytes]:
    """Return the files of the steps on a store."""
    return {str(path): path.read_bytes() for path in root.glob("step-*/*")}
