"""Values in files of ``torch.save`` that are read without torch's unpickler."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch

from ckpt.exchange.inert.inert_torch import read_file

DTYPES = (
    torch.uint8, torch.int8, torch.int16, torch.int32, torch.int64, torch.bool,
    torch.float16, torch.bfloat16, torch.float32, torch.float64, torch.complex64, torch.complex128,
)  # fmt: skip


@pytest.mark.parametrize("dtype", DTYPES)
def test_a_tensor_is_read_as_torch_reads_it(tmp_path: Path, dtype: torch.dtype) -> None:
    whole = torch.arange(-12, 12).to(dtype).reshape(4, 6)
    torch.save({"whole": whole, "view": whole[1:, ::2].T, "none": whole[:0]}, tmp_path / "a.pt")
    found = read_file(str(tmp_path / "a.pt"))
    for name, tensor in torch.load(tmp_path / "a.pt", weights_only=True).items():
        assert torch.equal(found[name], tensor)
        assert (found[name].dtype, found[name].stride()) == (tensor.dtype, tensor.stride())


def test_a_tensor_that_is_still_to_be_conjugated_or_negated_has_its_value(tmp_path: Path) -> None:
    tensor = torch.randn(5, dtype=torch.complex64)
    marked = {"conj": tensor.conj(), "neg": tensor.clone().conj().imag, "plain": tensor}
    assert (marked["conj"].is_conj(), marked["neg"].is_neg()) == (True, True)
    torch.save(marked, tmp_path / "a.pt")
    found = read_file(str(tmp_path / "a.pt"))
    assert all(torch.equal(found[name], tensor) for name, tensor in marked.items())
