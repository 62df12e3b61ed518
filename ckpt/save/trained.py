"""Finds the tensors of a save that its optimizers train, their chunks, and NaN or Inf in them."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from itertools import accumulate, compress, pairwise
from operator import attrgetter, not_
from typing import Any, Final, NamedTuple

import numpy as np

from ckpt.pipeline.image_wrapper import ImageWrapper
from ckpt.pipeline.image_writer import Source
from ckpt.plan.save import SavePlan
from ckpt.state.walk.collect import WalkResult
from ckpt.state.walk.segments import Segment
from ckpt.state.walk.stand_in import OptimizerStandIn

_EXPONENTS: Final[Mapping[str, np.unsignedinteger[Any]]] = {
    "float64": np.uint64(0x7FF0_0000_0000_0000),
    "float32": np.uint32(0x7F80_0000),
    "float16": np.uint16(0x7C00),
    "bfloat16": np.uint16(0x7F80),
    "complex128": np.uint64(0x7FF0_0000_0000_0000),
    "complex64": np.uint32(0x7F80_0000),
}
"""The bits of the exponent, by dtype. Only NaN and Inf have all of them set."""
_BLOCK_BYTES: Final = 256 << 10
"""How many bytes of a chunk are scanned at a time, so that they stay in the cache of a core."""


@dataclass(frozen=True, slots=True)
class Trainable:
    """The tensors in the parameter groups of a state's optimizers. The object has only their ids,
    and keeps no tensor alive.

    Attributes:
        era: The number of restores before the save.
        still_ids: The ``id`` of each tensor that is not trained now, because its group has a
            learning rate of zero or it needs no gradient.
        moving_ids: The ``id`` of each tensor that is trained now, and of each `OptimizerStandIn`.
            The ids of stand-ins are not in ``name_maps``.
        name_maps: One mapping for each `Segment` of the state, and one for all tensors outside of
            segments: ``id`` of a tensor -> the name under which its bytes are stored.
    """

    era: int
    still_ids: tuple[int, ...]
    moving_ids: tuple[int, ...]
    name_maps: tuple[Mapping[int, str], ...]

    @classmethod
    def of(cls, collection: WalkResult, era: int) -> Trainable:
        """Return the tensors of the optimizers of a save. Call it on the training thread."""
        still_ids: list[int] = []
        moving_ids: list[int] = []
        for optimizer in collection.optimizers:
            # The tensors of a stand-in are not known. Its own id has no name in ``name_maps``, so
            # ``Chunks.whole`` becomes False.
            if isinstance(optimizer, OptimizerStandIn):
                moving_ids.append(id(optimizer))
                continue
            for group in optimizer.param_groups:
                parameters = group["params"]
                if not _has_learning_rate(group):
                    still_ids += map(id, parameters)
                elif all(map(_needs_gradient, parameters)):
                    moving_ids += map(id, parameters)
                else:
                    trains = list(map(_needs_gradient, parameters))
                    moving_ids += map(id, compress(parameters, trains))
                    still_ids += map(id, compress(parameters, map(not_, trains)))
        name_maps: list[Mapping[int, str]] = []
        single_names: dict[int, str] = {}
        for part in collection.parts:
            if isinstance(part, Segment):
                name_maps.append(part.names_by_id)
            else:
                single_names[id(part.tensor)] = part.name
        return cls(era, tuple(still_ids), tuple(moving_ids), (*name_maps, single_names))

    def names(self, identities: Sequence[int]) -> set[str]:
        """Return the names of the saved tensors whose ``id`` is among ``identities``."""
        return {
            names[identity]
            for identity in identities
            for names in self.name_maps
            if identity in names
        }


_needs_gradient: Final = attrgetter("requires_grad")


def _has_learning_rate(group: Mapping[str, Any]) -> bool:
    """Return False if the learning rate of a parameter group is zero."""
    try:
        rate = group["lr"]
        detach = getattr(rate, "detach", None)  # A rate that is learned requires a gradient
        return float(detach() if detach else rate) != 0.0
    except (KeyError, TypeError, ValueError):
        # The optimizer has no single learning rate: assume that it trains.
        return True


class _ChunkTensor(NamedTuple):
    """The tensor that a chunk belongs to. The header of the file has an empty name."""

    name: str
    dtype: str


def _chunk_tensors(plan: SavePlan) -> list[_ChunkTensor]:
    """Return the tensor of each chunk of the file, in order."""
    starts = {
        item.offset: _ChunkTensor(plan.tensors[item.leaf].name, plan.tensors[item.leaf].dtype)
        for item in plan.items
        if item.nbytes
    }
    tensors: list[_ChunkTensor] = []
    tensor = _ChunkTensor("", "uint8")
    for offset in list(accumulate(plan.chunks, initial=0))[:-1]:
        tensor = starts.get(offset, tensor)
        tensors.append(tensor)
    return tensors


@dataclass(frozen=True, slots=True)
class Chunks:
    """The chunks of this rank's file that belong to tensors of optimizers.

    Attributes:
        plan: The save plan of the file.
        trainable: The tensors of the optimizers.
        places: Name of a tensor that is trained now -> the indices of its chunks.
        still_places: Name of a tensor that is not trained now -> the indices of its chunks.
        whole: Whether all tensors that are trained now are saved.
    """

    plan: SavePlan
    trainable: Trainable
    places: Mapping[str, Sequence[int]]
    still_places: Mapping[str, Sequence[int]]
    whole: bool

    @classmethod
    def of(cls, plan: SavePlan, trainable: Trainable) -> Chunks:
        """Return the chunks of the tensors of ``trainable`` in the file of ``plan``."""
        moving_names, still_names = (
            trainable.names(trainable.moving_ids),
            trainable.names(trainable.still_ids),
        )
        places: dict[str, list[int]] = {}
        still_places: dict[str, list[int]] = {}
        for index, tensor in enumerate(_chunk_tensors(plan)):
            if tensor.name in moving_names:
                places.setdefault(tensor.name, []).append(index)
            elif tensor.name in still_names:
                still_places.setdefault(tensor.name, []).append(index)
        whole = all(
            any(identity in names for names in trainable.name_maps)
            for identity in trainable.moving_ids
        )
        return cls(plan, trainable, places, still_places, whole)

    def is_of(self, plan: SavePlan, trainable: Trainable) -> bool:
        """Return True if ``of`` would return an equal object for these arguments."""
        return self.plan is plan and self.trainable == trainable


@dataclass(frozen=True, slots=True)
class ScannedImage(ImageWrapper):
    """An image that is scanned for NaN and Inf while its chunks are hashed.

    Attributes:
        image: The image itself.
        masks: Offset of a chunk in the image -> the name of its tensor, and the bits of the
            exponent of its dtype. Only these chunks are scanned.
        not_finite: The names of the tensors that hold NaN or Inf. The set is complete when the
            image has been written once.

    Thread safety: the threads that may use ``image`` may use this object in the same way.
    """

    masks: Mapping[int, tuple[str, np.unsignedinteger[Any]]]
    not_finite: set[str] = field(default_factory=set[str])

    @classmethod
    def of(cls, image: Source, plan: SavePlan, trainable: Trainable) -> ScannedImage:
        """Return ``image`` with a scan of the tensors of ``trainable``."""
        names = trainable.names((*trainable.still_ids, *trainable.moving_ids))
        edges = pairwise(accumulate(plan.chunks, initial=0))
        masks = {
            start: (tensor.name, mask)
            for (start, _), tensor in zip(edges, _chunk_tensors(plan), strict=True)
            if tensor.name in names and (mask := _EXPONENTS.get(tensor.dtype)) is not None
        }
        return cls(image, masks)

    def note_hashed(self, start: int, end: int) -> None:
        """Scan the chunk, and then let the image use the memory of the chunk again."""
        if (entry := self.masks.get(start)) is not None:
            name, mask = entry
            if not all_finite(self.image.view(start, end), mask):
                self.not_finite.add(name)
        self.image.note_hashed(start, end)


def all_finite(data: memoryview, mask: np.unsignedinteger[Any]) -> bool:
    """Return False if some number in ``data`` is NaN or Inf: it has all bits of ``mask`` set."""
    words = np.frombuffer(data, mask.dtype)
    block_length = _BLOCK_BYTES // mask.itemsize
    block = np.empty(min(block_length, len(words)), mask.dtype)
    for start in range(0, len(words), block_length):
        part = words[start : start + block_length]
        if np.bitwise_and(part, mask, out=block[: len(part)]).max() == mask:
            return False
    return True
