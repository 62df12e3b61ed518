from __future__ import annotations

import json
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file, save_file

from ckpt.errors import IntegrityError, UnsupportedValue
from ckpt.exchange.inert.safetensors_reader import read_file
from tests.exchange.states import same

FLOATS = (
    torch.float64,
    torch.float32,
    torch.float16,
    torch.bfloat16,
    torch.float8_e4m3fn,
    torch.float8_e5m2,
)
INTEGERS = (
    torch.int64,
    torch.int32,
    torch.int16,
    torch.int8,
    torch.uint8,
    torch.uint16,
    torch.uint32,
    torch.bool,
)


def written(path: Path, header: object, data: bytes = b"", length: int | None = None) -> str:
    text = header if isinstance(header, bytes) else json.dumps(header).encode()
    path.write_bytes((len(text) if length is None else length).to_bytes(8, "little") + text + data)
    return str(path)


def test_it_reads_what_the_library_writes(tmp_path: Path) -> None:
    path = str(tmp_path / "x.safetensors")
    tensors = {
        str(dtype): (torch.arange(15).reshape(3, 5) % 7).to(dtype) for dtype in FLOATS + INTEGERS
    }
    tensors |= {
        "scalar": torch.tensor(2.5),
        "none": torch.empty(0, 3),
        "complex": torch.randn(4).to(torch.complex64),
    }
    save_file(tensors, path, metadata={"by": "the library"})
    found, metadata = read_file(path)
    assert same(found, {name: tensors[name] for name in found})
    assert same(found, {name: load_file(path)[name] for name in found})
    assert found.keys() == tensors.keys()
    assert metadata == {"by": "the library"}


def test_a_tensor_need_not_be_aligned(tmp_path: Path) -> None:
    entry = {"dtype": "F32", "shape": [3], "data_offsets": [0, 12]}
    text = json.dumps({"w": entry}).encode()
    text += b" " * (1 - len(text) % 2)  # so that the data begins at an odd place
    path = written(tmp_path / "x", text, torch.arange(3.0).numpy().tobytes())
    assert same(read_file(path)[0]["w"], torch.arange(3.0))


@pytest.mark.parametrize(
    ("header", "data", "length"),
    [
        (b"", b"", 1 << 60),
        (b"{", b"", None),
        ([], b"", None),
        ({"w": {"dtype": "F32", "shape": [0, 1 << 70], "data_offsets": [0, 0]}}, b"", None),
        ({"w": 1}, b"", None),
        ({"w": {"dtype": "F32", "shape": [3], "data_offsets": [0, 12]}}, bytes(11), None),
        ({"w": {"dtype": "F32", "shape": [3], "data_offsets": [0, 12]}}, bytes(13), None),
        ({"w": {"dtype": "F32", "shape": [2], "data_offsets": [0, 12]}}, bytes(12), None),
        ({"w": {"dtype": "F32", "shape": [-1, -3], "data_offsets": [0, 12]}}, bytes(12), None),
        ({"w": {"dtype": "F32", "shape": [3], "data_offsets": [4, 16]}}, bytes(16), None),
        ({"w": {"dtype": "F32", "shape": [3], "data_offsets": [0, "x"]}}, bytes(12), None),
        (
            {name: {"dtype": "F32", "shape": [3], "data_offsets": [0, 12]} for name in "ab"},
            bytes(12),
            None,
        ),
    ],
)
def test_what_is_damaged_is_told(
    tmp_path: Path, header: object, data: bytes, length: int | None
) -> None:
    path = written(tmp_path / "x", header, data, length)
    with pytest.raises(IntegrityError, match="not a whole safetensors file"):
        read_file(path)


def test_a_type_that_torch_has_not_is_told(tmp_path: Path) -> None:
    path = written(
        tmp_path / "x", {"w": {"dtype": "F6_E2M3", "shape": [4], "data_offsets": [0, 3]}}, bytes(3)
    )
    with pytest.raises(UnsupportedValue, match="F6_E2M3"):
        read_file(path)


def test_a_header_that_is_too_long_is_named(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("ckpt.exchange.inert.safetensors_reader._MOST_HEADER_BYTES", 10)
    path = written(tmp_path / "x", {"w": {"dtype": "F32", "shape": [0], "data_offsets": [0, 0]}})
    with pytest.raises(IntegrityError, match="its header has more than 10 bytes"):
        read_file(path)
