"""The state of a parameter comes back with its keys in their order."""

from __future__ import annotations

from typing import Any

import torch
from torch import nn

from tests.adapters.saving import restored, saved
from tests.adapters.worlds import restore, save_ranks


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
