"""Under each optimizer and implementation, the step waits for the copy.

The checkpoint is that of the moment of the call, and it does not change training.
"""

from __future__ import annotations

from functools import partial
from typing import Any

import pytest
import torch
from torch import nn
from torch.optim import (
    ASGD,
    LBFGS,
    SGD,
    Adadelta,
    Adafactor,
    Adagrad,
    Adam,
    Adamax,
    AdamW,
    Muon,
    NAdam,
    RAdam,
    RMSprop,
    Rprop,
    SparseAdam,
)

from ckpt import CheckpointManager
from tests.overlap.jobs import Build, forward_backward, train, trained
from tests.overlap.window import Window, assert_restores, content
from tests.state.saving import assert_same

OPTIMIZERS: dict[str, Build] = {
    **{
        f"{kind.__name__} {way or 'loop'}": partial(
            kind, lr=0.01, foreach=way == "foreach", fused=way == "fused"
        )
        for kind in (SGD, Adam, AdamW, Adagrad)
        for way in ("", "foreach", "fused")
    },
    "SGD momentum fused": partial(SGD, lr=0.01, momentum=0.9, fused=True),
    "SGD momentum foreach": partial(SGD, lr=0.01, momentum=0.9, nesterov=True, foreach=True),
    "Adam amsgrad fused": partial(Adam, lr=0.01, amsgrad=True, fused=True),
    "AdamW lr tensor": partial(AdamW, lr=torch.tensor(0.01)),
    "AdamW maximize": partial(AdamW, lr=0.01, maximize=True),
    **{
        f"{kind.__name__} {'foreach' if foreach else 'loop'}": partial(
            kind, lr=0.01, foreach=foreach
        )
        for kind in (ASGD, Adadelta, Adamax, NAdam, RAdam, RMSprop, Rprop, Adafactor)
        for foreach in (False, True)
    },
    "LBFGS": partial(LBFGS, lr=0.1, max_iter=3, history_size=4),
    "LBFGS line search": partial(LBFGS, max_iter=3, line_search_fn="strong_wolfe"),
    "Muon": lambda parameters: Muon([p for p in parameters if p.ndim == 2], lr=0.01),
}


@pytest.mark.parametrize("name", OPTIMIZERS)
def test_a_step_waits_and_the_checkpoint_is_of_the_call(
    name: str, root: str, window: Window
) -> None:
    build = OPTIMIZERS[name]
    state, twin = trained(build), trained(build)
    with CheckpointManager(root) as manager:
        pending = window.save(manager, state)
        window.must_wait(lambda: train(state, 7))
        pending.result(60)
        train(state, 8)
    train(twin, 7)
    train(twin, 8)
    assert_same(content(state), content(twin))
    assert_restores(root, window.reference, trained(build, seed=5))


def test_sparse_adam_waits(root: str, window: Window) -> None:
    def embedding(seed: int) -> dict[str, Any]:
        torch.manual_seed(seed)
        model = nn.Embedding(50, 8, sparse=True)
        state = {"model": model, "optimizer": SparseAdam(model.parameters(), lr=0.1)}
        step(state)
        return state

    def step(state: dict[str, Any]) -> None:
        state["optimizer"].zero_grad()
        state["model"](torch.tensor([1, 4, 4, 30])).square().sum().backward()
        state["optimizer"].step()

    state, twin = embedding(0), embedding(0)
    with CheckpointManager(root) as manager:
        window.save(manager, state)
        window.must_wait(lambda: step(state))
    step(twin)
    assert_same(content(state), content(twin))
    assert_restores(root, window.reference, embedding(5))


def test_accumulated_gradients_do_not_wait_and_the_step_that_uses_them_does(
    root: str, window: Window
) -> None:
    state, twin = trained(), trained()
    with CheckpointManager(root) as manager:
        window.save(manager, state)
        for number in range(3):  # the window is open: only the step may wait
            forward_backward(state, number)
        window.must_wait(state["optimizer"].step)
    for number in range(3):
        forward_backward(twin, number)
    twin["optimizer"].step()
    assert_same(content(state), content(twin))
    model = window.reference["model"]
    assert (
        int(model["norm.num_batches_tracked"]) == 2
    )  # the state at the call, although three forwards came before the copy
    assert_restores(root, window.reference, trained(seed=5))


def test_a_step_in_the_midst_of_accumulation_is_saved_with_the_next_one(
    root: str, window: Window
) -> None:
    """A state has no gradients. A save between two backward calls holds what the last step left."""
    state = trained()
    forward_backward(state, 0)
    with CheckpointManager(root) as manager:
        window.save(manager, state)
        forward_backward(state, 1)
        window.must_wait(state["optimizer"].step)
    assert_restores(root, window.reference, trained(seed=5))


def test_a_scheduler_that_patches_step_takes_no_wait_away(root: str, window: Window) -> None:
    def build(seed: int) -> dict[str, Any]:
        state = trained(seed=seed)
        state["scheduler"] = torch.optim.lr_scheduler.SequentialLR(
            state["optimizer"],
            [
                torch.optim.lr_scheduler.LinearLR(state["optimizer"], total_iters=2),
                torch.optim.lr_scheduler.CosineAnnealingLR(state["optimizer"], 10),
            ],
            milestones=[2],
        )
        return state

    state, twin = build(0), build(0)

    def step(state: dict[str, Any], number: int) -> None:
        train(state, number)
        state["scheduler"].step()

    with CheckpointManager(root) as manager:
        for number in range(4):
            window.save(manager, state, number)
            before = window.reference
            window.must_wait(partial(step, state, number))
            step(twin, number)
            assert_same(content(state), content(twin))
        manager.fence()
    assert_restores(root, before, build(5), step=3)


def test_a_gradient_scaler_steps_after_the_copy_and_is_saved_as_it_was(
    root: str, window: Window
) -> None:
    def build(seed: int) -> dict[str, Any]:
        return trained(seed=seed) | {"scaler": torch.amp.GradScaler("cpu", growth_interval=1)}

    def step(state: dict[str, Any]) -> None:
        state["optimizer"].zero_grad()
        loss = state["model"](torch.ones(8, 48) * torch.arange(8.0)[:, None])
        state["scaler"].scale(loss).backward()
        state["scaler"].unscale_(state["optimizer"])
        nn.utils.clip_grad_norm_(state["model"].parameters(), 1.0)
        state["scaler"].step(state["optimizer"])
        state["scaler"].update()

    state, twin = build(0), build(0)
    for each in (state, twin):
        step(each)
    with CheckpointManager(root) as manager:
        window.save(manager, state)
        window.must_wait(lambda: step(state))
    step(twin)
    assert_same(content(state), content(twin))
    assert state["scaler"].get_scale() == 4 * 2**16
    target = build(5)
    step(target)
    assert_restores(root, window.reference, target)


@pytest.mark.parametrize("name", OPTIMIZERS)
def test_a_save_before_the_first_step_changes_no_optimizer(name: str, root: str) -> None:
    """The state that torch.distributed.checkpoint reads is that of an optimizer that has stepped.

    See findings/dcp-fresh-optimizer.sh.
    """
    state, twin = (trained(OPTIMIZERS[name], steps=0) for _ in range(2))
    with CheckpointManager(root) as manager:
        manager.save(state, 0)
    for number in range(3):
        train(state, number)
        train(twin, number)
    assert_same(content(state), content(twin))


def test_every_optimizer_of_a_state_waits_wherever_it_lies(root: str, window: Window) -> None:
    def build(seed: int) -> dict[str, Any]:
        torch.manual_seed(seed)
        nets = [nn.Linear(8, 8) for _ in range(3)]
        optimizers = [
            SGD(nets[0].parameters(), momentum=0.9),
            AdamW(nets[1].parameters()),
            Rprop(nets[2].parameters()),
        ]
        state: dict[str, Any] = {
            "nets": nets,
            "optimizers": {"deep": [optimizers[:2], {"last": optimizers[2]}]},
        }
        step(state, 0), step(state, 1), step(state, 2)
        return state

    def step(state: dict[str, Any], which: int) -> None:
        state["nets"][which](torch.ones(8)).sum().backward()
        deep = state["optimizers"]["deep"]
        (*deep[0], deep[1]["last"])[which].step()

    state = build(0)
    with CheckpointManager(root) as manager:
        for which in range(3):
            window.save(manager, state, which)
            before = window.reference
            window.must_wait(partial(step, state, which))
        manager.fence()
    assert_restores(root, before, build(5), step=2)
