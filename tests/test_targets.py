"""A model in a restore: without memory, wrapped, compiled, or without its optimizer."""

from __future__ import annotations

import logging
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn
from torch.nn.parallel import DataParallel, DistributedDataParallel

from ckpt import CheckpointManager, PerRank, RngState
from ckpt.errors import EntryMissing, RestoreError, ShapeMismatch
from tests.kit.marks import each_once
from tests.kit.models import compiled
from tests.state.saving import restored


class Net(nn.Module):
    """A network with tied weights, a buffer that is saved and one that is not."""

    def __init__(self) -> None:
        super().__init__()
        self.embed = nn.Embedding(6, 4)
        self.body = nn.Sequential(nn.Linear(4, 4), nn.BatchNorm1d(4))
        self.head = nn.Linear(4, 6, bias=False)
        self.head.weight = self.embed.weight
        self.register_buffer("scale", torch.full((4,), 2.0), persistent=False)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        out: torch.Tensor = self.head(self.body(self.embed(x)) * self.scale)
        return out


def job(model: nn.Module, seed: int, *, steps: int = 1) -> dict[str, Any]:
    torch.manual_seed(seed)
    optimizer = torch.optim.AdamW(model.parameters(), lr=0.01 * seed)
    state = {"model": model, "optimizer": optimizer, "epoch": seed}
    for _ in range(steps):
        step(state)
    return state


def step(state: dict[str, Any]) -> torch.Tensor:
    state["optimizer"].zero_grad()
    loss: torch.Tensor = state["model"](torch.arange(6)).square().sum()
    loss.backward()
    state["optimizer"].step()
    return loss.detach()


def on_meta() -> Net:
    with torch.device("meta"):
        return Net()


@pytest.fixture
def saved() -> dict[str, Any]:
    torch.manual_seed(1)
    return job(Net(), 1)


@pytest.fixture
def root(tmp_path: Path, saved: dict[str, Any]) -> str:
    with CheckpointManager(str(tmp_path)) as manager:
        manager.save(saved, 5)
    return str(tmp_path)


def plain(model: nn.Module) -> Any:
    """Return the state without wrappers."""
    while (inner := getattr(model, "_orig_mod", getattr(model, "module", None))) is not None:
        model = inner
    return model


def assert_same(one: dict[str, Any], two: dict[str, Any]) -> None:
    """Check that model, optimizer and the step after are equal."""
    ones, twos = (plain(each["model"]) for each in (one, two))
    for name, tensor in ones.state_dict().items():
        assert torch.equal(tensor, twos.state_dict()[name]), name
    for (name, a), (_, b) in zip(ones.named_parameters(), twos.named_parameters(), strict=True):
        held, other = one["optimizer"].state[a], two["optimizer"].state[b]
        assert held.keys() == other.keys(), name
        assert all(torch.equal(held[key], other[key]) for key in held), name
    assert torch.equal(step(one), step(two))


# -- the meta device -------------------------------------------------------------------------------


def test_a_model_on_meta_and_an_optimizer_built_over_it(
    root: str, saved: dict[str, Any], caplog: pytest.LogCaptureFixture
) -> None:
    state = job(on_meta(), 2, steps=0)
    model = state["model"]
    model.embed.weight.tag = "kept"
    model.body[0].bias.requires_grad_(False)
    owned = [*state["optimizer"].param_groups[0]["params"]]
    with caplog.at_level(logging.WARNING):
        report = restored(root, state)
    assert [id(p) for p in owned] == [id(p) for p in model.parameters()]
    assert model.head.weight is model.embed.weight
    assert model.embed.weight.tag == "kept"
    assert [p.requires_grad for p in model.parameters()] == [True, True, False, True, True]
    assert all(type(p) is nn.Parameter and p.device.type == "cpu" for p in model.parameters())
    assert report.uninitialised == ("model/scale",)
    assert "model/scale" in caplog.text
    assert model.scale.is_meta
    model.scale = torch.full((4,), 2.0)
    model.body[0].bias.requires_grad_(True)
    assert_same(state, saved)


@pytest.mark.parametrize("only", ["optimizer", ["optimizer", "model/body.*"]])
def test_what_was_not_asked_for_stays_on_meta_though_its_optimizer_state_is_real(
    root: str, saved: dict[str, Any], only: Any
) -> None:
    """Its optimizer state is laid out by the parameter. Memory that nothing was read into must not
    become the weight.
    """
    state = job(on_meta(), 2, steps=0)
    model, wanted = state["model"], only != "optimizer"
    report = restored(root, state, only=only)
    assert [p.is_meta for p in model.parameters()] == [
        True,
        not wanted,
        not wanted,
        not wanted,
        not wanted,
    ]
    assert "model/embed.weight" in report.uninitialised
    for mine, other in zip(model.parameters(), saved["model"].parameters(), strict=True):
        held, known = state["optimizer"].state[mine], saved["optimizer"].state[other]
        assert torch.equal(held["exp_avg"], known["exp_avg"])
        assert mine.is_meta or torch.equal(mine, other)


def test_what_a_graph_or_a_view_holds_is_refused_before_anything_changes(root: str) -> None:
    for hold in (
        lambda model: model(torch.empty(2, dtype=torch.long, device="meta")),
        lambda model: model.body[0].weight.t(),
    ):
        state = job(on_meta(), 2, steps=0)
        held = hold(state["model"])
        with pytest.raises(RestoreError, match=r"model/.*graph or a view"):
            restored(root, state)
        assert all(p.is_meta for p in state["model"].parameters())
        del held
        restored(root, state)
        assert not any(p.is_meta for p in state["model"].parameters())


def test_on_the_default_device_only(root: str, saved: dict[str, Any]) -> None:
    model = on_meta()
    with torch.device("meta"), pytest.raises(RestoreError, match="outside of"):
        restored(root, {"model": model}, only="model/*")
    assert model.embed.weight.is_meta
    restored(root, {"model": model}, only="model/*")
    assert torch.equal(model.embed.weight, saved["model"].embed.weight)


def test_the_default_device_is_not_for_what_is_saved_on_the_cpu(
    tmp_path: Path, saved: dict[str, Any]
) -> None:
    """Torch refuses random states on any other device. Here the meta device stands for another
    device.
    """
    more = {"rng": PerRank(RngState()), "history": [[torch.ones(2)], 1], "model": saved["model"]}
    with CheckpointManager(str(tmp_path)) as manager:
        manager.save(more, 1)
        state: dict[str, Any] = {"rng": PerRank(RngState()), "history": None, "model": Net()}
        with torch.device("meta"):
            manager.restore(state)
    assert state["history"][0][0].tolist() == [1, 1]


def test_what_is_not_read_stays_without_memory_and_is_named(root: str) -> None:
    model = on_meta()
    report = restored(root, {"model": model}, only="model/body.*")
    assert report.uninitialised == ("model/embed.weight", "model/scale")
    assert model.embed.weight.is_meta
    assert not model.body[1].running_var.is_meta
    report = restored(root, {"model": model}, only="model/*")
    assert report.uninitialised == ("model/scale",)


def test_nothing_becomes_real_when_it_does_not_fit(root: str) -> None:
    state = job(on_meta(), 2, steps=0)
    state["model"].body[0] = nn.Linear(4, 5, device="meta")
    with pytest.raises(ShapeMismatch):
        restored(root, state)
    state["model"] = on_meta()
    state["model"].add_module("new", nn.Linear(2, 2, device="meta"))
    with pytest.raises(EntryMissing):
        restored(root, {"model": state["model"]}, only="model/*")
    assert all(p.is_meta for p in state["model"].parameters())
    report = restored(root, {"model": state["model"]}, only="model/*", strict=False)
    assert report.uninitialised == ("model/new.weight", "model/new.bias", "model/scale")
    assert report.missing == ("model/new.weight", "model/new.bias")


def test_nothing_becomes_real_when_the_data_is_damaged(root: str) -> None:
    [file] = Path(root).glob("step-*/rank-00000.safetensors")
    data = bytearray(file.read_bytes())
    data[4096:] = bytes(len(data) - 4096)
    file.write_bytes(data)
    state = job(on_meta(), 2, steps=0)
    with pytest.raises(RestoreError, match="intact"):
        restored(root, state)
    assert all(p.is_meta for p in state["model"].parameters())
    assert not state["optimizer"].state


def test_parameters_that_nothing_can_make_real(root: str) -> None:
    state = job(on_meta(), 2, steps=0)
    # this makes new parameters, and the optimizer owns the old ones
    state["model"].to_empty(device="cpu")
    with pytest.raises(RestoreError, match="build the optimizer after"):
        restored(root, state)
    state = job(on_meta(), 2, steps=0)
    state["model"].embed.weight.register_post_accumulate_grad_hook(lambda _: None)
    with pytest.raises(RestoreError, match="hooks"):
        restored(root, state)
    assert all(p.is_meta for p in state["model"].parameters())


def test_in_another_dtype_under_another_name_and_tensors_alone(
    root: str, saved: dict[str, Any]
) -> None:
    model = on_meta().to(torch.bfloat16)
    restored(root, {"student": model}, rename={"student": "model"}, cast=True, only="student")
    assert torch.equal(model.embed.weight, saved["model"].embed.weight.bfloat16())
    tensor = torch.empty(6, 4, device="meta")
    state = {"ema": tensor}
    restored(root, state, rename={"ema": "model/embed.weight"}, only="ema")
    assert torch.equal(tensor, saved["model"].embed.weight)
    assert state["ema"] is tensor


def test_a_subclass_of_parameter_stays_one(tmp_path: Path) -> None:
    class Special(nn.Parameter):
        pass

    def make(device: str) -> nn.Module:
        module = nn.Module()
        module.weight = Special(torch.ones(3, device=device))
        return module

    with CheckpointManager(str(tmp_path)) as manager:
        manager.save({"model": make("cpu")}, 1)
        model = make("meta")
        manager.restore({"model": model})
    assert type(model.weight) is Special
    assert model.weight.tolist() == [1, 1, 1]


# -- wrappers --------------------------------------------------------------------------------------


@pytest.fixture
def one_rank(tmp_path: Path) -> Iterator[None]:
    torch.distributed.init_process_group(
        "gloo", init_method=f"file://{tmp_path}/store", rank=0, world_size=1
    )
    yield
    torch.distributed.destroy_process_group()


WRAPPERS: dict[str, Callable[[nn.Module], nn.Module]] = {
    "plain": lambda model: model,
    "compiled": compiled,
    "ddp": DistributedDataParallel,
    "compiled ddp": lambda model: compiled(DistributedDataParallel(model)),
    "ddp of compiled": lambda model: DistributedDataParallel(compiled(model)),
    "data parallel": DataParallel,
}


@pytest.mark.usefixtures("one_rank")
@pytest.mark.parametrize(("there", "here"), each_once(WRAPPERS, WRAPPERS))
def test_whatever_wraps_the_model_then_and_now(tmp_path: Path, there: str, here: str) -> None:
    torch.manual_seed(1)
    one, two = (job(WRAPPERS[each](Net()), seed) for seed, each in ((1, there), (2, here)))
    with CheckpointManager(str(tmp_path)) as manager:
        manager.save(one, 1)
        manager.restore(two)
    assert_same(one, two)


@pytest.mark.usefixtures("one_rank")
@pytest.mark.parametrize("here", WRAPPERS)
def test_a_model_without_its_optimizer_and_the_reverse(
    root: str, saved: dict[str, Any], here: str
) -> None:
    state = job(WRAPPERS[here](Net()), 2)
    before = [value["exp_avg"].clone() for value in state["optimizer"].state.values()]
    report = restored(root, {"model": state["model"]}, only="model")
    assert report.read_bytes < sum(t.nbytes for t in saved["model"].state_dict().values()) * 1.1
    assert torch.equal(plain(state["model"]).embed.weight, saved["model"].embed.weight)
    for value, old in zip(state["optimizer"].state.values(), before, strict=True):
        assert torch.equal(value["exp_avg"], old)
    nn.init.ones_(plain(state["model"]).embed.weight)
    restored(root, state, only="optimizer")
    assert plain(state["model"]).embed.weight.min() == 1
    restored(root, {key: state[key] for key in ("model", "optimizer")}, strict=False)
    assert_same(state, saved)
