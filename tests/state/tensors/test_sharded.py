"""FSDP1, rank by rank: what each rank has of each parameter.

Together the ranks have all of it once.
"""

from __future__ import annotations

import warnings
from collections import defaultdict
from collections.abc import Iterator

import pytest
import torch
from torch import nn
from torch.distributed._shard.metadata import ShardMetadata
from torch.distributed._shard.sharded_tensor import Shard, ShardedTensor
from torch.distributed._shard.sharded_tensor.metadata import ShardedTensorMetadata, TensorProperties
from torch.distributed.fsdp import FullyShardedDataParallel as FSDP
from torch.distributed.fsdp import ShardingStrategy
from torch.distributed.fsdp.wrap import ModuleWrapPolicy

from ckpt.errors import UnsupportedValue
from ckpt.model.box import Box, tiling_fault
from ckpt.state.tensors.layout import leaf_of, memories
from ckpt.state.walk.collect import WalkResult, collect
from ckpt.state.walk.last_walk import LastWalk
from ckpt.state.walk.plan_cache import PlanCache
from tests.state.ranks import rank_of
from tests.state.saving import restored, saved


class Net(nn.Module):
    """Parameters of a few sizes, a tie, and three of one shape, of which most ranks
    hold nothing.
    """

    def __init__(self) -> None:
        super().__init__()
        self.one, self.two = nn.Linear(7, 5), nn.Linear(5, 3)
        self.table = nn.Parameter(torch.randn(2, 3, 4))
        self.small = nn.ParameterList(nn.Parameter(torch.randn(3)) for _ in range(3))
        self.head, self.tied = nn.Linear(5, 3), nn.Linear(5, 3)
        self.tied.weight = self.head.weight
        self.register_buffer("seen", torch.arange(4.0))


@pytest.fixture(autouse=True)
def quiet() -> Iterator[None]:
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # warnings about the CPU, deprecations, and one rank
        yield


def wrapped(
    *, named: bool, inner: bool = False, kind: ShardingStrategy = ShardingStrategy.FULL_SHARD
) -> tuple[FSDP, torch.optim.Optimizer]:
    torch.manual_seed(3)
    policy = ModuleWrapPolicy({nn.ParameterList}) if inner else None
    net = FSDP(
        Net(),
        use_orig_params=named,
        auto_wrap_policy=policy,
        device_id=torch.device("cpu"),
        sharding_strategy=kind,
    )
    return net, torch.optim.Adam(net.parameters())


def held(found: WalkResult, name: str) -> list[tuple[Box, torch.Tensor]]:
    item = next(item for item in found.named_tensors if item.name == found.ties.get(name, name))
    leaf = leaf_of(item.name, item.tensor, item.replicas)
    return list(zip(leaf.boxes, memories(item.tensor, leaf.boxes), strict=True))


@pytest.mark.parametrize("world_size", [1, 2, 3, 5])
@pytest.mark.parametrize(
    ("named", "inner"), [(True, False), (False, False), (True, True), (False, True)]
)
def test_the_ranks_hold_every_parameter_once(world_size: int, named: bool, inner: bool) -> None:
    torch.manual_seed(3)
    bare = Net()
    boxes: dict[str, list[Box]] = defaultdict(list)
    for rank in range(world_size):
        with rank_of(rank, world_size):
            net, optimizer = wrapped(named=named, inner=inner)
            for group in optimizer.param_groups:
                for parameter in group["params"]:
                    optimizer.state[parameter] = {
                        "step": torch.tensor(1.0),
                        "exp_avg": parameter.detach() * 2,
                    }
            found = collect({"model": net, "optimizer": optimizer}, rank=rank)
            for name, parameter in bare.named_parameters():
                model, average = (
                    held(found, f"model/{name}"),
                    held(found, f"optimizer/model/{name}/exp_avg"),
                )
                assert [box for box, _ in model] == [box for box, _ in average]
                for (box, values), (_, doubled) in zip(model, average, strict=True):
                    assert torch.equal(values, parameter[box.slices()])
                    assert torch.equal(doubled, 2 * parameter[box.slices()])
                if world_size > 1:
                    boxes[name] += [box for box, _ in model]
            assert found.ties["model/tied.weight"] == "model/head.weight"
            names = {
                name for group in found.tree["optimizer"]["groups"] for name in group["params"]
            }
            assert names == {f"model/{name}" for name, _ in bare.named_parameters()}
            PlanCache(rank, 1 << 20).prepare(found)
    for name, parameter in bare.named_parameters():
        if world_size > 1:
            assert tiling_fault(parameter.shape, boxes[name]) is None


def test_nothing_of_it_is_named_anew_from_save_to_save() -> None:
    for named in (True, False):
        with rank_of(1, 2):
            net, optimizer = wrapped(named=named)
            last_walk = LastWalk()
            walks = [
                collect({"m": net, "o": optimizer}, rank=1, last_walk=last_walk) for _ in range(2)
            ]
            assert walks[0].parts[0] is walks[1].parts[0]
            with torch.no_grad():
                for parameter in net.parameters():
                    parameter.data = (
                        parameter.data.clone()
                    )  # the memory is different, so nothing of the old one may be kept
            again = collect({"m": net, "o": optimizer}, rank=1, last_walk=last_walk)
            assert again.parts[0] is not walks[0].parts[0]


@pytest.mark.parametrize("named", [True, False])
def test_gathered_parameters_are_refused_by_name(named: bool) -> None:
    with rank_of(0, 2):
        net, _ = wrapped(named=named)
        with (
            FSDP.summon_full_params(net),
            pytest.raises(UnsupportedValue, match=r"'model/.*summon_full_params"),
        ):
            collect({"model": net}, rank=0)


def test_without_shards_all_ranks_are_replicas() -> None:
    for named in (True, False):
        with rank_of(1, 3):
            net, _ = wrapped(named=named, kind=ShardingStrategy.NO_SHARD)
            found = collect({"model": net}, rank=1)
            # a buffer is saved by the first rank
            held = [item for item in found.named_tensors if item.name != "model/seen"]
            leaves = [leaf_of(item.name, item.tensor, item.replicas) for item in held]
            assert {leaf.replicas for leaf in leaves} == {(0, 1, 2)}
            assert all(tiling_fault(leaf.shape, leaf.boxes) is None for leaf in leaves)


def sharded(whole: torch.Tensor) -> ShardedTensor:
    """Return the parameter as seen by one rank that has both shards."""
    low, high = whole[:2].clone(), whole[2:].clone()
    parts = [
        ShardMetadata([0, 0], list(low.shape), "rank:0/cpu"),
        ShardMetadata([2, 0], list(high.shape), "rank:0/cpu"),
    ]
    properties = TensorProperties(dtype=whole.dtype)
    return ShardedTensor._init_from_local_shards_and_global_metadata(
        [Shard(low, parts[0]), Shard(high, parts[1])],
        ShardedTensorMetadata(parts, whole.shape, properties),
    )


def test_a_sharded_tensor_is_the_tensor() -> None:
    whole = torch.arange(15.0).view(5, 3)
    with rank_of(0, 1):
        root = saved({"weights": {"w": sharded(whole)}})
        plain = {"weights": {"w": torch.zeros(5, 3)}}
        restored(root, plain)
        assert torch.equal(plain["weights"]["w"], whole)
        target = {"weights": {"w": sharded(torch.zeros(5, 3))}}
        restored(root, target)
        assert torch.equal(
            torch.cat([shard.tensor for shard in target["weights"]["w"].local_shards()]), whole
        )
