"""A state -> its tensors with names, and a tree of everything else.

The tree has the shape of the state. Containers and plain values are themselves; what is alive leaves a node: ``tensor`` and ``array`` (with the name of their bytes),
``module`` and ``optimizer`` (their tensors are found by name, below their path), ``object`` (a ``state_dict()``), ``per_rank`` (the value is in this rank's own tree).
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import numpy as np
import torch
from torch import nn
from torch.distributed.tensor import DTensor
from torch.optim import Optimizer

from ckpt.adapters.local_shards import LocalShards, Source
from ckpt.adapters.memory import Memory
from ckpt.adapters.modules import (
    Parameters,
    Part,
    check_optimizer,
    items_of,
    part_groups,
    state_name,
    unwrapped,
)
from ckpt.adapters.per_rank import PerRank
from ckpt.adapters.segments import PLAIN, At, Held, Segment, Table, is_plain, same_view
from ckpt.adapters.sharded import as_source
from ckpt.adapters.stand_in import OptimizerStandIn, StandIn
from ckpt.adapters.zero import keeper_of
from ckpt.errors import UnsupportedValue
from ckpt.model.values import Node, encode, join


@dataclass(slots=True)
class Collected:
    """What a walk over a state found, in the walk's order.

    Attributes:
        parts: Tensors: those of a module or optimizer as one segment, the very same as in the last walk if nothing about it has changed; others alone.
        tied: name -> the name of the same memory met earlier.
        per_rank: path -> tree of a ``PerRank`` value.
        optimizers: Those to be fenced.
    """

    parts: list[Segment | Held] = field(default_factory=list[Segment | Held])
    tied: dict[str, str] = field(default_factory=dict[str, str])
    tree: Node = None
    per_rank: dict[str, Node] = field(default_factory=dict[str, Node])
    optimizers: list[Optimizer] = field(default_factory=list[Optimizer])

    @property
    def held(self) -> list[Held]:
        """All tensors."""
        found: list[Held] = []
        for part in self.parts:
            if isinstance(part, Segment):
                found += part.held
            else:
                found.append(part)
        return found


def collect(
    state: Mapping[str, Any], *, rank: int, memory: Memory | None = None, lasting: bool = False
) -> Collected:
    """Walk ``state``. Nothing is copied: tensors are those of the state. ``lasting``: so are its large dicts of tensors; else that is believed when they come a second time.

    Raises:
        UnsupportedValue: Something that only pickle could save, with its path and the way out.
    """
    if not isinstance(state, Mapping):
        raise UnsupportedValue(
            "state", type(state).__name__, "a state is a dict: {'model': model, 'optimizer': optimizer, ...}"
        )
    memory = memory or Memory()
    objects = list(walk_objects(state))
    look_again(objects)
    optimizers = [unwrapped(value) for _, value in objects if isinstance(value, Optimizer)]
    owned = {id(p) for optimizer in optimizers for group in optimizer.param_groups for p in group["params"]}
    modules = [(value, memory.items(path, value)) for path, value in objects if isinstance(value, nn.Module)]
    walk = _Walk(Parameters(modules), owned, rank, memory, lasting=lasting)
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


def look_again(objects: Sequence[tuple[str, Any]]) -> None:
    """Let what stands in for others show what is there now. Before anything is asked of it."""
    for _, value in objects:
        if isinstance(value, StandIn):
            value.look()


def walk_objects(value: Any, path: str = "", depth: int = 0) -> Iterator[tuple[str, Any]]:
    """Modules and optimizers in the containers of a state, with their paths."""
    if isinstance(value, nn.Module | Optimizer):
        yield path, value
    elif isinstance(value, Mapping) and depth < 100:
        for key, item in value.items():
            if type(item) not in PLAIN:  # of those there may be thousands
                yield from walk_objects(item, join(path, key), depth + 1)
    elif isinstance(value, list | tuple) and depth < 100:
        for index, item in enumerate(value):
            yield from walk_objects(item, join(path, index), depth + 1)


def find_parameters(objects: Sequence[tuple[str, Any]]) -> Parameters:
    """The modules among the objects of a state."""
    return Parameters(
        (value, items_of(path, value)) for path, value in objects if isinstance(value, nn.Module)
    )


class _Walk:
    def __init__(
        self, parameters: Parameters, owned: set[int], rank: int, memory: Memory, *, lasting: bool
    ) -> None:
        self._lasting = lasting
        self.out = Collected()
        self._parameters, self._owned, self._rank, self._memory = parameters, owned, rank, memory
        self._seen: dict[int, str] = {}
        self._at: At = {}
        self._inside = 0  # how many state_dict()s deep
        self._alone = False  # inside a PerRank value: never shared

    def other(self, value: object, path: str) -> Node:
        """The hook of ``encode`` for what is not plain."""
        match value:
            case torch.Tensor():
                return {"$": "tensor", "n": self._tensor(path, as_source(value))}
            case LocalShards():
                return {"$": "tensor", "n": self._tensor(path, value)}
            case dict() if type(value) is dict:  # no subclass: those are not plain
                return self._table(value, path)
            case np.ndarray():
                return self._array(value, path)
            case nn.Module():
                return self._module(value, path)
            case Optimizer():
                return self._optimizer(unwrapped(value), path)
            case PerRank():
                return self._per_rank(value, path)
            case torch.Size():
                return {"$": "size", "v": list(value)}
            case torch.dtype() | torch.device():
                return {"$": type(value).__name__, "v": str(value).removeprefix("torch.")}
            case _:
                pass
        if is_stateful(value):
            self._inside += 1
            try:
                return {"$": "object", "v": encode(value.state_dict(), path, self.other)}  # type: ignore[attr-defined]
            finally:
                self._inside -= 1
        raise UnsupportedValue(path, f"{type(value).__module__}.{type(value).__qualname__}")

    # -- tensors alone ------------------------------------------------------------------------------------------------------

    def _tensor(self, name: str, tensor: Source) -> str:
        """Register a tensor that belongs to no module or optimizer; returns the name its bytes are stored under."""
        if self._inside and isinstance(tensor, DTensor | LocalShards):
            raise UnsupportedValue(
                name,
                f"{type(tensor).__name__} in a state_dict()",
                "put it, or the module or optimizer that it belongs to, into the state itself",
            )
        if self._alone:  # its own bytes: what ranks share must not hang on what they do not
            if isinstance(tensor, LocalShards):
                raise UnsupportedValue(name, "LocalShards in a PerRank", "put it into the state itself")
            name = f"{name}@{self._rank}"
            self.out.parts.append(Held(name, tensor, late=False, replicas=()))
            return name
        stored = self._stored(name, tensor, self._seen, self._at)
        if stored == name:
            self.out.parts.append(Held(name, tensor, late=self._has_owner(tensor), replicas=()))
        else:
            self.out.tied[name] = stored
        return stored

    def _has_owner(self, tensor: Source) -> bool:
        """Whether a fenced optimizer is all that changes it."""
        if not isinstance(tensor, LocalShards) or tensor.owner is None:
            return False
        owner = unwrapped(tensor.owner)
        if not any(known is owner for known in self.out.optimizers):
            self.out.optimizers.append(owner)
        return True

    def _stored(self, name: str, tensor: Source, seen: dict[int, str], at: At) -> str:
        """``name``, or that of an earlier tensor which is this one. All that were seen are kept: no identity comes twice."""
        stored = self._seen.get(id(tensor)) or seen.get(id(tensor))
        if stored is None:
            stored = name
            if is_plain(tensor) and tensor.layout is torch.strided and (address := tensor.data_ptr()):
                others = (
                    [*self._at.get(address, ()), *at.get(address, ())]
                    if at is not self._at
                    else at.get(address, [])
                )
                stored = next((known for other, known in others if same_view(other, tensor)), name)
                if stored == name:
                    at.setdefault(address, []).append((tensor, name))
            if stored == name:  # a tied one may be let go, and its identity taken by another
                seen[id(tensor)] = name
        return stored

    def _array(self, array: np.ndarray[Any, Any], path: str) -> Node:
        if isinstance(array, np.ma.MaskedArray):
            raise UnsupportedValue(path, "masked array", "save its data and its mask as arrays of their own")
        try:
            plain = np.ascontiguousarray(array)
            tensor = torch.from_numpy(plain if plain.flags.writeable else plain.copy()).reshape(array.shape)
        except (TypeError, ValueError):
            raise UnsupportedValue(
                path, f"NumPy array of dtype {array.dtype}", "convert it to a numeric dtype"
            ) from None
        return {"$": "array", "n": self._tensor(path, tensor), "d": array.dtype.str}

    def _table(self, value: Mapping[Any, Any], path: str) -> Node:
        """A large dict of plain tensors or ``LocalShards``: one segment, if it is the same as last time. None if it is not: they may be passing ones, which shall not be kept alive."""
        tensors = tuple(value.values())
        if self._alone or not all(type(tensor) in PLAIN or type(tensor) is LocalShards for tensor in tensors):
            return None
        if not all(type(key) is str and not key.startswith("$") for key in value):
            return None
        table = self._memory.tables.get(path)
        if table is None or not table.is_of(value, tensors):
            table = self._memory.tables[path] = Table(value, tensors)
            self._memory.segments.pop(path, None)
            if not self._lasting:
                return None

        late = list(map(self._has_owner, tensors))

        def named() -> Iterator[Held]:
            for (key, tensor), is_late in zip(value.items(), late, strict=True):
                yield Held(join(path, key), tensor, is_late, replicas=())

        self._segment(path, (*table.keys, *late), tensors, named)
        segment = self._memory.segments[path]
        if table.node is None or table.segment is not segment:
            names = [join(path, key) for key in value]
            table.node = {
                key: {"$": "tensor", "n": segment.tied.get(name, name)}
                for key, name in zip(value, names, strict=True)
            }
            table.segment = segment
        return table.node

    # -- segments -----------------------------------------------------------------------------------------------------------

    def _segment(
        self,
        path: str,
        key: Sequence[object],
        tensors: Sequence[Source],
        make: Callable[[], Iterator[Held]],
    ) -> None:
        """Register tensors together: as in the last walk if they are the same, else as ``make`` names them."""
        segment = self._memory.segments.get(path)
        fresh = segment is None or not (
            segment.closed
            and self._seen.keys().isdisjoint(segment.seen)
            and self._at.keys().isdisjoint(segment.at)
            and segment.still(key, tensors)
        )
        if segment is None or fresh:
            segment = self._memory.segments[path] = self._build(key, tensors, make())
        self._seen.update(segment.seen)
        self._at.update(segment.at)
        self.out.tied.update(segment.tied)
        self.out.parts.append(segment)

    def _build(self, key: Sequence[object], tensors: Sequence[Source], candidates: Iterator[Held]) -> Segment:
        held: list[Held] = []
        tied: dict[str, str] = {}
        seen: dict[int, str] = {}
        at: At = {}
        for item in candidates:
            stored = self._stored(item.name, item.tensor, seen, at)
            if stored == item.name:
                held.append(item)
            else:
                tied[item.name] = stored
        for address in at.keys() & self._at.keys():  # other views of the same memory: keep both in sight
            at[address] = [*self._at[address], *at[address]]
        return Segment(key, tensors, held=held, tied=tied, seen=seen, at=at)

    def _module(self, module: nn.Module, path: str) -> Node:
        if self._alone:
            raise UnsupportedValue(path, "module in a PerRank", "give it a name of its own on each rank")
        if (items := self._parameters.of(module)) is None:
            raise UnsupportedValue(path, "module in a state_dict()", "give its own state_dict() there")
        values: dict[str, Node] = {}
        tensors: list[Source] = []
        own = [entry for entry in items.entries if items.is_first or id(entry.value) not in items.first_only]
        for entry in own:
            if isinstance(entry.value, Source):
                tensors.append(entry.value)
            else:
                values[entry.fqn] = encode(entry.value, f"{path}/{entry.fqn}", self.other)
        late = [id(tensor) in self._owned for tensor in tensors]

        def named() -> Iterator[Held]:
            made: dict[tuple[int, object], Source] = {}  # what is tied shall be one object
            found = (entry for entry in own if isinstance(entry.value, Source))
            for entry, tensor, is_late in zip(found, tensors, late, strict=True):
                name = f"{path}/{entry.fqn}"
                source = made.setdefault((id(tensor), entry.piece), Part(name, entry.piece).all_of(tensor))
                replicas = () if id(tensor) in items.first_only else items.replicas
                yield Held(name, source, is_late, replicas)

        self._segment(path, (items, *late), tensors, named)
        return {"$": "module", "values": values}

    def _optimizer(self, optimizer: Optimizer, path: str) -> Node:
        if self._alone:
            raise UnsupportedValue(path, "optimizer in a PerRank", "give it a name of its own on each rank")
        check_optimizer(path, optimizer)
        self.out.optimizers.append(optimizer)
        keeper = keeper_of(path, optimizer)
        groups = part_groups(optimizer, self._parameters)
        state: dict[str, Node] = {}
        owners: list[tuple[Part, object, Source]] = []
        tensors: list[Source] = []
        for group, group_parts in zip(optimizer.param_groups, groups, strict=True):
            for parameter, parts in zip(group["params"], group_parts, strict=True):
                for key, value in keeper.state.get(parameter, {}).items():
                    for part in parts:
                        if isinstance(value, Source):
                            owners.append((part, key, parameter))
                            tensors.append(value)
                        else:
                            full = state_name(path, part.path, key)
                            state[full] = encode(value, full, self.other)

        def named() -> Iterator[Held]:
            for (part, key, parameter), tensor in zip(owners, tensors, strict=True):
                name = state_name(path, part.path, key)
                alone = keeper.own is not None or part.piece is not None  # not every rank has it
                replicas = () if alone else self._parameters.replicas_of(parameter)
                yield Held(name, part.of(name, tensor), late=True, replicas=replicas)

        key = [*self._parameters.items, *((part, key) for part, key, _ in owners)]
        self._segment(path, key, tensors, named)
        names = [[part.path for parts in group for part in parts] for group in groups]
        node: Node = {"$": "optimizer", "groups": self._groups(optimizer, names, path), "state": state}
        if isinstance(optimizer, OptimizerStandIn):
            node["extra"] = encode(optimizer.extra(), f"{path}/extra", self.other)
        return node

    def _groups(self, optimizer: Optimizer, names: list[list[str]], path: str) -> list[Node]:
        return [
            {
                "params": group_names,
                "values": encode(
                    {key: value for key, value in group.items() if key != "params"},
                    f"{path}/param_groups/{index}",
                    self.other,
                ),
            }
            for index, (group, group_names) in enumerate(zip(optimizer.param_groups, names, strict=True))
        ]

    def _per_rank(self, value: PerRank, path: str) -> Node:
        if self._alone:
            raise UnsupportedValue(path, "PerRank inside a PerRank", "one is enough")
        self._alone = True
        try:
            self.out.per_rank[path] = encode(value.value, path, self.other)
        finally:
            self._alone = False
        return {"$": "per_rank"}
