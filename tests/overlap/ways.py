"""Ways in which training code changes parameters and optimizer state outside of the optimizer's
step.
"""

from __future__ import annotations

import ctypes
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
from torch import nn
from torch.distributed.checkpoint.state_dict import set_model_state_dict

from tests.overlap.jobs import WIDTH

State = dict[str, Any]


class TwoLayers(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.one, self.two = nn.Linear(WIDTH, WIDTH), nn.Linear(WIDTH, WIDTH)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.two(self.one(x).relu()).square().mean()


class Job(dict[str, Any]):
    """A state, and an average of its model that is not saved."""

    average: nn.Module


def model_and_average(shard: Callable[[TwoLayers], object] = lambda _: None) -> State:
    """Return a model with an optimizer, both before their first step."""
    model, average = TwoLayers(), TwoLayers()
    shard(model)
    shard(average)
    state = Job(model=model, optimizer=torch.optim.AdamW(model.parameters(), lr=0.01))
    state.average = average
    return state


def weight(state: State) -> Any:
    return state["model"].one.weight


def average_of(state: Any) -> dict[str, Any]:
    return state.average.state_dict()


def average(state: Any) -> Any:
    return state.average.one.weight


def first_moment(state: State) -> Any:
    return state["optimizer"].state[weight(state)]["exp_avg"]


def own(tensor: Any) -> torch.Tensor:
    """Return the memory that this rank has of a tensor."""
    return getattr(tensor, "_local_tensor", tensor).detach()


def fused(state: State) -> None:
    """Call what a fused optimizer calls, or a kernel of the user's own."""
    weights = [own(parameter) for parameter in state["model"].parameters()]
    ones = [torch.ones_like(each) for each in weights]
    with torch.autograd._unsafe_preserve_version_counter(tuple(weights)):
        torch._fused_sgd_(
            weights, ones, [], weight_decay=0.0, momentum=0.0, lr=0.1, dampening=0.0,
            nesterov=False, maximize=False, is_first_step=True,
        )  # fmt: skip


def held_counter(state: State) -> None:
    with torch.autograd._unsafe_preserve_version_counter((weight(state),)):
        weight(state).mul_(2)


COUNTED: dict[str, Callable[[State], object]] = {
    "mul_": lambda state: weight(state).mul_(2),
    "clamp_": lambda state: weight(state).clamp_(-0.01, 0.01),
    "lerp_": lambda state: weight(state).lerp_(average(state), 0.5),
    "copy_ of an average": lambda state: weight(state).copy_(average(state)),
    "nn.init": lambda state: nn.init.normal_(weight(state)),
    "out=": lambda state: torch.add(weight(state), 1, out=weight(state)),
    "detach().mul_": lambda state: weight(state).detach().mul_(2),
    "t().mul_": lambda state: weight(state).t().mul_(2),
    "mul_ of the local tensor": lambda state: own(weight(state)).mul_(2),
    "load_state_dict": lambda state: state["model"].load_state_dict(average_of(state)),
    "set_model_state_dict": lambda state: set_model_state_dict(state["model"], average_of(state)),
    "exp_avg.zero_": lambda state: first_moment(state).zero_(),
}
"""A version counter moves: that of the tensor itself, or that of its local tensor."""

UNCOUNTED: dict[str, Callable[[State], object]] = {
    ".data.clamp_": lambda state: weight(state).data.clamp_(-0.01, 0.01),
    ".data.lerp_": lambda state: weight(state).data.lerp_(average(state).data, 0.5),
    ".data.copy_ of an average": lambda state: weight(state).data.copy_(average(state).data),
    ".data.mul_ of a bias": lambda state: state["model"].two.bias.data.mul_(2),
    "exp_avg.data.add_": lambda state: first_moment(state).data.add_(1),
    "writing through a NumPy view": lambda state: own(weight(state)).numpy().__imul__(2),
    "writing to the address": lambda state: ctypes.memset(
        own(weight(state)).data_ptr(), 1, own(weight(state)).nbytes
    ),
    "foreach_mul_": lambda state: torch._foreach_mul_(list(state["model"].parameters()), 2.0),
    "foreach_lerp_": lambda state: torch._foreach_lerp_(
        list(state["model"].parameters()), list(average_of(state).values()), 0.5
    ),
    "a fused kernel": fused,
    "_unsafe_preserve_version_counter": held_counter,
}
"""No counter moves, at least for DTensors."""

WAYS = {**COUNTED, **UNCOUNTED}


def seen_by(state: State, change: Callable[[State], object]) -> str:
    """Make a change, and return what can show it: a version counter, or only the sample."""

    def versions() -> list[int]:
        held = [*state["model"].parameters()]
        held += [each for of in state["optimizer"].state.values() for each in of.values()]
        return [each._version for tensor in held for each in (tensor, own(tensor))]

    before = versions()
    with torch.no_grad():
        change(state)
    return "counter" if versions() != before else "sample"


def documented() -> dict[str, list[str]]:
    """Return the table of `docs/safety.md`: way -> what shows it for plain tensors,
    FSDP2 and TP.
    """
    text = (Path(__file__).resolve().parents[2] / "docs/safety.md").read_text()
    rows = (
        text.partition("| way | plain, DDP | FSDP2 | TP |\n")[2]
        .partition("\n\n")[0]
        .splitlines()[1:]
    )
    cells = [[cell.strip() for cell in row.strip("|").split("|")] for row in rows]
    return {name.strip("`"): seen for name, *seen in cells}
