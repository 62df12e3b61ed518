"""The code by which an optimizer loads a state dict runs in a restore, as torch runs it."""

from __future__ import annotations

import copy
from collections import defaultdict
from collections.abc import Callable, Iterable
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn
from torch.optim import Optimizer

from ckpt.errors import RestoreError, UnsupportedValue
from tests.kit.worlds import world
from tests.state.saving import assert_same, restored, saved, tree_of

Make = Callable[[Iterable[nn.Parameter]], Optimizer]
WORKERS = Path(__file__).parents[1] / "workers"
KINDS: dict[str, Make] = {
    "Adam": torch.optim.Adam,
    "AdamW": torch.optim.AdamW,
    "NAdam": torch.optim.NAdam,
    "RAdam": torch.optim.RAdam,
    "Adamax": torch.optim.Adamax,
    "Adadelta": torch.optim.Adadelta,
    "Adagrad": torch.optim.Adagrad,
    "RMSprop": torch.optim.RMSprop,
    "Rprop": torch.optim.Rprop,
    "ASGD": torch.optim.ASGD,
    "SGD": lambda parameters: torch.optim.SGD(parameters, 0.1, momentum=0.9),
    "Adafactor": torch.optim.Adafactor,
    "Muon": lambda parameters: torch.optim.Muon([p for p in parameters if p.ndim == 2]),
    "LBFGS": lambda parameters: torch.optim.LBFGS(parameters, max_iter=2),
}
COUNTERS = ("step", "mu_product", "eta", "mu")
ADDED = ("maximize", "foreach", "capturable", "differentiable", "fused", "decoupled_weight_decay")


def net() -> nn.Linear:
    torch.manual_seed(0)
    return nn.Linear(4, 4)


def train(model: nn.Module, optimizer: Optimizer, steps: int = 1) -> None:
    def closure() -> torch.Tensor:
        optimizer.zero_grad()
        loss = (model(torch.ones(2, 4)) ** 2).sum()
        loss.backward()
        return loss  # type: ignore[no-any-return]

    for _ in range(steps):
        if isinstance(optimizer, torch.optim.LBFGS):
            optimizer.step(closure)
        else:
            closure()
            optimizer.step()


def state(make: Make, steps: int = 0) -> dict[str, Any]:
    model = net()
    optimizer = make(model.parameters())
    train(model, optimizer, steps)
    return {"model": model, "optimizer": optimizer}


def age(optimizer: Optimizer) -> None:
    """Give ``optimizer`` what torch 1.11 saved: plain numbers, and fewer settings."""
    for values in optimizer.state.values():
        for key in COUNTERS:
            if key in values:
                values[key] = float(values[key]) if key != "step" else int(values[key])
    for group in optimizer.param_groups:
        for key in ADDED:
            if not isinstance(optimizer, torch.optim.Adafactor | torch.optim.Muon):
                group.pop(key, None)


def loaded_by_torch(source: dict[str, Any], target: dict[str, Any]) -> dict[str, Any]:
    target["model"].load_state_dict(copy.deepcopy(source["model"].state_dict()))
    target["optimizer"].load_state_dict(copy.deepcopy(source["optimizer"].state_dict()))
    return target


def assert_continues(one: dict[str, Any], other: dict[str, Any]) -> None:
    """Check that both are equal, and stay equal in two steps of training."""
    for _ in range(3):
        assert_same(one["optimizer"].state_dict(), other["optimizer"].state_dict())
        assert_same(dict(one["model"].state_dict()), dict(other["model"].state_dict()))
        for each in (one, other):
            train(each["model"], each["optimizer"])


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("is_stepped", [False, True])
def test_what_an_old_torch_saved_is_trained_on_as_after_torch_s_own_load(
    kind: str, is_stepped: bool
) -> None:
    source = state(KINDS[kind], steps=3)
    age(source["optimizer"])
    wanted = loaded_by_torch(source, state(KINDS[kind]))
    target = state(KINDS[kind], steps=int(is_stepped))
    restored(saved(source), target)
    assert_continues(wanted, target)


@pytest.mark.parametrize("one", ["Adam", "AdamW"])
@pytest.mark.parametrize("other", ["Adam", "AdamW"])
def test_adam_and_adamw_take_each_other_s_state_as_torch_does(one: str, other: str) -> None:
    def make(kind: Any) -> Make:
        return lambda parameters: kind(parameters, lr=0.1, weight_decay=0.5)

    source = state(make(getattr(torch.optim, one)), steps=2)
    wanted = loaded_by_torch(source, state(make(getattr(torch.optim, other))))
    target = state(make(getattr(torch.optim, other)))
    restored(saved(source), target)
    assert target["optimizer"].param_groups[0]["decoupled_weight_decay"] is (
        "AdamW" in (one, other)
    )
    assert_continues(wanted, target)


class Deriving(torch.optim.SGD):
    """Derives values when it is loaded."""

    def __init__(self, parameters: Iterable[nn.Parameter]) -> None:
        super().__init__(parameters, lr=0.1, momentum=0.9)
        self.counts: list[int] = []

    def __setstate__(self, state: dict[str, Any]) -> None:
        super().__setstate__(state)
        self.counts = [len(group["params"]) for group in self.param_groups]
        for group in self.param_groups:
            group.setdefault("scale", 1.0)


def test_an_own_setstate_runs_after_the_state_is_there() -> None:
    target = state(Deriving)
    groups, group = target["optimizer"].param_groups, target["optimizer"].param_groups[0]
    restored(saved(state(lambda p: torch.optim.SGD(p, lr=0.3, momentum=0.9), steps=1)), target)
    assert target["optimizer"].counts == [2]
    assert target["optimizer"].param_groups is groups
    assert groups[0] is group
    assert (group["scale"], group["lr"]) == (1.0, 0.3)


@pytest.mark.parametrize("only", ["model", "optimizer/param_groups", "optimizer"])
def test_it_runs_if_any_part_of_the_optimizer_is_restored(only: str) -> None:
    target = state(Deriving)
    restored(saved(state(Deriving, steps=1)), target, only=only)
    assert target["optimizer"].counts == ([] if only == "model" else [2])


def test_hooks_run_in_torch_s_order_with_what_they_may_expect() -> None:
    source, calls = state(torch.optim.AdamW, steps=2), []
    wanted = copy.deepcopy(source["optimizer"].state_dict())
    target = state(torch.optim.AdamW, steps=1)
    held, moments = target["optimizer"], {}
    for parameter, values in held.state.items():
        moments[parameter] = values["exp_avg"].clone()

    def before(optimizer: Optimizer, state_dict: dict[str, Any]) -> None:
        calls.append("pre")
        assert optimizer is held
        assert_same(state_dict, wanted)
        for parameter, values in optimizer.state.items():  # They are the present ones still
            assert torch.equal(values["exp_avg"], moments[parameter])
            assert float(values["step"]) == 1

    held.register_load_state_dict_pre_hook(before)
    held.register_load_state_dict_post_hook(lambda _: calls.append("post"))
    held.register_load_state_dict_pre_hook(lambda *_: calls.append("first"), prepend=True)
    restored(saved(source), target)
    assert calls == ["first", "pre", "post"]
    assert_same(held.state_dict(), wanted)


def test_a_post_hook_keeps_a_setting() -> None:
    target = state(lambda p: torch.optim.AdamW(p, weight_decay=0.1))
    target["optimizer"].register_load_state_dict_post_hook(
        lambda optimizer: optimizer.param_groups[0].update(weight_decay=0.1)
    )
    restored(saved(state(lambda p: torch.optim.AdamW(p, weight_decay=0.5), steps=1)), target)
    assert target["optimizer"].param_groups[0]["weight_decay"] == 0.1


@pytest.mark.parametrize("returns", [False, True])
def test_a_pre_hook_keeps_what_the_optimizer_has(returns: bool) -> None:
    def make(lr: float) -> Make:
        return lambda parameters: torch.optim.AdamW(parameters, lr=torch.tensor(lr))

    def hook(optimizer: Optimizer, state_dict: dict[str, Any]) -> dict[str, Any] | None:
        present = optimizer.state_dict()
        if returns:
            return present
        state_dict["state"] = present["state"]
        for group, own in zip(state_dict["param_groups"], present["param_groups"], strict=True):
            group.update(own)
        return None

    target = state(make(0.25), steps=1)
    before = copy.deepcopy(target["optimizer"].state_dict())
    target["optimizer"].register_load_state_dict_pre_hook(hook)
    groups = target["optimizer"].param_groups
    restored(saved(state(make(0.5), steps=3)), target)
    assert_same(target["optimizer"].state_dict(), before)
    assert target["optimizer"].param_groups is groups


def test_a_pre_hook_gets_the_present_values_of_what_is_not_restored() -> None:
    target, seen = state(torch.optim.AdamW, steps=1), []
    target["optimizer"].register_load_state_dict_pre_hook(lambda _, given: seen.append(given))
    restored(saved(state(torch.optim.AdamW, steps=3)), target, only="optimizer/model/weight")
    assert [float(values["step"]) for values in seen[0]["state"].values()] == [3, 1]
    steps = [float(values["step"]) for values in target["optimizer"].state.values()]
    assert steps == [3, 1]


def test_a_pre_hook_that_does_not_fit_is_named() -> None:
    target = state(torch.optim.AdamW)
    target["optimizer"].register_load_state_dict_pre_hook(
        lambda *_: {"state": {}, "param_groups": [{"params": [0]}]}
    )
    with pytest.raises(RestoreError, match="'optimizer' was read, but AdamW does not take it"):
        restored(saved(state(torch.optim.AdamW, steps=1)), target)


class Loads(torch.optim.Adam):
    """Has a ``load_state_dict()`` of its own."""

    ends = 0

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        super().load_state_dict(state_dict)
        self.ends += 1


def test_an_own_load_state_dict_is_called() -> None:
    source, target = state(Loads, steps=2), state(Loads, steps=1)
    restored(saved(source), target)
    assert target["optimizer"].ends == 1
    assert_continues(source, target)


def test_moments_stay_in_their_own_dtype_under_an_own_load_state_dict() -> None:
    def half(kind: Make) -> dict[str, Any]:
        model = net().bfloat16()
        return {"model": model, "optimizer": kind(model.parameters())}

    source, target = half(Loads), half(Loads)
    for parameter in source["model"].parameters():
        source["optimizer"].state[parameter] = {
            "step": torch.tensor(3.0),
            "exp_avg": torch.rand(parameter.shape),
            "exp_avg_sq": torch.rand(parameter.shape),
        }
    restored(saved(source), target)
    assert target["optimizer"].ends == 1
    assert_same(target["optimizer"].state_dict(), source["optimizer"].state_dict())


@pytest.mark.parametrize("kind", [torch.optim.Adam, Loads])
def test_a_string_in_the_state_stays_a_string(kind: Make) -> None:
    """Torch loads it as the text of a generator: see findings/torch-optimizer-text-state.sh."""
    source, target = state(kind, steps=1), state(kind)
    for values in source["optimizer"].state.values():
        values["mode"] = "warmup"
    restored(saved(source), target)
    assert_same(target["optimizer"].state_dict(), source["optimizer"].state_dict())


@pytest.mark.parametrize("kind", [torch.optim.Adam, Loads])
def test_an_optimizer_of_a_meta_model_runs_its_code_over_real_tensors(kind: Make) -> None:
    source = state(kind, steps=2)
    age(source["optimizer"])
    with torch.device("meta"):
        target = state(kind)
    restored(saved(source), target)
    assert_continues(loaded_by_torch(source, state(kind)), target)


def test_values_that_a_state_dict_hook_adds_reach_the_hook_that_takes_them() -> None:
    source, target = state(torch.optim.SGD, steps=1), state(torch.optim.SGD)
    seen: list[Any] = []
    source["optimizer"].register_state_dict_pre_hook(lambda _: seen.append("pre"))
    source["optimizer"].register_state_dict_post_hook(
        lambda _, state_dict: {**state_dict, "count": 7, "mean": torch.ones(2)}
    )
    target["optimizer"].register_load_state_dict_pre_hook(
        lambda _, state_dict: seen.append((state_dict["count"], state_dict["mean"].tolist()))
    )
    restored(saved(source), target)
    assert seen == ["pre", (7, [1.0, 1.0])]


def test_settings_that_a_state_dict_hook_changes_are_saved_as_it_gives_them() -> None:
    source, target = state(torch.optim.SGD, steps=1), state(torch.optim.SGD)

    def hook(_: Optimizer, state_dict: dict[str, Any]) -> None:
        state_dict["param_groups"][0]["lr"] = 0.75

    source["optimizer"].register_state_dict_post_hook(hook)
    restored(saved(source), target)
    assert target["optimizer"].param_groups[0]["lr"] == 0.75
    assert source["optimizer"].param_groups[0]["lr"] != 0.75


def test_a_state_dict_hook_that_changes_the_state_is_refused_by_name() -> None:
    source = state(torch.optim.Adam, steps=1)

    def hook(_: Optimizer, state_dict: dict[str, Any]) -> None:
        state_dict["state"][0]["exp_avg"] = state_dict["state"][0]["exp_avg"] * 2

    source["optimizer"].register_state_dict_post_hook(hook)
    before = copy.deepcopy(source["optimizer"].state)
    with pytest.raises(UnsupportedValue, match="'optimizer' is a Adam with a state_dict hook"):
        saved(source)
    assert all(
        torch.equal(source["optimizer"].state[p]["exp_avg"], v["exp_avg"])
        for p, v in zip(source["optimizer"].state, before.values(), strict=True)
    )


def test_an_optimizer_without_hooks_has_no_values_beside_its_state() -> None:
    assert "values" not in tree_of(saved(state(torch.optim.Adam, steps=1)))["optimizer"]


class Bare(Optimizer):
    """Does not call ``Optimizer.__init__``."""

    def __init__(self, parameters: Iterable[nn.Parameter]) -> None:
        self.param_groups = [{"params": list(parameters), "lr": 0.1}]
        self.state = defaultdict(dict)
        self.defaults = {"lr": 0.1}

    def step(self, closure: Any = None) -> None:  # type: ignore[override]
        """Do nothing."""


class Own(torch.optim.SGD):
    def state_dict(self) -> dict[str, Any]:
        return {"own": super().state_dict()}


def keyed(value: Any) -> Make:
    def make(parameters: Iterable[nn.Parameter]) -> Optimizer:
        optimizer = torch.optim.SGD(parameters, lr=0.1)
        optimizer.state["k"] = value  # type: ignore[index]
        return optimizer

    return make


def of_a_parameter(value: Any) -> Make:
    def make(parameters: Iterable[nn.Parameter]) -> Optimizer:
        optimizer = torch.optim.SGD(parameters, lr=0.1)
        optimizer.state[optimizer.param_groups[0]["params"][0]] = value
        return optimizer

    return make


@pytest.mark.parametrize(
    ("make", "words"),
    [
        (Bare, "does not call Optimizer.__init__"),
        (Own, "a state_dict() of its own"),
        *((keyed(value), "state that belongs to no parameter")
          for value in (torch.zeros(1), 0, "abc", {"x": 0})),
        (of_a_parameter(torch.zeros(1)), "whose state of a parameter is a Tensor"),
        (of_a_parameter(3), "whose state of a parameter is a int"),
    ],
)  # fmt: skip
def test_an_optimizer_that_cannot_be_saved_is_refused_by_name_on_both_ways(
    make: Make, words: str
) -> None:
    with pytest.raises(UnsupportedValue) as failed:
        saved(state(make))
    assert words in str(failed.value)
    assert failed.value.name == "optimizer"
    target = state(make)
    before = copy.deepcopy(target["model"].state_dict())
    with pytest.raises(UnsupportedValue) as failed:
        restored(saved(state(lambda p: torch.optim.SGD(p, lr=0.3), steps=1)), target)
    assert words in str(failed.value)
    assert_same(dict(target["model"].state_dict()), dict(before))


@pytest.mark.parametrize("kind", ["zero", "fsdp2", "ddp"])
def test_it_runs_on_every_rank(kind: str, tmp_path: Path) -> None:
    assert world(2, WORKERS / "loading.py", kind, tmp_path).count("continues as torch") == 2
