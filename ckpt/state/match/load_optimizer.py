"""Match an optimizer of the state with a saved optimizer.

The saved state of a parameter is found by the parameter's name. If a renaming gives the parameter
another name in the checkpoint, its state is looked up under that name. A parameter that the saved
state did not have has a positional name, made of its group and its position there.

A part is one named parameter in a tensor of a parameter group. A flat parameter of FSDP1 has
several parts, each of which is a *piece*, a range of the parameter's elements. A wrapper tensor is
one whose elements are in other tensors, such as a quantised moment. A slot is a place in an
optimizer that gets a saved tensor, and a view is the place of a saved tensor in a buffer. A record
is the description of a tensor or a parameter in the checkpoint. A stand-in is an object that takes
the place of an optimizer of a framework.

A node is a saved value in the manifest's tree (see ``match.saved_nodes``).
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from itertools import chain
from operator import is_not
from typing import Any, Final

import msgspec
import torch
from torch.distributed.tensor import DTensor
from torch.optim import Optimizer

from ckpt.errors import OptimizerMismatch, RestoreError
from ckpt.model.key_order import in_order
from ckpt.model.manifest import Tensor
from ckpt.model.values import Node, names_below, unescape
from ckpt.state.match.matcher import Matcher, fill_tensor
from ckpt.state.match.meta_tensors import is_meta
from ckpt.state.match.optimizer_load_code import Completion, move_to_parameter
from ckpt.state.match.optimizer_slots import Slot, can_fill, setting_identity, state_value_identity
from ckpt.state.match.plain_values import tensor_named
from ckpt.state.match.saved_nodes import ABSENT, SavedParameter, is_mapping, tag
from ckpt.state.match.trial_step import state_of_step
from ckpt.state.tensors.layout import empty_in_order, is_plain
from ckpt.state.tensors.local_shards import TensorOrShards
from ckpt.state.tensors.wrapped import is_wrapper
from ckpt.state.walk.module_entries import Part
from ckpt.state.walk.modules import (
    POSITIONAL,
    STEP_DEVICE_SETTINGS,
    check_kind,
    check_owners,
    check_state,
    fits,
    in_present_order,
    is_on_device,
    key_text,
    new_state,
    part_groups,
    positional_name,
    state_name,
)
from ckpt.state.walk.optimizer_state import local_state_of, member_like
from ckpt.state.walk.stand_in import OptimizerStandIn

_IMPLEMENTATION_SETTINGS: Final = frozenset(
    ("foreach", "fused", "capturable", "differentiable", "maximize")
)
"""Settings of a parameter group that choose an implementation of the step. They do not show the
kind of the optimizer.
"""
_NAMES_SETTING: Final = "param_names"
"""The setting in which torch keeps the names of a group's parameters. A restore does not change it,
since the names must be those of the optimizer in the state.
"""
_SCHEDULER_SETTINGS: Final = frozenset(
    ("initial_lr", "swa_lr", "max_lr", "min_lr", "max_momentum", "base_momentum")
)
"""Settings that learning rate schedulers add to parameter groups."""


def match_optimizer(
    matcher: Matcher, optimizer: Optimizer, node: Node, path: str, source: str
) -> None:
    """Match an optimizer with ``node``, a saved optimizer.

    The restore fills a tensor of the state in place if it has the right dtype and shape, and makes
    a new tensor otherwise. If the checkpoint has a parameter, the restore drops those values of the
    parameter's state that were not saved. The saved settings of a parameter group replace its
    present settings, except for the names of its parameters.

    If the saved optimizer is of another kind and the restore is not strict, ``optimizer`` keeps its
    state and its settings.

    Args:
        matcher: The matching that the work is added to.
        optimizer: The optimizer in the state.
        node: The saved optimizer. It is ``ABSENT`` if the renaming may find the values of the
            optimizer elsewhere in the checkpoint.
        path: The name of the optimizer in the state.
        source: The name of the optimizer in the checkpoint.

    Raises:
        OptimizerMismatch: The saved optimizer is of another kind, and the restore is strict.
        KindMismatch, ShapeMismatch, DtypeMismatch: ``node`` is neither an optimizer nor a dict with
            the state of one, or a saved value does not fit.
        RestoreError: The saved settings do not fit the parameter groups of ``optimizer``, or
            ``optimizer`` has parameters on the meta device that no module of the state holds, or
            must take a step before a value of its state can be restored.
        UnsupportedValue: ``optimizer`` is a ``ZeroRedundancyOptimizer`` that steps during
            ``backward()``, or a tensor of its state cannot be filled.
    """
    if node is not ABSENT:
        if is_mapping(node):
            groups = part_groups(optimizer, matcher.parameters)
            names = [matcher.source_of(part.path) for parts in chain(*groups) for part in parts]
            matcher.checkpoint.read_optimizer_dict(source, names)
            node = matcher.checkpoint.node(source)
        matcher.require_tag(node, path, "optimizer")
    check_kind(path, optimizer)
    optimizer_loader = _OptimizerLoader(matcher, optimizer, path, source)
    if optimizer_loader.targets and (mismatch := optimizer_loader.kind_mismatch()) is not None:
        if matcher.selection.strict:
            raise OptimizerMismatch(path, *mismatch)
        # The optimizer keeps its present state and settings. Since no match is recorded, the
        # report lists the saved optimizer as unexpected.
        return
    matcher.open_container(path, source)
    optimizer_loader.match_values(node)
    if (
        isinstance(optimizer, OptimizerStandIn)
        and node is not ABSENT
        and "extra" in node
        and matcher.restores(f"{path}/extra")
    ):
        extra = matcher.remaker.prepare(node["extra"])
        matcher.actions.append(lambda: optimizer.load_extra(extra()))


@dataclass(frozen=True, slots=True, eq=False)
class _Target:
    """A parameter of the optimizer, or a part of one.

    Attributes:
        group: The parameter group of the parameter.
        restored_group: The group with those settings after the restore that place ``step``.
        parameter: The tensor in the parameter group.
        part: The parameter, or the part of it.
        has_local_state: True if this rank keeps any state of the part.
        name: The common prefix of the names of the optimizer's values for the part, such as
            ``optimizer/model/weight``.
        source: The prefix of the names of these values in the checkpoint.
        parameter_source: The name of the parameter itself in the checkpoint.
        record: The saved settings and values; None if the checkpoint has none.
    """

    group: dict[str, Any]
    restored_group: Mapping[str, Any]
    parameter: torch.Tensor
    part: Part
    has_local_state: bool
    name: str
    source: str
    parameter_source: str
    record: SavedParameter | None


class _OptimizerLoader:
    """Matches one optimizer.

    A target is a parameter of the optimizer, or a part of one, with its saved values. The matcher
    collects the reads, the slots, the names, and the calls after the reads (``actions``). Its
    ``remaker`` prepares functions that make saved values again, and its ``meta_replacements`` give
    real tensors for those on the meta device. ``_local_state`` is the state that this rank keeps.
    The completion runs the code by which the optimizer loads a state dict, after the restore. The
    copies of present states, the new states, and the states that a trial step has made are kept by
    the identity (``id``) of the parameter.

    Attributes:
        targets: The parameters that the checkpoint has, and that have state or settings to restore.
    """

    def __init__(self, matcher: Matcher, optimizer: Optimizer, path: str, source: str) -> None:
        self._matcher, self._optimizer, self._path = matcher, optimizer, path
        self._local_state = local_state_of(path, optimizer)
        check_owners(path, optimizer)
        check_state(path, optimizer, self._local_state.by_parameter)
        self._completion = Completion(path, optimizer, self._local_state)
        self._present_copies: dict[int, dict[Any, Any]] = {}
        self._new_states: dict[int, dict[Any, Any]] = defaultdict(dict)
        self._trial_states: dict[int, Mapping[Any, Any]] = {}
        restores_settings = matcher.restores(f"{path}/param_groups")
        self._all_targets = list(self._find_targets(source, restores_settings))
        self.targets = [
            target
            for target in self._all_targets
            if target.record and (self._restores(target) or restores_settings)
        ]

    def _find_targets(self, source: str, restores_settings: bool) -> Iterator[_Target]:
        """Yield the parts of all parameters of the optimizer, which is ``source`` in the
        checkpoint. ``restores_settings`` is True if the restore sets the settings of the groups.
        """
        groups = part_groups(self._optimizer, self._matcher.parameters)
        for group_index, (group, group_parts) in enumerate(
            zip(self._optimizer.param_groups, groups, strict=True)
        ):
            numbered_parameters = enumerate(zip(group["params"], group_parts, strict=True))
            for position, parameter, part in (
                (position, parameter, part)
                for position, (parameter, parts) in numbered_parameters
                for part in parts
            ):
                part_path = part.path
                has_local_state = part.has_elements and self._local_state.keeps(parameter)
                if part_path.startswith(POSITIONAL) and is_meta(parameter):
                    raise RestoreError(
                        f"{self._path!r} owns a parameter on the meta device that no module of "
                        "the state has: build the optimizer after its model was made real, or "
                        "give the model too"
                    )
                name = f"{self._path}/{part_path}"
                parameter_source = self._matcher.source_of(part_path)
                state_source = self._matcher.source_of(name)
                # If no rule of the renaming names this state, it is renamed like its parameter.
                if state_source in (name, f"{source}/{part_path}"):
                    state_source = f"{source}/{parameter_source}"
                record = self._matcher.checkpoint.parameter(state_source)
                if record is None and part.piece is None and self._may_load_by_position(parameter):
                    # If the saved state did not have the parameter, the name in the checkpoint has
                    # the parameter's position in the optimizer in place of the parameter's path.
                    position_name = f"{source}/{positional_name(group_index, position)}"
                    record = self._matcher.checkpoint.parameter(position_name)
                    state_source = position_name if record else state_source
                restored_group: Mapping[str, Any] = group
                if record is not None and restores_settings:
                    placement = {key: record.settings.get(key) for key in STEP_DEVICE_SETTINGS}
                    restored_group = {**group, **placement}
                names = name, state_source, parameter_source
                yield _Target(
                    group, restored_group, parameter, part, has_local_state, *names, record
                )

    def _may_load_by_position(self, parameter: torch.Tensor) -> bool:
        """Return True if the checkpoint may have the state of ``parameter`` by its position.

        An imported state dict often has no names. Its state then goes to the parameters by their
        positions, as ``Optimizer.load_state_dict`` takes it.
        """
        checkpoint, parameters = self._matcher.checkpoint, self._matcher.parameters
        return checkpoint.is_imported or not parameters.in_module(parameter)

    def kind_mismatch(self) -> tuple[str, Sequence[str], Sequence[str]] | None:
        """Return None if the saved optimizer may be of the same kind as this one.

        Otherwise, return the evidence: "state" or "settings", then the names of such values that
        only the saved optimizer has, then the names that only this optimizer has. The kinds differ
        only if each optimizer has names that the other one lacks. If only one of them has further
        names, they prove nothing, since options and versions of torch add names.
        """
        saved_keys: set[str] = set()
        settings: set[str] = set()
        for target in self.targets:
            saved_keys |= self._saved_key_texts(target)
            settings |= set(target.record.settings) if target.record else set()
        own_keys = set(map(key_text, chain(*self._local_state.by_parameter.values())))
        if own_keys and saved_keys and own_keys - saved_keys and saved_keys - own_keys:
            return "state", sorted(saved_keys - own_keys), sorted(own_keys - saved_keys)
        saved_settings = (
            settings - _IMPLEMENTATION_SETTINGS - _SCHEDULER_SETTINGS - {_NAMES_SETTING}
        )
        own_settings = {
            key for key in self._optimizer.defaults if isinstance(key, str)
        } - _IMPLEMENTATION_SETTINGS
        group_keys = {key for group in self._optimizer.param_groups for key in group}
        # Each optimizer must have two settings that the other one lacks. A single setting may be a
        # new default of a later torch, or a key that a user has added.
        if len(own_settings - saved_settings) > 1 and len(saved_settings - group_keys) > 1:
            return (
                "settings",
                sorted(saved_settings - group_keys),
                sorted(own_settings - saved_settings),
            )
        return None

    def match_values(self, node: Node) -> None:
        """Match the state and the settings with those of ``node``, the saved optimizer."""
        matcher = self._matcher
        matcher.actions.append(self._completion.begin)
        self._match_all()
        restores_settings = matcher.restores(f"{self._path}/param_groups")
        if not isinstance(self._optimizer, OptimizerStandIn) and (
            restores_settings or any(map(self._restores, self._all_targets))
        ):
            matcher.actions.append(self._restore_order)
            values = node.get("values", {}) if node is not ABSENT and restores_settings else {}
            matcher.actions.append(partial(self._completion.end, matcher.remaker.prepare(values)))

    def _restores(self, target: _Target) -> bool:
        """Return True if the selection takes the state of ``target``."""
        return self._matcher.restores(target.name, target.name.removeprefix(f"{self._path}/"))

    def _match_all(self) -> None:
        """Match the state of each parameter, and the settings of each parameter group."""
        matcher = self._matcher
        for target in self._all_targets:
            if not self._restores(target):
                matcher.record_match(target.name, target.source, hide_renaming=True)
            elif target.record is None:
                matcher.record_missing(target.name, target.source, target.parameter_source)
            else:
                # What loads by position is no renaming, since its source has no name.
                by_position = POSITIONAL in target.source and POSITIONAL not in target.name
                matcher.record_match(target.name, target.source, hide_renaming=by_position)
                if target.has_local_state:
                    self._match_state(target, target.record)
        if matcher.restores(f"{self._path}/param_groups"):
            for group in self._optimizer.param_groups:
                self._match_group(
                    group,
                    [
                        _without_names(target.record.settings)
                        for target in self._all_targets
                        if target.group is group and target.record
                    ],
                )

    def _restore_order(self) -> None:
        """Give the parameters in the state the order that they had when they were saved. Those that
        the checkpoint does not have come last.
        """
        places = {
            id(target.parameter): target.record.place
            for target in self._all_targets
            if target.record and self._restores(target)
        }
        state = self._local_state.by_parameter
        order = sorted(state, key=lambda parameter: places.get(id(parameter), len(places)))
        if any(map(is_not, order, state)):
            ordered_state = {parameter: state[parameter] for parameter in order}
            state.clear()
            state.update(ordered_state)

    def _match_group(self, group: dict[str, Any], values: list[Node]) -> None:
        """Match the settings of a parameter group. ``values`` are the saved settings of each of its
        parameters, which must be equal.
        """
        if not values:
            return
        if any(value != values[0] for value in values[1:]):
            raise RestoreError(
                f"{self._path}/param_groups: parameters with different settings in the checkpoint "
                "share a group here: group them as they were saved"
            )
        node, tensor_settings = values[0], dict[str, TensorOrShards]()
        items = () if tag(node) else node.items()
        tensor_nodes = {key: item for key, item in items if tag(item) == "tensor"}
        for key, item in tensor_nodes.items():
            self._matcher.slots.append(self._setting_slot(group, key, item["n"], tensor_settings))
        make_settings = self._matcher.remaker.prepare(
            {key: item for key, item in node.items() if key not in tensor_nodes}
        )
        enum_members = _enum_members(self._path, group, node)

        def apply() -> None:
            """Set the settings of the group."""
            settings = {**make_settings(), **tensor_settings, **enum_members}
            if tensor_nodes:  # Keep the saved order of the keys
                settings = {key: settings[key] for key in node}
            if not isinstance(self._optimizer, OptimizerStandIn):
                self._completion.remove_unsaved_settings(group, settings)
            group.update(settings)

        self._matcher.actions.append(apply)

    def _setting_slot(
        self, group: dict[str, Any], key: str, stored_name: str, settings: dict[str, TensorOrShards]
    ) -> Slot:
        """Return the slot for the setting ``key`` of a parameter group. ``stored_name`` is the name
        of the saved tensor. The slot puts its tensor into ``settings``.
        """
        matcher = self._matcher
        record, present = tensor_named(matcher.checkpoint.tensors, stored_name), group.get(key)
        view = matcher.checkpoint.manifest.views.get(record.name)
        device = present.device if isinstance(present, torch.Tensor) else torch.device("cpu")
        # A captured graph reads the learning rate at its address, so the tensor is filled in place.
        fills_present = (
            not self._completion.needs_new_tensors
            and fits(present, record, None)
            and can_fill(present, view)
        )
        dtype = getattr(torch, record.dtype)

        def put(tensor: TensorOrShards) -> None:
            settings[key] = tensor
            matcher.request_read(stored_name, stored_name, tensor)

        return Slot(
            identity=setting_identity(group, key),
            record=record,
            view=view,
            device=device,
            present=present if fills_present else None,
            make=lambda: empty_in_order(record.shape, record.order, dtype=dtype, device=device),
            put=put,
        )

    def _saved_key_texts(self, target: _Target) -> set[str]:
        """Return the keys of the saved state of a part, in the form that ``key_text`` returns."""
        names = [
            *names_below(self._matcher.checkpoint.names, target.source),
            *(target.record.values if target.record else ()),
        ]
        return {name[len(target.source) + 1 :].partition("/")[0] for name in names}

    def _match_state(self, target: _Target, record: SavedParameter) -> None:
        """Match the state of one parameter, or of one part of it, with the saved values. The name
        of a value is that of the target, and then the text of its key.
        """
        matcher, key_start = self._matcher, len(target.source) + 1
        new_values = self._new_states[id(target.parameter)]
        value_makers: dict[Any, Callable[[], Any]] = {}
        present_state = self._present_state(target.parameter)
        keys = {key_text(key): key for key in present_state}
        for source in names_below(matcher.checkpoint.names, target.source):
            key_part = source[key_start:]
            if "/" in key_part:
                continue  # The tensor is inside of a container, whose node is in ``record.values``
            name = f"{target.name}/{key_part}"
            key = _state_key(name, key_part, keys)
            value = new_values.get(key)
            if value is not None and target.part.elements_of(target.name, value) is value:
                continue  # The value, a step counter for instance, belongs to all parts
            if is_wrapper(present_state.get(key)):
                # The saved value is a plain tensor, so this call raises ``KindMismatch``.
                fill_tensor(
                    matcher, name, source, present_state[key], matcher.checkpoint.node(source)
                )
            if target.part.piece is None and isinstance(target.parameter, torch.Tensor):
                matcher.slots.append(self._state_slot(target, key, present_state.get(key), source))
                continue
            present = new_values.get(key, present_state.get(key))
            tensor = self._target_tensor(target, key, present, matcher.checkpoint.tensors[source])
            new_values[key] = tensor
            matcher.request_read(name, source, target.part.elements_of(target.name, tensor))
        for source, node in record.values.items():
            key_part = source[key_start:]
            key = _state_key(f"{target.name}/{key_part}", key_part, keys)
            if tag(node) == "subclass":
                present = new_values.get(key, present_state.get(key))
                new_values[key] = self._wrapper_tensor(target, key, present)
                fill_tensor(matcher, f"{target.name}/{key_part}", source, new_values[key], node)
            else:
                value_makers[key] = matcher.remaker.prepare(node)

        def apply() -> None:
            # A parameter on the meta device is real by now, if the restore fills it.
            values = {key: make() for key, make in value_makers.items()}
            if isinstance(target.parameter, torch.Tensor) and not is_meta(target.parameter):
                values = move_to_parameter(values, target.restored_group, target.parameter)
            new_values.update(values)
            if new_values:
                self._local_state.by_parameter[target.parameter] = {
                    key: new_values[key] for key in in_order(new_values, record.keys, key_text)
                }
            else:
                self._local_state.by_parameter.pop(target.parameter, None)

        matcher.actions.append(apply)

    def _present_state(self, parameter: torch.Tensor) -> Mapping[Any, Any]:
        """Return the present state of ``parameter``, whose tensors the restore may fill in place.

        If code of the optimizer may look at the present state, it is a copy.
        """
        present_state = self._local_state.by_parameter.get(parameter, {})
        if not self._completion.needs_new_tensors:
            return present_state
        if id(parameter) not in self._present_copies:
            self._present_copies[id(parameter)] = {
                key: value.detach().clone() if isinstance(value, torch.Tensor) else value
                for key, value in present_state.items()
            }
        return self._present_copies[id(parameter)]

    def _state_slot(self, target: _Target, key: object, present: Any, source: str) -> Slot:
        """Return the slot for the value ``key`` of the state of a parameter, which is ``source`` in
        the checkpoint. ``present`` is the present value.
        """
        matcher = self._matcher
        stored_record = matcher.checkpoint.tensors[source]
        record = self._target_record(target, present, stored_record)
        parameter = matcher.meta_replacements.real_like(target.name, target.parameter)
        may_share_buffer = is_plain(parameter) and record.dtype == stored_record.dtype
        views = matcher.checkpoint.manifest.views if may_share_buffer else {}
        view = views.get(stored_record.name)
        new_values = self._new_states[id(target.parameter)]
        name = f"{target.name}/{source[len(target.source) + 1 :]}"

        def put(tensor: TensorOrShards) -> None:
            new_values[key] = tensor
            matcher.request_read(name, source, tensor)

        fills_present = self._fits_present(target, key, present, record) and can_fill(present, view)
        on_device = is_on_device(key, target.restored_group)
        device = parameter.device if on_device else torch.device("cpu")
        return Slot(
            identity=state_value_identity(self._optimizer, target.parameter, key),
            record=record,
            view=view,
            device=present.device if fills_present else device,
            present=present if fills_present else None,
            make=lambda: self._new_tensor(target, key, record),
            put=put,
        )

    def _target_tensor(
        self, target: _Target, key: object, present: Any, record: Tensor
    ) -> TensorOrShards:
        """Return the tensor that is filled with the saved value ``record``: the present value
        ``present`` if it has the right dtype and shape, else a new tensor.
        """
        record = self._target_record(target, present, record)
        if self._fits_present(target, key, present, record):
            tensor: TensorOrShards = present
            return tensor
        return self._new_tensor(target, key, record)

    def _target_record(self, target: _Target, present: Any, record: Tensor) -> Tensor:
        """Return ``record``, a value of the state, with the dtype and the order that it gets."""
        parameter_record = self._matcher.checkpoint.tensors.get(target.parameter_source)
        target_record = in_present_order(record, parameter_record, target.parameter)
        if self._matcher.selection.cast:
            target_record = msgspec.structs.replace(
                target_record, dtype=self._target_dtype(target, present, target_record)
            )
        return target_record

    def _fits_present(self, target: _Target, key: object, present: Any, record: Tensor) -> bool:
        """Return True if the present value ``present`` can be filled with ``record``.

        A present ``step`` is not filled if the saved settings, which replace those of the group,
        place it on another device.
        """
        is_moved = is_on_device(key, target.restored_group) != is_on_device(key, target.group)
        return fits(present, record, target.part.piece) and not is_meta(present) and not is_moved

    def _new_tensor(self, target: _Target, key: object, record: Tensor) -> TensorOrShards:
        """Return a new tensor for the value ``key`` of the state, which ``record`` fills."""
        parameter = self._matcher.meta_replacements.real_like(target.name, target.parameter)
        if isinstance(self._optimizer, OptimizerStandIn):
            return self._optimizer.new_state(
                parameter, key, getattr(torch, record.dtype), record.shape
            )
        is_plain_key = target.record is not None and key_text(key) in target.record.plain_keys
        if isinstance(parameter, DTensor) and not is_plain_key and record.shape:
            value = None if record.shape == parameter.shape else self._trial_value(target, key)
            if isinstance(value, torch.Tensor) and fits(value, record, target.part.piece):
                return value
        return new_state(
            parameter, target.restored_group, key, record, target.part.piece, is_plain=is_plain_key
        )

    def _wrapper_tensor(self, target: _Target, key: object, present: Any) -> TensorOrShards:
        """Return the tensor that is filled with a saved wrapper tensor (see ``tensors.wrapped``).

        This is the present value ``present``. If ``present`` is no tensor, it is the tensor that a
        trial step makes (see ``state_of_step``), since ckpt cannot make a wrapper tensor by itself.

        Raises:
            RestoreError: The trial step fails, or does not make a tensor for ``key``.
        """
        if isinstance(present, torch.Tensor):
            return present
        if not isinstance(tensor := self._trial_value(target, key), torch.Tensor):
            name = state_name(self._path, target.part.path, key)
            raise RestoreError(
                f"{name!r} is in the checkpoint, and a first step of "
                f"{type(self._optimizer).__qualname__} does not make it: take one optimizer step "
                "before restoring"
            )
        return tensor

    def _trial_value(self, target: _Target, key: object) -> object:
        """Return the value that a trial step (see ``state_of_step``) makes for ``key`` in the state
        of a parameter; None if it makes none.

        Raises:
            RestoreError: The trial step fails.
        """
        if (state := self._trial_states.get(id(target.parameter))) is None:
            name = state_name(self._path, target.part.path, key)
            parameter = self._matcher.meta_replacements.real_like(target.name, target.parameter)
            state = state_of_step(name, self._optimizer, target.group, parameter)
            self._trial_states[id(target.parameter)] = state
        return state.get(key)

    def _target_dtype(self, target: _Target, present: Any, record: Tensor) -> str:
        """Return the dtype that a value gets if the restore may convert it.

        This is the dtype of the present value ``present``. If there is no present value, and value
        and parameter were saved with the same dtype and shape, this is the dtype of the parameter.
        Otherwise, this is the saved dtype.
        """
        if isinstance(present, TensorOrShards):
            return str(present.dtype).removeprefix("torch.")
        parameter_record = self._matcher.checkpoint.tensors.get(target.parameter_source)
        parameter_form = parameter_record and (parameter_record.dtype, parameter_record.shape)
        is_same = parameter_form == (record.dtype, record.shape)
        return str(target.parameter.dtype).removeprefix("torch.") if is_same else record.dtype


def _enum_members(path: str, group: Mapping[str, Any], node: Mapping[str, Node]) -> dict[str, Any]:
    """Return the settings that are members of an enum in ``group``, as the checkpoint has them.
    ``path`` is the name of the optimizer.

    Raises:
        RestoreError: The enum does not have the saved value.
    """
    enum_members: dict[str, Any] = {}
    for key in group.keys() & node.keys():
        try:
            member = member_like(group[key], node[key])
        except ValueError as error:
            raise RestoreError(
                f"{path}/param_groups: {key!r} has a value in the checkpoint that its "
                f"enum does not have: {error}. Build the optimizer as it was saved"
            ) from None
        if member is not node[key]:
            enum_members[key] = member
    return enum_members


def _without_names(settings: Node) -> Node:
    """Return ``settings`` without the names of the parameters."""
    return {key: value for key, value in settings.items() if key != _NAMES_SETTING}


def _state_key(name: str, part: str, present: Mapping[str, Any]) -> object:
    """Return the key of the value ``name`` in the optimizer's state of a parameter.

    ``part`` is the last part of the name. ``present`` maps such parts to the keys of the present
    state.

    Raises:
        RestoreError: The key is neither a string nor an int, so ``part`` does not determine it, and
            the present state does not have it.
    """
    key = present.get(part, unescape(part))
    # A key of another type has a text that begins with "~2" (see ``unescape``).
    if key == part and part.startswith("~2"):
        raise RestoreError(
            f"{name!r} has the key {part[2:]}, which is neither a string nor an int: take one "
            "optimizer step before restoring"
        )
    return key
