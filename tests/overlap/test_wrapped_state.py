"""Parameters and state in wrappers are copied while training goes on, as plain ones are."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import nn

from ckpt import CheckpointManager
from ckpt.errors import TensorChanged
from tests.overlap.window import Window, assert_restores
from tests.state.wrapping import Blocks, Quantised

State = dict[str, Any]


def job(*, replaces: bool = False, seed: int = 0) -> State:
    torch.manual_seed(seed)
    model = nn.Linear(8, 64)
    optimizer = Quantised(model.parameters(), replaces=replaces)
    state = {"model": model, "optimizer": optimizer}
    gradients(state)
    optimizer.step()
    gradients(state)
    return state


def gradients(state: State) -> None:
    state["optimizer"].zero_grad()
    state["model"](torch.ones(3, 8)).square().mean().backward()


def moment(state: State) -> Any:
    return state["optimizer"].state[state["model"].weight]["moment"]


@pytest.mark.parametrize("replaces", [False, True])
def test_a_step_waits_for_the_copy_of_the_tensors_inside(
    root: str, window: Window, replaces: bool
) -> None:
    state = job(replaces=replaces)
    with CheckpointManager(root) as manager:
        pending = window.save(manager, state)
        window.must_wait(state["optimizer"].step)
        pending.result()
    assert_restores(root, window.reference, job(replaces=replaces, seed=5))


def whole(state: State) -> None:
    moment(state).copy_(torch.ones(64, 8))


def inside(state: State) -> None:
    moment(state).codes.add_(1)


def inside_by_data(state: State) -> None:
    moment(state).codes.data.add_(1)


def scale_by_numpy(state: State) -> None:
    moment(state).scale.numpy()[:] = 3.0


CHANGES: dict[str, Callable[[State], None]] = {
    "in place, of the wrapper": whole,
    "in place, of a tensor inside": inside,
    "by .data": inside_by_data,
    "by NumPy": scale_by_numpy,
}


@pytest.mark.parametrize("check", ["sampled", "full"])
@pytest.mark.parametrize("change", CHANGES)
def test_a_change_behind_the_copy_fails_the_save_by_name(
    root: str, window: Window, change: str, check: Any
) -> None:
    state = job()
    with CheckpointManager(root, check=check) as manager:
        manager.save(state, 0)
        pending = window.save(manager, state, 1)
        window.overtake(lambda: CHANGES[change](state), patience=10)
        assert window.changed
        with pytest.raises(TensorChanged, match=r"optimizer/model/weight/moment/(codes|scale)"):
            pending.result()
        assert manager.steps() == [0]


def test_a_change_of_the_wrapper_moves_its_own_counter_alone(root: str, window: Window) -> None:
    """Without the sample, only the counter of the wrapper shows the change."""
    state = job()
    held = moment(state)
    before = (held._version, held.codes._version)
    whole(state)
    assert (held._version, held.codes._version) == (before[0] + 1, before[1])
    with CheckpointManager(root, check="off") as manager:
        pending = window.save(manager, state, 1)
        window.overtake(lambda: whole(state), patience=10)
        assert window.overtaken
        with pytest.raises(TensorChanged, match="moment"):
            pending.result()


def test_a_tensor_inside_that_is_replaced_after_the_call_does_not_matter(
    root: str, window: Window
) -> None:
    state = job()
    with CheckpointManager(root) as manager:
        pending = window.save(manager, state, 1)
        held = moment(state)
        held.codes = torch.zeros_like(held.codes)
        window.close()
        pending.result()
        held.codes = torch.ones_like(held.codes)
    assert_restores(root, window.reference, job(seed=5))


def test_everything_is_copied_at_once_with_overlap_off(root: str) -> None:
    state = job()
    with CheckpointManager(root, overlap="off") as manager:
        pending = manager.save_async(state, 1)
        before = moment(state).codes.clone()
        moment(state).codes.data.fill_(7)
        pending.result()
        manager.restore(state)
    assert torch.equal(moment(state).codes, before)


def test_a_wrapped_parameter_of_an_optimizer_is_copied_late(root: str, window: Window) -> None:
    def build(seed: int) -> State:
        model = nn.Linear(8, 64, bias=False)
        values = torch.full((64, 8), float(seed))
        model.weight = nn.Parameter(Blocks.of(values), requires_grad=True)
        return {"model": model, "optimizer": torch.optim.SGD(model.parameters(), lr=0.1)}

    state = build(1)
    with CheckpointManager(root, check="off") as manager:
        pending = window.save(manager, state, 1)
        with torch.no_grad():
            window.overtake(lambda: state["model"].weight.copy_(torch.zeros(64, 8)), patience=10)
        assert window.overtaken
        with pytest.raises(TensorChanged, match="model/weight"):
            pending.result()
