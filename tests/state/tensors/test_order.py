"""The order of a tensor's dimensions in memory."""

from __future__ import annotations

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from ckpt.state.tensors.layout import empty_in_order, empty_like_in_order, order_of


@st.composite
def dense(draw: st.DrawFn) -> torch.Tensor:
    shape = draw(st.lists(st.integers(1, 4), max_size=5))
    turned = draw(st.permutations(range(len(shape))))
    return torch.empty(shape).permute(turned)


@given(dense())
def test_a_new_tensor_in_the_order_of_a_dense_one_has_its_strides(tensor: torch.Tensor) -> None:
    order = order_of(tensor)
    made = [
        empty_in_order(tensor.shape, order, dtype=torch.int8),
        empty_like_in_order(tensor, order, torch.int8),
    ]
    for each in made:
        assert each.shape == tensor.shape
        assert each.stride() == tensor.stride() or tensor.numel() < 2
        assert order_of(each) == order


@given(dense())
def test_a_row_major_tensor_has_no_order(tensor: torch.Tensor) -> None:
    assert order_of(torch.empty(tensor.shape)) == ()


@pytest.mark.parametrize(
    "tensor",
    [
        torch.zeros(()),
        torch.zeros(0, 3).t(),
        torch.zeros(3).expand(4, 3),
        torch.zeros(3, 4).to_sparse(),
    ],
    ids=["scalar", "empty", "expanded", "sparse"],
)
def test_a_tensor_without_an_order_has_none(tensor: torch.Tensor) -> None:
    assert order_of(tensor) == ()


def test_channels_last_is_an_order() -> None:
    tensor = torch.empty(8, 3, 1, 1).to(memory_format=torch.channels_last)
    assert order_of(tensor) == (0, 2, 3, 1)
