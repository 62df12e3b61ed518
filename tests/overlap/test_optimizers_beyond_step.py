"""Optimizers that change their tensors outside of ``step``, or may do so.

Their tensors are copied before the call returns. Those of others are copied while training goes on.
"""

from __future__ import annotations

import importlib
import logging
from collections.abc import Callable, Iterable
from functools import partial
from typing import Any

import pytest
import torch
from torch import nn
from torch.optim import Optimizer

from ckpt import CheckpointManager, LocalShards
from ckpt.errors import UnsupportedValue
from ckpt.state.walk.collect import collect
from ckpt.state.walk.modules import methods_beyond_step
from tests.overlap.jobs import forward_backward, train, trained
from tests.overlap.sam import SAM
from tests.overlap.window import Window, assert_restores, content
from tests.state.saving import assert_same

Parameters = Iterable[nn.Parameter]


def package(name: str) -> Any:
    return pytest.importorskip(name, reason=f"{name} is not installed", exc_type=ImportError)


def schedule_free(kind: str, parameters: Parameters) -> Optimizer:
    made = getattr(package("schedulefree"), kind)(parameters, lr=0.01)
    made.train()
    return made


def late(state: dict[str, Any]) -> list[str]:
    """Return the names of the tensors that are copied while training goes on."""
    return sorted(held.name for held in collect(state, rank=0).named_tensors if held.is_late)


# -- schedule-free, from its own package -----------------------------------------------------------


@pytest.mark.parametrize(
    "kind",
    ["AdamWScheduleFree", "SGDScheduleFree", "RAdamScheduleFree", "AdamWScheduleFreeReference"],
)
def test_a_schedule_free_optimizer_as_its_documentation_saves_it(
    kind: str, root: str, window: Window
) -> None:
    """The order is ``eval``, save, ``train``. The last call moves every parameter."""
    build = partial(schedule_free, kind)
    state, twin = (trained(build, steps=8) for _ in range(2))  # RAdam begins with steps of size 0
    with CheckpointManager(root) as manager:
        for number in range(2, 5):
            for each in (state, twin):
                each["optimizer"].eval()
            pending = window.save(manager, state, number)
            reference = window.reference
            window.overtake(state["optimizer"].train, patience=10)
            assert window.overtaken, "train() is not held"
            assert window.changed
            twin["optimizer"].train()
            for each in (state, twin):
                train(each, number)
            pending.result(60)
    assert_same(content(state), content(twin))
    assert_restores(root, reference, trained(build, seed=5))


def test_a_schedule_free_optimizer_that_takes_a_closure_is_copied_late(
    root: str, window: Window
) -> None:
    """It changes its parameters only in ``step``."""
    build = partial(schedule_free_closure)
    state = trained(build)
    with CheckpointManager(root) as manager:
        window.save(manager, state)
        window.must_wait(lambda: train(state, 2))
    assert_restores(root, window.reference, trained(build, seed=5))


def schedule_free_closure(parameters: Parameters) -> Optimizer:
    made: Optimizer = package("schedulefree").AdamWScheduleFreeClosure(parameters, lr=0.01)
    return made


# -- sharpness-aware -------------------------------------------------------------------------------


def sharp(seed: int = 0) -> dict[str, Any]:
    """Return the wrapper and the optimizer that it holds. Each has its own state."""
    state = trained(partial(SAM, base=torch.optim.AdamW, lr=0.01), seed=seed, steps=0)
    state["base"] = state["optimizer"].base_optimizer
    sharp_step(state, 0)
    return state


def sharp_step(state: dict[str, Any], number: int) -> None:
    forward_backward(state, number)
    state["optimizer"].first_step(zero_grad=True)
    forward_backward(state, number)
    state["optimizer"].second_step(zero_grad=True)


def test_a_sharpness_aware_optimizer_may_take_its_first_step_at_once(
    root: str, window: Window
) -> None:
    state, twin = sharp(), sharp()
    with CheckpointManager(root) as manager:
        window.save(manager, state)
        forward_backward(state, 1)
        window.overtake(lambda: state["optimizer"].first_step(zero_grad=True), patience=10)
        assert window.overtaken
        assert window.changed
        forward_backward(state, 1)
        state["optimizer"].second_step(zero_grad=True)
    sharp_step(twin, 1)
    assert_same(content(state), content(twin))
    assert_restores(root, window.reference, sharp(seed=5))


def test_between_its_two_steps_the_state_is_saved_as_it_is(root: str, window: Window) -> None:
    state = sharp()
    forward_backward(state, 1)
    state["optimizer"].first_step(zero_grad=True)
    with CheckpointManager(root) as manager:
        window.save(manager, state)
        forward_backward(state, 1)
        window.overtake(lambda: state["optimizer"].second_step(zero_grad=True))
    target = sharp(seed=5)
    forward_backward(target, 1)
    # after that step its parameters differ from the ones that it keeps
    target["optimizer"].first_step(zero_grad=True)
    assert_restores(root, window.reference, target)


def test_an_optimizer_that_holds_another_with_state_of_its_own_is_refused_without_that_one(
    root: str,
) -> None:
    """Otherwise the moments would be lost."""
    state = sharp()
    del state["base"]
    with (
        CheckpointManager(root) as manager,
        pytest.raises(
            UnsupportedValue,
            match=r"SAM, which holds another optimizer \(AdamW\).*\.base_optimizer",
        ),
    ):
        manager.save_async(state, 1)


# -- the rule --------------------------------------------------------------------------------------


class Quiet(torch.optim.AdamW):
    """An optimizer that adds no public method."""

    def step(self, closure: Any = None) -> Any:
        return super().step(closure)

    def zero_grad(self, set_to_none: bool = True) -> None:
        super().zero_grad(set_to_none)

    def _reset(self) -> None: ...


class Averaging(torch.optim.SGD):
    def swap(self) -> None:
        """Exchange the parameters and their averages."""


class ByStaticMethod(torch.optim.SGD):
    @staticmethod
    def project(parameter: nn.Parameter) -> None:
        parameter.data.clamp_(-1, 1)


class Inherited(Averaging):
    pass


@pytest.mark.parametrize(
    ("kind", "methods"),
    [
        (torch.optim.AdamW, ()),
        (torch.optim.Adagrad, ()),  # it has share_memory()
        (Quiet, ()),
        (Averaging, ("swap",)),
        (ByStaticMethod, ("project",)),
        (Inherited, ("swap",)),
        (SAM, ("first_step", "second_step")),
    ],
)
def test_public_methods_of_a_class_that_torch_did_not_make_count(
    kind: Callable[..., Optimizer], methods: tuple[str, ...]
) -> None:
    more = {"base": torch.optim.SGD} if kind is SAM else {}
    assert methods_beyond_step(kind([nn.Parameter(torch.ones(2))], lr=0.1, **more)) == methods


def test_parameters_are_copied_late_if_every_optimizer_that_has_them_only_steps() -> None:
    model = nn.Linear(2, 2)
    model(torch.ones(2)).sum().backward()
    only_steps, swaps = (
        torch.optim.AdamW([model.weight, model.bias]),
        Averaging([model.bias], momentum=0.9),
    )
    for optimizer in (only_steps, swaps):
        optimizer.step()
    moments = [
        f"a/model/{name}/{key}"
        for name in ("bias", "weight")
        for key in ("exp_avg", "exp_avg_sq", "step")
    ]
    assert late({"model": model, "a": only_steps}) == [*moments, "model/bias", "model/weight"]
    assert late({"model": model, "a": only_steps, "b": swaps}) == [*moments, "model/weight"]
    assert late({"model": model, "b": swaps}) == []


def test_the_rule_holds_for_the_owner_of_local_shards() -> None:
    memory = nn.Parameter(torch.ones(4))
    for kind, expected in ((torch.optim.SGD, ["t"]), (Averaging, [])):
        assert late({"t": LocalShards((4,), [((0,), memory)], owner=kind([memory]))}) == expected


def test_an_optimizer_of_another_kind_at_the_same_place_is_seen() -> None:
    """The tensors and names are the same, but what is remembered of the last save is not used."""
    model = nn.Linear(2, 2)
    first, second = (
        torch.optim.SGD(model.parameters(), momentum=0.9),
        Averaging(model.parameters(), momentum=0.9),
    )
    model(torch.ones(2)).sum().backward()
    first.step()
    second.state = first.state
    with CheckpointManager("memory://kinds") as manager:
        for step, optimizer in enumerate((first, second, first)):
            manager.save({"model": model, "o": optimizer}, step)
            held = manager._last_walk.segments["o"].named_tensors
            assert {each.is_late for each in held} == {optimizer is first}


def test_a_log_line_names_the_class_once(root: str, caplog: pytest.LogCaptureFixture) -> None:
    state = trained(partial(Averaging, lr=0.1, momentum=0.9))
    with caplog.at_level(logging.INFO, "ckpt"), CheckpointManager(root) as manager:
        for step in range(3):
            manager.save(state, step)
    reported = [record.message for record in caplog.records if "beyond step()" in record.message]
    assert reported == [
        "ckpt: Averaging has methods beyond step() (swap): its tensors are copied before "
        "save_async returns"
    ]


# -- the table of docs/safety.md -------------------------------------------------------------------

KNOWN: dict[str, tuple[str, tuple[str, ...]]] = {
    "schedulefree.AdamWScheduleFree": ("schedulefree", ("eval", "train")),
    "schedulefree.RAdamScheduleFree": ("schedulefree", ("eval", "train")),
    "schedulefree.SGDScheduleFree": ("schedulefree", ("eval", "train")),
    "schedulefree.AdamWScheduleFreeClosure": ("schedulefree", ()),
    "schedulefree.RAdamScheduleFreeClosure": ("schedulefree", ()),
    "schedulefree.SGDScheduleFreeClosure": ("schedulefree", ()),
    "lion_pytorch.Lion": ("lion_pytorch", ()),
    "torchao.optim.AdamW8bit": ("torchao", ()),
}


@pytest.mark.parametrize("name", KNOWN)
def test_a_package_s_class_is_what_the_table_says(name: str) -> None:
    found, methods = KNOWN[name]
    package(found)
    module, _, kind = name.rpartition(".")
    made = getattr(importlib.import_module(module), kind)([nn.Parameter(torch.ones(2))])
    assert methods_beyond_step(made) == methods


def test_lion_waits(root: str, window: Window) -> None:
    build = partial(package("lion_pytorch").Lion, lr=0.01)
    state = trained(build)
    with CheckpointManager(root) as manager:
        window.save(manager, state)
        window.must_wait(lambda: train(state, 2))
    assert_restores(root, window.reference, trained(build, seed=5))


def test_torchao_s_quantised_moments_wait(root: str, window: Window) -> None:
    package("torchao")
    optim = importlib.import_module("torchao.optim")

    def build(seed: int) -> dict[str, Any]:
        torch.manual_seed(seed)
        weight = nn.Parameter(torch.randn(64, 64))  # it keeps smaller ones in 32 bits
        state = {"w": weight, "optimizer": optim.AdamW8bit([weight])}
        weight.square().sum().backward()
        state["optimizer"].step()
        return state

    state = build(0)
    with CheckpointManager(root) as manager:
        window.save(manager, state)
        window.must_wait(state["optimizer"].step)
    assert_restores(root, window.reference, build(5))


def test_an_optimizer_of_bitsandbytes_is_refused_by_name(root: str) -> None:
    optim = package("bitsandbytes").optim
    model = nn.Linear(4, 4)
    with (
        CheckpointManager(root) as manager,
        pytest.raises(UnsupportedValue, match="AdamW8bit, an optimizer with a state_dict"),
    ):
        manager.save_async({"model": model, "optimizer": optim.AdamW8bit(model.parameters())}, 1)


def test_a_wrapper_with_state_beside_that_of_the_inner_optimizer_is_refused(root: str) -> None:
    """Magma of the package pytorch_optimizer is such a wrapper."""

    class Wrapper(torch.optim.AdamW):
        def __init__(self, optimizer: torch.optim.Optimizer) -> None:
            super().__init__(optimizer.param_groups[0]["params"])
            self.optimizer, self.alignment = optimizer, torch.ones(())
            self.state, self.param_groups = optimizer.state, optimizer.param_groups

        def state_dict(self) -> dict[str, Any]:
            return {"base": self.optimizer.state_dict(), "alignment": self.alignment}

    model = nn.Linear(4, 4)
    wrapper = Wrapper(torch.optim.AdamW(model.parameters()))
    with (
        CheckpointManager(root) as manager,
        pytest.raises(UnsupportedValue, match="Wrapper, an optimizer with a state_dict"),
    ):
        manager.save_async({"model": model, "optimizer": wrapper}, 1)
