"""The tensors of one module or optimizer, remembered from save to save.

Naming thousands of tensors takes longer than a training step can spare; seeing that they are still the same does not. A segment is used again only if every tensor is the same object
with the same address, shape, stride, dtype and lazy conjugation or negation.

A tensor object may take another dtype, shape or memory at any time (``model.half()``, ``parameter.data = other``). A segment
therefore keeps what it knows of its tensors as values that are made when the segment is made, on the training thread.
"""

from __future__ import annotations

import weakref
from collections.abc import Mapping, Sequence
from operator import is_
from typing import Any, NamedTuple

import torch
from torch.distributed.tensor import DTensor

from ckpt.adapters.layout import PLAIN, form_of, is_plain
from ckpt.adapters.local_shards import LocalShards, Source


class Held(NamedTuple):  # made thousands of times: a frozen dataclass costs four times as much
    """A tensor of the state.

    Attributes:
        late: Whether only its optimizer's step changes it.
        replicas: Ranks that hold the same, if it is a plain tensor and they are known.
        left: Whether this rank leaves the saving of it to another of ``replicas``, which may hold something else.
    """

    name: str
    tensor: Source
    late: bool
    replicas: tuple[int, ...]
    left: bool = False


At = dict[int, list[tuple[torch.Tensor, str]]]
"""Memory address -> tensors met there, with the names they are stored under."""


class Segment:
    """Named tensors that are looked at together.

    Attributes:
        held: Those that are stored under a name of their own.
        forms: The form of each of these.
        tied: The others: name -> the name that their bytes are stored under.
        seen: Identity of each tensor -> the name that its bytes are stored under.
        at: Where they lie.
        closed: Whether no tie leads to another segment; only then may it be used again.
    """

    __slots__ = ("_facts", "_key", "_tensors", "at", "closed", "forms", "held", "seen", "tied")

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
        self._key, self._tensors = tuple(key), tuple(tensors)
        self._facts = tuple(map(facts, self._tensors))
        self.forms = tuple(form_of(item.tensor) for item in self.held)

    def still(self, key: Sequence[object], tensors: Sequence[Source]) -> bool:
        """Whether ``tensors`` are those of this segment, unmoved and of the same form, and ``key`` is the same."""
        return (
            len(tensors) == len(self._tensors)
            and all(map(is_, tensors, self._tensors))
            and self._key == tuple(key)
            and all(fact == facts(tensor) for fact, tensor in zip(self._facts, tensors, strict=True))
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
        """Whether it is the same keys, and the very same tensors."""
        return self.keys == tuple(value) and all(
            ref() is tensor for ref, tensor in zip(self._refs, tensors, strict=True)
        )


def facts(tensor: Source) -> tuple[Any, ...]:
    """What must not change for views of a tensor's memory to stay good; equal to nothing for a kind that cannot be told."""
    if type(tensor) in PLAIN:
        return _view(tensor)  # type: ignore[arg-type]
    if type(tensor) is LocalShards:
        return tuple(map(facts, tensor.tensors))
    if type(inner := getattr(tensor, "_local_tensor", None)) is torch.Tensor:  # a DTensor
        return (*_view(inner), tensor._spec)  # type: ignore[union-attr]
    return (object(),)


def _view(memory: torch.Tensor) -> tuple[Any, ...]:
    """Which elements of which memory it is, and whether it is a lazy view, which has other values than the memory."""
    try:
        dtype = memory.dtype
        is_conj = dtype.is_complex and memory.is_conj()
        return (memory.data_ptr(), memory.shape, memory.stride(), dtype, is_conj, memory.is_neg())
    except RuntimeError:  # a sparse or nested one has no strides
        return (object(),)


def place_of(tensor: Source) -> int:
    """Where the memory of a tensor begins, to find others of the same memory by; 0 if that cannot be told.

    Ranks must agree on which DTensors share their memory, also those that hold nothing of them: there the storage tells.
    """
    if is_plain(tensor):
        return tensor.data_ptr() if tensor.layout is torch.strided else 0
    if isinstance(tensor, DTensor) and is_plain(memory := tensor._local_tensor):
        return place_of(memory) or hash((memory.untyped_storage()._cdata, memory.storage_offset()))
    return 0


def same_view(one: torch.Tensor, two: torch.Tensor) -> bool:
    """Of two tensors at one address, whether they have the same elements: conj and neg are lazy views of the same memory with other values."""
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
