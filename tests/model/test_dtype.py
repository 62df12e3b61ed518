from __future__ import annotations

import json

import pytest
import safetensors
import torch

from ckpt.model.dtype import DTYPES

# they cannot be allocated, or quantization schemes make them and keep more than their bytes
NOT_SAVED = {
    *(f"{sign}int{bits}" for sign in ("", "u") for bits in range(1, 8)),
    *("qint8", "qint32", "quint8", "quint4x2", "quint2x4"),
}


def torch_dtypes() -> dict[str, torch.dtype]:
    found = {value for value in vars(torch).values() if isinstance(value, torch.dtype)}
    return {str(dtype).removeprefix("torch."): dtype for dtype in found}


def test_every_dtype_of_torch_is_in_the_table_or_left_out_on_purpose():
    assert set(torch_dtypes()) == set(DTYPES) | NOT_SAVED
    assert not set(DTYPES) & NOT_SAVED


@pytest.mark.parametrize("name", DTYPES)
def test_an_element_has_the_size_torch_gives_it(name):
    assert DTYPES[name].name == name
    assert DTYPES[name].itemsize == torch_dtypes()[name].itemsize
    assert DTYPES[name].itemsize % DTYPES[name].lanes == 0


def safetensors_file(code: str, shape: list[int], nbytes: int) -> bytes:
    header = json.dumps(
        {"x": {"dtype": code, "shape": shape, "data_offsets": [0, nbytes]}}
    ).encode()
    return len(header).to_bytes(8, "little") + header + bytes(nbytes)


@pytest.mark.parametrize("name", DTYPES)
def test_safetensors_gives_the_code_the_same_size(name):
    dtype = DTYPES[name]
    shape = [3, dtype.lanes] if dtype.lanes > 1 else [3]
    [(_, found)] = safetensors.deserialize(
        safetensors_file(dtype.storage, shape, 3 * dtype.itemsize)
    )
    assert (found["dtype"], found["shape"]) == (dtype.storage, shape)
    with pytest.raises(safetensors.SafetensorError):
        safetensors.deserialize(safetensors_file(dtype.storage, shape, 3 * dtype.itemsize + 1))
