"""A state -> its tensors with names, and a tree of everything else.

The tree has the shape of the state. Containers and plain values are themselves; what is alive leaves a node: ``tensor`` and ``array`` (with the name of their bytes),
``module`` and ``optimizer`` (their tensors are found by name, below their path), ``object`` (a ``state_dict()``), ``per_rank`` (the value is in this rank's own tree).
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass, field
from typing import Any

import numpy as np
import torch
from torch import nn
from torch.optim import Optimizer

from ckpt.adapters.modules import ModuleItems, Parameters, items_of, name_groups, state_name, unwrapped
from ckpt.adapters.per_rank import PerRank
from ckpt.errors import UnsupportedValue
from ckpt.model.values import Node, encode, join


@dataclass(frozen=True, slots=True)
class Held:
    """A tensor of the state. ``late``: only its optimizer's step changes it. ``replicas``: who holds the same, if it is a plain tensor and known."""

    name: str
    tensor: torch.Tensor
    late: bool
    replicas: tuple[int, ...]


@dataclass(slots=True)
class Collected:
    """What a walk over a state found, in the walk's order.

    Attributes:
        tied: name -> the name of the same memory met earlier.
        per_rank: path -> tree of a ``PerRank`` value.
        optimizers: Those to be fenced.
    """

    held: list[Held] = field(default_factory=list)
    tied: dict[str, str] = field(default_factory=dict)
    tree: Node = None
    per_rank: dict[str, Node] = field(default_factory=dict)
    optimizers: list[Optimizer] = field(default_factory=list)


def collect(state: Mapping[str, Any], *, rank: int) -> Collected:
    """Walk ``state``. Nothing is copied: tensors are those of the state.

    Raises:
        UnsupportedValue: Something that only pickle could save, with its path and the way out.
    """
    if not isinstance(state, Mapping):
        raise UnsupportedValue(
            "state", type(state).__name__, "a state is a dict: {'model': model, 'optimizer': optimizer, ...}"
        )
    objects = list(walk_objects(state))
    optimizers = [unwrapped(value) for _, value in objects if isinstance(value, Optimizer)]
    owned = {id(p) for optimizer in optimizers for group in optimizer.param_groups for p in group["params"]}
    walk = _Walk(find_parameters(objects), owned, rank)
    walk.out.tree = {key: encode(value, join("", key), walk.other) for key, value in _string_keys(state)}
    return walk.out


def _string_keys(state: Mapping[str, Any]) -> Iterator[tuple[str, Any]]:
    for key, value in state.items():
        if not isinstance(key, str) or not key or key.startswith("$"):
            raise UnsupportedValue(
                repr(key), "key of the state", "use non-empty strings that do not begin with '$'"
            )
        yield key, value


def is_stateful(value: object) -> bool:
    """Whether it saves and loads itself."""
    return callable(getattr(value, "state_dict", None)) and callable(getattr(value, "load_state_dict", None))


def walk_objects(value: Any, path: str = "", depth: int = 0) -> Iterator[tuple[str, Any]]:
    """Modules and optimizers in the containers of a state, with their paths."""
    if isinstance(value, nn.Module | Optimizer):
        yield path, value
    elif isinstance(value, Mapping) and depth < 100:
        for key, item in value.items():
            yield from walk_objects(item, join(path, key), depth + 1)
    elif isinstance(value, list | tuple) and depth < 100:
        for index, item in enumerate(value):
            yield from walk_objects(item, join(path, index), depth + 1)


def find_parameters(objects: Iterable[tuple[str, Any]]) -> Parameters:
    """Paths of the parameters of all modules of the state; the first path wins where two modules share one."""
    paths: dict[int, str] = {}
    replicas: dict[int, tuple[int, ...]] = {}
    modules: dict[int, ModuleItems] = {}
    for path, module in objects:
        if not isinstance(module, nn.Module):
            continue
        found = modules[id(module)] = items_of(module)
        for entry in found.entries:
            if isinstance(entry.value, nn.Parameter):
                paths.setdefault(id(entry.value), f"{path}/{entry.fqn}")
                replicas.setdefault(id(entry.value), found.replicas)
    return Parameters(paths=paths, replicas=replicas, modules=modules)


class _Walk:
    def __init__(self, parameters: Parameters, owned: set[int], rank: int) -> None:
        self.out = Collected()
        self._parameters, self._rank = parameters, rank
        self._seen: dict[Any, str] = {}
        self._owned = owned
        self._alone = False  # inside a PerRank value: never shared

    def other(self, value: object, path: str) -> Node:
        """The hook of ``encode`` for what is not plain."""
        match value:
            case torch.Tensor():
                return {"$": "tensor", "n": self._hold(path, value)}
            case np.ndarray():
                return self._array(value, path)
            case nn.Module():
                return self._module(value, path)
            case Optimizer():
                return self._optimizer(value, path)
            case PerRank():
                return self._per_rank(value, path)
            case torch.Size():
                return {"$": "size", "v": list(value)}
            case torch.dtype() | torch.device():
                return {"$": type(value).__name__, "v": str(value).removeprefix("torch.")}
            case _:
                pass
        if is_stateful(value):
            return {"$": "object", "v": encode(value.state_dict(), path, self.other)}  # type: ignore[attr-defined]
        raise UnsupportedValue(path, f"{type(value).__module__}.{type(value).__qualname__}")

    def _hold(
        self, name: str, tensor: torch.Tensor, *, late: bool = False, replicas: tuple[int, ...] = ()
    ) -> str:
        """Register a tensor; returns the name its bytes are stored under."""
        if self._alone:
            name, replicas = f"{name}@{self._rank}", ()
        keys: list[Any] = [id(tensor)]
        if (
            tensor.numel()
            and type(tensor) in (torch.Tensor, nn.Parameter)
            and tensor.layout is torch.strided
            and not tensor.is_meta
        ):
            keys.append((tensor.data_ptr(), tensor.shape, tensor.stride(), tensor.dtype, tensor.device))
        for key in keys:
            if (first := self._seen.get(key)) is not None:
                if first != name:
                    self.out.tied[name] = first
                return first
        for key in keys:
            self._seen[key] = name
        self.out.held.append(Held(name, tensor, late, replicas))
        return name

    def _array(self, array: np.ndarray[Any, Any], path: str) -> Node:
        try:
            plain = np.ascontiguousarray(array)
            tensor = torch.from_numpy(plain if plain.flags.writeable else plain.copy()).reshape(array.shape)
        except (TypeError, ValueError):
            raise UnsupportedValue(
                path, f"NumPy array of dtype {array.dtype}", "convert it to a numeric dtype"
            ) from None
        return {"$": "array", "n": self._hold(path, tensor), "d": array.dtype.str}

    def _module(self, module: nn.Module, path: str) -> Node:
        if self._alone:
            raise UnsupportedValue(path, "module in a PerRank", "give it a name of its own on each rank")
        found = self._parameters.modules[id(module)]
        values: dict[str, Node] = {}
        for entry in found.entries:
            if isinstance(entry.value, torch.Tensor):
                self._hold(
                    f"{path}/{entry.fqn}",
                    entry.value,
                    late=id(entry.value) in self._owned,
                    replicas=found.replicas,
                )
            else:
                values[entry.fqn] = encode(entry.value, f"{path}/{entry.fqn}", self.other)
        return {"$": "module", "values": values}

    def _optimizer(self, optimizer: Optimizer, path: str) -> Node:
        if self._alone:
            raise UnsupportedValue(path, "optimizer in a PerRank", "give it a name of its own on each rank")
        optimizer = unwrapped(optimizer)
        self.out.optimizers.append(optimizer)
        names = name_groups(optimizer, self._parameters)
        groups: list[Node] = []
        state: dict[str, Node] = {}
        for group, group_names in zip(optimizer.param_groups, names, strict=True):
            values = {key: value for key, value in group.items() if key != "params"}
            groups.append(
                {
                    "params": group_names,
                    "values": encode(values, f"{path}/param_groups/{len(groups)}", self.other),
                }
            )
            for parameter, name in zip(group["params"], group_names, strict=True):
                replicas = self._parameters.replicas.get(id(parameter), ())
                for key, value in optimizer.state.get(parameter, {}).items():
                    full = state_name(path, name, key)
                    if isinstance(value, torch.Tensor):
                        self._hold(full, value, late=True, replicas=replicas)
                    else:
                        state[full] = encode(value, full, self.other)
        return {"$": "optimizer", "groups": groups, "state": state}

    def _per_rank(self, value: PerRank, path: str) -> Node:
        if self._alone:
            raise UnsupportedValue(path, "PerRank inside a PerRank", "one is enough")
        self._alone = True
        try:
            self.out.per_rank[path] = encode(value.value, path, self.other)
        finally:
            self._alone = False
        return {"$": "per_rank"}
