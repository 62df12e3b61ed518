from __future__ import annotations

import io
import json
import os
import pickle
import random
import shutil
import sys
from collections import Counter
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
import torch.distributed.checkpoint as dcp
from safetensors.torch import load_file, save_file, save_model
from torch import nn
from torch.distributed.checkpoint.filesystem import _StorageInfo
from torch.distributed.checkpoint.metadata import (
    ChunkStorageMetadata,
    Metadata,
    MetadataIndex,
    TensorProperties,
    TensorStorageMetadata,
)
from torch.distributed.checkpoint.state_dict import get_state_dict

from ckpt import CheckpointManager, PerRank, RngState, Tier
from ckpt.errors import ConfigError, KindMismatch, RestoreError, StepExists
from ckpt.exchange.foreign import imports
from ckpt.exchange.inert.inert_pickle import Inert, read_inert
from ckpt_backends.folder import posix
from ckpt_backends.folder.posix import PosixBackend
from tests.checkpoints import Written
from tests.cli.conftest import Cli
from tests.exchange.states import Net, odd_state, same, trained


def restored(step: int, **others: Any) -> tuple[Net, torch.optim.Optimizer, dict[str, Any]]:
    """Return a net and optimizer of another history, after a restore of ``step``."""
    net, optimizer = trained(seed=1, steps=1)
    state = {"model": net, "optimizer": optimizer, **others}
    with CheckpointManager("runs") as manager:
        report = manager.restore(state, step=step)
    assert report is not None
    return net, optimizer, state


def check(net: Net, optimizer: torch.optim.Optimizer) -> None:
    """Check that they are the trained ones, and that their next step is equal too."""
    other, other_optimizer = trained()
    assert same(dict(net.state_dict()), dict(other.state_dict()))
    assert same(optimizer.state_dict()["state"], other_optimizer.state_dict()["state"])
    for one, by in ((net, optimizer), (other, other_optimizer)):
        by.zero_grad()
        one(torch.arange(12)).square().mean().backward()
        by.step()
    assert all(same(a, b) for a, b in zip(net.parameters(), other.parameters(), strict=True))


def saved(**others: Any) -> dict[str, Any]:
    net, optimizer = trained()
    return {"model": net.state_dict(), "optimizer": optimizer.state_dict(), **others}


def test_torch_save_is_restored_into_a_model_and_optimizer(cli: Cli) -> None:
    torch.save(saved(epoch=3), "c.pt")
    ran = cli("import", "c.pt", "runs", "--step", 7, "--json")
    assert ran.code == 0, ran.err
    assert ran.json["names"]["optimizer"] == "optimizer of 5 parameters, by place"
    assert "'low' and 'norm.weight' of 'model' in either order" in str(ran.json["notes"])
    net, optimizer, state = restored(7, epoch=0)
    check(net, optimizer)
    assert state["epoch"] == 3
    assert cli("verify", 7).code == 0
    assert cli("show", 7, "--json").json["metadata"]["imported_as"] == "torch"


def test_names_as_tutorials_have_them(cli: Cli) -> None:
    found = saved()
    torch.save(
        {"model_state_dict": found["model"], "optimizer_state_dict": found["optimizer"]}, "c.pt"
    )
    ran = cli("import", "c.pt", "runs", "--step", 7)
    assert ran.code == 0
    assert "'model_state_dict' is 'model' now" in ran.err
    check(*restored(7)[:2])


def test_a_state_of_ddp_loses_its_prefix(cli: Cli) -> None:
    found = saved()
    found["model"] = {f"module.{name}": value for name, value in found["model"].items()}
    torch.save(found, "c.pt")
    assert "without 'module.'" in cli("import", "c.pt", "runs", "--step", 7).err
    check(*restored(7)[:2])


class Outer(nn.Module):
    """A module whose only child is called ``module``, as DDP calls what it wraps."""

    def __init__(self, module: nn.Module) -> None:
        super().__init__()
        self.module = module


def test_a_child_that_is_called_module_keeps_its_place(cli: Cli) -> None:
    net, optimizer = trained()
    found = {"model": Outer(net).state_dict(), "optimizer": optimizer.state_dict()}
    torch.save(found, "c.pt")
    assert cli("import", "c.pt", "runs", "--step", 7).code == 0
    other, another = trained(seed=1, steps=1)
    with CheckpointManager("runs") as manager:
        report = manager.restore({"model": Outer(other), "optimizer": another})
    assert report is not None
    assert (report.missing, report.unexpected) == ((), ())
    check(other, another)


@pytest.mark.parametrize("in_middle", [True, False])
@pytest.mark.parametrize("names_in_groups", [True, False])
def test_names_of_torch_compile_are_those_of_the_model(
    cli: Cli, in_middle: bool, names_in_groups: bool
) -> None:
    net, optimizer = trained()
    wrapped: nn.Module = torch.compile(net)  # type: ignore[assignment]
    if in_middle:  # Regional compilation compiles the parts of a model
        name, child = next(iter(net.named_children()))
        setattr(net, name, torch.compile(child))
        wrapped = net
    held = optimizer.state_dict()
    if names_in_groups:
        held["param_groups"][0]["param_names"] = [name for name, _ in wrapped.named_parameters()]
    torch.save({"model": wrapped.state_dict(), "optimizer": held}, "c.pt")
    ran = cli("import", "c.pt", "runs", "--step", 7)
    assert ran.code == 0
    assert "without '_orig_mod.'" in ran.err
    check(*restored(7)[:2])


def test_names_of_fsdp1_and_activation_checkpointing_are_those_of_the_model(cli: Cli) -> None:
    found = saved()
    parts = ("_fsdp_wrapped_module.", "_checkpoint_wrapped_module.", "")
    found["model"] = {
        f"_fsdp_wrapped_module.{name.replace('.', f'.{parts[index % 3]}')}": value
        for index, (name, value) in enumerate(found["model"].items())
    }
    torch.save(found, "c.pt")
    assert cli("import", "c.pt", "runs", "--step", 7).code == 0
    check(*restored(7)[:2])


def test_dcp_is_restored_into_a_model_and_optimizer(cli: Cli) -> None:
    net, optimizer = trained()
    model_state, optimizer_state = get_state_dict(net, optimizer)
    dcp.save({"model": model_state, "optimizer": optimizer_state, "epoch": 3}, checkpoint_id="c")
    ran = cli("import", "c", "runs", "--step", 7, "--json")
    assert ran.code == 0, ran.err
    assert ran.json["format"] == "dcp"
    assert ran.json["names"]["optimizer"] == "optimizer of 5 parameters of 'model', by name"
    net, optimizer, state = restored(7, epoch=0)
    check(net, optimizer)
    assert state["epoch"] == 3


@pytest.mark.parametrize(("out", "kind"), [("out.pt", "torch"), ("out", "dcp")])
def test_what_was_exported_comes_back(cli: Cli, out: str, kind: str) -> None:
    odd = odd_state()
    net, optimizer = trained()
    with CheckpointManager("first") as manager:
        manager.save({"model": net, "optimizer": optimizer, **odd}, step=5)
    assert cli("export", "first", out, "--format", kind).code == 0
    ran = cli("import", out, "runs", "--step", 5, "--plain", "tensors")
    assert ran.code == 0, ran.err
    expected = {**odd, "frozen": {1}, "np": 0.5, "array": torch.from_numpy(odd["array"])}
    if kind == "dcp":  # in DCP names are strings, dicts are plain, and an empty one is nothing
        del expected["empty"]
        expected |= {
            "flags": {"a": True, "none": None, "3": "three"},
            "ordered": {"b": 1, "a": 2},
            "count": {"x": 2},
        }
    blank: dict[str, Any] = {
        name: torch.zeros_like(value) if isinstance(value, torch.Tensor) else None
        for name, value in expected.items()
    }
    blank["tensors"] = {name: torch.zeros_like(value) for name, value in odd["tensors"].items()}
    blank["listed"] = [torch.zeros(2), torch.ones(3)]
    again, its_optimizer, state = restored(5, **blank)
    check(again, its_optimizer)
    for name, value in expected.items():
        assert same(state[name], value), name


@pytest.mark.parametrize(("out", "kind"), [("out.pt", "torch"), ("out", "dcp")])
def test_values_of_each_rank_come_back_to_it(cli: Cli, out: str, kind: str) -> None:
    """The state of the README: an export writes a list where it has ``PerRank``."""
    net, optimizer = trained()
    scheduler = torch.optim.lr_scheduler.StepLR(optimizer, 2)
    scheduler.last_epoch = 7
    others = {
        "scheduler": scheduler,
        "rng": PerRank(RngState()),
        "position": PerRank(41),
        "plain": [3],
    }
    with CheckpointManager("first") as manager:
        manager.save({"model": net, "optimizer": optimizer, **others}, step=5)
    drawn = random.random(), float(np.random.rand()), float(torch.rand(()))
    assert cli("export", "first", out, "--format", kind).code == 0
    assert cli("import", out, "runs", "--step", 5).code == 0
    scheduler = torch.optim.lr_scheduler.StepLR(trained()[1], 2)
    position = PerRank(0)
    others = {"scheduler": scheduler, "rng": PerRank(RngState()), "position": position, "plain": []}
    _, _, state = restored(5, **others)
    assert drawn == (random.random(), float(np.random.rand()), float(torch.rand(())))
    assert (scheduler.last_epoch, position.value, state["plain"]) == (7, 41, [3])


def test_a_list_of_another_world_asks_whose_value_a_rank_takes(cli: Cli) -> None:
    torch.save(saved(position=[10, 11]), "c.pt")
    assert cli("import", "c.pt", "runs", "--step", 7).code == 0
    with pytest.raises(ConfigError, match=r"PerRank value of 2 rank\(s\), this world has 1"):
        restored(7, position=PerRank(0))
    chosen = PerRank(0, on_resize=lambda *_: 1)
    restored(7, position=chosen)
    assert chosen.value == 11


def test_a_list_of_our_own_is_no_value_of_each_rank(cli: Cli) -> None:
    with CheckpointManager("runs") as manager:
        manager.save({"position": [10]}, step=7)
    with CheckpointManager("runs") as manager, pytest.raises(KindMismatch, match="exclude="):
        manager.restore({"position": PerRank(0)}, step=7)


def test_an_import_closes_all_stores_that_it_opens(
    cli: Cli, monkeypatch: pytest.MonkeyPatch
) -> None:
    opened, closed = Counter[str](), Counter[str]()

    class Counted(PosixBackend):
        def __init__(self, root: str, **options: Any) -> None:
            super().__init__(root, **options)
            opened[self.url] += 1

        def close(self) -> None:
            closed[self.url] += 1

    torch.save(saved(), "c.pt")
    monkeypatch.setattr(posix, "PosixBackend", Counted)
    imports.import_checkpoint(imports.ForeignCheckpoint(path="c.pt"), Tier("runs"), 1)
    with pytest.raises(StepExists):
        imports.import_checkpoint(imports.ForeignCheckpoint(path="c.pt"), Tier("runs"), 1)
    assert opened == closed == {os.path.realpath("runs"): 3}


def test_parts_of_several_ranks_are_put_together(cli: Cli) -> None:
    """Four ranks write such parts, with a table of contents that names parts in several files."""
    whole = torch.randn(10, 4)
    os.mkdir("c")
    table: dict[MetadataIndex, _StorageInfo] = {}
    parts = [(0, 3), (3, 6), (6, 9), (9, 10)]
    for rank, (start, end) in enumerate(parts):
        buffer = io.BytesIO()
        torch.save(whole[start:end].clone(), buffer)
        Path(f"c/__{rank}_0.distcp").write_bytes(b"lead" + buffer.getvalue())
        index = MetadataIndex("model.w", torch.Size([start, 0]), rank)
        table[index] = _StorageInfo(f"__{rank}_0.distcp", 4, len(buffer.getvalue()))
    chunks = [ChunkStorageMetadata(torch.Size([a, 0]), torch.Size([b - a, 4])) for a, b in parts]
    kind = TensorStorageMetadata(TensorProperties(dtype=whole.dtype), whole.size(), chunks)
    metadata = Metadata({"model.w": kind}, {"model.w": ("model", "w")}, table)
    Path("c/.metadata").write_bytes(pickle.dumps(metadata))
    assert cli("import", "c", "runs", "--step", 1).code == 0
    module = nn.Module()
    module.w = nn.Parameter(torch.zeros(10, 4))
    with CheckpointManager("runs") as manager:
        manager.restore({"model": module})
    assert same(module.w, nn.Parameter(whole))
    Path("c/__2_0.distcp").unlink()
    ran = cli("import", "c", "runs", "--step", 2)
    assert ran.code == 4
    assert "__2_0.distcp is missing, which holds 'model.w'" in ran.err


@pytest.mark.parametrize("sharded", [False, True])
def test_safetensors_become_a_model(cli: Cli, sharded: bool) -> None:
    net, _ = trained()
    if sharded:
        os.mkdir("c")
        state = {name: value.clone() for name, value in net.state_dict().items()}
        names = sorted(state)
        files = {
            name: f"model-{1 + (i > 3):05d}-of-00002.safetensors" for i, name in enumerate(names)
        }
        for file in set(files.values()):
            save_file({name: state[name] for name in names if files[name] == file}, f"c/{file}")
        Path("c/model.safetensors.index.json").write_text(json.dumps({"weight_map": files}))
    else:
        save_model(net, "c.safetensors")  # the metadata has one of two tied names
    assert cli("import", "c" if sharded else "c.safetensors", "runs", "--step", 0).code == 0
    other = trained(seed=1)[0]
    with CheckpointManager("runs") as manager:
        manager.restore({"model": other})
    assert same(dict(other.state_dict()), dict(net.state_dict()))


def test_safetensors_need_no_package(cli: Cli, monkeypatch: pytest.MonkeyPatch) -> None:
    with CheckpointManager("first") as manager:
        manager.save({"model": torch.nn.Linear(2, 2)}, step=1)
    assert (
        cli("export", "first", "x.safetensors", "--name", "model/*", "--strip", "model/").code == 0
    )
    monkeypatch.setitem(sys.modules, "safetensors", None)
    ran = cli("import", "x.safetensors", "runs", "--step", 1)
    assert ran.code == 0, ran.err


def test_a_folder_of_torch_files_is_one_state(cli: Cli) -> None:
    os.mkdir("c")
    for name, value in saved().items():
        torch.save(value, f"c/{name}.pt")
    assert cli("import", "c", "runs", "--step", 7).code == 0
    check(*restored(7)[:2])


def test_numbers_without_a_match_are_kept_by_place(cli: Cli) -> None:
    _, optimizer = trained()
    torch.save({"optimizer": optimizer.state_dict()}, "c.pt")
    ran = cli("import", "c.pt", "runs", "--step", 7)
    assert ran.code == 0
    assert "--param-names FILE" in ran.err
    _, its_optimizer = trained(seed=1)
    with CheckpointManager("runs") as manager:
        manager.restore({"optimizer": its_optimizer})
    assert same(its_optimizer.state_dict()["state"], optimizer.state_dict()["state"])


def in_groups(seed: int) -> tuple[nn.Module, torch.optim.Optimizer]:
    """Return a trained model. Its optimizer has the weights in one group, the biases in another."""
    torch.manual_seed(seed)
    model = nn.Sequential(nn.Linear(4, 4), nn.Linear(4, 4))
    weights = [value for value in model.parameters() if value.ndim > 1]
    biases = [value for value in model.parameters() if value.ndim == 1]
    groups = [{"params": biases, "weight_decay": 0.0}, {"params": weights, "weight_decay": 0.1}]
    optimizer = torch.optim.AdamW(groups, lr=0.1 * (seed + 1))
    model(torch.randn(3, 4)).square().sum().backward()
    optimizer.step()
    return model, optimizer


def test_an_optimizer_without_names_is_restored_by_place_as_torch_does(cli: Cli) -> None:
    model, optimizer = in_groups(0)
    torch.save({"model": model.state_dict(), "optimizer": optimizer.state_dict()}, "c.pt")
    ran = cli("import", "c.pt", "runs", "--step", 1)
    assert ran.code == 0
    other, another = in_groups(1)
    with CheckpointManager("runs") as manager:
        report = manager.restore({"model": other, "optimizer": another})
    assert report is not None
    assert (report.missing, report.unexpected, report.renamed) == ((), (), ())
    assert same(dict(other.state_dict()), dict(model.state_dict()))
    assert same(another.state_dict(), optimizer.state_dict())


def test_an_optimizer_by_place_with_other_groups_is_refused(cli: Cli) -> None:
    model, optimizer = in_groups(0)
    torch.save({"model": model.state_dict(), "optimizer": optimizer.state_dict()}, "c.pt")
    assert cli("import", "c.pt", "runs", "--step", 1).code == 0
    other = in_groups(1)[0]
    another = torch.optim.AdamW(other.parameters())
    before = {name: value.clone() for name, value in other.state_dict().items()}
    with CheckpointManager("runs") as manager, pytest.raises(RestoreError):
        manager.restore({"model": other, "optimizer": another})
    assert same(dict(other.state_dict()), before)


class Shapes(nn.Module):
    """A model of two parameters of different shapes, so that numbers name them."""

    def __init__(self) -> None:
        super().__init__()
        self.a = nn.Linear(4, 8)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        result: torch.Tensor = self.a(x)
        return result


def stepped(net: nn.Module, groups: Any, seed: int = 0) -> torch.optim.Optimizer:
    """Return an optimizer over ``groups`` after a step with random gradients."""
    torch.manual_seed(seed)
    optimizer = torch.optim.AdamW(groups, lr=1e-3)
    for parameter in net.parameters():
        parameter.grad = torch.randn_like(parameter)
    optimizer.step()
    return optimizer


def test_the_optimizer_is_that_of_the_model_and_not_of_its_average(cli: Cli) -> None:
    average, net = Shapes(), Shapes()
    optimizer = stepped(net, net.parameters())
    state: dict[str, Any] = {"ema": average, "model": net, "optimizer": optimizer}
    torch.save({name: value.state_dict() for name, value in state.items()}, "c.pt")
    ran = cli("import", "c.pt", "runs", "--step", 7)
    assert ran.code == 0, ran.err
    assert "'optimizer' can be the optimizer of 'ema' or 'model'" in ran.err
    assert "optimizer of 2 parameters of 'model', by order and shape" in ran.out
    other = Shapes()
    its = stepped(other, other.parameters(), seed=1)
    with CheckpointManager("runs") as manager:
        manager.restore({"ema": Shapes(), "model": other, "optimizer": its})
    assert same(its.state_dict()["state"], optimizer.state_dict()["state"])


class Towers(nn.Module):
    """Two layers of one shape."""

    def __init__(self) -> None:
        super().__init__()
        self.query, self.key = nn.Linear(8, 8), nn.Linear(8, 8)


def head_first(net: Any) -> Any:
    return [
        {"params": net.key.parameters(), "lr": 1e-3},
        {"params": net.query.parameters(), "lr": 1e-5},
    ]


def decayed(net: Any) -> Any:
    named = dict(net.named_parameters())
    return [
        {"params": [named[name] for name in named if name.endswith(kind)], "weight_decay": decay}
        for kind, decay in (("weight", 0.1), ("bias", 0.0))
    ]


def backwards(net: Any) -> Any:
    return list(reversed(list(net.parameters())))


@pytest.mark.parametrize("groups", [head_first, decayed, backwards])
@pytest.mark.parametrize("kind", [Towers, lambda: nn.Sequential(nn.LayerNorm(8), nn.LayerNorm(8))])
def test_numbers_of_parameters_are_not_guessed(cli: Cli, kind: Any, groups: Any) -> None:
    """By the order of the model, the state of one parameter would go to another of its shape."""
    net = kind()
    if groups is head_first and not isinstance(net, Towers):
        pytest.skip("this model has no head")
    optimizer = stepped(net, groups(net))
    torch.save({"model": net.state_dict(), "optimizer": optimizer.state_dict()}, "c.pt")
    ran = cli("import", "c.pt", "runs", "--step", 1)
    assert ran.code == 0, ran.err
    assert "names its parameters by number" in ran.err
    assert "--param-names FILE" in ran.err
    other = kind()
    its = stepped(other, groups(other), seed=1)
    with CheckpointManager("runs") as manager:
        manager.restore({"model": other, "optimizer": its})
    names = {parameter: name for name, parameter in net.named_parameters()}
    moments = {names[key]: value["exp_avg"] for key, value in optimizer.state.items()}
    for name, parameter in other.named_parameters():
        assert torch.equal(its.state[parameter]["exp_avg"], moments[name]), name
    assert [group["lr"] for group in its.param_groups] == [
        group["lr"] for group in optimizer.param_groups
    ]


def test_the_file_of_an_optimizer_is_one_entry(cli: Cli) -> None:
    net = Shapes()
    optimizer = stepped(net, net.parameters())
    torch.save(optimizer.state_dict(), "optimizer.pt")
    ran = cli("import", "optimizer.pt", "runs", "--step", 1, "--json")
    assert ran.json["names"] == {"optimizer": "optimizer of 2 parameters, by place"}


def test_an_optimizer_of_names_without_its_model_says_so(cli: Cli) -> None:
    net = Shapes()
    state = stepped(net, net.named_parameters()).state_dict()
    torch.save({"optimizer": state}, "c.pt")
    ran = cli("import", "c.pt", "runs", "--step", 1)
    assert "has 'a.weight' among its parameters, which no module of the source has" in ran.err
    assert "by number" not in ran.err


@pytest.mark.parametrize("suffix", ["pt", "safetensors"])
def test_equal_tensors_are_not_tied(cli: Cli, suffix: str) -> None:
    """Experts that begin equal, and the zeros of LoRA, are tensors of their own."""
    experts = nn.ModuleList(nn.Linear(4, 4, bias=False) for _ in range(4))
    for weight in experts.parameters():
        nn.init.zeros_(weight)
    state = {name: value.clone() for name, value in experts.state_dict().items()}
    if suffix == "pt":
        torch.save(state, "c.pt")
    else:
        save_file(state, "c.safetensors")
    assert cli("import", f"c.{suffix}", "runs", "--step", 1).code == 0
    assert cli("export", "runs", "out.pt", "--format", "torch").code == 0
    exported = torch.load("out.pt")["model"]
    assert exported.keys() == state.keys()
    assert len({value.data_ptr() for value in exported.values()}) == 4
    assert cli("export", "runs", "out.safetensors", "--strip", "model/").code == 0
    assert load_file("out.safetensors").keys() == state.keys()


def test_a_tied_model_takes_an_import_that_has_its_weight_twice(cli: Cli) -> None:
    net = trained()[0]
    torch.save({name: value.clone() for name, value in net.state_dict().items()}, "c.pt")
    assert cli("import", "c.pt", "runs", "--step", 1).code == 0
    other = trained(seed=1)[0]
    with CheckpointManager("runs") as manager:
        manager.restore({"model": other})
    assert same(dict(other.state_dict()), dict(net.state_dict()))


def test_a_tied_model_refuses_an_import_whose_weights_differ(cli: Cli) -> None:
    state = {name: value.clone() for name, value in trained()[0].state_dict().items()}
    state["head.weight"] += 1
    torch.save(state, "c.pt")
    assert cli("import", "c.pt", "runs", "--step", 1).code == 0
    with CheckpointManager("runs") as manager, pytest.raises(RestoreError, match="saved apart"):
        manager.restore({"model": trained(seed=1)[0]})


def test_each_of_two_optimizers_is_that_of_a_network_of_its_own(cli: Cli) -> None:
    pairs = {name: trained(seed=seed) for seed, name in enumerate(("maker", "critic"))}
    nets = {name: net.state_dict() for name, (net, _) in pairs.items()}
    torch.save(
        nets | {f"{name}_optim": its.state_dict() for name, (_, its) in pairs.items()}, "c.pt"
    )
    assert cli("import", "c.pt", "runs", "--step", 1).code == 0
    others = {name: trained(seed=3) for name in pairs}
    state: dict[str, Any] = {name: net for name, (net, _) in others.items()}
    state |= {f"{name}_optim": its for name, (_, its) in others.items()}
    with CheckpointManager("runs") as manager:
        manager.restore(state)
    for name, (net, its) in pairs.items():
        assert same(dict(others[name][0].state_dict()), dict(net.state_dict()))
        assert same(others[name][1].state_dict()["state"], its.state_dict()["state"])


@pytest.mark.parametrize(
    ("names", "way"),
    [
        (("optimizerD", "optimizerG", "netD", "netG"), "of 4 parameters of 'netD', by order"),
        (("d_optim", "g_optim", "model_g", "model_d"), "of 4 parameters of 'model_d', by order"),
        (("optim_1", "optim_2", "maker", "critic"), "of 4 parameters, by place"),
        (("optimizer", "optimizer_ema", "teacher", "student"), "of 4 parameters, by place"),
    ],
)
def test_the_optimizers_of_networks_of_one_shape_are_told_by_name_or_not_at_all(
    cli: Cli, names: Sequence[str], way: str
) -> None:
    """By their order, each network would get the optimizer of the other one."""

    def pairs(first_seed: int) -> dict[str, Any]:
        nets: dict[str, Any] = {
            name: nn.Sequential(nn.Linear(2, 3), nn.Linear(3, 4)) for name in sorted(names[2:])
        }
        optimizers = {
            name: stepped(net, net.parameters(), seed)
            for seed, (name, net) in enumerate(
                zip(sorted(names[:2]), nets.values(), strict=True), first_seed
            )
        }
        return optimizers | nets

    state, target = pairs(0), pairs(2)
    for order in (names, names[::-1]):
        torch.save({name: state[name].state_dict() for name in order}, "c.pt")
        ran = cli("import", "c.pt", f"runs-{order[0]}", "--step", 1, "--json")
        assert way in ran.json["names"][names[0]]
        with CheckpointManager(f"runs-{order[0]}") as manager:
            manager.restore(target)
        for name in names[:2]:
            saved = state[name].state_dict()["state"]
            assert same(target[name].state_dict()["state"], saved)


def test_names_can_be_given(cli: Cli) -> None:
    """The optimizer got the parameters in another order than the model has them."""
    torch.manual_seed(0)
    net = nn.Linear(4, 4)
    named = list(reversed(list(net.named_parameters())))
    optimizer = torch.optim.SGD([value for _, value in named], lr=0.1, momentum=0.9)
    net(torch.ones(4)).sum().backward()
    optimizer.step()
    torch.save({"model": net.state_dict(), "optimizer": optimizer.state_dict()}, "c.pt")
    assert (
        "no module has them in this order" in cli("import", "c.pt", "runs", "--step", 1).err
    )  # a bias does not have the shape of a weight
    Path("names.txt").write_text("\n".join(name for name, _ in named))
    ran = cli("import", "c.pt", "runs", "--step", 2, "--param-names", "names.txt", "--json")
    assert (
        ran.json["names"]["optimizer"] == "optimizer of 2 parameters of 'model', by the names given"
    )
    other = nn.Linear(4, 4)
    its = torch.optim.SGD(other.parameters(), lr=0.5, momentum=0.9)
    with CheckpointManager("runs") as manager:
        manager.restore({"model": other, "optimizer": its}, step=2)
    assert same(
        its.state[other.bias]["momentum_buffer"], optimizer.state[net.bias]["momentum_buffer"]
    )
    Path("names.txt").write_text("weight")
    assert (
        "has 1 names, the optimizer has 2"
        in cli("import", "c.pt", "runs", "--step", 3, "--param-names", "names.txt").err
    )


def test_names_in_an_order_that_the_shapes_disprove_are_refused(cli: Cli) -> None:
    """Groups for weight decay put the matrices first, and the file has the order of the model."""
    net = nn.Sequential(nn.Linear(4, 4), nn.Linear(4, 4))
    groups = [[p for p in net.parameters() if p.ndim == ndim] for ndim in (2, 1)]
    optimizer = torch.optim.AdamW([{"params": group} for group in groups])
    net(torch.ones(4)).sum().backward()
    optimizer.step()
    torch.save({"model": net.state_dict(), "optimizer": optimizer.state_dict()}, "c.pt")
    Path("names.txt").write_text("\n".join(name for name, _ in net.named_parameters()))
    ran = cli("import", "c.pt", "runs", "--step", 1, "--param-names", "names.txt")
    assert ran.code == 2
    assert (
        "gives the name '0.bias' to parameter 2 of the optimizer, whose 'exp_avg' has the shape "
        "[4, 4], and not [4]" in ran.err
    )
    assert not Path("runs").exists()


def test_names_that_the_shapes_disprove_are_refused_if_some_parameters_have_no_state(
    cli: Cli,
) -> None:
    net = nn.Sequential(nn.Linear(4, 4), nn.Linear(4, 3))
    optimizer = torch.optim.AdamW(net.parameters())
    net[0].weight.requires_grad_(False)
    net(torch.ones(4)).sum().backward()
    optimizer.step()
    torch.save({"model": net.state_dict(), "optimizer": optimizer.state_dict()}, "c.pt")
    Path("names.txt").write_text("0.weight\n1.weight\n0.bias\n1.bias\n")
    ran = cli("import", "c.pt", "runs", "--step", 1, "--param-names", "names.txt")
    assert ran.code == 2
    assert "gives the name '1.weight' to parameter 2 of the optimizer, whose 'exp_avg'" in ran.err


def test_a_name_that_is_given_twice_is_refused(cli: Cli) -> None:
    torch.save(saved(), "c.pt")
    count = len(saved()["optimizer"]["param_groups"][0]["params"])
    Path("names.txt").write_text("w\n" * count)
    ran = cli("import", "c.pt", "runs", "--step", 1, "--param-names", "names.txt")
    assert ran.code == 2
    assert "--param-names has 'w' twice" in ran.err


@pytest.mark.parametrize("extra", [torch.ones(3), 5, {"counters": {"global_steps": 3}}])
def test_a_key_of_a_file_gives_an_optimizer_no_values_of_an_engine(cli: Cli, extra: object) -> None:
    net, optimizer = in_groups(0)
    values = {**optimizer.state_dict(), "ckpt_extra": extra}
    torch.save({"model": net.state_dict(), "optimizer": values}, "c.pt")
    ran = cli("import", "c.pt", "runs", "--step", 1)
    assert ran.code == 0, ran.err
    assert "global_steps" not in cli("show", "runs", "--values").out


def test_names_are_taken_for_state_of_shapes_of_its_own(cli: Cli) -> None:
    """The rows of Adafactor have the shapes of other parameters, which proves nothing."""
    net = nn.Sequential(nn.Linear(4, 4), nn.Linear(4, 4))
    optimizer = torch.optim.Adafactor(net.parameters())
    net(torch.ones(4)).sum().backward()
    optimizer.step()
    torch.save({"model": net.state_dict(), "optimizer": optimizer.state_dict()}, "c.pt")
    Path("names.txt").write_text("\n".join(name for name, _ in net.named_parameters()))
    ran = cli("import", "c.pt", "runs", "--step", 1, "--param-names", "names.txt")
    assert ran.code == 0, ran.err


class Evil:
    """A class that makes a folder when it is unpickled."""

    def __reduce__(self) -> Any:
        return os.mkdir, ("owned",)


def test_nothing_is_run_because_a_file_says_so(cli: Cli) -> None:
    torch.save({"model": {"w": torch.ones(1)}, "x": Evil()}, "evil.pt")
    ran = cli("import", "evil.pt", "runs", "--step", 1)
    assert ran.code == 8
    assert "only tensors and plain values are taken" in ran.err
    dcp.save({"x": Evil(), "w": torch.ones(1)}, checkpoint_id="c")
    shutil.rmtree("owned", ignore_errors=True)
    assert cli("import", "c", "runs", "--step", 1).code == 8
    Path("c/.metadata").write_bytes(pickle.dumps(Evil()))
    assert cli("import", "c", "runs", "--step", 1).code == 4
    assert not Path("owned").exists()
    assert not list(Path("runs").glob("step-*"))


def test_a_pickle_is_read_as_data() -> None:
    found = read_inert(
        pickle.dumps({"a": [1, -2, 1 << 40, 2.5, None, True, b"x", (1, 2, 3, 4)], "e": Evil()}), "x"
    )
    evil = found.pop("e")
    assert isinstance(evil, Inert)
    assert (evil.name, evil.args) == (f"{os.mkdir.__module__}.mkdir", ("owned",))
    assert found == {"a": [1, -2, 1 << 40, 2.5, None, True, b"x", (1, 2, 3, 4)]}
    assert not Path("owned").exists()


def test_a_table_cannot_name_files_outside(cli: Cli) -> None:
    dcp.save({"model": {"w": torch.ones(3)}}, checkpoint_id="c")
    shutil.copy("c/__0_0.distcp", "outside")
    table = Path("c/.metadata")
    table.write_bytes(table.read_bytes().replace(b"\x0c__0_0.distcp", b"\x0c../././utsid"))
    ran = cli("import", "c", "runs", "--step", 1)
    assert ran.code == 4
    assert "outside of itself" in ran.err


@pytest.mark.parametrize(
    ("args", "code", "expected"),
    [
        (["nowhere.pt", "runs", "--step", 101], 2, "is not there"),
        (["c.pt", "runs"], 2, "give --step N: which step c.pt becomes\n"),
        (["c-12.pt", "runs"], 2, "becomes, such as --step 12, as in its name"),
        (["c.pt", "runs", "--step", 100], 5, "already saved"),
        (["empty", "runs", "--step", 101], 2, "holds neither"),
        (["cut.pt", "runs", "--step", 101], 4, "not a whole file"),
        (["cut.safetensors", "runs", "--step", 101], 4, "not a whole safetensors file"),
        (["dcp/__0_0.distcp", "runs", "--step", 101], 2, "is one file of torch.distributed"),
        (["c.pt", "runs", "--step", 101, "--plain", "nope"], 2, "--plain nope"),
        (["c.pt", "runs", "--step", 101, "--param-names", "nope"], 2, "cannot be read"),
        (["empty", "empty/runs", "--step", 101], 2, "is inside of"),
        (["s3://bucket/c.pt", "runs", "--step", 101], 2, "is a URL"),
        (["c.pt", "c.pt/runs", "--step", 1], 2, ""),
        (["set.pt", "runs", "--step", 101, "--format", "dcp"], 2, "give --format torch"),
    ],
)
def test_a_wrong_call_says_what_is_wrong(
    cli: Cli, args: list[object], code: int, expected: str
) -> None:
    torch.save(saved(), "c.pt")
    torch.save({"a": 1}, "set.pt")
    os.mkdir("empty")
    Path("cut.pt").write_bytes(Path("c.pt").read_bytes()[:1000])
    save_file({"w": torch.ones(100)}, "cut.safetensors")
    dcp.save({"w": torch.ones(3)}, checkpoint_id="dcp")
    Path("cut.safetensors").write_bytes(Path("cut.safetensors").read_bytes()[:-1])
    with CheckpointManager("runs") as manager:
        manager.save({"x": 1}, step=100)
    ran = cli("import", *args)
    assert ran.code == code, ran.err
    assert expected in ran.err
    assert [path.name[:14] for path in Path("runs").glob("step-*")] == ["step-000000100"]


def test_a_folder_of_checkpoints_of_other_programs_names_them(cli: Cli) -> None:
    """The folder of a ``Trainer`` run, or of a pipeline of diffusers."""
    for name in ("run/checkpoint-9", "run/checkpoint-10", "run/logs"):
        os.makedirs(name)
        Path(name, "note.txt").write_text("x")
    save_file({"w": torch.ones(1)}, "run/checkpoint-9/model.safetensors")
    torch.save({"w": torch.ones(1)}, "run/checkpoint-10/pytorch_model.bin")
    ran = cli("import", "run", "runs", "--step", 1)
    assert ran.code == 2
    assert "(run/checkpoint-9, run/checkpoint-10): name one, such as run/checkpoint-10" in ran.err


def test_no_scratch_file_stays(cli: Cli) -> None:
    dcp.save({"model": {"w": torch.ones(1000)}}, checkpoint_id="c")
    cli("import", "c", "runs", "--step", 1)
    assert [path.name[:14] for path in Path("runs").iterdir()] == ["step-000000001"]


@pytest.mark.parametrize(
    ("content", "expected"),
    [
        (b"\x89HDF\r\n\x1a\n" + bytes(2000), "HDF5"),
        (b"\x93NUMPY\x01\x00" + bytes(200), "numpy.save"),
        (b"GGUF" + bytes(100), "GGUF"),
        (b"<!DOCTYPE html><html>not found</html>", "a web page"),
        (b'{"weights": [1, 2]}', "JSON"),
        (b"import torch\n", "text"),
        (b"version https://git-lfs.github.com/spec/v1\n", "Git LFS"),
        ((16).to_bytes(8, "little") + b'{"a":{}}        ' + bytes(50), "safetensors"),
        (b"\x1f\x8b" + bytes(100), "gzip"),
    ],
)
def test_what_is_no_torch_file_is_called_by_its_name(
    cli: Cli, content: bytes, expected: str
) -> None:
    Path("model.pt").write_bytes(content)
    ran = cli("import", "model.pt", "runs", "--step", 1)
    assert ran.code == 2
    assert "is not a file of torch.save, but" in ran.err
    assert expected in ran.err


def test_an_archive_of_numpy_is_called_so_and_a_torn_torch_file_torn(cli: Cli) -> None:
    import numpy as np

    np.savez("a.npz", x=np.ones(3))
    ran = cli("import", "a.npz", "runs", "--step", 1)
    assert (ran.code, "numpy.savez" in ran.err) == (2, True)
    torch.save({"x": torch.ones(5000)}, "b.pt")
    whole = Path("b.pt").read_bytes()
    for length in (0, 100, len(whole) // 2, len(whole) - 10):
        Path("b.pt").write_bytes(whole[:length])
        ran = cli("import", "b.pt", "runs", "--step", 1)
        assert ran.code == 4, (length, ran.err)
        assert "not a whole file of torch.save" in ran.err


@pytest.mark.parametrize(
    ("args", "code", "expected"),
    [
        (["ours", "new", "--step", 1], 2, "copy them with ckpt copy ours ROOT"),
        (["STEP", "new", "--step", 1], 2, "ours ROOT --step 100"),
        (["c.pt", "ours", "--step", 5], 5, "step 5 is out of order"),
        (["c.pt", "new", "--step", 1, "--format", "dcp"], 2, "c.pt is a file of torch.save: give --format torch"),  # noqa: E501
        (["a.txt", "new", "--step", 1, "--format", "dcp"], 2, "a.txt is text"),
        (["c.pt", "new", "--step", 1, "--format", "safetensors"], 2, "give --format torch"),
        (["empty", "new", "--step", 1, "--format", "safetensors"], 2, "empty holds no .safetensors file"),  # noqa: E501
        (["empty", "new", "--step", 1, "--format", "dcp"], 2, "empty holds no .metadata file"),
        (["a.txt", "new/deep", "--step", 1], 2, "but text"),
        (["c.pt", "new/deep", "--step", 1, "--plain", "nope"], 2, "--plain nope"),
        (["two.pt", "new", "--step", 1], 8, "not supported"),
    ],
)  # fmt: skip
def test_a_refused_import_says_what_to_do_and_leaves_nothing(
    cli: Cli, args: list[object], code: int, expected: str
) -> None:
    torch.save(saved(), "c.pt")
    torch.save({1: 2}, "two.pt")
    os.mkdir("empty")
    Path("a.txt").write_text("hello")
    with CheckpointManager("ours") as manager:
        manager.save({"x": 1}, step=100)
    [step] = Path("ours").glob("step-*")
    before = sorted(Path().rglob("*"))
    ran = cli("import", *[step if word == "STEP" else word for word in args])
    assert ran.code == code, ran.err
    assert expected in ran.err
    assert ran.err.count("\n") == 1
    assert sorted(Path().rglob("*")) == before


def test_a_refused_import_leaves_a_folder_that_was_there(cli: Cli) -> None:
    os.mkdir("mine")
    Path("a.txt").write_text("hello")
    assert cli("import", "a.txt", "mine", "--step", 1).code == 2
    assert Path("mine").is_dir()


def test_a_file_of_a_step_of_ckpt_is_refused_like_its_folder(
    cli: Cli, steps: dict[int, Written]
) -> None:
    file = Path("runs") / steps[200].ref.key("rank-00000.safetensors")
    for source, what in ((file, "is a file of"), (file.parent, "is")):
        ran = cli("import", source, "other", "--step", 1)
        assert ran.code == 2
        assert f"{source} {what} a checkpoint of ckpt already" in ran.err
        assert f"ckpt copy {Path('runs').absolute()} ROOT --step 200" in ran.err
    assert not Path("other").exists()
