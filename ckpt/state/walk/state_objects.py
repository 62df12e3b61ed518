"""Find modules, optimizers, tensors and objects with a ``state_dict()`` in the dicts, lists and
tuples of a state, and choose those that a save writes.

A stand-in is an object that takes the place of a module or optimizer of a framework. A value is
plain if it has no tensors and objects inside. A walk over a value takes exponential time if its
containers hold the same containers many times, level by level.
"""

from __future__ import annotations

import sys
from collections import OrderedDict
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from itertools import chain
from typing import Any, Final

import torch
from torch import nn
from torch.optim import Optimizer

from ckpt.errors import UnsupportedValue
from ckpt.model.patterns import WHOLE, Patterns, left_out
from ckpt.model.values import PlainNode, check_bounded, check_name, join, plain_node
from ckpt.model.values_by_level import is_bounded, is_plain
from ckpt.state.tensors.layout import PLAIN_CLASSES
from ckpt.state.walk.stand_in import StandIn

_MAX_DEPTH: Final = 100
_VALUE_TYPES: Final[frozenset[type]] = frozenset(
    {int, float, str, bool, type(None), bytes, bytearray, complex, set, frozenset}
)
"""Types whose values contain no tensor."""
_LEAF_TYPES: Final[frozenset[type]] = _VALUE_TYPES | PLAIN_CLASSES
"""Types whose values contain no module, optimizer or other object."""


def is_stateful(value: object) -> bool:
    """Return True if ``value`` has the methods ``state_dict`` and ``load_state_dict``."""
    return callable(getattr(value, "state_dict", None)) and callable(
        getattr(value, "load_state_dict", None)
    )


def inherits_stateful(value: object) -> bool:
    """Return True if the class of ``value`` inherits from torch's ``Stateful`` (of
    ``torch.distributed.checkpoint``) and is no ``nn.Module``.

    The ``state_dict()`` of such an object returns the tensors that the object itself uses. A
    restore fills these tensors in place, and then passes the dict to ``load_state_dict()``.
    Examples are ``ModelWrapper`` and ``OptimizersContainer`` of torchtitan.
    """
    api = sys.modules.get("torch.distributed.checkpoint.stateful")
    return (
        api is not None and api.Stateful in type(value).__mro__ and not isinstance(value, nn.Module)
    )


def has_only_values(value: object) -> bool:
    """Return True if ``value`` is a value without tensors and objects, such as a number, or if all
    values in its lists, tuples and dicts are. These are looked at level by level, at the speed of
    C.
    """
    return is_plain(value, _VALUE_TYPES, _MAX_DEPTH)


def refresh_stand_ins(objects: Sequence[tuple[str, Any]]) -> None:
    """Bring each stand-in among ``objects`` up to date with the object that it stands for. Call
    this before any other use of the stand-ins.
    """
    for _, value in objects:
        if isinstance(value, StandIn):
            value.refresh()


def refuse_fake_mode(state: Mapping[str, Any], objects: Sequence[tuple[str, Any]]) -> None:
    """Raise ``UnsupportedValue`` if ``FakeTensorMode`` is active, and the state has a tensor in a
    module, optimizer, dict, list or tuple. In this mode, tensors have no data.

    ``objects`` are the modules and optimizers of ``state``, with their paths.
    """
    # In this mode, even a tensor on the CPU has a storage on the meta device.
    if torch.empty(0, device="cpu").untyped_storage().device.type != "meta":
        return
    modules = (
        join(path, name)
        for path, value in objects
        if isinstance(value, nn.Module)
        for name, _ in chain(value.named_parameters(), value.named_buffers())
    )
    optimizers = (path for path, value in objects if isinstance(value, Optimizer))
    tensors = (path for path, _ in walk_tensors(state))
    if name := next(chain(modules, optimizers, tensors), None):
        raise UnsupportedValue(
            name, "tensor under FakeTensorMode", "leave the mode before you save or restore"
        )


@dataclass(frozen=True, slots=True)
class StateView:
    """A state, with the nodes of its large plain values.

    A save looks at each of these values only once.

    Attributes:
        state: The state.
        plain_entries: The nodes of those lists, tuples and mappings of ``state`` that are plain, by
            their names.
        live: The entries of ``state`` in which a walk may find something (see ``without_plain``).
    """

    state: Mapping[str, Any]
    plain_entries: Mapping[str, PlainNode]
    live: Any

    @classmethod
    def of(cls, state: Mapping[str, Any]) -> StateView:
        """Return the view of ``state``."""
        if not isinstance(state, Mapping):
            return cls(state, {}, state)
        nodes = {key: plain_node(item, key) for key, item in state.items() if isinstance(key, str)}
        plain = {key: node for key, node in nodes.items() if node is not None}
        live = without_plain({key: item for key, item in state.items() if key not in plain})
        return cls(state, plain, live)


def without_plain(state: Any) -> Any:
    """Return the entries of ``state`` in which a walk may find something. Two walks over these are
    faster than two over the state, which may have a large value without any tensor. Entries for
    which a walk would take exponential time, and which ``encode`` refuses, are left out too.
    """
    if not isinstance(state, Mapping):
        return state
    entries = {key: item for key, item in state.items() if not has_only_values(item)}
    return {key: item for key, item in entries.items() if is_bounded(item, _MAX_DEPTH)}


def named_entries(state: Mapping[str, Any]) -> Iterator[tuple[str, Any]]:
    """Yield the names and values of ``state``.

    Raises:
        UnsupportedValue: A key is no name.
    """
    for key, value in state.items():
        if not isinstance(key, str) or not key or key.startswith("$"):
            raise UnsupportedValue(
                repr(key), "key of the state", "use non-empty strings that do not begin with '$'"
            )
        check_name(key, join("", key))
        yield key, value


def check_walk_times(state: Mapping[str, Any]) -> None:
    """Raise ``UnsupportedValue`` if a walk over a value of ``state`` would take exponential
    time.
    """
    for key, item in state.items():
        check_bounded(item, join("", key))


def has_optimizer(state: object) -> bool:
    """Return True if there is an optimizer in ``state``."""
    return any(isinstance(value, Optimizer) for _, value in walk_objects(state))


def walk_objects(value: Any, path: str = "", depth: int = 0) -> Iterator[tuple[str, Any]]:
    """Yield the path and the object of each module and optimizer in the dicts, lists and tuples of
    a state, except those for which ``inherits_stateful`` is True.
    """
    if isinstance(value, nn.Module | Optimizer):
        if not inherits_stateful(value):
            yield path, value
    elif isinstance(value, Mapping) and depth < _MAX_DEPTH:
        for key, item in value.items():
            if not is_plain(item, _LEAF_TYPES, _MAX_DEPTH):
                yield from walk_objects(item, join(path, key), depth + 1)
    elif isinstance(value, list | tuple) and depth < _MAX_DEPTH:
        for index, item in enumerate(value):
            if not is_plain(item, _LEAF_TYPES, _MAX_DEPTH):
                yield from walk_objects(item, join(path, index), depth + 1)


def walk_tensors(value: Any, path: str = "", depth: int = 0) -> Iterator[tuple[str, torch.Tensor]]:
    """Yield the path and the object of each tensor in the dicts, lists and tuples of a state. The
    tensors of modules, optimizers and other objects are not among them.
    """
    if isinstance(value, torch.Tensor):
        yield path, value
    elif isinstance(value, Mapping) and depth < _MAX_DEPTH:
        for key, item in value.items():
            if not has_only_values(item):
                yield from walk_tensors(item, join(path, key), depth + 1)
    elif isinstance(value, list | tuple) and depth < _MAX_DEPTH:
        for index, item in enumerate(value):
            if not has_only_values(item):
                yield from walk_tensors(item, join(path, index), depth + 1)


class Choice:
    """A choice of a part of a state by ``patterns``. It remembers the decision for each name, and
    the patterns that have matched a name.

    Dicts, modules and optimizers may be saved in part. Any other value is saved as a whole or not
    at all.

    Thread safety:
        Only the training thread uses it.
    """

    def __init__(self, patterns: Patterns) -> None:
        self._patterns = patterns
        self._decisions: dict[str, bool] = {}
        self._matched_patterns: set[str] = set()

    @property
    def idle_patterns(self) -> tuple[str, ...]:
        """The patterns that have matched no name."""
        patterns = (*(self._patterns.only or ()), *self._patterns.exclude)
        return tuple(pattern for pattern in patterns if pattern not in self._matched_patterns)

    @property
    def left_out(self) -> dict[str, Any]:
        """The patterns in the form in which the manifest's metadata keeps them; empty if the whole
        state is saved.
        """
        return left_out(self._patterns, self._matched_patterns)

    def takes(self, name: str, parameter: str = "") -> bool:
        """Return True if ``name`` is saved.

        If ``name`` names the state that an optimizer keeps for a parameter, ``parameter`` is the
        name of this parameter. If the parameter is excluded, its state is not saved either.
        """
        if self._patterns is WHOLE:
            return True
        if (decision := self._decisions.get(name)) is None:
            self._matched_patterns.update(self._patterns.matches(name))
            decision = self._patterns.takes(name) and not self._patterns.excludes(parameter)
            self._decisions[name] = decision
        return decision

    def part_of(self, state: Mapping[Any, Any], path: str = "") -> Mapping[Any, Any]:
        """Return ``state``, the dict at ``path``, without the values that are not saved.

        A module or optimizer stays in the result if the patterns reach a value inside of it. The
        walk then calls ``takes`` for each of its values.
        """
        if self._patterns is WHOLE:
            return state
        part: dict[Any, Any] = {}
        if type(state) is OrderedDict:
            part = OrderedDict()
            vars(part).update(vars(state))  # A state dict has an attribute with module versions
        for key, value in state.items():
            name = join(path, key)
            is_taken = self.takes(name)
            if self._patterns.excludes(name) or not (is_taken or self._patterns.reaches(name)):
                continue
            if isinstance(value, nn.Module | Optimizer) and not inherits_stateful(value):
                part[key] = value
            elif isinstance(value, dict) and type(value) in (dict, OrderedDict):
                inner_part = self.part_of(value, name)
                if inner_part or is_taken:
                    part[key] = inner_part
            elif is_taken:
                part[key] = value
        return part
