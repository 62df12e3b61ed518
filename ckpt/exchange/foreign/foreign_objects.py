"""Turn the state of another program into objects that a save takes: modules and optimizers.

A dict of tensors becomes a module, and a dict with ``state`` and ``param_groups`` becomes an
optimizer. The classes of the original objects are not needed, since a checkpoint has only names,
tensors and plain values.
"""

from __future__ import annotations

import re
from collections import Counter, defaultdict
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from itertools import chain
from typing import Any, Final

import torch
from torch import nn
from torch.optim import Optimizer

from ckpt.errors import ConfigError, UnsupportedValue
from ckpt.exchange.foreign import wrapper_names
from ckpt.exchange.foreign.contents import EngineOptimizer, State
from ckpt.exchange.foreign.flat_states import unflatten_optimizers
from ckpt.exchange.inert.torch_reader import has_bytes
from ckpt.model.checksum import checksum
from ckpt.staging.image import copyable
from ckpt.state.walk.stand_in import ExtraValues

_BUFFER_NAME: Final = re.compile(r"(^|\.)(running_mean|running_var|num_batches_tracked)$")
_ALIASES: Final = {"state_dict": "model", "module": "model", "optim": "optimizer"}
_MODEL: Final = "model"
_OPTIMIZER: Final = "optimizer"
_BY_GIVEN_NAMES: Final = "by the names given"
_COMMON_WORDS: Final = frozenset(
    ("model", "module", "net", "network", "opt", "optim", "optimizer", "state", "dict")
)


@dataclass(slots=True)
class ImportReport:
    """The result of an import.

    Attributes:
        names: A text that describes each entry of the state, by the name of the entry.
        notes: Notes for the user about differences between the source and the checkpoint.
        kind: The kind of the source.
        leftovers: The files and subfolders of the source folder that are not in the checkpoint.
    """

    names: dict[str, str] = field(default_factory=dict[str, str])
    notes: list[str] = field(default_factory=list[str])
    kind: str = ""
    leftovers: list[str] = field(default_factory=list[str])


class _Module(nn.Module):
    """A module without parameters and code, whose ``state_dict`` returns the given values."""

    def __init__(self, values: Mapping[str, Any]) -> None:
        super().__init__()
        self._values = dict(values)

    def state_dict(self, *_: Any, **__: Any) -> Any:
        return dict(self._values)


class _ExtraOptimizer(Optimizer, ExtraValues):
    """An optimizer with the values that an engine of DeepSpeed restores beside it."""

    def __init__(self, groups: list[dict[str, Any]], extra: Mapping[str, Any]) -> None:
        super().__init__(groups, {})
        self._extra = extra

    def extra(self) -> dict[str, Any]:
        return dict(self._extra)


class Shaper:
    """Replace the state dicts of modules and optimizers at the top level of a state with objects
    that the manager saves as modules and optimizers.

    Args:
        report: Gets notes for the user, and a text for each entry of the state.
        plain: The names of dicts of tensors that must stay dicts.
        names: The names of the parameters that the user gives, in the order in which the optimizer
            got them; None if there are none.

    Attributes:
        without_prefix: The modules whose names have lost the prefix of DDP.
        equal: The name of a tensor -> the name of one that is equal to it.

    ``_modules`` has the entries of each module of the state, by its name. The parameters of
    optimizers are looked up there.
    """

    def __init__(
        self, report: ImportReport, plain: Sequence[str], names: Sequence[str] | None
    ) -> None:
        self._report, self._plain, self._names = report, plain, names
        self._modules: dict[str, dict[str, Any]] = {}
        self.without_prefix: list[str] = []
        self.equal: dict[str, str] = {}

    def shape(self, state: State) -> dict[str, Any]:
        """Return ``state`` with modules and optimizers in place of their state dicts."""
        for key in state:
            if not isinstance(key, str):
                raise UnsupportedValue(
                    repr(key),
                    f"key of type {type(key).__name__}",
                    "load the file, and save what is in it under names",
                )
        if unknown := [name for name in self._plain if name not in state]:
            raise ConfigError(
                f"--plain {unknown[0]}: the source holds {', '.join(map(repr, sorted(state)[:10]))}"
            )
        state, notes = unflatten_optimizers(state)
        self._report.notes += notes
        if _is_module(state) and not self._plain:
            state = {_MODEL: state}
        elif _is_optimizer(state):
            state = {_OPTIMIZER: state}
        state = self._with_ckpt_names(state)
        for name, value in state.items():
            if name not in self._plain and _is_module(value):
                self._modules[name] = self._unwrap(name, value)
        optimizers = {
            name: self._optimizer(name, value)
            for name, value in state.items()
            if _is_optimizer(value)
        }
        objects: dict[str, Any] = {}
        for name, value in state.items():
            if name in self._modules:
                objects[name] = _Module(self._modules[name])
                self._report.names[name] = f"module of {len(self._modules[name])} entries"
            else:
                objects[name] = optimizers.get(name, value)
                self._report.names.setdefault(name, type(value).__name__)
        return objects

    def _with_ckpt_names(self, state: State) -> State:
        """Return ``state`` with the names that ckpt uses for models and optimizers, such as "model"
        for "state_dict".
        """
        new_state: State = {}
        for name, value in state.items():
            new_name = _ALIASES.get(name, name.removesuffix("_state_dict") or name)
            if (
                new_name != name
                and (_is_module(value) or _is_optimizer(value))
                and new_name not in state | new_state
            ):
                self._report.notes.append(f"{name!r} is {new_name!r} now")
                new_state[new_name] = value
            else:
                new_state[name] = value
        return new_state

    def _unwrap(self, name: str, values: Mapping[str, Any]) -> dict[str, Any]:
        """Return the entries of the module ``name`` with the names that they have without DDP, FSDP
        and ``torch.compile``.
        """
        names = wrapper_names.unwrap(values)
        for part in wrapper_names.removed_parts(names):
            self._report.notes.append(f"names of {name!r} are without {part!r} now")
        if wrapper_names.has_lost_prefix(names):
            self.without_prefix.append(name)
        return {names[key]: value for key, value in values.items()}

    def note_equal_tensors(self, digest: Callable[[torch.Tensor], str]) -> None:
        """Note in ``equal`` the tensors of modules that are equal to another one to the bit. Call
        it after ``shape``. ``digest`` returns a checksum of the elements of a tensor.
        """
        for name, entries in self._modules.items():
            self._note_equal_in(name, entries, digest)

    def _note_equal_in(
        self, name: str, entries: Mapping[str, Any], digest: Callable[[torch.Tensor], str]
    ) -> None:
        """Note the tensors of a module that are equal to another one to the bit.

        Some formats store a tied weight twice. Whether two equal tensors are tied is known only to
        the module that a restore fills. So both are saved, and a module that ties them may take
        either. Tensors of one dimension are left out: many are equal, and none are tied.
        """
        key_by_content: dict[tuple[torch.dtype, torch.Size, str], str] = {}
        for key, value in sorted(entries.items()):
            if (
                isinstance(value, torch.Tensor)
                and has_bytes(value)
                and value.ndim > 1
                and value.numel()
            ):
                equal_key = key_by_content.setdefault(
                    (value.dtype, value.shape, digest(value)), key
                )
                if equal_key != key:
                    self.equal[f"{name}/{key}"] = f"{name}/{equal_key}"

    # -- optimizers --------------------------------------------------------------------------------

    def _optimizer(self, name: str, value: Mapping[str, Any]) -> Optimizer:
        """Return an optimizer with the groups and the state of the state dict ``value``."""
        ids = [parameter_id for group in value["param_groups"] for parameter_id in group["params"]]
        parameters = dict(zip(map(str, ids), self._parameters(name, value, ids), strict=True))
        groups = [
            {
                **{
                    key: item for key, item in group.items() if key not in ("params", "param_names")
                },
                "params": [parameters[str(parameter_id)] for parameter_id in group["params"]],
            }
            for group in value["param_groups"]
        ]
        optimizer = (
            _ExtraOptimizer(groups, value.extra)
            if isinstance(value, EngineOptimizer)
            else Optimizer(groups, {})
        )
        for parameter_id, values in value["state"].items():
            if str(parameter_id) not in parameters:
                raise ConfigError(
                    f"{name!r} has state of the parameter {parameter_id!r}, which is in none of "
                    "its groups"
                )
            optimizer.state[parameters[str(parameter_id)]] = dict(values)
        return optimizer

    def _parameters(
        self, name: str, value: Mapping[str, Any], ids: list[Any]
    ) -> list[nn.Parameter]:
        """Return a parameter for each parameter of the optimizer ``name``.

        If a module can have all of these parameters, they are the module's tensors, which become
        parameters in the module too. Otherwise they are empty parameters that belong to no module.

        Args:
            name: The name of the optimizer.
            value: The state dict of the optimizer.
            ids: The names or numbers of its parameters, in order.
        """
        # ``origin`` says in words how the names were found, or why they were not.
        names_by_module, origin = self._names_by_module(value, ids)
        if len(names_by_module) > 1:
            names_by_module, origin = self._choose_module(name, names_by_module, origin)
        if not names_by_module and (modules_and_names := self._modules_and_names(value, ids)):
            modules = " and ".join(
                map(repr, dict.fromkeys(module for module, _ in modules_and_names))
            )
            self._report.names[name] = f"optimizer of {len(ids)} parameters of {modules}, by name"
            return [self._parameter(*owner) for owner in modules_and_names]
        if not names_by_module:
            self._report.names[name] = f"optimizer of {len(ids)} parameters, by place"
            self._report.notes.append(
                f"{name!r} loads by position, as load_state_dict() does, into an optimizer with "
                f"the same groups, since it {origin}; for another one, import it with its model "
                "and --param-names FILE"
            )
            return [nn.Parameter(torch.empty(0), requires_grad=False) for _ in ids]
        ((module, names),) = names_by_module.items()
        self._report.names[name] = f"optimizer of {len(ids)} parameters of {module!r}, {origin}"
        return [self._parameter(module, parameter_name) for parameter_name in names]

    def _parameter(self, module: str, name: str) -> nn.Parameter:
        """Make the tensor ``name`` of a module a parameter of an optimizer, and return it."""
        entries = self._modules[module]
        if not isinstance(entries[name], nn.Parameter):
            entries[name] = nn.Parameter(entries[name], requires_grad=False)
        parameter: nn.Parameter = entries[name]
        return parameter

    def _modules_and_names(self, value: Mapping[str, Any], ids: list[Any]) -> list[tuple[str, str]]:
        """Return the module and the name of each parameter of an optimizer over several modules.
        The result is empty if a parameter has no name, or if no module or several modules have it.

        A name may begin with that of the module: ``critic/0.weight``.
        """
        parameter_names, _ = self._names_of(value, ids) or ([], "")
        modules_and_names: list[tuple[str, str]] = []
        for parameter_name in parameter_names:
            matches = [
                (module, name)
                for module, entries in self._modules.items()
                for name in (parameter_name, parameter_name.removeprefix(f"{module}/"))
                if name in entries
            ]
            if len(matches) != 1:
                return []
            modules_and_names += matches
        return modules_and_names

    def _choose_module(
        self, name: str, names_by_module: dict[str, list[str]], origin: str
    ) -> tuple[dict[str, list[str]], str]:
        """Return the module of ``names_by_module`` that an optimizer is named after, with the
        ``origin`` of its names. If there is not exactly one, return none, and the reason.
        """
        namesakes = [module for module in names_by_module if _own_words(module) == _own_words(name)]
        choice = f"can be the optimizer of {' or '.join(map(repr, names_by_module))}"
        if len(namesakes) != 1:
            return {}, f"{choice}, and its name fits none or several (--plain NAME leaves one out)"
        (module,) = namesakes
        self._report.notes.append(f"{name!r} {choice}, and is that of {module!r} by its name")
        return {module: names_by_module[module]}, origin

    def _names_by_module(
        self, value: Mapping[str, Any], ids: list[Any]
    ) -> tuple[dict[str, list[str]], str]:
        """Return the names of an optimizer's parameters in each module that can have all of them,
        by module. Also return in words how they were found, or why they were not.

        Without names, the order of the module counts only if the parameters are in one group, and
        the state of no two of them can be exchanged.

        The arguments are those of ``_parameters``.
        """
        if names_and_origin := self._names_of(value, ids):
            names, origin = names_and_origin
            if origin == _BY_GIVEN_NAMES:
                self._check_shapes(names, ids, value["state"])
            names_by_module = {
                module: names
                for module, entries in self._modules.items()
                if names and all(isinstance(entries.get(name), torch.Tensor) for name in names)
            }
            if names_by_module or not names:
                return names_by_module, origin
            keys = {key for entries in self._modules.values() for key in entries}
            missing_name = next((name for name in names if name not in keys), names[0])
            return (
                {},
                f"has {missing_name!r} among its parameters, which no module of the source has",
            )
        candidates = {
            module: _names_in_order(entries, ids, value["state"])
            for module, entries in self._modules.items()
        }
        names_by_module = {module: names for module, names in candidates.items() if names}
        if not names_by_module:
            return {}, "names its parameters by number, and no module has them in this order"
        if len(value["param_groups"]) > 1:
            return {}, "names its parameters by number, and their groups have an order of their own"
        for module, names in names_by_module.items():
            if pair := _exchangeable_names(self._modules[module], names, ids, value["state"]):
                name_a, name_b = pair
                return {}, (
                    f"names its parameters by number, and can have {name_a!r} and {name_b!r} of "
                    f"{module!r} in either order"
                )
        return names_by_module, "by order and shape"

    def _names_of(self, value: Mapping[str, Any], ids: list[Any]) -> tuple[list[str], str] | None:
        """Return the names of an optimizer's parameters that the source or the user gives, and
        where they are from; None if neither gives names.

        The arguments are those of ``_parameters``.
        """
        if all(isinstance(name, str) for name in ids):
            return self._unwrap_names([str(name) for name in ids]), "by name"
        groups = value["param_groups"]
        if all(len(group.get("param_names") or ()) == len(group["params"]) for group in groups):
            return self._unwrap_names(
                [name for group in groups for name in group["param_names"]]
            ), "by name"
        if self._names is None:
            return None
        if len(self._names) != len(ids):
            raise ConfigError(
                f"--param-names has {len(self._names)} names, the optimizer has {len(ids)} "
                "parameters"
            )
        if doubles := [name for name, count in Counter(self._names).items() if count > 1]:
            raise ConfigError(f"--param-names has {doubles[0]!r} twice: a parameter has one line")
        return self._unwrap_names(self._names), _BY_GIVEN_NAMES

    def _check_shapes(self, names: Sequence[str], ids: list[Any], state: Mapping[Any, Any]) -> None:
        """Raise an error if the ``names`` that the user gives are in another order than ``ids``, as
        the shapes tell.
        """
        for entries in self._modules.values():
            if all(isinstance(entries.get(name), torch.Tensor) for name in names) and (
                evidence := _order_error(entries, names, ids, state)
            ):
                raise ConfigError(
                    f"--param-names gives {evidence}: write the names in the order of the "
                    "parameters in optimizer.param_groups, which may not be that of the model"
                )

    def _unwrap_names(self, names: Sequence[str]) -> list[str]:
        """Return the names of parameters as the modules have them.

        What wrappers have inserted, such as "module.", is removed if a module has the name without
        it.
        """
        keys = {key for entries in self._modules.values() for key in entries}
        return [wrapper_names.parameter_name(name, keys) for name in names]


def digest_of(tensor: torch.Tensor) -> str:
    """Return a checksum of the elements of ``tensor``."""
    flat = copyable(tensor.detach(), str(tensor.dtype).removeprefix("torch.")).contiguous()
    # An array is a buffer, but Python 3.11 has no ``collections.abc.Buffer`` to declare that.
    return checksum(memoryview(flat.reshape(-1).view(torch.uint8).numpy()))  # type: ignore[arg-type]


def _own_words(name: str) -> list[str]:
    """Return the words of ``name`` but for those that any model or optimizer may have: "g" is left
    of "netG" and of "optimizer_g", and nothing of "model" and of "optimizer".
    """
    words = re.findall(r"[A-Z]+(?![a-z])|[A-Z]?[a-z]+|[0-9]+", name)
    return [word.lower() for word in words if word.lower() not in _COMMON_WORDS]


def _is_module(value: Any) -> bool:
    """Return True if ``value`` has the structure of a module's ``state_dict()``."""
    return (
        isinstance(value, Mapping)
        and any(isinstance(item, torch.Tensor) and not _is_count(item) for item in value.values())
        and all(
            isinstance(key, str)
            and (isinstance(item, torch.Tensor) or key.endswith("_extra_state"))
            for key, item in value.items()
        )
    )


def _is_count(tensor: torch.Tensor) -> bool:
    """Return True if ``tensor`` may be a count, such as the step that torchtitan saves."""
    return tensor.ndim == 0 and not (tensor.is_floating_point() or tensor.is_complex())


def _is_optimizer(value: Any) -> bool:
    """Return True if ``value`` has the structure of an optimizer's ``state_dict()``: mappings in
    ``state``, and groups with unique parameters in ``param_groups``.
    """
    if not isinstance(value, Mapping):
        return False
    state, groups = value.get("state"), value.get("param_groups")
    if not isinstance(state, Mapping) or not isinstance(groups, list) or not groups:
        return False
    if not all(
        isinstance(group, Mapping)
        and isinstance(group.get("params"), list | tuple)
        and isinstance(names := group.get("param_names", ()), list | tuple)
        and all(isinstance(entry, str) for entry in names)
        for group in groups
    ):
        return False
    ids = [str(entry) for group in groups for entry in group["params"]]
    return len(set(ids)) == len(ids) and all(
        isinstance(values, Mapping) for values in state.values()
    )


def _names_in_order(
    entries: Mapping[str, Any], ids: list[Any], state: Mapping[Any, Any]
) -> list[str]:
    """Return the names of the parameters in a module's state dict, if these can be the parameters
    of an optimizer in the same order. Otherwise return an empty list.

    The number of parameters must be the number of ``ids``, and their shapes must be those of the
    tensors in the optimizer's state. Entries with the usual names of buffers are left out, and a
    tied parameter counts once.

    Args:
        entries: The state dict of the module.
        ids: The names or numbers of the optimizer's parameters, in order.
        state: ``state`` of the optimizer's state dict.
    """
    known_places: set[tuple[int, tuple[int, ...]]] = set()
    names: list[str] = []
    for name, value in entries.items():
        if isinstance(value, torch.Tensor) and not _BUFFER_NAME.search(name):
            if not has_bytes(value):
                return []
            place = (value.data_ptr(), tuple(value.shape))
            if value.numel() == 0 or place not in known_places:  # A tied parameter counts once
                names.append(name)
            known_places.add(place)
    if len(names) != len(ids):
        return []
    state_by_id = {str(key): values for key, values in state.items()}
    for name, parameter_id in zip(names, ids, strict=True):
        for item in state_by_id.get(str(parameter_id), {}).values():
            if isinstance(item, torch.Tensor) and item.ndim and item.shape != entries[name].shape:
                return []
    return names


def _order_error(
    entries: Mapping[str, Any], names: Sequence[str], ids: list[Any], state: Mapping[Any, Any]
) -> str:
    """Return a text about a parameter that has the name of another one; empty if there is none.

    The tensors of one key, such as ``exp_avg``, prove it if they have the shapes of the parameters
    that have one, but in another order. An optimizer may also keep tensors of other shapes.

    The arguments are those of ``_exchangeable_names``.
    """
    state_by_id = {str(key): values for key, values in state.items()}
    all_values = [state_by_id.get(str(parameter_id), {}) for parameter_id in ids]
    for key in dict.fromkeys(chain.from_iterable(all_values)):
        tensors = [values.get(key) for values in all_values]
        shapes = [
            (index, list(entries[names[index]].shape), list(tensor.shape))
            for index, tensor in enumerate(tensors)
            if isinstance(tensor, torch.Tensor)
        ]
        if sorted(shape for _, shape, _ in shapes) != sorted(shape for *_, shape in shapes):
            continue
        for index, shape, state_shape in shapes:
            if shape != state_shape:
                return (
                    f"the name {names[index]!r} to parameter {index + 1} of the optimizer, whose "
                    f"{key!r} has the shape {state_shape}, and not {shape}"
                )
    return ""


def _exchangeable_names(
    entries: Mapping[str, Any], names: Sequence[str], ids: list[Any], state: Mapping[Any, Any]
) -> tuple[str, str] | None:
    """Return two parameters whose state fits either of them, or None if there are none.

    Args:
        entries: The state dict of the module.
        names: The names of the parameters, as ``_names_in_order`` returns them.
        ids: The numbers of the parameters, in the same order.
        state: ``state`` of the optimizer's state dict.
    """
    state_by_id = {str(key): values for key, values in state.items()}
    members_by_shape: dict[torch.Size | None, list[tuple[str, bool]]] = defaultdict(list)
    for name, parameter_id in zip(names, ids, strict=True):
        values = state_by_id.get(str(parameter_id), {})
        has_shape = any(isinstance(item, torch.Tensor) and item.ndim for item in values.values())
        members_by_shape[entries[name].shape].append((name, bool(values)))
        if not has_shape and entries[name].ndim:  # Such a state fits a parameter of any shape
            members_by_shape[None].append((name, bool(values)))
    for members in members_by_shape.values():
        if len(members) > 1 and any(has_state for _, has_state in members):
            (name_a, _), (name_b, _), *_ = members
            return name_a, name_b
    return None
