"""Match an optimizer of the state with a saved optimizer.

The saved state of a parameter is found by the parameter's name. If a renaming gives the parameter
another name in the checkpoint, its state is looked up under that name.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
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
from ckpt.state.match.materialise import is_meta
from ckpt.state.match.optimizer_load_code import Completion, place
from ckpt.state.match.optimizer_slots import Slot, can_fill, in_group, in_state
from ckpt.state.match.remake import tensor_named
from ckpt.state.match.saved_nodes import ABSENT, SavedParameter, is_mapping, tag
from ckpt.state.match.trial_step import state_of_step
from ckpt.state.tensors.layout import empty_in_order, is_plain
from ckpt.state.tensors.local_shards import Source
from ckpt.state.tensors.wrapped import is_wrapper
from ckpt.state.walk.module_entries import Part
from ckpt.state.walk.modules import (
    PLACELESS,
    PLACING_SETTINGS,
    check_kind,
    check_owners,
    check_state,
    fits,
    in_present_order,
    is_on_device,
    new_state,
    part_groups,
    part_of,
    placeless,
    state_name,
)
from ckpt.state.walk.optimizer_state import keeper_of, member_like
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
    match: Matcher, optimizer: Optimizer, node: Node, path: str, source: str
) -> None:
    """Match an optimizer with ``node``, a saved optimizer.

    The restore fills a tensor of the state in place if it has the right dtype and shape, and makes
    a new tensor otherwise. If the checkpoint has a parameter, the restore drops those values of the
    parameter's state that were not saved. The saved settings of a parameter group replace its
    present settings, except for the names of its parameters.

    If the saved optimizer is of another kind and the restore is not strict, ``optimizer`` keeps its
    state and its settings.

    Args:
        match: The matching that the work is added to.
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
            groups = part_groups(optimizer, match.parameters)
            names = [
                match.source(part.path) for group in groups for parts in group for part in parts
            ]
            match.checkpoint.adopt_dict(source, names)
            node = match.checkpoint.node(source)
        match.expect(node, path, "optimizer")
    check_kind(path, optimizer)
    loader = _Loader(match, optimizer, path, source)
    if loader.targets and (mismatch := loader.kind_mismatch()) is not None:
        if match.selection.strict:
            raise OptimizerMismatch(path, *mismatch)
        # The optimizer keeps its present state and settings. Since nothing is claimed here, the
        # report lists the saved optimizer as unexpected.
        return
    match.open(path, source)
    loader.load(node)
    if (
        isinstance(optimizer, OptimizerStandIn)
        and node is not ABSENT
        and "extra" in node
        and match.takes(f"{path}/extra")
    ):
        extra = match.values.prepare(node["extra"])
        match.actions.append(lambda: optimizer.load_extra(extra()))


@dataclass(frozen=True, slots=True, eq=False)
class _Target:
    """A parameter of the optimizer, or a part of one.

    Attributes:
        group: The parameter group of the parameter.
        restored_group: The group with those settings after the restore that place ``step``.
        parameter: The tensor in the parameter group.
        part: The parameter, or the part of it.
        is_here: True if this rank keeps any state of the part.
        name: The common prefix of the names of the optimizer's values for the part, such as
            ``optimizer/model/weight``.
        source: The prefix of the names of these values in the checkpoint.
        weight: The name of the parameter itself in the checkpoint.
        record: The saved settings and values; None if the checkpoint has none.
    """

    group: dict[str, Any]
    restored_group: Mapping[str, Any]
    parameter: torch.Tensor
    part: Part
    is_here: bool
    name: str
    source: str
    weight: str
    record: SavedParameter | None


class _Loader:
    """Matches one optimizer.

    Attributes:
        targets: The parameters that the checkpoint has, and that have state or settings to restore.
    """

    def __init__(self, match: Matcher, optimizer: Optimizer, path: str, source: str) -> None:
        self._match, self._optimizer, self._path = match, optimizer, path
        self._keeper = keeper_of(path, optimizer)
        check_owners(path, optimizer)
        check_state(path, optimizer, self._keeper.state)
        self._completion = Completion(path, optimizer, self._keeper)
        self._present_copies: dict[int, dict[Any, Any]] = {}
        self._new_states: dict[int, dict[Any, Any]] = defaultdict(dict)
        self._trial_states: dict[int, Mapping[Any, Any]] = {}
        takes_settings = match.takes(f"{path}/param_groups")
        self._all_targets = list(self._find_targets(source, takes_settings))
        self.targets = [
            target
            for target in self._all_targets
            if target.record and (self._takes(target) or takes_settings)
        ]

    def _find_targets(self, source: str, takes_settings: bool) -> Iterator[_Target]:
        """Yield the parts of all parameters of the optimizer, which is ``source`` in the
        checkpoint. ``takes_settings`` is True if the restore sets the settings of the groups.
        """
        groups = part_groups(self._optimizer, self._match.parameters)
        for group_index, (group, group_parts) in enumerate(
            zip(self._optimizer.param_groups, groups, strict=True)
        ):
            pairs = enumerate(zip(group["params"], group_parts, strict=True))
            for position, parameter, part in (
                (position, parameter, part)
                for position, (parameter, parts) in pairs
                for part in parts
            ):
                part_path = part.path
                is_here = part.has_elements and self._keeper.keeps(parameter)
                if part_path.startswith(PLACELESS) and is_meta(parameter):
                    raise RestoreError(
                        f"{self._path!r} owns a parameter on the meta device that no module of "
                        "the state has: build the optimizer after its model was made real, or "
                        "give the model too"
                    )
                name = f"{self._path}/{part_path}"
                weight = self._match.source(part_path)
                origin = self._match.source(name)
                # If no rule of the renaming names this state, it is renamed like its parameter.
                if origin in (name, f"{source}/{part_path}"):
                    origin = f"{source}/{weight}"
                record = self._match.checkpoint.parameter(origin)
                if record is None and part.piece is None and self._may_have_place(parameter):
                    # If the saved state did not have the parameter, the name in the checkpoint has
                    # the parameter's position in the optimizer in place of the parameter's path.
                    position_name = f"{source}/{placeless(group_index, position)}"
                    record = self._match.checkpoint.parameter(position_name)
                    origin = position_name if record else origin
                restored_group: Mapping[str, Any] = group
                if record is not None and takes_settings:
                    placement = {key: record.settings.get(key) for key in PLACING_SETTINGS}
                    restored_group = {**group, **placement}
                yield _Target(
                    group, restored_group, parameter, part, is_here, name, origin, weight, record
                )

    def _may_have_place(self, parameter: torch.Tensor) -> bool:
        """Return True if the checkpoint may have the state of ``parameter`` by its position.

        An imported state dict often has no names. Its state then goes to the parameters by their
        positions, as ``Optimizer.load_state_dict`` takes it.
        """
        return self._match.checkpoint.is_imported or not self._match.parameters.in_module(parameter)

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
            saved_keys |= self._keys(target)
            settings |= set(target.record.settings) if target.record else set()
        own_keys = {part_of(key) for state in self._keeper.state.values() for key in state}
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

    def load(self, node: Node) -> None:
        """Match the state and the settings with those of ``node``, the saved optimizer."""
        match = self._match
        match.actions.append(self._completion.begin)
        self._match_all()
        takes_settings = match.takes(f"{self._path}/param_groups")
        if not isinstance(self._optimizer, OptimizerStandIn) and (
            takes_settings or any(map(self._takes, self._all_targets))
        ):
            match.actions.append(self._restore_order)
            values = node.get("values", {}) if node is not ABSENT and takes_settings else {}
            match.actions.append(partial(self._completion.end, match.values.prepare(values)))

    def _takes(self, target: _Target) -> bool:
        """Return True if the selection takes the state of ``target``."""
        return self._match.takes(target.name, target.name.removeprefix(f"{self._path}/"))

    def _match_all(self) -> None:
        """Match the state of each parameter, and the settings of each parameter group."""
        match = self._match
        for target in self._all_targets:
            if not self._takes(target):
                match.claim(target.name, target.source, silent=True)
            elif target.record is None:
                match.lack(target.name, target.source, target.weight)
            else:
                # What loads by position is no renaming, since its source has no name.
                by_position = PLACELESS in target.source and PLACELESS not in target.name
                match.claim(target.name, target.source, silent=by_position)
                if target.is_here:
                    self._match_state(target, target.record)
        if match.takes(f"{self._path}/param_groups"):
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
            if target.record and self._takes(target)
        }
        state = self._keeper.state
        order = sorted(state, key=lambda parameter: places.get(id(parameter), len(places)))
        if any(map(is_not, order, state)):
            new_state = {parameter: state[parameter] for parameter in order}
            state.clear()
            state.update(new_state)

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
        node, tensor_settings = values[0], dict[str, Source]()
        tensors = {} if tag(node) else {k: v for k, v in node.items() if tag(v) == "tensor"}
        for key, item in tensors.items():
            self._match.slots.append(self._setting_slot(group, key, item["n"], tensor_settings))
        make_settings = self._match.values.prepare(
            {k: v for k, v in node.items() if k not in tensors}
        )
        members = self._enum_members(group, node)

        def apply() -> None:
            """Set the settings of the group."""
            settings = {**make_settings(), **tensor_settings, **members}
            if tensors:
                settings = {key: settings[key] for key in node}
            if not isinstance(self._optimizer, OptimizerStandIn):
                self._completion.drop(group, settings)
            group.update(settings)

        self._match.actions.append(apply)

    def _enum_members(self, group: Mapping[str, Any], node: Mapping[str, Node]) -> dict[str, Any]:
        """Return the settings that are members of an enum in ``group``, as the checkpoint has them.

        Raises:
            RestoreError: The enum does not have the saved value.
        """
        members: dict[str, Any] = {}
        for key in group.keys() & node.keys():
            try:
                member = member_like(group[key], node[key])
            except ValueError as error:
                raise RestoreError(
                    f"{self._path}/param_groups: {key!r} has a value in the checkpoint that its "
                    f"enum does not have: {error}. Build the optimizer as it was saved"
                ) from None
            if member is not node[key]:
                members[key] = member
        return members

    def _setting_slot(
        self, group: dict[str, Any], key: str, stored_name: str, settings: dict[str, Source]
    ) -> Slot:
        """Return the slot for the setting ``key`` of a parameter group. ``stored_name`` is the name
        of the saved tensor. The slot puts its tensor into ``settings``.
        """
        match = self._match
        record, present = tensor_named(match.checkpoint.tensors, stored_name), group.get(key)
        view = match.checkpoint.manifest.views.get(record.name)
        device = present.device if isinstance(present, torch.Tensor) else torch.device("cpu")
        # A captured graph reads the learning rate at its address, so the tensor is filled in place.
        fills = (
            not self._completion.is_apart
            and fits(present, record, None)
            and can_fill(present, view)
        )
        dtype = getattr(torch, record.dtype)

        def put(tensor: Source) -> None:
            settings[key] = tensor
            match.want(stored_name, stored_name, tensor)

        return Slot(
            place=in_group(group, key),
            record=record,
            view=view,
            device=device,
            present=present if fills else None,
            make=lambda: empty_in_order(record.shape, record.order, dtype=dtype, device=device),
            put=put,
        )

    def _keys(self, target: _Target) -> set[str]:
        """Return the keys of the saved state of a part, in the form that ``part_of`` returns."""
        names = [
            *names_below(self._match.checkpoint.names, target.source),
            *(target.record.values if target.record else ()),
        ]
        return {name[len(target.source) + 1 :].partition("/")[0] for name in names}

    def _match_state(self, target: _Target, record: SavedParameter) -> None:
        """Match the state of one parameter, or of one part of it, with the saved values."""
        match, start = self._match, len(target.source) + 1
        new_values = self._new_states[id(target.parameter)]
        makers: dict[Any, Callable[[], Any]] = {}
        present_state = self._present_state(target.parameter)
        keys = {part_of(key): key for key in present_state}
        for source in names_below(match.checkpoint.names, target.source):
            part = source[start:]
            if "/" in part:
                continue  # The tensor is inside of a container, whose node is in ``record.values``
            name = f"{target.name}/{part}"
            key = _state_key(name, part, keys)
            value = new_values.get(key)
            if value is not None and target.part.of(target.name, value) is value:
                continue  # The value, a step counter for instance, belongs to all parts
            if is_wrapper(present_state.get(key)):
                # The saved value is a plain tensor, so this call raises ``KindMismatch``.
                fill_tensor(match, name, source, present_state[key], match.checkpoint.node(source))
            if target.part.piece is None and isinstance(target.parameter, torch.Tensor):
                match.slots.append(self._state_slot(target, key, present_state.get(key), source))
                continue
            present = new_values.get(key, present_state.get(key))
            tensor = self._target_tensor(target, key, present, match.checkpoint.tensors[source])
            new_values[key] = tensor
            match.want(name, source, target.part.of(target.name, tensor))
        for source, node in record.values.items():
            part = source[start:]
            key = _state_key(f"{target.name}/{part}", part, keys)
            if tag(node) == "subclass":
                present = new_values.get(key, present_state.get(key))
                new_values[key] = self._wrapper_tensor(target, key, present)
                fill_tensor(match, f"{target.name}/{part}", source, new_values[key], node)
            else:
                makers[key] = match.values.prepare(node)

        def apply() -> None:
            # A parameter on the meta device is real by now, if the restore fills it.
            values = {key: make() for key, make in makers.items()}
            if isinstance(target.parameter, torch.Tensor) and not is_meta(target.parameter):
                values = place(values, target.restored_group, target.parameter)
            new_values.update(values)
            if new_values:
                self._keeper.state[target.parameter] = {
                    key: new_values[key] for key in in_order(new_values, record.keys, part_of)
                }
            else:
                self._keeper.state.pop(target.parameter, None)

        match.actions.append(apply)

    def _present_state(self, parameter: torch.Tensor) -> Mapping[Any, Any]:
        """Return the present state of ``parameter``, whose tensors the restore may fill in place.

        If code of the optimizer may look at the present state, it is a copy.
        """
        current = self._keeper.state.get(parameter, {})
        if not self._completion.is_apart:
            return current
        if id(parameter) not in self._present_copies:
            self._present_copies[id(parameter)] = {
                key: value.detach().clone() if isinstance(value, torch.Tensor) else value
                for key, value in current.items()
            }
        return self._present_copies[id(parameter)]

    def _state_slot(self, target: _Target, key: object, present: Any, source: str) -> Slot:
        """Return the slot for the value ``key`` of the state of a parameter, which is ``source`` in
        the checkpoint. ``present`` is the present value.
        """
        match = self._match
        stored_tensor = match.checkpoint.tensors[source]
        record = self._as_wanted(target, present, stored_tensor)
        parameter = match.real.like(target.name, target.parameter)
        placed_alike = is_plain(parameter) and record.dtype == stored_tensor.dtype
        view = match.checkpoint.manifest.views.get(stored_tensor.name) if placed_alike else None
        new_values = self._new_states[id(target.parameter)]
        name = f"{target.name}/{source[len(target.source) + 1 :]}"

        def put(tensor: Source) -> None:
            new_values[key] = tensor
            match.want(name, source, tensor)

        fills = self._fits_present(target, key, present, record) and can_fill(present, view)
        on_device = is_on_device(key, target.restored_group)
        device = parameter.device if on_device else torch.device("cpu")
        return Slot(
            place=in_state(self._optimizer, target.parameter, key),
            record=record,
            view=view,
            device=present.device if fills else device,
            present=present if fills else None,
            make=lambda: self._new_tensor(target, key, record),
            put=put,
        )

    def _target_tensor(self, target: _Target, key: object, present: Any, record: Tensor) -> Source:
        """Return the tensor that is filled with the saved value ``record``: the present value
        ``present`` if it has the right dtype and shape, else a new tensor.
        """
        record = self._as_wanted(target, present, record)
        if self._fits_present(target, key, present, record):
            tensor: Source = present
            return tensor
        return self._new_tensor(target, key, record)

    def _as_wanted(self, target: _Target, present: Any, record: Tensor) -> Tensor:
        """Return ``record``, a value of the state, with the dtype and the order that it gets."""
        weight = self._match.checkpoint.tensors.get(target.weight)
        target_record = in_present_order(record, weight, target.parameter)
        if self._match.selection.cast:
            target_record = msgspec.structs.replace(
                target_record, dtype=self._target_dtype(target, present, target_record)
            )
        return target_record

    def _fits_present(self, target: _Target, key: object, present: Any, record: Tensor) -> bool:
        """Return True if the present value ``present`` can be filled with ``record``.

        A present ``step`` is not filled if the saved settings, which replace those of the group,
        place it on another device.
        """
        moves = is_on_device(key, target.restored_group) != is_on_device(key, target.group)
        return fits(present, record, target.part.piece) and not is_meta(present) and not moves

    def _new_tensor(self, target: _Target, key: object, record: Tensor) -> Source:
        """Return a new tensor for the value ``key`` of the state, which ``record`` fills."""
        parameter = self._match.real.like(target.name, target.parameter)
        if isinstance(self._optimizer, OptimizerStandIn):
            return self._optimizer.new_state(
                parameter, key, getattr(torch, record.dtype), record.shape
            )
        is_plain_key = target.record is not None and part_of(key) in target.record.plain
        if isinstance(parameter, DTensor) and not is_plain_key and record.shape:
            value = None if record.shape == parameter.shape else self._trial_value(target, key)
            if isinstance(value, torch.Tensor) and fits(value, record, target.part.piece):
                return value
        return new_state(
            parameter, target.restored_group, key, record, target.part.piece, is_plain=is_plain_key
        )

    def _wrapper_tensor(self, target: _Target, key: object, present: Any) -> Source:
        """Return the tensor that is filled with a saved wrapper tensor (see ``tensors.wrapped``).

        This is the present value ``present``. If ``present`` is no tensor, it is the tensor that a
        trial step makes (see ``own_step``), since ckpt cannot make a wrapper tensor by itself.

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
        """Return the value that a trial step (see ``own_step``) makes for ``key`` in the state of a
        parameter; None if it makes none.

        Raises:
            RestoreError: The trial step fails.
        """
        if (state := self._trial_states.get(id(target.parameter))) is None:
            name = state_name(self._path, target.part.path, key)
            parameter = self._match.real.like(target.name, target.parameter)
            state = state_of_step(name, self._optimizer, target.group, parameter)
            self._trial_states[id(target.parameter)] = state
        return state.get(key)

    def _target_dtype(self, target: _Target, present: Any, record: Tensor) -> str:
        """Return the dtype that a value gets if the restore may convert it.

        This is the dtype of the present value ``present``. If there is no present value, and value
        and parameter were saved with the same dtype and shape, this is the dtype of the parameter.
        Otherwise, this is the saved dtype.
        """
        if isinstance(present, Source):
            return str(present.dtype).removeprefix("torch.")
        weight = self._match.checkpoint.tensors.get(target.weight)
        is_same = weight is not None and (weight.dtype, weight.shape) == (
            record.dtype,
            record.shape,
        )
        return str(target.parameter.dtype).removeprefix("torch.") if is_same else record.dtype


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
