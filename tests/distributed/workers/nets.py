"""One network under every kind of parallelism, with the same names under each."""

from __future__ import annotations

import warnings
from collections.abc import Callable, Iterable
from functools import partial
from typing import Any

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import FullyShardedDataParallel as FSDP
from torch.distributed.fsdp import ShardingStrategy, fully_shard
from torch.distributed.fsdp.wrap import ModuleWrapPolicy
from torch.distributed.optim import ZeroRedundancyOptimizer
from torch.distributed.tensor import DTensor, Shard, distribute_tensor
from torch.distributed.tensor.parallel import ColwiseParallel, RowwiseParallel, parallelize_module
from torch.distributed.tensor.placement_types import _StridedShard
from torch.nn.parallel import DistributedDataParallel

from ckpt import PerRank, RngState


class Net(nn.Module):
    """A network with uneven sizes, a tie, and buffers.

    One parameter is large enough to be cut among replicas, and one has fewer rows than ranks.
    """

    def __init__(self) -> None:
        super().__init__()
        self.up, self.down = nn.Linear(18, 48), nn.Linear(48, 33)
        self.norm = nn.BatchNorm1d(33)
        self.head, self.other = nn.Linear(33, 3), nn.Linear(33, 3)
        self.other.weight = self.head.weight
        self.big = nn.Parameter(torch.randn(701, 333))
        self.tiny = nn.Parameter(torch.randn(1, 5))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        x = self.norm(self.down(self.up(x).relu()))
        return (
            (self.head(x) + self.other(x)).square().sum()
            + self.big.square().sum()
            + self.tiny.sum()
        )


Stepper = Callable[[Iterable[nn.Parameter]], torch.optim.Optimizer]
ADAMW: Stepper = partial(torch.optim.AdamW, lr=1e-2)
SGD: Stepper = partial(torch.optim.SGD, lr=1e-2, momentum=0.9)
"""Its first step on DTensors takes a quarter of the processor time of that of AdamW."""


def build(mode: str, seed: int, stepper: Stepper = ADAMW) -> tuple[Any, torch.optim.Optimizer]:
    torch.manual_seed(seed)
    net: Any = Net()
    world = dist.get_world_size() if dist.is_initialized() else 1
    plan = {"up": ColwiseParallel(), "down": RowwiseParallel()}
    if mode == "fsdp":
        fully_shard(net, mesh=init_device_mesh("cpu", (world,)))
    elif mode == "tp":
        parallelize_module(net, init_device_mesh("cpu", (world,)), plan)
    elif mode == "fsdp+tp":
        mesh = init_device_mesh("cpu", (world // 2, 2), mesh_dim_names=("dp", "tp"))
        parallelize_module(net, mesh["tp"], plan)
        fully_shard(net, mesh=mesh["dp"])
    elif mode == "hsdp":
        fully_shard(
            net, mesh=init_device_mesh("cpu", (world // 2, 2), mesh_dim_names=("copies", "shards"))
        )
    elif mode.startswith("fsdp1"):
        net = fsdp1(net, mode)
    elif mode == "ddp":
        net = DistributedDataParallel(net)
    elif mode.startswith("zero"):
        net = DistributedDataParallel(net)
        return net, ZeroRedundancyOptimizer(
            net.parameters(), torch.optim.AdamW, parameters_as_bucket_view="view" in mode, lr=1e-2
        )
    return net, stepper(net.parameters())


def fsdp1(net: Net, mode: str) -> nn.Module:
    """Wrap a network in FSDP1, in one of these ways:

    - ``fsdp1``
    - ``fsdp1-flat``: the optimizer sees only flat parameters.
    - ``fsdp1-copies``: it is sharded over two ranks, with copies on the others.
    - ``fsdp1-whole``: it is not sharded.
    """
    kind = {"fsdp1-copies": ShardingStrategy.HYBRID_SHARD, "fsdp1-whole": ShardingStrategy.NO_SHARD}
    copies = dist.get_world_size() // 2
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # warnings about the CPU, and about one rank
        return FSDP(
            net,
            use_orig_params=mode != "fsdp1-flat",
            device_id=torch.device("cpu"),
            auto_wrap_policy=ModuleWrapPolicy({nn.Linear}) if mode != "fsdp1-flat" else None,
            ignored_modules=[net.head, net.other]
            if mode != "fsdp1-flat"
            else None,  # tied, but wrapped apart
            sharding_strategy=kind.get(mode, ShardingStrategy.FULL_SHARD),
            device_mesh=init_device_mesh("cpu", (copies, 2), mesh_dim_names=("copies", "shards"))
            if mode == "fsdp1-copies"
            else None,
        )


def step(net: nn.Module, optimizer: torch.optim.Optimizer, number: int) -> None:
    torch.manual_seed(number)
    optimizer.zero_grad()
    net(torch.randn(6, 18)).backward()
    optimizer.step()


def state_of(net: nn.Module, optimizer: torch.optim.Optimizer, number: int) -> dict[str, Any]:
    rank = dist.get_rank() if dist.is_initialized() else 0
    return {
        "model": net,
        "optimizer": optimizer,
        "step": number,
        "history": [0.5, {"loss": (1, 2)}],
        "common": torch.arange(7.0),
        "rng": PerRank(RngState(), on_resize="same_rank"),
        "who": PerRank(rank, on_resize="first"),
        "last": PerRank(
            {"rank": torch.tensor(rank)}, on_resize=lambda rank, world, saved: saved - 1
        ),
    }


def columns(factor: float) -> DTensor:
    """Cut the columns over all ranks, as a view of flat memory: this rank has a run of each row."""
    mesh = init_device_mesh("cpu", (dist.get_world_size(),))
    cut = distribute_tensor(factor * torch.arange(96.0).view(8, 12), mesh, [Shard(1)])
    try:
        seen = cut.view(-1)
    except RuntimeError:  # torch 2.9 to 2.11 make no such view
        runs = _StridedShard(0, split_factor=8)
        return DTensor.from_local(cut.to_local().reshape(-1), mesh, [runs], run_check=False)
    assert isinstance(seen, DTensor)
    return seen


def whole(tensor: torch.Tensor) -> torch.Tensor:
    return (tensor.full_tensor() if isinstance(tensor, DTensor) else tensor).detach().clone()


def full(net: nn.Module, optimizer: torch.optim.Optimizer) -> dict[str, torch.Tensor]:
    """Return every whole tensor, by a name that no wrapper changes, gathered by the framework
    itself.

    All ranks must call it.
    """
    if isinstance(net, FSDP):
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")
            found = {f"model/{name}": whole(tensor) for name, tensor in net.state_dict().items()}
            gathered = fsdp1_states(net, optimizer)
    else:
        bare = net.module if isinstance(net, DistributedDataParallel) else net
        found = {
            f"model/{name}": whole(tensor)
            for name, tensor in bare.state_dict(keep_vars=True).items()
        }
        gathered = states(bare, optimizer)
    for name, values in gathered.items():
        for key, value in values.items():
            found[f"optimizer/{name}/{key}"] = whole(value)
    return found


def shards(net: nn.Module, optimizer: torch.optim.Optimizer) -> dict[str, torch.Tensor]:
    """Return this rank's shard of every tensor of a net that ``fully_shard`` has cut.

    Two nets of one world have equal shards on all ranks if their whole tensors are equal. No rank
    waits for another one.
    """
    tensors = {f"model/{name}": value for name, value in net.state_dict(keep_vars=True).items()}
    for name, values in states(net, optimizer).items():
        tensors |= {f"optimizer/{name}/{key}": value for key, value in values.items()}
    return {
        name: (value.to_local() if isinstance(value, DTensor) else value).detach().clone()
        for name, value in tensors.items()
    }


def fsdp1_states(net: FSDP, optimizer: torch.optim.Optimizer) -> dict[str, dict[str, torch.Tensor]]:
    """Return the optimizer's states, where ``FSDP.optim_state_dict`` is wrong.

    It gives ``exp_avg_sq`` for ``exp_avg`` too if parameters keep their names (torch 2.13, CPU). In
    that case the parts of the ranks are joined in their order.
    """
    if any("_flat_param" in name for name, _ in net.named_parameters()):
        return FSDP.optim_state_dict(net, optimizer)["state"]
    with FSDP.summon_full_params(net):
        shapes = {_clean(name): parameter.shape for name, parameter in net.named_parameters()}
    found: dict[str, dict[str, torch.Tensor]] = {name: {} for name in shapes}
    for name, parameter in net.named_parameters():
        held: list[Any] = [None] * dist.get_world_size()
        dist.all_gather_object(held, dict(optimizer.state.get(parameter, {})))
        for key in next(filter(None, held)):
            parts = [values[key] for values in held if values]
            shape = shapes[_clean(name)]
            if key == "step" or parts[0].shape == shape:
                found[_clean(name)][key] = parts[0]
            else:  # the copies of the shards, if there are any, follow
                found[_clean(name)][key] = torch.cat(parts)[: shape.numel()].view(shape)
    return found


def _clean(name: str) -> str:
    return name.replace("_fsdp_wrapped_module.", "")


def states(net: nn.Module, optimizer: torch.optim.Optimizer) -> dict[str, dict[str, torch.Tensor]]:
    """Map each parameter to its optimizer's state, from all ranks if each has that of some."""
    if not isinstance(optimizer, ZeroRedundancyOptimizer):
        return {name: optimizer.state[parameter] for name, parameter in net.named_parameters()}
    own = optimizer.optim.state
    mine = {
        name: dict(own[parameter]) for name, parameter in net.named_parameters() if parameter in own
    }
    found: list[Any] = [None] * dist.get_world_size()
    dist.all_gather_object(found, mine)
    merged = {name: values for each in found for name, values in each.items()}
    assert len(merged) == sum(map(len, found)), "each parameter is one rank's"
    return merged


def assert_same(have: dict[str, torch.Tensor], want: dict[str, torch.Tensor]) -> None:
    assert have.keys() == want.keys(), have.keys() ^ want.keys()
    for name, tensor in want.items():
        assert torch.equal(have[name], tensor), name


def assert_close(have: dict[str, torch.Tensor], want: dict[str, torch.Tensor]) -> None:
    """Compare with the tolerance that another order of summing needs.

    The gradient of ``down.bias`` consists of that error only, since the norm that follows removes
    the rest.
    """
    assert have.keys() == want.keys(), have.keys() ^ want.keys()
    for name, tensor in want.items():
        noise = "down.bias" in name or "running_mean" in name
        rtol, atol = (1.0, 0.05) if noise else (2e-3, 1e-5)
        torch.testing.assert_close(
            have[name], tensor, rtol=rtol, atol=atol, msg=partial("{}: {}".format, name)
        )
