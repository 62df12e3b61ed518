"""Choose the tensors of optimizers that a restore fills, so that values share memory if and only if
they were saved so.

A slot is a place in an optimizer, such as ``lr`` in a parameter group or ``exp_avg`` in the state
of a parameter. The present tensor of a slot is filled in place if it has the saved dtype, shape and
order, and if everything else in the state that has its memory shared this memory in the same way
when it was saved. Otherwise the slot gets another tensor. So a captured graph, which reads a tensor
at its address, goes on as long as possible, and no value changes that the restore is not to fill.

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

from ckpt.adapters.match.targets import memory_of
from ckpt.adapters.tensors.layout import is_expanded, is_plain, local, view_in
from ckpt.adapters.tensors.local_shards import Source
from ckpt.adapters.tensors.zero import keeper_of
from ckpt.adapters.torch_private import storage_identity
from ckpt.model.manifest import Tensor
from ckpt.model.views import View, sizes

Targets = Mapping[Hashable, tuple[str, Source | None]]
"""The targets that a restore fills, by ``memory_of``, each with the name that its bytes are stored
under. The target is None if other tensors cannot have its memory.
"""


@dataclass(frozen=True, slots=True, eq=False, kw_only=True)
class Slot:
    """A place in an optimizer that gets a saved tensor.

    Attributes:
        place: The identity of the slot (see ``in_group`` and ``in_state``).
        saved: The saved tensor, with the dtype and the order that it gets here, under the name that
            its bytes are stored under.
        view: The place of the saved tensor in a buffer; None if it was in none.
        device: The device of the slot.
        held: The present tensor, if it has the dtype, the shape and the order of ``saved``.
        make: Returns a new tensor for the slot.
        put: Puts a tensor into the slot, and requests that the restore fills it.
    """

    place: Hashable
    saved: Tensor
    view: View | None
    device: torch.device
    held: torch.Tensor | None
    make: Callable[[], Source]
    put: Callable[[Source], None]

    def shares_as_saved(self, other: Slot) -> bool:
        """Return True if the present tensors of two slots, which have the same storage, share it as
        the saved tensors did.
        """
        if self.held is None or other.held is None:
            return False
        if self.view is None or other.view is None:
            return self.saved.name == other.saved.name and memory_of(self.held) == memory_of(
                other.held
            )
        return (
            self.view.buffer == other.view.buffer
            and self.held.data_ptr() - self.view.offset == other.held.data_ptr() - other.view.offset
        )


def in_group(group: Mapping[str, Any], key: object) -> Hashable:
    """Return the identity of the setting ``key`` of a parameter group."""
    return id(group), key


def in_state(optimizer: Optimizer, parameter: Source, key: object) -> Hashable:
    """Return the identity of the value ``key`` of an optimizer's state of a parameter."""
    return id(optimizer), id(parameter), key


def can_fill(held: object, view: View | None) -> bool:
    """Return True if bytes can be written to ``held``, which has the dtype, the shape and the order
    of a saved tensor with the place ``view`` in a buffer.

    They cannot be written to an inference tensor, or to elements that share memory. A view of a
    buffer must be plain, and have the saved strides.
    """
    if not isinstance(held, torch.Tensor):
        return False
    memory = local(held)
    if memory.is_meta or memory.is_inference() or is_expanded(memory):
        return False
    return view is None or (is_plain(held) and held.stride() == view.strides)


class Holders:
    """The places of a state that have the memory of each storage.

    Args:
        optimizers: The optimizers of the state, by path.
        tensors: The tensors of the state that are in no slot.
    """

    def __init__(
        self, optimizers: Iterable[tuple[str, Optimizer]], tensors: Iterable[torch.Tensor]
    ) -> None:
        self._places: dict[int, set[Hashable]] = defaultdict(set)
        for tensor in tensors:
            self._add(tensor, None)
        for path, optimizer in optimizers:
            for group in optimizer.param_groups:
                for key, value in group.items():
                    if key != "params":
                        self._look(value, in_group(group, key))
            for parameter, values in keeper_of(path, optimizer).state.items():
                for key, value in values.items() if isinstance(values, Mapping) else ():
                    self._look(value, in_state(optimizer, parameter, key))

    def of(self, tensor: torch.Tensor) -> set[Hashable]:
        """Return the places with the storage of ``tensor``. The place None stands for a tensor that
        is in no slot.
        """
        return self._places.get(_storage(tensor), set())

    def _look(self, value: Any, place: Hashable) -> None:
        if isinstance(value, torch.Tensor):
            self._add(value, place)
        for tensor in _inside(value):
            self._add(tensor, None)

    def _add(self, tensor: torch.Tensor, place: Hashable) -> None:
        if storage := _storage(tensor):
            self._places[storage].add(place)


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
    wanted = {slot.place: slot for slot in slots}

    def is_free(slot: Slot) -> bool:
        if slot.held is None:
            return False
        filled, _ = targets.get(memory_of(slot.held), (None, None))
        return all(
            (place is None and filled == slot.saved.name)
            or (place in wanted and slot.shares_as_saved(wanted[place]))
            for place in holders.of(slot.held)
        )

    together: dict[tuple[bool, str, torch.device], list[Slot]] = defaultdict(list)
    for slot in slots:
        name = slot.view.buffer if slot.view is not None else slot.saved.name
        together[slot.view is None, name, slot.device].append(slot)
    others = dict(targets.values())
    for (_, name, device), alike in together.items():
        first = next(filter(is_free, alike), None)
        if alike[0].view is None:
            _fill_alike(alike, first, others.get(name))
        else:
            raw = buffers.get(name) if device.type == "cpu" else None
            _fill_views(alike, first, raw)


def _fill_alike(alike: Sequence[Slot], first: Slot | None, target: Source | None) -> None:
    """Put one tensor into all slots ``alike``, which have the same saved tensor: one with the
    memory of ``target``, which the restore fills anyway, or that of ``first``. A slot that needs
    another kind of tensor gets one of its own.
    """
    held = None if first is None else first.held
    chosen: list[Source] = [] if held is None else [held]
    if isinstance(target, torch.Tensor) and (held is None or memory_of(held) != memory_of(target)):
        chosen.insert(0, target.detach())
    for slot in alike:
        like = held if slot is first and held is not None else slot.make()
        tensor = next((each for each in chosen if _kind(each) == _kind(like)), None)
        if tensor is None:
            tensor = like
            chosen.append(tensor)
        slot.put(tensor)


def _fill_views(alike: Sequence[Slot], first: Slot | None, raw: torch.Tensor | None) -> None:
    """Put views of one buffer into the slots ``alike``: of ``raw``, which other views have, of that
    which ``first`` has, or of a new one.
    """
    views = {slot.saved.name: slot.view for slot in alike if slot.view is not None}
    kinds = {slot.saved.name: (slot.saved.dtype, slot.saved.shape) for slot in alike}
    made: dict[str, torch.Tensor] = {}
    if first is not None and raw is None:
        for slot in alike:
            if slot.held is not None and first.shares_as_saved(slot):
                made.setdefault(slot.saved.name, slot.held)
    if len(made) < len(views):
        if raw is None:
            (size,) = sizes(views, kinds).values()
            raw = torch.empty(size, dtype=torch.uint8, device=alike[0].device)
        made = {name: view_in(raw, view, *kinds[name]) for name, view in views.items()}
    for slot in alike:
        slot.put(made[slot.saved.name])


def _inside(value: Any) -> Iterator[torch.Tensor]:
    """Yield the tensors in the dicts, lists and tuples of ``value``."""
    items = value.values() if isinstance(value, Mapping) else value
    for item in items if isinstance(value, Mapping | list | tuple) else ():
        if isinstance(item, torch.Tensor):
            yield item
        else:
            yield from _inside(item)


def _storage(tensor: torch.Tensor) -> int:
    """Return the identity of a tensor's local storage, or 0 if it has none."""
    if tensor.is_meta or tensor.layout is not torch.strided or tensor.is_nested:
        return 0
    memory = local(tensor)
    return storage_identity(memory) if memory.untyped_storage().nbytes() else 0


def _kind(source: Source) -> Hashable:
    """Return a value that is equal for two tensors that can stand for each other."""
    if not isinstance(source, torch.Tensor):
        return id(source)
    memory = local(source)
    spec = (source.device_mesh, source.placements) if isinstance(source, DTensor) else None
    return source.dtype, source.shape, memory.device, memory.stride(), spec
