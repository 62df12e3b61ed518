"""Parts of a state that only some ranks have.

They are experts under their own names, in every wrapper, with the state that an optimizer keeps of
them.
"""

from __future__ import annotations

import json
import warnings
from collections.abc import Callable, Iterator
from typing import Any

import pytest
import torch
from torch import nn
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh
from torch.distributed.fsdp import FullyShardedDataParallel as FSDP
from torch.distributed.fsdp import fully_shard
from torch.distributed.tensor import DTensor
from torch.distributed.tensor.parallel import ColwiseParallel, parallelize_module
from torch.nn.parallel import DistributedDataParallel

from ckpt.config import Copies
from ckpt.errors import TensorIncomplete
from ckpt.state.tensors.layout import leaf_of
from ckpt.state.walk.collect import collect
from ckpt.state.walk.plan_cache import PlanCache
from tests.kit.models import sharded
from tests.state.ranks import rank_of
from tests.state.worlds import restore, save_ranks

WORLD, EXPERTS = 4, 4


@pytest.fixture(autouse=True)
def quiet() -> Iterator[None]:
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # FSDP1 is deprecated, and has no accelerator here
        yield


class Expert(nn.Module):
    """Two layers whose values identify the expert."""

    def __init__(self, number: int) -> None:
        super().__init__()
        self.up = nn.Linear(6, 4)
        self.register_buffer("routed", torch.full((3,), float(number)))
        with torch.no_grad():
            self.up.weight.fill_(number)
            self.up.bias.fill_(-number)


class Block(nn.Module):
    """An attention that all ranks have, a norm, and the experts of one of two groups of ranks."""

    def __init__(self, group: int, *, gaps: bool) -> None:
        super().__init__()
        self.attention, self.norm = nn.Linear(8, 8), nn.LayerNorm(8)
        own = range(group * EXPERTS // 2, (group + 1) * EXPERTS // 2)
        if gaps:  # DeepSeek's models have such gaps
            self.experts: nn.Module = nn.ModuleList(
                Expert(i) if i in own else None  # type: ignore[misc] # torch takes a None
                for i in range(EXPERTS)
            )
        else:
            self.experts = nn.ModuleDict({str(i): Expert(i) for i in own})

    def mine(self) -> list[nn.Module]:
        """Return the experts of this rank."""
        return [each for each in self.experts.modules() if isinstance(each, Expert)]


def mesh_2d() -> DeviceMesh:
    return init_device_mesh("cpu", (2, 2), mesh_dim_names=("dp", "ep"))


def group_of(rank: int) -> int:
    return rank % 2


def experts_on_one_half(rank: int) -> nn.Module:
    """Shard experts over one half of a mesh, and all else over the whole mesh."""
    mesh, block = mesh_2d(), Block(group_of(rank), gaps=True)
    for expert in block.mine():
        fully_shard(expert, mesh=mesh["dp"])
    return sharded(block, mesh=mesh["dp", "ep"]._flatten("all"))


def hybrid(rank: int) -> nn.Module:
    """Shard experts in the same way, and all else as copies of shards."""
    mesh, block = mesh_2d(), Block(group_of(rank), gaps=False)
    for expert in block.mine():
        fully_shard(expert, mesh=mesh["dp"])
    return sharded(block, mesh=mesh)


def beside_tensor_parallel(rank: int) -> nn.Module:
    """Shard the attention over both dimensions of the mesh, and the experts over one."""
    mesh, block = mesh_2d(), Block(group_of(rank), gaps=False)
    parallelize_module(block, mesh["ep"], {"attention": ColwiseParallel()})
    for expert in block.mine():
        fully_shard(expert, mesh=mesh["dp"])
    return sharded(block, mesh=mesh["dp"])


def in_the_same_unit(rank: int) -> nn.Module:
    """Put experts into places of a list that other ranks leave out.

    They are sharded together with an attention on both dimensions.
    """
    mesh, block = mesh_2d(), Block(group_of(rank), gaps=True)
    parallelize_module(block, mesh["ep"], {"attention": ColwiseParallel()})
    return sharded(block, mesh=mesh["dp"])


def on_a_mesh_of_its_own(rank: int) -> nn.Module:
    block = Block(group_of(rank), gaps=False)
    for expert in block.mine():
        fully_shard(expert, mesh=DeviceMesh("cpu", [group_of(rank), group_of(rank) + 2]))
    return sharded(block, mesh=DeviceMesh("cpu", list(range(WORLD))))


def ignored_by_fully_shard(rank: int) -> nn.Module:
    block = Block(group_of(rank), gaps=False)
    # a buffer that only this rank has does not come from the first rank
    for expert in block.mine():
        del expert.routed
    ignored = {parameter for expert in block.mine() for parameter in expert.parameters()}
    return sharded(block, mesh=DeviceMesh("cpu", list(range(WORLD))), ignored_params=ignored)


def ignored_by_fsdp1(rank: int) -> nn.Module:
    block = Block(group_of(rank), gaps=True)
    return FSDP(
        block, use_orig_params=True, ignored_modules=block.mine(), device_id=torch.device("cpu")
    )


def ignored_by_ddp(rank: int) -> nn.Module:
    block = Block(group_of(rank), gaps=False)
    names = [name for name, _ in block.named_parameters() if "experts" in name]
    buffers = [name for name, _ in block.named_buffers()]
    DistributedDataParallel._set_params_and_buffers_to_ignore_for_model(block, [*names, *buffers])
    return DistributedDataParallel(block)


def beside_plain_tensor_parallel(rank: int) -> nn.Module:
    """Make only the attention a DTensor."""
    block = Block(group_of(rank), gaps=True)
    mesh = init_device_mesh("cpu", (WORLD,))
    return parallelize_module(block, mesh, {"attention": ColwiseParallel()})


def built(build: Callable[[int], nn.Module], rank: int) -> nn.Module:
    """Build values that are equal where ranks must agree: this process group scatters nothing."""
    torch.manual_seed(0)
    net = build(rank)
    with torch.no_grad():
        for name, parameter in net.named_parameters():
            if "attention" in name:
                held(parameter).fill_(3.0)
    return net


def with_state(net: nn.Module, *, stepped: bool) -> dict[str, Any]:
    optimizer = torch.optim.AdamW(net.parameters())
    for parameter in net.parameters() if stepped else ():
        if parameter.numel():
            moments = {
                key: torch.full_like(parameter, 5.0).detach() for key in ("exp_avg", "exp_avg_sq")
            }
            optimizer.state[parameter] = {"step": torch.tensor(4.0), **moments}
    return {"model": net, "optimizer": optimizer}


WAYS = [
    experts_on_one_half,
    hybrid,
    beside_tensor_parallel,
    in_the_same_unit,
    on_a_mesh_of_its_own,
    ignored_by_fully_shard,
    ignored_by_fsdp1,
    ignored_by_ddp,
    beside_plain_tensor_parallel,
]


def held(value: torch.Tensor) -> torch.Tensor:
    return value._local_tensor if isinstance(value, DTensor) else value


@pytest.mark.parametrize("build", WAYS)
def test_experts_that_only_some_ranks_have_come_back(build: Callable[[int], nn.Module]) -> None:
    def of_rank(rank: int) -> dict[str, Any]:
        return with_state(built(build, rank), stepped=True)

    images, manifest = save_ranks(WORLD, of_rank)
    names = {tensor.name for tensor in manifest.tensors}
    for expert in range(EXPERTS):
        assert f"model/experts.{expert}.up.weight" in names
        assert f"optimizer/model/experts.{expert}.up.weight/step" in names
    for rank in range(WORLD):
        with rank_of(rank, WORLD):
            want, net = built(build, rank), built(build, rank)
            with torch.no_grad():
                for tensor in (*net.parameters(), *net.buffers()):
                    held(tensor).fill_(-77)
            state = with_state(net, stepped=False)
            restore(state, images, manifest, rank, WORLD, strict=False)
            before = dict(want.named_parameters()) | dict(want.named_buffers())
            now = dict(net.named_parameters()) | dict(net.named_buffers())
            for name, tensor in before.items():
                assert torch.equal(held(now[name]), held(tensor)), name
            for name, parameter in net.named_parameters():
                if parameter.numel():
                    assert state["optimizer"].state[parameter]["step"] == 4, name
                    assert (held(state["optimizer"].state[parameter]["exp_avg"]) == 5).all(), name


def test_what_a_unit_has_on_a_wider_mesh_is_written_once() -> None:
    """The norm is on one dimension of the mesh, beside an attention on both.

    It is not written once for each rank of the other dimension.
    """
    for rank in range(WORLD):
        with rank_of(rank, WORLD):
            found = collect({"model": in_the_same_unit(rank)}, rank=rank)
            leaves = {
                item.name: leaf_of(item.name, item.tensor, item.replicas)
                for item in found.named_tensors
            }
            assert leaves["model/norm.weight"].replicas == ((0, 1) if rank < 2 else (2, 3))


def test_three_dimensions_are_shared_over_the_stage_alone() -> None:
    """With pipeline stages as the outer dimension, the ranks of other stages hold no copies. Those
    of tensor parallelism do.
    """
    with rank_of(5, 8):
        mesh = init_device_mesh("cpu", (2, 2, 2), mesh_dim_names=("pp", "dp", "tp"))
        block = Block(0, gaps=True)
        parallelize_module(block, mesh["tp"], {"attention": ColwiseParallel()})
        fully_shard(block, mesh=mesh["dp"])
        found = collect({"model": block}, rank=5)
        leaves = {
            item.name: leaf_of(item.name, item.tensor, item.replicas)
            for item in found.named_tensors
        }
        assert leaves["model/norm.weight"].replicas == (4, 5)
        assert leaves["model/attention.weight"].replicas == ()


def fully_sharded(net: nn.Module) -> nn.Module:
    return sharded(net, mesh=DeviceMesh("cpu", list(range(WORLD))))


def flat(net: nn.Module) -> nn.Module:
    return FSDP(net, device_id=torch.device("cpu"))


@pytest.mark.parametrize("wrap", [DistributedDataParallel, fully_sharded, flat])
@pytest.mark.parametrize(
    ("node_of", "copies", "writers"),
    [((), "one", [0]), ((0, 0, 1, 1), "one", [0, 2]), ((0, 1, 1, 2), "per_node", [0, 1, 3])],
)
def test_each_node_has_the_buffers_and_those_of_the_first_rank_count(
    wrap: Callable[[nn.Module], nn.Module],
    node_of: tuple[int, ...],
    copies: Copies,
    writers: list[int],
) -> None:
    wrote: list[int] = []
    named: list[int] = []
    for rank in range(WORLD):
        with rank_of(rank, WORLD):
            net = wrap(nn.BatchNorm1d(8))
            plans = PlanCache(rank, 1 << 20, node_of=node_of, copies=copies)
            plan = plans.prepare(collect({"model": net}, rank=rank)).plan
            header = json.loads(plan.header[8:])
            wrote += [rank] * ("model/running_mean" in header)
            reported = {tensor.name: tensor.shards for tensor in plan.tensors}
            named += [rank] * bool(reported["model/running_mean"])
    assert (wrote, named) == (writers, [0])


def test_two_names_of_one_buffer_are_tied_on_all_ranks() -> None:
    """This includes names with a view each, where only the memory shows that the buffer is one."""

    def of_rank(rank: int) -> dict[str, Any]:
        net = nn.Linear(8, 8)
        table = torch.arange(8.0)
        net.register_buffer("table", table)
        net.register_buffer("view", table[:])
        return {"model": fully_shard(net, mesh=DeviceMesh("cpu", [0, 1]))}

    _, manifest = save_ranks(2, of_rank)
    assert manifest.tied == {"model/view": "model/table"}


def test_a_buffer_that_the_first_rank_lacks_is_an_error_and_no_silent_loss() -> None:
    def of_rank(rank: int) -> dict[str, Any]:
        block = Block(0, gaps=False)
        if rank:
            block.norm.register_buffer("extra", torch.ones(3))
        return {"model": fully_shard(block, mesh=DeviceMesh("cpu", [0, 1]))}

    with pytest.raises(TensorIncomplete, match=r"'model/norm.extra'"):
        save_ranks(2, of_rank)
