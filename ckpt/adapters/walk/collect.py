"""Walk over a state: find its tensors with their names, and build a tree of all other values.

The tree has the shape of the state. Containers and plain values have the nodes that
``ckpt.model.values`` defines. Any other value has a node with one of these tags:

* ``tensor`` and ``array``, with the name under which the bytes are stored;
* ``subclass``, a wrapper tensor, with the nodes of the tensors inside of it;
* ``module`` and ``optimizer``, whose tensors have names below the path of the node;
* ``object``, with the node of its ``state_dict()``;
* ``per_rank``, whose values are in a separate tree of each rank;
* ``size``, ``dtype`` and ``device``, which are values of torch.
"""

from __future__ import annotations

import logging
from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, Final

import numpy as np
import torch
from torch import nn
from torch.distributed.tensor import DTensor
from torch.optim import Optimizer

from ckpt.adapters.tensors.adapted import adapted
from ckpt.adapters.tensors.arrays import tensor_of
from ckpt.adapters.tensors.layout import PLAIN, check_initialized
from ckpt.adapters.tensors.local_shards import LocalShards, Source
from ckpt.adapters.tensors.per_rank import PerRank
from ckpt.adapters.tensors.sharded import as_source
from ckpt.adapters.tensors.wrapped import apart, is_wrapper, kind_of
from ckpt.adapters.tensors.zero import Keeper, keeper_of
from ckpt.adapters.walk.advice import advice_for
from ckpt.adapters.walk.choice import Choice
from ckpt.adapters.walk.items import Part
from ckpt.adapters.walk.memory import Memory, OptimizerItems, Structure
from ckpt.adapters.walk.modules import (
    Parameters,
    asked,
    check_optimizer,
    is_capturable,
    items_of,
    methods_beyond_step,
    state_name,
    unwrapped,
)
from ckpt.adapters.walk.objects import (
    check_mode,
    declares_state,
    is_stateful,
    look_again,
    walk_objects,
    walk_tensors,
)
from ckpt.adapters.walk.segments import At, Held, Segment, Table, place_of, same_view
from ckpt.adapters.walk.stand_in import OptimizerStandIn
from ckpt.adapters.walk.wrappers import Wrappers, in_module, in_optimizer
from ckpt.errors import UnsupportedValue
from ckpt.model.patterns import WHOLE, Patterns
from ckpt.model.values import Node, check_name, encode, join

_log = logging.getLogger("ckpt")
_REMADE: Final = (
    "let its class inherit from torch.distributed.checkpoint.stateful.Stateful, or put them into "
    "the state itself"
)


@dataclass(slots=True)
class Collected:
    """The result of a walk over a state, in the order of the walk.

    Attributes:
        parts: The tensors. The tensors of a module, an optimizer or a large dict form one segment,
            which is the same object as in the last walk if nothing in it has changed. Any other
            tensor is a ``Held`` of its own.
        tied: The name of each tensor that shares the memory of an earlier tensor -> the name under
            which the bytes of the earlier tensor are stored.
        tree: The tree of the state.
        per_rank: The path of each ``PerRank`` value -> the tree of the value on this rank.
        optimizers: The optimizers whose steps the fence must hold.
        unused: The patterns that have matched no name.
        left_out: The patterns in the form in which the manifest's metadata keeps them; empty if the
            whole state is saved.
    """

    parts: list[Segment | Held] = field(default_factory=list[Segment | Held])
    tied: dict[str, str] = field(default_factory=dict[str, str])
    tree: Node = None
    per_rank: dict[str, Node] = field(default_factory=dict[str, Node])
    optimizers: list[Optimizer] = field(default_factory=list[Optimizer])
    unused: tuple[str, ...] = ()
    left_out: dict[str, Any] = field(default_factory=dict[str, Any])

    @property
    def held(self) -> list[Held]:
        """The tensors of all ``parts``, one by one."""
        found: list[Held] = []
        for part in self.parts:
            found += part.held if isinstance(part, Segment) else (part,)
        return found


def collect(
    state: Mapping[str, Any],
    *,
    rank: int,
    memory: Memory | None = None,
    lasting: bool = False,
    captured: Collection[Optimizer] = (),
    patterns: Patterns = WHOLE,
) -> Collected:
    """Walk over ``state``, and return its tensors and its tree.

    Nothing is copied: the tensors in the result are those of the state.

    Args:
        rank: The number of this rank.
        memory: The results of the last walk over this state; None for a first walk.
        lasting: True if each large dict of tensors will have the same tensors on later saves. It
            then forms a segment at once. If False, a large dict forms a segment only if it has the
            same tensors as in the last walk.
        captured: The optimizers whose steps run no hook, since a graph replays the steps.
        patterns: The part of the state to walk over. Names are the same as in a walk over the whole
            state.

    Raises:
        UnsupportedValue: The state has a value that ckpt cannot save, such as one that only pickle
            could save. The error names its path, and gives advice if there is any.
    """
    if not isinstance(state, Mapping):
        raise UnsupportedValue(
            "state",
            type(state).__name__,
            "a state is a dict: {'model': model, 'optimizer': optimizer, ...}",
        )
    memory = memory or Memory()
    objects = list(walk_objects(state))
    check_mode(state, objects)
    look_again(objects)
    optimizers = _Optimizers(
        [unwrapped(value) for _, value in objects if isinstance(value, Optimizer)], captured
    )
    modules = [
        (value, memory.items(path, value))
        for path, value in objects
        if isinstance(value, nn.Module)
    ]
    parameters = Parameters(modules)
    parameters.look_for(optimizers.all, walk_tensors(state))
    choice = memory.choice(patterns)
    walk = _Walk(parameters, optimizers, choice, rank, memory, lasting=lasting)
    walk.out.tree = {
        key: encode(value, join("", key), walk.other)
        for key, value in _string_keys(choice.part_of(state))
    }
    walk.out.unused, walk.out.left_out = choice.unused, choice.left_out
    return walk.out


@dataclass(frozen=True, slots=True)
class _Optimizers:
    """The optimizers of a state. Those in ``captured`` run no hook in their steps."""

    all: Sequence[Optimizer]
    captured: Collection[Optimizer]

    def holds(self, optimizer: Optimizer) -> bool:
        """Return True if only calls of ``step()`` change the tensors of the optimizer, and a hook
        can hold these calls. The tensors may then be copied while training goes on.
        """
        return not (
            methods_beyond_step(optimizer) or is_capturable(optimizer) or optimizer in self.captured
        )

    def owned(self) -> set[int]:
        """Return the identities (``id``) of the parameters of these optimizers. A parameter counts
        only if ``holds`` returns True for each optimizer that has it.
        """
        late: set[int] = set()
        eager: set[int] = set()
        for optimizer in self.all:
            found = late if self.holds(optimizer) else eager
            for group in optimizer.param_groups:
                found.update(map(id, group["params"]))
        return late - eager


def _string_keys(state: Mapping[str, Any]) -> Iterator[tuple[str, Any]]:
    for key, value in state.items():
        if not isinstance(key, str) or not key or key.startswith("$"):
            raise UnsupportedValue(
                repr(key), "key of the state", "use non-empty strings that do not begin with '$'"
            )
        check_name(key, join("", key))
        yield key, value


def find_parameters(state: Mapping[str, Any], objects: Sequence[tuple[str, Any]]) -> Parameters:
    """Return the parameters of the modules among ``objects``, together with those that only the
    optimizers among ``objects`` hold and that stand alone in ``state``.
    """
    found = Parameters(
        (value, items_of(path, value)) for path, value in objects if isinstance(value, nn.Module)
    )
    optimizers = [unwrapped(value) for _, value in objects if isinstance(value, Optimizer)]
    found.look_for(optimizers, walk_tensors(state))
    return found


class _Walk:
    """One walk over a state. ``out`` is its result."""

    def __init__(
        self,
        parameters: Parameters,
        optimizers: _Optimizers,
        choice: Choice,
        rank: int,
        memory: Memory,
        *,
        lasting: bool,
    ) -> None:
        self._lasting, self._optimizers, self._choice = lasting, optimizers, choice
        # Optimizers that the patterns leave out are fenced too, since their steps change parameters
        # that are saved.
        self.out = Collected(optimizers=list(optimizers.all))
        self._parameters, self._rank, self._memory = parameters, rank, memory
        self._owned = optimizers.owned()
        self._seen: dict[int, str] = {}
        self._at: At = {}
        self._unread: list[Segment] = []  # Segments that are not yet in ``_seen`` and ``_at``
        self._is_remade = False  # True inside of an object to which a restore may give new tensors
        self._alone = False  # True inside of a PerRank value, whose tensors no other rank has

    def other(self, value: object, path: str) -> Node:
        """Return the node of a value that is not plain. ``encode`` calls this method."""
        match value:
            case torch.Tensor():
                return self._tensor_node(path, value)
            case LocalShards():
                if self._is_remade:
                    raise UnsupportedValue(path, "LocalShards in a state_dict()", _REMADE)
                return {"$": "tensor", "n": self._tensor(path, value)}
            case dict() if type(value) is dict:  # A subclass of dict is not plain
                return self._table(value, path)
            case np.ndarray():
                return self._array(value, path)
            case nn.Module():
                return self._module(value, path)
            case Optimizer() if not declares_state(value):
                return self._optimizer(unwrapped(value), path)
            case PerRank():
                return self._per_rank(value, path)
            case torch.Size():
                return {"$": "size", "v": list(value)}
            case torch.dtype() | torch.device():
                return {"$": type(value).__name__, "v": str(value).removeprefix("torch.")}
            case _:
                pass
        if not is_stateful(value):
            value = adapted(value)
        if is_stateful(value):
            with asked(path, value):
                kept = value.state_dict()  # type: ignore[attr-defined]
            before, self._is_remade = self._is_remade, not declares_state(value)
            hook = self.made if self._is_remade else self.other
            try:
                return {"$": "object", "v": encode(kept, path, hook)}
            finally:
                self._is_remade = before
        kind = f"{type(value).__module__}.{type(value).__qualname__}"
        raise UnsupportedValue(path, kind, advice_for(value))

    def made(self, value: object, path: str) -> Node:
        """Return the node of a value that is not plain, and that a restore must make itself.

        This is so for values inside of a ``state_dict()``, for example. ``encode`` calls this
        method for them in place of ``other``. The method refuses a wrapper tensor, since a restore
        cannot make one.
        """
        if is_wrapper(value):
            kind = f"{kind_of(value)} that a restore would have to make"
            raise UnsupportedValue(path, kind, _REMADE)
        return self.other(value, path)

    # -- tensors alone -----------------------------------------------------------------------------

    def _tensor_node(self, path: str, tensor: torch.Tensor) -> Node:
        if not is_wrapper(tensor):
            return {"$": "tensor", "n": self._tensor(path, as_source(tensor))}
        taken = apart(path, tensor)
        inner = {f"{path}/{part}": inside for part, inside in taken.sources().items()}
        return taken.layer.node(path, lambda name: self._tensor(name, *inner[name]))

    def _tensor(self, name: str, tensor: Source, replicas: tuple[int, ...] = ()) -> str:
        """Register a tensor that belongs to no module or optimizer, and return the name under which
        its bytes are stored.

        ``replicas`` are the ranks that are known to hold the same tensor.
        """
        # A tensor of this rank alone is never tied to another tensor, so that the stored names of
        # all other tensors are the same on all ranks.
        if self._alone:
            if isinstance(tensor, DTensor | LocalShards):
                kind = type(tensor).__name__
                raise UnsupportedValue(name, f"{kind} in a PerRank", "put it into the state itself")
            name = f"{name}@{self._rank}"
            self.out.parts.append(Held(name, tensor, late=False, replicas=()))
            return name
        stored = self._stored(name, tensor, self._seen, self._at)
        if stored == name:
            late = self._has_owner(tensor)
            self.out.parts.append(Held(name, tensor, late=late, replicas=replicas))
        else:
            self.out.tied[name] = stored
        return stored

    def _has_owner(self, tensor: Source) -> bool:
        """Return True if ``tensor`` is a ``LocalShards`` with an ``owner``, and only the step of
        the owner changes it. Add the owner to the optimizers whose steps the fence must hold.
        """
        if not isinstance(tensor, LocalShards) or tensor.owner is None:
            return False
        owner = unwrapped(tensor.owner)
        if not any(known is owner for known in self.out.optimizers):
            self.out.optimizers.append(owner)
        return self._optimizers.holds(owner)

    def _stored(self, name: str, tensor: Source, seen: dict[int, str], at: At) -> str:
        """Return the name under which the bytes of ``tensor`` are stored: ``name``, or that of an
        earlier tensor which is the same object or has the same memory.

        ``seen`` and ``at`` are ``_seen`` and ``_at`` of this walk, or the tables of a segment that
        is being built. The call adds the tensor to them if it is stored under ``name``. The result
        of the walk keeps such a tensor alive, so no other tensor can have the same identity.
        """
        check_initialized(name, tensor)
        self._read()
        stored = self._seen.get(id(tensor)) or seen.get(id(tensor))
        if stored is None:
            stored = name
            if isinstance(tensor, torch.Tensor) and (address := place_of(tensor)):
                others = (
                    [*self._at.get(address, ()), *at.get(address, ())]
                    if at is not self._at
                    else at.get(address, [])
                )
                stored = next((known for other, known in others if same_view(other, tensor)), name)
                if stored == name:
                    at.setdefault(address, []).append((tensor, name))
            if stored == name:  # A tied tensor may be freed, and another one may get its identity
                seen[id(tensor)] = name
        return stored

    def _array(self, array: np.ndarray[Any, Any], path: str) -> Node:
        tensor = tensor_of(array, path)
        return {"$": "array", "n": self._tensor(path, tensor), "d": array.dtype.str}

    def _table(self, value: Mapping[Any, Any], path: str) -> Node:
        """Register the tensors of a large dict as one segment, and return the node of the dict.

        Returns None if ``encode`` must encode the values one by one. This is so if the dict has
        other values than plain tensors and ``LocalShards``, or a key that is no string or begins
        with '$'. Unless the walk is ``lasting``, it is also so if the dict has other tensors than
        in the last walk. These may be temporary, and a segment would keep them alive.
        """
        tensors = tuple(value.values())
        known = PLAIN if self._is_remade else {*PLAIN, LocalShards}
        if self._alone or not all(type(tensor) in known for tensor in tensors):
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
            table.node = {
                key: {"$": "tensor", "n": segment.tied.get(name := join(path, key), name)}
                for key in value
            }
            table.segment = segment
        return table.node

    # -- segments ----------------------------------------------------------------------------------

    def _segment(
        self,
        path: str,
        key: Sequence[object],
        tensors: Sequence[Source],
        make: Callable[[], Iterator[Held]],
    ) -> None:
        """Register ``tensors`` as the segment at ``path``: the segment of the last walk if ``key``
        and the tensors are the same, else a new one with the tensors that ``make`` yields.
        """
        if not self._take_again(path, key, tensors):
            self._take(path, self._build(key, tensors, make()))

    def _take_again(self, path: str, key: Sequence[object], tensors: Sequence[Source]) -> bool:
        """Register the segment of the last walk at ``path`` if ``key`` and the tensors are still
        the same. Return True if they are.
        """
        segment = self._memory.segments.get(path)
        if segment is None or not segment.closed or not segment.still(key, tensors):
            return False
        before = self._segments_before()
        # Segments compare by identity. If the segments before this one are the same as in the last
        # walk, they are known to share no memory with this one.
        if before is None or before != segment.apart_from:
            self._read()
            if not (
                self._seen.keys().isdisjoint(segment.seen)
                and self._at.keys().isdisjoint(segment.at)
            ):
                return False
            segment.apart_from = before
        self._take(path, segment)
        return True

    def _segments_before(self) -> list[Segment] | None:
        """Return the segments that were registered so far, or None if other tensors were registered
        too.
        """
        found = [part for part in self.out.parts if isinstance(part, Segment)]
        return found if len(found) == len(self.out.parts) else None

    def _take(self, path: str, segment: Segment) -> None:
        self._memory.segments[path] = segment
        self._unread.append(segment)
        self.out.tied.update(segment.tied)
        self.out.parts.append(segment)

    def _read(self) -> None:
        """Add the tensors of all segments so far to ``_seen`` and ``_at``.

        The walk calls this method as late as possible, since it needs neither table if it takes all
        segments of the last walk in the same order.
        """
        for segment in self._unread:
            self._seen.update(segment.seen)
            self._at.update(segment.at)
        self._unread.clear()

    def _build(
        self, key: Sequence[object], tensors: Sequence[Source], candidates: Iterator[Held]
    ) -> Segment:
        held: list[Held] = []
        tied: dict[str, str] = {}
        seen: dict[int, str] = {}
        at: At = {}
        for item in candidates:
            stored = self._stored(item.name, item.tensor, seen, at)
            if stored == item.name:
                held.append(item)
            else:
                check_name(item.name, item.name)  # A save plan checks the names of all others
                tied[item.name] = stored
        self._read()  # ``_stored`` has not called this method if there are no candidates
        # A later call of ``_read`` replaces the list at each of these addresses by the list of this
        # segment. So this list must have the earlier tensors too.
        for address in at.keys() & self._at.keys():
            at[address] = [*self._at[address], *at[address]]
        return Segment(key, tensors, held=held, tied=tied, seen=seen, at=at)

    def _module(self, module: nn.Module, path: str) -> Node:
        if self._alone:
            raise UnsupportedValue(
                path, "module in a PerRank", "give it a name of its own on each rank"
            )
        if (items := self._parameters.of(module)) is None:
            raise UnsupportedValue(
                path, "module in a state_dict()", "give its own state_dict() there"
            )
        values = {
            entry.fqn: encode(entry.value, f"{path}/{entry.fqn}", self.made)
            for entry in items.others
            if self._choice.takes(f"{path}/{entry.fqn}")
        }
        wrappers = in_module(path, items, self._choice)
        values |= {name[len(path) + 1 :]: node for name, node in wrappers.nodes.items()}
        late = list(map(self._owned.__contains__, map(id, items.tensors)))

        def named() -> Iterator[Held]:
            # All names of a tensor get the same source, so that ``_stored`` ties them.
            made: dict[tuple[int, object], Source] = {}
            rows = zip(items.held, items.tensors, late, strict=True)
            for index, (entry, tensor, is_late) in enumerate(rows):
                name = f"{path}/{entry.fqn}"
                if not self._choice.takes(name):
                    continue
                source = made.setdefault(
                    (id(tensor), entry.piece), Part(name, entry.piece).all_of(tensor)
                )
                item = Held(name, source, is_late, entry.replicas, entry.left)
                yield from wrappers.held(index, item)

        self._segment(path, (items, self._choice, *late, *wrappers.key), wrappers.tensors, named)
        left = {"left": dict.fromkeys(items.left, True)} if items.left else {}
        return {"$": "module", "values": values, **left}

    def _optimizer(self, optimizer: Optimizer, path: str) -> Node:
        if self._alone:
            raise UnsupportedValue(
                path, "optimizer in a PerRank", "give it a name of its own on each rank"
            )
        check_optimizer(path, optimizer, self._optimizers.all)
        self._log_methods(optimizer)
        keeper = keeper_of(path, optimizer)
        now = Structure(optimizer.param_groups, keeper.state)
        items, wrappers = self._state_of(path, optimizer, keeper, now)
        state = wrappers.nodes | {
            name: encode(now.values[index], name, self.made) for index, name in items.others
        }
        groups = self._groups(optimizer, items.names, path)
        node: Node = {"$": "optimizer", "groups": groups, "state": state}
        if isinstance(optimizer, OptimizerStandIn):
            node["extra"] = encode(optimizer.extra(), f"{path}/extra", self.made)
        return node

    def _state_of(
        self, path: str, optimizer: Optimizer, keeper: Keeper, now: Structure
    ) -> tuple[OptimizerItems, Wrappers]:
        """Register the tensors of an optimizer's state. Return their names, and the wrapper tensors
        among them.
        """
        late = self._optimizers.holds(optimizer)
        known = self._memory.optimizers.get(path)
        if known is not None and known.is_of(keeper, self._parameters, now, self._choice):
            wrappers = in_optimizer(path, known)
            if self._take_again(path, (late, known, *wrappers.key), wrappers.tensors):
                return known, wrappers
        # The items are made again even if only the shape of a tensor has changed, since the tensor
        # may now belong to another part of a parameter.
        items = OptimizerItems(path, optimizer, keeper, self._parameters, now, self._choice)
        self._memory.optimizers[path] = items
        wrappers = in_optimizer(path, items)
        named = self._named(path, items, late, is_partial=keeper.own is not None)
        candidates = (
            each for index, item in enumerate(named) for each in wrappers.held(index, item)
        )
        self._take(path, self._build((late, items, *wrappers.key), wrappers.tensors, candidates))
        return items, wrappers

    def _named(
        self, path: str, items: OptimizerItems, late: bool, *, is_partial: bool
    ) -> Iterator[Held]:
        """Yield the tensors of an optimizer's state with their names.

        ``is_partial`` is True if this rank keeps the state of some parameters only.
        """
        for (part, key, parameter), tensor in zip(items.owners, items.tensors, strict=True):
            name = state_name(path, part.path, key)
            alone = is_partial or part.piece is not None  # Not every rank has this tensor
            replicas = () if alone else self._parameters.holders_of(parameter)
            yield Held(name, part.of(name, tensor), late, replicas)

    def _log_methods(self, optimizer: Optimizer) -> None:
        methods, kind = methods_beyond_step(optimizer), type(optimizer)
        if methods and kind not in self._memory.logged:
            self._memory.logged.add(kind)
            _log.info(
                "ckpt: %s has methods beyond step() (%s): its tensors are copied before "
                "save_async returns",
                kind.__qualname__,
                ", ".join(methods[:4]) + (", ..." if len(methods) > 4 else ""),
            )

    def _groups(self, optimizer: Optimizer, names: list[list[str]], path: str) -> list[Node]:
        return [
            {
                "params": group_names,
                "values": encode(
                    {key: value for key, value in group.items() if key != "params"},
                    f"{path}/param_groups/{index}",
                    self.made,
                ),
            }
            for index, (group, group_names) in enumerate(
                zip(optimizer.param_groups, names, strict=True)
            )
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
