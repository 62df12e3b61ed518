from __future__ import annotations

import os
from pathlib import Path

import numpy as np
import pytest

from ckpt.catalog.transfer_by_rank import copy_rank
from ckpt.catalog.verify import StepFolder
from ckpt.codec.registry import NO_CODEC
from ckpt.errors import IntegrityError, ObjectNotFound
from ckpt.pipeline.workers import Workers
from ckpt.storage.registry import open_backend
from tests.checkpoints import write_checkpoint
from tests.kit.damage import flip

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
