"""Find the state of an optimizer on this rank, give it the form of a ``state_dict()``, and run the
hooks of that method.

The state belongs to the optimizer itself. That of a ``ZeroRedundancyOptimizer`` belongs to the
optimizer inside of it, which has this rank's share of the parameters.

A setting that is a member of an enum is saved as the number or text it equals. A checkpoint names
no class, so only the optimizer in the state knows the enum.
"""

from __future__ import annotations

import enum
from collections.abc import Mapping, MutableMapping, Sequence
from dataclasses import dataclass
from itertools import count
from typing import Any, Final

import torch
from torch.optim import Optimizer

from ckpt.errors import UnsupportedValue
from ckpt.state.walk.modules import OWN_STATE_ADVICE, state_dict_errors
from ckpt.torch_private import is_zero_redundancy, optimizer_hooks, overlaps_with_ddp

_GROUPS: Final = "param_groups"
_PARAMETERS: Final = "params"
_STATE: Final = "state"
State = MutableMapping[torch.Tensor, dict[Any, Any]]


@dataclass(frozen=True, slots=True)
class LocalState:
    """The state of an optimizer on this rank.

    Attributes:
        by_parameter: The state of each parameter.
        own_ids: The identities (``id``) of the parameters whose state this rank keeps; None if it
            keeps the state of all.
    """

    by_parameter: State
    own_ids: frozenset[int] | None = None

    def keeps(self, parameter: torch.Tensor) -> bool:
        """Return True if this rank keeps the state of ``parameter``."""
        return self.own_ids is None or id(parameter) in self.own_ids


def local_state_of(path: str, optimizer: Optimizer) -> LocalState:
    """Return the state of ``optimizer``, which is at ``path`` in the state to save or restore.

    The result has no parameter groups. ``optimizer.param_groups`` has all parameters, also for a
    ``ZeroRedundancyOptimizer``.

    Raises:
        UnsupportedValue: ``optimizer`` is a ``ZeroRedundancyOptimizer`` that steps during
            ``backward()``.
    """
    if not is_zero_redundancy(optimizer):
        return LocalState(optimizer.state)
    if overlaps_with_ddp(optimizer):
        raise UnsupportedValue(
            path,
            "ZeroRedundancyOptimizer with overlap_with_ddp, which steps inside of backward()",
            "make it with overlap_with_ddp=False",
        )
    inner: Optimizer = optimizer.optim  # type: ignore[attr-defined]
    return LocalState(
        inner.state, frozenset(id(p) for group in inner.param_groups for p in group["params"])
    )


def pack(optimizer: Optimizer, state: Mapping[Any, Any]) -> dict[str, Any]:
    """Return the parameter groups of ``optimizer`` and ``state``, in the form of
    ``Optimizer.state_dict``: numbers take the place of the parameters.

    The values are those of the optimizer itself. The dicts around them are new.
    """
    numbers: dict[int, int] = {}
    groups: list[dict[str, Any]] = []
    counter = count()
    for group in optimizer.param_groups:
        for parameter in group[_PARAMETERS]:
            numbers.setdefault(id(parameter), next(counter))
        groups.append(
            {**group, _PARAMETERS: [numbers[id(parameter)] for parameter in group[_PARAMETERS]]}
        )
    values = {
        numbers.get(id(key), key): dict(value) if isinstance(value, dict) else value
        for key, value in state.items()
    }
    return {_STATE: values, _GROUPS: groups}


def run_state_dict_pre_hooks(path: str, optimizer: Optimizer) -> None:
    """Run the hooks that ``optimizer.state_dict()`` runs first. They may change the optimizer."""
    if hooks := optimizer_hooks(optimizer, "state_dict_pre"):
        with state_dict_errors(path, optimizer):
            for hook in hooks:
                hook(optimizer)


def run_state_dict_post_hooks(
    path: str, optimizer: Optimizer, state: Mapping[Any, Any]
) -> tuple[Sequence[Mapping[str, Any]], Mapping[str, Any]]:
    """Run the hooks that ``optimizer.state_dict()`` runs last.

    Return the parameter groups of the result, and its values beside the groups and the state.

    Raises:
        UnsupportedValue: The hooks change the parameters of a group or the state of a parameter.
    """
    hooks = optimizer_hooks(optimizer, "state_dict_post")
    if not hooks:
        return optimizer.param_groups, {}
    result = pack(optimizer, state)
    with state_dict_errors(path, optimizer):
        for hook in hooks:
            new_result = hook(optimizer, result)
            result = result if new_result is None else new_result
        is_same = _has_same_state(result, pack(optimizer, state))
        values = {key: value for key, value in result.items() if key not in (_STATE, _GROUPS)}
    if not is_same:
        raise UnsupportedValue(
            path,
            f"{type(optimizer).__qualname__} with a state_dict hook that changes the state of a "
            "parameter",
            OWN_STATE_ADVICE,
        )
    return result[_GROUPS], values


def _has_same_state(result: Mapping[str, Any], other_result: Mapping[str, Any]) -> bool:
    """Return True if two results of ``pack`` have the same parameters, and the same objects as
    their state.
    """
    groups, other_groups = result[_GROUPS], other_result[_GROUPS]
    state, other_state = result[_STATE], other_result[_STATE]
    return (
        [group[_PARAMETERS] for group in groups] == [group[_PARAMETERS] for group in other_groups]
        and state.keys() == other_state.keys()
        and all(
            state[number].keys() == other_state[number].keys()
            and all(state[number][key] is value for key, value in other_state[number].items())
            for number in other_state
        )
    )


def enum_value_of(setting: Any) -> Any:
    """Return the value of ``setting`` if it is a member of an enum and equal to its value, as those
    of ``IntEnum`` and ``StrEnum`` are. Return any other setting itself.
    """
    is_equal = isinstance(setting, enum.Enum) and isinstance(setting, int | str)
    return setting.value if is_equal else setting


def member_like(present: Any, value: Any) -> Any:
    """Return the member for ``value`` of the enum that ``present`` is a member of. If ``present``
    is no member of such an enum, return ``value`` itself.

    Raises:
        ValueError: The enum has no member for ``value``.
    """
    return value if enum_value_of(present) is present else type(present)(value)
