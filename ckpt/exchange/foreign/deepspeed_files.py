"""Read a universal checkpoint of DeepSpeed, and say what the file of an engine lacks.

``ds_to_universal.py`` writes ``zero/NAME/`` for each parameter, with ``fp32.pt`` and a file for
each value of the optimizer's state. The file of the engine is beside ``zero/``. It has the module
as it computes, with its buffers, and the names of the parameters in each group of the optimizer.
The folders that ZeRO itself writes, with the weights in pieces, are not read here:
`refused_folders` refuses them, and `zero_step_text` says how to convert them.
"""

from __future__ import annotations

import math
import os
from collections.abc import Mapping, Sequence
from typing import Any, Final

import torch

from ckpt.errors import ConfigError, IntegrityError
from ckpt.exchange.foreign.contents import EngineOptimizer, check_name
from ckpt.exchange.foreign.library_folders import LibraryFolder
from ckpt.exchange.foreign.refused_folders import engine_file, zero_step_text
from ckpt.exchange.inert import inert_torch
from ckpt.exchange.inert.inert_pickle import holds_inert
from ckpt.exchange.inert.torch_reader import load

State = dict[str, Any]
Shapes = Mapping[str, Sequence[int]]

_WEIGHT_FILE: Final = "fp32.pt"
COUNTER_NAMES: Final = ("global_steps", "global_samples", "skipped_steps")
"""The names of the counters of an engine."""
_STATE_KEYS: Final = (
    "module", "optimizer", "lr_scheduler", "buffer_names", "shared_params", "param_shapes",
    "frozen_param_shapes", "frozen_param_fragments",
)  # fmt: skip


def read_universal(source: str) -> LibraryFolder:
    """Return the state of the universal checkpoint in the folder ``source``.

    The weights are the fp32 ones. Buffers, and parameters that are not trained, are those of the
    module, which become float32 as in ``zero_to_fp32.py``. The optimizer's state has the names of
    the parameters.

    Raises:
        ConfigError: The folder has no elements of a weight.
        IntegrityError: A file is missing, damaged, or not as DeepSpeed writes it.
    """
    engine_name = engine_file(os.listdir(source))
    folder = LibraryFolder("deepspeed", files=[engine_name, "zero"])
    try:
        engine = inert_torch.read_file(os.path.join(source, engine_name))
        common_state = inert_torch.read_file(os.path.join(source, "zero", "optimizer_state.pt"))
        parameters = _ParameterFolders(os.path.join(source, "zero"), engine["param_shapes"])
        folder.state["model"] = _weights(source, engine, parameters)
        if (optimizer := _optimizer(common_state, parameters)) is not None:
            folder.state["optimizer"] = EngineOptimizer(optimizer, _extra_values(engine))
        else:
            folder.notes.append(
                "the optimizer is not taken, since the files do not say which parameters are in "
                "each of its groups: load the folder with engine.load_checkpoint(), and save "
                "zero_state(engine) of ckpt.integrations.deepspeed"
            )
        _put_other_values(folder, engine)
    except (LookupError, TypeError, AttributeError, ValueError, RuntimeError) as error:
        raise IntegrityError(
            f"{source} is not a universal checkpoint as DeepSpeed writes it: {error!r}"
        ) from None
    return folder


def engine_notes(path: str, state: Mapping[str, Any]) -> list[str]:
    """Return notes for the user about ``state``, the content of the file ``path``, if it is of a
    DeepSpeed engine whose fp32 weights are in other files.

    Raises:
        ConfigError: The weights have no elements.
    """
    module, groups = state.get("module"), state.get("param_shapes")
    if not isinstance(module, Mapping) or not isinstance(groups, list) or state.get("optimizer"):
        return []
    if empty_name := _name_without_elements(module, state):
        raise ConfigError(f"{path} has no elements of {empty_name!r}: {zero_step_text(path)}")
    dtypes = {
        str(tensor.dtype).removeprefix("torch.") for tensor in module.values() if _is_float(tensor)
    }
    return [
        f"{path} has the {' and '.join(sorted(dtypes))} weights that DeepSpeed's engine computes "
        "with; the fp32 weights and the optimizer's state are in the files of the ranks, which are "
        f"left aside: {zero_step_text(path)}"
    ]


_MOST_COPIED_BYTES: Final = 1 << 20


class _ParameterFolders:
    """The folder ``zero``, with a folder for each parameter.

    Attributes:
        groups: The shapes of the parameters by name, for each group of the optimizer or each part
            of such a group.
    """

    def __init__(self, folder: str, groups: Sequence[Shapes]) -> None:
        self._folder, self.groups = folder, groups
        self._shapes = {name: tuple(shape) for group in groups for name, shape in group.items()}

    def __contains__(self, name: str) -> bool:
        return name in self._shapes

    def weight(self, name: str) -> torch.Tensor:
        return self._read(name, _WEIGHT_FILE)

    def moments(self, name: str) -> State:
        """Return the optimizer's state of a parameter."""
        files = sorted(os.listdir(os.path.join(self._folder, check_name(self._folder, name))))
        return {
            file.removesuffix(".pt"): self._read(name, file)
            for file in files
            if file != _WEIGHT_FILE
        }

    def _read(self, name: str, file: str) -> torch.Tensor:
        """Return the tensor in a file of the parameter ``name``, in the parameter's shape."""
        path = os.path.join(self._folder, check_name(self._folder, name), file)
        value = load(path)
        tensor = value["param"] if isinstance(value, Mapping) else value
        if not isinstance(tensor, torch.Tensor):
            raise TypeError(f"{path} holds no tensor")
        shape = self._shapes[name]
        is_flat = tensor.ndim == 1 and tensor.numel() == math.prod(shape)
        if not is_flat and tensor.ndim and tensor.shape != shape:
            raise ValueError(f"{path} has the shape {list(tensor.shape)}, not {list(shape)}")
        # A tensor of a file keeps the file mapped, and a process may have only 65,530 maps.
        tensor = tensor.clone() if tensor.nbytes <= _MOST_COPIED_BYTES else tensor
        return tensor.reshape(shape) if is_flat else tensor


def _weights(source: str, engine: Mapping[str, Any], parameters: _ParameterFolders) -> State:
    """Return the entries of the module, with the fp32 weights of the trained parameters."""
    ties: Mapping[str, str] = engine.get("shared_params") or {}
    module: Mapping[str, torch.Tensor] = engine["module"]
    weights = {
        name: parameters.weight(name)
        if name in parameters
        else value.float()
        if _is_float(value) and value.itemsize < torch.float32.itemsize
        else value
        for name, value in module.items()
    }
    weights |= {name: weights[target] for name, target in ties.items()}
    if empty_name := _name_without_elements(weights, engine):
        raise ConfigError(
            f"{source} has no elements of {empty_name!r}, which is not trained: python "
            "zero_to_fp32.py RUN fp32, in the run that the folder was made of, writes the whole "
            "weights, and ckpt import fp32 ROOT --step N takes them"
        )
    return weights


def _name_without_elements(module: Mapping[str, Any], engine: Mapping[str, Any]) -> str:
    """Return the name of a tensor in ``module`` that should have elements, and has none; empty if
    there is no such tensor.
    """
    shapes: dict[str, Sequence[int]] = dict(engine.get("frozen_param_shapes") or {})
    for group in engine["param_shapes"]:
        shapes |= group
    return next(
        (
            name
            for name, value in module.items()
            if isinstance(value, torch.Tensor)
            and not value.numel()
            and 0 not in shapes.get(name, (0,))
        ),
        "",
    )


def _optimizer(common_state: Mapping[str, Any], parameters: _ParameterFolders) -> State | None:
    """Return the state dict of the optimizer, with the names of its parameters; None if the files
    do not say which parameters are in each of its groups.

    Args:
        common_state: What all parameters have in common. ZeRO 3 has the step there.
        parameters: The parameters.
    """
    groups: list[Mapping[str, Any]] = common_state["param_groups"]
    names_by_group = [list(group) for group in parameters.groups]
    if len(groups) == 1:  # ZeRO 3 cuts a large group into parts
        names_by_group = [[name for part in names_by_group for name in part]]
    if len(groups) != len(names_by_group):
        return None
    states: Mapping[Any, Mapping[str, Any]] = common_state.get("optimizer_state_dict", {}).get(
        "state", {}
    )
    common_values = {
        key: value
        for key, value in next(iter(states.values()), {}).items()
        if not isinstance(value, torch.Tensor) or not value.ndim
    }
    return {
        "state": {
            name: common_values | parameters.moments(name)
            for group in names_by_group
            for name in group
        },
        "param_groups": [
            {
                **{key: value for key, value in group.items() if not holds_inert(value)},
                "params": parameter_names,
            }
            for group, parameter_names in zip(groups, names_by_group, strict=True)
        ],
    }


def _extra_values(engine: Mapping[str, Any]) -> State:
    """Return what ``zero_state`` restores into an engine besides the state of the parameters: the
    counters, and the learning rate schedule if the engine had made it by its configuration.
    """
    counters = {name: engine[name] for name in COUNTER_NAMES if isinstance(engine.get(name), int)}
    extra: State = {"counters": counters, "loss_scaler": {}}
    config = engine.get("ds_config")
    setting = config.get("scheduler") if isinstance(config, Mapping) else None
    kind = setting.get("type") if isinstance(setting, Mapping) else None
    schedule = engine.get("lr_scheduler")
    if isinstance(kind, str) and isinstance(schedule, dict) and not holds_inert(schedule):
        extra["scheduler"] = {"kind": kind, "state": schedule}
    return extra


def _put_other_values(folder: LibraryFolder, engine: Mapping[str, Any]) -> None:
    """Put the scheduler and the plain values of the engine into the state."""
    schedule = engine.get("lr_scheduler")
    if isinstance(schedule, dict):
        folder.state["scheduler"] = schedule
    rest = {key: value for key, value in engine.items() if key not in _STATE_KEYS}
    folder.state["deepspeed"] = {
        key: value for key, value in rest.items() if not holds_inert(value)
    }
    folder.notes += [
        f"{key!r} is not taken, since it has objects that only pickle could load"
        for key, value in rest.items()
        if holds_inert(value)
    ]


def _is_float(value: Any) -> bool:
    return isinstance(value, torch.Tensor) and value.is_floating_point()
