"""A manifest -> a state. First everything is matched, with nothing changed; then bytes are read into place; then the rest is set.

Tensors that exist are filled where they are. Tensors that do not yet (an optimizer that has not stepped, a tensor inside a ``state_dict``) are made. Plain values replace what is there; objects get ``load_state_dict``.
"""

from __future__ import annotations

from collections.abc import Callable, Hashable, Mapping, MutableMapping, Sequence
from dataclasses import dataclass, field
from functools import partial
from typing import Any

import msgspec
import numpy as np
import torch
from torch import nn
from torch.optim import Optimizer

from ckpt.adapters.collect import find_parameters, is_stateful, walk_objects
from ckpt.adapters.layout import leaf_of
from ckpt.adapters.local_shards import LocalShards, Source
from ckpt.adapters.modules import fits, items_of, name_groups, new_state, state_name, unwrapped
from ckpt.adapters.per_rank import PerRank
from ckpt.adapters.remake import Remaker
from ckpt.adapters.selection import ALL, Selection
from ckpt.adapters.targets import has_live, holds_names, memory_of
from ckpt.errors import (
    ConfigError,
    EntryMissing,
    KindMismatch,
    ManifestCorrupt,
    RestoreError,
)
from ckpt.model.manifest import Manifest
from ckpt.model.values import Node, below, decode, join, unescape
from ckpt.plan.leaf import Leaf

_LIVE = {"tensor", "array", "module", "optimizer", "object", "per_rank"}


@dataclass(slots=True)
class Matched:
    """What a restore will do: ``wanted[i]`` is read into ``targets[i]``, then ``apply`` sets the rest.

    ``missing`` names are not in the checkpoint. ``unexpected`` ones have no place in this rank's state; whether they have one on another rank (a pipeline's other stages)
    only all can tell; so it is with ``unused``, the patterns of the selection that fit nothing here.
    """

    wanted: list[Leaf] = field(default_factory=list)
    targets: list[Source] = field(default_factory=list)
    actions: list[Callable[[], None]] = field(default_factory=list)
    missing: tuple[str, ...] = ()
    unexpected: tuple[str, ...] = ()
    unused: tuple[str, ...] = ()

    def apply(self) -> None:
        """Set plain values and load objects. Call once all bytes are in place."""
        for action in self.actions:
            action()


def match(
    state: MutableMapping[str, Any],
    manifest: Manifest,
    *,
    rank: int,
    world_size: int,
    selection: Selection = ALL,
) -> Matched:
    """Fit ``manifest`` to ``state``, as far as ``selection`` goes; changes neither.

    Raises:
        EntryMissing, ShapeMismatch, DtypeMismatch, KindMismatch: They do not fit.
        ConfigError: A ``PerRank`` value under another world size, without a policy.
        RestoreError: The tree is none that we write, or an object of the state fails.
    """
    try:
        return _Match(state, manifest, rank, world_size, selection).run()
    except (LookupError, TypeError, ValueError, AttributeError, RecursionError) as error:
        raise RestoreError(f"step {manifest.step} cannot be matched with the state: {error!r}") from error


class _Match:
    def __init__(
        self,
        state: MutableMapping[str, Any],
        manifest: Manifest,
        rank: int,
        world_size: int,
        selection: Selection,
    ) -> None:
        self._target, self._manifest, self._selection = state, manifest, selection
        self._rank, self._world = rank, world_size
        self._tensors = manifest.tensor_map()
        self._names = sorted(self._tensors)
        self._parameters = find_parameters(list(walk_objects(state)))
        self._missing: list[str] = []
        self._unexpected: list[str] = []
        self._unused = set(selection.only or ())
        self._values = Remaker(self._tensors, self._want)
        self._filled: dict[Hashable, str] = {}
        self.out = Matched()

    def run(self) -> Matched:
        tree = msgspec.json.decode(self._manifest.tree)
        if not isinstance(tree, dict):
            raise ManifestCorrupt("tree", "it is not an object")
        self._mapping(self._target, tree, "")
        self.out.missing = tuple(filter(self._takes, self._missing))
        self.out.unexpected = tuple(filter(self._takes, self._unexpected))
        self.out.unused = tuple(sorted(self._unused))
        if self.out.missing and self._selection.strict:
            raise EntryMissing(list(self.out.missing), self._manifest.step)
        return self.out

    # -- containers ---------------------------------------------------------------------------------------------------------

    def _mapping(self, target: MutableMapping[Any, Any], node: Mapping[str, Node], path: str) -> None:
        if not isinstance(node, dict):
            raise KindMismatch(path, _kind(node), "dict")
        saved = dict(node) if "$" not in node else self._pairs(node, path)
        for key, value in target.items():
            if key not in saved:
                self._missing.append(join(path, key))
            else:
                self._item(value, saved[key], join(path, key), partial(target.__setitem__, key))
        self._unexpected += [join(path, key) for key in saved if key not in target]

    def _pairs(self, node: Mapping[str, Node], path: str) -> dict[Any, Node]:
        if node.get("$") not in ("dict", "OrderedDict", "Counter"):
            raise KindMismatch(path, _kind(node), "dict")
        return {decode(key, self._values.make): item for key, item in node["v"]}

    def _sequence(self, target: Sequence[Any], node: Node, path: str, put: Callable[[Any], None]) -> None:
        items = (
            node
            if isinstance(node, list)
            else node["v"]
            if isinstance(node, dict) and node.get("$") == "tuple"
            else None
        )
        if items is None or len(items) != len(target):
            raise KindMismatch(path, _kind(node), f"{type(target).__name__} of {len(target)}")
        fresh = list(target)
        for index, (value, item) in enumerate(zip(target, items, strict=True)):
            self._item(value, item, join(path, str(index)), partial(fresh.__setitem__, index))
        if isinstance(target, list):
            self.out.actions.append(lambda: target.__setitem__(slice(None), fresh))
        else:
            self.out.actions.append(lambda: put(tuple(fresh)))

    # -- one value ----------------------------------------------------------------------------------------------------------

    def _item(self, target: Any, node: Node, path: str, put: Callable[[Any], None]) -> None:
        """``put`` replaces the value in its container. What is not selected is left, but containers are looked into."""
        if not self._takes(path) and not (holds_names(target) and self._selection.reaches(path)):
            return
        match target:
            case torch.Tensor() | LocalShards():
                self._expect(node, path, "tensor", "array")
                self._want(node["n"], target)
            case np.ndarray():
                self._array(target, node, path, put)
            case nn.Module():
                self._expect(node, path, "module")
                self._module(target, node, path)
            case Optimizer():
                self._expect(node, path, "optimizer")
                self._optimizer(unwrapped(target), node, path)
            case PerRank():
                self._expect(node, path, "per_rank")
                self._per_rank(target, path)
            case _ if is_stateful(target):
                self._expect(node, path, "object")
                value = node["v"]
                made = self._values.order(value, path)
                self.out.actions.append(lambda: target.load_state_dict(made()))
            case MutableMapping() if has_live(target):
                self._mapping(target, node, path)
            case list() | tuple() if has_live(target):
                self._sequence(target, node, path, put)
            case _:
                self._plain(target, node, path, put)

    def _plain(self, target: Any, node: Node, path: str, put: Callable[[Any], None]) -> None:
        tag = node.get("$") if isinstance(node, dict) else None
        if tag in _LIVE and tag not in ("tensor", "array"):
            raise KindMismatch(path, _kind(node), type(target).__name__)
        if tag in ("tensor", "array") and target is not None:
            raise KindMismatch(path, _kind(node), type(target).__name__)
        made = self._values.order(node, path)
        self.out.actions.append(lambda: put(made()))

    def _array(self, target: np.ndarray[Any, Any], node: Node, path: str, put: Callable[[Any], None]) -> None:
        self._expect(node, path, "array", "tensor")
        if target.flags.c_contiguous and target.flags.writeable:
            self._want(node["n"], torch.from_numpy(target).reshape(target.shape))
        else:
            made = self._values.order(node)
            self.out.actions.append(lambda: put(made()))

    def _per_rank(self, target: PerRank, path: str) -> None:
        saved_world = self._manifest.world_size
        source: int | None = self._rank
        if saved_world != self._world:
            source = self._source(target, path, saved_world)
        if source is None:
            return
        values = msgspec.json.decode(self._manifest.per_rank[str(source)])
        if path not in values:
            self._missing.append(f"{path} of rank {source}")
            return
        self._item(target.value, values[path], path, lambda new: setattr(target, "value", new))

    def _source(self, target: PerRank, path: str, saved_world: int) -> int | None:
        policy = target.on_resize
        if callable(policy):
            source = policy(self._rank, self._world, saved_world)
            if source is not None and not 0 <= source < saved_world:
                raise ConfigError(f"on_resize of {path!r} chose rank {source} of {saved_world}")
            return source
        match policy:
            case "error":
                raise ConfigError(
                    f"{path!r} is a PerRank value of {saved_world} rank(s), this world has {self._world}: say whose it takes with "
                    'PerRank(..., on_resize="same_rank" | "first" | function)'
                )
            case "first":
                return 0
            case "same_rank":
                return self._rank if self._rank < saved_world else None
            case _:
                raise ConfigError(
                    f'on_resize={policy!r} of {path!r}: give "error", "same_rank", "first" or a function'
                )

    # -- modules and optimizers ---------------------------------------------------------------------------------------------

    def _module(self, module: nn.Module, node: Mapping[str, Node], path: str) -> None:
        own = {id(t) for t in (*module.parameters(), *module.buffers())}
        values = node["values"]
        inside = tuple(f"{fqn}/" for fqn in values)  # tensors in an extra state
        saved = {name[len(path) + 1 :] for name in below(self._names, path)} | set(values)
        saved = {fqn for fqn in saved if not fqn.startswith(inside)}
        extra: dict[str, Callable[[], Any]] = {}
        for entry in items_of(path, module).entries:
            name = f"{path}/{entry.fqn}"
            if not self._takes(name):
                pass
            elif entry.fqn not in saved:
                self._missing.append(name)
            elif id(entry.value) not in own:  # extra state: whatever it was
                extra[entry.key] = self._values.order(values.get(entry.fqn, {"$": "tensor", "n": name}), name)
            elif entry.fqn in values:
                raise KindMismatch(name, _kind(values[entry.fqn]), "tensor")
            else:
                self._want(name, entry.value)
            saved.discard(entry.fqn)
        self._unexpected += [f"{path}/{fqn}" for fqn in sorted(saved)]
        if extra:
            self.out.actions.append(lambda: _load_extra(module, {key: made() for key, made in extra.items()}))

    def _optimizer(self, optimizer: Optimizer, node: Mapping[str, Node], path: str) -> None:
        names = name_groups(optimizer, self._parameters)
        by_parameter = {name: group["values"] for group in node["groups"] for name in group["params"]}
        wanted = {name for group in names for name in group if self._takes(f"{path}/{name}")}
        missing = sorted(wanted - by_parameter.keys())
        self._missing += [f"{path}/{name}" for name in missing]
        self._unexpected += [f"{path}/{name}" for name in by_parameter if name not in wanted]
        if missing and self._selection.strict:
            return
        wanted &= by_parameter.keys()
        others = sorted(node["state"])
        for group, group_names in zip(optimizer.param_groups, names, strict=True):
            if self._takes(f"{path}/param_groups"):
                saved = [by_parameter[name] for name in group_names if name in by_parameter]
                self._group(group, saved, f"{path}/param_groups")
            for parameter, name in zip(group["params"], group_names, strict=True):
                if name not in wanted:
                    continue
                values = {key: node["state"][key] for key in below(others, f"{path}/{name}")}
                self._state(optimizer, group, parameter, values, f"{path}/{name}")

    def _group(self, group: dict[str, Any], values: list[Node], path: str) -> None:
        if not values:
            return
        if any(other != values[0] for other in values[1:]):
            raise RestoreError(
                f"{path}: parameters with different settings in the checkpoint share a group here: group them as they were saved"
            )
        made = self._values.order(values[0])

        def apply() -> None:
            for key, value in made().items():
                if isinstance(current := group.get(key), torch.Tensor) and isinstance(value, torch.Tensor):
                    current.copy_(value)  # a capturable optimizer's learning rate keeps its address
                else:
                    group[key] = value

        self.out.actions.append(apply)

    def _state(
        self,
        optimizer: Optimizer,
        group: Mapping[str, Any],
        parameter: torch.Tensor,
        values: Mapping[str, Node],
        prefix: str,
    ) -> None:
        """State of one parameter: filled in place where it is, made where it is not, dropped where it was not saved."""
        fresh: dict[Any, Any] = {}
        makers: dict[Any, Callable[[], Any]] = {}
        current = optimizer.state.get(parameter, {})
        keys = {state_name("", "", key)[2:]: key for key in current}
        for name in below(self._names, prefix):
            part = name[len(prefix) + 1 :]
            if "/" in part:
                continue  # inside a container, which has a node of its own
            key = keys.get(part, unescape(part))
            held = current.get(key)
            if not fits(held, self._tensors[name]):
                held = new_state(parameter, group, key, self._tensors[name])
            self._want(name, held)
            fresh[key] = held
        for name, node in values.items():
            part = name[len(prefix) + 1 :]
            makers[keys.get(part, unescape(part))] = self._values.order(node)

        def apply() -> None:
            fresh.update({key: made() for key, made in makers.items()})
            if fresh:
                optimizer.state[parameter] = fresh
            else:
                optimizer.state.pop(parameter, None)

        self.out.actions.append(apply)

    # -- helpers ------------------------------------------------------------------------------------------------------------

    def _takes(self, name: str) -> bool:
        self._unused.difference_update(self._selection.fitting(name))
        return self._selection.takes(name)

    def _want(self, name: str, target: Source) -> None:
        if name not in self._tensors:
            self._missing.append(name)
            return
        stored = self._manifest.tied.get(name, name)
        if self._filled.setdefault(memory_of(target), stored) != stored:
            raise RestoreError(
                f"{name!r} and {self._filled[memory_of(target)]!r} share their memory in the target, but were saved apart: untie them first"
            )
        self.out.wanted.append(leaf_of(name, target, ()))
        self.out.targets.append(target)

    def _expect(self, node: Node, path: str, *tags: str) -> None:
        if not isinstance(node, dict) or node.get("$") not in tags:
            raise KindMismatch(path, _kind(node), tags[0])


def _kind(node: Node) -> str:
    if isinstance(node, dict):
        return str(node.get("$", "dict"))
    return {list: "list", str: "string", type(None): "None"}.get(type(node), type(node).__name__)


def _load_extra(module: nn.Module, values: dict[str, Any]) -> None:
    module.load_state_dict(values, strict=False)
