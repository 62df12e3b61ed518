"""Put the entries of a flat state back into the model and the optimizer that they are from.

torchtitan saves the names of its model beside the other entries of the state, and an optimizer as a
flat dict with keys such as ``state.0.weight.exp_avg`` and ``param_groups.0.weight.lr``
(``flatten_optimizer_state_dict`` of ``torch.distributed.checkpoint``).
"""

from __future__ import annotations

from collections.abc import Collection, Mapping
from typing import Any, Final

import torch

from ckpt.state.match.saved_optimizer import split_flat

State = dict[str, Any]

_OPTIMIZER_KEYS: Final = ("state", "param_groups")


def unflatten_optimizers(state: Mapping[str, Any]) -> tuple[State, list[str]]:
    """Return ``state`` with the state dict of an optimizer in place of each flat one.

    If the parameters of such an optimizer are tensors at the top level of the state, all tensors at
    the top level become the entry ``model``.

    Returns:
        The new state, and notes for the user.
    """
    tensors = {name: value for name, value in state.items() if isinstance(value, torch.Tensor)}
    mappings = [value for value in state.values() if isinstance(value, Mapping)]
    parameter_names = {str(key) for value in (tensors, *mappings) for key in value}
    optimizers = {
        name: _unflatten_optimizer(value, parameter_names)
        for name, value in state.items()
        if _is_flat(value)
    }
    new_state = {**state, **optimizers}
    used_names = {
        parameter
        for value in optimizers.values()
        for group in value["param_groups"]
        for parameter in group["params"]
    }
    if not used_names or not used_names <= tensors.keys() or "model" in state:
        return new_state, []
    rest = {name: value for name, value in new_state.items() if name not in tensors}
    note = f"the {len(tensors)} tensors beside {', '.join(map(repr, optimizers))} are 'model' now"
    return {"model": tensors, **rest}, [note]


def _is_flat(value: Any) -> bool:
    return (
        isinstance(value, Mapping)
        and any(isinstance(key, str) and key.startswith("param_groups.") for key in value)
        and all(isinstance(key, str) and key.partition(".")[0] in _OPTIMIZER_KEYS for key in value)
    )


def _unflatten_optimizer(flat: Mapping[str, Any], parameter_names: Collection[str]) -> State:
    """Return the state dict of an optimizer, with a group for all parameters of equal settings.

    Args:
        flat: The flat dict.
        parameter_names: The names that parameters may have (see ``split_flat``).
    """
    parts = split_flat(flat, parameter_names)
    groups: list[State] = []
    for name, settings in parts["param_groups"].items():
        equal_group = next((group for group in groups if _has_settings(group, settings)), None)
        if equal_group is None:
            groups.append({**settings, "params": [name]})
        else:
            equal_group["params"].append(name)
    return {"state": dict(parts["state"]), "param_groups": groups}


def _has_settings(group: Mapping[str, Any], settings: Mapping[str, Any]) -> bool:
    """Return True if ``settings`` are those of ``group``. A tensor equals only itself."""
    return set(group) - {"params"} == set(settings) and all(
        group[key] is value or (not isinstance(value, torch.Tensor) and group[key] == value)
        for key, value in settings.items()
    )
