"""What a comparison of two checkpoints reports while it runs."""

from __future__ import annotations

from contextlib import closing
from pathlib import Path

import numpy as np
import pytest

from ckpt.catalog.difference import compare
from ckpt.catalog.step_listing import read_manifest
from ckpt.catalog.tensor_reader import StepReader
from ckpt.pipeline.workers import Workers
from ckpt.storage.registry import open_backend
from tests.checkpoints import Arrays, write_checkpoint

ONE: Arrays = {name: np.arange(400, dtype=np.float32) for name in "abcd"}
TWO: Arrays = {
    "a": ONE["a"],
    "b": ONE["b"] + 1,
    "c": ONE["c"].astype(np.float64),
    "d": ONE["d"][:9],
}


@pytest.mark.parametrize("read", [True, False])
def test_every_common_name_counts_as_done_also_if_it_has_another_shape(
    tmp_path: Path, read: bool
) -> None:
    done: list[tuple[int, int]] = []
    with closing(open_backend(str(tmp_path))) as backend, Workers("compare", 1) as workers:
        one, two = (
            StepReader(backend, ref, read_manifest(backend, ref), workers)
            for ref in (
                write_checkpoint(backend, step, arrays, world_size=world).ref
                for step, arrays, world in ((1, ONE, 1), (2, TWO, 3))
            )
        )
        found = compare(one, two, on_name=lambda *each: done.append(each), read=read)
    assert done == [(1, 4), (2, 4), (3, 4), (4, 4)]
    assert (found.other_values, sorted(found.other_kinds)) == (["b"] if read else [], ["c", "d"])
    assert found.other_layouts == ([] if read else ["a", "b"])
