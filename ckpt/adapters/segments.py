"""The tensors of one module or optimizer, remembered from save to save.

Naming thousands of tensors takes longer than a training step can spare; seeing that they are still the same does not. A segment is used again only if every tensor is the same object
with the same address, shape, stride and dtype: whoever is handed the same segment may rely on all of that.
"""

from __future__ import annotations

import weakref
from collections.abc import Mapping, Sequence
from operator import is_
from typing import Any, Final, NamedTuple, TypeGuard

import torch
from torch import nn

from ckpt.adapters.local_shards import LocalShards, Source

PLAIN: Final = frozenset((torch.Tensor, nn.Parameter))


class Held(NamedTuple):  # made thousands of times: a frozen dataclass costs four times as much
    """A tensor of the state. ``late``: only its optimizer's step changes it. ``replicas``: who holds the same, if it is a plain tensor and known."""

    name: str
    tensor: Source
    late: bool
    replicas: tuple[int, ...]


At = dict[int, list[tuple[torch.Tensor, str]]]
"""Memory address -> tensors met there, with the names they are stored under."""


class Segment:
    """Named tensors that are looked at together.

    Attributes:
        held: Those that are stored under a name of their own.
        tied: The others: name -> the name that their bytes are stored under.
        seen: Identity of each tensor -> the name that its bytes are stored under.
        at: Where they lie.
        closed: Whether no tie leads to another segment; only then may it be used again.
    """

    __slots__ = ("_facts", "_key", "_tensors", "at", "closed", "held", "seen", "tied")

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


def is_plain(tensor: Source) -> TypeGuard[torch.Tensor]:
    """Whether it is a tensor of torch's own kind, with a memory of its own."""
    return type(tensor) in PLAIN


def facts(tensor: Source) -> tuple[Any, ...]:
    """What must not change for views of a tensor's memory to stay good; equal to nothing for a kind that cannot be told."""
    if is_plain(tensor):
        if tensor.layout is torch.strided and not tensor.is_nested:
            return (tensor.data_ptr(), tensor.shape, tensor.stride(), tensor.dtype)
    elif type(tensor) is LocalShards:
        return tuple(map(facts, tensor.tensors))
    elif type(inner := getattr(tensor, "_local_tensor", None)) is torch.Tensor:  # a DTensor
        return (inner.data_ptr(), inner.shape, inner.stride(), inner.dtype, tensor._spec)  # type: ignore[union-attr]
    return (object(),)


def same_view(one: torch.Tensor, two: torch.Tensor) -> bool:
    """Of two tensors at one address, whether they have the same elements: conj and neg are lazy views of the same memory with other values."""
    return (
        (one.dtype, one.shape, one.device) == (two.dtype, two.shape, two.device)
        and one.stride() == two.stride()
        and one.is_conj() == two.is_conj()
        and one.is_neg() == two.is_neg()
    )
