"""Detect whether the ``state_dict()`` of a module has changed, without a call of the method.

A call of ``state_dict()`` is slow, since it builds the names of all values, and a dict for each
module. The tables of a module are the dicts and sets with its parameters, buffers, children and
hooks. If all modules inherit the ``state_dict()`` of ``nn.Module``, its result is the same as long
as their tables hold the same objects. A ``ModuleTree`` compares the tables in a few passes at the
speed of C.
"""

from __future__ import annotations

from collections import OrderedDict
from itertools import chain
from operator import attrgetter, is_, itemgetter, methodcaller
from typing import Any, Final

from torch import nn

_TABLES: Final = ("_parameters", "_buffers", "_modules", "_non_persistent_buffers_set")
_HOOKS: Final = ("_state_dict_hooks", "_state_dict_pre_hooks")
_METHODS: Final = ("state_dict", "_save_to_state_dict", "get_extra_state")
"""The methods by which a module may change the result of its ``state_dict()``."""
_KINDS: Final = {dict, OrderedDict, set}

_attributes: Final = attrgetter("__dict__")
_tables: Final = itemgetter(*_TABLES, *_HOOKS)
_hooks: Final = itemgetter(*_HOOKS)
_values: Final = methodcaller("values")
_has_no_method: Final = methodcaller("isdisjoint", _METHODS)
_methods: Final = attrgetter(*_METHODS)
_MODULE_METHODS: Final = _methods(nn.Module)


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
        "_kinds",
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
        self._kinds = list(map(type, self._modules))
        self._classes = frozenset(self._kinds)
        self._attributes = list(map(_attributes, self._modules))
        self._tables: list[Any] = list(chain.from_iterable(map(_tables, self._attributes)))
        self._sizes = list(map(len, self._tables))
        # Most tables are empty, and ``_sizes`` shows whether they stay empty. The contents of only
        # the other tables are compared.
        self._contents = [table for table in self._tables if table]
        self._dicts = [table for table in self._contents if not isinstance(table, set)]
        self._names = list(chain.from_iterable(self._contents))
        self._values = list(chain.from_iterable(map(_values, self._dicts)))

    def is_usual(self) -> bool:
        """Return True if all modules inherit their ``state_dict()``, have no hooks for it, and have
        tables of the usual types. Only then the result of ``is_unchanged`` is meaningful.
        """
        hooks = chain.from_iterable(map(_hooks, self._attributes))
        return self._inherits() and _KINDS.issuperset(map(type, self._tables)) and not any(hooks)

    def is_unchanged(self) -> bool:
        """Return True if the tables hold the same objects as when they were recorded, so that
        ``state_dict()`` returns the same result as then.
        """
        try:
            return (
                all(map(is_, map(type, self._modules), self._kinds))
                and all(map(is_, map(_attributes, self._modules), self._attributes))
                and all(map(is_, chain.from_iterable(map(_tables, self._attributes)), self._tables))
                and list(map(len, self._tables)) == self._sizes
                and all(map(is_, chain.from_iterable(self._contents), self._names))
                and all(map(is_, chain.from_iterable(map(_values, self._dicts)), self._values))
                and self._inherits()
            )
        except KeyError:
            return False

    def _inherits(self) -> bool:
        """Return True if no class and no module overrides a method in ``_METHODS``."""
        return all(_methods(kind) == _MODULE_METHODS for kind in self._classes) and all(
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
        fresh = {
            id(child): child for child in children if child is not None and id(child) not in modules
        }
        modules |= fresh
        stack += fresh.values()
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
