from __future__ import annotations

import pytest
import torch

from ckpt.staging.copies import Copy

SOURCES = [
    torch.arange(24.0).reshape(4, 6).t(),
    torch.arange(120.0).reshape(4, 5, 6).permute(2, 0, 1),
    torch.arange(120.0).reshape(4, 5, 6).transpose(1, 2),
    torch.arange(24.0)[::2],
    torch.ones(1, 3).expand(5, 3),
    torch.arange(24.0).reshape(4, 6),
]


@pytest.mark.parametrize("source", SOURCES, ids=lambda source: f"{source.stride()}")
def test_each_part_of_a_source_has_its_elements(source: torch.Tensor) -> None:
    flat = source.reshape(-1)
    for start in range(flat.numel()):
        for stop in range(start + 1, flat.numel() + 1):
            part = slice(start, stop)
            copy = Copy("x", source, torch.empty(stop - start), source, part=part)
            assert torch.equal(copy.elements, flat[part]), part


def test_a_part_of_a_source_that_is_not_contiguous_costs_no_copy_of_the_source() -> None:
    source = torch.zeros(1, 1000, 2000).transpose(1, 2)
    copy = Copy("x", source, torch.empty(20), source, part=slice(990, 1010))
    assert copy.elements.untyped_storage().nbytes() == 2 * 1000 * source.itemsize
