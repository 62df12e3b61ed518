"""Values of optimizers share memory after a restore if and only if they did when they were saved.

So a restore fills a present tensor in place only if everything that has its memory is to have the
saved values, and makes another tensor otherwise.
"""

from __future__ import annotations

import copy
from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import nn
from torch.distributed.tensor import Replicate, Shard, distribute_tensor
from torch.optim import Optimizer

from ckpt import CheckpointManager
from ckpt.errors import EntryMissing
from tests.kit.examples import examples
from tests.state.ranks import mesh_of, rank_of
from tests.state.saving import manifest_of, new_root, restored, saved
from tests.state.worlds import restore, save_ranks


def job(*rates: Any, shared: bool = False) -> dict[str, Any]:
    """Return two layers, and an optimizer with a group for each."""
    model = nn.ModuleList([nn.Linear(2, 2), nn.Linear(2, 2)])
    one, two = rates if len(rates) == 2 else (rates[0], rates[0])
    groups: list[dict[str, Any]] = [
        {"params": model[0].parameters(), "lr": one},
        {"params": model[1].parameters(), "lr": two},
    ]
    return {"model": model, "optimizer": torch.optim.AdamW(groups)}


def rates_of(state: dict[str, Any], name: str = "optimizer") -> list[Any]:
    return [group["lr"] for group in state[name].param_groups]


def rate(value: float) -> torch.Tensor:
    return torch.tensor(value)


# -- parameter groups ------------------------------------------------------------------------------


def test_groups_that_share_a_rate_here_get_the_rates_that_they_were_saved_with() -> None:
    source, target = job(rate(0.5), rate(0.25)), job(rate(0.1))
    restored(saved(source), target)
    one, two = rates_of(target)
    assert (float(one), float(two)) == (0.5, 0.25)
    assert one is not two


def test_groups_that_shared_a_rate_share_one_again() -> None:
    source, target = job(rate(0.5)), job(rate(0.1), rate(0.2))
    first = rates_of(target)[0]
    restored(saved(source), target)
    one, two = rates_of(target)
    assert one is two is first
    assert float(one) == 0.5


def test_two_optimizers_that_share_a_rate_here_get_the_rates_that_they_were_saved_with() -> None:
    def build(one: torch.Tensor, two: torch.Tensor) -> dict[str, Any]:
        a, b = nn.Linear(2, 2), nn.Linear(2, 2)
        optimizers = [torch.optim.AdamW(m.parameters(), lr=lr) for m, lr in ((a, one), (b, two))]
        return {"a": a, "b": b, "optimizer": optimizers[0], "other": optimizers[1]}

    lr = rate(0.1)
    target = build(lr, lr)
    root = saved(build(rate(0.5), rate(0.25)))
    restored(root, target)
    assert (*rates_of(target), *rates_of(target, "other")) == (0.5, 0.25)
    target = build(lr, lr)
    restored(root, target, only=["a", "optimizer"])
    assert (*rates_of(target), *rates_of(target, "other")) == (0.5, lr)
    assert float(lr) == pytest.approx(0.1)


@pytest.mark.parametrize("shared", [False, True])
def test_rates_stay_the_same_objects_where_they_are_shared_as_saved(shared: bool) -> None:
    def build(*values: float) -> dict[str, Any]:
        return job(rate(values[0])) if shared else job(*map(rate, values))

    source, target = build(0.5, 0.25), build(0.1, 0.2)
    before = rates_of(target)
    restored(saved(source), target)
    assert list(map(id, rates_of(target))) == list(map(id, before))
    assert list(map(float, before)) == list(map(float, rates_of(source)))


@pytest.mark.parametrize(
    ("value", "held"),
    [
        (torch.tensor(0.123456789012, dtype=torch.float64), torch.tensor(0.1)),
        (torch.tensor(2.75), torch.tensor(0)),
        (torch.tensor([2.0]), torch.ones(3)),
        (torch.tensor([1.0, 2.0, 3.0]), torch.ones(1)),
        (torch.tensor([1.0, 2.0]), torch.ones(1).expand(2)),
        (torch.tensor([1.0, 2.0]), torch.ones(4)[::2]),
        (torch.tensor(2.0), nn.Parameter(torch.tensor(1.0))),
        (torch.tensor(2.0), 1.0),
    ],
    ids=["dtype", "integer", "shrunk", "grown", "expanded", "view", "parameter", "number"],
)
def test_a_setting_comes_back_as_it_was_whatever_is_there(value: torch.Tensor, held: Any) -> None:
    source, target = job(0.1), job(0.1)
    source["optimizer"].param_groups[0]["w"] = value
    target["optimizer"].param_groups[0]["w"] = held
    before = held.detach().clone() if isinstance(held, torch.Tensor) else held
    restored(saved(source), target)
    found = target["optimizer"].param_groups[0]["w"]
    assert found.dtype == value.dtype
    assert torch.equal(found, value)
    if found is not held and isinstance(held, torch.Tensor):
        assert torch.equal(held, before)


def test_a_rate_made_in_inference_mode_is_replaced() -> None:
    with torch.inference_mode():
        held = torch.tensor(0.1)
    target = job(held, rate(0.2))
    restored(saved(job(rate(0.5), rate(0.25))), target)
    assert list(map(float, rates_of(target))) == [0.5, 0.25]
    assert float(held) == pytest.approx(0.1)


def test_no_setting_changes_if_something_does_not_fit() -> None:
    source, target = job(rate(0.5)), job(rate(0.1))
    root = saved(source)
    target["more"] = torch.ones(2)
    with pytest.raises(EntryMissing):
        restored(root, target)
    assert float(rates_of(target)[0]) == pytest.approx(0.1)


def test_a_learned_rate_stays_the_parameter_of_its_module() -> None:
    def build(value: float) -> dict[str, Any]:
        rates = nn.ParameterDict({"lr": nn.Parameter(torch.tensor(value))})
        return {"rates": rates, **job(rates["lr"])}

    target = build(0.1)
    restored(saved(build(0.5)), target)
    assert rates_of(target)[0] is target["rates"]["lr"]
    assert target["rates"]["lr"].item() == 0.5


def test_a_rate_that_a_module_shares_here_only_is_replaced() -> None:
    lr = nn.Parameter(torch.tensor(0.1))
    target = {"rates": nn.ParameterDict({"lr": lr}), **job(lr)}
    source = {
        "rates": nn.ParameterDict({"lr": nn.Parameter(torch.tensor(0.75))}),
        **job(rate(0.5)),
    }
    restored(saved(source), target)
    assert lr.item() == 0.75
    assert [each.item() for each in rates_of(target)] == [0.5, 0.5]


# -- state -----------------------------------------------------------------------------------------


def stateful(fill: Any = None) -> dict[str, Any]:
    model = nn.Linear(3, 3)
    optimizer = torch.optim.SGD(model.parameters(), 0.1)
    if fill:
        for parameter, values in zip(model.parameters(), fill(), strict=True):
            optimizer.state[parameter] = values
    return {"model": model, "optimizer": optimizer}


def values_of(state: dict[str, Any]) -> list[dict[str, Any]]:
    return [state["optimizer"].state[parameter] for parameter in state["model"].parameters()]


def one_tensor() -> list[dict[str, Any]]:
    both = torch.arange(2.0)
    return [{"t": both}, {"t": both, "list": [both, (both,)]}]


def apart() -> list[dict[str, Any]]:
    return [{"t": torch.zeros(2)}, {"t": torch.ones(2)}]


@pytest.mark.parametrize("held", [None, one_tensor, apart], ids=["fresh", "shared", "apart"])
def test_two_parameters_share_a_tensor_of_their_state_again(held: Any) -> None:
    target = stateful(held)
    restored(saved(stateful(one_tensor)), target)
    one, two = values_of(target)
    assert one["t"] is two["t"]
    one["t"].fill_(7)
    assert torch.equal(two["list"][0], torch.full((2,), 7.0))
    assert torch.equal(two["list"][1][0], torch.full((2,), 7.0))


@pytest.mark.parametrize("held", [None, one_tensor, apart], ids=["fresh", "shared", "apart"])
def test_two_parameters_with_tensors_of_their_own_do_not_share_one(held: Any) -> None:
    target = stateful(held)
    restored(saved(stateful(apart)), target)
    one, two = values_of(target)
    assert torch.equal(one["t"], torch.zeros(2))
    assert torch.equal(two["t"], torch.ones(2))


def flat() -> list[dict[str, Any]]:
    buffer = torch.arange(14.0)
    return [
        {"m": buffer[:9].view(3, 3), "all": buffer, "column": buffer[:9].view(3, 3)[:, 1]},
        {"m": buffer[9:12], "list": [buffer[1:4], buffer[12:].view(torch.int32)]},
    ]


def pieces() -> list[dict[str, Any]]:
    """Return the same values, each with memory of its own."""
    return copy.deepcopy([{k: copy.deepcopy(v) for k, v in each.items()} for each in flat()])


def in_one_buffer(state: dict[str, Any]) -> None:
    one, two = values_of(state)
    tensors = [*one.values(), two["m"], *two["list"]]
    assert len({tensor.untyped_storage().data_ptr() for tensor in tensors}) == 1
    start = one["all"].data_ptr()
    assert [(t.data_ptr() - start) // 4 for t in tensors] == [0, 0, 1, 9, 1, 12]
    assert one["column"].stride() == (3,)
    assert torch.equal(one["all"], torch.arange(14.0))
    one["all"].zero_()
    assert not any(tensor.any() for tensor in tensors)


@pytest.mark.parametrize("held", [None, flat, pieces], ids=["fresh", "shared", "apart"])
def test_views_of_one_buffer_are_views_of_one_buffer_again(held: Any) -> None:
    target = stateful(held)
    before = [values["m"] for values in values_of(target)] if held else []
    restored(saved(stateful(flat)), target)
    if held is flat:
        # The list is made again, so its tensors, which have the buffer too, are not filled.
        assert all(a is not b["m"] for a, b in zip(before, values_of(target), strict=True))
    in_one_buffer(target)


def test_views_alone_stay_the_same_objects() -> None:
    def views() -> list[dict[str, Any]]:
        buffer = torch.arange(12.0)
        return [{"m": buffer[:9].view(3, 3)}, {"m": buffer[9:]}]

    target = stateful(views)
    before = [values["m"] for values in values_of(target)]
    for each in before:
        each.zero_()
    restored(saved(stateful(views)), target)
    assert all(a is b["m"] for a, b in zip(before, values_of(target), strict=True))
    assert torch.equal(before[1], torch.arange(9.0, 12.0))


def test_a_part_of_the_views_leaves_the_rest_of_the_buffer_alone() -> None:
    target = stateful(flat)
    one, two = values_of(target)
    kept = one["all"]
    root = saved(stateful(lambda: [{k: v for k, v in e.items() if k == "m"} for e in pieces()]))
    values = values_of(target)[1]["m"]
    values.fill_(5)
    restored(root, target, only="optimizer/model/bias")
    assert torch.equal(values_of(target)[1]["m"], torch.arange(9.0, 12.0))
    assert torch.equal(kept[9:12], torch.full((3,), 5.0))
    assert two is not values_of(target)[1]


def test_a_buffer_of_gaps_is_not_made_again() -> None:
    def sparse() -> list[dict[str, Any]]:
        buffer = torch.zeros(1 << 20)
        return [{"m": buffer[:2]}, {"m": buffer[-2:]}]

    root = saved(stateful(sparse))
    assert not manifest_of(root).views
    target = stateful()
    restored(root, target)
    assert values_of(target)[0]["m"].untyped_storage().nbytes() == 8


def test_a_value_that_is_the_parameter_itself_stays_so() -> None:
    def build() -> dict[str, Any]:
        state = stateful()
        for parameter in state["model"].parameters():
            state["optimizer"].state[parameter]["same"] = parameter.data
        return state

    source, target = build(), stateful()
    restored(saved(source), target)
    for parameter in target["model"].parameters():
        assert target["optimizer"].state[parameter]["same"].data_ptr() == parameter.data_ptr()


@pytest.mark.parametrize("place", [Replicate(), Shard(0)])
def test_a_distributed_tensor_of_two_parameters_is_one_after_resharding(place: Any) -> None:
    def build(ranks: int, value: torch.Tensor | None) -> dict[str, Any]:
        mesh = mesh_of([ranks])
        model = nn.ParameterDict(
            {
                name: nn.Parameter(
                    distribute_tensor(torch.zeros(6, 2), mesh, [place], src_data_rank=None)
                )
                for name in "ab"
            }
        )
        optimizer = torch.optim.SGD(model.parameters(), 0.1)
        if value is not None:
            both = distribute_tensor(value, mesh, [place], src_data_rank=None)
            for parameter in model.values():
                optimizer.state[parameter]["m"] = both
        return {"model": model, "optimizer": optimizer}

    whole = torch.arange(12.0).view(6, 2)
    images, manifest = save_ranks(2, lambda _: build(2, whole))
    for rank in range(3):
        with rank_of(rank, 3):
            target = build(3, None)
            restore(target, images, manifest, rank, 3)
            one, two = (target["optimizer"].state[p]["m"] for p in target["model"].values())
            assert one is two
            expected = distribute_tensor(whole, mesh_of([3]), [place], src_data_rank=None)
            assert torch.equal(one.to_local(), expected.to_local())


# -- any structure ---------------------------------------------------------------------------------

SLOTS = 5
SIZE = 12


@st.composite
def structures(draw: st.DrawFn) -> list[tuple[int, int, int]]:
    """Return for each slot its buffer, its first element there and its length."""
    found = []
    for _ in range(SLOTS):
        start = draw(st.integers(0, SIZE - 1))
        found.append((draw(st.integers(0, 2)), start, draw(st.integers(1, SIZE - start))))
    return found


def laid(structure: list[tuple[int, int, int]], base: float) -> list[torch.Tensor]:
    buffers = [torch.arange(SIZE) + base + 100.0 * n for n in range(3)]
    return [buffers[n][start : start + length] for n, start, length in structure]


def optimizers(tensors: list[torch.Tensor | None]) -> dict[str, Any]:
    """Put the tensors into two groups of one optimizer, one of another, and two states."""
    model = nn.ModuleList([nn.Linear(1, 1, bias=False) for _ in range(3)])
    weights = list(model.parameters())
    groups = [{"params": [weights[0]]}, {"params": [weights[1]]}]
    one, two = torch.optim.SGD(groups, 0.1), torch.optim.SGD([weights[2]], 0.1)
    places: list[tuple[Any, str]] = [
        (one.param_groups[0], "x"),
        (one.param_groups[1], "x"),
        (two.param_groups[0], "x"),
        (one.state[weights[0]], "y"),
        (two.state[weights[2]], "y"),
    ]
    for (container, key), tensor in zip(places, tensors, strict=True):
        if tensor is not None:
            container[key] = tensor
    return {"model": model, "one": one, "two": two}


def tensors_of(state: dict[str, Any]) -> list[torch.Tensor]:
    one: Optimizer = state["one"]
    two: Optimizer = state["two"]
    weights = list(state["model"].parameters())
    return [
        one.param_groups[0]["x"],
        one.param_groups[1]["x"],
        two.param_groups[0]["x"],
        one.state[weights[0]]["y"],
        two.state[weights[2]]["y"],
    ]


def sharing(tensors: list[torch.Tensor]) -> list[tuple[int, int, int]]:
    """Return for each two tensors that share memory their indices and their distance."""
    return [
        (i, j, two.data_ptr() - one.data_ptr())
        for i, one in enumerate(tensors)
        for j, two in enumerate(tensors)
        if one.untyped_storage().data_ptr() == two.untyped_storage().data_ptr()
    ]


@settings(max_examples=examples(80), deadline=None)
@given(structures(), structures() | st.just(None), st.booleans())
def test_any_structure_of_memory_comes_back_into_any_other(
    structure: list[tuple[int, int, int]],
    other: list[tuple[int, int, int]] | None,
    same: bool,
) -> None:
    source = optimizers([*laid(structure, 1.0)])
    other = structure if same else other
    held: list[Any] = [*laid(other, 0.5)] if other else [None] * SLOTS
    target = optimizers(held)
    root = new_root()
    with CheckpointManager(root) as manager:
        manager.save(source, 0)
        manager.restore(target)
    wanted, found = tensors_of(source), tensors_of(target)
    assert all(map(torch.equal, found, wanted))
    assert sharing(found) == sharing(wanted)
    if same:
        assert [each.data_ptr() for each in found] == [each.data_ptr() for each in held]
