"""Find the nodes and the tensors of a checkpoint by their names.

A node is a saved value in the manifest's tree. The node of a number, a string, a list or a plain
dict is that value. Any other node is a dict, whose tag under "$" says what it is. It has its
content under "v", or the name of its tensor under "n". An entry is an item of a module's state
dict.
"""

from __future__ import annotations

from bisect import bisect_left
from collections.abc import Collection, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Final

from ckpt.errors import ManifestCorrupt
from ckpt.model.key_order import KeyOrder, in_order
from ckpt.model.manifest import Manifest, Tensor
from ckpt.model.patterns import patterns_of
from ckpt.model.values import Node, decode, join, names_below, parse
from ckpt.state.match.plain_values import torch_value
from ckpt.state.match.saved_optimizer import read_dict

ABSENT: Final = object()
"""Represents a node that does not exist. None cannot do so, since it is the node of the value None.
"""

EQUAL: Final = "imported_equal"
"""The key of a dict in the metadata of an imported checkpoint: the name of a tensor -> the name of
one that is equal to it to the bit.
"""

_MAPPINGS: Final = ("dict", "OrderedDict", "Counter")


@dataclass(frozen=True, slots=True)
class SavedParameter:
    """The settings and values of a saved optimizer for one parameter.

    Attributes:
        settings: The settings of the parameter's group.
        values: The nodes of those values of the parameter's state that are not tensors, by their
            full names.
        keys: The keys of the parameter's state in their order, each as the text that stands for it
            in a name. It may have keys that the parameter does not have.
        plain_keys: The keys whose tensors were plain on every sharded parameter, in the same form.
        place: The place of the parameter among those of the state.
    """

    settings: Node
    values: Mapping[str, Node]
    keys: Sequence[str] = ()
    plain_keys: Collection[str] = ()
    place: int = 0


class SavedState:
    """The tree and the tensors of a manifest.

    Attributes:
        manifest: The manifest.
        tensors: The tensors of the manifest, by their names.
        names: The names of the tensors, sorted.

    ``_per_rank_nodes`` has the content of each ``PerRank`` value that ``set_per_rank_node`` was
    called for. ``_stored_names`` maps the names of tensors in dicts that ``read_optimizer_dict``
    has replaced to their stored names. ``_patterns`` are the patterns by which the save left names
    out.

    Raises:
        ManifestCorrupt, LookupError, TypeError, ValueError, AttributeError: Any method may raise
            one of these if the tree is not one that ckpt writes.

    Thread safety:
        Only one thread may use it at a time.
    """

    def __init__(self, manifest: Manifest) -> None:
        self.manifest = manifest
        self.tensors: Mapping[str, Tensor] = manifest.tensor_map()
        self.names = sorted(self.tensors)
        self._patterns, _ = patterns_of(manifest.metadata)
        self._tree: Node = parse(manifest.tree)
        if not isinstance(self._tree, dict):
            raise ManifestCorrupt("tree", "it is not an object")
        self._nodes: dict[str, Node] = {"": self._tree}
        self._children: dict[str, Mapping[str, Node]] = {}
        self._per_rank_nodes: dict[str, Node] = {}
        self._stored_names: dict[str, str] = {}
        self._parameters: dict[str, Mapping[str, SavedParameter]] = {}
        equal = self.metadata.get(EQUAL)
        self._equal_names: Mapping[str, Node] = equal if isinstance(equal, dict) else {}

    def name_of_bytes(self, stored_name: str) -> str:
        """Return the name that stands for all names with the bytes of the stored tensor
        ``stored_name``: those that are tied to it, and those that an import has found equal to it.
        """
        name = self.manifest.tied.get(stored_name, stored_name)
        equal = self._equal_names.get(name, name)
        return equal if isinstance(equal, str) else name

    @property
    def is_imported(self) -> bool:
        """True if ``ckpt import`` made the checkpoint from a checkpoint of another program."""
        return "imported_as" in self.metadata

    @property
    def metadata(self) -> Mapping[str, Node]:
        """The metadata of the manifest."""
        metadata = parse(self.manifest.metadata, "metadata")
        return metadata if isinstance(metadata, dict) else {}

    def node(self, path: str) -> Node:
        """Return the node at ``path``, or ``ABSENT`` if there is none.

        The tensors of modules and optimizers have no nodes in the tree. For such a tensor, a new
        node with the tag ``tensor`` is returned.
        """
        if (node := self._nodes.get(path, ABSENT)) is ABSENT:
            node = self._find(path)
            if node is ABSENT and path in self.tensors:
                node = {"$": "tensor", "n": path}
            self._nodes[path] = node
        return node

    def _find(self, path: str) -> Node:
        """Return the node of the tree at ``path``, or ``ABSENT`` if there is none.

        The containers around the path are searched from the innermost one outwards, since a key of
        a module's values may contain slashes.
        """
        end = len(path)
        while end > 0:
            end = max(path.rfind("/", 0, end), 0)
            if (node := self._children_of(path[:end]).get(path, ABSENT)) is not ABSENT:
                return node
        return ABSENT

    def set_per_rank_node(self, path: str, node: Node) -> None:
        """Make ``node`` the content of the ``PerRank`` value at ``path``, so that the nodes inside
        of it are found by their names.
        """
        self._per_rank_nodes[path] = node
        self._children.pop(path, None)
        self._nodes = {name: child for name, child in self._nodes.items() if child is not ABSENT}

    def read_optimizer_dict(self, path: str, parameters: Sequence[str]) -> None:
        """If the value at ``path`` is a dict with the state of an optimizer, replace it with the
        optimizer. ``parameters`` are the full names of the parameters that it may have.
        """
        if (optimizer := read_dict(self.node(path), path, parameters)) is None:
            return
        self._nodes[path] = optimizer.node
        self._stored_names |= optimizer.tensors
        optimizer_tensors = {
            name: self.tensors[stored_name] for name, stored_name in optimizer.tensors.items()
        }
        self.tensors = {**self.tensors, **optimizer_tensors}
        self.names = sorted(self.tensors)

    def stored_as(self, name: str) -> str:
        """Return the name under which the bytes of the tensor ``name`` are stored."""
        return self._stored_names.get(name, name)

    def per_rank(self, source: int) -> Mapping[str, Node]:
        """Return the ``PerRank`` values that rank ``source`` has saved, as path -> node."""
        values: Mapping[str, Node] = parse(self.manifest.per_rank[str(source)], "per_rank")
        return values

    def parameter(self, name: str) -> SavedParameter | None:
        """Return the settings and values of a saved optimizer for one parameter, or None if there
        is no such optimizer or parameter.

        ``name`` consists of the paths of the optimizer and of the parameter:
        ``optimizer/model/layer.weight``.
        """
        path, node = self._container_with_tag(name, "optimizer")
        return self._saved_parameters(path, node).get(name) if path else None

    def parameters(self, path: str) -> Collection[str]:
        """Return the names of the parameters of the optimizer at ``path``, as the method
        ``parameter`` expects them.
        """
        return self._saved_parameters(path, self.node(path)).keys()

    def left_out(self, name: str, parameter: str = "") -> bool:
        """Return True if the save left ``name`` out on purpose.

        If ``name`` is a value of an optimizer's state, ``parameter`` is the name of its parameter.
        """
        if not self._patterns.takes(name) or self._patterns.excludes(parameter):
            return True
        return self._is_left_out_of_module(name) or self._is_left_out_of_module(parameter)

    def _is_left_out_of_module(self, name: str) -> bool:
        """Return True if the saved module around ``name`` lists ``name`` as left out."""
        path, node = self._container_with_tag(name, "module")
        return bool(path) and name[len(path) + 1 :] in node.get("left", ())

    def _container_with_tag(self, name: str, node_tag: str) -> tuple[str, Node]:
        """Find the outermost container of ``name`` that has the tag ``node_tag``, and return its
        path and its node. If there is none, return an empty path and ``ABSENT``.
        """
        end = name.find("/")
        while end >= 0:
            node = self.node(name[:end])
            if tag(node) == node_tag:
                return name[:end], node
            end = name.find("/", end + 1)
        return "", ABSENT

    def entries(self, path: str) -> list[str]:
        """Return the full names of the entries of the module at ``path``, sorted.

        An extra state is one entry. Tensors inside of it do not count as entries.
        """
        node = self.node(path)
        values = (
            [f"{path}/{fqn}" for fqn in node["values"]]
            if tag(node) == "module"
            else list(self._children_of(path))
        )
        inner_names = {inner for name in values for inner in names_below(self.names, name)}
        tensors = [name for name in names_below(self.names, path) if name not in inner_names]
        return sorted({*values, *tensors})

    def surplus_names(
        self, matched_names: Collection[str], containers: Collection[str]
    ) -> list[str]:
        """Return the names of the checkpoint that have no counterpart in the state.

        If a container is in ``containers``, or has names in ``matched_names`` below it, its values
        are examined one by one. Any other container gives only its own name.

        Args:
            matched_names: The names that have a counterpart in the state. A name also stands for
                all names below it.
            containers: The containers whose values were matched one by one.
        """
        sorted_names = sorted(matched_names)

        def surplus_below(path: str) -> Iterator[str]:
            """Yield the names at ``path`` and below it that have no counterpart."""
            if path in matched_names:
                return
            if path and path not in containers and not _has_name_below(sorted_names, path):
                yield path
                return
            for child in self._child_names(path):
                yield from surplus_below(child)

        return list(surplus_below(""))

    # -- inside ------------------------------------------------------------------------------------

    def _child_names(self, path: str) -> Collection[str]:
        """Return the full names of the children of the node at ``path``."""
        node = self.node(path)
        match tag(node):
            case "module":
                return self.entries(path)
            case "optimizer":
                return self.parameters(path)
            case "per_rank" | "tensor" | "array":
                return ()
            case _:
                return self._children_of(path).keys()

    def _children_of(self, path: str) -> Mapping[str, Node]:
        """Return the nodes of the children of the container at ``path``, by their full names."""
        children = self._children.get(path)
        if children is None:
            children = self._children[path] = dict(
                _children(path, self._per_rank_nodes.get(path, self.node(path)))
            )
        return children

    def _saved_parameters(self, path: str, node: Node) -> Mapping[str, SavedParameter]:
        """Return the parameters of the saved optimizer ``node`` at ``path``, by their names."""
        parameters = self._parameters.get(path)
        if parameters is None:
            value_nodes, value_names = node["state"], sorted(node["state"])
            order, plain_keys = KeyOrder.from_node(node), node.get("plain", ())
            short_names = [short_name for group in node["groups"] for short_name in group["params"]]
            places = {
                short_name: place
                for place, short_name in enumerate(in_order(short_names, order.parameters, str))
            }
            parameters = self._parameters[path] = {
                name: SavedParameter(
                    group["values"],
                    {
                        full_name: value_nodes[full_name]
                        for full_name in names_below(value_names, name)
                    },
                    order.of_parameter(short_name),
                    plain_keys,
                    places[short_name],
                )
                for group in node["groups"]
                for short_name, name in ((param, f"{path}/{param}") for param in group["params"])
            }
        return parameters


def tag(node: Node) -> Any:
    """Return the tag of ``node``, or None if it has none."""
    return node.get("$") if isinstance(node, dict) else None


def kind(node: Node) -> str:
    """Return the name of the kind of ``node``, for error messages."""
    if tag(node) == "subclass":
        return str(node["class"])
    if isinstance(node, dict):
        return str(node.get("$", "dict"))
    return {list: "list", str: "string", type(None): "None"}.get(type(node), type(node).__name__)


def holds_tensors(node: Node) -> bool:
    """Return True if ``node`` is the node of a tensor, or has one inside of it."""
    if isinstance(node, dict):
        return node.get("$") == "tensor" or any(map(holds_tensors, node.values()))
    return isinstance(node, list) and any(map(holds_tensors, node))


def is_mapping(node: Node) -> bool:
    """Return True if ``node`` is the node of a dict, an ``OrderedDict`` or a ``Counter``."""
    return isinstance(node, dict) and node.get("$", "dict") in _MAPPINGS


def _children(path: str, node: Node) -> Iterator[tuple[str, Node]]:
    """Yield the full name and the node of each child of the container ``node`` at ``path``.

    A container other than a list or a plain dict has its tag under "$", and its content under "v".
    """
    if isinstance(node, list):
        yield from ((join(path, str(index)), item) for index, item in enumerate(node))
    elif not isinstance(node, dict):
        return
    elif "$" not in node:
        yield from ((join(path, key), item) for key, item in node.items())
    elif node["$"] in _MAPPINGS:
        yield from ((join(path, decode(key, torch_value)), item) for key, item in node["v"])
    elif node["$"] in ("tuple", "object"):
        yield from _children(path, node["v"])
    elif node["$"] == "module":
        yield from ((f"{path}/{fqn}", value) for fqn, value in node["values"].items())


def _has_name_below(names: list[str], path: str) -> bool:
    """Return True if a name of the sorted ``names`` is below ``path``."""
    index = bisect_left(names, f"{path}/")
    return index < len(names) and names[index].startswith(f"{path}/")
