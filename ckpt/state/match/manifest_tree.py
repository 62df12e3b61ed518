"""Convert a manifest to a nested state of plain containers, for exports and integrations. The
caller decides which objects represent the tensors in the state.

A module becomes an ``OrderedDict`` whose keys are canonical names, and which has the versions of
the modules inside as an attribute, as ``Module.state_dict`` gives them. An optimizer becomes
``{"state": ..., "param_groups": ...}``. Its parameters have numbers, as in
``Optimizer.state_dict``, or names, as in ``torch.distributed.checkpoint``.

A node is a saved value in the manifest's tree (see ``match.saved_nodes``). A wrapper tensor is one
whose elements are in other tensors.

Each ``_convert`` method returns ``_ABSENT`` if no name in its value is included, and the
``_included`` methods leave such values out of their containers.
"""

from __future__ import annotations

from collections import Counter, OrderedDict
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from fnmatch import fnmatchcase
from functools import partial
from itertools import count
from typing import Any, Final

import numpy as np

from ckpt.errors import ManifestCorrupt
from ckpt.model.key_order import KeyOrder, in_order
from ckpt.model.manifest import Manifest
from ckpt.model.values import (
    VERSIONS,
    Node,
    check_structure,
    decode,
    join,
    names_below,
    parse,
    unescape,
)
from ckpt.state.match.plain_values import torch_value
from ckpt.state.walk.module_entries import FIRST_VERSION

MakeTensor = Callable[[str], Any]
"""A function that returns the object to represent the tensor with the given name."""

_ABSENT: Final = object()
_MAPPINGS: Final[dict[str, type]] = {"dict": dict, "OrderedDict": OrderedDict, "Counter": Counter}


@dataclass(slots=True)
class Notes:
    """The differences between the checkpoint and its conversion, as pairs of a name and a reason.

    Attributes:
        changes: The names whose values are in another form in the conversion.
        left_out: The names that the conversion lacks.
    """

    changes: list[tuple[str, str]] = field(default_factory=list[tuple[str, str]])
    left_out: list[tuple[str, str]] = field(default_factory=list[tuple[str, str]])


def is_selected(name: str, globs: Sequence[str]) -> bool:
    """Return True if one of ``globs`` matches ``name``, or if ``globs`` is empty."""
    return not globs or any(fnmatchcase(name, glob) for glob in globs)


class StateTree:
    """Builds the nested state of a manifest.

    Args:
        manifest: The manifest.
        make: Returns the object to represent a tensor, by the tensor's name.
        globs: The patterns of the names to include; empty for all names. Containers that would have
            no values are left out.
        by_name: True if the parameters of optimizers have names, and False if they have numbers.
        safe: True to make only values that ``torch.load(..., weights_only=True)`` accepts: NumPy
            scalars become Python numbers, and frozensets become sets.
        parameter_names: True to give a parameter group the names of its parameters if these have
            numbers. An optimizer that loads them takes no group without names any more.

    Attributes:
        notes: The differences between the checkpoint and the nested state.
    """

    def __init__(
        self,
        manifest: Manifest,
        make: MakeTensor,
        globs: Sequence[str],
        *,
        by_name: bool,
        safe: bool = True,
        parameter_names: bool = True,
    ) -> None:
        self._manifest, self._make, self._globs = manifest, make, globs
        self._by_name, self._safe = by_name, safe
        self._adds_names = parameter_names and not by_name
        self._names = sorted(manifest.tensor_map())
        self._module_paths: list[str] = []
        self.notes = Notes()

    def build(self) -> dict[str, Any]:
        """Return the nested state; empty if no name is included.

        Raises:
            ManifestCorrupt: The tree is not one that ckpt writes.
            FormatUnsupported: The tree has a dtype as a value, and this torch lacks the dtype.
        """
        tree = parse(self._manifest.tree)
        if not isinstance(tree, dict):
            raise ManifestCorrupt("tree", "it is not an object")
        with check_structure("tree"):
            self._module_paths = sorted(_find_modules(tree, ""), key=len, reverse=True)
            state = self._convert(tree, "")
        if state is _ABSENT:
            return {}
        if not isinstance(state, dict):
            raise ManifestCorrupt("tree", "it is not that of a dict")
        return state

    def _convert(self, node: Node, path: str) -> Any:
        """Return the value of a node in the nested state; ``_ABSENT`` if nothing is included."""
        match node:
            case list():
                return self._included_items(
                    [self._convert(item, join(path, str(i))) for i, item in enumerate(node)], path
                )
            case {"$": str(tag)}:
                return self._convert_tagged(tag, node, path)
            case dict():
                return self._included_mapping(
                    {key: self._convert(item, join(path, key)) for key, item in node.items()}, path
                )
            case _:
                return self._convert_plain(node, path)

    def _convert_tagged(self, tag: str, node: Mapping[str, Node], path: str) -> Any:
        """Do the work of ``_convert`` for a node with ``tag``."""
        match tag:
            case "tensor":
                return self._convert_tensor(node["n"])
            case "array":
                return self._convert_tensor(node["n"], former_kind="a NumPy array")
            case "subclass":
                return self._convert_wrapper(node, path)
            case "module":
                return self._convert_module(node, path)
            case "optimizer":
                return self._convert_optimizer(node, path)
            case "object":
                return self._convert(node["v"], path)
            case "per_rank":
                return self._convert_per_rank(path)
            case "dict" | "OrderedDict" | "Counter":
                converted_items = {
                    key: self._convert(item, join(path, key))
                    for key, item in ((decode(key, torch_value), item) for key, item in node["v"])
                }
                mapping = self._included_mapping(converted_items, path, _MAPPINGS[tag])
                # A state dict has an attribute with module versions, which is under "m".
                if "m" in node and isinstance(mapping, OrderedDict):
                    versions = self._convert(node["m"], join(path, VERSIONS))
                    vars(mapping).update({} if versions is _ABSENT else {VERSIONS: versions})
                return mapping
            case "tuple":
                items = self._included_items(
                    [self._convert(item, join(path, str(i))) for i, item in enumerate(node["v"])],
                    path,
                )
                return items if items is _ABSENT else tuple(items)
            case _:
                return self._convert_plain(decode(node, torch_value), path)

    # -- leaves ------------------------------------------------------------------------------------

    def _convert_tensor(self, name: str, former_kind: str = "") -> Any:
        """Return the object that represents a tensor. ``former_kind`` says what the value was in
        the state if it was no tensor.
        """
        if not is_selected(name, self._globs):
            return _ABSENT
        if former_kind:
            self.notes.changes.append((name, f"{former_kind}: a tensor now"))
        return self._make(name)

    def _convert_wrapper(self, node: Mapping[str, Node], path: str) -> Any:
        """Return a wrapper tensor as a dict of the tensors inside of it."""
        inner = {key: self._convert(item, join(path, key)) for key, item in node["inner"].items()}
        tensors = self._included_mapping(inner, path)
        if tensors is not _ABSENT:
            change = f"a {node['class']}: a dict of the tensors inside of it now"
            self.notes.changes.append((path, change))
        return tensors

    def _convert_plain(self, value: Any, path: str) -> Any:
        """Return a plain value; ``_ABSENT`` if it is not included."""
        if not is_selected(path, self._globs):
            return _ABSENT
        if self._safe and isinstance(value, np.generic):
            self.notes.changes.append(
                (path, f"a NumPy {value.dtype}: a Python {type(value.item()).__name__} now")
            )
            return value.item()
        if self._safe and isinstance(value, frozenset):
            self.notes.changes.append((path, "a frozenset: a set now"))
            return set(value)
        return value

    def _included_items(self, items: list[Any], path: str) -> Any:
        """Return the ``items`` that are included; ``_ABSENT`` if a list has none any more."""
        present = [item for item in items if item is not _ABSENT]
        return present if present or (not items and is_selected(path, self._globs)) else _ABSENT

    def _included_mapping(self, items: Mapping[Any, Any], path: str, kind: type = dict) -> Any:
        """Return the ``items`` that are included; ``_ABSENT`` if a dict has none any more."""
        present = {key: item for key, item in items.items() if item is not _ABSENT}
        return (
            kind(present) if present or (not items and is_selected(path, self._globs)) else _ABSENT
        )

    def _convert_per_rank(self, path: str) -> Any:
        """Return the ``PerRank`` value at ``path`` as a list of the values of all ranks."""
        values: list[Any] = []
        for rank in range(self._manifest.world_size):
            tree = parse(self._manifest.per_rank[str(rank)], "per_rank")
            values.append(self._convert(tree[path], path))
        items = self._included_items(values, path)
        if items is not _ABSENT:
            ranks = "each rank" if len(values) == 1 else f"each of {len(values)} ranks"
            self.notes.changes.append((path, f"a value of {ranks}: a list now"))
        return items

    # -- modules and optimizers --------------------------------------------------------------------

    def _convert_module(self, node: Mapping[str, Node], path: str) -> Any:
        """Return a module as its state dict."""
        values: Mapping[str, Node] = node["values"]
        inner_names = {  # The tensors inside of an extra state, which are no entries of the module
            inner for fqn in values for inner in names_below(self._names, f"{path}/{fqn}")
        }
        entries = {
            name[len(path) + 1 :]: self._convert_tensor(name)
            for name in names_below(self._names, path)
            if name not in inner_names
        }
        entries |= {fqn: self._convert(item, f"{path}/{fqn}") for fqn, item in values.items()}
        mapping = self._included_mapping(entries, path, OrderedDict)
        if isinstance(mapping, OrderedDict) and "versions" in node:
            versions = decode(node["versions"], torch_value)
            vars(mapping)[VERSIONS] = {
                name: dict(versions.get(name, FIRST_VERSION))
                for name in sorted({*_module_names(mapping), *versions})
            }
        return mapping

    def _convert_optimizer(self, node: Mapping[str, Node], path: str) -> Any:
        """Return an optimizer as its state dict.

        The id of a parameter is its name or its number in this state dict. ``order`` is the saved
        order of the parameters in the state, and of the keys in the state of each.
        """
        value_nodes: Mapping[str, Node] = node["state"]  # Of the values that are no tensors
        state: dict[Any, Any] = {}
        groups: list[Any] = []
        id_by_parameter: dict[str, Any] = {}
        numbers, value_names = count(), sorted(value_nodes)
        order = KeyOrder.from_node(node)
        for index, group in enumerate(node["groups"]):
            ids: list[Any] = []
            short_names = [self._parameter_name(parameter) for parameter in group["params"]]
            for parameter, name, number in zip(group["params"], short_names, numbers, strict=False):
                ids.append(name if self._by_name else number)
                prefix = f"{path}/{parameter}"
                entries: dict[str | int, Any] = {
                    unescape(full_name[len(prefix) + 1 :]): self._convert_tensor(full_name)
                    for full_name in names_below(self._names, prefix)
                    if "/" not in full_name[len(prefix) + 1 :]
                }
                entries |= {
                    unescape(full_name[len(prefix) + 1 :]): self._convert(
                        value_nodes[full_name], full_name
                    )
                    for full_name in names_below(value_names, prefix)
                }
                keys = in_order(entries, order.of_parameter(parameter), partial(join, ""))
                entry = self._included_mapping({key: entries[key] for key in keys}, path)
                if entry is not _ABSENT and entry:
                    state[ids[-1]] = entry
                    id_by_parameter[parameter] = ids[-1]
            values = self._convert(group["values"], f"{path}/param_groups/{index}")
            name_list = {"param_names": short_names} if self._adds_names else {}
            if values is not _ABSENT:
                groups.append({**values, "params": ids, **name_list})
        state = {
            id_by_parameter[parameter]: state[id_by_parameter[parameter]]
            for parameter in in_order(id_by_parameter, order.parameters, str)
        }
        if not state and not groups:
            return _ABSENT
        optimizer = {"state": state, "param_groups": groups} if groups else {"state": state}
        settings = self._convert(node.get("values", {}), f"{path}/values")
        return optimizer if settings is _ABSENT else {**optimizer, **settings}

    def _parameter_name(self, path: str) -> str:
        """Return the name of a parameter within its module if the state has only one module, else
        its path.
        """
        if len(self._module_paths) == 1 and path.startswith(f"{self._module_paths[0]}/"):
            return path[len(self._module_paths[0]) + 1 :]
        return path


def _module_names(fqns: Iterable[str]) -> set[str]:
    """Return the names of the modules that the entries ``fqns`` are in, at any depth."""
    parts = [fqn.split(".")[:-1] for fqn in fqns]
    return {".".join(names[:depth]) for names in parts for depth in range(len(names) + 1)}


def _find_modules(node: Node, path: str) -> list[str]:
    """Return the paths of the saved modules in ``node``, which is at ``path``."""
    match node:
        case {"$": "module"}:
            return [path]
        case {"$": _}:
            return []
        case dict():
            return [
                module_path
                for key, item in node.items()
                for module_path in _find_modules(item, join(path, key))
            ]
        case list():
            return [
                module_path
                for i, item in enumerate(node)
                for module_path in _find_modules(item, join(path, str(i)))
            ]
        case _:
            return []
