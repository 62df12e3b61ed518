"""All tensors that no hooked optimizer owns are in the image when the call returns.

Later changes to them have no effect on it.
"""

from __future__ import annotations

import random
from collections.abc import Callable
from functools import partial
from typing import Any

import numpy as np
import pytest
import torch
from torch import nn
from torch.optim.swa_utils import SWALR, AveragedModel, get_ema_multi_avg_fn, update_bn

from ckpt import CheckpointManager, PerRank, RngState
from tests.overlap.jobs import WIDTH, Net, forward_backward, train, trained
from tests.overlap.window import Window, assert_restores, content
from tests.state.saving import assert_same

State = dict[str, Any]


def rich(seed: int) -> State:
    state = trained(seed=seed)
    ema = AveragedModel(state["model"], multi_avg_fn=get_ema_multi_avg_fn(0.9), use_buffers=True)
    ema.update_parameters(state["model"])
    scaler = torch.amp.GradScaler("cpu", init_scale=2.0 + seed)
    scaler.scale(torch.ones(1))
    return state | {
        "ema": ema,
        "swa_lr": SWALR(state["optimizer"], swa_lr=0.05 + seed),
        "cosine": torch.optim.lr_scheduler.CosineAnnealingLR(state["optimizer"], 10 + seed),
        "scaler": scaler,
        "alone": nn.Parameter(torch.full((9,), float(seed))),
        "tensors": [
            torch.arange(5.0) + seed,
            {"view": torch.arange(12.0).reshape(3, 4).t() + seed},
        ],
        "array": np.arange(6.0) + seed,
        "plain": {
            "list": [seed, [2, 3]],
            "set to": None,
            "float": 0.1 * seed,
            "bytes": bytearray([seed]),
        },
        "rank": PerRank({"seen": [seed]}),
        "rng": PerRank(RngState()),
    }


def forward_in_training_mode(state: State) -> None:
    for number in range(3):
        forward_backward(state, 10 + number)


def recalibrated_batch_norm(state: State) -> None:
    update_bn([torch.randn(8, WIDTH)], state["model"])


def python_values(state: State) -> None:
    state["plain"]["list"][1].append(9)
    state["plain"]["bytes"][0] = 77
    state["plain"].clear()
    state["rank"].value["seen"].append(5)
    state["step"] = -1
    state["tensors"].pop()


def hyperparameters(state: State) -> None:
    for group in state["optimizer"].param_groups:
        group["lr"], group["betas"], group["new"] = 7.0, (0.1, 0.2), "x"


def random_numbers(state: State) -> None:
    torch.rand(5), random.random(), np.random.rand()


CHANGES: dict[str, Callable[[State], object]] = {
    "BatchNorm in forward": forward_in_training_mode,
    "BatchNorm reset": lambda state: state["model"].norm.reset_running_stats(),
    "BatchNorm recalibrated": recalibrated_batch_norm,
    "EMA update": lambda state: state["ema"].update_parameters(state["model"]),
    "EMA in place": lambda state: [p.data.zero_() for p in state["ema"].parameters()],
    "scheduler": lambda state: [state["cosine"].step(), state["swa_lr"].step()],
    "scaler": lambda state: state["scaler"].update(123.0),
    "a parameter of nobody": lambda state: state["alone"].data.fill_(3),
    "tensors": lambda state: [state["tensors"][0].fill_(8), state["tensors"][1]["view"].zero_()],
    "array": lambda state: state["array"].fill(8),
    "python values": python_values,
    "hyperparameters": hyperparameters,
    "random numbers": random_numbers,
}  # fmt: skip


@pytest.mark.filterwarnings("ignore:Detected call of `lr_scheduler.step")
@pytest.mark.parametrize("change", CHANGES.values(), ids=CHANGES)
def test_what_changes_right_after_the_call_is_saved_as_it_was(
    change: Callable[[State], object], root: str, window: Window
) -> None:
    state = rich(0)
    with CheckpointManager(root) as manager:
        pending = window.save(manager, state)
        reference = window.reference
        change(state)
        with pytest.raises(AssertionError):
            assert_same(content(state), reference)  # something has changed
        window.close()
        pending.result(60)
    assert_restores(root, reference, rich(5))


def test_a_weight_averaged_every_step_and_saved_every_step_is_right_every_time(
    root: str, window: Window
) -> None:
    """The loop saves, averages what was saved, and steps."""
    state = trained()
    state["ema"] = AveragedModel(state["model"])
    references = []
    with CheckpointManager(root) as manager:
        for number in range(4):
            window.save(manager, state, number)
            references.append(window.reference)
            state["ema"].update_parameters(state["model"])
            window.must_wait(partial(train, state, number))
    for number, reference in enumerate(references):
        target = trained(seed=5)
        target["ema"] = AveragedModel(target["model"])
        assert_restores(root, reference, target, step=number)


def test_a_model_in_eval_mode_and_one_that_is_frozen_in_part(root: str, window: Window) -> None:
    state = trained()
    state["model"].two.requires_grad_(False)
    state["model"].eval()
    with CheckpointManager(root) as manager:
        window.save(manager, state)
        window.must_wait(lambda: train(state, 3))
    assert_restores(root, window.reference, trained(seed=5))


def test_a_module_without_its_optimizer_may_be_changed_at_once(root: str) -> None:
    model = Net()
    with CheckpointManager(root) as manager:
        reference = content({"model": model})
        pending = manager.save_async({"model": model}, 1)
        for parameter in model.parameters():
            parameter.data.zero_()
        pending.result(60)
    assert_restores(root, reference, {"model": Net()})


def test_a_parameter_that_is_a_lazy_view_is_copied_at_once(root: str) -> None:
    """Its values differ from those of its memory, so a comparison of the memory would
    not match it.
    """
    lazy = torch.nn.Parameter(torch.complex(torch.ones(300), torch.arange(300.0)).conj())
    assert lazy.is_conj()
    optimizer = torch.optim.SGD([lazy], lr=0.1)
    into = torch.zeros(300, dtype=torch.complex64)
    with CheckpointManager(root) as manager:
        manager.save({"w": lazy, "optimizer": optimizer}, 1)
        manager.restore({"w": into}, 1, only="w")
    assert torch.equal(into, lazy.detach().resolve_conj())
