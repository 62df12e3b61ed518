"""The tensors of one module or optimizer, remembered from save to save.

Naming thousands of tensors takes longer than a training step can spare. A comparison with the last
save does not. A segment is used again only if every tensor is the same object with the same
address, shape, stride, dtype and lazy conjugation or negation.

A tensor object may take another dtype, shape or memory at any time (``model.half()``,
``parameter.data = other``). So a segment keeps what it knows of its tensors as values, which are
made with the segment on the training thread.
"""

from __future__ import annotations

import weakref
from collections.abc import Mapping, Sequence
from operator import attrgetter, eq, is_
from typing import Any, Final, NamedTuple

import torch
from torch.distributed.tensor import DTensor

from ckpt.adapters.tensors.layout import PLAIN, form_of, is_plain
from ckpt.adapters.tensors.local_shards import LocalShards, Source
from ckpt.adapters.torch_private import guards_of, storage_identity


# A walk makes thousands of these, and a frozen dataclass takes four times as long to make.
class Held(NamedTuple):
    """A tensor of the state.

    Attributes:
        late: Whether only its optimizer's step changes it.
        replicas: Ranks that hold the same, if it is a plain tensor and they are known.
        left: Whether this rank leaves the saving of it to another of ``replicas``, which may hold
            something else.
        watched: The wrappers that it is inside of, which have version counters of their own.
    """

    name: str
    tensor: Source
    late: bool
    replicas: tuple[int, ...]
    left: bool = False
    watched: tuple[torch.Tensor, ...] = ()


At = dict[int, list[tuple[torch.Tensor, str]]]
"""Memory address -> tensors met there, with the names they are stored under."""


class Segment:
    """Named tensors that are compared together.

    Attributes:
        held: Those that are stored under a name of their own.
        forms: The form of each of these.
        tied: The others: name -> the name that their bytes are stored under.
        seen: Identity of each tensor -> the name that its bytes are stored under.
        at: Their addresses.
        closed: Whether no tie leads to another segment; only then may it be used again.
        apart_from: The earlier segments with which it shares no tensor and no memory; None if that
            is not known.
    """

    __slots__ = (
        "_facts",
        "_key",
        "_tensors",
        "apart_from",
        "at",
        "closed",
        "forms",
        "held",
        "seen",
        "tied",
    )

    def __init__(
        self,
        key: Sequence[object],
        tensors: Sequence[Source],
        *,
        held: Sequence[Held],
        tied: Mapping[str, str],
        seen: Mapping[int, str],
        at: At,
    ) -> None:
        self.held, self.tied, self.seen, self.at = tuple(held), dict(tied), dict(seen), at
        self.closed = {item.name for item in held}.issuperset(tied.values())
        self.apart_from: list[Segment] | None = None
        self._key, self._tensors = tuple(key), tuple(tensors)
        self._facts = Facts(self._tensors)
        self.forms = tuple(form_of(item.tensor) for item in self.held)

    def still(self, key: Sequence[object], tensors: Sequence[Source]) -> bool:
        """Return True if ``tensors`` are those of this segment, unmoved and of the same form.

        ``key`` must be the same too.
        """
        return (
            len(tensors) == len(self._tensors)
            and all(map(is_, tensors, self._tensors))
            and self._key == tuple(key)
            and self._facts.still(tensors)
        )


class Table:
    """A large dict of tensors as it was seen last; it keeps none of them alive.

    Attributes:
        node: Its node in the tree, once it is a segment.
        segment: The segment that the node was made for.
    """

    __slots__ = ("_refs", "keys", "node", "segment")

    def __init__(self, value: Mapping[str, Source], tensors: Sequence[Source]) -> None:
        self.keys = tuple(value)
        self._refs = tuple(map(weakref.ref, tensors))
        self.node: dict[str, Any] | None = None
        self.segment: Segment | None = None

    def is_of(self, value: Mapping[str, Source], tensors: Sequence[Source]) -> bool:
        """Return True if the dict has the same keys and the very same tensors."""
        return self.keys == tuple(value) and all(
            ref() is tensor for ref, tensor in zip(self._refs, tensors, strict=True)
        )


class Facts:
    """The properties of some tensors that must not change while views of their memory are in use.

    They are kept as values. Each property of all tensors is compared in one pass at the speed of C,
    since there may be thousands of tensors. No pass keeps what it reads, since thousands of tuples
    would start the garbage collector.
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

    def __init__(self, tensors: Sequence[Source]) -> None:
        self._kinds: list[type] | None = None
        kinds = list(map(type, tensors))
        memories, self._layouts = _memories(tensors, kinds)
        if not PLAIN.issuperset(map(type, memories)):
            return
        try:
            self._addresses = list(map(torch.Tensor.data_ptr, memories))
            self._sizes = list(map(torch.Tensor.size, memories))
            self._strides = list(map(torch.Tensor.stride, memories))
            self._dtypes = list(map(_dtype, memories))
            self._neg = list(map(torch.Tensor.is_neg, memories))
            self._conj = list(map(torch.Tensor.is_conj, memories))
            self._guards = guards_of(memories)
        except RuntimeError:  # A sparse or nested tensor has no strides
            return
        self._kinds = kinds

    def still(self, tensors: Sequence[Source]) -> bool:
        """Return whether the facts are true of ``tensors`` now.

        They never are if a tensor is of a kind that cannot be compared.
        """
        kinds = list(map(type, tensors))
        if self._kinds != kinds:
            return False
        memories, layouts = _memories(tensors, kinds)
        try:
            return (
                len(memories) == len(self._addresses)
                and (memories is tensors or PLAIN.issuperset(map(type, memories)))
                and layouts == self._layouts
                and (self._guards(*memories) or self._are_alike(memories))
                and all(map(eq, map(torch.Tensor.data_ptr, memories), self._addresses))
            )
        except RuntimeError:
            return False

    def _are_alike(self, memories: Sequence[torch.Tensor]) -> bool:
        alike = (
            all(map(eq, map(torch.Tensor.size, memories), self._sizes))
            and all(map(eq, map(torch.Tensor.stride, memories), self._strides))
            and all(map(is_, map(_dtype, memories), self._dtypes))
            and all(map(is_, map(torch.Tensor.is_neg, memories), self._neg))
            and all(map(is_, map(torch.Tensor.is_conj, memories), self._conj))
        )
        # The guards also compare what does not matter here, such as whether a tensor requires a
        # gradient.
        if alike:
            self._guards = guards_of(memories)
        return alike


def _memories(
    tensors: Sequence[Source], kinds: Sequence[type]
) -> tuple[Sequence[torch.Tensor], list[Any]]:
    """Return the memory behind ``tensors``, as far as this module knows how to find it, and the
    layouts of those that are no plain tensors.
    """
    if PLAIN.issuperset(kinds):
        return tensors, []  # type: ignore[return-value]
    memories: list[torch.Tensor] = []
    layouts: list[Any] = []
    for tensor in tensors:
        if isinstance(tensor, LocalShards):
            memories += tensor.tensors
            layouts.append((tensor.shape, tensor.boxes, tensor.dtype, tensor.replicas))
        elif isinstance(tensor, DTensor):
            memories.append(tensor._local_tensor)
            layouts.append(_layout(tensor))
        else:
            memories.append(tensor)
    return memories, layouts


_layout: Final = attrgetter("_spec.mesh", "_spec.placements", "_spec.tensor_meta")
"""The layout of a DTensor as values: the spec itself may be changed in place."""
_dtype: Final = attrgetter("dtype")


def place_of(tensor: Source) -> int:
    """Return the address of a tensor's memory, or 0 if there is none.

    Tensors of the same memory are found by it. Ranks must agree on which DTensors share their
    memory, also ranks that hold no part of them; their storage decides then.
    """
    if is_plain(tensor):
        return tensor.data_ptr() if tensor.layout is torch.strided else 0
    if isinstance(tensor, DTensor) and is_plain(memory := tensor._local_tensor):
        return place_of(memory) or hash((storage_identity(memory), memory.storage_offset()))
    return 0


def same_view(one: torch.Tensor, two: torch.Tensor) -> bool:
    """Return True if two tensors at one address have the same elements.

    Conjugation and negation are lazy views of the same memory with other values.
    """
    if isinstance(one, DTensor) or isinstance(two, DTensor):
        if not (isinstance(one, DTensor) and isinstance(two, DTensor)) or one._spec != two._spec:
            return False
        one, two = one._local_tensor, two._local_tensor
    return (
        (one.dtype, one.shape, one.device) == (two.dtype, two.shape, two.device)
        and one.stride() == two.stride()
        and one.is_conj() == two.is_conj()
        and one.is_neg() == two.is_neg()
    )
