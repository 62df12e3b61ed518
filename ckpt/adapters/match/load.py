"""Match a manifest with a state.

A restore first matches the whole state, and changes none of its values meanwhile. Then it reads
bytes into the tensors. Then it sets all other values.

A restore fills existing tensors in place. It makes tensors that do not exist yet: the state of an
optimizer that has not stepped, and the tensors in the saved ``state_dict()`` of an object whose
present tensors are not filled in place (see ``_live_state``). Plain values replace the present
values, and the ``load_state_dict`` of objects is called.
"""

from __future__ import annotations

from collections.abc import Callable, MutableMapping, Sequence
from dataclasses import replace
from functools import partial
from itertools import chain
from typing import Any, Final

import numpy as np
import torch
from torch import distributed as dist
from torch import nn
from torch.optim import Optimizer

from ckpt.adapters.match.fill_tensor import fill_tensor
from ckpt.adapters.match.load_module import match_module
from ckpt.adapters.match.load_optimizer import match_optimizer
from ckpt.adapters.match.matching import Matched, Matching
from ckpt.adapters.match.renaming import Renaming
from ckpt.adapters.match.saved import ABSENT, Saved, holds_tensors, is_mapping, kind, tag
from ckpt.adapters.match.selection import ALL, Selection
from ckpt.adapters.match.slots import Holders, fill_slots, tensors_of
from ckpt.adapters.match.targets import has_live, has_sharded, holds_names
from ckpt.adapters.match.wrapper_prefix import removed_from, with_prefix
from ckpt.adapters.tensors.arrays import is_fillable
from ckpt.adapters.tensors.gathered import forget_copies, release
from ckpt.adapters.tensors.local_shards import LocalShards
from ckpt.adapters.tensors.per_rank import PerRank
from ckpt.adapters.tensors.sharded import as_source
from ckpt.adapters.walk.adapted import adapted
from ckpt.adapters.walk.collect import find_parameters
from ckpt.adapters.walk.modules import asked, items_of, unwrapped
from ckpt.adapters.walk.objects import (
    check_mode,
    declares_state,
    is_stateful,
    look_again,
    walk_objects,
    walk_tensors,
)
from ckpt.adapters.walk.stand_in import Checked, ModuleStandIn, Refilled, StandIn
from ckpt.errors import ConfigError, KindMismatch, RestoreError
from ckpt.model.manifest import Manifest
from ckpt.model.values import Node, join

_LIVE: Final = ("module", "optimizer", "object", "per_rank", "subclass")
_EXTRA: Final = "_extra_state"  # The last part of the key under which torch saves extra state


def match(
    state: MutableMapping[str, Any],
    manifest: Manifest,
    *,
    rank: int,
    world_size: int,
    selection: Selection = ALL,
) -> Matched:
    """Match ``manifest`` with the part of ``state`` that ``selection`` chooses, and return the work
    that the restore must do. The values of the state do not change.

    The call frees the parameters that FSDP has gathered, so all ranks make it in the same order
    (see ``gathered.release``). It also calls the ``state_dict()`` of some objects of the state.

    Raises:
        EntryMissing, ShapeMismatch, DtypeMismatch, KindMismatch, OptimizerMismatch: The manifest
            does not fit the state.
        ConfigError: A ``PerRank`` value was saved by another number of ranks, and its ``on_resize``
            is "error" or chooses a rank that does not exist. Or a renaming fails.
        RestoreError: The state is no dict, the manifest has a tree that ckpt does not write, an
            object of the state raises an error, or a tensor cannot be restored. For example, two
            tensors share their memory in the state, but were saved as different tensors.
        ManifestCorrupt, FormatUnsupported: The manifest has a value that cannot be made.
        UnsupportedValue: A tensor of the state cannot be filled, for example under
            ``FakeTensorMode``, or a ``state_dict()`` raises an error.
    """
    if not isinstance(state, MutableMapping):
        way = "a state is a dict: {'model': model, 'optimizer': optimizer, ...}"
        raise RestoreError(f"restore({type(state).__name__}): {way}")
    try:
        return _Match(state, manifest, rank, world_size, selection).run()
    except (LookupError, TypeError, ValueError, AttributeError, RecursionError) as error:
        raise RestoreError(
            f"step {manifest.step} cannot be matched with the state: {error!r}"
        ) from error


class _Match:
    def __init__(
        self,
        state: MutableMapping[str, Any],
        manifest: Manifest,
        rank: int,
        world_size: int,
        selection: Selection,
    ) -> None:
        self._state, self._rank, self._world = state, rank, world_size
        self._objects = list(walk_objects(state))
        check_mode(state, self._objects)
        look_again(self._objects)
        for _, value in self._objects:
            if isinstance(value, nn.Module):
                release(value)
        self._saved = Saved(manifest)
        selection = replace(selection, renaming=self._renaming(selection.renaming))
        self._all = Matching(self._saved, selection, find_parameters(state, self._objects))
        self._actions = self._all.actions
        self._in_object = False
        self._restored: list[nn.Module | Optimizer] = []

    def _renaming(self, renaming: Renaming) -> Renaming:
        if not removed_from(self._saved):
            return renaming
        entries = {
            path: [entry.fqn for entry in items_of(path, value).entries]
            for path, value in self._objects
            if isinstance(value, nn.Module)
        }
        return with_prefix(renaming, self._saved, entries)

    def run(self) -> Matched:
        modules = [(path, value) for path, value in self._objects if isinstance(value, nn.Module)]
        self._actions.append(self._all.real.change_places)
        self._mapping(self._state, "", "")
        self._fill_slots([module for _, module in modules])
        matched = self._all.done()
        matched.actions += [value.settle for value in self._restored if isinstance(value, StandIn)]
        matched.actions += self._all.last_actions
        matched.actions.append(forget_copies)
        matched.uninitialised = tuple(
            name
            for path, module in modules
            for name in self._all.real.left_out(path, _keyed_by(module))
        )
        return matched

    def _fill_slots(self, modules: Sequence[nn.Module]) -> None:
        if not self._all.slots:
            return
        optimizers = [
            (path, unwrapped(value))
            for path, value in self._objects
            if isinstance(value, Optimizer) and not declares_state(value)
        ]
        others = (tensor for _, tensor in walk_tensors(self._state))
        holders = Holders(optimizers, chain(tensors_of(modules), others))
        fill_slots(self._all.slots, holders, dict(self._all.filled), self._all.values.buffers)

    # -- containers --------------------------------------------------------------------------------

    def _child(self, value: Any, name: str, put: Callable[[Any], None]) -> None:
        """Match one value of a container with the value in the checkpoint that has its name.

        ``put`` replaces the value in its container.
        """
        source = self._all.source(name)
        node = self._saved.node(source)
        inside = holds_names(value)
        if not self._all.takes(name) and not (inside and self._all.selection.reaches(name)):
            self._all.claim(name, source, silent=True)
        elif node is not ABSENT:
            self._item(value, node, name, source, put)
        elif inside and self._all.selection.renaming:
            # With a renaming, the checkpoint may have the values inside of this one elsewhere.
            with self._all.one(name, source):
                self._item(value, node, name, source, put)
        else:
            self._all.lack(name, source)

    def _mapping(self, target: MutableMapping[Any, Any], path: str, source: str) -> None:
        self._all.open(path, source)
        for key, value in target.items():
            self._child(value, join(path, key), partial(target.__setitem__, key))

    def _sequence(
        self, target: Sequence[Any], node: Node, path: str, source: str, put: Callable[[Any], None]
    ) -> None:
        items = node["v"] if tag(node) == "tuple" else node
        if node is not ABSENT and not (isinstance(items, list) and len(items) == len(target)):
            raise KindMismatch(path, kind(node), f"{type(target).__name__} of {len(target)}")
        self._all.open(path, source)
        fresh = list(target)
        for index, value in enumerate(target):
            self._child(value, join(path, str(index)), partial(fresh.__setitem__, index))
        if isinstance(target, list):
            self._actions.append(lambda: target.__setitem__(slice(None), fresh))
        else:
            self._actions.append(lambda: put(tuple(fresh)))

    # -- one value ---------------------------------------------------------------------------------

    def _item(
        self, target: Any, node: Node, path: str, source: str, put: Callable[[Any], None]
    ) -> None:
        """Match ``node`` with ``target``, the value at ``path`` of the state. ``put`` replaces this
        value in its container.

        ``node`` is ``ABSENT`` only if the renaming may find the values inside of ``target``
        elsewhere in the checkpoint.
        """
        if not is_stateful(target):
            target = adapted(target)
        match target:
            case nn.Module():
                match_module(self._all, target, node, path, source)
                self._restored.append(target)
            case Optimizer() if not declares_state(target):
                match_optimizer(self._all, unwrapped(target), node, path, source)
                self._restored.append(target)
            case MutableMapping() if not is_stateful(target) and has_live(target):
                if (
                    node is not ABSENT
                    and not is_mapping(node)
                    and tag(node) not in ("module", "object")
                ):
                    raise KindMismatch(path, kind(node), "dict")
                self._mapping(target, path, source)
            case list() | tuple() if has_live(target):
                self._sequence(target, node, path, source, put)
            case _ if (live := self._live_state(target, node, path)) is not None:
                self._object(target, live, path, source)
            case _:
                self._all.claim(path, source)
                self._leaf(target, node, path, source, put)

    def _live_state(self, target: Any, node: Node, path: str) -> MutableMapping[str, Any] | None:
        """Return the ``state_dict()`` (or ``targets()``) of an object whose tensors a restore fills
        in place, or None for any other value.

        Such an object is ``Stateful`` (see ``declares_state``), or its ``state_dict()`` has sharded
        tensors and ``torch.distributed`` is initialized. In both cases, ``node`` must have tensors
        inside.
        """
        if not (
            is_stateful(target)
            and (tag(node) == "object" or is_mapping(node))
            and holds_tensors(node)
        ):
            return None
        declared = declares_state(target)
        if not declared and not (dist.is_available() and dist.is_initialized()):
            return None
        with asked(path, target):
            live = target.targets() if isinstance(target, Refilled) else target.state_dict()
        if not isinstance(live, MutableMapping) or not (declared or has_sharded(live)):
            return None
        return live

    def _object(self, target: Any, live: MutableMapping[str, Any], path: str, source: str) -> None:
        """Match the values of ``live``, the ``state_dict()`` of ``target``. After the restore has
        set them, it passes this dict to ``target.load_state_dict``, as
        ``torch.distributed.checkpoint.load`` does.
        """
        # The tensors of a ``Refilled`` object keep their shapes. In any other object, the restore
        # replaces a tensor that was saved with another shape (see ``_leaf``).
        before, self._in_object = self._in_object, not isinstance(target, Refilled)
        self._mapping(live, path, source)
        self._in_object = before
        self._actions.append(lambda: target.load_state_dict(live))

    def _leaf(
        self, target: Any, node: Node, path: str, source: str, put: Callable[[Any], None]
    ) -> None:
        if self._in_object and self._is_resized(target, node):
            # The restore makes a new tensor in place of one with another shape, such as a queue of
            # samples.
            target = None
        match target:
            case torch.Tensor() | LocalShards():
                held = as_source(target) if isinstance(target, torch.Tensor) else target
                fill_tensor(self._all, path, source, held, node)
            case np.ndarray():
                self._array(target, node, path, source, put)
            case PerRank():
                if not (isinstance(node, list) and self._saved.imported):
                    self._all.expect(node, path, "per_rank")
                self._per_rank(target, node, path, source)
            case _ if is_stateful(target):
                # An imported checkpoint has a plain mapping for such an object.
                if not is_mapping(node):
                    self._all.expect(node, path, "object")
                made = self._all.values.order(node["v"] if tag(node) == "object" else node, path)
                load = target.load_state_dict
                if isinstance(target, Checked):
                    target.check_saved(made())
                self._actions.append(lambda: load(made()))
            case _:
                self._plain(target, node, path, put)

    def _is_resized(self, target: Any, node: Node) -> bool:
        if (
            not isinstance(target, torch.Tensor | np.ndarray)
            or has_sharded(target)
            or tag(node) not in ("tensor", "array")
        ):
            return False
        saved = self._saved.tensors.get(node["n"])
        return saved is not None and saved.shape != tuple(target.shape)

    def _plain(self, target: Any, node: Node, path: str, put: Callable[[Any], None]) -> None:
        if tag(node) in _LIVE or (tag(node) in ("tensor", "array") and target is not None):
            raise KindMismatch(path, kind(node), type(target).__name__)
        made = self._all.values.order(node, path)
        self._actions.append(lambda: put(made()))

    def _array(
        self,
        target: np.ndarray[Any, Any],
        node: Node,
        path: str,
        source: str,
        put: Callable[[Any], None],
    ) -> None:
        self._all.expect(node, path, "array", "tensor")
        held = target
        if not is_fillable(target):
            held = np.empty_like(target, subok=False)
            if node["n"] in self._saved.tensors:
                self._actions.append(lambda: put(held))
        self._all.want(path, source, torch.from_numpy(held), node["n"])

    def _per_rank(self, target: PerRank, node: Node, path: str, at: str) -> None:
        """Match a ``PerRank`` value with the value at the path ``at`` of the checkpoint. In an
        imported checkpoint, ``node`` is a list of the values of all ranks, as an export writes it.
        """
        saved_world = len(node) if isinstance(node, list) else self._saved.manifest.world_size
        source: int | None = self._rank
        if saved_world != self._world:
            source = self._source(target, path, saved_world)
        if source is None:
            return
        values = {at: node[source]} if isinstance(node, list) else self._saved.per_rank(source)
        if at not in values:
            self._all.lack(f"{path} of rank {source}", f"{at} of rank {source}")
            return
        self._saved.adopt(at, values[at])
        self._item(target.value, values[at], path, at, lambda new: setattr(target, "value", new))

    def _source(self, target: PerRank, path: str, saved_world: int) -> int | None:
        """Return the rank whose saved value this rank takes, or None to keep the present value."""
        policy = target.on_resize
        if callable(policy):
            source = policy(self._rank, self._world, saved_world)
            if source is not None and not 0 <= source < saved_world:
                raise ConfigError(f"on_resize of {path!r} chose rank {source} of {saved_world}")
            return source
        if policy == "error":
            raise ConfigError(
                f"{path!r} is a PerRank value of {saved_world} rank(s), this world has "
                f"{self._world}: say whose it takes with "
                'PerRank(..., on_resize="same_rank" | "first" | function)'
            )
        if policy == "first":
            return 0
        return self._rank if self._rank < saved_world else None


def _keyed_by(module: nn.Module) -> nn.Module:
    """Return the module in whose state dict the items of ``module`` have their keys."""
    return module.keyed_by() if isinstance(module, ModuleStandIn) else module
