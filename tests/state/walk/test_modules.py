from __future__ import annotations

import copy
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import nn
from torch.distributed.fsdp import FullyShardedDataParallel as FSDP
from torch.optim import Optimizer
from torch.optim import lr_scheduler as lrs

import ckpt
from ckpt import CheckpointManager
from ckpt.errors import EntryMissing, EntryUnexpected, RestoreError, UnsupportedValue
from tests.kit.marks import each_once
from tests.kit.models import compiled
from tests.state.ranks import rank_of
from tests.state.saving import (
    assert_same,
    bits,
    manifest_of,
    new_root,
    restored,
    round_trip,
    saved,
)


def net(seed: int = 0) -> nn.Sequential:
    torch.manual_seed(seed)
    return nn.Sequential(nn.Linear(6, 8), nn.BatchNorm1d(8), nn.ReLU(), nn.Linear(8, 3))


def names_of(state: dict[str, Any]) -> set[str]:
    manifest = manifest_of(saved(state))
    return {tensor.name for tensor in manifest.tensors} | set(manifest.tied)


# -- modules ---------------------------------------------------------------------------------------


def test_parameters_and_buffers_come_back_in_place() -> None:
    source, target = net(0), net(1)
    source(torch.randn(5, 6))  # this changes BatchNorm's statistics
    parameters = list(target.parameters())
    round_trip({"m": source}, {"m": target})
    assert_same(dict(source.state_dict()), dict(target.state_dict()))
    assert int(target.get_buffer("1.num_batches_tracked")) == 1
    assert all(one is two for one, two in zip(parameters, target.parameters(), strict=True))


def test_a_buffer_that_is_not_persistent_is_not_saved() -> None:
    module = nn.Module()
    module.register_buffer("kept", torch.ones(2))
    module.register_buffer("cache", torch.ones(2), persistent=False)
    assert names_of({"m": module}) == {"m/kept"}


class Counts(nn.Module):
    """A module whose extra state the test chooses."""

    def __init__(self, extra: Any) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.zeros(2))
        self.extra = extra

    def get_extra_state(self) -> Any:
        return self.extra

    def set_extra_state(self, state: Any) -> None:
        self.extra = state


@pytest.mark.parametrize(
    "extra",
    [
        {"seen": 3, "scale": torch.arange(4.0), "names": ["a"]},
        torch.arange(5),
        [1, (2, None)],
        None,
        7,
    ],
)
@pytest.mark.parametrize("nested", [False, True])
def test_extra_state_comes_back(extra: Any, nested: bool) -> None:
    def build(extra: Any) -> nn.Module:
        return nn.Sequential(nn.Linear(2, 2), Counts(extra)) if nested else Counts(extra)

    source, target = build(extra), build("before")
    round_trip({"m": source}, {"m": target})
    assert_same((target[1] if nested else target).extra, extra)  # type: ignore[index, union-attr]


def test_extra_state_of_the_trained_part_comes_back() -> None:
    source, target = nn.Sequential(Counts(3)), nn.Sequential(Counts(0))
    round_trip({"m": ckpt.trainable(source)}, {"m": ckpt.trainable(target)})
    assert target[0].extra == 3


def test_the_report_names_the_trained_part_s_meta_tensors_like_the_model_s() -> None:
    def build(device: str) -> nn.Module:
        model = nn.Sequential(
            nn.Linear(2, 2, bias=False), nn.Linear(2, 2, bias=False, device=device)
        )
        model[1].requires_grad_(False)
        return model

    root = saved({"m": ckpt.trainable(build("cpu"))})
    report = restored(root, {"m": ckpt.trainable(build("meta"))})
    assert report.uninitialised == ("m/1.weight",)


class Versioned(nn.Module):
    """A module that resets a buffer that a checkpoint of its first version lacks, as batch norms
    do.
    """

    _version = 2

    def __init__(self, seed: int) -> None:
        super().__init__()
        self.register_buffer("mean", torch.arange(3.0) + seed)

    def _load_from_state_dict(
        self, state_dict: dict[str, Any], prefix: str, local_metadata: dict[str, Any], *args: Any
    ) -> None:
        if local_metadata.get("version", 1) < 2 and f"{prefix}mean" not in state_dict:
            state_dict[f"{prefix}mean"] = torch.zeros(3)
        super()._load_from_state_dict(state_dict, prefix, local_metadata, *args)


def test_extra_state_of_one_module_resets_nothing_of_another() -> None:
    source = nn.Sequential(Versioned(5), Counts(3))
    target = nn.Sequential(Versioned(7), Counts(0))
    round_trip({"m": source}, {"m": target})
    assert_same(target[0].mean, source[0].mean)  # type: ignore[union-attr]
    assert target[1].extra == 3


@pytest.mark.filterwarnings("ignore")  # about the CPU, deprecations, and one rank
@pytest.mark.parametrize("named", [True, False])
def test_extra_state_inside_of_fsdp1_comes_back(named: bool) -> None:
    def build(seed: int, extra: int) -> FSDP:
        net = nn.Sequential(Versioned(seed), Counts(extra), nn.Linear(2, 2))
        return FSDP(net, use_orig_params=named, device_id=torch.device("cpu"))

    with rank_of(0, 1):
        source, target = build(5, 3), build(7, 0)
        round_trip({"m": source}, {"m": target})
    assert target[1].extra == 3
    assert_same(target[0].mean, source[0].mean)


class Noting(nn.Module):
    """A module with a note, which hooks or own methods put into its state dict."""

    def __init__(self, note: int) -> None:
        super().__init__()
        self.note = note


class NotingByMethod(Noting):
    def _save_to_state_dict(self, destination: Any, prefix: str, keep_vars: bool) -> None:
        destination[f"{prefix}note"] = self.note

    def _load_from_state_dict(self, state_dict: Any, prefix: str, *rest: Any) -> None:
        self.note = state_dict.pop(f"{prefix}note", self.note)
        super()._load_from_state_dict(state_dict, prefix, *rest)


@pytest.mark.filterwarnings("ignore")  # about the CPU, deprecations, and one rank
@pytest.mark.parametrize("named", [True, False])
def test_a_value_inside_of_fsdp1_comes_back_or_is_refused_by_name(named: bool) -> None:
    def build(*inside: nn.Module) -> FSDP:
        net = nn.Sequential(*inside, nn.Linear(2, 2))
        return FSDP(net, use_orig_params=named, device_id=torch.device("cpu"))

    hooked = Noting(3)
    hooked.register_state_dict_post_hook(
        lambda module, state_dict, prefix, _: state_dict.update({f"{prefix}note": module.note})
    )
    with rank_of(0, 1):
        source, target = build(NotingByMethod(3)), build(NotingByMethod(0))
        round_trip({"m": source}, {"m": target})
        assert target[0].note == 3
        with pytest.raises(UnsupportedValue, match=r"m/0\.note.*a hook of state_dict\(\) adds"):
            saved({"m": build(hooked)})


class Holder:
    """An object that saves a module inside of it, and notes the versions that it gets."""

    versions: object = None

    def __init__(self, module: nn.Module) -> None:
        self.module = module

    def state_dict(self) -> dict[str, Any]:
        return {"module": self.module.state_dict()}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        self.versions = vars(state["module"]).get("_metadata")
        self.module.load_state_dict(state["module"])


@pytest.mark.parametrize("left_out", [None, "x"])
def test_a_state_dict_keeps_the_versions_of_its_modules(left_out: str | None) -> None:
    """Without them a module treats a state as that of its first version."""
    module = net(0)
    state = {"holder": Holder(module), "dict": module.state_dict(), "x": 1}
    target: dict[str, Any] = {"holder": Holder(net(1)), "dict": None, "x": 0}
    with CheckpointManager(new_root()) as manager:
        manager.save(state, exclude=left_out)
        manager.restore(target, strict=left_out is None)
    versions = vars(state["dict"])["_metadata"]
    assert_same(vars(target["dict"])["_metadata"], versions)
    assert_same(target["holder"].versions, versions)


def test_names_are_those_of_the_bare_module_whatever_wraps_it() -> None:
    bare = names_of({"m": net()})
    inside = net()
    inside[0] = compiled(inside[0])
    assert names_of({"m": compiled(net())}) == bare
    assert names_of({"m": inside}) == bare
    assert names_of({"m": nn.DataParallel(net())}) == bare
    assert names_of({"m": nn.DataParallel(compiled(net()))}) == bare


def test_a_wrapped_module_under_two_names_has_the_names_of_the_bare_one() -> None:
    bare, wrapped = nn.Linear(2, 2), compiled(nn.Linear(2, 2))
    plain = nn.ModuleDict({"one": bare, "two": bare})
    both = nn.ModuleDict({"one": wrapped, "two": wrapped})
    assert names_of({"m": both}) == names_of({"m": plain})


def test_a_module_of_the_users_called_module_keeps_its_name() -> None:
    class Holder(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.module = nn.Linear(2, 2)

    assert names_of({"m": Holder()}) == {"m/module.weight", "m/module.bias"}
    assert names_of({"m": nn.DataParallel(Holder())}) == {"m/module.weight", "m/module.bias"}


def wrap_not(module: nn.Module) -> nn.Module:
    return module


@pytest.mark.parametrize("one", [wrap_not, compiled, nn.DataParallel])
@pytest.mark.parametrize("two", [wrap_not, compiled, nn.DataParallel])
def test_a_checkpoint_of_one_wrapping_goes_into_any_other(
    one: Callable[[nn.Module], nn.Module], two: Callable[[nn.Module], nn.Module]
) -> None:
    source, target = net(0), net(1)
    a, b = one(source), two(target)
    first, second = torch.optim.AdamW(a.parameters()), torch.optim.AdamW(b.parameters())
    source(torch.randn(4, 6)).sum().backward()
    first.step()
    round_trip({"m": a, "o": first}, {"m": b, "o": second})
    assert_same(dict(source.state_dict()), dict(target.state_dict()))
    assert_same(first.state_dict()["state"], second.state_dict()["state"])


def test_modules_in_lists_and_dicts_are_found() -> None:
    def build(seed: int) -> dict[str, Any]:
        first, second = net(seed), net(seed + 1)
        parameters = [*first.parameters(), *second.parameters()]
        return {"nets": [first, {"b": second}], "o": torch.optim.SGD(parameters, 0.1, momentum=0.9)}

    state, target = build(0), build(5)
    sum(p.sum() for group in state["o"].param_groups for p in group["params"]).backward()
    state["o"].step()
    round_trip(state, target)
    for one, two in zip(
        state["o"].param_groups[0]["params"], target["o"].param_groups[0]["params"], strict=True
    ):
        assert torch.equal(one, two)
        assert torch.equal(
            state["o"].state[one]["momentum_buffer"], target["o"].state[two]["momentum_buffer"]
        )


def test_a_module_that_lacks_or_has_more_than_was_saved_is_told_which() -> None:
    root = saved({"m": nn.Sequential(nn.Linear(2, 2))})
    with CheckpointManager(root) as manager:
        wide = nn.Sequential(nn.Linear(2, 2), nn.Linear(2, 2))
        before = copy.deepcopy(wide.state_dict())
        with pytest.raises(EntryMissing, match=r"'m/1\.weight'"):
            manager.restore({"m": wide})
        assert_same(dict(wide.state_dict()), dict(before))
        with pytest.raises(EntryUnexpected, match=r"'m/0\.bias'"):
            manager.restore({"m": nn.Sequential(nn.Linear(2, 2, bias=False))})


# -- optimizers ------------------------------------------------------------------------------------

Build = Callable[[nn.Module], Optimizer]


def two_groups(module: nn.Module) -> list[dict[str, Any]]:
    parameters = list(module.parameters())
    return [{"params": parameters[:2], "lr": 0.05}, {"params": parameters[2:], "weight_decay": 0.1}]


OPTIMIZERS: dict[str, Build] = {
    "SGD": lambda m: torch.optim.SGD(m.parameters(), 0.1),
    "SGD-momentum": lambda m: torch.optim.SGD(m.parameters(), 0.1, momentum=0.9, nesterov=True),
    "Adam": lambda m: torch.optim.Adam(m.parameters(), 0.01),
    "Adam-amsgrad": lambda m: torch.optim.Adam(m.parameters(), 0.01, amsgrad=True),
    "Adam-tensor-lr": lambda m: torch.optim.Adam(m.parameters(), torch.tensor(0.01)),
    "AdamW-loop": lambda m: torch.optim.AdamW(m.parameters(), 0.01, foreach=False),
    "AdamW-foreach": lambda m: torch.optim.AdamW(m.parameters(), 0.01, foreach=True),
    "AdamW-fused": lambda m: torch.optim.AdamW(m.parameters(), 0.01, fused=True),
    "AdamW-groups": lambda m: torch.optim.AdamW(two_groups(m), 0.01),
    "Adagrad": lambda m: torch.optim.Adagrad(m.parameters(), 0.05),
    "RMSprop": lambda m: torch.optim.RMSprop(m.parameters(), 0.01, momentum=0.5, centered=True),
    "NAdam": lambda m: torch.optim.NAdam(m.parameters(), 0.01),
    "RAdam": lambda m: torch.optim.RAdam(m.parameters(), 0.01),
    "Adadelta": lambda m: torch.optim.Adadelta(m.parameters(), 0.5),
    "Adamax": lambda m: torch.optim.Adamax(m.parameters(), 0.01),
    "ASGD": lambda m: torch.optim.ASGD(m.parameters(), 0.01),
    "Rprop": lambda m: torch.optim.Rprop(m.parameters(), 0.01),
    "Adafactor": lambda m: torch.optim.Adafactor(m.parameters(), 0.01),
    "LBFGS": lambda m: torch.optim.LBFGS(m.parameters(), 0.1, max_iter=3, history_size=4),
}

SCHEDULERS: dict[str, Callable[[Optimizer], Any]] = {
    "none": lambda o: None,
    "StepLR": lambda o: lrs.StepLR(o, 2),
    "MultiStepLR": lambda o: lrs.MultiStepLR(o, [2, 2, 5, 7]),
    "OneCycleLR": lambda o: lrs.OneCycleLR(o, 0.1, total_steps=50),
    "Cosine": lambda o: lrs.CosineAnnealingLR(o, 9),
    "CosineWarmRestarts": lambda o: lrs.CosineAnnealingWarmRestarts(o, 3),
    "Sequential": lambda o: lrs.SequentialLR(
        o, [lrs.LinearLR(o, 0.1, total_iters=3), lrs.ExponentialLR(o, 0.9)], [3]
    ),
    "Chained": lambda o: lrs.ChainedScheduler(
        [lrs.LinearLR(o, 0.1, total_iters=3), lrs.ExponentialLR(o, 0.9)]
    ),
    "Plateau": lambda o: lrs.ReduceLROnPlateau(o, patience=1),
    "Lambda": lambda o: lrs.LambdaLR(o, lambda epoch: 0.9**epoch),
    "Cyclic": lambda o: lrs.CyclicLR(o, 0.001, 0.1, step_size_up=3, cycle_momentum=False),
}


class Job:
    """A small training whose losses show whether anything was lost."""

    def __init__(self, build: Build, schedule: Callable[[Optimizer], Any], seed: int) -> None:
        self.model = net(seed)
        self.optimizer = build(self.model)
        self.scheduler = schedule(self.optimizer)

    @property
    def state(self) -> dict[str, Any]:
        state = {"model": self.model, "optimizer": self.optimizer}
        return state if self.scheduler is None else {**state, "scheduler": self.scheduler}

    def step(self, number: int) -> bytes:
        generator = torch.Generator().manual_seed(number)
        x, y = torch.randn(8, 6, generator=generator), torch.randn(8, 3, generator=generator)

        def closure() -> Any:
            self.optimizer.zero_grad()
            loss = nn.functional.mse_loss(self.model(x), y)
            loss.backward()
            return loss

        loss = self.optimizer.step(closure)
        if isinstance(self.scheduler, lrs.ReduceLROnPlateau):
            self.scheduler.step(number)
        elif self.scheduler is not None:
            self.scheduler.step()
        return bits(torch.as_tensor(loss))

    def run(self, first: int, last: int) -> list[bytes]:
        return [self.step(number) for number in range(first, last)]


@pytest.mark.filterwarnings("ignore:Detected call of `lr_scheduler:UserWarning")
@pytest.mark.parametrize(
    ("already", "names"),
    each_once(
        [0, 7],
        [
            *((name, "StepLR") for name in OPTIMIZERS),
            *(("SGD-momentum", name) for name in SCHEDULERS),
            ("Adam-tensor-lr", "OneCycleLR"),
            ("AdamW-groups", "Lambda"),
        ],
    ),
)
def test_training_goes_on_as_if_it_had_never_stopped(names: tuple[str, str], already: int) -> None:
    build, schedule = OPTIMIZERS[names[0]], SCHEDULERS[names[1]]
    job = Job(build, schedule, seed=0)
    job.run(0, 4)
    root = new_root()
    with CheckpointManager(root) as manager:
        manager.save_async(job.state, 4)
        expected = job.run(4, 9)  # the save streams meanwhile
    other = Job(build, schedule, seed=1)
    other.run(50, 50 + already)
    restored(root, other.state)
    assert other.run(4, 9) == expected
    assert_same(dict(job.model.state_dict()), dict(other.model.state_dict()))


def test_a_capturable_learning_rate_keeps_its_address() -> None:
    job = Job(lambda m: torch.optim.Adam(m.parameters(), torch.tensor(0.5)), SCHEDULERS["none"], 0)
    other = Job(
        lambda m: torch.optim.Adam(m.parameters(), torch.tensor(0.1)), SCHEDULERS["none"], 1
    )
    held = other.optimizer.param_groups[0]["lr"]
    round_trip(job.state, other.state)
    assert other.optimizer.param_groups[0]["lr"] is held
    assert held.item() == 0.5


def test_an_optimizer_that_never_stepped_is_restored_into_one_that_has() -> None:
    job, other = (Job(OPTIMIZERS["Adam"], SCHEDULERS["none"], seed) for seed in (0, 1))
    other.run(0, 3)
    round_trip(job.state, other.state)
    assert other.optimizer.state_dict()["state"] == {}
    assert other.run(0, 3) == job.run(0, 3)


def test_state_follows_its_parameter_not_its_position() -> None:
    def build(module: nn.Module, *, turned: bool) -> Optimizer:
        groups = two_groups(module)
        if turned:
            groups = [{**group, "params": group["params"][::-1]} for group in groups[::-1]]
        return torch.optim.AdamW(groups, 0.01)

    job = Job(lambda m: build(m, turned=False), SCHEDULERS["none"], 0)
    other = Job(lambda m: build(m, turned=True), SCHEDULERS["none"], 1)
    job.run(0, 3)
    round_trip(job.state, other.state)
    for one, two in zip(job.model.parameters(), other.model.parameters(), strict=True):
        assert_same(dict(job.optimizer.state[one]), dict(other.optimizer.state[two]))
    assert other.optimizer.param_groups[0]["weight_decay"] == 0.1
    assert job.run(3, 6) == other.run(3, 6)


def test_the_names_of_a_groups_parameters_are_those_of_the_target() -> None:
    """They say which parameter is at which place, and that may differ from the checkpoint."""

    def build(seed: int, *, turned: bool, groups: int) -> dict[str, Any]:
        model = net(seed)
        named = list(model.named_parameters())[:: -1 if turned else 1]
        each = [{"params": named[index::groups]} for index in range(groups)]
        optimizer = torch.optim.SGD(each, lr=0.1 + seed, momentum=0.9)
        model(torch.randn(5, 6)).sum().backward()
        optimizer.step()
        return {"model": model, "optimizer": optimizer}

    one, two = build(0, turned=False, groups=2), build(1, turned=True, groups=1)
    names = two["optimizer"].param_groups[0]["param_names"]
    round_trip(one, two)
    group = two["optimizer"].param_groups[0]
    assert group["lr"] == 0.1
    assert group["param_names"] == names
    assert names == [name for name, _ in reversed(list(two["model"].named_parameters()))]


def test_a_key_that_is_no_string_is_the_same_in_an_optimizer_that_has_not_stepped() -> None:
    def build(seed: int, **state: Any) -> dict[str, Any]:
        model = nn.Linear(2, 2).requires_grad_()
        optimizer = torch.optim.SGD(model.parameters(), 0.1)
        optimizer.state[model.weight].update(state.get("entries", {}))
        return {"model": model, "optimizer": optimizer}

    entries = {7: torch.ones(3), -1: "x", "~27": torch.zeros(2), "a/b": 1.5}
    target = round_trip(build(0, entries=entries), build(1))
    assert_same(dict(target["optimizer"].state[target["model"].weight]), entries)

    root = saved(build(0, entries={(0, 1): torch.ones(3)}))
    with (
        CheckpointManager(root) as manager,
        pytest.raises(RestoreError, match="take one optimizer step before restoring"),
    ):
        manager.restore(build(1))
    target = build(1, entries={(0, 1): torch.zeros(3)})
    restored(root, target)
    assert_same(dict(target["optimizer"].state[target["model"].weight]), {(0, 1): torch.ones(3)})


def test_groups_with_different_settings_cannot_be_joined() -> None:
    job = Job(OPTIMIZERS["AdamW-groups"], SCHEDULERS["none"], 0)
    other = Job(lambda m: torch.optim.AdamW(m.parameters()), SCHEDULERS["none"], 1)
    before = copy.deepcopy(other.model.state_dict())
    with (
        CheckpointManager(saved(job.state)) as manager,
        pytest.raises(RestoreError, match="optimizer/param_groups"),
    ):
        manager.restore(other.state)
    assert_same(dict(other.model.state_dict()), dict(before))


def test_state_of_another_precision_than_its_parameter_is_kept_bit_for_bit() -> None:
    """load_state_dict would cast it to the parameter's dtype, and a master copy in fp32 would be
    lost.
    """

    def build(seed: int) -> dict[str, Any]:
        torch.manual_seed(seed)
        model = nn.Linear(5, 4).to(torch.bfloat16)
        optimizer = torch.optim.SGD(model.parameters(), 0.1)
        for parameter in model.parameters():
            optimizer.state[parameter] = {
                "master": parameter.detach().float() + torch.randn(parameter.shape) * 1e-4,
                "exp_avg": torch.randn(parameter.shape, dtype=torch.float64),
                "step": torch.tensor(3.0),
                "count": 7,
                "history": [torch.randn(2), (1, "x")],
            }
        return {"m": model, "o": optimizer}

    state, fresh, model = build(0), build(1), nn.Linear(5, 4).to(torch.bfloat16)
    empty: dict[str, Any] = {"m": model, "o": torch.optim.SGD(model.parameters(), 0.1)}
    for target in (fresh, empty):
        round_trip(state, target)
        for one, two in zip(state["m"].parameters(), target["m"].parameters(), strict=True):
            have = dict(target["o"].state[two])
            assert_same({key: have[key] for key in state["o"].state[one]}, state["o"].state[one])
            assert len(have) == 5


def test_an_optimizer_of_parameters_that_no_module_holds_goes_by_position() -> None:
    def build(seed: int) -> dict[str, Any]:
        torch.manual_seed(seed)
        parameters = [nn.Parameter(torch.randn(3)), nn.Parameter(torch.randn(2, 2))]
        optimizer = torch.optim.Adam(parameters)
        torch.stack([(p**2).sum() for p in parameters]).sum().backward()
        optimizer.step()
        return {"a": parameters[0], "b": parameters[1], "o": optimizer}

    state, target = build(0), build(1)
    round_trip(state, target)
    assert torch.equal(state["a"], target["a"])
    assert_same(state["o"].state_dict()["state"], target["o"].state_dict()["state"])


def test_an_optimizer_held_by_another_object_is_saved_through_it() -> None:
    class Accelerated(Optimizer):
        """A wrapper like Accelerate's."""

        __module__ = "accelerate.optimizer"

        def __init__(self, inner: Optimizer) -> None:
            self.optimizer = inner

        state = property(lambda self: self.optimizer.state)
        param_groups = property(lambda self: self.optimizer.param_groups)

    job, other = (Job(OPTIMIZERS["Adam"], SCHEDULERS["none"], seed) for seed in (0, 1))
    job.run(0, 2)
    round_trip(
        {"m": job.model, "o": Accelerated(job.optimizer)},
        {"m": other.model, "o": Accelerated(other.optimizer)},
    )
    assert_same(job.optimizer.state_dict()["state"], other.optimizer.state_dict()["state"])


def test_an_optimizer_with_other_parameters_is_told_which() -> None:
    job = Job(OPTIMIZERS["Adam"], SCHEDULERS["none"], 0)
    job.run(0, 1)
    root = saved(job.state)
    fewer = net(1)
    optimizer = torch.optim.Adam(fewer[0].parameters())
    with (
        CheckpointManager(root) as manager,
        pytest.raises(EntryUnexpected, match=r"optimizer/model/3\.weight"),
    ):
        manager.restore({"model": fewer, "optimizer": optimizer})


def test_a_grad_scaler_comes_back() -> None:
    def scaler(scale: float) -> torch.amp.GradScaler:
        return torch.amp.GradScaler("cpu", init_scale=scale, growth_interval=7)

    one, two = scaler(512.0), scaler(2.0)
    one.scale(torch.ones(1))
    round_trip({"s": one}, {"s": two})
    assert two.state_dict() == one.state_dict()
    assert two.get_scale() == 512.0


def test_an_averaged_model_comes_back_with_its_count() -> None:
    model = net(0)
    averaged = torch.optim.swa_utils.AveragedModel(model)
    averaged.update_parameters(model)
    other = torch.optim.swa_utils.AveragedModel(net(1))
    round_trip({"ema": averaged}, {"ema": other})
    assert_same(dict(averaged.state_dict()), dict(other.state_dict()))
