"""The state comes back with its parameters, and the keys of each of them, in their order."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import nn

from ckpt.model.key_order import KeyOrder
from tests.state.saving import restored, saved
from tests.state.worlds import restore, save_ranks


def adam(steps: int) -> dict[str, Any]:
    model = nn.Linear(2, 2)
    optimizer = torch.optim.Adam(model.parameters(), 0.1, amsgrad=True)
    for _ in range(steps):
        model(torch.ones(2)).sum().backward()
        optimizer.step()
    return {"model": model, "optimizer": optimizer}


def keys_of(state: dict[str, Any]) -> list[list[Any]]:
    return [list(values) for values in state["optimizer"].state.values()]


def test_the_keys_of_a_parameter_keep_their_order() -> None:
    state = adam(1)
    assert keys_of(state)[0][0] == "step"
    for target in (adam(0), adam(1)):
        restored(saved(state), target)
        assert keys_of(target) == keys_of(state)


def test_each_parameter_keeps_an_order_of_its_own_for_values_of_all_kinds() -> None:
    def plain() -> dict[str, Any]:
        model = nn.Linear(2, 2)
        return {"model": model, "optimizer": torch.optim.SGD(model.parameters(), 0.1)}

    state, target = plain(), plain()
    orders: list[list[Any]] = [["z", 5, "list", "a/b", "n"], ["n", "list", "a/b", "z", 5]]
    values = {"z": torch.ones(2), 5: torch.ones(1), "list": [torch.ones(1)], "a/b": "x", "n": None}
    for parameter, order in zip(state["model"].parameters(), orders, strict=True):
        state["optimizer"].state[parameter] = {key: values[key] for key in order}
    restored(saved(state), target)
    assert keys_of(target) == orders


def test_ranks_with_other_parameters_and_other_orders_keep_theirs() -> None:
    def stage(rank: int, filled: bool) -> dict[str, Any]:
        model = nn.ModuleDict({str(rank): nn.Linear(2, 1, bias=False)})
        optimizer = torch.optim.SGD(model.parameters(), 0.1)
        if filled:
            keys = ["a", "b", "c"] if rank else ["c", "a"]
            (weight,) = model.parameters()
            optimizer.state[weight] = {key: torch.ones(1) for key in keys}
        return {"model": model, "optimizer": optimizer}

    images, manifest = save_ranks(2, lambda rank: stage(rank, filled=True))
    for rank in range(2):
        target = stage(rank, filled=False)
        restore(target, images, manifest, rank, 2, strict=False)
        assert keys_of(target) == keys_of(stage(rank, filled=True))


def late(frozen: bool) -> dict[str, Any]:
    """Return a state in which the bias has taken its first step before the weight."""
    state = adam(0)
    model, optimizer = state["model"], state["optimizer"]
    model.weight.requires_grad = not frozen
    for _ in range(2 if frozen else 1):
        model(torch.ones(2)).sum().backward()
        optimizer.step()
        model.weight.requires_grad = True
    return state


@pytest.mark.parametrize("frozen", [False, True])
def test_the_parameters_keep_the_order_in_which_torch_s_own_load_has_them(frozen: bool) -> None:
    state = late(frozen)
    for target in (adam(0), late(frozen), late(not frozen)):
        other = adam(0)["optimizer"]
        other.load_state_dict(state["optimizer"].state_dict())
        restored(saved(state), target)
        shapes = [[p.shape for p in optimizer.state] for optimizer in (target["optimizer"], other)]
        assert shapes[0] == shapes[1] == [p.shape for p in state["optimizer"].state]


def test_the_order_of_two_ranks_is_that_of_each() -> None:
    one = KeyOrder(("step",), parameters=("b", "a"))
    two = KeyOrder(("step",), parameters=("d", "c"))
    assert one.union(two, ["d", "c"]).parameters == ("b", "a", "d", "c")
    assert KeyOrder.from_node(one.node()) == one
