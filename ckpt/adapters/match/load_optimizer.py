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

from ckpt.adapters.match.fill_tensor import fill_tensor
from ckpt.adapters.match.loading import Loading, placed
from ckpt.adapters.match.matching import Matching
from ckpt.adapters.match.materialise import is_meta
from ckpt.adapters.match.own_step import state_of_step
from ckpt.adapters.match.remake import named
from ckpt.adapters.match.saved import ABSENT, SavedParameter, is_mapping, tag
from ckpt.adapters.match.slots import Slot, can_fill, in_group, in_state
from ckpt.adapters.tensors.layout import empty_in_order, is_plain
from ckpt.adapters.tensors.local_shards import Source
from ckpt.adapters.tensors.wrapped import is_wrapper
from ckpt.adapters.tensors.zero import keeper_of
from ckpt.adapters.walk.enum_members import member_like
from ckpt.adapters.walk.items import Part
from ckpt.adapters.walk.modules import (
    PLACELESS,
    PLACING,
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
from ckpt.adapters.walk.stand_in import OptimizerStandIn
from ckpt.errors import OptimizerMismatch, RestoreError
from ckpt.model.key_order import in_order
from ckpt.model.manifest import Tensor
from ckpt.model.values import Node, names_below, unescape

_HOW: Final = frozenset(("foreach", "fused", "capturable", "differentiable", "maximize"))
"""Settings of a parameter group that choose an implementation of the step. They do not show the
kind of the optimizer.
"""
_NAMES: Final = "param_names"
"""The setting in which torch keeps the names of a group's parameters. A restore does not change it,
since the names must be those of the optimizer in the state.
"""
_OF_SCHEDULERS: Final = frozenset(
    ("initial_lr", "swa_lr", "max_lr", "min_lr", "max_momentum", "base_momentum")
)
"""Settings that learning rate schedulers add to parameter groups."""


def match_optimizer(
    match: Matching, optimizer: Optimizer, node: Node, path: str, source: str
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
            names = [match.source(part.path) for group in groups for own in group for part in own]
            match.saved.adopt_dict(source, names)
            node = match.saved.node(source)
        match.expect(node, path, "optimizer")
    check_kind(path, optimizer)
    loader = _Loader(match, optimizer, path, source)
    if loader.found and (strangers := loader.strangers()) is not None:
        if match.selection.strict:
            raise OptimizerMismatch(path, *strangers)
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
        extra = match.values.order(node["extra"])
        match.actions.append(lambda: optimizer.load_extra(extra()))


@dataclass(frozen=True, slots=True, eq=False)
class _Found:
    """A parameter of the optimizer, or a part of one.

    Attributes:
        group: The parameter group of the parameter.
        parameter: The tensor in the parameter group.
        part: The parameter, or the part of it.
        is_here: True if this rank keeps any state of the part.
        name: The common prefix of the names of the optimizer's values for the part, such as
            ``optimizer/model/weight``.
        source: The prefix of the names of these values in the checkpoint.
        weight: The name of the parameter itself in the checkpoint.
        saved: The saved settings and values; None if the checkpoint has none.
    """

    group: dict[str, Any]
    parameter: torch.Tensor
    part: Part
    is_here: bool
    name: str
    source: str
    weight: str
    saved: SavedParameter | None


class _Loader:
    """Matches one optimizer.

    Attributes:
        found: The parameters that the checkpoint has, and that have state or settings to restore.
    """

    def __init__(self, match: Matching, optimizer: Optimizer, path: str, source: str) -> None:
        self._match, self._optimizer, self._path = match, optimizer, path
        self._keeper = keeper_of(path, optimizer)
        check_owners(path, optimizer)
        check_state(path, optimizer, self._keeper.state)
        self._loading = Loading(path, optimizer, self._keeper)
        self._present: dict[int, dict[Any, Any]] = {}
        self._fresh: dict[int, dict[Any, Any]] = defaultdict(dict)
        self._stepped: dict[int, Mapping[Any, Any]] = {}
        self._all = list(self._look(source))
        settings = match.takes(f"{path}/param_groups")
        self.found = [each for each in self._all if each.saved and (self._takes(each) or settings)]

    def _look(self, source: str) -> Iterator[_Found]:
        """Yield the parts of all parameters of the optimizer, which is ``source`` in the
        checkpoint.
        """
        groups = part_groups(self._optimizer, self._match.parameters)
        for g, (group, group_parts) in enumerate(
            zip(self._optimizer.param_groups, groups, strict=True)
        ):
            pairs = enumerate(zip(group["params"], group_parts, strict=True))
            for p, parameter, part in (
                (p, parameter, part) for p, (parameter, parts) in pairs for part in parts
            ):
                short, is_here = part.path, part.is_here and self._keeper.keeps(parameter)
                if short.startswith(PLACELESS) and is_meta(parameter):
                    raise RestoreError(
                        f"{self._path!r} owns a parameter on the meta device that no module of "
                        "the state has: build the optimizer after its model was made real, or "
                        "give the model too"
                    )
                name = f"{self._path}/{short}"
                weight = self._match.source(short)
                there = self._match.source(name)
                # If no rule of the renaming names this state, it is renamed like its parameter.
                if there in (name, f"{source}/{short}"):
                    there = f"{source}/{weight}"
                saved = self._match.saved.parameter(there)
                if saved is None and part.piece is None and self._may_have_place(parameter):
                    # If the saved state did not have the parameter, the name in the checkpoint has
                    # the parameter's position in the optimizer in place of the parameter's path.
                    older = f"{source}/{placeless(g, p)}"
                    saved = self._match.saved.parameter(older)
                    there = older if saved else there
                yield _Found(group, parameter, part, is_here, name, there, weight, saved)

    def _may_have_place(self, parameter: torch.Tensor) -> bool:
        """Return True if the checkpoint may have the state of ``parameter`` by its position.

        An imported state dict often has no names. Its state then goes to the parameters by their
        positions, as ``Optimizer.load_state_dict`` takes it.
        """
        return self._match.saved.imported or not self._match.parameters.in_module(parameter)

    def strangers(self) -> tuple[str, Sequence[str], Sequence[str]] | None:
        """Return None if the saved optimizer may be of the same kind as this one.

        Otherwise, return the evidence: "state" or "settings", then the names of such values that
        only the saved optimizer has, then the names that only this optimizer has. The kinds differ
        only if each optimizer has names that the other one lacks. If only one of them has further
        names, they prove nothing, since options and versions of torch add names.
        """
        saved: set[str] = set()
        settings: set[str] = set()
        for each in self.found:
            saved |= self._keys(each)
            settings |= set(each.saved.settings) if each.saved else set()
        held = {part_of(key) for state in self._keeper.state.values() for key in state}
        if held and saved and held - saved and saved - held:
            return "state", sorted(saved - held), sorted(held - saved)
        there = settings - _HOW - _OF_SCHEDULERS - {_NAMES}
        here = {key for key in self._optimizer.defaults if isinstance(key, str)} - _HOW
        known = {key for group in self._optimizer.param_groups for key in group}
        # Each optimizer must have two settings that the other one lacks. A single setting may be a
        # new default of a later torch, or a key that a user has added.
        if len(here - there) > 1 and len(there - known) > 1:
            return "settings", sorted(there - known), sorted(here - there)
        return None

    def load(self, node: Node) -> None:
        """Match the state and the settings with those of ``node``, the saved optimizer."""
        match = self._match
        match.actions.append(self._loading.begin)
        self._load()
        settings = match.takes(f"{self._path}/param_groups")
        if not isinstance(self._optimizer, OptimizerStandIn) and (
            settings or any(map(self._takes, self._all))
        ):
            match.actions.append(self._arrange)
            values = node.get("values", {}) if node is not ABSENT and settings else {}
            match.actions.append(partial(self._loading.end, match.values.order(values)))

    def _takes(self, part: _Found) -> bool:
        return self._match.takes(part.name, part.name.removeprefix(f"{self._path}/"))

    def _load(self) -> None:
        match = self._match
        for each in self._all:
            if not self._takes(each):
                match.claim(each.name, each.source, silent=True)
            elif each.saved is None:
                match.lack(each.name, each.source, each.weight)
            else:
                match.claim(each.name, each.source)
                if each.is_here:
                    self._state(each, each.saved)
        if match.takes(f"{self._path}/param_groups"):
            for group in self._optimizer.param_groups:
                self._group(
                    group,
                    [
                        _without_names(each.saved.settings)
                        for each in self._all
                        if each.group is group and each.saved
                    ],
                )

    def _arrange(self) -> None:
        """Give the parameters in the state the order that they had when they were saved. Those that
        the checkpoint does not have come last.
        """
        places = {
            id(each.parameter): each.saved.place
            for each in self._all
            if each.saved and self._takes(each)
        }
        state = self._keeper.state
        ordered = sorted(state, key=lambda parameter: places.get(id(parameter), len(places)))
        if any(map(is_not, ordered, state)):
            held = {parameter: state[parameter] for parameter in ordered}
            state.clear()
            state.update(held)

    def _group(self, group: dict[str, Any], values: list[Node]) -> None:
        """Match the settings of a parameter group. ``values`` are the saved settings of each of its
        parameters, which must be equal.
        """
        if not values:
            return
        if any(other != values[0] for other in values[1:]):
            raise RestoreError(
                f"{self._path}/param_groups: parameters with different settings in the checkpoint "
                "share a group here: group them as they were saved"
            )
        node, chosen = values[0], dict[str, Source]()
        tensors = {} if tag(node) else {k: v for k, v in node.items() if tag(v) == "tensor"}
        for key, item in tensors.items():
            self._match.slots.append(self._setting(group, key, item["n"], chosen))
        made = self._match.values.order({k: v for k, v in node.items() if k not in tensors})
        members = self._members(group, node)

        def apply() -> None:
            settings = {**made(), **chosen, **members}
            if tensors:
                settings = {key: settings[key] for key in node}
            if not isinstance(self._optimizer, OptimizerStandIn):
                self._loading.drop(group, settings)
            group.update(settings)

        self._match.actions.append(apply)

    def _members(self, group: Mapping[str, Any], node: Mapping[str, Node]) -> dict[str, Any]:
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

    def _setting(
        self, group: dict[str, Any], key: str, stored: str, chosen: dict[str, Source]
    ) -> Slot:
        """Return the slot for the setting ``key`` of a parameter group. ``stored`` is the name of
        the saved tensor. The slot puts its tensor into ``chosen``.
        """
        match = self._match
        saved, present = named(match.saved.tensors, stored), group.get(key)
        view = match.saved.manifest.views.get(saved.name)
        device = present.device if isinstance(present, torch.Tensor) else torch.device("cpu")
        # A captured graph reads the learning rate at its address, so the tensor is filled in place.
        fills = (
            not self._loading.is_apart and fits(present, saved, None) and can_fill(present, view)
        )
        dtype = getattr(torch, saved.dtype)

        def put(tensor: Source) -> None:
            chosen[key] = tensor
            match.want(stored, stored, tensor)

        return Slot(
            place=in_group(group, key),
            saved=saved,
            view=view,
            device=device,
            held=present if fills else None,
            make=lambda: empty_in_order(saved.shape, saved.order, dtype=dtype, device=device),
            put=put,
        )

    def _keys(self, each: _Found) -> set[str]:
        """Return the keys of the saved state of a part, in the form that ``part_of`` returns."""
        names = [
            *names_below(self._match.saved.names, each.source),
            *(each.saved.values if each.saved else ()),
        ]
        return {name[len(each.source) + 1 :].partition("/")[0] for name in names}

    def _state(self, each: _Found, saved: SavedParameter) -> None:
        """Match the state of one parameter, or of one part of it, with the saved values."""
        match, start = self._match, len(each.source) + 1
        fresh = self._fresh[id(each.parameter)]
        makers: dict[Any, Callable[[], Any]] = {}
        current = self._current(each.parameter)
        keys = {part_of(key): key for key in current}
        for source in names_below(match.saved.names, each.source):
            part = source[start:]
            if "/" in part:
                continue  # The tensor is inside of a container, whose node is in ``saved.values``
            key = _key(f"{each.name}/{part}", part, keys)
            if (known := fresh.get(key)) is not None and each.part.of(each.name, known) is known:
                continue  # The value, a step counter for instance, belongs to all parts
            if is_wrapper(current.get(key)):
                # The saved value is a plain tensor, so this call raises ``KindMismatch``.
                fill_tensor(
                    match, f"{each.name}/{part}", source, current[key], match.saved.node(source)
                )
            if each.part.piece is None and isinstance(each.parameter, torch.Tensor):
                match.slots.append(self._slot(each, key, current.get(key), source))
                continue
            saved_tensor = match.saved.tensors[source]
            held = self._held(each, key, fresh.get(key, current.get(key)), saved_tensor)
            fresh[key] = held
            match.want(f"{each.name}/{part}", source, each.part.of(each.name, held))
        for source, node in saved.values.items():
            part = source[start:]
            key = _key(f"{each.name}/{part}", part, keys)
            if tag(node) == "subclass":
                fresh[key] = self._wrapper(each, key, fresh.get(key, current.get(key)))
                fill_tensor(match, f"{each.name}/{part}", source, fresh[key], node)
            else:
                makers[key] = match.values.order(node)

        group = self._restored_group(each)

        def apply() -> None:
            # A parameter on the meta device is real by now, if the restore fills it.
            made = {key: make() for key, make in makers.items()}
            if isinstance(each.parameter, torch.Tensor) and not is_meta(each.parameter):
                made = placed(made, group, each.parameter)
            fresh.update(made)
            if fresh:
                ordered = in_order(fresh, saved.keys, part_of)
                self._keeper.state[each.parameter] = {key: fresh[key] for key in ordered}
            else:
                self._keeper.state.pop(each.parameter, None)

        match.actions.append(apply)

    def _current(self, parameter: torch.Tensor) -> Mapping[Any, Any]:
        """Return the present state of ``parameter``, whose tensors the restore may fill in place.

        If code of the optimizer may look at the present state, it is a copy.
        """
        current = self._keeper.state.get(parameter, {})
        if not self._loading.is_apart:
            return current
        if id(parameter) not in self._present:
            self._present[id(parameter)] = {
                key: value.detach().clone() if isinstance(value, torch.Tensor) else value
                for key, value in current.items()
            }
        return self._present[id(parameter)]

    def _slot(self, each: _Found, key: object, held: Any, source: str) -> Slot:
        """Return the slot for the value ``key`` of the state of a parameter, which is ``source`` in
        the checkpoint. ``held`` is the present value.
        """
        match = self._match
        stored = match.saved.tensors[source]
        saved = self._as_wanted(each, held, stored)
        parameter = match.real.like(each.name, each.parameter)
        placed_alike = is_plain(parameter) and saved.dtype == stored.dtype
        view = match.saved.manifest.views.get(stored.name) if placed_alike else None
        fresh = self._fresh[id(each.parameter)]
        name = f"{each.name}/{source[len(each.source) + 1 :]}"

        def put(tensor: Source) -> None:
            fresh[key] = tensor
            match.want(name, source, tensor)

        fills = self._is_filled(each, key, held, saved) and can_fill(held, view)
        on_device = is_on_device(key, self._restored_group(each))
        device = parameter.device if on_device else torch.device("cpu")
        return Slot(
            place=in_state(self._optimizer, each.parameter, key),
            saved=saved,
            view=view,
            device=held.device if fills else device,
            held=held if fills else None,
            make=lambda: self._new(each, key, saved),
            put=put,
        )

    def _held(self, each: _Found, key: object, held: Any, saved: Tensor) -> Source:
        """Return the tensor that is filled with the saved value ``saved``: the present value
        ``held`` if it has the right dtype and shape, else a new tensor.
        """
        saved = self._as_wanted(each, held, saved)
        if self._is_filled(each, key, held, saved):
            kept: Source = held
            return kept
        return self._new(each, key, saved)

    def _as_wanted(self, each: _Found, held: Any, saved: Tensor) -> Tensor:
        """Return ``saved``, a value of the state, with the dtype and the order that it gets."""
        weight = self._match.saved.tensors.get(each.weight)
        wanted = in_present_order(saved, weight, each.parameter)
        if self._match.selection.cast:
            wanted = msgspec.structs.replace(wanted, dtype=self._dtype(each, held, wanted))
        return wanted

    def _is_filled(self, each: _Found, key: object, held: Any, saved: Tensor) -> bool:
        """Return True if the present value ``held`` can be filled with ``saved``.

        A present ``step`` is not filled if the saved settings, which replace those of the group,
        place it on another device.
        """
        group = self._restored_group(each)
        moves = key == "step" and is_on_device(key, group) != is_on_device(key, each.group)
        return fits(held, saved, each.part.piece) and not is_meta(held) and not moves

    def _new(self, each: _Found, key: object, saved: Tensor) -> Source:
        parameter = self._match.real.like(each.name, each.parameter)
        if isinstance(self._optimizer, OptimizerStandIn):
            return self._optimizer.new_state(
                parameter, key, getattr(torch, saved.dtype), saved.shape
            )
        is_plain_key = each.saved is not None and part_of(key) in each.saved.plain
        if isinstance(parameter, DTensor) and not is_plain_key and saved.shape:
            made = None if saved.shape == parameter.shape else self._trial(each, key)
            if isinstance(made, torch.Tensor) and fits(made, saved, each.part.piece):
                return made
        group = self._restored_group(each)
        return new_state(parameter, group, key, saved, each.part.piece, is_plain=is_plain_key)

    def _restored_group(self, each: _Found) -> Mapping[str, Any]:
        """Return the parameter group of a part, with those settings after the restore that place
        ``step``.
        """
        if each.saved is None or not self._match.takes(f"{self._path}/param_groups"):
            return each.group
        settings = each.saved.settings
        return {**each.group, **{key: settings.get(key) for key in PLACING}}

    def _wrapper(self, each: _Found, key: object, held: Any) -> Source:
        """Return the tensor that is filled with a saved wrapper tensor (see ``tensors.wrapped``).

        This is the present value ``held``. If ``held`` is no tensor, it is the tensor that a trial
        step makes (see ``own_step``), since ckpt cannot make a wrapper tensor by itself.

        Raises:
            RestoreError: The trial step fails, or does not make a tensor for ``key``.
        """
        if isinstance(held, torch.Tensor):
            return held
        if not isinstance(made := self._trial(each, key), torch.Tensor):
            name = state_name(self._path, each.part.path, key)
            raise RestoreError(
                f"{name!r} is in the checkpoint, and a first step of "
                f"{type(self._optimizer).__qualname__} does not make it: take one optimizer step "
                "before restoring"
            )
        return made

    def _trial(self, each: _Found, key: object) -> object:
        """Return the value that a trial step (see ``own_step``) makes for ``key`` in the state of a
        parameter; None if it makes none.

        Raises:
            RestoreError: The trial step fails.
        """
        if (made := self._stepped.get(id(each.parameter))) is None:
            name = state_name(self._path, each.part.path, key)
            parameter = self._match.real.like(each.name, each.parameter)
            made = state_of_step(name, self._optimizer, each.group, parameter)
            self._stepped[id(each.parameter)] = made
        return made.get(key)

    def _dtype(self, each: _Found, held: Any, saved: Tensor) -> str:
        """Return the dtype that a value gets if the restore may convert it.

        This is the dtype of the present value ``held``. If there is no present value, and value and
        parameter were saved with the same dtype and shape, this is the dtype of the parameter.
        Otherwise, this is the saved dtype.
        """
        if isinstance(held, Source):
            return str(held.dtype).removeprefix("torch.")
        weight = self._match.saved.tensors.get(each.weight)
        alike = weight is not None and (weight.dtype, weight.shape) == (saved.dtype, saved.shape)
        return str(each.parameter.dtype).removeprefix("torch.") if alike else saved.dtype


def _without_names(settings: Node) -> Node:
    return {key: value for key, value in settings.items() if key != _NAMES}


def _key(name: str, part: str, present: Mapping[str, Any]) -> object:
    """Return the key of the value ``name`` in the optimizer's state of a parameter.

    ``part`` is the last part of the name. ``present`` maps such parts to the keys of the present
    state.

    Raises:
        RestoreError: The key is neither a string nor an int, so ``part`` does not determine it, and
            the present state does not have it.
    """
    key = present.get(part, unescape(part))
    if key == part and part.startswith("~2"):
        raise RestoreError(
            f"{name!r} has the key {part[2:]}, which is neither a string nor an int: take one "
            "optimizer step before restoring"
        )
    return key
