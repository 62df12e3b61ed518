"""DTensors whose local tensor is a wrapper: saved and filled as parts of larger inner tensors."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor import DTensor, Replicate, Shard
from torch.testing._internal.two_tensor import TwoTensor

from ckpt.errors import KindMismatch, ReplicasDiverged, TensorIncomplete, UnsupportedValue
from ckpt.state.walk.collect import collect
from ckpt.state.walk.last_walk import LastWalk
from ckpt.state.walk.plan_cache import PlanCache
from tests.state.ranks import mesh_of, rank_of
from tests.state.saving import bits
from tests.state.worlds import restore, save_ranks
from tests.state.wrapping import Blocks

State = dict[str, Any]
WHOLE = torch.randn(16, 6, generator=torch.Generator().manual_seed(3))


def cut(values: torch.Tensor, rank: int, world_size: int) -> State:
    """Return the part of ``values`` that FSDP2 gives to a rank, in blocks."""
    part = values.chunk(world_size)[rank]
    held = DTensor.from_local(
        Blocks.of(part),
        mesh_of([world_size]),
        [Shard(0)],
        run_check=False,
        shape=values.shape,
        stride=values.stride(),
    )
    return {"w": held}


def insides(value: Any) -> dict[str, bytes]:
    value = value._local_tensor if isinstance(value, DTensor) else value
    return {name: bits(getattr(value, name)) for name in ("codes", "scale", "table")}


@pytest.mark.parametrize("before", [1, 2, 4])
@pytest.mark.parametrize("after", [1, 2, 4])
def test_blocks_are_resharded_by_rows(before: int, after: int) -> None:
    images, manifest = save_ranks(before, lambda rank: cut(WHOLE, rank, before))
    assert {each.name: each.shape for each in manifest.tensors} == {
        "w/codes": (16, 6), "w/scale": (24,), "w/table": (4,)
    }  # fmt: skip
    for rank in range(after):
        with rank_of(rank, after):
            target = cut(torch.zeros(16, 6), rank, after)
            restore(target, images, manifest, rank, after)
            assert insides(target["w"]) == insides(cut(WHOLE, rank, after)["w"])


def test_a_sharded_wrapper_is_restored_into_a_whole_one_and_back() -> None:
    images, manifest = save_ranks(2, lambda rank: cut(WHOLE, rank, 2))
    target = {"w": Blocks.zeros((16, 6))}
    with rank_of(0, 1):
        restore(target, images, manifest, 0, 1)
    assert insides(target["w"]) == insides(Blocks.of(WHOLE))
    images, manifest = save_ranks(1, lambda _: {"w": Blocks.of(WHOLE)})
    for rank in range(2):
        with rank_of(rank, 2):
            part = cut(torch.zeros(16, 6), rank, 2)
            restore(part, images, manifest, rank, 2)
            assert insides(part["w"]) == insides(cut(WHOLE, rank, 2)["w"])


def bytes_written(ranks: int, state_of: Callable[[int], State]) -> Counter[str]:
    """Return the bytes that all ranks together write of each tensor."""
    written: Counter[str] = Counter()
    for rank in range(ranks):
        with rank_of(rank, ranks):
            plan = PlanCache(rank, 64).prepare(collect(state_of(rank), rank=rank)).plan
            for item in plan.items:
                written[plan.tensors[item.leaf].name] += item.nbytes
    return written


def test_replicated_wrappers_are_saved_once() -> None:
    def state(_: int) -> State:
        held = DTensor.from_local(Blocks.of(WHOLE), mesh_of([2]), [Replicate()], run_check=False)
        return {"w": held}

    assert bytes_written(2, state) == {"w/codes": 96, "w/scale": 96, "w/table": 16}
    images, manifest = save_ranks(2, state)
    assert {each.name: each.shape for each in manifest.tensors} == {
        "w/codes": (16, 6), "w/scale": (24,), "w/table": (4,)
    }  # fmt: skip
    target = {"w": Blocks.zeros((16, 6))}
    with rank_of(0, 1):
        restore(target, images, manifest, 0, 1)
    assert insides(target["w"]) == insides(Blocks.of(WHOLE))


def test_copies_and_parts_on_a_mesh_of_two_dimensions() -> None:
    def state(rank: int) -> State:
        part = WHOLE.chunk(2)[rank % 2]
        mesh = mesh_of([2, 2])
        held = DTensor.from_local(Blocks.of(part), mesh, [Replicate(), Shard(0)], run_check=False)
        return {"w": held}

    images, manifest = save_ranks(4, state)
    target = {"w": Blocks.zeros((16, 6))}
    with rank_of(0, 1):
        restore(target, images, manifest, 0, 1)
    assert insides(target["w"]) == insides(Blocks.of(WHOLE))


def on_one_of_two_dimensions(rank: int) -> State:
    """Put wrappers on the first dimension of a mesh, as a norm beside layers that are cut along
    both.

    A rank has the same part of them as its neighbour along the other dimension.
    """
    mesh, model = init_device_mesh("cpu", (2, 2), mesh_dim_names=("dp", "tp")), nn.Module()

    def blocks() -> torch.Tensor:
        part = Blocks.of(WHOLE.chunk(2)[rank // 2])
        shape: Any = {"shape": WHOLE.shape, "stride": WHOLE.stride()}
        return DTensor.from_local(part, mesh["dp"], [Shard(0)], run_check=False, **shape)

    both = [Shard(0), Shard(1)]
    model.layer = nn.Parameter(DTensor.from_local(torch.ones(2, 2), mesh, both, run_check=False))
    model.register_buffer("cut", blocks())
    model.register_buffer(
        "whole",
        DTensor.from_local(Blocks.of(WHOLE), mesh["dp"], [Replicate()], run_check=False),
    )
    model.norm = nn.Parameter(
        DTensor.from_local(torch.ones(8, 6), mesh["dp"], [Shard(0)], run_check=False)
    )
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9)
    optimizer.state[model.norm]["momentum_buffer"] = blocks()
    return {"model": model, "optimizer": optimizer}


def test_on_one_dimension_of_a_wider_mesh_each_byte_is_written_once() -> None:
    written = bytes_written(4, on_one_of_two_dimensions)
    for name in ("model/cut", "model/whole", "optimizer/model/norm/momentum_buffer"):
        inner = {part: written[f"{name}/{part}"] for part in ("codes", "scale", "table")}
        assert inner == {"codes": 96, "scale": 96, "table": 16}, name
    images, manifest = save_ranks(4, on_one_of_two_dimensions)
    with rank_of(3, 4):
        target = on_one_of_two_dimensions(3)
        target["model"].cut._local_tensor.codes.zero_()
        restore(target, images, manifest, 3, 4)
        assert insides(target["model"].cut) == insides(Blocks.of(WHOLE.chunk(2)[1]))


def test_what_is_whole_on_each_rank_must_be_equal() -> None:
    def state(rank: int) -> State:
        found = cut(WHOLE, rank, 2)
        found["w"]._local_tensor.table.fill_(float(rank))
        return found

    with pytest.raises(ReplicasDiverged, match="w/table"):
        save_ranks(2, state)


def test_parts_whose_rows_have_a_large_prime_are_cut_where_blocks_end() -> None:
    """Half of 34 rows is not a whole number of blocks, and neither is one row. Two rows are."""
    values = torch.randn(2 * 34, 6, generator=torch.Generator().manual_seed(5))
    images, manifest = save_ranks(2, lambda rank: cut(values, rank, 2))
    target = {"w": Blocks.zeros((68, 6))}
    with rank_of(0, 1):
        restore(target, images, manifest, 0, 1)
    assert insides(target["w"]) == insides(Blocks.of(values))


def test_blocks_that_do_not_divide_a_shard_are_refused_by_name() -> None:
    """Two rows have three blocks, so the class cannot cut one row off."""
    images, manifest = save_ranks(2, lambda rank: cut(WHOLE, rank, 2))
    with rank_of(0, 8):
        target = cut(WHOLE, 0, 8)
        with pytest.raises(UnsupportedValue, match="does not show by slices") as refused:
            restore(target, images, manifest, 0, 8)
    assert refused.value.name == "w"


def prepared(held: torch.Tensor, placements: Any, ranks: int = 2) -> None:
    with rank_of(0, ranks):
        tensor = DTensor.from_local(held, mesh_of([ranks]), placements, run_check=False)
        PlanCache(0, 64).prepare(collect({"w": tensor}, rank=0))


class Scaled(TwoTensor):
    """A wrapper that cannot be sliced."""

    @classmethod
    def __torch_dispatch__(  # type: ignore[override]
        cls, func: Any, types: Any, args: Any = (), kwargs: Any = None
    ) -> Any:
        if func is torch.ops.aten.slice.Tensor:
            raise NotImplementedError(f"{func}")
        return super().__torch_dispatch__(func, types, args, kwargs)


@pytest.mark.parametrize(
    ("held", "placements", "text"),
    [
        (Blocks.of(WHOLE), [Shard(1)], "is not cut by rows"),
        (Scaled(torch.ones(4, 3), torch.ones(4, 3)), [Shard(0)], "does not show by slices"),
        (Blocks.of(torch.ones(1, 8)), [Shard(0)], "does not show by slices"),
    ],
)
def test_one_that_cannot_be_resharded_is_refused_by_name(
    held: torch.Tensor, placements: Any, text: str
) -> None:
    with pytest.raises(UnsupportedValue, match=text) as refused:
        prepared(held, placements)
    assert refused.value.name == "w"


def test_two_tensors_are_both_cut() -> None:
    def state(rank: int) -> State:
        part = TwoTensor(torch.full((2, 3), float(rank)), torch.full((2, 3), 10.0 + rank))
        return {"w": DTensor.from_local(part, mesh_of([2]), [Shard(0)], run_check=False)}

    _, manifest = save_ranks(2, state)
    assert {each.name: each.shape for each in manifest.tensors} == {"w/a": (4, 3), "w/b": (4, 3)}


@pytest.mark.parametrize("quantised", [0, 1])
def test_a_tensor_that_only_some_ranks_have_quantised_is_refused_by_name(quantised: int) -> None:
    """torchao's state is refused in the same way if its blocks divide the parts of some
    ranks only.
    """

    def state(rank: int) -> State:
        found = cut(WHOLE, rank, 2)
        if rank != quantised:
            part = WHOLE.chunk(2)[rank].clone()
            shape: Any = {"shape": WHOLE.shape, "stride": WHOLE.stride()}
            mesh = mesh_of([2])
            found["w"] = DTensor.from_local(part, mesh, [Shard(0)], run_check=False, **shape)
        return found

    with pytest.raises(TensorIncomplete, match="'w"):
        save_ranks(2, state)


def test_another_class_on_another_number_of_ranks_is_an_error() -> None:
    images, manifest = save_ranks(2, lambda rank: cut(WHOLE, rank, 2))
    with rank_of(0, 1), pytest.raises(KindMismatch):
        restore({"w": torch.zeros(16, 6)}, images, manifest, 0, 1)


@pytest.mark.parametrize("kind", [tuple, list, torch.Size])
def test_a_block_size_that_equals_the_size_of_a_part_is_compared_as_it_is(kind: type) -> None:
    """The size of the tensor is a ``torch.Size`` too, which follows the number of ranks."""

    def state(rank: int, ranks: int, block: Any) -> State:
        found = cut(WHOLE, rank, ranks)
        found["w"]._local_tensor.signed = kind(block)
        return found

    images, manifest = save_ranks(2, lambda rank: state(rank, 2, (8, 6)))
    with rank_of(0, 1):
        with pytest.raises(KindMismatch):
            restore(state(0, 1, (16, 6)), images, manifest, 0, 1)
        target = state(0, 1, (8, 6))
        restore(target, images, manifest, 0, 1)
        assert insides(target["w"]) == insides(cut(WHOLE, 0, 1)["w"])


def test_a_part_replaced_around_the_same_tensors_makes_a_new_segment() -> None:
    model, last_walk = torch.nn.Module(), LastWalk()
    with rank_of(0, 2):
        held = cut(WHOLE, 0, 2)["w"]
        model.register_buffer("w", held)

        def segment() -> Any:
            return collect({"model": model}, rank=0, last_walk=last_walk).parts[0]

        first = segment()
        assert segment() is first
        part = held._local_tensor
        held._local_tensor = Blocks(part.codes, part.scale, part.table)
        assert segment() is not first
