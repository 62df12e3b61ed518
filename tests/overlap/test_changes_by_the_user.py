"""What the user may do to owned tensors while they are copied.

Each way ends in the right checkpoint or in an error that names the tensor, and never in a torn
checkpoint.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import nn

from ckpt import CheckpointManager, PendingSave
from ckpt.errors import StagingError, TensorChanged
from tests.overlap.jobs import WIDTH, Net, train, trained
from tests.overlap.window import Window, assert_restores

State = dict[str, Any]


def weight(state: State) -> Any:
    return state["model"].two.weight


def first_moment(state: State) -> torch.Tensor:
    return state["optimizer"].state[weight(state)]["exp_avg"]


def load(state: State, **options: Any) -> None:
    state["model"].load_state_dict(Net().state_dict(), **options)


def save(window: Window, root: str, state: State, change: Callable[[], object]) -> PendingSave:
    """Save ``state``, with ``change`` made between the call and the copy."""
    with CheckpointManager(root) as manager:
        pending = window.save(manager, state)
        with torch.no_grad():
            change()
        window.close()
        pending.exception(60)
    return pending


# -- in place: the version counters show the change ------------------------------------------------

IN_PLACE: dict[str, tuple[str, Callable[[State], object]]] = {
    "add_": ("model/two.weight", lambda state: weight(state).add_(1)),
    "copy_": ("model/two.weight", lambda state: weight(state).copy_(torch.zeros(WIDTH, WIDTH))),
    "an item": ("model/two.weight", lambda state: weight(state).__setitem__((0, 0), 5.0)),
    "a view": ("model/two.weight", lambda state: weight(state)[1:].zero_()),
    "a detached alias": ("model/two.weight", lambda state: weight(state).detach().t().mul_(2)),
    "out=": ("model/two.weight", lambda state: torch.add(weight(state), 1, out=weight(state))),
    "foreach": ("model/two.weight", lambda state: torch._foreach_mul_([weight(state)], 2.0)),
    "init": ("model/two.weight", lambda state: nn.init.normal_(weight(state))),
    "a tied weight by its other name": (
        "model/one.weight",
        lambda state: state["model"].three.weight.add_(1),
    ),
    "moments": ("optimizer/model/two.weight/exp_avg", lambda state: first_moment(state).zero_()),
    "step counter": (
        "optimizer/model/two.weight/step",
        lambda state: state["optimizer"].state[weight(state)]["step"].add_(1),
    ),
    "load_state_dict": ("model/", load),
}


@pytest.mark.parametrize("way", IN_PLACE)
def test_a_change_in_place_fails_the_save_with_the_name(
    way: str, root: str, window: Window
) -> None:
    name, change = IN_PLACE[way]
    state = trained()
    pending = save(window, root, state, lambda: change(state))
    error = pending.exception()
    assert isinstance(error, TensorChanged), error
    assert error.name.startswith(name)
    with CheckpointManager(root) as manager:
        assert manager.steps() == []
        train(state, 3)  # training and the next save still work
        manager.save(state, 2)
        assert manager.steps() == [2]


# -- other memory under the same name --------------------------------------------------------------


def fresh(state: State) -> torch.Tensor:
    return torch.full((WIDTH, WIDTH), 7.0)


def replace(state: State) -> None:
    state["model"].two.weight = nn.Parameter(fresh(state))


def vector(state: State) -> None:
    parameters = list(state["model"].parameters())
    nn.utils.vector_to_parameters(torch.ones(sum(p.numel() for p in parameters)), parameters)


def other_state_dict(state: State) -> None:
    state["optimizer"].load_state_dict(trained(seed=3)["optimizer"].state_dict())


ELSEWHERE: dict[str, Callable[[State], object]] = {
    "parameter.data = other": lambda state: setattr(weight(state), "data", fresh(state)),
    "parameter.data = other, smaller": lambda state: setattr(weight(state), "data", torch.ones(2)),
    "parameter.data = other dtype": lambda state: setattr(
        weight(state), "data", fresh(state).double()
    ),
    "moment.data = other": lambda state: setattr(first_moment(state), "data", fresh(state)),
    "resize_": lambda state: weight(state).detach().resize_(0),
    "set_": lambda state: weight(state).set_(fresh(state)),
    "vector_to_parameters": vector,
    "module.double": lambda state: state["model"].double(),
    "module.to meta": lambda state: state["model"].to("meta"),
    "another parameter": replace,
    "deleted": lambda state: delattr(state["model"], "two"),
    "swap_tensors": lambda state: torch.utils.swap_tensors(
        weight(state), nn.Parameter(fresh(state))
    ),
    "load_state_dict assign": lambda state: load(state, assign=True),
    "optimizer.load_state_dict": other_state_dict,
    "optimizer.state cleared": lambda state: state["optimizer"].state.clear(),
    "optimizer.param_groups cleared": lambda state: state["optimizer"].param_groups.clear(),
    "state cleared": lambda state: state.clear(),
}


@pytest.mark.parametrize("way", ELSEWHERE)
def test_other_memory_under_the_name_is_not_what_is_saved(
    way: str, root: str, window: Window
) -> None:
    state = trained()
    pending = save(window, root, state, lambda: ELSEWHERE[way](state))
    error = pending.exception()
    if error is None:
        assert_restores(root, window.reference, trained(seed=5))
    else:
        assert isinstance(error, TensorChanged | StagingError)
        assert "two.weight" in str(error)


def test_a_change_in_place_by_data_is_seen_though_it_moves_no_counter(
    root: str, window: Window
) -> None:
    state = trained()
    error = save(window, root, state, lambda: weight(state).data.zero_()).exception()
    assert isinstance(error, TensorChanged)
    assert error.name == "model/two.weight"


def test_a_change_in_place_by_data_is_right_behind_a_fence(root: str, window: Window) -> None:
    """Averages that are swapped in for an evaluation change like this."""
    state = trained()
    with CheckpointManager(root) as manager:
        window.save(manager, state)
        window.must_wait(lambda: [manager.fence(), weight(state).data.zero_()])
    assert_restores(root, window.reference, trained(seed=5))
