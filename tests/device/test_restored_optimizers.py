"""On which device the restored state of an optimizer is."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import pytest
import torch
from torch import nn

from ckpt import CheckpointManager

pytestmark = pytest.mark.device


def trained(place: torch.device, steps: int, kind: Any, **settings: Any) -> dict[str, Any]:
    torch.manual_seed(steps)
    model = nn.Linear(4, 4).to(place)
    optimizer = kind(model.parameters(), lr=0.1, **settings)
    state = {"model": model, "optimizer": optimizer}
    for _ in range(steps):
        step(state)
    return state


def step(state: dict[str, Any]) -> None:
    def closure() -> torch.Tensor:
        state["optimizer"].zero_grad()
        place = state["model"].weight.device
        loss = (state["model"](torch.ones(4, device=place)) ** 2).sum()
        loss.backward()
        return loss  # type: ignore[no-any-return]

    state["optimizer"].step(closure)


@pytest.mark.parametrize("steps", [0, 2])
@pytest.mark.parametrize("before", [False, True])
def test_training_goes_on_after_a_restore_that_changes_where_step_is(
    root: str, place: torch.device, before: bool, steps: int
) -> None:
    if place.type != "cuda":
        pytest.skip("other accelerators may have no fused or capturable steps")
    state = trained(place, 3, torch.optim.Adam, capturable=before)
    target = trained(place, steps, torch.optim.Adam, capturable=not before)
    with CheckpointManager(root) as manager:
        manager.save(state, 1)
        manager.restore(target, 1)
    step(state)
    step(target)
    assert torch.equal(state["model"].weight, target["model"].weight)


def tensors(value: Any) -> Iterator[torch.Tensor]:
    if isinstance(value, torch.Tensor):
        yield value
    elif isinstance(value, dict | list | tuple):
        for item in value.values() if isinstance(value, dict) else value:
            yield from tensors(item)


def test_tensors_in_lists_of_the_state_are_on_the_device_of_their_parameter(
    root: str, place: torch.device
) -> None:
    state = trained(place, 3, torch.optim.LBFGS, max_iter=3)
    target = trained(place, 0, torch.optim.LBFGS, max_iter=3)
    with CheckpointManager(root) as manager:
        manager.save(state, 1)
        manager.restore(target, 1)
    assert {each.device for each in tensors(dict(target["optimizer"].state))} == {place}
    step(state)
    step(target)
    assert torch.equal(state["model"].weight, target["model"].weight)
