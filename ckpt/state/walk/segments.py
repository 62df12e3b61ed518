"""Keep the named tensors of one module, optimizer or large dict from save to save, as a segment.

Naming thousands of tensors would delay training noticeably. Comparing them with the tensors of the
last save is fast. A segment is used again only if every tensor is the same object with the same
address, shape, stride, dtype and lazy conjugation or negation.

A tensor object may get another dtype, shape or memory at any time (``model.half()``,
``parameter.data = other``). So a segment keeps these properties of its tensors as values, which it
reads on the training thread when it is built.

Tensors that share a buffer with others have places in it, their views (``views_of``). A segment
remembers whether it has such tensors. A tensor is tied to an earlier one if both have the same
memory and elements: the bytes are then stored once. The memory of a tensor is its local memory on
this rank.
"""

from __future__ import annotations

import weakref
from collections import defaultdict
from collections.abc import Iterator, Mapping, Sequence
from operator import attrgetter, eq, is_
from typing import Any, Final, NamedTuple

import torch
from torch.distributed.tensor import DTensor

from ckpt.model.views import View, without_sparse
from ckpt.state.tensors.layout import PLAIN_CLASSES, dtype_name, form_of, is_expanded, is_plain
from ckpt.state.tensors.local_shards import LocalShards, TensorOrShards
from ckpt.torch_private import guards_of, storage_identity


# A walk makes thousands of these objects, and a frozen dataclass takes four times as long to make.
class NamedTensor(NamedTuple):
    """A tensor of the state, with its name.

    Attributes:
        name: The name of the tensor in the checkpoint.
        tensor: The tensor.
        is_late: True if only an optimizer's step changes the tensor, and the fence holds this step.
        replicas: If it is a plain tensor, the ranks that are known to hold the same tensor. If it
            is a DTensor, the ``unit_ranks`` of ``layout.replicas_of``.
        is_delegated: True if another of ``replicas`` saves the tensor and this rank does not. The
            values on the two ranks may differ.
        outer_tensors: The wrapper tensors around the tensor. They have version counters of their
            own.
        is_untied: True if the tensor is stored under its own name even if another one has its
            memory.
    """

    name: str
    tensor: TensorOrShards
    is_late: bool
    replicas: tuple[int, ...]
    is_delegated: bool = False
    outer_tensors: tuple[torch.Tensor, ...] = ()
    is_untied: bool = False


TensorsByAddress = dict[int, list[tuple[torch.Tensor, str]]]
"""The address of memory -> the tensors at this address, each with the name under which its bytes
are stored.
"""


class Segment:
    """The named tensors of one module, optimizer or large dict. The next save compares its tensors
    with them in a few passes.

    Args:
        key: What the tensors' names and nodes follow from, besides the tensors themselves, such as
            the items of a module. The next save uses the segment only for an equal key.
        tensors: All tensors, under the names of ``ties`` too.

    Attributes:
        named_tensors: The tensors whose bytes are stored under their own names.
        forms: The form of each of ``named_tensors``.
        ties: The name of each other tensor -> the name under which its bytes are stored.
        names_by_id: The identity (``id``) of each tensor in ``named_tensors`` -> its name.
        by_address: The tensors in ``named_tensors`` by their addresses, with earlier tensors at
            these addresses.
        closed: True if no tensor is tied to a tensor outside of the segment. Only then the segment
            may be used again.
        is_made: True if a restore may have to make the tensors. It never makes those of a module.
        has_parts_of_buffers: Whether one of ``named_tensors`` may be a view of a buffer (see
            ``may_be_view``).
        apart_from: The segments that came before this one in the last walk, and that are known to
            share no tensor and no memory with it; None if this is not known.
    """

    __slots__ = (
        "_key",
        "_tensor_facts",
        "_tensors",
        "apart_from",
        "by_address",
        "closed",
        "forms",
        "has_parts_of_buffers",
        "is_made",
        "named_tensors",
        "names_by_id",
        "ties",
    )

    def __init__(
        self,
        key: Sequence[object],
        tensors: Sequence[TensorOrShards],
        *,
        named_tensors: Sequence[NamedTensor],
        ties: Mapping[str, str],
        names_by_id: Mapping[int, str],
        by_address: TensorsByAddress,
    ) -> None:
        self.named_tensors, self.ties, self.names_by_id, self.by_address = (
            tuple(named_tensors),
            dict(ties),
            dict(names_by_id),
            by_address,
        )
        self.closed = {item.name for item in named_tensors}.issuperset(ties.values())
        self.apart_from: list[Segment] | None = None
        self.is_made = True
        self.has_parts_of_buffers = any(may_be_view(item.tensor) for item in self.named_tensors)
        self._key, self._tensors = tuple(key), tuple(tensors)
        self._tensor_facts = TensorFacts(self._tensors)
        self.forms = tuple(form_of(item.tensor) for item in self.named_tensors)

    def is_unchanged(self, key: Sequence[object], tensors: Sequence[TensorOrShards]) -> bool:
        """Return True if ``key`` equals that of this segment, and ``tensors`` are the same objects
        with the same memory and form.
        """
        return (
            len(tensors) == len(self._tensors)
            and all(map(is_, tensors, self._tensors))
            and self._key == tuple(key)
            and self._tensor_facts.is_unchanged(tensors)
        )


_referent: Final = weakref.ref.__call__


class KnownDict:
    """A large dict of tensors as it was in the last walk. This record keeps the tensors alive only
    when it has a ``segment``.

    Attributes:
        keys: The keys of the dict.
        node: The node of the dict in the manifest's tree; None until the tensors form a segment.
        name_chars: The most characters of all names in ``node``, for ``dumps``.
        segment: The segment that ``node`` was made for.
    """

    __slots__ = ("_refs", "keys", "name_chars", "node", "segment")

    def __init__(
        self, value: Mapping[str, TensorOrShards], tensors: Sequence[TensorOrShards]
    ) -> None:
        self.keys = tuple(value)
        self._refs = tuple(map(weakref.ref, tensors))
        self.node: dict[str, Any] | None = None
        self.name_chars = 0.0
        self.segment: Segment | None = None

    def keep_node(self, node: dict[str, Any], segment: Segment, name_chars: float) -> None:
        """Set the attributes of the same names."""
        self.node, self.segment, self.name_chars = node, segment, name_chars

    def describes(
        self, value: Mapping[str, TensorOrShards], tensors: Sequence[TensorOrShards]
    ) -> bool:
        """Return True if ``value``, whose values are ``tensors``, has the same keys and the same
        tensor objects as this record.
        """
        return self.keys == tuple(value) and all(map(is_, map(_referent, self._refs), tensors))


class TensorFacts:
    """The properties of some tensors that must not change while views of their memory are in use.

    The properties are kept as values. Each property of all tensors is compared in one pass at the
    speed of C, since there may be thousands of tensors. A pass makes no list of the values that it
    reads, since thousands of new tuples would start the garbage collector.
    """

    __slots__ = (
        "_addresses",
        "_conj",
        "_dtypes",
        "_guards",
        "_kinds",
        "_layouts",
        "_neg",
        "_sizes",
        "_strides",
    )

    def __init__(self, tensors: Sequence[TensorOrShards]) -> None:
        self._kinds: list[type] | None = None
        kinds = list(map(type, tensors))
        memories, self._layouts = _memories(tensors, kinds)
        if not PLAIN_CLASSES.issuperset(map(type, memories)):
            return
        try:
            self._addresses = list(map(torch.Tensor.data_ptr, memories))
            self._sizes = list(map(torch.Tensor.size, memories))
            self._strides = list(map(torch.Tensor.stride, memories))
            self._dtypes = list(map(_dtype_of, memories))
            self._neg = list(map(torch.Tensor.is_neg, memories))
            self._conj = list(map(torch.Tensor.is_conj, memories))
            self._guards = guards_of(memories)
        except RuntimeError:  # A sparse or nested tensor has no strides
            return
        self._kinds = kinds

    def is_unchanged(self, tensors: Sequence[TensorOrShards]) -> bool:
        """Return True if ``tensors`` have the recorded properties now. Return False if a tensor is
        of a kind that cannot be compared.
        """
        kinds = list(map(type, tensors))
        if self._kinds != kinds:
            return False
        memories, layouts = _memories(tensors, kinds)
        try:
            return (
                len(memories) == len(self._addresses)
                and (memories is tensors or PLAIN_CLASSES.issuperset(map(type, memories)))
                and layouts == self._layouts
                and (self._guards(*memories) or self._are_alike(memories))
                and all(map(eq, map(torch.Tensor.data_ptr, memories), self._addresses))
            )
        except RuntimeError:
            return False

    def _are_alike(self, memories: Sequence[torch.Tensor]) -> bool:
        """Return True if all properties but the addresses are as they were recorded."""
        is_same = (
            all(map(eq, map(torch.Tensor.size, memories), self._sizes))
            and all(map(eq, map(torch.Tensor.stride, memories), self._strides))
            and all(map(is_, map(_dtype_of, memories), self._dtypes))
            and all(map(is_, map(torch.Tensor.is_neg, memories), self._neg))
            and all(map(is_, map(torch.Tensor.is_conj, memories), self._conj))
        )
        # The guards also compare properties that do not matter here, such as whether a tensor
        # requires a gradient. If only these have changed, the guards are made again.
        if is_same:
            self._guards = guards_of(memories)
        return is_same


def _memories(
    tensors: Sequence[TensorOrShards], kinds: Sequence[type]
) -> tuple[Sequence[torch.Tensor], list[Any]]:
    """Return the tensors with the memory of ``tensors``: the local tensors of DTensors, the parts
    of ``LocalShards``, and any other tensor itself. Return also the layouts of the DTensors and
    ``LocalShards``.
    """
    if PLAIN_CLASSES.issuperset(kinds):
        return tensors, []  # type: ignore[return-value]
    memories: list[torch.Tensor] = []
    layouts: list[Any] = []
    for tensor in tensors:
        if isinstance(tensor, LocalShards):
            memories += tensor.tensors
            layouts.append((tensor.shape, tensor.boxes, tensor.dtype, tensor.replicas))
        elif isinstance(tensor, DTensor):
            memories.append(tensor._local_tensor)
            layouts.append(_layout_of(tensor))
        else:
            memories.append(tensor)
    return memories, layouts


_layout_of: Final = attrgetter("_spec.mesh", "_spec.placements", "_spec.tensor_meta")
"""A function that returns the layout of a DTensor as values, since its spec may be changed in
place.
"""
_dtype_of: Final = attrgetter("dtype")


def may_be_view(tensor: TensorOrShards) -> bool:
    """Return True if a plain tensor is not all of its storage, so that others may have the rest."""
    return (
        is_plain(tensor)
        and tensor.layout is torch.strided
        and tensor.untyped_storage().nbytes() != tensor.nbytes
    )


def address_of(tensor: TensorOrShards) -> int:
    """Return a number that is equal for tensors whose memory begins at the same address: this
    address, or 0 if the tensor has no memory of its own at one address.

    If this rank holds no element of a DTensor, the number depends on the identity of its storage.
    All ranks must agree which DTensors share their memory, including ranks without elements.
    """
    if is_plain(tensor):
        return tensor.data_ptr() if tensor.layout is torch.strided else 0
    if isinstance(tensor, DTensor) and is_plain(memory := tensor._local_tensor):
        return address_of(memory) or hash((storage_identity(memory), memory.storage_offset()))
    return 0


def same_view(tensor: torch.Tensor, candidate: torch.Tensor) -> bool:
    """Return True if two tensors at the same address have the same elements.

    A tensor that is lazily conjugated or negated has the same memory as the original, but other
    values.
    """
    if isinstance(tensor, DTensor) or isinstance(candidate, DTensor):
        if (
            not (isinstance(tensor, DTensor) and isinstance(candidate, DTensor))
            or tensor._spec != candidate._spec
        ):
            return False
        tensor, candidate = tensor._local_tensor, candidate._local_tensor
    return (
        (tensor.dtype, tensor.shape, tensor.device)
        == (candidate.dtype, candidate.shape, candidate.device)
        and tensor.stride() == candidate.stride()
        and tensor.is_conj() == candidate.is_conj()
        and tensor.is_neg() == candidate.is_neg()
    )


_ALIGNMENT: Final = 16  # The bytes of the largest element


def views_of(parts: Sequence[Segment | NamedTensor]) -> dict[str, View]:
    """Return the places of those tensors that share their storage with another tensor.

    Only plain tensors that a restore may have to make are looked at. A restore fills the tensors of
    a module in place, and a DTensor may have other memory there.
    """
    # Nearly every tensor is all of its storage, so that there is nothing to do.
    if not any(
        (part.is_made and part.has_parts_of_buffers)
        if isinstance(part, Segment)
        else may_be_view(part.tensor)
        for part in parts
    ):
        return {}
    by_storage: dict[int, list[tuple[str, torch.Tensor]]] = defaultdict(list)
    for name, tensor in _plain_tensors(parts):
        by_storage[storage_identity(tensor)].append((name, tensor))
    views: dict[str, View] = {}
    kinds: dict[str, tuple[str, tuple[int, ...]]] = {}
    for group in by_storage.values():
        if len(group) == 1:
            continue
        buffer_name, first_tensor = group[0]
        storage_start = first_tensor.untyped_storage().data_ptr()
        first_offset = min(tensor.data_ptr() - storage_start for _, tensor in group)
        buffer_start = storage_start + first_offset // _ALIGNMENT * _ALIGNMENT
        for name, tensor in group:
            offset = tensor.data_ptr() - buffer_start
            views[name] = View(buffer_name, offset, tensor.stride())
            kinds[name] = dtype_name(name, tensor.dtype), tuple(tensor.shape)
    return without_sparse(views, kinds)


def _plain_tensors(parts: Sequence[Segment | NamedTensor]) -> Iterator[tuple[str, torch.Tensor]]:
    """Yield the name and the tensor of each dense tensor that a restore may have to make."""
    for part in parts:
        if isinstance(part, Segment):
            items: Sequence[NamedTensor] = part.named_tensors if part.is_made else ()
        else:
            items = (part,)
        for item in items:
            tensor = item.tensor
            if (
                is_plain(tensor)
                and tensor.layout is torch.strided
                and tensor.numel()
                and not tensor.is_conj()
                and not tensor.is_neg()
                and not is_expanded(tensor)
            ):
                yield item.name, tensor
