"""What each private name of torch does, and what happens where a release lacks it.

`make matrix` runs this file on every tested release, so each fallback runs where it is needed.
"""

from __future__ import annotations

from types import SimpleNamespace

import pytest
import torch
from torch import nn
from torch.distributed import device_mesh
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.fsdp import fully_shard
from torch.distributed.optim import ZeroRedundancyOptimizer

from ckpt import torch_private as private
from ckpt.errors import ConfigError
from tests.kit.worlds import run_code
from tests.state.ranks import mesh_of, rank_of


@pytest.mark.parametrize("name", private.REQUIRED)
def test_a_torch_without_a_required_name_is_refused_by_that_name(name: str) -> None:
    assert private.find(name) is not None
    with pytest.raises(ConfigError, match=r"has no torch.*_gone, which ckpt needs: install torch"):
        private.find(f"{name}_gone")


def test_a_torch_without_a_module_is_refused() -> None:
    with pytest.raises(ConfigError, match=r"has no torch\.gone\.name, which ckpt needs"):
        private.find("torch.gone:name")


@pytest.mark.slow
def test_the_import_refuses_a_torch_without_a_required_name() -> None:
    code = (
        "import sys\n"
        "import torch.distributed.distributed_c10d as c10d\n"
        "for name in [name for name in sys.modules if name.partition('.')[0] == 'ckpt']:\n"
        "    del sys.modules[name]\n"
        "del c10d._get_default_store\n"
        "from ckpt import CheckpointManager\n"
    )
    said = run_code(code, status=1)
    assert said.rstrip().endswith(
        f"ConfigError: torch {torch.__version__} has no "
        "torch.distributed.distributed_c10d._get_default_store, which ckpt needs: install torch "
        f"{private.tested_range()}"
    )


@pytest.mark.parametrize(
    ("version", "tested"),
    [
        ("2.8.0", False),
        ("2.9.0", True),
        ("2.13.0+cpu", True),
        ("2.15.3a0+git1", True),
        ("2.16.0.dev20261101", False),
        ("3.10.0", False),
    ],
)
def test_a_version_is_tested_if_its_release_is(version: str, *, tested: bool) -> None:
    assert private.is_tested(version) is tested


def test_the_root_of_a_mesh_is_the_mesh_that_it_was_cut_from() -> None:
    with rank_of(1, 4):
        mesh = DeviceMesh("cpu", torch.arange(4).view(2, 2), mesh_dim_names=("dp", "tp"))
        assert private.root_mesh(mesh["tp"]) is mesh
        assert private.root_mesh(mesh) is mesh


def test_without_a_way_to_the_root_of_a_mesh_the_error_names_it(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    with rank_of(0, 2):
        mesh = mesh_of([2])
        monkeypatch.delattr(DeviceMesh, "_get_root_mesh", raising=False)
        monkeypatch.delattr(device_mesh, "_mesh_resources")
        with pytest.raises(ConfigError, match=r"has no torch.*_mesh_resources.get_root_mesh"):
            private.root_mesh(mesh)
        monkeypatch.undo()


def test_modules_that_are_sharded_together_have_the_same_groups() -> None:
    with rank_of(0, 2):
        mesh = mesh_of([2])
        net = nn.Sequential(nn.Linear(4, 4), nn.Linear(4, 4), nn.Linear(4, 4))
        fully_shard([net[0], net[1]], mesh=mesh)
        fully_shard(net, mesh=mesh)
        one, two, root = map(private.fsdp2_groups, (net[0], net[1], net))
        assert one[0] is two[0]
        assert root[0] is not one[0]
        assert [len(groups) for groups in (one, two, root)] == [1, 1, 1]
        assert not private.may_be_gathering(one[0])


def test_a_module_without_parameters_of_its_own_has_no_groups() -> None:
    with rank_of(0, 2):
        net = nn.Sequential(nn.ReLU())
        fully_shard(net, mesh=mesh_of([2]))
        assert private.fsdp2_groups(net) == ()


def test_both_names_of_the_groups_are_known_and_without_them_the_error_names_one() -> None:
    def module(state: object) -> nn.Module:
        net = nn.Module()
        net._get_fsdp_state = lambda: state  # type: ignore[assignment]
        return net

    assert private.fsdp2_groups(module(SimpleNamespace(_fsdp_param_groups=[1, 2]))) == (1, 2)
    assert private.fsdp2_groups(module(SimpleNamespace(_fsdp_param_group=3))) == (3,)
    with pytest.raises(ConfigError, match=r"has no SimpleNamespace\._fsdp_param_groups"):
        private.fsdp2_groups(module(SimpleNamespace()))


def test_a_group_that_does_not_say_whether_it_gathers_may_be_gathering() -> None:
    assert private.may_be_gathering(SimpleNamespace())


def test_the_guards_tell_a_change_and_without_them_nothing_is_known(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    one, two = torch.ones(2, 3), torch.ones(4)
    guards = private.guards_of([one, two])
    assert guards(one, two)
    assert not guards(one, torch.ones(5))
    monkeypatch.delattr(torch._C._dynamo.guards, "TensorGuards")
    assert not private.guards_of([one, two])(one, two)


def test_a_plain_alias_has_the_memory_and_the_version_counter_of_a_subclass() -> None:
    class Loud(torch.Tensor):
        @classmethod
        def __torch_function__(cls, *_: object, **__: object) -> torch.Tensor:
            raise AssertionError("code of the subclass runs")

    loud = torch.ones(3).as_subclass(Loud)
    alias = private.plain_alias(loud)
    assert type(alias) is torch.Tensor
    with torch._C.DisableTorchFunctionSubclass():
        assert alias.data_ptr() == loud.data_ptr()
        loud.add_(1)
        assert alias._version == loud._version == 1


def test_storages_are_told_apart_also_when_they_are_empty() -> None:
    one, two = torch.empty(0), torch.empty(0)
    assert private.storage_identity(one) == private.storage_identity(one.view(0, 3))
    assert private.storage_identity(one) != private.storage_identity(two)


def test_hooks_and_graphs_that_hold_a_tensor_are_noticed() -> None:
    tensor = torch.ones(2, requires_grad=True)
    assert not private.has_hooks(tensor)
    assert private.use_count(tensor) == 1
    graph = tensor * 2
    assert private.use_count(tensor) > 1
    del graph
    tensor.register_hook(lambda grad: grad)
    assert private.has_hooks(tensor)


def test_a_zero_optimizer_says_whether_it_steps_in_the_backward_pass() -> None:
    with rank_of(0, 2):
        weight = nn.Parameter(torch.ones(4))
        optimizer = ZeroRedundancyOptimizer([weight], torch.optim.SGD, lr=0.1)
        assert not private.overlaps_with_ddp(optimizer)
        optimizer._overlap_with_ddp = True
        assert private.overlaps_with_ddp(optimizer)


def test_a_tensor_that_waits_for_nothing_is_itself() -> None:
    tensor = torch.ones(2)
    assert private.wait_for(tensor) is tensor
