"""Walk over a state: find its tensors with their names, and build a tree of all other values.

The tree has the shape of the state. Containers and plain values have the nodes that
``ckpt.model.values`` defines. Any other value has a node with one of these tags:

* ``tensor`` and ``array``, with the name under which the bytes are stored;
* ``subclass``, a wrapper tensor, with the nodes of the tensors inside of it;
* ``module`` and ``optimizer``, whose tensors have names below the path of the node;
* ``object``, with the node of its ``state_dict()``;
* ``per_rank``, whose values are in a separate tree of each rank;
* ``size``, ``dtype`` and ``device``, which are values of torch.

The named tensors of one module, optimizer or large dict form a segment, which later saves use again
if nothing in it has changed. A tensor is *tied* to an earlier one if both have the same memory, and
*late* if it may be copied while training goes on: only an optimizer's step changes it, and the
fence holds this step until the copy is made. A choice says which names are saved, by patterns. An
entry is an item of a module's state dict. A part is one named parameter in a tensor of a parameter
group, and its piece says which range or box of the parameter the tensor has. A wrapper tensor is
one whose elements are in other tensors. An adapter gives an object with a ``state_dict()`` for a
value that has none, and a stand-in takes the place of a framework's module or optimizer.
"""

from __future__ import annotations

import logging
from collections.abc import Collection, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from functools import partial
from typing import Any, Final

import numpy as np
import torch
from torch import nn
from torch.distributed.tensor import DTensor
from torch.optim import Optimizer

from ckpt.errors import UnsupportedValue
from ckpt.model.patterns import WHOLE, Patterns
from ckpt.model.values import Node, encode, join, most_name_chars
from ckpt.model.views import View
from ckpt.state.tensors.arrays import tensor_of
from ckpt.state.tensors.layout import PLAIN_CLASSES
from ckpt.state.tensors.local_shards import LocalShards, TensorOrShards
from ckpt.state.tensors.per_rank import PerRank
from ckpt.state.tensors.sharded import tensor_or_shards
from ckpt.state.tensors.wrapped import is_wrapper, kind_of, take_apart
from ckpt.state.walk.adapted import adapt
from ckpt.state.walk.advice import advice_for
from ckpt.state.walk.last_walk import LastWalk, OptimizerItems, StateStructure
from ckpt.state.walk.module_entries import ModuleItems, Part
from ckpt.state.walk.modules import (
    Parameters,
    check_optimizer,
    check_state,
    is_capturable,
    methods_beyond_step,
    state_dict_errors,
    state_name,
    unwrap_optimizer,
)
from ckpt.state.walk.optimizer_state import (
    LocalState,
    enum_value_of,
    local_state_of,
    run_state_dict_post_hooks,
    run_state_dict_pre_hooks,
)
from ckpt.state.walk.segments import KnownDict, NamedTensor, Segment, views_of
from ckpt.state.walk.stand_in import ExtraValues, OptimizerStandIn
from ckpt.state.walk.state_objects import (
    Choice,
    StateView,
    inherits_stateful,
    is_stateful,
    named_entries,
    refresh_stand_ins,
    refuse_fake_mode,
    walk_objects,
    walk_tensors,
)
from ckpt.state.walk.tied_tensors import Registry
from ckpt.state.walk.wrappers import Wrappers, module_wrappers, optimizer_wrappers

_log = logging.getLogger("ckpt")
_STRING: Final = frozenset({str})
_REMAKE_ADVICE: Final = (
    "let the class of the object inherit from torch.distributed.checkpoint.stateful.Stateful, or "
    "put the value into the state itself"
)

_STATE_DICT_ADVICE: Final = (
    "let the state_dict() give its parts as plain values, and let load_state_dict() make it again "
    "of them"
)
_OPTIMIZER_ADVICE: Final = (
    "put an object into the state whose state_dict() gives the optimizer's own with the parts of "
    "this value as plain values, and whose load_state_dict() makes the value again of them before "
    "it calls the optimizer's own"
)


@dataclass(slots=True)
class WalkResult:
    """The result of a walk over a state, in the order of the walk.

    Attributes:
        parts: The tensors. The tensors of a module, an optimizer or a large dict form one segment,
            which is the same object as in the last walk if nothing in it has changed. Any other
            tensor is a ``NamedTensor`` of its own.
        ties: The name of each tensor that is tied to an earlier one (see ``Registry``) -> the name
            under which the bytes of the earlier tensor are stored.
        views: The tensors that share a buffer with others, each with its place in the buffer.
        tree: The tree of the state.
        name_chars: The most characters of all names in those entries of ``tree`` for which this is
            known (see ``dumps``).
        per_rank: The path of each ``PerRank`` value -> the tree of the value on this rank.
        optimizers: The optimizers whose steps the fence must hold.
        idle_patterns: The patterns that have matched no name.
        left_out: The patterns in the form in which the manifest's metadata keeps them; empty if the
            whole state is saved.
    """

    parts: list[Segment | NamedTensor] = field(default_factory=list[Segment | NamedTensor])
    ties: dict[str, str] = field(default_factory=dict[str, str])
    views: dict[str, View] = field(default_factory=dict[str, View])
    tree: Node = None
    name_chars: dict[str, float] = field(default_factory=dict[str, float])
    per_rank: dict[str, Node] = field(default_factory=dict[str, Node])
    optimizers: list[Optimizer] = field(default_factory=list[Optimizer])
    idle_patterns: tuple[str, ...] = ()
    left_out: dict[str, Any] = field(default_factory=dict[str, Any])

    @property
    def named_tensors(self) -> list[NamedTensor]:
        """The tensors of all ``parts``, one by one."""
        named_tensors: list[NamedTensor] = []
        for part in self.parts:
            if isinstance(part, Segment):
                named_tensors += part.named_tensors
            else:
                named_tensors.append(part)
        return named_tensors


def collect(
    state: Mapping[str, Any] | StateView,
    *,
    rank: int,
    last_walk: LastWalk | None = None,
    lasting: bool = False,
    captured: Collection[Optimizer] = (),
    patterns: Patterns = WHOLE,
) -> WalkResult:
    """Walk over ``state``, and return its tensors and its tree.

    Plain entries of the state have nodes already, so the walk looks for tensors and objects in the
    live ones alone. The tensors in the result have the memory of the state. Only NumPy arrays that
    are not C-contiguous or not writeable are copied.

    Args:
        rank: The number of this rank.
        last_walk: The results of the last walk over this state, which the call replaces by the new
            ones; None to keep no results.
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
    view = state if isinstance(state, StateView) else StateView.of(state)
    state, live, plain_entries = view.state, view.live, view.plain_entries
    if not isinstance(state, Mapping):
        raise UnsupportedValue(
            "state",
            type(state).__name__,
            "a state is a dict: {'model': model, 'optimizer': optimizer, ...}",
        )
    last_walk = last_walk or LastWalk()
    objects = list(walk_objects(live))
    refuse_fake_mode(state, objects)
    refresh_stand_ins(objects)
    optimizers = _Optimizers(
        [unwrap_optimizer(value) for _, value in objects if isinstance(value, Optimizer)], captured
    )
    modules = [
        (value, last_walk.items(path, value))
        for path, value in objects
        if isinstance(value, nn.Module)
    ]
    parameters = Parameters(modules)
    parameters.add_loose(optimizers.members, walk_tensors(live))
    choice = last_walk.choice(patterns)
    walk = _Walk(parameters, optimizers, choice, rank, last_walk, is_lasting=lasting)
    tree = walk.result.tree = {
        key: plain_entry.node
        if (plain_entry := plain_entries.get(key)) and plain_entry.value is value
        else encode(value, join("", key), walk.nonplain_node)
        for key, value in named_entries(choice.part_of(state))
    }
    walk.result.name_chars = {
        key: entry.name_chars for key, entry in plain_entries.items() if tree.get(key) is entry.node
    }
    walk.result.name_chars |= last_walk.name_chars(tree)
    if patterns is not WHOLE:
        walk.result.idle_patterns, walk.result.left_out = choice.idle_patterns, choice.left_out
    walk.result.views = views_of(walk.result.parts)
    return walk.result


@dataclass(frozen=True, slots=True)
class _Optimizers:
    """The optimizers of a state. Those in ``hookless`` run no hook in their steps."""

    members: Sequence[Optimizer]
    hookless: Collection[Optimizer]

    def can_hold(self, optimizer: Optimizer) -> bool:
        """Return True if only calls of ``step()`` change the tensors of the optimizer, and a hook
        can hold these calls. The tensors may then be copied while training goes on.
        """
        return not (
            methods_beyond_step(optimizer) or is_capturable(optimizer) or optimizer in self.hookless
        )

    def late_parameters(self) -> set[int]:
        """Return the identities (``id``) of the parameters of these optimizers. A parameter counts
        only if ``can_hold`` returns True for each optimizer that has it.
        """
        late_ids, eager_ids = set[int](), set[int]()
        for optimizer in self.members:
            ids = late_ids if self.can_hold(optimizer) else eager_ids
            for group in optimizer.param_groups:
                ids.update(map(id, group["params"]))
        return late_ids - eager_ids


class _Walk:
    """One walk over a state. ``result`` is its result.

    The methods whose names end with ``_node`` return the node of a value, and register the tensors
    inside of it in the result.

    ``_parameters`` finds the items of modules and the ranks of parameters, and
    ``_optimizers.members`` are the optimizers of the state. ``_choice`` says which names are saved.
    ``_registry`` collects the tensors, and ties those with the same memory. ``_last_walk`` has the
    results of the last walk, which this walk uses again where nothing has changed. ``_is_remade``
    is True inside of an object to which a restore may give new tensors, and ``_is_in_per_rank``
    inside of a ``PerRank`` value, whose tensors no other rank has. ``_late_parameters`` are the
    identities (``id``) of the parameters that may be copied late, and ``_modules`` the modules of
    the walk so far.
    """

    def __init__(
        self,
        parameters: Parameters,
        optimizers: _Optimizers,
        choice: Choice,
        rank: int,
        last_walk: LastWalk,
        *,
        is_lasting: bool,
    ) -> None:
        self._is_lasting, self._optimizers, self._choice = is_lasting, optimizers, choice
        # Optimizers that the patterns leave out are fenced too, since their steps change parameters
        # that are saved.
        self._registry = Registry(last_walk.segments)
        self.result = WalkResult(
            self._registry.parts, self._registry.ties, optimizers=list(optimizers.members)
        )
        self._parameters, self._rank, self._last_walk = parameters, rank, last_walk
        self._late_parameters = optimizers.late_parameters()
        self._is_remade = False
        self._modules: list[tuple[str, ModuleItems]] = []
        self._is_in_per_rank = False

    def nonplain_node(self, value: object, path: str) -> Node:
        """Return the node of a value that is not plain. ``encode`` calls this method."""
        match value:
            case torch.Tensor():
                return self._tensor_node(path, value)
            case LocalShards():
                if self._is_remade:
                    raise UnsupportedValue(path, "LocalShards in a state_dict()", _REMAKE_ADVICE)
                return {"$": "tensor", "n": self._add_tensor(path, value)}
            case dict() if type(value) is dict:  # A subclass of dict is not plain
                return self._dict_node(value, path)
            case np.ndarray():
                return self._array_node(value, path)
            case nn.Module():
                return self._module_node(value, path)
            case Optimizer() if not inherits_stateful(value):
                return self._optimizer_node(unwrap_optimizer(value), path)
            case PerRank():
                return self._per_rank_node(value, path)
            case torch.Size():
                return {"$": "size", "v": list(value)}
            case torch.dtype() | torch.device():
                return {"$": type(value).__name__, "v": str(value).removeprefix("torch.")}
            case _:
                pass
        if not is_stateful(value):
            value = adapt(value)
        if is_stateful(value):
            with state_dict_errors(path, value):
                content = value.state_dict()  # type: ignore[attr-defined]
            was_remade = self._is_remade
            self._is_remade = was_remade or not inherits_stateful(value)
            inner_node = self.remade_node if self._is_remade else self.nonplain_node
            try:
                return {"$": "object", "v": encode(content, path, inner_node)}
            finally:
                self._is_remade = was_remade
        kind = f"{type(value).__module__}.{type(value).__qualname__}"
        raise UnsupportedValue(path, kind, advice_for(value))

    def remade_node(self, value: object, path: str, advice: str = _STATE_DICT_ADVICE) -> Node:
        """Return the node of a value that is not plain, and that a restore must make itself.

        This is so for values inside of a ``state_dict()``, for example. ``encode`` calls this
        method for them in place of ``nonplain_node``. The method refuses a wrapper tensor, a
        ``PerRank`` value and every object with a ``state_dict()``, since a restore cannot make one.
        ``advice`` is the text for a value that no advice is known for.
        """
        if is_wrapper(value):
            kind = f"{kind_of(value)} that a restore would have to make"
            raise UnsupportedValue(path, kind, _REMAKE_ADVICE)
        if isinstance(value, nn.Module | Optimizer) and not inherits_stateful(value):
            kind = "module" if isinstance(value, nn.Module) else "optimizer"
            raise UnsupportedValue(
                path, f"{kind} in a state_dict()", "give its own state_dict() there"
            )
        if is_stateful(adapt(value)):
            kind = f"{type(value).__qualname__} in a state_dict()"
            raise UnsupportedValue(
                path, kind, advice_for(value) or "give its own state_dict() there"
            )
        if isinstance(value, PerRank):
            raise UnsupportedValue(path, "PerRank in a state_dict()", _REMAKE_ADVICE)
        try:
            return self.nonplain_node(value, path)
        except UnsupportedValue as error:
            if error.name != path or error.detail:
                raise
            raise UnsupportedValue(path, error.kind, advice) from None

    # -- tensors alone -----------------------------------------------------------------------------

    def _tensor_node(self, path: str, tensor: torch.Tensor) -> Node:
        """Return the node of a tensor. Its "n" is the name under which the bytes are stored."""
        if not is_wrapper(tensor):
            return {"$": "tensor", "n": self._add_tensor(path, tensor_or_shards(tensor))}
        parts = take_apart(path, tensor)
        inner = {f"{path}/{part}": item for part, item in parts.innermost_tensors().items()}
        return parts.layer.node(path, lambda name: self._add_tensor(name, *inner[name]))

    def _add_tensor(self, name: str, tensor: TensorOrShards, replicas: tuple[int, ...] = ()) -> str:
        """Register a tensor that belongs to no module or optimizer, and return the name under which
        its bytes are stored.

        ``replicas`` are the ranks that are known to hold the same tensor.
        """
        # A tensor of this rank alone is never tied to another tensor, so that the stored names of
        # all other tensors are the same on all ranks.
        if self._is_in_per_rank:
            if isinstance(tensor, DTensor | LocalShards):
                kind = type(tensor).__name__
                raise UnsupportedValue(name, f"{kind} in a PerRank", "put it into the state itself")
            name = f"{name}@{self._rank}"
            self._registry.add_untied(NamedTensor(name, tensor, is_late=False, replicas=()))
            return name
        is_late = self._has_owner(tensor)
        return self._registry.add(NamedTensor(name, tensor, is_late=is_late, replicas=replicas))

    def _has_owner(self, tensor: TensorOrShards) -> bool:
        """Return True if ``tensor`` is a ``LocalShards`` with an ``owner``, and only the step of
        the owner changes it. Add the owner to the optimizers whose steps the fence must hold.
        """
        if not isinstance(tensor, LocalShards) or tensor.owner is None:
            return False
        owner = unwrap_optimizer(tensor.owner)
        if not any(optimizer is owner for optimizer in self.result.optimizers):
            self.result.optimizers.append(owner)
        return self._optimizers.can_hold(owner)

    def _array_node(self, array: np.ndarray[Any, Any], path: str) -> Node:
        """Return the node of a NumPy array, which has the dtype of NumPy under "d"."""
        tensor = tensor_of(array, path)
        return {"$": "array", "n": self._add_tensor(path, tensor), "d": array.dtype.str}

    def _dict_node(self, value: Mapping[Any, Any], path: str) -> Node:
        """Register the tensors of a large dict as one segment, and return the node of the dict.

        Return None if ``encode`` must encode the values one by one. This is so inside of a
        ``PerRank`` value, or if the dict has a key that is no string or begins with '$', or a value
        that is neither a plain tensor nor ``LocalShards``. (Inside of an object to which a restore
        may give new tensors, ``LocalShards`` count as other values.) Unless the walk is
        ``is_lasting``, it is also so if the dict has other tensors than in the last walk. These may
        be temporary, and a segment would keep them alive.
        """
        tensors = tuple(value.values())
        kinds = PLAIN_CLASSES if self._is_remade else {*PLAIN_CLASSES, LocalShards}
        # A dict may have tens of thousands of tensors, so these passes run at the speed of C.
        is_plain = kinds.issuperset(map(type, tensors)) and _STRING.issuperset(map(type, value))
        if self._is_in_per_rank or not is_plain:
            return None
        known_dict = self._last_walk.known_dicts.get(path)
        if known_dict is None or not known_dict.describes(value, tensors):
            if any(key.startswith("$") for key in value):
                return None
            known_dict = self._last_walk.known_dicts[path] = KnownDict(value, tensors)
            self._last_walk.segments.pop(path, None)
            if not self._is_lasting:
                return None

        late_flags: tuple[bool, ...] = (False,) * len(tensors)
        if not PLAIN_CLASSES.issuperset(map(type, tensors)):
            late_flags = tuple(map(self._has_owner, tensors))

        def make() -> Iterator[NamedTensor]:
            for (key, tensor), is_late in zip(value.items(), late_flags, strict=True):
                yield NamedTensor(join(path, key), tensor, is_late, replicas=())

        segment = self._registry.add_segment(path, (known_dict.keys, late_flags), tensors, make)
        if known_dict.node is None or known_dict.segment is not segment:
            names = [join(path, key) for key in value]
            node = {
                key: {"$": "tensor", "n": segment.ties.get(name, name)}
                for key, name in zip(value, names, strict=True)
            }
            known_dict.keep_node(node, segment, most_name_chars({path: node}))
        return known_dict.node

    # -- modules and optimizers --------------------------------------------------------------------

    def _module_node(self, module: nn.Module, path: str) -> Node:
        """Register the tensors of a module as a segment, and return the node of the module.

        The next walk uses the segment again if its key is equal.
        """
        if self._is_in_per_rank:
            raise UnsupportedValue(
                path, "module in a PerRank", "give it a name of its own on each rank"
            )
        if (items := self._parameters.of(module)) is None:
            raise UnsupportedValue(
                path, "module in a state_dict()", "give its own state_dict() there"
            )
        self._check_pieces(items, path)
        values = {
            entry.fqn: encode(entry.value, f"{path}/{entry.fqn}", self.remade_node)
            for entry in items.value_entries
            if self._choice.takes(f"{path}/{entry.fqn}")
        }
        wrappers = Wrappers(items.tensors)
        if not items.are_plain:
            wrappers = module_wrappers(path, items, self._choice)
        values |= {name[len(path) + 1 :]: node for name, node in wrappers.nodes.items()}
        late_flags = list(map(self._late_parameters.__contains__, map(id, items.tensors)))

        def make() -> Iterator[NamedTensor]:
            # All names of a tensor get the same object, so that ``Registry`` ties them.
            tensors_by_piece: dict[tuple[int, object], TensorOrShards] = {}
            flagged_tensors = zip(items.tensor_entries, items.tensors, late_flags, strict=True)
            for index, (entry, tensor, is_late) in enumerate(flagged_tensors):
                name = f"{path}/{entry.fqn}"
                if not self._choice.takes(name):
                    continue
                part = tensors_by_piece.setdefault(
                    (id(tensor), entry.piece), Part(name, entry.piece).parameter_elements(tensor)
                )
                item = NamedTensor(name, part, is_late, entry.replica_ranks, entry.is_delegated)
                yield from wrappers.expand(index, item)

        key = (items, self._choice, *late_flags, *wrappers.key)
        self._registry.add_segment(path, key, wrappers.tensors, make, is_made=False)
        node: Node = {"$": "module", "values": values}
        if items.omissions:
            node["left"] = dict.fromkeys(items.omissions, True)
        if items.module_versions is not None:
            known_items, versions_node = self._last_walk.module_versions.get(path, (None, None))
            if known_items is not items:
                versions_node = encode(items.module_versions, f"{path}/versions", self.remade_node)
                self._last_walk.module_versions[path] = (items, versions_node)
            node["versions"] = versions_node
        return node

    def _check_pieces(self, items: ModuleItems, path: str) -> None:
        """Raise ``UnsupportedValue`` if an earlier module of the walk has saved the same piece of a
        larger tensor.

        Pieces of two modules are not tied, since a rank that holds no element of a tensor cannot
        see whether they are. A restore into the same state would fail.
        """
        for earlier_path, earlier_items in self._modules:
            if common_ids := items.piece_ids & earlier_items.piece_ids:
                names = self._saved_names(path, items, common_ids)
                earlier_names = self._saved_names(earlier_path, earlier_items, common_ids)
                if names and earlier_names:
                    raise UnsupportedValue(
                        names[0],
                        f"part of a larger tensor that the state also has as {earlier_names[0]!r}",
                        "put only one of the two modules into the state",
                    )
        self._modules.append((path, items))

    def _saved_names(self, path: str, items: ModuleItems, ids: Collection[int]) -> list[str]:
        """Return the names to save of those items of the module at ``path`` whose identities are in
        ``ids``.
        """
        names = [f"{path}/{item.fqn}" for item in items.tensor_entries if id(item.value) in ids]
        return list(filter(self._choice.takes, names))

    def _optimizer_node(self, optimizer: Optimizer, path: str) -> Node:
        """Register the tensors of an optimizer's state, and return the node of the optimizer.

        ``structure`` has the parameters, keys and values of the state in their order, and ``items``
        the names under which they are saved.
        """
        if self._is_in_per_rank:
            raise UnsupportedValue(
                path, "optimizer in a PerRank", "give it a name of its own on each rank"
            )
        check_optimizer(path, optimizer, self._optimizers.members)
        self._log_why_not_late(optimizer)
        run_state_dict_pre_hooks(path, optimizer)
        local_state = local_state_of(path, optimizer)
        check_state(path, optimizer, local_state.by_parameter)
        structure = StateStructure(optimizer.param_groups, local_state.by_parameter)
        items, wrappers = self._register_state(path, optimizer, local_state, structure)
        state = wrappers.nodes | {
            name: encode(
                structure.values[index], name, partial(self.remade_node, advice=_OPTIMIZER_ADVICE)
            )
            for index, name in items.value_items
        }
        settings, hook_values = run_state_dict_post_hooks(path, optimizer, local_state.by_parameter)
        groups = self._group_nodes(settings, items.names, path)
        node: Node = {"$": "optimizer", "groups": groups, "state": state, **items.key_order_node}
        if items.plain_keys:
            node["plain"] = list(items.plain_keys)
        if hook_values:
            node["values"] = encode(hook_values, f"{path}/values", self.remade_node)
        if isinstance(optimizer, ExtraValues):
            node["extra"] = encode(optimizer.extra(), f"{path}/extra", self.remade_node)
        return node

    def _register_state(
        self, path: str, optimizer: Optimizer, local_state: LocalState, structure: StateStructure
    ) -> tuple[OptimizerItems, Wrappers]:
        """Register the tensors of an optimizer's state. Return their names, and the wrapper tensors
        among them.

        The next walk uses the segment again if its key is equal. ``is_flat`` and ``is_partial`` are
        as for ``_state_tensors``.
        """
        # The fence does not hold an optimizer that is inside of an object of the state.
        is_late = optimizer in self._optimizers.members and self._optimizers.can_hold(optimizer)
        last_items = self._last_walk.optimizers.get(path)
        parameters, choice = self._parameters, self._choice
        if last_items and last_items.describes(local_state, parameters, structure, choice):
            wrappers = Wrappers(last_items.tensors)
            if not last_items.are_plain:
                wrappers = optimizer_wrappers(path, last_items)
            key = (is_late, last_items, *wrappers.key)
            if self._registry.add_known(path, key, wrappers.tensors):
                return last_items, wrappers
        # The items are made again even if only the shape of a tensor has changed, since the tensor
        # may now belong to another part of a parameter.
        items = OptimizerItems(path, optimizer, local_state, parameters, structure, choice)
        self._last_walk.optimizers[path] = items
        wrappers = optimizer_wrappers(path, items)
        is_flat = isinstance(optimizer, OptimizerStandIn)
        is_partial = local_state.own_ids is not None
        tensors = self._state_tensors(path, items, is_late, is_partial=is_partial, is_flat=is_flat)
        candidates = (
            inner for index, item in enumerate(tensors) for inner in wrappers.expand(index, item)
        )
        key = (is_late, items, *wrappers.key)
        self._registry.add_new(path, key, wrappers.tensors, candidates)
        return items, wrappers

    def _state_tensors(
        self, path: str, items: OptimizerItems, is_late: bool, *, is_partial: bool, is_flat: bool
    ) -> Iterator[NamedTensor]:
        """Yield the tensors of an optimizer's state with their names.

        ``is_partial`` is True if this rank keeps the state of some parameters only, and ``is_flat``
        if the optimizer has flat parameters for all names. The ``step`` of a flat parameter has
        the name of each parameter in it. These names are no tie: a restore gives each parameter
        its own ``step``, since other optimizers count it up once for each parameter.
        """
        for (part, key, parameter), tensor in zip(items.owners, items.tensors, strict=True):
            name = state_name(path, part.path, key)
            is_on_some_ranks = is_partial or part.piece is not None
            replicas = () if is_on_some_ranks else self._parameters.holders_of(parameter)
            source = part.elements_of(name, tensor)
            is_untied = (is_flat or part.piece is not None) and isinstance(source, torch.Tensor)
            yield NamedTensor(name, source, is_late, replicas, is_untied=is_untied)

    def _log_why_not_late(self, optimizer: Optimizer) -> None:
        """Log once for each class why the tensors of ``optimizer`` are not copied late."""
        methods, kind = methods_beyond_step(optimizer), type(optimizer)
        if methods and kind not in self._last_walk.logged_types:
            self._last_walk.logged_types.add(kind)
            _log.info(
                "ckpt: %s has methods beyond step() (%s): its tensors are copied before "
                "save_async returns",
                kind.__qualname__,
                ", ".join(methods[:4]) + (", ..." if len(methods) > 4 else ""),
            )

    def _group_nodes(
        self, settings: Sequence[Mapping[str, Any]], names: list[list[str]], path: str
    ) -> list[Node]:
        """Return the nodes of the parameter groups, with parameter names and settings."""
        return [
            {
                "params": group_names,
                "values": encode(
                    {key: enum_value_of(value) for key, value in group.items() if key != "params"},
                    f"{path}/param_groups/{index}",
                    self.remade_node,
                ),
            }
            for index, (group, group_names) in enumerate(zip(settings, names, strict=True))
        ]

    def _per_rank_node(self, value: PerRank, path: str) -> Node:
        """Add the tree of a ``PerRank`` value to the result, and return the node in its place."""
        if self._is_in_per_rank:
            raise UnsupportedValue(path, "PerRank inside a PerRank", "one is enough")
        self._is_in_per_rank = True
        try:
            self.result.per_rank[path] = encode(value.value, path, self.nonplain_node)
        finally:
            self._is_in_per_rank = False
        return {"$": "per_rank"}
