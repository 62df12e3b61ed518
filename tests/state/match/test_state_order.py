"""Tensors that a restore makes have their dimensions in memory as they were saved.

The last bits of a product depend on the strides of its factors, so an optimizer whose matrices come
from ``eigh`` or ``qr``, which are column-major, would take other steps otherwise.
"""

from __future__ import annotations

import copy
from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import nn
from torch.distributed.tensor import DTensor, Replicate, Shard, distribute_tensor

from tests.kit.examples import examples
from tests.state.ranks import mesh_of, rank_of
from tests.state.saving import assert_same, manifest_of, restored, saved
from tests.state.worlds import restore, save_ranks


class Turning(torch.optim.Optimizer):
    """Rotates gradients as Shampoo and SOAP do, with matrices that are column-major."""

    def __init__(self, parameters: Any, lr: float = 0.05) -> None:
        super().__init__(parameters, {"lr": lr})

    @torch.no_grad()
    def step(self, closure: Any = None) -> None:  # type: ignore[override]
        for group in self.param_groups:
            for parameter in group["params"]:
                state, grad = self.state[parameter], parameter.grad
                if not state:
                    state["sums"] = [torch.eye(n) for n in grad.shape]
                    state["turns"] = [torch.linalg.eigh(each)[1] for each in state["sums"]]
                    state["moment"] = torch.zeros_like(grad).t().clone().t()
                for dim, each in enumerate(state["sums"]):
                    flat = grad.transpose(0, dim).flatten(1)
                    each.add_(flat @ flat.t())
                state["turns"] = [
                    torch.linalg.qr(each @ turn)[0]
                    for each, turn in zip(state["sums"], state["turns"], strict=True)
                ]
                state["last"] = state["turns"][0]
                one, two = state["turns"]
                state["moment"].lerp_(one.t() @ grad @ two, 0.1)
                parameter.add_(one @ state["moment"] @ two.t(), alpha=-group["lr"])


def job(seed: int) -> dict[str, Any]:
    torch.manual_seed(seed)
    model = nn.Sequential(nn.Linear(24, 17, bias=False), nn.Tanh(), nn.Linear(17, 5, bias=False))
    return {"model": model, "optimizer": Turning(model.parameters())}


def run(state: dict[str, Any], first: int, end: int) -> list[float]:
    losses: list[float] = []
    for index in range(first, end):
        x = torch.randn(16, 24, generator=torch.Generator().manual_seed(index))
        loss = state["model"](x).pow(2).mean()
        state["optimizer"].zero_grad()
        loss.backward()
        state["optimizer"].step()
        losses.append(loss.item())
    return losses


def strides(value: Any) -> Any:
    if isinstance(value, torch.Tensor):
        return value.stride()
    if isinstance(value, dict):
        return {key: strides(item) for key, item in value.items()}
    return [strides(item) for item in value] if isinstance(value, list) else None


def strides_of(state: dict[str, Any]) -> Any:
    return [strides(state["optimizer"].state[each]) for each in state["model"].parameters()]


@pytest.mark.parametrize("steps_before", [0, 3], ids=["fresh", "rollback"])
def test_an_optimizer_with_column_major_matrices_goes_on_bit_for_bit(steps_before: int) -> None:
    state, target = job(0), job(1)
    run(state, 0, 5)
    root, before = saved(state), strides_of(state)
    assert (1, 17) in before[0]["turns"]
    run(target, 0, steps_before)
    restored(root, target)
    assert strides_of(target) == before
    assert run(target, 5, 40) == run(state, 5, 40)


def test_a_rollback_into_the_same_objects_goes_on_bit_for_bit() -> None:
    state = job(0)
    run(state, 0, 5)
    root, before = saved(state), strides_of(state)
    expected = run(state, 5, 40)
    for values in state["optimizer"].state.values():
        values["moment"] = values["moment"].contiguous()
    restored(root, state)
    assert strides_of(state) == before
    assert run(state, 5, 40) == expected


@st.composite
def dense(draw: st.DrawFn) -> torch.Tensor:
    shape = draw(st.lists(st.integers(1, 4), max_size=4))
    turned = draw(st.permutations(range(len(shape))))
    dtype = draw(st.sampled_from([torch.float32, torch.bfloat16, torch.int64, torch.bool]))
    made = torch.randn(shape).to(dtype).permute(turned)
    return made if draw(st.booleans()) else torch.nn.Parameter(made, requires_grad=False)


@settings(max_examples=examples(60))
@given(dense(), st.lists(dense(), max_size=2), st.booleans())
def test_any_dense_state_keeps_its_strides(
    value: torch.Tensor, items: list[torch.Tensor], stepped: bool
) -> None:
    model = nn.Linear(3, 3)
    optimizer = torch.optim.SGD(model.parameters(), 0.1)
    optimizer.state[model.weight].update({"x": value, "in": {"list": items}})
    target: dict[str, Any] = copy.deepcopy({"model": model, "optimizer": optimizer})
    if stepped:
        held = target["optimizer"].state[target["model"].weight]
        held["x"] = torch.zeros(value.shape, dtype=value.dtype)
    else:
        target["optimizer"].state.clear()
    restored(saved({"model": model, "optimizer": optimizer}), target)
    found = target["optimizer"].state[target["model"].weight]
    for one, two in [(value, found["x"]), *zip(items, found["in"]["list"], strict=True)]:
        assert_same(two, one.detach())
        assert two.stride() == one.stride() or one.numel() < 2


def test_a_tensor_of_an_object_s_state_keeps_its_strides() -> None:
    class Thing:
        def __init__(self, value: Any) -> None:
            self.value = value

        def state_dict(self) -> dict[str, Any]:
            return {"value": self.value}

        def load_state_dict(self, state: dict[str, Any]) -> None:
            self.value = state["value"]

    target: dict[str, Any] = {"thing": Thing(None), "plain": None}
    value = torch.randn(4, 3).t()
    restored(saved({"thing": Thing(value), "plain": value.clone()}), target)
    assert target["thing"].value.stride() == target["plain"].stride() == (1, 3)


@pytest.mark.parametrize("stepped", [False, True])
def test_a_moment_gets_the_order_that_its_parameter_has_here(stepped: bool) -> None:
    """A model may become channels_last between two jobs, and fused steps need one order."""

    def build(memory_format: torch.memory_format, steps: int) -> dict[str, Any]:
        model = nn.Conv2d(3, 4, 2).to(memory_format=memory_format)  # type: ignore[call-overload]
        optimizer = torch.optim.AdamW(model.parameters(), fused=True)
        for _ in range(steps):
            model(torch.ones(1, 3, 4, 4)).sum().backward()
            optimizer.step()
        return {"model": model, "optimizer": optimizer}

    formats = torch.contiguous_format, torch.channels_last
    for one, two in (formats, formats[::-1]):
        target = build(two, steps=int(stepped))
        weight = target["model"].weight
        kept = target["optimizer"].state[weight].get("exp_avg")
        restored(saved(build(one, steps=2)), target)
        moment = target["optimizer"].state[weight]["exp_avg"]
        assert moment.stride() == weight.stride()
        assert kept is None or moment is kept
        target["optimizer"].step()


def test_a_checkpoint_names_the_order_of_a_tensor_that_is_not_row_major() -> None:
    state = {"a": torch.zeros(2, 3), "b": torch.zeros(2, 3).t(), "c": torch.zeros(1, 3).t()}
    orders = {tensor.name: tensor.order for tensor in manifest_of(saved(state)).tensors}
    assert orders == {"a": (), "b": (1, 0), "c": (1, 0)}


@pytest.mark.parametrize("ranks", [1, 2, 3])
@pytest.mark.parametrize("place", [Replicate(), Shard(0), Shard(1)])
@pytest.mark.parametrize("stepped", [False, True])
def test_column_major_state_is_resharded(ranks: int, place: Any, stepped: bool) -> None:
    whole = torch.arange(30.0).view(5, 6)

    def state(placed: Any, world: int, value: torch.Tensor | None) -> dict[str, Any]:
        mesh = mesh_of([world])
        model = nn.Linear(6, 5, bias=False)
        weight = distribute_tensor(whole.clone(), mesh, [placed], src_data_rank=None)
        model.weight = nn.Parameter(weight)
        optimizer = torch.optim.SGD(model.parameters(), 0.1)
        if value is not None:
            made = distribute_tensor(value.clone(), mesh, [placed], src_data_rank=None)
            optimizer.state[model.weight]["m"] = DTensor.from_local(
                made.to_local().t().contiguous().t(),
                mesh,
                [placed],
                run_check=False,
                shape=whole.shape,
                stride=whole.stride(),
            )
        return {"model": model, "optimizer": optimizer}

    images, manifest = save_ranks(2, lambda rank: state(Shard(0), 2, whole * 2))
    for rank in range(ranks):
        with rank_of(rank, ranks):
            target = state(place, ranks, whole * 0 if stepped else None)
            restore(target, images, manifest, rank, ranks)
            found = target["optimizer"].state[target["model"].weight]["m"]
            expected = distribute_tensor(
                whole * 2, found.device_mesh, found.placements, src_data_rank=None
            )
            assert found.placements == (place,)
            local = found.to_local()
            assert torch.equal(local, expected.to_local())
            assert local.t().is_contiguous()
