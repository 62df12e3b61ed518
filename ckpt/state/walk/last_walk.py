"""Keep the results of the last walk over a state for the next walk.

A call of ``state_dict()`` is slow, since it builds the names of all values, and a dict for each
module. The tables of a module are the dicts and sets with its parameters, buffers, children and
hooks. If all modules inherit the ``state_dict()`` of ``nn.Module``, its result is the same as long
as their tables hold the same objects. A `ModuleTree` compares the tables in a few passes at the
speed of C, and calls no ``state_dict()``.

The items of a module or optimizer are the values that it saves. A part is one named parameter in a
tensor of a parameter group, and its piece is None unless the tensor has only a range or a box of
the parameter. A choice says which names are saved, and a loose parameter is one that no module of
the state holds.
"""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Generator, Iterable, Mapping, Sequence
from contextlib import contextmanager
from itertools import chain
from operator import attrgetter, is_, itemgetter, methodcaller
from typing import Any, Final, NamedTuple

import torch
from torch import nn
from torch.distributed.tensor import DTensor
from torch.optim import Optimizer

from ckpt.model.key_order import KeyOrder
from ckpt.model.patterns import Patterns
from ckpt.model.values import Node
from ckpt.state.tensors.declared import DeclaredPart, declarations
from ckpt.state.tensors.layout import PLAIN_CLASSES, is_plain
from ckpt.state.tensors.local_shards import TensorOrShards
from ckpt.state.walk.module_entries import ModuleItems, Part
from ckpt.state.walk.modules import (
    Parameters,
    check_owners,
    items_of,
    key_text,
    part_groups,
    raw_state,
    state_name,
)
from ckpt.state.walk.optimizer_state import LocalState
from ckpt.state.walk.segments import KnownDict, Segment
from ckpt.state.walk.stand_in import ModuleStandIn
from ckpt.state.walk.state_objects import Choice

_TABLES: Final = ("_parameters", "_buffers", "_modules", "_non_persistent_buffers_set")
_HOOKS: Final = ("_state_dict_hooks", "_state_dict_pre_hooks")
_METHODS: Final = ("state_dict", "_save_to_state_dict", "get_extra_state")
"""The methods by which a module may change the result of its ``state_dict()``."""
_TABLE_TYPES: Final = {dict, OrderedDict, set}

# Functions that ``map`` calls at the speed of C.
_attributes_of: Final = attrgetter("__dict__")
_tables_of: Final = itemgetter(*_TABLES, *_HOOKS)
_hooks_of: Final = itemgetter(*_HOOKS)
_has_no_method: Final = methodcaller("isdisjoint", _METHODS)
_methods_of: Final = attrgetter(*_METHODS)
_MODULE_METHODS: Final = _methods_of(nn.Module)
_values_of: Final = methodcaller("values")


class _KnownModule(NamedTuple):
    """A module as it was in the last walk.

    Attributes:
        module: The module.
        keys: The keys of its state dict.
        tensors: The values of its state dict; None if some of them are no tensors.
        parameters: Its parameters by name, some of which its state dict may not hold.
        parts: For each of ``tensors``, the part that ``ckpt.declare_part`` has declared it to be;
            None if there is no declaration.
        items: The items that it saves.
        tree: A record that tells whether the state dict is still the same. It is None if only a new
            call of ``state_dict()`` can tell.
    """

    module: nn.Module
    keys: tuple[str, ...]
    tensors: tuple[torch.Tensor, ...] | None
    parameters: Mapping[str, torch.Tensor]
    parts: Sequence[DeclaredPart | None]
    items: ModuleItems
    tree: ModuleTree | None

    def describes(self, module: nn.Module) -> bool:
        """Return True if ``module`` is the recorded module, and the recorded tensors still have the
        recorded declarations.
        """
        return self.module is module and self.parts == declarations(self.tensors or ())


class LastWalk:
    """The results of the last walk, so that the next walk need not examine unchanged parts of the
    state again.

    Thread safety:
        Only the training thread uses it.
    """

    def __init__(self) -> None:
        # All but the last one of these dicts have the path of a module, optimizer or dict as key.
        self.segments: dict[str, Segment] = {}
        self.logged_types: set[type] = set()
        """The classes of optimizers for which the log says why they are not copied late."""
        self.known_dicts: dict[str, KnownDict] = {}
        self.modules: dict[str, _KnownModule] = {}
        self.optimizers: dict[str, OptimizerItems] = {}
        self.module_versions: dict[str, tuple[ModuleItems, Node]] = {}
        """The items of each module, with the node of the versions in them."""
        self._choices: dict[Patterns, Choice] = {}

    def choice(self, patterns: Patterns) -> Choice:
        """Return the ``Choice`` of ``patterns``, the same object on every call."""
        return self._choices.setdefault(patterns, Choice(patterns))

    def items(self, path: str, module: nn.Module) -> ModuleItems:
        """Return the items that the module at ``path`` saves, as ``items_of`` does.

        The result is the same object as in the last walk if the module is the same object, its
        state dict has the same keys and tensor objects, and the declarations of these tensors are
        the same. A state dict with a value that is no tensor always counts as changed. A stand-in
        returns its own items.
        """
        if isinstance(module, ModuleStandIn):
            return module.items(path)
        record = self.modules.get(path)
        if record is not None and not record.describes(module):
            record = None
        if record is not None and record.tree is not None and record.tree.is_unchanged():
            return record.items
        state_dict = raw_state(path, module)
        keys, values = tuple(state_dict), tuple(state_dict.values())
        parameters = dict(module.named_parameters())
        if (
            record is None
            or record.keys != keys
            or record.tensors is None
            or not all(map(is_, record.tensors, values))
            or record.parameters.keys() != parameters.keys()
            or not all(map(is_, record.parameters.values(), parameters.values()))
        ):
            tensors = values if all(isinstance(value, torch.Tensor) for value in values) else None
            parts = declarations(tensors or ())
            items = items_of(path, module, state_dict)
            record = _KnownModule(module, keys, tensors, parameters, parts, items, tree=None)
        tree = tree_of(module) if record.tensors is not None else None
        self.modules[path] = record = record._replace(tree=tree)
        return record.items

    def name_chars(self, tree: Mapping[str, Node]) -> dict[str, float]:
        """Return the ``name_chars`` of each entry of ``tree`` that is the node of a known dict: the
        most characters that all names in the node may have together.
        """
        known_dicts = {
            id(known_dict.node): known_dict
            for known_dict in self.known_dicts.values()
            if known_dict.node
        }
        entries = ((key, known_dicts.get(id(node))) for key, node in tree.items())
        return {
            key: known_dict.name_chars
            for key, known_dict in (entries if known_dicts else ())
            if known_dict is not None
        }

    def forget(self) -> None:
        """Forget all results, and release all tensors."""
        self.segments.clear()
        self.known_dicts.clear()
        self.modules.clear()
        self.optimizers.clear()
        self.module_versions.clear()
        self._choices.clear()

    @contextmanager
    def forget_on_error(self) -> Generator[None]:
        """Return a context manager that calls ``forget`` if its block raises. The caller of the
        block may then give the state up, and build another one.
        """
        try:
            yield
        except BaseException:
            self.forget()
            raise


class StateStructure:
    """The parameters of an optimizer, and the keys and values of its state, in their order.

    A structure is made and compared in a few passes at the speed of C, since an optimizer may have
    thousands of values.

    Attributes:
        objects: The parameters of all groups, then the keys of the state, then the keys within the
            state of each parameter.
        sizes: The number of parameters in each group, then -1, then the number of values in the
            state of each parameter.
        values: The values of the state.
        kinds: The types of ``values``.
    """

    __slots__ = ("kinds", "objects", "sizes", "values")

    def __init__(
        self, groups: Sequence[Mapping[str, Any]], state: Mapping[Any, Mapping[Any, Any]]
    ) -> None:
        parameters = [group["params"] for group in groups]
        entries = list(state.values())
        self.objects = [*chain.from_iterable(parameters), *state, *chain.from_iterable(entries)]
        self.sizes = [*map(len, parameters), -1, *map(len, entries)]
        self.values: list[Any] = list(chain.from_iterable(map(_values_of, entries)))
        self.kinds = list(map(type, self.values))

    def is_as(self, structure: StateStructure, tensor_indices: Iterable[int]) -> bool:
        """Return True if this structure is the same as ``structure``.

        The values of the state at ``tensor_indices`` must be the same objects. All other
        values need only have the same types.
        """
        if self.sizes != structure.sizes or self.kinds != structure.kinds:
            return False
        own_values, values = self.values, structure.values
        return all(map(is_, self.objects, structure.objects)) and all(
            map(
                is_,
                map(own_values.__getitem__, tensor_indices),
                map(values.__getitem__, tensor_indices),
            )
        )


def _plain_keys(
    owners: Sequence[tuple[Part, object, TensorOrShards]], tensors: Sequence[TensorOrShards]
) -> tuple[str, ...]:
    """Return the keys of an optimizer's state whose tensors are all plain although their parameters
    are DTensors. A tensor without a dimension does not count, since a restore makes it plain in any
    case.

    ``owners`` has for each of ``tensors`` the part that it belongs to, its key, and the parameter.
    """
    keys_by_plainness: dict[bool, set[str]] = {True: set(), False: set()}
    for (_, key, parameter), tensor in zip(owners, tensors, strict=True):
        if isinstance(parameter, DTensor) and tensor.shape:
            keys_by_plainness[is_plain(tensor)].add(key_text(key))
    return tuple(sorted(keys_by_plainness[True] - keys_by_plainness[False]))


class OptimizerItems:
    """The names of the values of an optimizer's state.

    Attributes:
        names: For each parameter group, the paths of its parameters that are saved.
        owners: For each item of ``tensors``, the part of a parameter that it belongs to, its key in
            the state, and the parameter.
        tensors: The tensors of the state. A tensor that has several names occurs once for each.
        value_items: For each value of the state that is not a tensor, its index in
            ``StateStructure.values`` and its name.
        key_order_node: The node of the order of the parameters in the state, and of the keys of
            each.
        plain_keys: The keys whose tensors are plain though their parameters are ``DTensor``
            objects, as ``key_text`` gives them, sorted.
        are_plain: True if each tensor is exactly a ``torch.Tensor`` or an ``nn.Parameter``.
    """

    __slots__ = (
        "_choice",
        "_items",
        "_loose",
        "_own_ids",
        "_structure",
        "_tensor_indices",
        "are_plain",
        "key_order_node",
        "names",
        "owners",
        "plain_keys",
        "tensors",
        "value_items",
    )

    def __init__(
        self,
        path: str,
        optimizer: Optimizer,
        local_state: LocalState,
        parameters: Parameters,
        structure: StateStructure,
        choice: Choice,
    ) -> None:
        check_owners(path, optimizer)
        self._structure, self._own_ids, self._choice = structure, local_state.own_ids, choice
        self._items, self._loose = parameters.items, dict(parameters.loose)
        self._tensor_indices = [
            index
            for index, value in enumerate(structure.values)
            if isinstance(value, TensorOrShards)
        ]
        self.names: list[list[str]] = []
        self.owners: list[tuple[Part, object, TensorOrShards]] = []
        self.tensors: list[TensorOrShards] = []
        self.value_items: list[tuple[int, str]] = []
        keys_by_path: dict[str, tuple[str, ...]] = {}
        first_index_by_path: dict[str, int] = {}
        # The index in ``StateStructure.values`` of the first value of each parameter
        first_index_by_id, value_count = dict[int, int](), 0
        for parameter, values in local_state.by_parameter.items():
            first_index_by_id[id(parameter)] = value_count
            value_count += len(values)
        groups = part_groups(optimizer, parameters)
        for group, all_parts in zip(optimizer.param_groups, groups, strict=True):
            group_parts = [
                [part for part in parts if choice.takes(f"{path}/{part.path}", part.path)]
                for parts in all_parts
            ]
            self.names.append([part.path for parts in group_parts for part in parts])
            for parameter, parts in zip(group["params"], group_parts, strict=True):
                values = local_state.by_parameter.get(parameter, {})
                keys = tuple(map(key_text, values))
                first_index = first_index_by_id.get(id(parameter), 0)
                keys_by_path |= {part.path: keys for part in parts if keys}
                first_index_by_path |= {part.path: first_index for part in parts}
                for index, (key, value) in enumerate(values.items(), first_index):
                    for part in parts:
                        if part.piece is not None and not part.keeps(value):
                            continue
                        if isinstance(value, TensorOrShards):
                            self.owners.append((part, key, parameter))
                            self.tensors.append(value)
                        else:
                            self.value_items.append((index, state_name(path, part.path, key)))
        self.key_order_node = KeyOrder.of(
            keys_by_path, sorted(keys_by_path, key=first_index_by_path.__getitem__)
        ).node()
        self.plain_keys = _plain_keys(self.owners, self.tensors)
        self.are_plain = PLAIN_CLASSES.issuperset(map(type, self.tensors))

    def describes(
        self,
        local_state: LocalState,
        parameters: Parameters,
        structure: StateStructure,
        choice: Choice,
    ) -> bool:
        """Return True if this record still describes the optimizer, whose structure is
        ``structure``.

        All tensors must be the same objects, and all other values must have the same keys and
        types. These must be the same too: ``choice``, the items of the modules, the paths of the
        parameters outside of modules, and the parameters whose state this rank keeps.
        """
        return (
            self._choice is choice
            and self._items == parameters.items
            and self._loose == parameters.loose
            and self._own_ids == local_state.own_ids
            and structure.is_as(self._structure, self._tensor_indices)
        )


class ModuleTree:
    """A record of a module, all modules inside of it, and the contents of their tables.

    Thread safety:
        Only the training thread uses it.
    """

    __slots__ = (
        "_attributes",
        "_classes",
        "_contents",
        "_dicts",
        "_module_types",
        "_modules",
        "_names",
        "_sizes",
        "_tables",
        "_values",
    )

    def __init__(self, module: nn.Module) -> None:
        """Record the tables of ``module`` and of the modules inside of it.

        Raises:
            KeyError: A module lacks a table.
        """
        self._modules = _modules_of(module)
        self._module_types = list(map(type, self._modules))
        self._classes = frozenset(self._module_types)
        self._attributes = list(map(_attributes_of, self._modules))
        self._tables: list[Any] = list(chain.from_iterable(map(_tables_of, self._attributes)))
        self._sizes = list(map(len, self._tables))
        # Most tables are empty, and ``_sizes`` shows whether they stay empty. The contents of only
        # the other tables are compared.
        self._contents = [table for table in self._tables if table]
        self._dicts = [table for table in self._contents if not isinstance(table, set)]
        self._names = list(chain.from_iterable(self._contents))
        self._values = list(chain.from_iterable(map(_values_of, self._dicts)))

    def is_usual(self) -> bool:
        """Return True if all modules inherit their ``state_dict()``, have no hooks for it, and have
        tables of the usual types. Only then the result of ``is_unchanged`` is meaningful.
        """
        hooks = chain.from_iterable(map(_hooks_of, self._attributes))
        return (
            self._inherits() and _TABLE_TYPES.issuperset(map(type, self._tables)) and not any(hooks)
        )

    def is_unchanged(self) -> bool:
        """Return True if the tables hold the same objects as when they were recorded, so that
        ``state_dict()`` returns the same result as then.
        """
        try:
            return (
                all(map(is_, map(type, self._modules), self._module_types))
                and all(map(is_, map(_attributes_of, self._modules), self._attributes))
                and all(
                    map(is_, chain.from_iterable(map(_tables_of, self._attributes)), self._tables)
                )
                and list(map(len, self._tables)) == self._sizes
                and all(map(is_, chain.from_iterable(self._contents), self._names))
                and all(map(is_, chain.from_iterable(map(_values_of, self._dicts)), self._values))
                and self._inherits()
            )
        except KeyError:
            return False

    def _inherits(self) -> bool:
        """Return True if no class and no module overrides a method in ``_METHODS``."""
        return all(_methods_of(kind) == _MODULE_METHODS for kind in self._classes) and all(
            map(_has_no_method, map(dict.keys, self._attributes))
        )


def _modules_of(module: nn.Module) -> list[nn.Module]:
    """Return ``module`` and all modules inside of it that ``state_dict()`` visits, each once.

    ``Module.modules()`` is not used, since a class may override it.
    """
    modules = {id(module): module}
    stack = [module]
    while stack:
        children = stack.pop()._modules.values()
        new_children = {
            id(child): child for child in children if child is not None and id(child) not in modules
        }
        modules |= new_children
        stack += new_children.values()
    return list(modules.values())


def tree_of(module: nn.Module) -> ModuleTree | None:
    """Return the record of ``module`` and the modules inside of it. Return None if one of them
    overrides its ``state_dict()``, has a hook for it, or has unusual tables.
    """
    try:
        tree = ModuleTree(module)
    except KeyError:  # A module lacks one of the tables of ``nn.Module``
        return None
    return tree if tree.is_usual() else None
