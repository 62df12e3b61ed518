"""Read an optimizer that was saved as a dict, and not as an object.

``torch.distributed.checkpoint`` gets the state of an optimizer as a dict with the names of the
parameters in their module: ``{"state": {name: {key: value}}, "param_groups": [...]}``. With
``flatten_optimizer_state_dict``, it is a dict with keys such as ``state.0.weight.exp_avg`` and
``param_groups.0.weight.lr``.

A node is a saved value in the manifest's tree (see ``match.saved_nodes``).
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Container, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Final, TypeVar

from ckpt.model.key_order import KeyOrder
from ckpt.model.values import Node, decode, join
from ckpt.state.match.plain_values import torch_value

V = TypeVar("V")

_STATE: Final = "state"
_GROUPS: Final = "param_groups"
_NAME_KEYS: Final = ("params", "param_names")  # The keys of a group that are no settings


@dataclass(frozen=True, slots=True)
class OptimizerDict:
    """An optimizer that was saved as a dict.

    Attributes:
        node: The node that the tree would have if the optimizer had been saved as an object.
        tensors: The name that each tensor of the state would have -> its name in the checkpoint.
    """

    node: Node
    tensors: Mapping[str, str]


def read_dict(node: Node, path: str, parameters: Sequence[str]) -> OptimizerDict | None:
    """Return the optimizer that was saved as the dict ``node`` at ``path``, or None if the dict is
    not the state of an optimizer whose parameters have names.

    Args:
        node: The node of the dict.
        path: The name of the dict in the checkpoint.
        parameters: The full names in the checkpoint of the parameters that the optimizer may have,
            such as ``model/0.weight``. A parameter of the dict that is none of them keeps the name
            that it has in its module.
    """
    items = dict(_items(node))
    if items.keys() == {_STATE, _GROUPS} and isinstance(items[_GROUPS], list):
        state = {name: dict(_items(entry)) for name, entry in _items(items[_STATE])}
        groups = [dict(_items(group)) for group in items[_GROUPS]]
    elif items and all(key.startswith((f"{_STATE}.", f"{_GROUPS}.")) for key in items):
        parts = split_flat(items, _full_names(parameters))
        state = parts[_STATE]
        groups = [{"params": [name], **settings} for name, settings in parts[_GROUPS].items()]
    else:
        return None
    full_names = _full_names(parameters)
    tensors: dict[str, str] = {}
    values: dict[str, Node] = {}
    for name, entry in state.items():
        for key, value in entry.items():
            value_name = join(f"{path}/{full_names.get(name, name)}", key)
            if isinstance(value, dict) and value.get("$") == "tensor":
                tensors[value_name] = value["n"]
            else:
                values[value_name] = value
    group_nodes = [
        {
            "params": [full_names.get(name, name) for name in group["params"]],
            "values": {key: value for key, value in group.items() if key not in _NAME_KEYS},
        }
        for group in groups
    ]
    keys = {
        full_names.get(name, name): tuple(join("", key) for key in entry)
        for name, entry in state.items()
    }
    key_order = KeyOrder.of(keys).node()
    return OptimizerDict(
        {"$": "optimizer", "groups": group_nodes, "state": values, **key_order}, tensors
    )


def _items(node: Node) -> Iterator[tuple[str, Node]]:
    """Yield the items of a dict whose keys are strings. Yield nothing for any other node."""
    if not isinstance(node, dict):
        return
    if "$" not in node:
        yield from node.items()
    elif node["$"] == "dict":
        for key, value in node["v"]:
            if isinstance(name := decode(key, torch_value), str):
                yield name, value


def split_flat(
    items: Mapping[str, V], parameters: Container[str]
) -> dict[str, dict[str, dict[str, V]]]:
    """Return the values of a flat dict by the part (``state`` or ``param_groups``), by the name of
    the parameter, and by the key.

    The name of a parameter has dots, and so may a key. The longest name among ``parameters``
    counts. If there is none, the key has no dots.
    """
    parts: dict[str, dict[str, dict[str, V]]] = {
        _STATE: defaultdict(dict),
        _GROUPS: defaultdict(dict),
    }
    for path, value in items.items():
        part, _, rest = path.partition(".")
        # The dots of ``rest`` at which the name of the parameter may end, the last one first
        ends = (index for index in range(len(rest) - 1, 0, -1) if rest[index] == ".")
        end = next((index for index in ends if rest[:index] in parameters), rest.rfind("."))
        parts[part][rest[: max(end, 0)]][rest[end + 1 :]] = value
    return parts


def _full_names(parameters: Iterable[str]) -> dict[str, str]:
    """Return the full name of each parameter by its name in its module.

    A name of parameters of two modules is left out.
    """
    full_names: dict[str, str] = {}
    ambiguous_names: set[str] = set()
    for name in parameters:
        short_name = name.rpartition("/")[2]
        if full_names.setdefault(short_name, name) != name:
            ambiguous_names.add(short_name)
    return {
        short_name: name
        for short_name, name in full_names.items()
        if short_name not in ambiguous_names
    }
