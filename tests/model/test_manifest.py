from __future__ import annotations

from itertools import pairwise

from ckpt.model.fragment_columns import fragment_of
from ckpt.model.manifest import chunk_offsets
from tests.model.records import ARRAYS, records


def test_chunk_offsets_begin_at_zero_and_end_with_the_file():
    file = fragment_of(records()[1], key="k").file
    assert file is not None
    offsets = chunk_offsets(file)
    assert (offsets[0], offsets[-1]) == (0, file.size)
    assert [b - a for a, b in pairwise(offsets)] == [chunk.nbytes for chunk in file.chunks]


def test_a_tied_name_leads_to_the_tensor_that_is_stored():
    manifest, _ = records()
    found = manifest.tensor_map()
    assert set(found) == {*ARRAYS, "head"}
    assert found["head"] is found["weight"]


def test_sizes_add_up():
    manifest, _ = records()
    assert manifest.nbytes == sum(file.size for file in manifest.files)
    assert {tensor.name: tensor.nbytes for tensor in manifest.tensors} == {
        k: a.nbytes for k, a in ARRAYS.items()
    }
    assert manifest.file_map()[1] is manifest.files[1]
