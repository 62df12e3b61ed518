"""Experts that are on different ranks, in each way in which a framework keeps them.

One number of expert parallel ranks saves them, and another number restores them.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import nn
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import Replicate, Shard, distribute_tensor

from ckpt import declare_part
from ckpt.errors import ConfigError, ReplicasDiverged, UnsupportedValue
from ckpt.model.patterns import Patterns
from ckpt.state.walk.collect import collect
from tests.state.ranks import rank_of
from tests.state.worlds import restore, save_ranks

EXPERTS, WIDTH = 8, 3
WHOLE = torch.arange(float(EXPERTS * WIDTH * 2)).view(EXPERTS, WIDTH, 2)


class Router(nn.Module):
    """One parameter that all ranks have."""

    def __init__(self, fill: float) -> None:
        super().__init__()
        self.router = nn.Parameter(torch.full((5,), fill))


def by_name(rank: int, world_size: int, fill: float | None) -> nn.Module:
    """Make each expert a module of its own, under a name that only one rank has."""
    net = Router(1.0 if fill is None else fill)
    own = range(rank * EXPERTS // world_size, (rank + 1) * EXPERTS // world_size)
    weights = {
        f"e{i}": nn.Parameter(WHOLE[i].clone() if fill is None else torch.full_like(WHOLE[i], fill))
        for i in own
    }
    net.experts = nn.ParameterDict(weights)
    return net


def as_dtensor(rank: int, world_size: int, fill: float | None) -> nn.Module:
    """Cut [experts, ...] over the second half of a mesh, of which the first half holds copies."""
    net = Router(1.0 if fill is None else fill)
    copies = 2 if world_size > 1 else 1
    mesh = DeviceMesh("cpu", torch.arange(world_size).view(copies, -1), mesh_dim_names=("dp", "ep"))
    whole = WHOLE if fill is None else torch.full_like(WHOLE, fill)
    net.experts = nn.Parameter(
        distribute_tensor(whole, mesh, [Replicate(), Shard(0)], src_data_rank=None)
    )
    return net


def as_declared(rank: int, world_size: int, fill: float | None) -> nn.Module:
    """Make a plain parameter with the experts of this rank."""
    net = Router(1.0 if fill is None else fill)
    own = slice(rank * EXPERTS // world_size, (rank + 1) * EXPERTS // world_size)
    part = WHOLE[own].clone()
    net.experts = nn.Parameter(part if fill is None else torch.full_like(part, fill))
    declare_part(net.experts, WHOLE.shape, (own.start, 0, 0))
    return net


def with_state(net: nn.Module, fill: float | None) -> dict[str, Any]:
    """Add an optimizer that has stepped or, with ``fill``, has not."""
    optimizer = torch.optim.AdamW(net.parameters())
    if fill is None:
        for parameter in net.parameters():
            values = {"exp_avg": parameter.detach() * 2, "exp_avg_sq": parameter.detach() * 3}
            optimizer.state[parameter] = {"step": torch.tensor(4.0), **values}
    return {"model": net, "optimizer": optimizer}


def assert_restored(net: nn.Module, state: dict[str, Any]) -> None:
    optimizer = state["optimizer"]
    for name, parameter in net.named_parameters():
        mine = parameter.to_local() if hasattr(parameter, "to_local") else parameter
        assert not (mine == -1).any(), name
        values = optimizer.state[parameter]
        for key, factor in (("exp_avg", 2), ("exp_avg_sq", 3)):
            assert torch.equal(getattr(values[key], "_local_tensor", values[key]), factor * mine), (
                name,
                key,
            )
        assert values["step"] == 4


def experts(net: nn.Module) -> torch.Tensor:
    """Return the experts of this rank, as it holds them."""
    if isinstance(net.experts, nn.ParameterDict):
        return torch.stack([net.experts[key].detach() for key in sorted(net.experts)])
    held = net.get_parameter("experts").detach()
    return getattr(held, "_local_tensor", held)


Build = Callable[[int, int, float | None], nn.Module]


def saved(build: Build, world_size: int) -> tuple[dict[int, bytes], Any]:
    return save_ranks(world_size, lambda rank: with_state(build(rank, world_size, None), None))


@pytest.mark.parametrize(
    ("before", "after"),
    [(by_name, by_name), (as_dtensor, as_dtensor), (as_declared, as_declared), (as_declared, as_dtensor), (as_dtensor, as_declared)],  # noqa: E501
)  # fmt: skip
@pytest.mark.parametrize(("ranks", "others"), [(4, 2), (2, 4), (4, 1), (1, 8)])
def test_experts_move_to_another_number_of_ranks(
    before: Build, after: Build, ranks: int, others: int
) -> None:
    images, manifest = saved(before, ranks)
    per_rank = EXPERTS // (others if after is not as_dtensor or others == 1 else others // 2)
    for rank in range(others):
        with rank_of(rank, others):
            net = after(rank, others, -1.0)
            state = with_state(net, -1.0)
            strict = (
                after is not by_name
            )  # the other experts are on other ranks, whose states are not here
            restore(state, images, manifest, rank, others, strict=strict)
            assert_restored(net, state)
            first = rank * per_rank % EXPERTS
            assert torch.equal(experts(net), WHOLE[first : first + per_rank])


def test_experts_that_nobody_declared_are_refused_with_name_and_ranks() -> None:
    def undeclared(rank: int) -> dict[str, Any]:
        net = Router(1.0)
        net.experts = nn.Parameter(WHOLE[2 * rank : 2 * rank + 2].clone())
        return {"model": net}

    with pytest.raises(ReplicasDiverged, match=r"'model/experts' differs between ranks 0, 1"):
        save_ranks(4, undeclared)


def test_a_part_that_is_not_inside_the_whole_is_refused() -> None:
    with pytest.raises(
        ConfigError, match=r"\[2, 3\] at \[7, 0\] is not inside a tensor of \[8, 3\]"
    ):
        declare_part(torch.zeros(2, 3), (8, 3), (7, 0))
    part = nn.Parameter(torch.zeros(2, 3))
    declare_part(part, (8, 3), (6, 0))
    part.data = torch.zeros(3, 3)
    net = nn.Module()
    net.experts = part
    with pytest.raises(ConfigError, match=r"call it again"):
        save_ranks(1, lambda rank: {"model": net})


def test_a_part_that_two_modules_of_a_state_hold_is_refused_by_name() -> None:
    net = nn.ModuleDict({"inner": as_declared(0, 2, None)})
    for state in (
        {"model": net, "own": net["inner"]},
        {"model": net["inner"], "own": net["inner"]},
    ):
        with pytest.raises(UnsupportedValue, match="only one of the two") as refused:
            collect(state, rank=0)
        assert refused.value.name == "own/experts"
        found = collect(state, rank=0, patterns=Patterns(exclude=("own/experts",)))
        assert "own/router" in found.ties


def test_a_whole_parameter_that_two_modules_of_a_state_hold_is_tied() -> None:
    net = nn.ModuleDict({"inner": Router(1.0)})
    assert set(collect({"model": net, "own": net["inner"]}, rank=0).ties) == {"own/router"}
