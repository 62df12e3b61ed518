"""Match a manifest with a state.

A restore first matches the whole state, and changes none of its values meanwhile. Then it reads
bytes into the tensors. Then it sets all other values.

A restore fills existing tensors in place. It makes tensors that do not exist yet: the state of an
optimizer that has not stepped, and the tensors in the saved ``state_dict()`` of an object whose
present tensors are not filled in place (see ``_state_to_fill``). Plain values replace the present
values, and the ``load_state_dict`` of objects is called. A value is *live* if it is not plain.

The ``path`` of a value is its name in the state, and its ``source`` is its name in the checkpoint.
A node is a saved value in the manifest's tree (see ``match.saved_nodes``).

A stand-in is an object that takes the place of a module or optimizer of a framework, and an adapter
is a function that returns an object with a ``state_dict()`` for a value that has none.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, MutableMapping, Sequence
from dataclasses import replace
from functools import partial
from itertools import chain
from typing import Any, Final

import numpy as np
import torch
from torch import distributed as dist
from torch import nn
from torch.optim import Optimizer

from ckpt.errors import ConfigError, KindMismatch, RestoreError
from ckpt.model.manifest import Manifest
from ckpt.model.values import Node, join
from ckpt.state.match.load_module import match_module
from ckpt.state.match.load_optimizer import match_optimizer
from ckpt.state.match.matcher import Matcher, StateMatch, fill_tensor
from ckpt.state.match.optimizer_slots import Holders, fill_slots, tensors_of
from ckpt.state.match.saved_nodes import ABSENT, SavedState, holds_tensors, is_mapping, kind, tag
from ckpt.state.match.selection import (
    WHOLE_STATE,
    RenameRules,
    Selection,
    modules_without_prefix,
    with_prefix,
)
from ckpt.state.match.targets import (
    forget_copies,
    has_live,
    has_sharded,
    is_matched_by_parts,
    release_gathered,
)
from ckpt.state.tensors.arrays import is_fillable
from ckpt.state.tensors.local_shards import LocalShards
from ckpt.state.tensors.per_rank import PerRank
from ckpt.state.tensors.sharded import tensor_or_shards
from ckpt.state.walk.adapted import adapt
from ckpt.state.walk.last_walk import LastWalk
from ckpt.state.walk.modules import (
    Parameters,
    check_load,
    items_of,
    state_dict_errors,
    unwrap_optimizer,
)
from ckpt.state.walk.stand_in import Checkable, ModuleStandIn, Refillable, StandIn
from ckpt.state.walk.state_objects import (
    check_walk_times,
    has_only_values,
    inherits_stateful,
    is_stateful,
    refresh_stand_ins,
    refuse_fake_mode,
    walk_objects,
    walk_tensors,
)

_LIVE_TAGS: Final = ("module", "optimizer", "object", "per_rank", "subclass")


def match(
    state: MutableMapping[str, Any],
    manifest: Manifest,
    *,
    rank: int,
    world_size: int,
    selection: Selection = WHOLE_STATE,
    last_walk: LastWalk | None = None,
) -> StateMatch:
    """Match ``manifest`` with the part of ``state`` that ``selection`` chooses, and return the work
    that the restore must do. The values of the state do not change. ``last_walk`` has the results
    of the last walk over the state; None if there was none.

    The call frees the parameters that FSDP has gathered, so all ranks make it in the same order
    (see ``release_gathered``). It also calls the ``state_dict()`` of some objects of the state.

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
        advice = "a state is a dict: {'model': model, 'optimizer': optimizer, ...}"
        raise RestoreError(f"restore({type(state).__name__}): {advice}")
    try:
        return _Match(state, manifest, rank, world_size, selection, last_walk or LastWalk()).run()
    except (LookupError, TypeError, ValueError, AttributeError, RecursionError) as error:
        raise RestoreError(
            f"step {manifest.step} cannot be matched with the state: {error!r}"
        ) from error


class _Match:
    """One matching of a state with a manifest. ``run`` returns the work of the restore.

    ``_checkpoint`` has the saved values, and ``_matcher`` collects the work: the tensors to read,
    the names without a counterpart, and the calls to make after the reads, ``_actions``. Its
    ``remaker`` prepares functions that make saved values again, and its ``meta_replacements`` are
    the real tensors that take the place of those on the meta device. ``_plain_names`` are the names
    of plain values, ``_objects`` the modules, optimizers and other objects with their paths, and
    ``_loaded_objects`` the modules and optimizers that were matched so far. ``_is_in_object`` is
    True inside of an object whose tensors may be replaced by tensors of other shapes.
    """

    def __init__(
        self,
        state: MutableMapping[str, Any],
        manifest: Manifest,
        rank: int,
        world_size: int,
        selection: Selection,
        last_walk: LastWalk,
    ) -> None:
        self._state, self._rank, self._world_size = state, rank, world_size
        # Each plain value is looked at once. It may be large, and it is replaced as a whole.
        live = {key: value for key, value in state.items() if not has_only_values(value)}
        self._plain_names = {join("", key) for key in state.keys() - live.keys()}
        check_walk_times(live)
        self._live, self._objects = live, list(walk_objects(live))
        refuse_fake_mode(live, self._objects)
        refresh_stand_ins(self._objects)
        for _, value in self._objects:
            if isinstance(value, nn.Module):
                release_gathered(value)
        self._checkpoint = SavedState(manifest)
        selection = replace(selection, rename_rules=self._with_import_rules(selection.rename_rules))
        parameters = _parameters_of(live, self._objects, last_walk)
        self._matcher = Matcher(self._checkpoint, selection, parameters)
        self._actions = self._matcher.actions
        self._is_in_object = False
        self._loaded_objects: list[nn.Module | Optimizer] = []

    def _with_import_rules(self, rules: RenameRules) -> RenameRules:
        """Return ``rules`` with those for an imported checkpoint (see ``with_prefix``)."""
        if not modules_without_prefix(self._checkpoint):
            return rules
        entries = {
            path: [entry.fqn for entry in items_of(path, value).entries]
            for path, value in self._objects
            if isinstance(value, nn.Module)
        }
        return with_prefix(rules, self._checkpoint, entries)

    def run(self) -> StateMatch:
        """Match all values, and return the work of the restore."""
        modules = [(path, value) for path, value in self._objects if isinstance(value, nn.Module)]
        self._actions.append(self._matcher.meta_replacements.swap_in)
        self._match_mapping(self._state, "", "")
        self._fill_slots([module for _, module in modules])
        state_match = self._matcher.finish()
        state_match.actions += [
            value.take_restored_values
            for value in self._loaded_objects
            if isinstance(value, StandIn)
        ]
        state_match.actions += self._matcher.last_actions
        state_match.actions.append(forget_copies)
        state_match.meta_names = tuple(
            name
            for path, module in modules
            for name in self._matcher.meta_replacements.remaining_names(
                path, _module_of_keys(module)
            )
        )
        return state_match

    def _fill_slots(self, modules: Sequence[nn.Module]) -> None:
        """Choose the tensors to fill in the slots of optimizers (see ``match.optimizer_slots``).

        A slot is a place in an optimizer that gets a saved tensor. The holders tell which places of
        the state have the memory of a tensor.
        """
        if not self._matcher.slots:
            return
        optimizers = [
            (path, unwrap_optimizer(value))
            for path, value in self._objects
            if isinstance(value, Optimizer) and not inherits_stateful(value)
        ]
        other_tensors = (tensor for _, tensor in walk_tensors(self._live))
        holders = Holders(optimizers, chain(tensors_of(modules), other_tensors))
        fill_slots(
            self._matcher.slots,
            holders,
            dict(self._matcher.targets_by_memory),
            self._matcher.remaker.buffers,
        )

    # -- containers --------------------------------------------------------------------------------

    def _match_child(self, value: Any, name: str, put: Callable[[Any], None]) -> None:
        """Match one value of a container with the value in the checkpoint that has its name.

        ``put`` replaces the value in its container. A container that the selection does not take is
        still matched if the selection reaches values inside of it.
        """
        source = self._matcher.source_of(name)
        node = self._checkpoint.node(source)
        is_container = name not in self._plain_names and is_matched_by_parts(value)
        if not self._matcher.restores(name) and not (
            is_container and self._matcher.selection.reaches(name)
        ):
            self._matcher.record_match(name, source, hide_renaming=True)
            self._record_excluded(value, name)
        elif node is not ABSENT:
            self._match_value(value, node, name, source, put)
        elif is_container and self._matcher.selection.rename_rules:
            # With a renaming, the checkpoint may have the values inside of this one elsewhere.
            with self._matcher.missing_as_one(name, source):
                self._match_value(value, node, name, source, put)
        else:
            self._matcher.record_missing(name, source)

    def _record_excluded(self, value: Any, name: str) -> None:
        """Record that the tensors of ``value``, which is not restored, keep their values."""
        for path, tensor in walk_tensors(value, name):
            self._matcher.record_excluded_tensor(path, tensor)
        for path, module in walk_objects(value, name):
            if isinstance(module, nn.Module):
                for tensor in tensors_of([module]):
                    self._matcher.record_excluded_tensor(path, tensor)

    def _match_mapping(self, target: MutableMapping[Any, Any], path: str, source: str) -> None:
        """Match the values of a dict one by one."""
        self._matcher.open_container(path, source)
        for key, value in target.items():
            self._match_child(value, join(path, key), partial(target.__setitem__, key))

    def _match_sequence(
        self, target: Sequence[Any], node: Node, path: str, source: str, put: Callable[[Any], None]
    ) -> None:
        """Match the values of a list or tuple one by one. A tuple is replaced by a new one."""
        items = node["v"] if tag(node) == "tuple" else node
        if node is not ABSENT and not (isinstance(items, list) and len(items) == len(target)):
            raise KindMismatch(path, kind(node), f"{type(target).__name__} of {len(target)}")
        self._matcher.open_container(path, source)
        new_items = list(target)
        for index, value in enumerate(target):
            self._match_child(value, join(path, str(index)), partial(new_items.__setitem__, index))
        if isinstance(target, list):
            self._actions.append(lambda: target.__setitem__(slice(None), new_items))
        else:
            self._actions.append(lambda: put(tuple(new_items)))

    # -- one value ---------------------------------------------------------------------------------

    def _match_value(
        self, target: Any, node: Node, path: str, source: str, put: Callable[[Any], None]
    ) -> None:
        """Match ``node`` with ``target``, the value at ``path`` of the state. ``put`` replaces this
        value in its container.

        ``node`` is ``ABSENT`` only if the renaming may find the values inside of ``target``
        elsewhere in the checkpoint.
        """
        if path in self._plain_names:
            self._matcher.record_match(path, source)
            self._match_whole_value(target, node, path, source, put)
            return
        if not is_stateful(target):
            target = adapt(target)
        match target:
            case nn.Module():
                match_module(self._matcher, target, node, path, source)
                self._loaded_objects.append(target)
            case Optimizer() if not inherits_stateful(target):
                match_optimizer(self._matcher, unwrap_optimizer(target), node, path, source)
                self._loaded_objects.append(target)
            case MutableMapping() if not is_stateful(target) and has_live(target):
                if (
                    node is not ABSENT
                    and not is_mapping(node)
                    and tag(node) not in ("module", "object")
                ):
                    raise KindMismatch(path, kind(node), "dict")
                self._match_mapping(target, path, source)
            case list() | tuple() if has_live(target):
                self._match_sequence(target, node, path, source, put)
            case _ if (live := self._state_to_fill(target, node, path)) is not None:
                self._match_object(target, live, path, source)
            case _:
                self._matcher.record_match(path, source)
                self._match_whole_value(target, node, path, source, put)

    def _state_to_fill(self, target: Any, node: Node, path: str) -> MutableMapping[str, Any] | None:
        """Return the ``state_dict()`` (or ``targets()``) of an object whose tensors a restore fills
        in place, or None for any other value.

        Such an object is ``Stateful`` (see ``inherits_stateful``), or its ``state_dict()`` has
        sharded tensors and ``torch.distributed`` is initialized. In both cases, ``node`` must have
        tensors inside.
        """
        if not (
            is_stateful(target)
            and (tag(node) == "object" or is_mapping(node))
            and holds_tensors(node)
        ):
            return None
        is_declared = inherits_stateful(target)
        if not is_declared and not (dist.is_available() and dist.is_initialized()):
            return None
        with state_dict_errors(path, target):
            live = target.targets() if isinstance(target, Refillable) else target.state_dict()
        if not isinstance(live, MutableMapping) or not (is_declared or has_sharded(live)):
            return None
        return live

    def _match_object(
        self, target: Any, live: MutableMapping[str, Any], path: str, source: str
    ) -> None:
        """Match the values of ``live``, the ``state_dict()`` of ``target``. After the restore has
        set them, it passes this dict to ``target.load_state_dict``, as
        ``torch.distributed.checkpoint.load`` does.
        """
        # The tensors of a ``Refillable`` object keep their shapes. In any other object, the restore
        # replaces a tensor that was saved with another shape (see ``_match_whole_value``).
        was_in_object, self._is_in_object = self._is_in_object, not isinstance(target, Refillable)
        self._match_mapping(live, path, source)
        self._is_in_object = was_in_object
        self._actions.append(lambda: target.load_state_dict(live))

    def _match_whole_value(
        self, target: Any, node: Node, path: str, source: str, put: Callable[[Any], None]
    ) -> None:
        """Match a value whose inner values are not matched by names of their own."""
        if self._is_in_object and self._is_resized(target, node):
            # The restore makes a new tensor in place of one with another shape, such as a queue of
            # samples.
            target = None
        match target:
            case torch.Tensor() | LocalShards():
                tensor = tensor_or_shards(target) if isinstance(target, torch.Tensor) else target
                fill_tensor(self._matcher, path, source, tensor, node)
            case np.ndarray():
                self._match_array(target, node, path, source, put)
            case PerRank():
                if not (isinstance(node, list) and self._checkpoint.is_imported):
                    self._matcher.require_tag(node, path, "per_rank")
                self._match_per_rank(target, node, path, source)
            case _ if is_stateful(target):
                check_load(path, target)
                # An imported checkpoint has a plain mapping for such an object.
                if not is_mapping(node):
                    self._matcher.require_tag(node, path, "object")
                make_value = self._matcher.remaker.prepare(
                    node["v"] if tag(node) == "object" else node, path
                )
                load = target.load_state_dict
                if isinstance(target, Checkable):
                    target.check_saved(make_value())
                self._actions.append(lambda: load(make_value()))
            case _:
                self._match_plain(target, node, path, put)

    def _is_resized(self, target: Any, node: Node) -> bool:
        """Return True if ``target`` is no sharded tensor, and was saved with another shape."""
        if (
            not isinstance(target, torch.Tensor | np.ndarray)
            or has_sharded(target)
            or tag(node) not in ("tensor", "array")
        ):
            return False
        record = self._checkpoint.tensors.get(node["n"])
        return record is not None and record.shape != tuple(target.shape)

    def _match_plain(self, target: Any, node: Node, path: str, put: Callable[[Any], None]) -> None:
        """Request that the saved plain value replaces ``target``."""
        if tag(node) in _LIVE_TAGS or (tag(node) in ("tensor", "array") and target is not None):
            raise KindMismatch(path, kind(node), type(target).__name__)
        make_value = self._matcher.remaker.prepare(node, path)
        self._actions.append(lambda: put(make_value()))

    def _match_array(
        self,
        target: np.ndarray[Any, Any],
        node: Node,
        path: str,
        source: str,
        put: Callable[[Any], None],
    ) -> None:
        """Request that an array is filled, or is replaced if its memory cannot be filled."""
        self._matcher.require_tag(node, path, "array", "tensor")
        array = target
        if not is_fillable(target):
            array = np.empty_like(target, subok=False)
            if node["n"] in self._checkpoint.tensors:
                self._actions.append(lambda: put(array))
        self._matcher.request_read(path, source, torch.from_numpy(array), node["n"])

    def _match_per_rank(self, target: PerRank, node: Node, path: str, saved_path: str) -> None:
        """Match a ``PerRank`` value with the value at the path ``saved_path`` of the checkpoint. In
        an imported checkpoint, ``node`` is a list of the values of all ranks, as an export writes
        it.
        """
        saved_world_size = (
            len(node) if isinstance(node, list) else self._checkpoint.manifest.world_size
        )
        source_rank: int | None = self._rank
        if saved_world_size != self._world_size:
            source_rank = self._source_rank(target, path, saved_world_size)
        if source_rank is None:
            return
        values = (
            {saved_path: node[source_rank]}
            if isinstance(node, list)
            else self._checkpoint.per_rank(source_rank)
        )
        if saved_path not in values:
            self._matcher.record_missing(
                f"{path} of rank {source_rank}", f"{saved_path} of rank {source_rank}"
            )
            return
        self._checkpoint.set_per_rank_node(saved_path, values[saved_path])
        self._match_value(
            target.value,
            values[saved_path],
            path,
            saved_path,
            lambda new_value: setattr(target, "value", new_value),
        )

    def _source_rank(self, target: PerRank, path: str, saved_world_size: int) -> int | None:
        """Return the rank whose saved value this rank takes, or None to keep the present value."""
        policy = target.on_resize
        if callable(policy):
            source_rank = policy(self._rank, self._world_size, saved_world_size)
            if source_rank is not None and not 0 <= source_rank < saved_world_size:
                raise ConfigError(
                    f"on_resize of {path!r} chose rank {source_rank} of {saved_world_size}"
                )
            return source_rank
        if policy == "error":
            raise ConfigError(
                f"{path!r} is a PerRank value of {saved_world_size} rank(s), this world has "
                f"{self._world_size}: say whose it takes with "
                'PerRank(..., on_resize="same_rank" | "first" | function)'
            )
        if policy == "first":
            return 0
        return self._rank if self._rank < saved_world_size else None


def _module_of_keys(module: nn.Module) -> nn.Module:
    """Return the module in whose state dict the items of ``module`` have their keys."""
    return module.key_module() if isinstance(module, ModuleStandIn) else module


def _parameters_of(
    state: Mapping[str, Any], objects: Sequence[tuple[str, Any]], last_walk: LastWalk
) -> Parameters:
    """Return the parameters of the modules among ``objects``. The result also has the parameters of
    the optimizers among ``objects`` that no module holds, if they are in the dicts, lists and
    tuples of ``state``.
    """
    parameters = Parameters(
        (value, last_walk.items(path, value))
        for path, value in objects
        if isinstance(value, nn.Module)
    )
    optimizers = [unwrap_optimizer(value) for _, value in objects if isinstance(value, Optimizer)]
    parameters.add_loose(optimizers, walk_tensors(state))
    return parameters
