"""The tensors of a save that its optimizers train: their names, checksums and numbers."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from itertools import accumulate, compress, pairwise
from operator import attrgetter, not_
from typing import Any, Final, NamedTuple

import numpy as np

from ckpt.adapters.walk.collect import Collected
from ckpt.adapters.walk.segments import Segment
from ckpt.adapters.walk.stand_in import OptimizerStandIn
from ckpt.errors import CkptError
from ckpt.pipeline.image_writer import Source
from ckpt.plan.save import SavePlan

_EXPONENTS: Final[Mapping[str, np.unsignedinteger[Any]]] = {
    "float64": np.uint64(0x7FF0_0000_0000_0000),
    "float32": np.uint32(0x7F80_0000),
    "float16": np.uint16(0x7C00),
    "bfloat16": np.uint16(0x7F80),
    "complex128": np.uint64(0x7FF0_0000_0000_0000),
    "complex64": np.uint32(0x7F80_0000),
}
"""The bits of the exponent, which are all set in NaN and Inf alone."""
_BLOCK_BYTES: Final = 256 << 10
"""How much of a chunk is looked at together: it stays in the cache of a core."""


@dataclass(frozen=True, slots=True)
class Trained:
    """What the optimizers of a state train. It keeps no tensor alive.

    Attributes:
        era: Counts the restores before the save.
        still: The identities of the tensors of their groups that they do not train now: with a
            learning rate of zero, or without a gradient.
        moving: Those of the other tensors.
        seen: Identity -> the name that the bytes are stored under, for each part of the state.
    """

    era: int
    still: tuple[int, ...]
    moving: tuple[int, ...]
    seen: tuple[Mapping[int, str], ...]

    @classmethod
    def of(cls, collected: Collected, era: int) -> Trained:
        """Return what the optimizers of ``collected`` train. On the training thread."""
        still: list[int] = []
        moving: list[int] = []
        for optimizer in collected.optimizers:
            if isinstance(optimizer, OptimizerStandIn):  # The state does not hold what it trains
                moving.append(id(optimizer))
                continue
            for group in optimizer.param_groups:
                parameters = group["params"]
                if not _moves(group):
                    still += map(id, parameters)
                elif all(map(_needs_gradient, parameters)):
                    moving += map(id, parameters)
                else:
                    trains = list(map(_needs_gradient, parameters))
                    moving += map(id, compress(parameters, trains))
                    still += map(id, compress(parameters, map(not_, trains)))
        seen: list[Mapping[int, str]] = []
        alone: dict[int, str] = {}
        for part in collected.parts:
            if isinstance(part, Segment):
                seen.append(part.seen)
            else:
                alone[id(part.tensor)] = part.name
        return cls(era, tuple(still), tuple(moving), (*seen, alone))

    def names(self, identities: Sequence[int]) -> set[str]:
        """Return the names of those tensors among ``identities`` that are saved."""
        return {
            known[identity] for identity in identities for known in self.seen if identity in known
        }


_needs_gradient: Final = attrgetter("requires_grad")


def _moves(group: Mapping[str, Any]) -> bool:
    try:
        return float(group["lr"]) != 0.0
    except (KeyError, TypeError, ValueError):
        # The optimizer finds its own rate, or has several.
        return True


class _Piece(NamedTuple):
    """The tensor that a chunk belongs to; without a name it is the header."""

    name: str
    dtype: str


def _pieces(plan: SavePlan) -> list[_Piece]:
    """Return the tensor of each chunk."""
    starts = {
        item.offset: _Piece(plan.tensors[item.leaf].name, plan.tensors[item.leaf].dtype)
        for item in plan.items
        if item.nbytes
    }
    found: list[_Piece] = []
    piece = _Piece("", "uint8")
    for offset in list(accumulate(plan.chunks, initial=0))[:-1]:
        piece = starts.get(offset, piece)
        found.append(piece)
    return found


@dataclass(frozen=True, slots=True)
class Chunks:
    """Where the chunks of the tensors of optimizers are in the file of this rank.

    Attributes:
        plan: The plan of the file.
        trained: What is trained.
        places: Name -> the indices of its chunks, of those that move.
        still: The same of the others.
        whole: Whether all that moves is saved.
    """

    plan: SavePlan
    trained: Trained
    places: Mapping[str, Sequence[int]]
    still: Mapping[str, Sequence[int]]
    whole: bool

    @classmethod
    def of(cls, plan: SavePlan, trained: Trained) -> Chunks:
        """Find them."""
        moving, others = trained.names(trained.moving), trained.names(trained.still)
        places: dict[str, list[int]] = {}
        still: dict[str, list[int]] = {}
        for index, piece in enumerate(_pieces(plan)):
            if piece.name in moving:
                places.setdefault(piece.name, []).append(index)
            elif piece.name in others:
                still.setdefault(piece.name, []).append(index)
        whole = all(any(each in known for known in trained.seen) for each in trained.moving)
        return cls(plan, trained, places, still, whole)

    def is_of(self, plan: SavePlan, trained: Trained) -> bool:
        """Return True if this is what ``of`` would return."""
        return self.plan is plan and self.trained == trained


@dataclass(frozen=True, slots=True)
class ScannedImage:
    """An image that notes which trained tensors hold NaN or Inf, while its chunks are hashed.

    Attributes:
        image: The image itself.
        found: The names of the tensors that hold NaN or Inf. It is complete when the image has been
            written once.

    Thread safety: the same threads may use it as ``image``.
    """

    image: Source
    masks: Mapping[int, tuple[str, np.unsignedinteger[Any]]]
    found: set[str] = field(default_factory=set[str])

    @classmethod
    def of(cls, image: Source, plan: SavePlan, trained: Trained) -> ScannedImage:
        """Return ``image`` so that the tensors of ``trained`` are looked at."""
        names = trained.names((*trained.still, *trained.moving))
        edges = pairwise(accumulate(plan.chunks, initial=0))
        masks = {
            start: (piece.name, mask)
            for (start, _), piece in zip(edges, _pieces(plan), strict=True)
            if piece.name in names and (mask := _EXPONENTS.get(piece.dtype)) is not None
        }
        return cls(image, masks)

    @property
    def size(self) -> int:
        return self.image.size

    @property
    def path(self) -> str | None:
        return self.image.path

    @property
    def capacity(self) -> int:
        return self.image.capacity

    def view(self, start: int, end: int) -> memoryview:
        return self.image.view(start, end)

    def written(self, start: int, end: int) -> None:
        self.image.written(start, end)

    def hashed(self, start: int, end: int) -> None:
        """Look at the chunk before the image may take its memory back."""
        if (known := self.masks.get(start)) is not None:
            name, mask = known
            if not all_finite(self.image.view(start, end), mask):
                self.found.add(name)
        self.image.hashed(start, end)

    def lost(self, error: CkptError) -> None:
        self.image.lost(error)


def all_finite(data: memoryview, mask: np.unsignedinteger[Any]) -> bool:
    """Return False if a number in ``data`` has all bits of ``mask`` set."""
    bits = np.frombuffer(data, mask.dtype)
    step = _BLOCK_BYTES // mask.itemsize
    block = np.empty(min(step, len(bits)), mask.dtype)
    for start in range(0, len(bits), step):
        part = bits[start : start + step]
        if np.bitwise_and(part, mask, out=block[: len(part)]).max() == mask:
            return False
    return True
