"""Tensor subclasses.

Those that share plain storage are tensors. Those whose elements are in other tensors, and whose
class does not say so, are refused by name (see ``test_wrappers`` for others).
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import nn
from torch.distributed._functional_collectives import AsyncCollectiveTensor
from torch.distributed.tensor import DTensor, Shard
from torch.testing._internal.two_tensor import TwoTensor

from ckpt import CheckpointManager, LocalShards
from ckpt.errors import UnsupportedValue
from ckpt.state.walk.collect import collect
from ckpt.state.walk.plan_cache import PlanCache
from tests.state.ranks import mesh_of, rank_of
from tests.state.saving import assert_same, bits, new_root, restored, round_trip, saved
from tests.state.worlds import save_ranks
from tests.state.wrapping import Dispatching

State = dict[str, Any]


class Dequantised(Dispatching):
    """A wrapper of integers and a scale, as quantisation libraries make them.

    Every operation sees floats.
    """

    @staticmethod
    def __new__(cls, data: torch.Tensor, scale: torch.Tensor) -> Dequantised:
        return torch.Tensor._make_wrapper_subclass(cls, data.shape, dtype=torch.float32)

    def __init__(self, data: torch.Tensor, scale: torch.Tensor) -> None:
        self.data_, self.scale = data, scale

    @classmethod
    def __torch_dispatch__(  # type: ignore[override]
        cls, func: Any, types: Any, args: Any = (), kwargs: Any = None
    ) -> Any:
        if func in (torch.ops.aten.detach.default, torch.ops.aten.view.default):
            return cls(args[0].data_, args[0].scale)
        seen = [each.data_ * each.scale if isinstance(each, cls) else each for each in args]
        return func(*seen, **(kwargs or {}))


class Flattened(torch.Tensor):
    """A class with a storage of its own, and a scale beside it that would be lost."""

    scale: torch.Tensor

    @staticmethod
    def __new__(cls, data: torch.Tensor, scale: torch.Tensor) -> Flattened:
        made = torch.Tensor._make_subclass(cls, data)
        made.scale = scale
        return made

    def __tensor_flatten__(self) -> tuple[list[str], None]:
        return ["scale"], None


class Trivial(torch.Tensor):
    """A subclass that changes nothing."""


class Watched(Dispatching):
    """A subclass where every operation passes through Python and leaves a plain tensor."""

    @staticmethod
    def __new__(cls, data: torch.Tensor) -> Watched:
        return torch.Tensor._make_subclass(cls, data)


def two() -> TwoTensor:
    return TwoTensor(torch.ones(4, 3), torch.zeros(4, 3))


def dequantised() -> Dequantised:
    return Dequantised(torch.ones(4, 3, dtype=torch.int8), torch.tensor(0.5))


def flattened() -> Flattened:
    return Flattened(torch.ones(4, 3), torch.tensor(0.5))


WRAPPERS: dict[str, Callable[[], torch.Tensor]] = {
    "dequantising": dequantised,
    "with a scale beside": flattened,
}


def in_a_parameter(tensor: torch.Tensor) -> nn.Module:
    model = nn.Linear(3, 4, bias=False)
    model.weight = nn.Parameter(tensor, requires_grad=False)
    return model


def in_an_optimizer(tensor: torch.Tensor) -> State:
    model = nn.Linear(3, 4, bias=False)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9)
    optimizer.state[model.weight]["momentum_buffer"] = tensor
    return {"model": model, "optimizer": optimizer}


PLACES: dict[str, tuple[str, Callable[[torch.Tensor], State]]] = {
    "alone": ("t", lambda tensor: {"t": tensor}),
    "in a dict": ("d/t", lambda tensor: {"d": {"t": tensor}}),
    "a parameter": ("model/weight", lambda tensor: {"model": in_a_parameter(tensor)}),
    "optimizer state": ("optimizer/model/weight/momentum_buffer", in_an_optimizer),
    "a part of LocalShards": ("t", lambda tensor: {"t": LocalShards((4, 3), [((0, 0), tensor)])}),
}


def plain() -> torch.Tensor:
    return torch.full((4, 3), 2.0)


@pytest.mark.parametrize("place", PLACES)
@pytest.mark.parametrize("make", WRAPPERS.values(), ids=WRAPPERS)
def test_a_tensor_of_several_tensors_is_refused_by_name_when_it_is_saved(
    place: str, make: Callable[[], torch.Tensor]
) -> None:
    name, put = PLACES[place]
    with CheckpointManager(new_root()) as manager:
        with pytest.raises(UnsupportedValue) as refused:
            manager.save_async(put(make()), 0)
        assert refused.value.name == name
        assert manager.steps() == []
        manager.save(put(plain()), 0)  # the same place holds a plain tensor


@pytest.mark.parametrize("place", PLACES)
@pytest.mark.parametrize("make", WRAPPERS.values(), ids=WRAPPERS)
def test_it_is_refused_by_name_as_the_target_of_a_restore(
    place: str, make: Callable[[], torch.Tensor]
) -> None:
    name, put = PLACES[place]
    root = saved(put(plain()))
    with pytest.raises(UnsupportedValue) as refused:
        restored(root, put(make()))
    assert refused.value.name == name


def test_the_error_names_the_tensors_that_it_holds() -> None:
    part = LocalShards((4, 3), [((0, 0), two())])
    with pytest.raises(UnsupportedValue, match=r"TwoTensor, .*the tensors that it holds \(a, b\)"):
        saved({"t": part})


@pytest.mark.parametrize("make", WRAPPERS.values(), ids=WRAPPERS)
def test_it_is_refused_as_the_local_tensor_of_a_dtensor(make: Callable[[], torch.Tensor]) -> None:
    with rank_of(0, 2):
        held = DTensor.from_local(make(), mesh_of([2]), [Shard(0)], run_check=False)
        assert type(held._local_tensor) is not torch.Tensor
        with pytest.raises(UnsupportedValue) as refused:
            PlanCache(0, 64).prepare(collect({"w": held}, rank=0))
    assert refused.value.name == "w"


def test_it_is_refused_where_a_plain_tensor_was_at_the_save_before() -> None:
    state: State = {"t": plain()}
    with CheckpointManager(new_root()) as manager:
        manager.save(state, 0)
        state["t"] = dequantised()
        with pytest.raises(UnsupportedValue):
            manager.save(state, 1)
        state["t"] = plain()
        manager.save(state, 2)
        assert manager.steps() == [0, 2]


def test_two_of_them_in_one_target_are_not_taken_for_one_memory() -> None:
    """Both have the address 0, which identifies nothing."""
    root = saved({"a": plain(), "b": plain()})
    with pytest.raises(UnsupportedValue, match="'a' is a"):
        restored(root, {"a": dequantised(), "b": dequantised()})


def test_a_tensor_whose_storage_was_freed_is_refused_by_name() -> None:
    state = {"a": plain(), "b": plain()}
    state["b"].untyped_storage().resize_(0)
    with pytest.raises(UnsupportedValue, match="'b' is a tensor without storage"):
        saved(state)
    with pytest.raises(UnsupportedValue, match="'b' is a tensor without storage"):
        restored(saved({"a": plain(), "b": plain()}), state)


@pytest.mark.parametrize("nbytes", [0, 16])
def test_storage_that_was_freed_since_the_last_save_is_refused_by_name(nbytes: int) -> None:
    """The plan is that of the previous save, since shape and dtype are the same."""
    model = nn.Linear(3, 4)
    with CheckpointManager(new_root()) as manager:
        for step in range(2):
            manager.save({"model": model}, step)
        model.weight.untyped_storage().resize_(nbytes)
        with pytest.raises(UnsupportedValue, match="'model/weight' is a tensor without storage"):
            manager.save_async({"model": model}, 2)
        assert manager.steps() == [0, 1]


def test_a_lazy_parameter_without_a_shape_is_refused_by_name() -> None:
    with pytest.raises(
        UnsupportedValue, match="'model/weight' is a parameter that is not initialized"
    ):
        saved({"model": nn.LazyLinear(4)})


def test_a_lazy_module_gets_the_shapes_that_were_saved_as_in_torch() -> None:
    plain = nn.Linear(3, 4)
    lazy = nn.LazyLinear(4)
    restored(saved({"model": plain}), {"model": lazy})
    assert torch.equal(lazy.weight, plain.weight)
    assert torch.equal(lazy(torch.ones(2, 3)), plain(torch.ones(2, 3)))


@pytest.mark.parametrize("names", [("model", "optimizer"), ("optimizer", "model")])
def test_an_optimizer_over_a_lazy_module_gets_its_state_before_the_first_forward_pass(
    names: tuple[str, str],
) -> None:
    def trained(state: State) -> State:
        for _ in range(2):
            state["optimizer"].zero_grad()
            (state["model"](torch.arange(12.0).reshape(4, 3)) ** 2).mean().backward()
            state["optimizer"].step()
        return state

    def new() -> State:
        model = nn.Sequential(nn.LazyLinear(5), nn.LazyBatchNorm1d(), nn.LazyLinear(2))
        parts = {"model": model, "optimizer": torch.optim.Adam(model.parameters(), lr=0.1)}
        return {name: parts[name] for name in names}

    whole = new()
    whole["model"](torch.ones(4, 3))
    root = saved(trained(whole))
    resumed = new()
    restored(root, resumed)
    for part in names:
        assert_same(resumed[part].state_dict(), whole[part].state_dict())
        assert_same(trained(resumed)[part].state_dict(), trained(whole)[part].state_dict())


SHARING: dict[str, Callable[[torch.Tensor], torch.Tensor]] = {
    "parameter": nn.Parameter,
    "buffer": nn.Buffer,
    "as_subclass": lambda tensor: tensor.as_subclass(Trivial),
    "_make_subclass": lambda tensor: torch.Tensor._make_subclass(Trivial, tensor),
    "parameter of a subclass": lambda tensor: nn.Parameter(tensor.as_subclass(Trivial)),
    "with operations in Python": Watched,
    "a collective under way": AsyncCollectiveTensor,
}


@pytest.mark.parametrize("make", SHARING.values(), ids=SHARING)
def test_a_subclass_that_shares_plain_storage_is_a_tensor(
    make: Callable[[torch.Tensor], torch.Tensor],
) -> None:
    memory = torch.zeros(4, 3)
    round_trip({"t": make(torch.arange(12.0).reshape(4, 3))}, {"t": make(memory)})
    assert bits(memory) == bits(torch.arange(12.0))


@pytest.mark.parametrize(
    "wrap", [lambda tensor: tensor.as_subclass(Trivial), AsyncCollectiveTensor]
)
def test_such_a_subclass_is_a_tensor_inside_a_dtensor_too(
    wrap: Callable[[torch.Tensor], torch.Tensor],
) -> None:
    def sharded(rank: int) -> State:
        local = wrap(torch.full((2, 3), float(rank)))
        return {"w": DTensor.from_local(local, mesh_of([2]), [Shard(0)], run_check=False)}

    images, manifest = save_ranks(2, sharded)
    assert {tensor.name: tensor.shape for tensor in manifest.tensors} == {"w": (4, 3)}
    assert bits(torch.full((2, 3), 1.0)) in images[1]


def test_an_empty_tensor_needs_no_storage() -> None:
    state = {"a": torch.empty(0, 3), "b": torch.empty(0)}
    assert_same(round_trip(state, {"a": torch.empty(0, 3), "b": torch.empty(0)}), state)
    with rank_of(0, 2):
        assert DTensor.from_local(
            torch.empty(0), mesh_of([2]), [Shard(0)], run_check=False
        ).shape == (0,)
