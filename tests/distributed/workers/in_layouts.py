# ruff: noqa: PT017 - a worker has no pytest
"""FOLDER [all] [CASE ...]: run every case of this file in one world, and report on each.

With ``all`` a case combines all that it is about, and else takes each value of it.

A case is a function that is marked with ``@case``. All ranks run it, and it makes its own folders
below FOLDER.
"""

from __future__ import annotations

import os
import sys
import traceback
import warnings
from collections.abc import Callable, Iterator
from contextlib import contextmanager, nullcontext
from itertools import product
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import FullyShardedDataParallel as FSDP
from torch.distributed.fsdp import MixedPrecision, ShardingStrategy, StateDictType, fully_shard
from torch.distributed.fsdp.wrap import ModuleWrapPolicy
from torch.distributed.tensor import DTensor
from torch.distributed.tensor.parallel import ColwiseParallel, parallelize_module
from torch.nn.parallel import DistributedDataParallel

from bench.rank_exit import exit_rank
from ckpt import CheckpointManager
from ckpt.errors import CkptError, ReplicasDiverged, UnsupportedValue
from tests.kit.models import compiled, sharded
from tests.state.stateful import KINDS, Net, state_with, train

CASES: list[Callable[[Path], None]] = []


def case(function: Callable[[Path], None]) -> Callable[[Path], None]:
    CASES.append(function)
    return function


class Stack(nn.Module):
    """Linear layers with one weight each: the output is the product of the weights."""

    def __init__(self) -> None:
        super().__init__()
        self.one, self.two, self.three = (nn.Linear(8, 8, bias=False) for _ in range(3))
        self.register_buffer("seen", torch.zeros(2))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.three(self.two(self.one(x)))


class Normed(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.inner, self.norm = nn.Linear(8, 8), nn.BatchNorm1d(8)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.norm(self.inner(x))


def stack(value: float) -> Stack:
    """Return layers that multiply by ``value`` each."""
    net = Stack()
    with torch.no_grad():
        for layer in (net.one, net.two, net.three):
            layer.weight.copy_(torch.eye(8) * value)
    return net


def wrapped(
    value: float, kind: ShardingStrategy, *, named: bool, net: nn.Module | None = None
) -> FSDP:
    return FSDP(
        net or stack(value),
        use_orig_params=named,
        auto_wrap_policy=ModuleWrapPolicy({nn.Linear}),
        device_id=torch.device("cpu"),
        sharding_strategy=kind,
    )


def output(net: nn.Module) -> float:
    """Return what a net of equal layers makes of ones."""
    with torch.no_grad():
        made = net(torch.ones(4, 8))
    made = made.full_tensor() if isinstance(made, DTensor) else made
    assert (made == made[0, 0]).all(), made
    return made[0, 0].item()


def saved(folder: Path, state: dict[str, Any]) -> Path:
    with CheckpointManager(folder) as manager:
        manager.save(state, 1)
    return folder


def restored(folder: Path, state: dict[str, Any]) -> None:
    with CheckpointManager(folder) as manager:
        assert manager.restore(state) is not None


@contextmanager
def raises(kind: type[CkptError], *words: str) -> Iterator[None]:
    try:
        yield
    except kind as error:
        assert all(word in str(error) for word in words), error
    else:
        raise AssertionError(f"no {kind.__name__}")


def data(number: int) -> torch.Tensor:
    """Return numbers that differ on each rank."""
    return torch.randn(8, 8, generator=torch.Generator().manual_seed(10 * number + dist.get_rank()))


# -- a restore after a forward without a backward --------------------------------------------------


@case
def fsdp1_computes_with_what_was_restored(folder: Path) -> None:
    kinds = (
        ShardingStrategy.FULL_SHARD,
        ShardingStrategy.SHARD_GRAD_OP,
        ShardingStrategy.NO_SHARD,
    )
    ways = list(product((False, True), (torch.no_grad, nullcontext)))
    for number, (kind, named) in enumerate(product(kinds, (True, False))):
        root = saved(folder / f"{kind.name}-{named}", {"model": wrapped(2.0, kind, named=named)})
        some = (ways[number % len(ways)],)
        for is_compiled, grad in ways if "all" in sys.argv else some:
            net = wrapped(3.0, kind, named=named)
            run = compiled(net) if is_compiled else net
            with grad():
                run(torch.ones(4, 8))  # evaluate the weights of before
            restored(root, {"model": run})
            assert output(run) == 8.0, (kind, named, is_compiled, grad)
            run(torch.ones(4, 8)).sum().backward()
            assert output(run) == 8.0, (kind, named, is_compiled, grad)


@case
def fsdp1_with_low_precision_computes_with_what_was_restored(folder: Path) -> None:
    def low(value: float) -> FSDP:
        return FSDP(
            stack(value),
            device_id=torch.device("cpu"),
            sharding_strategy=ShardingStrategy.SHARD_GRAD_OP,
            mixed_precision=MixedPrecision(param_dtype=torch.bfloat16),
        )

    root = saved(folder, {"model": low(2.0)})
    for full_in_eval in ("0", "1"):
        os.environ["FSDP_USE_FULL_PREC_IN_EVAL"] = full_in_eval
        net = low(3.0)
        assert output(net) == 27.0
        net.eval()
        assert output(net) == 27.0
        restored(root, {"model": net})
        assert output(net) == 8.0
        net.train()
        assert output(net) == 8.0
    del os.environ["FSDP_USE_FULL_PREC_IN_EVAL"]


@case
def fsdp2_computes_with_what_was_restored(folder: Path) -> None:
    def layered(value: float, *, reshard: bool) -> Any:
        net: Any = stack(value)
        for layer in (net.one, net.two):
            fully_shard(layer, reshard_after_forward=reshard)
        return sharded(net, reshard_after_forward=reshard)

    root = saved(folder, {"model": layered(2.0, reshard=True)})
    for reshard in (True, False):
        for how in ("forward", "unshard", "unshard async", "forward without a backward"):
            net = layered(3.0, reshard=reshard)
            if how == "forward":
                output(net)
            elif how.startswith("unshard"):
                for module in (net, net.one):
                    module.unshard(async_op=how.endswith("async"))
            else:
                net(torch.ones(4, 8))
            restored(root, {"model": net})
            assert output(net) == 8.0, (reshard, how)


@case
def ddp_with_a_static_graph_computes_with_what_was_restored(folder: Path) -> None:
    root = saved(folder, {"model": stack(2.0)})
    net = DistributedDataParallel(stack(3.0), static_graph=True)
    for _ in range(2):
        net(torch.ones(4, 8)).sum().backward()
    net(torch.ones(4, 8))
    restored(root, {"model": net})
    assert output(net) == 8.0


# -- FSDP1 -----------------------------------------------------------------------------------------


@case
def fsdp1_between_forward_and_backward_names_a_parameter_and_the_way_out(folder: Path) -> None:
    net = wrapped(2.0, ShardingStrategy.SHARD_GRAD_OP, named=True)
    loss = net(torch.ones(4, 8)).sum()
    with CheckpointManager(folder) as manager:
        with raises(UnsupportedValue, "'model/one.weight'", "SHARD_GRAD_OP", "backward()"):
            manager.save({"model": net}, 1)
        loss.backward()
        manager.save({"model": net}, 2)


@case
def fsdp1_with_adagrad_comes_back(folder: Path) -> None:
    def built(value: float) -> dict[str, Any]:
        net = FSDP(stack(value), use_orig_params=True, device_id=torch.device("cpu"))
        return {"model": net, "optimizer": torch.optim.Adagrad(net.parameters(), lr=0.5)}

    def step(state: dict[str, Any]) -> None:
        state["model"](torch.ones(4, 8)).sum().backward()
        state["optimizer"].step()
        state["optimizer"].zero_grad()

    state = built(2.0)
    for _ in range(2):
        step(state)
    root = saved(folder, state)
    other = built(3.0)
    restored(root, other)
    for each in (state, other):
        step(each)
    for one, two in zip(state["model"].parameters(), other["model"].parameters(), strict=True):
        assert torch.equal(one, two)
        if one.numel():
            assert (
                state["optimizer"].state[one]["step"] == other["optimizer"].state[two]["step"] == 3
            )


@case
def fsdp1_over_tensor_parallelism_is_refused_by_name(folder: Path) -> None:
    mesh = init_device_mesh("cpu", (2, 1), mesh_dim_names=("dp", "tp"))
    net = parallelize_module(stack(2.0), mesh["tp"], {"one": ColwiseParallel()})
    net = FSDP(net, use_orig_params=True, device_mesh=mesh["dp"], device_id=torch.device("cpu"))
    with (
        CheckpointManager(folder) as manager,
        raises(UnsupportedValue, "'model/one.weight'", "fully_shard"),
    ):
        manager.save({"model": net}, 1)


# -- buffers that differ ---------------------------------------------------------------------------


def mean(net: nn.Module) -> torch.Tensor:
    """Return the running mean of the one BatchNorm."""
    return next(
        buffer for name, buffer in net.named_buffers() if name.endswith("running_mean")
    ).clone()


@case
def batch_norm_comes_from_the_first_rank(folder: Path) -> None:
    def fsdp2() -> nn.Module:
        return sharded(Normed())

    def hsdp() -> nn.Module:
        return sharded(
            Normed(), mesh=init_device_mesh("cpu", (2, 1), mesh_dim_names=("copies", "shards"))
        )

    def fsdp1() -> nn.Module:
        return FSDP(Normed(), device_id=torch.device("cpu"))

    def fsdp1_hybrid() -> nn.Module:
        mesh = init_device_mesh("cpu", (2, 1), mesh_dim_names=("copies", "shards"))
        return FSDP(
            Normed(),
            device_id=torch.device("cpu"),
            sharding_strategy=ShardingStrategy.HYBRID_SHARD,
            device_mesh=mesh,
        )

    def ddp() -> nn.Module:
        return DistributedDataParallel(Normed(), broadcast_buffers=False)

    def compiled_ddp() -> nn.Module:
        return compiled(DistributedDataParallel(Normed()))

    for build in (fsdp2, hsdp, fsdp1, fsdp1_hybrid, ddp, compiled_ddp):
        net = build()
        for number in range(3):
            net(data(number)).sum().backward()
        mine = mean(net)
        first = mine.clone()
        dist.broadcast(first, 0)
        assert dist.get_rank() == 0 or not torch.equal(mine, first)
        root = saved(folder / build.__name__, {"model": net})
        assert torch.equal(mean(net), mine)
        other = build()
        restored(root, {"model": other})
        assert torch.equal(mean(other), first)


@case
def parameters_that_differ_are_still_refused(folder: Path) -> None:
    net = DistributedDataParallel(Normed())
    with torch.no_grad():
        net.module.inner.weight.add_(dist.get_rank())
    with (
        CheckpointManager(folder) as manager,
        raises(ReplicasDiverged, "inner.weight", "declare_part"),
    ):
        manager.save({"model": net}, 1)


# -- objects that save themselves ------------------------------------------------------------------


@case
def objects_with_sharded_tensors_come_back(folder: Path) -> None:
    """The code of DCP's tutorial and of torchtitan, under FSDP2 and FSDP1.

    The results must equal those of an uninterrupted run.
    """

    def fsdp2() -> nn.Module:
        return sharded(Net())

    def fsdp1() -> nn.Module:
        # the state is flat: with the names of parameters torch's own load fails here (2.13, gloo),
        # in different collectives on each rank
        net = FSDP(Net(), use_orig_params=False, device_id=torch.device("cpu"))
        FSDP.set_state_dict_type(net, StateDictType.SHARDED_STATE_DICT)
        return net

    for build in (fsdp2, fsdp1):
        for kind in KINDS if build is fsdp2 else KINDS[:2]:
            net = build()
            state, optimizer = state_with(kind, net, lr=0.1)
            train(net, optimizer, 2)
            root = saved(folder / f"{build.__name__} {kind}", state)
            other = build()
            fresh, stepper = state_with(kind, other, lr=0.7)
            train(other, stepper, 1)
            restored(root, fresh)
            assert torch.equal(train(other, stepper, 2), train(net, optimizer, 2)), (build, kind)


def main() -> None:
    folder = Path(sys.argv[1])
    dist.init_process_group("gloo")
    warnings.simplefilter("ignore")
    names = {*sys.argv[2:]} - {"all"}
    for function in (each for each in CASES if each.__name__ in names or not names):
        torch.manual_seed(0)
        reported = "well"
        try:
            function(folder / function.__name__)
        except Exception:
            reported = traceback.format_exc()
            print(
                reported, file=sys.stderr, flush=True
            )  # a rank may wait for this one in a collective, and print nothing
        heard: list[Any] = [None] * dist.get_world_size()
        dist.all_gather_object(heard, reported)
        if dist.get_rank() == 0:
            wrong = [f"rank {rank}: {each}" for rank, each in enumerate(heard) if each != "well"]
            print(f"=== {function.__name__}\n{''.join(wrong) or 'well'}", flush=True)
    dist.barrier()
    exit_rank()


main()
