"""A small training with any optimizer, and what its end is compared by."""

from __future__ import annotations

import hashlib
import random
from collections import deque
from collections.abc import Iterator, Mapping
from enum import IntEnum
from importlib import import_module
from typing import Any, Final

import numpy as np
import torch
from torch import nn
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.fsdp import fully_shard
from torch.distributed.tensor import DTensor, Replicate, Shard, distribute_tensor

from ckpt import PerRank, RngState
from tests.census.optimizers import TAKEN, Entry

SAVED, END = 7, 21
"""The steps after which the training is saved, and after which it ends. Between them are enough
steps for optimizers that compute a matrix every ten steps."""
SHARDED_STEPS: Final = (4, 9)
"""The same steps on several ranks, which wait for each other in each step."""

STYLES: Final = (
    ("all", "step"),
    ("all", "closure"),
    ("groups", "step"),
    ("matrices", "step"),
    ("model", "step"),
    ("all", "graph"),
    ("sparse", "step"),
)
"""What the optimizer takes, and how its step is called: with a closure, or after a backward pass
that made a graph. "sparse" is a model whose gradients are sparse."""
Style = tuple[str, str]


class Net(nn.Module):
    """A convolution, two matrices and vectors, with dropout.

    One matrix is large enough for quantised moments, also in halves.
    """

    def __init__(self) -> None:
        super().__init__()
        self.conv = nn.Conv2d(2, 6, 3, padding=1)
        self.norm = nn.LayerNorm(96)
        self.mid = nn.Linear(96, 96)
        self.out = nn.Linear(96, 5)

    def forward(self, values: torch.Tensor) -> torch.Tensor:
        hidden = torch.relu(self.conv(values.view(-1, 2, 4, 4))).flatten(1)
        hidden = torch.tanh(self.mid(nn.functional.dropout(self.norm(hidden), 0.1)))
        found: torch.Tensor = self.out(hidden)
        return found


class Sparse(nn.Module):
    """A model whose gradients are sparse."""

    def __init__(self) -> None:
        super().__init__()
        self.rows = nn.Embedding(10, 5, sparse=True)

    def forward(self, values: torch.Tensor) -> torch.Tensor:
        found: torch.Tensor = self.rows(values[:, 0].abs().mul(3).long().clamp(max=9))
        return nn.functional.dropout(found, 0.1)


class OwnState:
    """The wrapper that an error advises for an optimizer with a state dict of its own, or with a
    state that has objects of the optimizer's package.
    """

    def __init__(self, optimizer: Any) -> None:
        self.optimizer = optimizer

    def state_dict(self) -> Any:
        return _apart(self.optimizer.state_dict())

    def load_state_dict(self, state: Any) -> None:
        groups = self.optimizer.param_groups
        parameters = [parameter for group in groups for parameter in group["params"]]
        meshes = [value.device_mesh for value in parameters if isinstance(value, DTensor)]
        self.optimizer.load_state_dict(_together(state, meshes[0] if meshes else None))


def _apart(value: Any) -> Any:
    """Return ``value`` with the parts of each deque, and of each object of a package of optimizers,
    in its place, and with each DTensor whole.
    """
    if isinstance(value, DTensor):
        dims = [each.dim if isinstance(each, Shard) else None for each in value.placements]
        return {"whole": value.full_tensor(), "dims": dims}
    if isinstance(value, dict):
        return {key: _apart(inner) for key, inner in value.items()}
    if type(value) in (list, tuple):
        return type(value)(map(_apart, value))
    if isinstance(value, IntEnum):
        return value.value
    if isinstance(value, deque):
        return {"items": _apart(list(value)), "most": value.maxlen}
    if type(value).__module__.partition(".")[0] == "pytorch_optimizer":
        kind = [type(value).__module__, type(value).__qualname__]
        return {"kind": kind, "parts": _apart(vars(value))}
    return value


def _together(value: Any, mesh: DeviceMesh | None) -> Any:
    """Undo ``_apart``: return the value that it was called with. A DTensor with a partial placement
    is replicated.
    """
    if isinstance(value, dict):
        inner = {key: _together(each, mesh) for key, each in value.items()}
        if value.keys() == {"whole", "dims"}:
            placements = [Replicate() if dim is None else Shard(dim) for dim in value["dims"]]
            return distribute_tensor(value["whole"], mesh, placements)
        if value.keys() == {"items", "most"}:
            return deque(inner["items"], inner["most"])
        if value.keys() == {"kind", "parts"}:
            module, name = value["kind"]
            made = object.__new__(getattr(import_module(module), name))
            vars(made).update(inner["parts"])
            return made
        return inner
    if type(value) in (list, tuple):
        return type(value)(_together(each, mesh) for each in value)
    return value


class Training:
    def __init__(self, entry: Entry, style: Style, seed: int, *, sharded: bool = False) -> None:
        seed_all(seed)
        takes, self.call = style
        self.model: nn.Module = Sparse() if takes == "sparse" else Net()
        if sharded:
            fully_shard(self.model)
        self.optimizer = entry.build(TAKEN.get(takes, TAKEN["all"])(self.model))
        if callable(begin := getattr(self.optimizer, "train", None)):
            begin()  # Schedule-free optimizers
        seed_all(seed + 1)

    def train(self, begin: int, end: int) -> list[str]:
        """Train these steps, and return the losses, to the bit."""
        return [self._step(step) for step in range(begin, end)]

    def _step(self, step: int) -> str:
        generator = torch.Generator().manual_seed(1000 + step)
        values = torch.randn(16, 32, generator=generator)
        labels = torch.randint(0, 5, (16,), generator=generator)
        losses = []

        def closure() -> torch.Tensor:
            self.optimizer.zero_grad()
            with torch.enable_grad():
                loss = nn.functional.cross_entropy(self.model(values), labels)
                loss.backward(create_graph=self.call == "graph")
            losses.append(float(loss).hex())
            return loss.detach()

        if self.call == "closure":
            self.optimizer.step(closure)  # type: ignore[arg-type]
        else:
            closure()
            self.optimizer.step()
        return " ".join(losses)

    def state(self, *, wrapped: bool = False) -> dict[str, Any]:
        optimizer = OwnState(self.optimizer) if wrapped else self.optimizer
        return {"model": self.model, "optimizer": optimizer, "rng": PerRank(RngState())}

    def own(self) -> dict[str, Any]:
        """Return what a script saves with ``torch.save``."""
        return {
            "model": self.model.state_dict(),
            "optimizer": self.optimizer.state_dict(),
            "rng": RngState().state_dict(),
        }

    def load(self, own: Mapping[str, Any]) -> None:
        self.model.load_state_dict(own["model"])
        self.optimizer.load_state_dict(own["optimizer"])
        RngState().load_state_dict(own["rng"])

    def bits(self) -> dict[str, str]:
        """Return the weights and the tensors of the optimizer's state dict, as digests."""
        held = {"model": self.model.state_dict(), "optimizer": self.optimizer.state_dict()}
        return dict(_digests("", held))


def seed_all(seed: int) -> None:
    random.seed(seed)
    np.random.seed(seed)
    torch.manual_seed(seed)


def _digests(path: str, value: Any) -> Iterator[tuple[str, str]]:
    if isinstance(value, DTensor):
        is_partial = any(each.is_partial() for each in value.placements)
        value = value.full_tensor() if is_partial else value.to_local()
    if isinstance(value, torch.Tensor):
        yield path, _digest(value)
    elif isinstance(value, dict):
        for key, inner in value.items():
            yield from _digests(f"{path}/{key}", inner)
    elif isinstance(value, list | tuple):
        for number, inner in enumerate(value):
            yield from _digests(f"{path}/{number}", inner)


def _digest(value: torch.Tensor) -> str:
    if hasattr(value, "__tensor_flatten__"):
        names, _ = value.__tensor_flatten__()
        return " ".join(_digest(getattr(value, name)) for name in names)
    plain = value.detach().to_dense().contiguous().reshape(-1).view(torch.uint8)
    return hashlib.md5(plain.numpy().tobytes()).hexdigest()
