"""What was collected -> a plan, kept while the structure is the same, and a snapshot to take by it.

The structure is compared on every save, part by part: a plan is never used for a state it was not made for. Copies of a segment's tensors are kept too, for each slot, since a
segment that is handed out again vouches for its tensors' memory.
"""

from __future__ import annotations

import threading
from collections.abc import Hashable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from operator import attrgetter
from typing import Any, Final, NamedTuple, Self

from ckpt.adapters.collect import Collected
from ckpt.adapters.layout import leaf_of, local, memories, signature
from ckpt.adapters.local_shards import LocalShards, Source
from ckpt.adapters.segments import Held, Segment
from ckpt.adapters.zero import keeper_of
from ckpt.config import Copies, SaveConfig
from ckpt.errors import UnsupportedValue
from ckpt.plan.copies import writers
from ckpt.plan.leaf import Leaf
from ckpt.plan.save import SPLIT_FROM_BYTES, SavePlan, plan_save
from ckpt.staging.copies import Copy
from ckpt.staging.image import Image, copyable
from ckpt.staging.slot import Slot
from ckpt.staging.snapshot import Batch, Check, Snapshot
from ckpt.storage.tiers import OpenTier

Part = Segment | Held

_SMALL_STATE_BYTES: Final = 512  # a step counter, and its entries in the header


class _Place(NamedTuple):
    """Where an item of the plan comes from: ``region`` of the memory of box ``piece`` of its leaf; None if it is all of it."""

    item: int
    piece: int
    region: tuple[slice, ...] | None


@dataclass(slots=True)
class Prepared:
    """A plan and the leaves it was made for.

    Attributes:
        by_leaf: For each leaf the plan's items of it.
    """

    leaves: tuple[Leaf, ...]
    plan: SavePlan
    by_leaf: tuple[tuple[_Place, ...], ...]
    images: dict[int, tuple[Image, dict[tuple[int, bool], tuple[Part, Batch]]]] = field(
        default_factory=dict[int, Any]
    )
    lock: threading.Lock = field(default_factory=threading.Lock)

    def warm(self, slots: Iterable[Slot], parts: Sequence[Part], *, overlap: bool) -> None:
        """Lay the plan over ``slots`` ahead, so that the first save need not. From any thread."""
        for slot in slots:
            with self.lock:
                self._lay(slot, parts, overlap)

    def snapshot(self, slot: Slot, parts: Sequence[Part], step: int, *, overlap: bool) -> Snapshot:
        """Sources matched with their places in ``slot``. Nothing is copied yet."""
        with self.lock:
            image, chosen = self._lay(slot, parts, overlap)
        return Snapshot(step, chosen, image.window())

    def _lay(self, slot: Slot, parts: Sequence[Part], overlap: bool) -> tuple[Image, list[Batch]]:
        image, batches = self.images.get(id(slot), (None, {}))
        if image is None or image.slot is not slot:
            image, batches = self.images[id(slot)] = Image(self.plan, self.leaves, slot), {}
        chosen: list[Batch] = []
        first = 0
        for index, part in enumerate(parts):
            known = batches.get((index, overlap))
            if known is None or known[0] is not part:
                known = (part, self._batch(image, part, first, overlap))
                if isinstance(part, Segment):  # a tensor alone may be a passing one: it is not kept alive
                    batches[(index, overlap)] = known
            chosen.append(known[1])
            first += len(part.held) if isinstance(part, Segment) else 1
        return image, chosen

    def _batch(self, image: Image, part: Part, first: int, overlap: bool) -> Batch:
        eager: list[Copy] = []
        late: list[Copy] = []
        checks: list[Check] = []
        for offset, held in enumerate(part.held if isinstance(part, Segment) else (part,)):
            leaf = self.leaves[first + offset]
            # an alias: `parameter.data = other` within the window changes what the parameter is, not what is copied
            parts = [memory.detach() for memory in memories(held.tensor, leaf.boxes)]
            # those that were made in inference mode have no version to watch
            is_late = overlap and held.late and not any(memory.is_inference() for memory in parts)
            for item, piece, region in self.by_leaf[first + offset]:
                memory = parts[piece]
                source = copyable(memory, leaf.dtype)
                source = source if region is None else source[region]
                address = source.data_ptr()
                (late if is_late else eager).extend(
                    Copy(held.name, source, view, memory, end, cut, address)
                    for view, end, cut in image.targets(item, flat=source.is_contiguous())
                )
            if len(leaf.replicas) > 1 and leaf.nbytes:
                boxes = ";".join(f"{box.offsets}{box.shape}" for box in leaf.boxes)
                checks.append(Check(leaf.name, boxes, tuple(parts), is_late))
        late.sort(key=attrgetter("end"))  # so that sorting all batches together is a merge
        return Batch(eager=tuple(eager), late=tuple(late), checks=tuple(checks))


class PlanCache:
    """The plan of the last structure seen.

    Threads: the training thread.
    """

    def __init__(
        self, rank: int, chunk_bytes: int, *, node_of: Sequence[int] = (), copies: Copies = "one"
    ) -> None:
        """``node_of``: of each rank, where nodes have tiers of their own."""
        self._rank, self._chunk_bytes, self._node_of = rank, chunk_bytes, node_of
        # what is small, such as counters and buffers, each node has anyway
        self._from_bytes = SPLIT_FROM_BYTES if copies == "one" else float("inf")
        self._known: list[Segment | Hashable] = []
        self._prepared: Prepared | None = None

    @classmethod
    def of(cls, rank: int, config: SaveConfig, tiers: Sequence[OpenTier]) -> Self:
        """For saves to ``tiers``."""
        node_of = next((tier.nodes.of for tier in tiers if tier.nodes), ())
        return cls(rank, config.chunk_bytes, node_of=node_of, copies=config.copies)

    def prepare(self, collected: Collected) -> Prepared:
        """The plan for what was collected: the last one if the structure is the same, else a new one.

        Raises:
            UnsupportedValue: A tensor that cannot be saved, with its name.
        """
        found = [part if isinstance(part, Segment) else _signature(part) for part in collected.parts]
        if self._prepared is None or not _same_structure(self._known, found):
            self._prepared = self._new(collected.held)
        self._known = found
        return self._prepared

    def forget(self) -> None:
        """Let go of slots and tensors."""
        self._prepared = None
        self._known = []

    def _new(self, held: Sequence[Held]) -> Prepared:
        names: set[str] = set()
        for item in held:
            if item.name in names:
                raise UnsupportedValue(item.name, "name that two values share", "rename one of them")
            if not _is_text(item.name):
                raise UnsupportedValue(item.name, "name that is no text", "rename it")
            names.add(item.name)
        leaves = tuple(self._leaf(item) for item in held)
        plan = plan_save(leaves, rank=self._rank, chunk_bytes=self._chunk_bytes)
        by_leaf: list[list[_Place]] = [[] for _ in leaves]
        for index, write in enumerate(plan.items):
            if write.nbytes:
                boxes = leaves[write.leaf].boxes
                piece = next(i for i, box in enumerate(boxes) if box.contains(write.box))
                whole = boxes[piece]
                region = None if write.box == whole else write.box.relative_to(whole).slices()
                by_leaf[write.leaf].append(_Place(index, piece, region))
        return Prepared(leaves=leaves, plan=plan, by_leaf=tuple(map(tuple, by_leaf)))

    def _leaf(self, held: Held) -> Leaf:
        leaf = leaf_of(held.name, held.tensor, held.replicas)
        node_of = self._node_of if leaf.nbytes < self._from_bytes else ()
        return replace(leaf, replicas=writers(leaf.replicas, self._rank, node_of))

    def growth(self, collected: Collected) -> int:
        """Bytes that this rank's image will grow by once its optimizers have stepped: a guess by what optimizers of the kind keep for a parameter."""
        shares = {id(held.tensor): len(self._leaf(held).replicas) or 1 for held in collected.held}
        return _growth(collected, shares)


def _same_structure(before: Sequence[Segment | Hashable], now: Sequence[Segment | Hashable]) -> bool:
    if len(before) == len(now) and all(
        one is two or one == two for one, two in zip(before, now, strict=True)
    ):
        return True
    return _flat(before) == _flat(now)


def _flat(parts: Sequence[Segment | Hashable]) -> list[Hashable]:
    found: list[Hashable] = []
    for part in parts:
        found += [_signature(held) for held in part.held] if isinstance(part, Segment) else [part]
    return found


def _signature(held: Held) -> Hashable:
    return (held.name, signature(held.tensor), held.replicas)


def _growth(collected: Collected, shares: Mapping[int, int]) -> int:
    growth = 0
    for optimizer in collected.optimizers:
        keeper = keeper_of("", optimizer)
        for group in optimizer.param_groups:
            copies = (
                (3 if group.get("amsgrad") else 2)
                if "betas" in group
                else 1
                if group.get("momentum", 1)
                else 0
            )
            for parameter in group["params"]:
                if keeper.keeps(parameter) and not keeper.state.get(parameter):
                    growth += copies * _nbytes(parameter) // shares.get(id(parameter), 1) + _SMALL_STATE_BYTES
    return growth


def _nbytes(parameter: Source) -> int:
    if isinstance(parameter, LocalShards):
        return sum(part.nbytes for part in parameter.tensors)
    return local(parameter).nbytes


def _is_text(name: str) -> bool:
    try:
        name.encode()
    except UnicodeEncodeError:  # a lone surrogate
        return False
    return True
