from __future__ import annotations

from collections.abc import Callable
from typing import Any

import numpy as np
import pytest
import torch

from ckpt import CheckpointManager
from ckpt.errors import RestoreError
from ckpt.state.match.targets import find_overlaps
from ckpt.state.tensors.local_shards import LocalShards
from tests.state.saving import assert_same, new_root, restored, round_trip, saved

TARGETS: dict[str, Callable[[torch.Tensor], dict[str, Any]]] = {
    "a matrix and its transpose": lambda base: {"a": base, "b": base.t()},
    "a part and the whole": lambda base: {"a": base[:2], "b": base},
    "two parts": lambda base: {"a": base[:2], "b": base[1:]},
    "another shape": lambda base: {"a": base, "b": base.view(-1)},
    "another dtype": lambda base: {"a": base, "b": base.view(torch.int32)},
    "an array": lambda base: {"a": base[:2], "b": base.numpy()[1:]},
    "the whole and two parts": lambda base: {"a": base, "b": base[:1], "c": base[2:]},
}


ALONE: dict[str, Callable[[torch.Tensor], torch.Tensor]] = {
    "expanded in chunks": lambda base: base[:1, :1024].expand(2048, 1024),
    "expanded in the middle": lambda base: base[:3, :4].view(3, 1, 4).expand(3, 5, 4),
    "windows": lambda base: base.view(-1).as_strided((2000, 1024), (1, 1)),
    "windows from the right": lambda base: base.view(-1).as_strided((5, 3, 4), (1, 20, 4)),
    "a view of another dtype": lambda base: base.view(torch.int32).view(-1).unfold(0, 4, 2),
    "conjugated": lambda base: torch.view_as_complex(base[:2, :2]).expand(6, 2).conj(),
}


def in_chunks(state: dict[str, Any]) -> str:
    """Save in chunks that are smaller than the tensors, and return the root."""
    root = new_root()
    with CheckpointManager(root, chunk_size=1 << 20) as manager:
        manager.save(state)
    return root


def blank(state: dict[str, Any]) -> dict[str, Any]:
    """Return values of the same kinds, each with memory of its own."""
    return {
        name: value.copy() if isinstance(value, np.ndarray) else value.clone()
        for name, value in state.items()
    }


@pytest.mark.parametrize("views", TARGETS.values(), ids=TARGETS)
def test_targets_that_share_memory_in_part_take_what_was_saved_of_such(
    views: Callable[[torch.Tensor], dict[str, Any]],
) -> None:
    source = views(torch.randn(3, 3))
    target = round_trip(blank(source), views(torch.zeros(3, 3)))
    assert_same(blank(target), blank(source))


@pytest.mark.parametrize("views", TARGETS.values(), ids=TARGETS)
def test_they_refuse_by_name_what_cannot_be_had_side_by_side(
    views: Callable[[torch.Tensor], dict[str, Any]],
) -> None:
    source = blank(views(torch.randn(3, 3)))
    source["a"] += 1
    with (
        CheckpointManager(saved(source)) as manager,
        pytest.raises(RestoreError, match=r"'\w' shares a part of its memory"),
    ):
        manager.restore(views(torch.zeros(3, 3)))


def test_columns_side_by_side_are_filled_though_their_memory_is_interleaved() -> None:
    base = torch.zeros(3, 4)
    source = {"a": torch.randn(3, 2), "b": torch.randn(3, 2)}
    round_trip(source, {"a": base[:, :2], "b": base[:, 2:]})
    assert_same(base, torch.cat([source["a"], source["b"]], dim=1))


def test_numbers_that_are_none_are_compared_by_their_bits() -> None:
    base = torch.zeros(3)
    source = {"a": torch.full((3,), torch.nan), "b": torch.full((2,), torch.nan)}
    assert_same(round_trip(source, {"a": base, "b": base[1:]})["a"], source["a"])


def test_neighbours_and_the_same_memory_are_read_in_place() -> None:
    base = torch.zeros(8)
    assert find_overlaps([base[:4], base[4:], base[:4], torch.zeros(0), torch.zeros(8)]) == []
    found = find_overlaps([base[6:], base[2:5], base, torch.zeros(8)])
    assert [index for index, _ in found] == [0, 1, 2]


@pytest.mark.parametrize("view", ALONE.values(), ids=ALONE)
def test_a_target_whose_elements_share_memory_takes_what_was_saved_of_such(
    view: Callable[[torch.Tensor], torch.Tensor],
) -> None:
    source = view(torch.randn(3, 1024)).clone()
    target = view(torch.zeros(3, 1024))
    also = target.view(target.shape)
    restored(in_chunks({"a": source, "b": source}), {"a": target, "b": also})
    assert_same(target.clone(), source)


@pytest.mark.parametrize("view", ALONE.values(), ids=ALONE)
def test_it_refuses_by_name_elements_that_differ(
    view: Callable[[torch.Tensor], torch.Tensor],
) -> None:
    target = view(torch.zeros(3, 1024))
    source = torch.arange(target.numel()).view(target.shape).to(target.dtype)
    with (
        CheckpointManager(in_chunks({"a": source})) as manager,
        pytest.raises(RestoreError, match="'a' has elements in the target that share"),
    ):
        manager.restore({"a": target})


def test_local_shards_whose_elements_share_memory_are_refused_before_anything_changes() -> None:
    other = torch.zeros(3)
    shards = LocalShards((4, 3), [((0, 0), torch.zeros(3).expand(4, 3))])
    with (
        CheckpointManager(saved({"b": torch.ones(3), "a": torch.ones(4, 3)})) as manager,
        pytest.raises(RestoreError, match="'a' has elements in the target that share"),
    ):
        manager.restore({"b": other, "a": shards})
    assert_same(other, torch.zeros(3))
