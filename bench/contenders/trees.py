"""A state as each object tells it itself, flat, for contenders that know no more than tensors
and their names.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any

import torch
from torch.distributed.tensor import DTensor
from torch.optim import Optimizer

from bench.state import Subject


def own_state(subject: Subject) -> dict[str, Any]:
    """What each object's own ``state_dict()`` gives: live tensors under torch's own names, this
    rank's part of those that are sharded.
    """
    return {
        name: _local(value.state_dict() if hasattr(value, "state_dict") else value)
        for name, value in subject.objects().items()
    }


def _local(value: Any) -> Any:
    if isinstance(value, Mapping):
        return {key: _local(below) for key, below in value.items()}
    return value.to_local() if isinstance(value, DTensor) else value


def leaves(state: Mapping[str, Any]) -> dict[str, Any]:
    """All that is no dict, under the path to it.

    The hyperparameters of an optimizer are one leaf, ``param_groups``.
    """
    found: dict[str, Any] = {}
    for key, value in state.items():
        if isinstance(value, Mapping):
            found |= {f"{key}.{path}": leaf for path, leaf in leaves(value).items()}
        else:
            found[str(key)] = value
    return found


def land(subject: Subject, leaf_at: Callable[[str], Any]) -> None:
    """Copy each tensor, asked for by its path, into the live one, and set the rest."""
    with torch.no_grad():
        for path, leaf in leaves(own_state(subject)).items():
            if isinstance(leaf, torch.Tensor):
                leaf.copy_(leaf_at(path))
    land_values(subject, leaf_at)


def land_values(subject: Subject, leaf_at: Callable[[str], Any]) -> None:
    """Set what is no tensor; the tensors stay the live ones."""
    for name, value in subject.objects().items():
        if isinstance(value, Optimizer):
            value.load_state_dict(
                {**value.state_dict(), "param_groups": leaf_at(f"{name}.param_groups")}
            )
    subject.step = leaf_at("step")
