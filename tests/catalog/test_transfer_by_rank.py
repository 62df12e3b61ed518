from __future__ import annotations

import os
from pathlib import Path

import numpy as np

from ckpt.catalog.transfer_by_rank import copy_rank
from ckpt.catalog.verify import StepFolder
from ckpt.codec.registry import NO_CODEC
from ckpt.pipeline.workers import Workers
from ckpt.storage.registry import open_backend
from tests.checkpoints import write_checkpoint

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
