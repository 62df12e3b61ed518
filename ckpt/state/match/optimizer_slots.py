"""Choose the tensors of optimizers that a restore fills, so that values share memory if and only if
they were saved so.

A slot is a place in an optimizer, such as ``lr`` in a parameter group or ``exp_avg`` in the state
of a parameter. It has an identity by which it is looked up. The tensors of the state that are in no
slot have the identity None, and a *target* is one of them that the restore fills. A record is the
description of a tensor in the checkpoint, and a view is the place of a saved tensor in a buffer
that other tensors share. The present tensor of a slot is filled in place if it has the saved dtype,
shape and order, and if everything else in the state that has its memory shared this memory in the
same way when it was saved. Otherwise the slot gets another tensor. So a captured graph, which reads
a tensor at its address, goes on as long as possible, and no value changes that the restore is not
to fill.

The choice is made after the whole state was matched, since another optimizer may have the memory.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Callable, Hashable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import nn
from torch.distributed.tensor import DTensor
from torch.optim import Optimizer

from ckpt.model.manifest import Tensor
from ckpt.model.views import View, buffer_sizes
from ckpt.state.match.targets import memory_of
from ckpt.state.tensors.layout import is_expanded, is_plain, to_local, view_in
from ckpt.state.tensors.local_shards import TensorOrShards
from ckpt.state.walk.optimizer_state import local_state_of
from ckpt.torch_private import storage_identity

Targets = Mapping[Hashable, tuple[str, TensorOrShards | None]]
"""The targets that a restore fills, by ``memory_of``, each with the name that its bytes are stored
under. The target is None if other tensors cannot have its memory.
"""


@dataclass(frozen=True, slots=True, eq=False, kw_only=True)
class Slot:
    """A place in an optimizer that gets a saved tensor.

    Attributes:
        identity: The identity of the slot (see ``setting_identity`` and ``state_value_identity``).
        record: The saved tensor, with the dtype and the order that it gets here, under the name
            that its bytes are stored under.
        view: The place of the saved tensor in a buffer; None if it was in none.
        device: The device of the slot.
        present: The present tensor, if it has the dtype, the shape and the order of ``record``.
        make: Returns a new tensor for the slot.
        put: Puts a tensor into the slot, and requests that the restore fills it.
    """

    identity: Hashable
    record: Tensor
    view: View | None
    device: torch.device
    present: torch.Tensor | None
    make: Callable[[], TensorOrShards]
    put: Callable[[TensorOrShards], None]

    def shares_as_saved(self, slot: Slot) -> bool:
        """Return True if the present tensors of two slots, which have the same storage, share it as
        the saved tensors did.
        """
        if self.present is None or slot.present is None:
            return False
        if self.view is None or slot.view is None:
            return self.record.name == slot.record.name and memory_of(self.present) == memory_of(
                slot.present
            )
        return (
            self.view.buffer == slot.view.buffer
            and self.present.data_ptr() - self.view.offset
            == slot.present.data_ptr() - slot.view.offset
        )


def setting_identity(group: Mapping[str, Any], key: object) -> Hashable:
    """Return the identity of the setting ``key`` of a parameter group."""
    return id(group), key


def state_value_identity(optimizer: Optimizer, parameter: TensorOrShards, key: object) -> Hashable:
    """Return the identity of the value ``key`` of an optimizer's state of a parameter."""
    return id(optimizer), id(parameter), key


def can_fill(tensor: object, view: View | None) -> bool:
    """Return True if bytes can be written to ``tensor``, which has the dtype, the shape and the
    order of a saved tensor with the place ``view`` in a buffer.

    They cannot be written to an inference tensor, or to elements that share memory. A view of a
    buffer must be plain, and have the saved strides.
    """
    if not isinstance(tensor, torch.Tensor):
        return False
    memory = to_local(tensor)
    if memory.is_meta or memory.is_inference() or is_expanded(memory):
        return False
    return view is None or (is_plain(tensor) and tensor.stride() == view.strides)


class Holders:
    """The places of a state that have the memory of each storage, by their identities.

    A tensor that is in no slot has the identity None.

    Args:
        optimizers: The optimizers of the state, by path.
        tensors: The tensors of the state that are in no slot.
    """

    def __init__(
        self, optimizers: Iterable[tuple[str, Optimizer]], tensors: Iterable[torch.Tensor]
    ) -> None:
        self._identities: dict[int, set[Hashable]] = defaultdict(set)
        for tensor in tensors:
            self._add(tensor, None)
        for path, optimizer in optimizers:
            for group in optimizer.param_groups:
                for key, value in group.items():
                    if key != "params":
                        self._add_value(value, setting_identity(group, key))
            for parameter, values in local_state_of(path, optimizer).by_parameter.items():
                for key, value in values.items() if isinstance(values, Mapping) else ():
                    self._add_value(value, state_value_identity(optimizer, parameter, key))

    def of(self, tensor: torch.Tensor) -> set[Hashable]:
        """Return the identities of the places that have the storage of ``tensor``."""
        return self._identities.get(_storage(tensor), set())

    def _add_value(self, value: Any, identity: Hashable) -> None:
        """Add the tensor in the slot ``identity``, or the tensors inside of a container there."""
        if isinstance(value, torch.Tensor):
            self._add(value, identity)
            return
        for tensor in _tensors_in(value):
            self._add(tensor, None)

    def _add(self, tensor: torch.Tensor, identity: Hashable) -> None:
        if storage := _storage(tensor):
            self._identities[storage].add(identity)


def tensors_of(modules: Iterable[nn.Module]) -> Iterator[torch.Tensor]:
    """Yield the parameters and buffers of modules."""
    for module in modules:
        yield from module.parameters()
        yield from module.buffers()


def fill_slots(
    slots: Sequence[Slot],
    holders: Holders,
    targets: Targets,
    buffers: Mapping[str, torch.Tensor],
) -> None:
    """Choose a tensor for each slot, and put it there.

    Args:
        slots: The slots that the restore fills.
        holders: The places with the memory of each present tensor.
        targets: The targets besides the slots.
        buffers: The buffers on the CPU that were already made for views in lists and dicts, as
            bytes, by their names.
    """
    slot_at = {slot.identity: slot for slot in slots}

    def can_be_reused(slot: Slot) -> bool:
        """Return True if the present tensor of ``slot`` can be filled in place.

        Each other place with its memory must get the same bytes: a target under the same stored
        name, or a slot that shared the memory in the same way when it was saved.
        """
        if slot.present is None:
            return False
        identities = holders.of(slot.present)
        if identities <= {slot.identity}:  # The memory is that of this slot alone
            return True
        stored_name, _ = targets.get(memory_of(slot.present), (None, None))
        return all(
            (identity is None and stored_name == slot.record.name)
            or (identity in slot_at and slot.shares_as_saved(slot_at[identity]))
            for identity in identities
        )

    # The slots of one device that get the same tensor, or views of the same buffer
    groups: dict[tuple[bool, str, torch.device], list[Slot]] = defaultdict(list)
    for slot in slots:
        name = slot.view.buffer if slot.view is not None else slot.record.name
        groups[slot.view is None, name, slot.device].append(slot)
    target_by_name = dict(targets.values())
    for (_, name, device), group in groups.items():
        reused_slot = next(filter(can_be_reused, group), None)
        if group[0].view is None:
            _fill_alike(group, reused_slot, target_by_name.get(name))
        else:
            buffer = buffers.get(name) if device.type == "cpu" else None
            _fill_views(group, reused_slot, buffer)


def _fill_alike(
    group: Sequence[Slot], reused_slot: Slot | None, target: TensorOrShards | None
) -> None:
    """Put one tensor into all slots ``group``, which have the same saved tensor. It has the memory
    of ``target``, which the restore fills anyway, or is the present tensor of ``reused_slot``,
    which can be filled in place. A slot that needs another kind of tensor gets a new one.
    """
    present = None if reused_slot is None else reused_slot.present
    tensors: list[TensorOrShards] = [] if present is None else [present]
    if isinstance(target, torch.Tensor) and (
        present is None or memory_of(present) != memory_of(target)
    ):
        tensors.insert(0, target.detach())
    for slot in group:
        own_tensor = present if slot is reused_slot and present is not None else slot.make()
        tensor = next(
            (candidate for candidate in tensors if _are_alike(candidate, own_tensor)), None
        )
        if tensor is None:
            tensor = own_tensor
            tensors.append(tensor)
        slot.put(tensor)


def _fill_views(
    group: Sequence[Slot], reused_slot: Slot | None, buffer: torch.Tensor | None
) -> None:
    """Put views of one buffer into the slots ``group``. The buffer is ``buffer`` if other views
    have it, else the buffer of ``reused_slot``, whose present tensor can be filled in place, else a
    new one.
    """
    views = {slot.record.name: slot.view for slot in group if slot.view is not None}
    forms = {slot.record.name: (slot.record.dtype, slot.record.shape) for slot in group}
    tensors: dict[str, torch.Tensor] = {}
    if reused_slot is not None and buffer is None:
        for slot in group:
            if slot.present is not None and reused_slot.shares_as_saved(slot):
                tensors.setdefault(slot.record.name, slot.present)
    if len(tensors) < len(views):
        if buffer is None:
            (size,) = buffer_sizes(views, forms).values()
            buffer = torch.empty(size, dtype=torch.uint8, device=group[0].device)
        tensors = {name: view_in(buffer, view, *forms[name]) for name, view in views.items()}
    for slot in group:
        slot.put(tensors[slot.record.name])


def _tensors_in(value: Any) -> Iterator[torch.Tensor]:
    """Yield the tensors in the dicts, lists and tuples of ``value``."""
    items = value.values() if isinstance(value, Mapping) else value
    for item in items if isinstance(value, Mapping | list | tuple) else ():
        if isinstance(item, torch.Tensor):
            yield item
        else:
            yield from _tensors_in(item)


def _storage(tensor: torch.Tensor) -> int:
    """Return the identity of a tensor's local storage, or 0 if it has none."""
    if tensor.is_meta or tensor.layout is not torch.strided or tensor.is_nested:
        return 0
    memory = to_local(tensor)
    return storage_identity(memory) if memory.untyped_storage().nbytes() else 0


def _are_alike(tensor: TensorOrShards, candidate: TensorOrShards) -> bool:
    """Return True if two tensors can stand for each other."""
    return tensor is candidate or _kind(tensor) == _kind(candidate)


def _kind(source: TensorOrShards) -> Hashable:
    """Return the kind of a tensor, see ``_are_alike``."""
    if not isinstance(source, torch.Tensor):
        return id(source)
    memory = to_local(source)
    spec = (source.device_mesh, source.placements) if isinstance(source, DTensor) else None
    return source.dtype, source.shape, memory.device, memory.stride(), spec
