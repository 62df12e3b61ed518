"""Run the code by which an optimizer loads a state dict, after a restore has read its values.

``Optimizer.load_state_dict`` passes the dict to the hooks of the optimizer, replaces the state and
the parameter groups, and calls ``__setstate__``, which adds settings that an older release lacked,
and converts values that it kept in another form. A restore does the same with the values that it
has read. It does not convert moments to the dtype of their parameters, so that they are as saved.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Generator, Hashable, Mapping, MutableMapping
from contextlib import contextmanager
from itertools import chain
from typing import Any, Final

import torch
from torch.distributed.tensor import DTensor, distribute_tensor
from torch.optim import Optimizer

from ckpt.errors import CkptError, RestoreError
from ckpt.state.walk.modules import is_on_device
from ckpt.state.walk.optimizer_state import LocalState, pack
from ckpt.state.walk.stand_in import OptimizerStandIn
from ckpt.torch_private import is_zero_redundancy, optimizer_hooks

_PARAMETERS: Final = "params"
_NAMES: Final = "param_names"
_LOST_TEXT: Final = "<generator object Optimizer.load_state_dict"
"""The beginning of the text that torch makes of a string (findings/torch-optimizer-text-state.sh).
"""


@contextmanager
def own_code_errors(path: str, kind: str, method: str) -> Generator[None]:
    """Convert an error of the ``with`` block to a ``RestoreError`` that names ``path``.

    The block calls code of the object at ``path``, which is a ``kind``, as ``method`` would do.
    """
    try:
        yield
    except CkptError:
        raise
    except Exception as error:  # The code of an object may raise anything
        raise RestoreError(
            f"{path!r} was read, but {kind} does not take it: {method} raises {error!r}. Tensors "
            "of the state are overwritten: do not train on with it. Correct the hook or the "
            "method, or build the target as it was saved"
        ) from error


class Completion:
    """Ends the restore of one optimizer.

    Call ``begin`` before, and ``end`` after the restore has set the state and the settings of the
    optimizer.

    Attributes:
        needs_new_tensors: True if code of the optimizer may read its present state and settings
            while it loads a state dict: a pre-hook, or a ``load_state_dict()`` of its own. The
            restore must then read the saved values into new tensors, as ``torch.load`` does.

    Args:
        path: The name of the optimizer in the state.
        optimizer: The optimizer.
        local_state: Its state on this rank.

    ``_groups`` and ``_state`` are the settings and the state that the optimizer had at the call of
    ``begin``. ``_removed_settings`` has the index of a parameter group, with the present settings
    that were removed from it. ``_pre_hooks`` are the hooks that get the state dict first.
    """

    def __init__(self, path: str, optimizer: Optimizer, local_state: LocalState) -> None:
        self._path, self._optimizer, self._local_state = path, optimizer, local_state
        self._pre_hooks = optimizer_hooks(optimizer, "load_state_dict_pre")
        self._has_own_load = _has_own_load(optimizer)
        self.needs_new_tensors = self._has_own_load or bool(self._pre_hooks)
        self._groups: list[dict[str, Any]] = []
        self._state: dict[Any, Any] = {}
        self._removed_settings: list[tuple[int, dict[str, Any]]] = []

    def begin(self) -> None:
        """Remember the present state and settings."""
        self._groups = [dict(group) for group in self._optimizer.param_groups]
        self._state = dict(self._local_state.by_parameter)

    def remove_unsaved_settings(self, group: dict[str, Any], saved_names: Collection[str]) -> None:
        """Remove the settings of ``group`` that are not in ``saved_names``, the names of those that
        the checkpoint has, as ``load_state_dict`` does.

        ``__setstate__`` then gives them the values that they had when they did not exist. If it
        does not, ``end`` puts the present values back.
        """
        index = next(
            i for i, candidate in enumerate(self._optimizer.param_groups) if candidate is group
        )
        names = group.keys() - {*saved_names, _PARAMETERS, _NAMES}
        self._removed_settings.append((index, {name: group.pop(name) for name in names}))

    def end(self, values: Callable[[], Mapping[str, Any]]) -> None:
        """Run the optimizer's own code over the restored state and settings.

        ``values`` returns what the saved ``state_dict()`` has beside the state and the groups.

        Raises:
            RestoreError: The code raises an error, or a pre-hook returns a dict that does not fit.
        """
        with own_code_errors(self._path, type(self._optimizer).__qualname__, "load_state_dict()"):
            self._load(values)
        for index, settings in self._removed_settings:
            for name, value in settings.items():
                self._optimizer.param_groups[index].setdefault(name, value)

    def _load(self, values: Callable[[], Mapping[str, Any]]) -> None:
        """Run the hooks and methods by which the optimizer loads a state dict."""
        if self.needs_new_tensors:
            state_dict = {**pack(self._optimizer, self._local_state.by_parameter), **values()}
            self._reset()
            if self._has_own_load:
                self._optimizer.load_state_dict(state_dict)
                self._undo_casts(state_dict)
                return
            for hook in self._pre_hooks:
                result = hook(self._optimizer, state_dict)
                state_dict = state_dict if result is None else result
            self._set_to_state_dict(state_dict)
        self._set_state()
        for hook in optimizer_hooks(self._optimizer, "load_state_dict_post"):
            hook(self._optimizer)

    def _reset(self) -> None:
        """Give the optimizer the state and the settings that it had at the call of ``begin``."""
        for group, settings in zip(self._optimizer.param_groups, self._groups, strict=True):
            _replace(group, settings)
        _replace(self._local_state.by_parameter, self._state)

    def _set_to_state_dict(self, state_dict: Mapping[str, Any]) -> None:
        """Set the state and the settings to those of ``state_dict``, the result of the pre-hooks.

        The parameter groups and the state stay the same objects.
        """
        groups = self._optimizer.param_groups
        new_groups = [dict(group) for group in state_dict["param_groups"]]
        if [len(group[_PARAMETERS]) for group in new_groups] != [
            len(group[_PARAMETERS]) for group in groups
        ]:
            raise ValueError("a pre-hook returns other parameter groups than the optimizer has")
        numbers = chain.from_iterable(group[_PARAMETERS] for group in new_groups)
        owner_list = [(parameter, group) for group in groups for parameter in group[_PARAMETERS]]
        owners: dict[Hashable, Any] = dict(zip(numbers, owner_list, strict=True))
        for group, settings in zip(groups, new_groups, strict=True):
            names = {_NAMES: group[_NAMES]} if _NAMES in group else {}
            _replace(group, {**names, **settings, _PARAMETERS: group[_PARAMETERS]})
        state: dict[Any, Any] = {}
        for number, values in state_dict["state"].items():
            if number in owners:
                parameter, group = owners[number]
                state[parameter] = move_to_parameter(values, group, parameter)
            else:
                state[number] = values
        _replace(self._local_state.by_parameter, state)

    def _set_state(self) -> None:
        """Call ``__setstate__`` as ``load_state_dict`` does.

        A ``ZeroRedundancyOptimizer`` has an optimizer inside, whose class knows the settings.
        """
        optimizer = self._optimizer
        if not is_zero_redundancy(optimizer):
            _set_state(optimizer)
            return
        inner: Optimizer = optimizer.optim  # type: ignore[attr-defined]
        for source, target in ((optimizer, inner), (inner, optimizer)):
            for group, target_group in zip(source.param_groups, target.param_groups, strict=True):
                target_group.update({k: value for k, value in group.items() if k != _PARAMETERS})
            _set_state(target)

    def _undo_casts(self, state_dict: Mapping[str, Any]) -> None:
        """Put those values of ``state_dict`` back that ``Optimizer.load_state_dict`` has changed:
        tensors that it converts to the dtype of their parameter, and strings, which it loses.
        """
        groups = self._optimizer.param_groups
        parameters = chain.from_iterable(group[_PARAMETERS] for group in groups)
        for number, parameter in enumerate(parameters):
            state = self._optimizer.state.get(parameter, {})
            for key, value in state_dict["state"].get(number, {}).items():
                if _is_cast(value, state.get(key), parameter):
                    state[key] = value.to(parameter.device)
                elif isinstance(value, str) and str(state.get(key)).startswith(_LOST_TEXT):
                    state[key] = value


def _has_own_load(optimizer: Optimizer) -> bool:
    """Return True if ``optimizer`` has a ``load_state_dict()`` of its own."""
    method: Any = optimizer.load_state_dict
    return (
        getattr(method, "__func__", method) is not Optimizer.load_state_dict
        and not is_zero_redundancy(optimizer)
        and not isinstance(optimizer, OptimizerStandIn)
    )


def _set_state(optimizer: Optimizer) -> None:
    """Call ``__setstate__`` with the present state and groups."""
    optimizer.__setstate__({"state": optimizer.state, "param_groups": optimizer.param_groups})


def _is_cast(value: object, loaded_value: object, parameter: torch.Tensor) -> bool:
    """Return True if torch has converted ``value`` to ``loaded_value``, of the parameter's
    dtype.
    """
    return (
        isinstance(value, torch.Tensor)
        and isinstance(loaded_value, torch.Tensor)
        and value.dtype != loaded_value.dtype == parameter.dtype
        and value.shape == loaded_value.shape
    )


def _replace(mapping: MutableMapping[Any, Any], items: Mapping[Any, Any]) -> None:
    """Give ``mapping`` the content ``items``. It stays the same object."""
    mapping.clear()
    mapping.update(items)


def move_to_parameter(value: Any, group: Mapping[str, Any], parameter: torch.Tensor) -> Any:
    """Return a value of an optimizer's state with all tensors inside of it on the device of
    ``parameter``, as torch's own ``load_state_dict`` does. Tensors of the shape of a sharded
    ``parameter`` are sharded as it is.

    The call moves the tensors in lists, tuples and dicts, and changes dicts in place. It moves a
    ``step`` in a dict only if ``group``, the parameter group, places it on the device.
    """
    if isinstance(value, torch.Tensor):
        return _sharded(value.to(parameter.device), parameter)
    if isinstance(value, dict):
        for key in [key for key in value if is_on_device(key, group)]:
            value[key] = move_to_parameter(value[key], group, parameter)
    if type(value) in (list, tuple):
        return type(value)(move_to_parameter(item, group, parameter) for item in value)
    return value


def _sharded(value: torch.Tensor, parameter: torch.Tensor) -> torch.Tensor:
    """Return a whole ``value`` of the shape of a sharded ``parameter`` as a DTensor like it."""
    if not isinstance(parameter, DTensor) or isinstance(value, DTensor):
        return value
    if value.shape != parameter.shape:
        return value
    # Each rank has read the whole tensor, so none sends its part to another.
    return distribute_tensor(value, parameter.device_mesh, parameter.placements, src_data_rank=None)
