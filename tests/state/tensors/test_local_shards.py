"""Parts of a tensor, each in a memory of its own.

They are saved as the tensor, and filled from any other layout of it.
"""

from __future__ import annotations

import random
from collections.abc import Sequence

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from ckpt import CheckpointManager, LocalShards, PerRank
from ckpt.errors import (
    ConfigError,
    RestoreError,
    ShapeMismatch,
    TensorChanged,
    TensorIncomplete,
    UnsupportedValue,
)
from ckpt.model.box import Box
from ckpt.model.values import LARGE
from ckpt.staging.snapshot import Snapshot
from ckpt.state.walk.collect import collect
from ckpt.state.walk.last_walk import LastWalk
from ckpt.state.walk.plan_cache import PlanCache
from tests.kit.examples import examples
from tests.model.boxes import partition, solid_shapes
from tests.state.saving import assert_same, new_root, restored, round_trip, saved


def numbered(shape: Sequence[int]) -> torch.Tensor:
    return torch.arange(float(torch.Size(shape).numel())).reshape(tuple(shape))


def cut(whole: torch.Tensor, boxes: Sequence[Box], *, strided: bool = False) -> LocalShards:
    """Put each box in memory of its own, and every second one in a column of something larger."""
    shards: list[tuple[Sequence[int], torch.Tensor]] = []
    for index, box in enumerate(boxes):
        part = whole[box.slices()].clone()
        if strided and index % 2 and part.ndim:
            wide = torch.zeros(*part.shape, 3)
            wide[..., 1] = part
            part = wide[..., 1]
        shards.append((box.offsets, part))
    return LocalShards(whole.shape, shards)


def whole_of(shards: LocalShards) -> torch.Tensor:
    made = torch.full(shards.shape, -1.0)
    for box, tensor in zip(shards.boxes, shards.tensors, strict=True):
        made[box.slices()] = tensor
    return made


@settings(max_examples=examples(40))
@given(solid_shapes, st.integers(1, 6), st.integers(1, 6), st.randoms(use_true_random=False))
def test_any_tiling_is_restored_into_any_other(
    shape: tuple[int, ...], saved_in: int, wanted_in: int, rng: random.Random
) -> None:
    whole = numbered(shape)
    target = cut(torch.full(shape, -1.0), partition(shape, wanted_in, rng), strided=True)
    plain = torch.full(shape, -1.0)
    root = saved(
        {
            "tiles": cut(whole, partition(shape, saved_in, rng), strided=True),
            "below": {"plain": whole},
        }
    )
    restored(root, {"tiles": target, "below": {"plain": plain}})
    assert torch.equal(whole_of(target), whole)
    restored(
        root, {"tiles": plain.zero_(), "below": {"plain": cut(plain, partition(shape, 3, rng))}}
    )
    assert torch.equal(plain, whole)


@given(solid_shapes, st.integers(1, 6), st.data())
@settings(max_examples=examples(40))
def test_ranges_of_the_flat_tensor_are_its_parts(
    shape: tuple[int, ...], count: int, data: st.DataObject
) -> None:
    whole = numbered(shape)
    ends = sorted(
        data.draw(st.lists(st.integers(0, whole.numel()), min_size=count, max_size=count))
    )
    flat = whole.reshape(-1)
    ranges = {
        f"{start}": LocalShards.of_range(shape, start, flat[start:stop].clone())
        for start, stop in zip([0, *ends], [*ends, whole.numel()], strict=True)
    }
    shards = [
        part for each in ranges.values() for part in zip(each.boxes, each.tensors, strict=True)
    ]
    state = {"flat": LocalShards(shape, [(box.offsets, tensor) for box, tensor in shards])}
    assert torch.equal(whole_of(state["flat"]), whole)
    assert_same(round_trip(state, {"flat": torch.zeros(shape)}), {"flat": whole})


def test_one_that_holds_nothing_is_left_to_others() -> None:
    nothing = LocalShards((4, 3), [], dtype=torch.float32)
    restored(saved({"x": numbered((4, 3))}), {"x": nothing})
    with pytest.raises(TensorIncomplete, match="12 of 12 elements are in no box"):
        saved({"x": nothing})
    with pytest.raises(ConfigError, match="say dtype="):
        LocalShards((4, 3), [])


def test_another_shape_is_refused_and_nothing_is_changed() -> None:
    target = cut(torch.zeros(4, 4), [Box((0, 0), (4, 4))])
    with pytest.raises(ShapeMismatch, match="x"):
        restored(saved({"x": numbered((4, 3))}), {"x": target})
    assert not target.tensors[0].any()


def test_two_names_cannot_fill_the_same_parts() -> None:
    root = saved({"x": numbered((4,)), "y": numbered((4,)) + 1})
    memory = torch.zeros(4)
    target = {name: LocalShards((4,), [((0,), memory[:2]), ((2,), memory[2:])]) for name in "xy"}
    with pytest.raises(RestoreError, match="share their memory"):
        restored(root, target)


def test_parts_that_cannot_be_are_refused() -> None:
    with pytest.raises(ConfigError, match="not inside the shape"):
        LocalShards((4, 3), [((2, 0), torch.zeros(3, 3))])
    with pytest.raises(ConfigError, match="as many dimensions"):
        LocalShards((4, 3), [((0,), torch.zeros(3))])
    with pytest.raises(ConfigError, match=r"torch.float16 and torch.float32"):
        LocalShards((4,), [((0,), torch.zeros(2)), ((2,), torch.zeros(2, dtype=torch.float16))])


class Stateful:
    def state_dict(self) -> dict[str, object]:
        return {"x": LocalShards((2,), [((0,), torch.zeros(2))])}

    def load_state_dict(self, state: dict[str, object]) -> None:
        raise AssertionError


def test_where_it_would_not_be_found_again_it_is_refused() -> None:
    with pytest.raises(UnsupportedValue, match="LocalShards in a state_dict"):
        collect({"o": Stateful()}, rank=0)
    with pytest.raises(UnsupportedValue, match="LocalShards in a PerRank"):
        collect({"p": PerRank(LocalShards((2,), [((0,), torch.zeros(2))]))}, rank=0)


def test_the_same_parts_are_not_looked_at_twice_and_other_memory_is_seen() -> None:
    last_walk, cache = LastWalk(), PlanCache(0, 1 << 20)
    state: dict[str, object] = {
        f"p{i}": cut(numbered((4, 2)), [Box((0, 0), (4, 2))]) for i in range(LARGE)
    }
    walks = [collect({"all": state}, rank=0, last_walk=last_walk, lasting=True) for _ in range(2)]
    assert walks[0].parts[0] is walks[1].parts[0]
    plans = [cache.prepare(walk) for walk in walks]
    assert plans[0] is plans[1]
    state["p1"] = cut(numbered((4, 2)), [Box((0, 0), (2, 2)), Box((2, 0), (2, 2))])
    again = collect({"all": state}, rank=0, last_walk=last_walk, lasting=True)
    assert again.parts[0] is not walks[0].parts[0]
    assert cache.prepare(again) is not plans[0]


def owned() -> tuple[torch.optim.Optimizer, torch.Tensor, dict[str, object]]:
    flat = torch.nn.Parameter(torch.arange(20.0))
    flat.grad = torch.ones(20)
    optimizer = torch.optim.SGD([flat], lr=1.0)
    return optimizer, flat, {"w": LocalShards.of_range((5, 7), 3, flat, owner=optimizer)}


@pytest.mark.parametrize("others", [0, LARGE])
def test_the_owner_is_fenced(others: int) -> None:
    optimizer, _, state = owned()  # in a large dict it is compared with all others at once
    state |= {f"p{i}": torch.zeros(2) for i in range(others)}
    found = collect({"d": state}, rank=0, lasting=True)
    assert found.optimizers == [optimizer]
    assert len(found.parts) == 1
    assert [held.name for held in found.named_tensors if held.is_late] == ["d/w"]


def test_a_part_changed_behind_the_owner_s_back_fails_the_save(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    _, flat, state = owned()
    state["rest"] = LocalShards((2, 2), [((0, 0), torch.ones(2, 2))])
    with CheckpointManager(new_root()) as manager:
        copy_late = Snapshot.copy_late

        def changed_first(self: Snapshot) -> None:
            with torch.no_grad():
                flat.mul_(2)
            copy_late(self)

        monkeypatch.setattr(Snapshot, "copy_late", changed_first)
        pending = manager.save_async(state, 1)
        with pytest.raises(TensorChanged, match="'w'"):
            pending.result(30)


def test_replicas_without_this_rank_are_refused_with_the_name() -> None:
    state = {"x": LocalShards((4,), [((0,), torch.zeros(4))], replicas=(1, 2))}
    with pytest.raises(UnsupportedValue, match=r"x.*replicas lack this rank"):
        PlanCache(0, 1 << 20).prepare(collect(state, rank=0))


def elements(count: int, value: float) -> LocalShards:
    """Return a tensor in which every element is a part of its own."""
    return LocalShards((count,), [((i,), torch.full((1,), value)) for i in range(count)])


def test_a_tensor_in_more_parts_than_a_manifest_may_have_is_refused_by_the_save(tmp_path):
    memory = torch.zeros(1)
    shards = LocalShards((65_537,), [((i,), memory) for i in range(65_537)])
    with (
        CheckpointManager(tmp_path) as manager,
        pytest.raises(UnsupportedValue, match="65537 parts on one rank"),
    ):
        manager.save({"x": shards}, step=1)


def test_the_work_for_a_tensor_in_many_parts_does_not_grow_with_their_square(tmp_path, monkeypatch):
    compared, parts = [], 1000
    intersect = Box.intersect

    def count(box, other):
        compared.append(box)
        return intersect(box, other)

    monkeypatch.setattr(Box, "intersect", count)
    target = elements(parts, 0.0)
    with CheckpointManager(tmp_path) as manager:
        manager.save({"x": elements(parts, 1.0)}, step=1)
        manager.restore({"x": target})
    assert torch.cat(target.tensors).eq(1).all()
    assert len(compared) < 10 * parts
