"""Flat partitions: for all sizes, the ranks' parts of a parameter are the whole of it, once."""

from __future__ import annotations

import math

import torch
from hypothesis import given
from hypothesis import strategies as st

from ckpt import LocalShards
from ckpt.integrations.deepspeed.zero_layout import Span, span_of_rank, span_within

shapes = st.lists(st.lists(st.integers(1, 5), max_size=3).map(tuple), min_size=1, max_size=6)
worlds = st.integers(1, 5)


def view(shape: tuple[int, ...], span: Span, flat: torch.Tensor) -> LocalShards:
    return LocalShards.of_range(shape, span.start, flat[span.offset : span.offset + span.length])


def put_together(shape: tuple[int, ...], parts: list[LocalShards]) -> torch.Tensor:
    whole = torch.full(shape, -1.0)
    for part in parts:
        for box, memory in zip(part.boxes, part.tensors, strict=True):
            assert (whole[box.slices()] == -1).all(), "held twice"
            whole[box.slices()] = memory
    return whole


@given(shapes, worlds, st.integers(1, 4))
def test_a_group_cut_into_equal_partitions(
    all_shapes: list[tuple[int, ...]], world: int, alignment: int
) -> None:
    numels = [math.prod(shape) for shape in all_shapes]
    begins = [sum(numels[:index]) for index in range(len(numels))]
    size = -(-sum(numels) // (world * alignment)) * alignment
    whole = torch.arange(float(size * world))  # padded at its end
    partitions = whole.split(size)
    for shape, begin, numel in zip(all_shapes, begins, numels, strict=True):
        parts = [
            view(shape, span_within(begin, numel, rank * size, size), partitions[rank])
            for rank in range(world)
        ]
        assert torch.equal(put_together(shape, parts), whole[begin : begin + numel].view(shape))


@given(shapes, worlds)
def test_parameters_cut_one_by_one(all_shapes: list[tuple[int, ...]], world: int) -> None:
    values = [torch.arange(float(math.prod(shape))).view(shape) for shape in all_shapes]
    sizes = [-(-value.numel() // world) for value in values]
    flats: list[torch.Tensor] = []
    for rank in range(world):
        padded = [
            torch.nn.functional.pad(value.reshape(-1), (0, world * size - value.numel()), value=-7)
            for value, size in zip(values, sizes, strict=True)
        ]
        flats.append(
            torch.cat(
                [p[rank * size : (rank + 1) * size] for p, size in zip(padded, sizes, strict=True)]
            )
        )
    for index, (shape, value) in enumerate(zip(all_shapes, values, strict=True)):
        at = sum(sizes[:index])
        parts = [
            view(shape, span_of_rank(value.numel(), rank, sizes[index], at), flats[rank])
            for rank in range(world)
        ]
        assert torch.equal(put_together(shape, parts), value)
