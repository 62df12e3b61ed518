"""The structure of a state changes between two saves, or between a call and its copy.

A plan is used only for the structure that it was made for.
"""

from __future__ import annotations

import copy
import threading
from collections.abc import Callable
from functools import partial
from typing import Any

import pytest
import torch
from torch import nn

from ckpt import CheckpointManager, LocalShards
from ckpt.errors import UnsupportedValue
from tests.kit.marks import each_once
from tests.overlap.jobs import WIDTH, Net, adamw, forward_backward, job, train, trained
from tests.overlap.window import Window, assert_restores, content

State = dict[str, Any]


def step(state: State) -> None:
    """Take a step with the optimizers that the state has."""
    for parameter in state["model"].parameters():
        parameter.grad = torch.ones_like(parameter)
    state["optimizer"].step()


def add_group(state: State) -> None:
    state["model"].extra = nn.Linear(3, 2)
    state["optimizer"].add_param_group(
        {"params": list(state["model"].extra.parameters()), "lr": 0.5}
    )


def add_layer(state: State) -> None:
    state["model"].extra = nn.Linear(3, 2)


def remove_layer(state: State) -> None:
    del state["model"].norm


def other_shape(state: State) -> None:
    state["model"].two = nn.Linear(7, 5)
    state["optimizer"] = adamw(state["model"].parameters())


def other_dtype(state: State) -> None:
    state["model"].double()
    state["optimizer"] = adamw(state["model"].parameters())


def other_dtype_by_data(state: State) -> None:
    state["model"].two.weight.data = state["model"].two.weight.data.bfloat16()
    state["optimizer"].state.clear()


def other_optimizer(state: State) -> None:
    state["optimizer"] = torch.optim.SGD(state["model"].parameters(), lr=0.1, momentum=0.9)


def other_optimizer_for_a_part(state: State) -> None:
    state["optimizer"] = torch.optim.SGD(state["model"].two.parameters(), lr=0.1)


def other_model(state: State) -> None:
    state["model"] = Net()
    state["optimizer"] = adamw(state["model"].parameters())


def swapped_names(state: State) -> None:
    """Exchange the names of two tensors of one shape."""
    model = state["model"]
    model.one, model.two = model.two, model.one


def swapped_values(state: State) -> None:
    """Keep the names and shapes, and exchange the memory of two tensors."""
    one, two = state["model"].one.weight, state["model"].two.weight
    one.data, two.data = two.data, one.data


def swapped_moments(state: State) -> None:
    held = state["optimizer"].state
    one, two = state["model"].one.weight, state["model"].two.weight
    held[one], held[two] = held[two], held[one]


def swapped_keys(state: State) -> None:
    for held in state["optimizer"].state.values():
        held["exp_avg"], held["exp_avg_sq"] = held["exp_avg_sq"], held["exp_avg"]


def untied(state: State) -> None:
    state["model"].three.weight = nn.Parameter(torch.randn(WIDTH, WIDTH))


def transposed(state: State) -> None:
    state["model"].two.weight.data = state["model"].two.weight.data.t()


def moved(state: State) -> None:
    for parameter in state["model"].parameters():
        parameter.data = parameter.data.clone() + 1


def loaded_optimizer(state: State) -> None:
    state["optimizer"].load_state_dict(copy.deepcopy(trained(seed=8)["optimizer"].state_dict()))


def reordered_groups(state: State) -> None:
    state["optimizer"].param_groups[0]["params"].reverse()


def state_reset(state: State) -> None:
    state["optimizer"].state.clear()


def key_removed(state: State) -> None:
    del state["step"]


def key_added(state: State) -> None:
    state["more"] = {"tensor": torch.ones(3), "n": 3}


def key_of_another_kind(state: State) -> None:
    state["step"] = torch.tensor(9)


def buffer_added(state: State) -> None:
    state["model"].register_buffer("mask", torch.ones(3))


def buffer_not_persistent(state: State) -> None:
    buffer = state["model"].norm.running_mean
    state["model"].norm.register_buffer("running_mean", buffer, persistent=False)


def empty(state: State) -> None:
    state["model"].two.weight = nn.Parameter(torch.empty(0, WIDTH))
    state["optimizer"] = adamw(state["model"].parameters())


CHANGES: list[Callable[[State], None]] = [
    add_group,
    add_layer,
    remove_layer,
    other_shape,
    other_dtype,
    other_dtype_by_data,
    other_optimizer,
    other_optimizer_for_a_part,
    other_model,
    swapped_names,
    swapped_values,
    swapped_moments,
    swapped_keys,
    untied,
    transposed,
    moved,
    loaded_optimizer,
    reordered_groups,
    state_reset,
    key_removed,
    key_added,
    key_of_another_kind,
    buffer_added,
    buffer_not_persistent,
    empty,
]


def blank_like(state: State, how: Callable[[State], None]) -> State:
    """Return a target of the form that ``state`` has now, without its content."""
    target = copy.deepcopy(state)
    for value in [*target["model"].state_dict().values(), *target.values()]:
        if isinstance(value, torch.Tensor):
            value.zero_()
    for held in target["optimizer"].state.values():
        for value in held.values():
            value.zero_()
    return target


@pytest.mark.parametrize("change", CHANGES, ids=lambda change: change.__name__)
def test_what_was_changed_between_two_saves_is_in_the_second(
    change: Callable[[State], None], root: str, window: Window
) -> None:
    state = trained()
    with CheckpointManager(root) as manager:
        window.save(manager, state, 1)
        first, before = window.reference, blank_like(state, change)
        window.must_wait(lambda: train(state, 3))
        manager.save(state, 2)
        change(state)
        window.save(manager, state, 3)
        second, after = window.reference, blank_like(state, change)
        window.must_wait(lambda: step(state))
        window.save(manager, state, 4)
        third = window.reference
        window.close()
    assert_restores(root, first, before, step=1)
    assert_restores(root, second, after, step=3)
    assert_restores(root, third, blank_like(state, change), step=4)


@pytest.mark.parametrize("change", CHANGES, ids=lambda change: change.__name__)
def test_what_is_changed_in_the_window_is_not_in_that_save(
    change: Callable[[State], None], root: str, window: Window
) -> None:
    state = trained()
    with CheckpointManager(root) as manager:
        pending = window.save(manager, state)
        change(state)
        window.close()
        pending.result(60)
    assert_restores(root, window.reference, trained(seed=5))


def without_buffers() -> State:
    """``Module.to`` replaces buffers by other objects, which is enough to give up a plan."""
    state = trained()
    state["model"].norm = nn.Identity()
    return state


def cast(dtype: torch.dtype) -> Callable[[State], object]:
    return lambda state: state["model"].to(dtype)


def cast_by_data(dtype: torch.dtype) -> Callable[[State], None]:
    def change(state: State) -> None:
        for parameter in state["model"].parameters():
            parameter.data = parameter.data.to(dtype)

    return change


def cast_moments(state: State) -> None:
    for held in state["optimizer"].state.values():
        held["exp_avg"].data = held["exp_avg"].bfloat16()


def pruned(state: State) -> None:
    state["model"].two.weight.data = state["model"].two.weight.data[: WIDTH // 2].clone()


def grown(state: State) -> None:
    weight = state["model"].two.weight
    weight.data = torch.cat([weight.data, torch.full((5, WIDTH), 3.0)])


def strided(state: State) -> None:
    state["model"].two.weight.data = torch.randn(2 * WIDTH, WIDTH)[::2]


SAME_OBJECTS: dict[str, Callable[[State], object]] = {
    "double": cast(torch.float64),
    "half": cast(torch.float16),
    "bfloat16": cast(torch.bfloat16),
    "double by .data": cast_by_data(torch.float64),
    "bfloat16 by .data": cast_by_data(torch.bfloat16),
    "moments by .data": cast_moments,
    "pruned": pruned,
    "grown": grown,
    "strided": strided,
}


@pytest.mark.parametrize(("overlap", "way"), each_once(["auto", "off"], SAME_OBJECTS))
def test_the_same_tensors_in_another_form_are_saved_in_that_form(
    way: str, overlap: Any, root: str
) -> None:
    state = without_buffers()
    with CheckpointManager(root, overlap=overlap) as manager:
        for number in (1, 2, 3, 4):  # both slots, with each form
            if number == 3:
                SAME_OBJECTS[way](state)
            reference, target = content(state), blank_like(state, step)
            manager.save(state, number)
            assert_restores(root, reference, target, step=number)


LAZY: dict[str, Callable[[torch.Tensor], torch.Tensor]] = {
    "conjugated": torch.conj,
    "negated": torch._neg_view,
}


@pytest.mark.parametrize("overlap", ["auto", "off"])
@pytest.mark.parametrize("way", LAZY)
def test_a_parameter_that_becomes_a_lazy_view_by_data_is_saved_as_what_it_shows(
    way: str, overlap: Any, root: str
) -> None:
    """Its address, shape, strides and dtype stay the same, and so does its memory.

    Only its values differ.
    """
    state: State = {
        "model": nn.ParameterDict({"x": nn.Parameter(torch.randn(3, 2, dtype=torch.complex64))})
    }
    state["optimizer"] = torch.optim.SGD(state["model"].parameters(), lr=0.1, momentum=0.9)
    with CheckpointManager(root, overlap=overlap) as manager:
        for number in (1, 2, 3, 4, 5):
            if number > 2:  # to a lazy view and back
                parameter = state["model"]["x"]
                parameter.data = LAZY[way](parameter.data)
            reference, target = content(state), copy.deepcopy(state)
            target["model"]["x"].data = torch.zeros(3, 2, dtype=torch.complex64)
            manager.save(state, number)
            assert_restores(root, reference, target, step=number)


def test_a_model_that_returns_to_its_first_dtype_is_saved_in_it(root: str) -> None:
    state = without_buffers()
    with CheckpointManager(root) as manager:
        for number, dtype in enumerate([torch.float32, torch.bfloat16, torch.float32]):
            state["model"].to(dtype)
            reference, target = content(state), blank_like(state, step)
            manager.save(state, number)
            assert_restores(root, reference, target, step=number)


def test_what_is_swapped_in_while_memory_is_reserved_is_not_what_a_later_save_holds(
    root: str,
) -> None:
    """The plan is laid over the slots in the background, at any time after ``prepare``."""
    state = trained()
    with CheckpointManager(root) as manager:
        reserver, gate = manager._saver._reserver, threading.Event()
        reserver.submit(gate.wait, 20)
        manager.prepare(state)
        weight = state["model"].two.weight
        own, average = weight.data, torch.full_like(weight, 7.0)
        weight.data = average
        gate.set()
        reserver.submit(bool).result(20)  # all tasks before this one are done
        weight.data = own
        reference = content(state)
        manager.save(state, 1)
    assert_restores(root, reference, trained(seed=5))


def test_local_shards_whose_memory_took_another_form_are_refused_by_name(root: str) -> None:
    memory = torch.ones(4, 2)
    state = {"x": LocalShards((4, 2), [((0, 0), memory)])}
    with CheckpointManager(root) as manager:
        manager.save(state, 1)
        for other in (torch.ones(4, 2, dtype=torch.float64), torch.ones(3, 2)):
            memory.data = other
            with pytest.raises(UnsupportedValue, match="'x' is a LocalShards"):
                manager.save(state, 2)


def test_two_states_saved_in_turn_by_one_manager_keep_apart(root: str, window: Window) -> None:
    """The states are a model and another of the same form, under the same names."""
    states = [trained(seed=seed) for seed in range(2)]
    references = []
    with CheckpointManager(root) as manager:
        for number in range(6):
            state = states[number % 2]
            window.save(manager, state, number)
            references.append(window.reference)
            window.must_wait(partial(train, state, number))
    for number, reference in enumerate(references):
        assert_restores(root, reference, trained(seed=5), step=number)


def test_an_optimizer_that_was_taken_out_does_not_wait_for_saves_it_has_no_part_in(
    root: str, window: Window
) -> None:
    """No optimizer in the state owns its tensors then, so they are copied at once."""
    state = trained()
    with CheckpointManager(root) as manager:
        manager.save(state, 1)
        alone = {"model": state["model"]}
        reference = content(alone)
        pending = manager.save_async(alone, 2)
        forward_backward(state, 3)
        state["optimizer"].step()
        pending.result(60)
    assert_restores(root, reference, {"model": job(seed=5)["model"]}, step=2)
