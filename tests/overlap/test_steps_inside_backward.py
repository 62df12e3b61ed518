"""Optimizers that step while backward runs.

Each optimizer in the state waits for the copy. Tensors that belong to none of them are copied at
once.
"""

from __future__ import annotations

from functools import partial
from typing import Any

import pytest
import torch
from torch import nn
from torch.distributed.optim import _apply_optimizer_in_backward

from ckpt import CheckpointManager
from ckpt.errors import TensorChanged
from tests.overlap.jobs import Net, forward_backward
from tests.overlap.window import Window, assert_restores, content
from tests.state.saving import assert_same


def by_hooks(seed: int) -> dict[str, Any]:
    """Make one optimizer for each parameter, and call it when its gradient is ready."""
    torch.manual_seed(seed)
    model = Net()
    optimizers = {name: torch.optim.AdamW([p], lr=0.01) for name, p in model.named_parameters()}

    def step(parameter: nn.Parameter, optimizer: torch.optim.Optimizer) -> None:
        optimizer.step()
        optimizer.zero_grad()

    for name, parameter in model.named_parameters():
        parameter.register_post_accumulate_grad_hook(partial(step, optimizer=optimizers[name]))
    return {"model": model, "optimizers": optimizers}


def by_torch(seed: int) -> dict[str, Any]:
    """Do the same with torch's own means."""
    torch.manual_seed(seed)
    model = Net()
    _apply_optimizer_in_backward(torch.optim.SGD, model.parameters(), {"lr": 0.01, "momentum": 0.9})
    parameters: dict[str, Any] = dict(model.named_parameters())
    optimizers = {name: p._in_backward_optimizers[0] for name, p in parameters.items()}
    return {"model": model, "optimizers": optimizers}


BUILDS = {"hooks of the user": by_hooks, "torch.distributed.optim": by_torch}


@pytest.fixture(params=BUILDS)
def build(request: pytest.FixtureRequest) -> Any:
    return BUILDS[request.param]


def trained(build: Any, seed: int) -> dict[str, Any]:
    state = build(seed)
    for number in range(2):
        forward_backward(state, number)
    return state


def test_backward_waits_for_the_copy_before_the_first_of_them_steps(
    build: Any, root: str, window: Window
) -> None:
    state, twin = trained(build, 0), trained(build, 0)
    with CheckpointManager(root) as manager:
        pending = window.save(manager, state)
        window.must_wait(lambda: forward_backward(state, 7))
        pending.result(60)
    forward_backward(twin, 7)
    assert_same(content(state), content(twin))
    assert_restores(root, window.reference, trained(build, 5))


def test_a_model_without_its_optimizers_is_copied_before_the_call_returns(
    build: Any, root: str, window: Window
) -> None:
    state = trained(build, 0)
    with CheckpointManager(root) as manager:
        window.close()
        reference = content({"model": state["model"]})
        pending = manager.save_async({"model": state["model"]}, 1)
        forward_backward(state, 7)
        pending.result(60)
    assert_restores(root, reference, {"model": build(5)["model"]})


def test_one_optimizer_that_was_left_out_changes_nothing_unseen(
    build: Any, root: str, window: Window
) -> None:
    """No optimizer in this state owns its parameter, so it is copied at once."""
    state = trained(build, 0)
    known = dict(state["optimizers"])
    del known["two.weight"]
    seen = {"model": state["model"], "optimizers": known}
    with CheckpointManager(root) as manager:
        pending = window.save(manager, seen)
        state["optimizers"]["two.weight"].step()
        nn.init.zeros_(state["model"].two.weight)
        window.close()
        pending.result(60)
    target = trained(build, 5)
    del target["optimizers"]["two.weight"]
    assert_restores(root, window.reference, target)


def test_an_owner_outside_the_state_beside_one_inside_fails_the_save_by_name(
    root: str, window: Window
) -> None:
    """Two optimizers share one model, and one of them is in the state. The step of the other does
    not wait, but its change is detected.
    """
    state = trained(by_hooks, 0)
    stranger = torch.optim.SGD(state["model"].parameters(), lr=0.1)
    state["model"].three.bias.grad = torch.ones_like(state["model"].three.bias)
    with CheckpointManager(root) as manager:
        pending = window.save(manager, state)
        window.overtake(stranger.step, patience=10)
        assert window.overtaken
        with pytest.raises(TensorChanged, match=r"'model/three\.bias'"):
            pending.result(60)
